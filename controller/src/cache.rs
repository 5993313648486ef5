//! A watched kind in memory, with one secondary index. kube's own store has no index, and finding the Pods of one Sandbox among ten thousand by a scan, once per
//! reconcile, would cost more than everything else.
//!
//! What this process has written itself can be put in before the watch shows it ([`Cache::assume`]), so that the next pass needs no read to know it.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fmt,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use kube::{Resource, runtime::watcher::Event};
use tokio::sync::watch;

use crate::scope::{Scope, Seen};

/// Namespace (empty for cluster-scoped kinds) and name.
pub type Key = (String, String);

/// Objects of one kind as the watch last showed them. Clones share the content.
pub struct Cache<K> {
    content: Arc<RwLock<Content<K>>>,
    index_of: fn(&K) -> Option<String>,
    /// Takes away what is not kept.
    trim: fn(&mut K),
    ready: Arc<watch::Sender<bool>>,
}

struct Content<K> {
    objects: HashMap<Key, Arc<K>>,
    index: HashMap<Key, BTreeSet<String>>,
    /// resourceVersion of what was put in before the watch showed it.
    assumed: HashMap<Key, u64>,
    /// The lists that are being read, by namespace; each replaces its part of the content once it
    /// is complete.
    listing: HashMap<Option<Arc<str>>, HashMap<Key, Arc<K>>>,
    /// The namespaces that have been listed once.
    listed: HashSet<Arc<str>>,
    /// All of the kind has been listed at once.
    is_whole: bool,
}

impl<K> Clone for Cache<K> {
    fn clone(&self) -> Self {
        Self {
            content: Arc::clone(&self.content),
            index_of: self.index_of,
            trim: self.trim,
            ready: Arc::clone(&self.ready),
        }
    }
}

impl<K> fmt::Debug for Cache<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cache({} objects)", self.read().objects.len())
    }
}

impl<K> Cache<K> {
    /// An empty cache. `index_of` gives the index value of an object, such as the value of a label.
    pub fn new(index_of: fn(&K) -> Option<String>) -> Self {
        let content = Content {
            objects: HashMap::new(),
            index: HashMap::new(),
            assumed: HashMap::new(),
            listing: HashMap::new(),
            listed: HashSet::new(),
            is_whole: false,
        };
        Self {
            content: Arc::new(RwLock::new(content)),
            index_of,
            trim: |_| {},
            ready: Arc::new(watch::channel(false).0),
        }
    }

    /// The same, in which of each object only that is kept which `trim` leaves.
    pub fn keeping(self, trim: fn(&mut K)) -> Self {
        Self { trim, ..self }
    }

    /// The object of that name.
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        self.read()
            .objects
            .get(&(namespace.to_owned(), name.to_owned()))
            .cloned()
    }

    /// Objects of a namespace with this index value, ordered by name.
    pub fn indexed(&self, namespace: &str, value: &str) -> Vec<Arc<K>> {
        let content = self.read();
        let names = content.index.get(&(namespace.to_owned(), value.to_owned()));
        names
            .into_iter()
            .flatten()
            .filter_map(|name| {
                content
                    .objects
                    .get(&(namespace.to_owned(), name.clone()))
                    .cloned()
            })
            .collect()
    }

    /// All objects for which `wanted` holds, in no order.
    pub fn filtered(&self, wanted: impl Fn(&K) -> bool) -> Vec<Arc<K>> {
        let content = self.read();
        let all = content.objects.values();
        all.filter(|object| wanted(object)).cloned().collect()
    }

    /// Waits until the first list is complete.
    pub async fn wait_ready(&self) {
        let mut ready = self.ready.subscribe();
        // An error means that the sender is gone, and `self` holds it.
        let _ = ready.wait_for(|ready| *ready).await;
    }

    /// Whether the first list is complete.
    pub fn is_ready(&self) -> bool {
        *self.ready.borrow()
    }

    /// Whether the first list of a namespace is complete.
    pub fn is_listed(&self, namespace: &str) -> bool {
        let content = self.read();
        content.is_whole || content.listed.contains(namespace)
    }

    // A poisoned lock only says that a reader panicked; writers never leave the content half changed.
    fn read(&self) -> RwLockReadGuard<'_, Content<K>> {
        self.content.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Content<K>> {
        self.content.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What an event changed: an object before and after.
#[derive(Debug)]
pub struct Change<K> {
    pub before: Option<Arc<K>>,
    pub after: Option<Arc<K>>,
}

impl<K: Resource> Cache<K> {
    /// Takes an event of a watch of the whole kind in, and says what it changed: also what vanished
    /// while the watch was down.
    pub fn apply(&self, event: Event<K>) -> Vec<Change<K>> {
        let scope = Scope::default();
        self.apply_seen(Seen { scope, event })
    }

    /// As [`Self::apply`], of a watch that may show only a part of the kind.
    pub fn apply_seen(&self, seen: Seen<K>) -> Vec<Change<K>> {
        let Seen { scope, event } = seen;
        let event = self.trimmed(event);
        let mut content = self.write();
        match event {
            Event::Init => {
                content.listing.insert(scope.namespace, HashMap::new());
                Vec::new()
            }
            Event::InitApply(object) => {
                let key = key_of(&object);
                content
                    .listing
                    .entry(scope.namespace)
                    .or_default()
                    .insert(key, Arc::new(object));
                Vec::new()
            }
            Event::InitDone => {
                let listed = content.listing.remove(&scope.namespace);
                let changes = content.replace(&scope, listed.unwrap_or_default(), self.index_of);
                match scope.namespace {
                    Some(namespace) => {
                        content.listed.insert(namespace);
                    }
                    None => content.is_whole = true,
                }
                let is_whole = content.is_whole || content.listed.len() >= scope.parts;
                drop(content);
                if is_whole {
                    self.ready.send_replace(true);
                }
                changes
            }
            Event::Apply(object) => content.take_in(object, self.index_of).into_iter().collect(),
            Event::Delete(object) => {
                let key = key_of(&object);
                content.assumed.remove(&key);
                vec![content.put(key, None, self.index_of)]
            }
        }
    }

    fn trimmed(&self, mut event: Event<K>) -> Event<K> {
        if let Event::InitApply(object) | Event::Apply(object) | Event::Delete(object) = &mut event
        {
            (self.trim)(object);
        }
        event
    }

    /// Puts in what the apiserver answered to a write of this process, unless something newer is known. Until the watch has caught up with it, older events about the object
    /// are passed over. An object that is not there stays away: its deletion may have been seen already.
    pub fn assume(&self, mut object: K) -> Option<Change<K>> {
        (self.trim)(&mut object);
        let mut content = self.write();
        let key = key_of(&object);
        let version = version_of(&object)?;
        let known = content.objects.get(&key)?;
        if known.meta().uid != object.meta().uid || version_of(&**known)? >= version {
            return None;
        }
        content.assumed.insert(key.clone(), version);
        Some(content.put(key, Some(Arc::new(object)), self.index_of))
    }
}

/// Versions are compared only to tell which of two views of one object is the newer, which Kubernetes allows; one that is no number is not compared.
fn version_of<K: Resource>(object: &K) -> Option<u64> {
    object.meta().resource_version.as_ref()?.parse().ok()
}

impl<K: Resource> Content<K> {
    /// An event's object, unless this process has written a newer one.
    fn take_in(&mut self, object: K, index_of: fn(&K) -> Option<String>) -> Option<Change<K>> {
        let key = key_of(&object);
        if let Some(assumed) = self.assumed.get(&key) {
            if version_of(&object).is_some_and(|version| version < *assumed) {
                return None;
            }
            self.assumed.remove(&key);
        }
        Some(self.put(key, Some(Arc::new(object)), index_of))
    }
}

impl<K: Resource> Content<K> {
    fn put(
        &mut self,
        key: Key,
        after: Option<Arc<K>>,
        index_of: fn(&K) -> Option<String>,
    ) -> Change<K> {
        let before = self.objects.remove(&key);
        if let Some(value) = before.as_deref().and_then(index_of) {
            let entry = (key.0.clone(), value);
            if let Some(names) = self.index.get_mut(&entry) {
                names.remove(&key.1);
                if names.is_empty() {
                    self.index.remove(&entry);
                }
            }
        }
        if let Some(object) = &after {
            if let Some(value) = index_of(object) {
                self.index
                    .entry((key.0.clone(), value))
                    .or_default()
                    .insert(key.1.clone());
            }
            self.objects.insert(key, Arc::clone(object));
        }
        Change { before, after }
    }

    /// A list takes the place of the part of the content that it is of.
    fn replace(
        &mut self,
        scope: &Scope,
        listed: HashMap<Key, Arc<K>>,
        index_of: fn(&K) -> Option<String>,
    ) -> Vec<Change<K>> {
        let gone: Vec<Key> = self
            .objects
            .keys()
            .filter(|key| scope.has(&key.0) && !listed.contains_key(*key))
            .cloned()
            .collect();
        let mut changes: Vec<Change<K>> = gone
            .into_iter()
            .map(|key| self.put(key, None, index_of))
            .collect();
        // The list may be older than the last write of this process.
        let (assumed, others) = std::mem::take(&mut self.assumed)
            .into_iter()
            .partition::<HashMap<Key, u64>, _>(|(key, _)| scope.has(&key.0));
        self.assumed = others;
        for (key, object) in listed {
            match assumed.get(&key) {
                Some(version) if version_of(&*object).is_some_and(|listed| listed < *version) => {
                    self.assumed.insert(key, *version);
                }
                _ => changes.push(self.put(key, Some(object), index_of)),
            }
        }
        changes
    }
}

/// Namespace and name of an object.
pub fn key_of<K: Resource>(object: &K) -> Key {
    let meta = object.meta();
    (
        meta.namespace.clone().unwrap_or_default(),
        meta.name.clone().unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::ResourceExt;

    use super::*;

    fn map(name: &str, app: &str) -> ConfigMap {
        let mut map = ConfigMap::default();
        map.metadata.namespace = Some("ns".into());
        map.metadata.name = Some(name.into());
        map.labels_mut().insert("app".into(), app.into());
        map
    }

    fn cache() -> Cache<ConfigMap> {
        Cache::new(|map| map.labels().get("app").cloned())
    }

    fn names(cache: &Cache<ConfigMap>, app: &str) -> Vec<String> {
        cache
            .indexed("ns", app)
            .iter()
            .map(|map| map.name_any())
            .collect()
    }

    #[test]
    fn an_object_moves_in_the_index_with_its_label() {
        let cache = cache();
        cache.apply(Event::Apply(map("a", "x")));
        cache.apply(Event::Apply(map("b", "x")));
        assert_eq!(names(&cache, "x"), ["a", "b"]);
        cache.apply(Event::Apply(map("a", "y")));
        assert_eq!(
            (names(&cache, "x"), names(&cache, "y")),
            (vec!["b".into()], vec!["a".into()])
        );
        cache.apply(Event::Delete(map("a", "y")));
        assert!(names(&cache, "y").is_empty());
        assert!(cache.get("ns", "a").is_none());
    }

    fn versioned(name: &str, app: &str, version: &str) -> ConfigMap {
        let mut map = map(name, app);
        map.metadata.resource_version = Some(version.into());
        map
    }

    #[test]
    fn what_was_written_is_seen_at_once_and_older_events_do_not_undo_it() {
        let cache = cache();
        cache.apply(Event::Apply(versioned("a", "x", "5")));
        assert!(cache.assume(versioned("a", "y", "7")).is_some());
        assert_eq!(names(&cache, "y"), ["a"]);
        assert!(
            cache
                .apply(Event::Apply(versioned("a", "x", "6")))
                .is_empty()
        );
        cache.apply(Event::Init);
        cache.apply(Event::InitApply(versioned("a", "x", "6")));
        cache.apply(Event::InitDone);
        assert_eq!(names(&cache, "y"), ["a"], "an older list does not undo it");
        cache.apply(Event::Apply(versioned("a", "z", "8")));
        assert_eq!(names(&cache, "z"), ["a"]);
        // From here on the watch alone tells.
        cache.apply(Event::Apply(versioned("a", "x", "6")));
        assert_eq!(names(&cache, "x"), ["a"]);
    }

    #[test]
    fn nothing_is_assumed_that_is_older_or_that_is_gone() {
        let cache = cache();
        assert!(cache.assume(versioned("a", "x", "3")).is_none());
        cache.apply(Event::Apply(versioned("a", "x", "5")));
        assert!(cache.assume(versioned("a", "y", "5")).is_none());
        assert!(cache.assume(versioned("a", "y", "7")).is_some());
        cache.apply(Event::Delete(versioned("a", "y", "8")));
        assert!(cache.get("ns", "a").is_none());
    }

    #[test]
    fn a_list_of_one_namespace_leaves_the_others_and_the_first_of_each_is_waited_for() {
        let cache = cache();
        let namespaces: crate::scope::Namespaces = "a,b".parse().unwrap();
        let in_namespace = |namespace: &str| {
            let mut map = map("m", "x");
            map.metadata.namespace = Some(namespace.into());
            map
        };
        let list = |part: usize, objects: &[ConfigMap]| {
            let scope = &namespaces.scopes()[part];
            let objects = objects.iter().cloned().map(Event::InitApply);
            let events = [Event::Init].into_iter().chain(objects);
            let mut changes = Vec::new();
            for event in events.chain([Event::InitDone]) {
                let scope = scope.clone();
                changes.extend(cache.apply_seen(Seen { scope, event }));
            }
            changes.len()
        };
        assert_eq!(list(0, &[in_namespace("a")]), 1);
        assert!(!cache.is_ready(), "b may have any");
        assert_eq!(list(0, &[in_namespace("a")]), 1);
        assert!(!cache.is_ready(), "a again is not b");
        assert!(cache.is_listed("a") && !cache.is_listed("b"));
        assert_eq!(list(1, &[in_namespace("b")]), 1);
        assert!(cache.is_ready() && cache.get("a", "m").is_some());
        assert!(cache.is_listed("b") && !cache.is_listed("c"));
        assert_eq!(list(1, &[]), 1, "b's went");
        assert!(cache.get("b", "m").is_none() && cache.get("a", "m").is_some());
    }

    #[test]
    fn a_new_list_replaces_the_content_and_reports_what_vanished() {
        let cache = cache();
        cache.apply(Event::Apply(map("old", "x")));
        cache.apply(Event::Init);
        cache.apply(Event::InitApply(map("new", "x")));
        assert_eq!(
            names(&cache, "x"),
            ["old"],
            "the old content serves until the list is complete"
        );
        assert!(!cache.is_ready());
        let changes = cache.apply(Event::InitDone);
        assert!(cache.is_ready() && cache.is_listed("ns"));
        assert_eq!(names(&cache, "x"), ["new"]);
        let gone: Vec<String> = changes
            .iter()
            .filter(|change| change.after.is_none())
            .map(|change| change.before.as_ref().unwrap().name_any())
            .collect();
        assert_eq!(gone, ["old"]);
    }
}
