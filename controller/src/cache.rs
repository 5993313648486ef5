//! Cache of a watched kind, with one secondary index.
//!
//! kube's own store has no index. A scan for the Pods of one Sandbox among ten thousand, once per
//! reconcile, would cost more than everything else.
//!
//! [`Cache::assume`] stores the result of a write by this process before the watch shows it, so
//! that the next pass needs no read.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fmt,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use kube::{Resource, runtime::watcher::Event};
use tokio::sync::watch;

use crate::scope::{Scope, ScopedEvent};

/// Namespace (empty for cluster-scoped kinds) and name of an object.
pub type Key = (String, String);

/// Objects of one kind as the watch last showed them. Clones share the content.
pub struct Cache<K> {
    content: Arc<RwLock<Content<K>>>,
    index_of: fn(&K) -> Option<String>,
    /// Removes the fields that the cache does not keep.
    trim: fn(&mut K),
    ready: Arc<watch::Sender<bool>>,
}

struct Content<K> {
    objects: HashMap<Key, Arc<K>>,
    index: HashMap<Key, BTreeSet<String>>,
    /// resourceVersion of each object stored before the watch showed it.
    assumed: HashMap<Key, u64>,
    /// Lists in progress, by namespace. A complete list replaces its part of the content.
    listing: HashMap<Option<Arc<str>>, HashMap<Key, Arc<K>>>,
    /// Namespaces with at least one complete list.
    listed: HashSet<Arc<str>>,
    /// True once a list of the whole kind has completed.
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
    /// Returns an empty cache. `index_of` gives the index value of an object, such as the value of
    /// a label.
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

    /// Sets `trim`, which removes the fields of an object that the cache does not keep.
    pub fn keeping(self, trim: fn(&mut K)) -> Self {
        Self { trim, ..self }
    }

    /// Returns the object with that name.
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<K>> {
        self.read()
            .objects
            .get(&(namespace.to_owned(), name.to_owned()))
            .cloned()
    }

    /// Returns the objects of a namespace with this index value, ordered by name.
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

    /// Returns all objects for which `wanted` holds, in no order.
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

    /// Reports whether the first list is complete.
    pub fn is_ready(&self) -> bool {
        *self.ready.borrow()
    }

    /// Reports whether the first list of a namespace is complete.
    pub fn is_listed(&self, namespace: &str) -> bool {
        let content = self.read();
        content.is_whole || content.listed.contains(namespace)
    }

    // A lock is poisoned only by a reader's panic; writers never leave the content half changed.
    fn read(&self) -> RwLockReadGuard<'_, Content<K>> {
        self.content.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Content<K>> {
        self.content.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Change of an object by an event: the object before and after.
#[derive(Debug)]
pub struct Change<K> {
    pub before: Option<Arc<K>>,
    pub after: Option<Arc<K>>,
}

impl<K: Resource> Cache<K> {
    /// Applies an event of a watch of the whole kind and returns the changes, including deletions
    /// that happened while the watch was down.
    pub fn apply(&self, event: Event<K>) -> Vec<Change<K>> {
        let scope = Scope::default();
        self.apply_seen(ScopedEvent { scope, event })
    }

    /// Applies an event of a watch that may cover only a part of the kind, and returns the changes.
    pub fn apply_seen(&self, seen: ScopedEvent<K>) -> Vec<Change<K>> {
        let ScopedEvent { scope, event } = seen;
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
            Event::Apply(object) => content.store(object, self.index_of).into_iter().collect(),
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

    /// Stores the apiserver's answer to a write of this process, unless the cache has a newer
    /// version.
    ///
    /// Older events about the object are ignored until the watch has caught up. An object that is
    /// not in the cache is not added: its deletion may have been seen already.
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

/// Returns the resourceVersion as a number, or `None` if it is not one. Versions are only compared
/// for one object, which Kubernetes allows.
fn version_of<K: Resource>(object: &K) -> Option<u64> {
    object.meta().resource_version.as_ref()?.parse().ok()
}

impl<K: Resource> Content<K> {
    /// Stores an event's object, unless this process has written a newer version.
    fn store(&mut self, object: K, index_of: fn(&K) -> Option<String>) -> Option<Change<K>> {
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

    /// Replaces the part of the content that the list covers.
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

/// Returns namespace and name of an object.
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
    fn a_write_is_visible_at_once_and_older_events_do_not_undo_it() {
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
        // The watch has caught up: its events count again.
        cache.apply(Event::Apply(versioned("a", "x", "6")));
        assert_eq!(names(&cache, "x"), ["a"]);
    }

    #[test]
    fn an_older_or_deleted_object_is_not_assumed() {
        let cache = cache();
        assert!(cache.assume(versioned("a", "x", "3")).is_none());
        cache.apply(Event::Apply(versioned("a", "x", "5")));
        assert!(cache.assume(versioned("a", "y", "5")).is_none());
        assert!(cache.assume(versioned("a", "y", "7")).is_some());
        cache.apply(Event::Delete(versioned("a", "y", "8")));
        assert!(cache.get("ns", "a").is_none());
    }

    #[test]
    fn a_list_covers_one_namespace_and_readiness_needs_a_list_of_each() {
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
                changes.extend(cache.apply_seen(ScopedEvent { scope, event }));
            }
            changes.len()
        };
        assert_eq!(list(0, &[in_namespace("a")]), 1);
        assert!(!cache.is_ready(), "b has not been listed");
        assert_eq!(list(0, &[in_namespace("a")]), 1);
        assert!(!cache.is_ready(), "a second list of a does not stand for b");
        assert!(cache.is_listed("a") && !cache.is_listed("b"));
        assert_eq!(list(1, &[in_namespace("b")]), 1);
        assert!(cache.is_ready() && cache.get("a", "m").is_some());
        assert!(cache.is_listed("b") && !cache.is_listed("c"));
        assert_eq!(list(1, &[]), 1, "the object of b is gone");
        assert!(cache.get("b", "m").is_none() && cache.get("a", "m").is_some());
    }

    #[test]
    fn a_new_list_replaces_the_content_and_reports_deletions() {
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
