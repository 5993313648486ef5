//! Watch cache of Sandboxes and their Pods, joined by UID: the router's only source of addresses.

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use kube::runtime::watcher::Event;
use tokio::sync::watch;
use torpor_api::labels;

use crate::{
    address::AddressPolicy,
    watched::{WatchedPod, WatchedSandbox},
};

/// Sandbox with the Pod that receives its requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    pub uid: Arc<str>,
    /// resourceVersion of the Sandbox.
    pub version: Arc<str>,
    /// `operatingMode` is `Suspended`.
    pub suspended: bool,
    /// Requests may resume the Sandbox.
    pub resume: bool,
    /// The Sandbox is an unclaimed member of a warm pool.
    pub unclaimed: bool,
    /// Pod that is ready, is not being deleted, and has an address that the policy allows.
    pub pod: Option<PodAt>,
}

/// Pod with its address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodAt {
    pub uid: Arc<str>,
    pub address: IpAddr,
}

/// Watch cache. Clones share it.
#[derive(Clone, Debug)]
pub struct Directory {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    policy: AddressPolicy,
    content: RwLock<Content>,
    /// Senders for requests that wait for changes of a Sandbox. The lock is separate so that
    /// look-ups never wait for it.
    waiting: Mutex<HashMap<Key, watch::Sender<()>>>,
    listed: watch::Sender<Listed>,
}

/// Namespace and name of a Sandbox.
type Key = (String, String);

#[derive(Clone, Copy, Debug, Default)]
struct Listed {
    sandboxes: bool,
    pods: bool,
}

#[derive(Debug, Default)]
struct Content {
    /// Entries by namespace, then name: a look-up allocates nothing.
    entries: HashMap<String, HashMap<String, Entry>>,
    /// Addresses of the Pods in `entries` by Pod UID.
    addresses: HashMap<Arc<str>, IpAddr>,
    /// Sandboxes and UIDs of Pods that the current list has returned so far.
    listing_sandboxes: HashSet<Key>,
    listing_pods: HashSet<String>,
}

#[derive(Debug, Default)]
struct Entry {
    sandbox: Option<SandboxEntry>,
    /// One Pod, or two while one replaces the other.
    pods: Vec<PodEntry>,
}

#[derive(Debug)]
struct SandboxEntry {
    uid: Arc<str>,
    version: Arc<str>,
    suspended: bool,
    resume: bool,
    unclaimed: bool,
}

#[derive(Debug)]
struct PodEntry {
    at: PodAt,
    owner: String,
}

impl Directory {
    /// Returns an empty cache, which ignores Pods at addresses that `policy` does not allow.
    pub fn new(policy: AddressPolicy) -> Self {
        Self {
            shared: Arc::new(Shared {
                policy,
                content: RwLock::default(),
                waiting: Mutex::default(),
                listed: watch::Sender::default(),
            }),
        }
    }

    /// Returns the policy for addresses.
    pub fn policy(&self) -> AddressPolicy {
        self.shared.policy
    }

    /// Returns the Sandbox of that name.
    pub fn look_up(&self, namespace: &str, name: &str) -> Option<View> {
        let content = self.read();
        let entry = content.entries.get(namespace)?.get(name)?;
        let sandbox = entry.sandbox.as_ref()?;
        let pod = entry
            .pods
            .iter()
            .rev()
            .find(|pod| *pod.owner == *sandbox.uid);
        Some(View {
            uid: Arc::clone(&sandbox.uid),
            version: Arc::clone(&sandbox.version),
            suspended: sandbox.suspended,
            resume: sandbox.resume,
            unclaimed: sandbox.unclaimed,
            pod: pod.map(|pod| pod.at.clone()),
        })
    }

    /// Reports whether a Sandbox of that name exists and is not an unclaimed pool member.
    pub fn exists(&self, namespace: &str, name: &str) -> bool {
        self.look_up(namespace, name)
            .is_some_and(|view| !view.unclaimed)
    }

    /// Reports whether the namespace has any Sandbox.
    ///
    /// Only such names become labels of metrics, since clients choose the names they ask for.
    pub fn has_namespace(&self, namespace: &str) -> bool {
        self.read().entries.contains_key(namespace)
    }

    /// Reports whether the Pod still has the address.
    ///
    /// The address may have passed to another Pod since the request was routed.
    pub fn is_at(&self, pod_uid: &str, address: IpAddr) -> bool {
        self.read().addresses.get(pod_uid) == Some(&address)
    }

    /// Returns the changes of a Sandbox from now on.
    pub fn changes(&self, namespace: &str, name: &str) -> Changes {
        let key = (namespace.to_owned(), name.to_owned());
        let receiver = Some(self.waiting().entry(key.clone()).or_default().subscribe());
        Changes {
            directory: self.clone(),
            key,
            receiver,
        }
    }

    /// Waits until Sandboxes and Pods have been listed once.
    pub async fn wait_ready(&self) {
        let mut listed = self.shared.listed.subscribe();
        // `wait_for` fails only when the sender is dropped, and `self` holds the sender.
        let _ = listed
            .wait_for(|listed| listed.sandboxes && listed.pods)
            .await;
    }

    /// Reports whether Sandboxes and Pods have been listed once.
    pub fn is_ready(&self) -> bool {
        let listed = *self.shared.listed.borrow();
        listed.sandboxes && listed.pods
    }

    /// Applies a watch event of a Sandbox.
    pub fn apply_sandbox(&self, event: Event<WatchedSandbox>) {
        match event {
            Event::Init => self.write().listing_sandboxes.clear(),
            Event::InitApply(sandbox) => {
                if let Some(key) = self.put_sandbox(&sandbox) {
                    self.write().listing_sandboxes.insert(key);
                }
            }
            Event::Apply(sandbox) => {
                self.put_sandbox(&sandbox);
            }
            Event::Delete(sandbox) => {
                if let Some(key) = key_of(&sandbox) {
                    self.write().forget_sandbox(&key);
                    self.changed(&key);
                }
            }
            Event::InitDone => {
                let gone = self.write().forget_unlisted_sandboxes();
                gone.iter().for_each(|key| self.changed(key));
                self.shared
                    .listed
                    .send_modify(|listed| listed.sandboxes = true);
            }
        }
    }

    fn put_sandbox(&self, sandbox: &WatchedSandbox) -> Option<Key> {
        let key = key_of(sandbox)?;
        let metadata = &sandbox.metadata;
        let labels = metadata.labels.as_ref();
        let known = SandboxEntry {
            uid: metadata.uid.as_deref()?.into(),
            version: metadata
                .resource_version
                .as_deref()
                .unwrap_or_default()
                .into(),
            suspended: sandbox.suspended(),
            resume: sandbox.resume_on_request(),
            unclaimed: labels.is_some_and(|all| all.contains_key(labels::WARM_POOL_SANDBOX)),
        };
        self.write().entry(&key).sandbox = Some(known);
        self.changed(&key);
        Some(key)
    }

    /// Applies a watch event of a Pod.
    pub fn apply_pod(&self, event: Event<WatchedPod>) {
        match event {
            Event::Init => self.write().listing_pods.clear(),
            Event::InitApply(pod) => {
                self.put_pod(&pod);
                if let Some(uid) = pod.metadata.uid {
                    self.write().listing_pods.insert(uid);
                }
            }
            Event::Apply(pod) => self.put_pod(&pod),
            Event::Delete(pod) => self.replace_pod(&pod, None),
            Event::InitDone => {
                let changed = self.write().forget_unlisted_pods();
                changed.iter().for_each(|key| self.changed(key));
                self.shared.listed.send_modify(|listed| listed.pods = true);
            }
        }
    }

    fn put_pod(&self, pod: &WatchedPod) {
        let takes_requests = pod.ready() && pod.metadata.deletion_timestamp.is_none();
        let address = pod.address().filter(|_| takes_requests);
        if let Some(address) = address.filter(|address| !self.shared.policy.allows(*address)) {
            let (namespace, name) = (&pod.metadata.namespace, &pod.metadata.name);
            tracing::warn!(?namespace, ?name, %address, "ignored a Pod with a forbidden address");
            return self.replace_pod(pod, None);
        }
        self.replace_pod(pod, address);
    }

    fn replace_pod(&self, pod: &WatchedPod, address: Option<IpAddr>) {
        let (Some((name, owner)), Some(namespace), Some(uid)) = (
            pod.sandbox(),
            pod.metadata.namespace.as_deref(),
            pod.metadata.uid.as_deref(),
        ) else {
            return;
        };
        let key = (namespace.to_owned(), name.to_owned());
        let mut content = self.write();
        content.forget_pod(&key, uid);
        if let Some(address) = address {
            let uid: Arc<str> = uid.into();
            content.addresses.insert(Arc::clone(&uid), address);
            let at = PodAt { uid, address };
            let owner = owner.to_owned();
            content.entry(&key).pods.push(PodEntry { at, owner });
        }
        content.prune(&key);
        drop(content);
        self.changed(&key);
    }

    fn changed(&self, key: &Key) {
        if let Some(sender) = self.waiting().get(key) {
            sender.send_replace(());
        }
    }

    // No writer leaves a change incomplete, so that a poisoned lock still guards valid data.
    fn read(&self) -> RwLockReadGuard<'_, Content> {
        self.shared
            .content
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Content> {
        self.shared
            .content
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<Key, watch::Sender<()>>> {
        self.shared
            .waiting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Changes of one Sandbox.
#[derive(Debug)]
pub struct Changes {
    directory: Directory,
    key: Key,
    /// `None` only during drop.
    receiver: Option<watch::Receiver<()>>,
}

impl Changes {
    /// Waits for the next change since the last call.
    pub async fn next(&mut self) {
        if let Some(receiver) = &mut self.receiver {
            // The sender stays in the map while it has a receiver.
            let _ = receiver.changed().await;
        }
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        let mut waiting = self.directory.waiting();
        self.receiver = None;
        if waiting
            .get(&self.key)
            .is_some_and(|sender| sender.receiver_count() == 0)
        {
            waiting.remove(&self.key);
        }
    }
}

impl Content {
    fn entry(&mut self, (namespace, name): &Key) -> &mut Entry {
        let names = self.entries.entry(namespace.clone()).or_default();
        names.entry(name.clone()).or_default()
    }

    fn forget_sandbox(&mut self, key: &Key) {
        self.entry(key).sandbox = None;
        self.prune(key);
    }

    fn forget_pod(&mut self, key: &Key, uid: &str) {
        self.entry(key).pods.retain(|pod| *pod.at.uid != *uid);
        self.addresses.remove(uid);
    }

    /// Removes the entry if it holds neither a Sandbox nor a Pod.
    fn prune(&mut self, (namespace, name): &Key) {
        let Some(names) = self.entries.get_mut(namespace) else {
            return;
        };
        if names
            .get(name)
            .is_some_and(|entry| entry.sandbox.is_none() && entry.pods.is_empty())
        {
            names.remove(name);
        }
        if names.is_empty() {
            self.entries.remove(namespace);
        }
    }

    fn keys(&self) -> Vec<Key> {
        let keys = self.entries.iter().flat_map(|(namespace, names)| {
            names.keys().map(|name| (namespace.clone(), name.clone()))
        });
        keys.collect()
    }

    fn forget_unlisted_sandboxes(&mut self) -> Vec<Key> {
        let listed = std::mem::take(&mut self.listing_sandboxes);
        let mut gone = self.keys();
        gone.retain(|key| !listed.contains(key));
        gone.iter().for_each(|key| self.forget_sandbox(key));
        gone
    }

    fn forget_unlisted_pods(&mut self) -> Vec<Key> {
        let listed = std::mem::take(&mut self.listing_pods);
        let keys = self.keys();
        for key in &keys {
            self.entry(key)
                .pods
                .retain(|pod| listed.contains(&*pod.at.uid));
            self.prune(key);
        }
        self.addresses.retain(|uid, _| listed.contains(&**uid));
        keys
    }
}

fn key_of(sandbox: &WatchedSandbox) -> Option<Key> {
    let metadata = &sandbox.metadata;
    Some((metadata.namespace.clone()?, metadata.name.clone()?))
}

#[cfg(test)]
mod tests;
