//! An index of the cluster's SandboxSnapshots as the watch delivers them: by the Pod that they are
//! about, and by whether this node has to answer for them.
//!
//! Tenants make as many snapshots as their quota allows, and every agent holds all of the
//! cluster. A query for one Pod or for this node must not read all of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::watcher::Event;
use tokio::sync::watch;
use torpor_api::snapshot::{SandboxSnapshot, SnapshotReason};
use torpor_api::taker::TakenBy;
use torpor_api::{conditions, reasons};
use torpor_core::ids::{ImageId, Namespace, PodUid};

use super::references::{named_pod, sandbox_name};

/// `namespace/name`.
type Key = Arc<str>;
type Snapshots = BTreeMap<Key, Arc<SandboxSnapshot>>;
/// Namespace and name of a Sandbox.
type SandboxKey = (String, String);

/// All snapshots that the watch has delivered.
#[derive(Debug)]
pub(crate) struct SnapshotIndex {
    node_name: String,
    shown: RwLock<Index>,
    /// A list that is not complete yet. The watch begins with a list, also after an interruption.
    listing: RwLock<Option<Index>>,
    is_whole: watch::Sender<bool>,
    /// Number of events that the index has taken.
    events: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Index {
    all: HashMap<Key, Arc<SandboxSnapshot>>,
    by_pod: HashMap<PodUid, Snapshots>,
    /// The snapshots that name no Pod: they are about their Sandbox's current Pod.
    by_sandbox: HashMap<SandboxKey, Snapshots>,
    /// Pods for which this node has to answer even if it has nothing of them, with the number of
    /// snapshots that need the answer.
    to_answer: BTreeMap<PodUid, usize>,
    /// The snapshots whose images this node has to upload.
    to_upload: Snapshots,
    /// The snapshots whose images a Pod of this node takes, as the controller has recorded it.
    taken_here: BTreeMap<Key, (Arc<SandboxSnapshot>, PodUid)>,
}

impl SnapshotIndex {
    pub(crate) fn new(node_name: String) -> Self {
        Self {
            node_name,
            shown: RwLock::default(),
            listing: RwLock::default(),
            is_whole: watch::Sender::new(false),
            events: watch::Sender::new(0),
        }
    }

    /// Applies an event of the watch. Returns the snapshots that are new, changed or gone.
    pub(crate) fn take(&self, event: Event<SandboxSnapshot>) -> Vec<Arc<SandboxSnapshot>> {
        let changed = self.apply(event);
        if !changed.is_empty() {
            self.events.send_modify(|events| *events += 1);
        }
        changed
    }

    fn apply(&self, event: Event<SandboxSnapshot>) -> Vec<Arc<SandboxSnapshot>> {
        let mut listing = self.listing.write().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Init => {
                *listing = Some(Index::default());
                Vec::new()
            }
            Event::InitApply(snapshot) => {
                let snapshot = self.as_shown(snapshot);
                listing
                    .get_or_insert_default()
                    .put(snapshot, &self.node_name);
                Vec::new()
            }
            Event::InitDone => {
                let whole = listing.take().unwrap_or_default();
                let mut shown = self.shown.write().unwrap_or_else(PoisonError::into_inner);
                let before = std::mem::replace(&mut *shown, whole);
                let changed = shown.changed_since(&before);
                drop(shown);
                self.is_whole.send_replace(true);
                changed
            }
            Event::Apply(snapshot) => {
                let snapshot = Arc::new(snapshot);
                let mut shown = self.shown.write().unwrap_or_else(PoisonError::into_inner);
                shown.put(snapshot.clone(), &self.node_name);
                vec![snapshot]
            }
            Event::Delete(snapshot) => {
                let mut shown = self.shown.write().unwrap_or_else(PoisonError::into_inner);
                shown.remove(&key(&snapshot), &self.node_name);
                vec![Arc::new(snapshot)]
            }
        }
    }

    /// Returns the object that the index holds already if the listed snapshot is unchanged.
    fn as_shown(&self, listed: SandboxSnapshot) -> Arc<SandboxSnapshot> {
        let shown = self.shown();
        let before = shown.all.get(&key(&listed));
        let same = before.filter(|before| is_same(before, &listed));
        same.cloned().unwrap_or_else(|| Arc::new(listed))
    }

    /// Waits until the first list is complete.
    pub(crate) async fn wait_until_whole(&self) {
        // The sender is this struct's own.
        let _ = self.is_whole.subscribe().wait_for(|whole| *whole).await;
    }

    /// Returns the snapshots of the Pod's own namespace that name the Pod. A snapshot that
    /// names another node is about no Pod of this node.
    ///
    /// A user with the right to write into one namespace gets no right over the Pods of another,
    /// even if a snapshot names their UIDs. `namespace`: the Pod's; none if neither this node nor
    /// the API has it, then snapshots of all namespaces count.
    pub(crate) fn of_pod(
        &self,
        pod: &PodUid,
        namespace: Option<&str>,
    ) -> Vec<Arc<SandboxSnapshot>> {
        let shown = self.shown();
        let named = shown.by_pod.get(pod).into_iter().flat_map(BTreeMap::values);
        let is_own = |snapshot: &&Arc<SandboxSnapshot>| {
            let of_namespace =
                namespace.is_none_or(|own| snapshot.namespace().as_deref() == Some(own));
            of_namespace && may_be_of_node(snapshot, &self.node_name)
        };
        named.filter(is_own).cloned().collect()
    }

    /// Returns the snapshots that name only the Sandbox that controls the Pod.
    pub(crate) fn of_sandbox_of(&self, pod: &Pod) -> Vec<Arc<SandboxSnapshot>> {
        let key = pod.namespace().zip(sandbox_name(pod).map(str::to_owned));
        let shown = self.shown();
        let unnamed = key.and_then(|key| shown.by_sandbox.get(&key));
        let may_be = |snapshot: &&Arc<SandboxSnapshot>| may_be_of_node(snapshot, &self.node_name);
        let unnamed = unnamed.into_iter().flat_map(BTreeMap::values);
        unnamed.filter(may_be).cloned().collect()
    }

    /// Returns the Pods for which this node has to answer even if it has nothing of
    /// them: a snapshot names the node and is not answered yet, or is being deleted.
    pub(crate) fn to_answer(&self) -> BTreeSet<PodUid> {
        self.shown().to_answer.keys().cloned().collect()
    }

    pub(crate) fn is_to_answer(&self, pod: &PodUid) -> bool {
        self.shown().to_answer.contains_key(pod)
    }

    /// Returns the snapshots whose images this node has to upload: committed here, with a
    /// SnapshotClass, not being deleted, and not uploaded yet. The image of a suspend must not be
    /// consumed; that of a Manual snapshot may be.
    pub(crate) fn to_upload(&self) -> Vec<Arc<SandboxSnapshot>> {
        self.shown().to_upload.values().cloned().collect()
    }

    /// Returns the bytes of the images that a snapshot's namespace has in the repository of its
    /// SnapshotClass, without that snapshot's own. An image of several snapshots counts once.
    pub(crate) fn uploaded_bytes(&self, of: &SandboxSnapshot) -> u64 {
        let shown = self.shown();
        let image = |snapshot: &SandboxSnapshot| snapshot.status.as_ref()?.image_id.clone();
        let own = image(of);
        let others = shown.all.values().filter(|other| {
            other.metadata.namespace == of.metadata.namespace
                && other.spec.snapshot_class_name == of.spec.snapshot_class_name
                && other.is_uploaded()
        });
        let sizes: BTreeMap<_, _> = others
            .filter_map(|other| {
                let size = other.status.as_ref()?.size_bytes.unwrap_or_default();
                Some((image(other)?, u64::try_from(size).unwrap_or_default()))
            })
            .filter(|(image, _)| Some(image) != own.as_ref())
            .collect();
        sizes.values().sum()
    }

    /// Returns the images that Pods of this node take, as the controller has recorded it: each with
    /// its namespace and the Pod.
    pub(crate) fn taken_here(&self) -> Vec<(Namespace, ImageId, PodUid)> {
        let shown = self.shown();
        let taken = shown.taken_here.values().filter_map(|(snapshot, pod)| {
            let status = snapshot.status.as_ref()?;
            let image = ImageId::parse(status.image_id.as_deref()?).ok()?;
            let namespace = Namespace::new(snapshot.namespace()?).ok()?;
            Some((namespace, image, pod.clone()))
        });
        taken.collect()
    }

    /// Returns the snapshot as the watch has shown it last, if it is still the same object.
    pub(crate) fn latest(&self, of: &SandboxSnapshot) -> Option<Arc<SandboxSnapshot>> {
        let found = self.shown().all.get(&key(of)).cloned();
        found.filter(|found| found.uid() == of.uid())
    }

    /// Returns whether a snapshot of the namespace names the image in its status.
    pub(crate) fn is_named(&self, namespace: &str, image: &ImageId) -> bool {
        let id = image.to_string();
        let names = |snapshot: &&Arc<SandboxSnapshot>| {
            let status = snapshot.status.as_ref();
            snapshot.namespace().as_deref() == Some(namespace)
                && status.and_then(|status| status.image_id.as_ref()) == Some(&id)
        };
        let shown = self.shown();
        let of_pod = shown.by_pod.get(image.pod());
        of_pod.is_some_and(|snapshots| snapshots.values().any(|one| names(&one)))
    }

    /// Returns a receiver that changes with every event.
    pub(crate) fn events(&self) -> watch::Receiver<u64> {
        self.events.subscribe()
    }

    fn shown(&self) -> RwLockReadGuard<'_, Index> {
        self.shown.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Index {
    fn put(&mut self, snapshot: Arc<SandboxSnapshot>, node: &str) {
        let key = key(&snapshot);
        self.remove(&key, node);
        if is_to_upload(&snapshot, node) {
            self.to_upload.insert(key.clone(), snapshot.clone());
        }
        if let Some(pod) = taker_of_node(&snapshot, node) {
            let taken = (snapshot.clone(), pod);
            self.taken_here.insert(key.clone(), taken);
        }
        if let Some(pod) = named_pod(&snapshot) {
            if is_to_answer(&snapshot, node) {
                *self.to_answer.entry(pod.clone()).or_default() += 1;
            }
            let of_pod = self.by_pod.entry(pod).or_default();
            of_pod.insert(key.clone(), snapshot.clone());
        } else if let Some(sandbox) = sandbox_key(&snapshot) {
            let of_sandbox = self.by_sandbox.entry(sandbox).or_default();
            of_sandbox.insert(key.clone(), snapshot.clone());
        }
        self.all.insert(key, snapshot);
    }

    fn remove(&mut self, key: &Key, node: &str) {
        let Some(snapshot) = self.all.remove(key) else {
            return;
        };
        self.to_upload.remove(key);
        self.taken_here.remove(key);
        if let Some(pod) = named_pod(&snapshot) {
            if is_to_answer(&snapshot, node)
                && let Some(count) = self.to_answer.get_mut(&pod)
            {
                *count -= 1;
                if *count == 0 {
                    self.to_answer.remove(&pod);
                }
            }
            take_out(&mut self.by_pod, &pod, key);
        } else if let Some(sandbox) = sandbox_key(&snapshot) {
            take_out(&mut self.by_sandbox, &sandbox, key);
        }
    }

    /// Returns the snapshots that are new, have changed, or are gone since `before`.
    fn changed_since(&self, before: &Index) -> Vec<Arc<SandboxSnapshot>> {
        let is_new = |(key, snapshot): &(&Key, &Arc<SandboxSnapshot>)| {
            let was = before.all.get(*key);
            was.is_none_or(|was| !Arc::ptr_eq(was, snapshot))
        };
        let is_gone = |(key, _): &(&Key, &Arc<SandboxSnapshot>)| !self.all.contains_key(*key);
        let new = self.all.iter().filter(is_new);
        let gone = before.all.iter().filter(is_gone);
        new.chain(gone)
            .map(|(_, snapshot)| snapshot.clone())
            .collect()
    }
}

/// Removes the snapshot from its owner's, and the owner if none is left.
fn take_out<K: std::hash::Hash + Eq>(of: &mut HashMap<K, Snapshots>, owner: &K, key: &Key) {
    if let Some(snapshots) = of.get_mut(owner) {
        snapshots.remove(key);
        if snapshots.is_empty() {
            of.remove(owner);
        }
    }
}

fn key(snapshot: &SandboxSnapshot) -> Key {
    let namespace = snapshot.namespace().unwrap_or_default();
    format!("{namespace}/{}", snapshot.name_any()).into()
}

fn sandbox_key(snapshot: &SandboxSnapshot) -> Option<SandboxKey> {
    Some((snapshot.namespace()?, snapshot.spec.sandbox_name.clone()))
}

fn is_same(before: &SandboxSnapshot, listed: &SandboxSnapshot) -> bool {
    let version = before.resource_version();
    version.is_some() && version == listed.resource_version() && before.uid() == listed.uid()
}

/// Returns whether the snapshot may be about a Pod of this node: its spec names this node
/// or none. The spec is immutable, while an agent of a compromised node may write a status. An
/// archive is about no Pod: its image is in a repository only.
pub(crate) fn may_be_of_node(snapshot: &SandboxSnapshot, node: &str) -> bool {
    let named = snapshot.spec.node_name.as_deref();
    !snapshot.is_archive() && named.is_none_or(|named| named == node)
}

/// Returns the Pod that takes the snapshot's image, if it is a Pod of this node and the image is of
/// another node.
fn taker_of_node(snapshot: &SandboxSnapshot, node: &str) -> Option<PodUid> {
    let status = snapshot.status.as_ref()?;
    match TakenBy::of(snapshot) {
        TakenBy::Pod(taker)
            if taker.node_name == node && status.node_name.as_deref() != Some(node) =>
        {
            PodUid::new(taker.uid).ok()
        }
        TakenBy::Nobody | TakenBy::Unknown | TakenBy::Pod(_) => None,
    }
}

fn is_to_upload(snapshot: &SandboxSnapshot, node: &str) -> bool {
    let status = snapshot.status.as_ref();
    // Its sandbox runs on at once; copies and rollbacks ask for the image by name.
    let is_kept_by_name = snapshot.spec.reason == SnapshotReason::Manual;
    snapshot.spec.snapshot_class_name.is_some()
        && may_be_of_node(snapshot, node)
        && status.and_then(|status| status.node_name.as_deref()) == Some(node)
        && snapshot.metadata.deletion_timestamp.is_none()
        && snapshot.is_adopted()
        && snapshot.is_committed()
        && (!snapshot.is_consumed() || is_kept_by_name)
        && !snapshot.is_uploaded()
}

/// Returns whether this node has to answer for a snapshot even if it has nothing of its Pod.
fn is_to_answer(snapshot: &SandboxSnapshot, node: &str) -> bool {
    let status = snapshot.status.as_ref();
    let by_status = status.and_then(|status| status.node_name.as_deref()) == Some(node);
    let by_spec = snapshot.spec.node_name.as_deref() == Some(node);
    if !may_be_of_node(snapshot, node) || !(by_status || by_spec) {
        return false;
    }
    match (
        snapshot.metadata.deletion_timestamp.is_some(),
        snapshot.is_adopted(),
    ) {
        // The finalizer has to be removed.
        (true, adopted) => adopted,
        (false, true) => !is_answered(snapshot),
        (false, false) => by_spec,
    }
}

/// Returns whether the snapshot has the final status that its Pod left no memory.
fn is_answered(snapshot: &SandboxSnapshot) -> bool {
    let committed = conditions::find(snapshot.conditions(), conditions::COMMITTED);
    committed.is_some_and(|found| found.reason == reasons::snapshot::SANDBOX_NOT_FOUND)
}

#[cfg(test)]
#[path = "snapshot_index/tests.rs"] // examples/snapshots.rs reads this file as another module
mod tests;
