//! Watches: one per kind, each into a cache; each event queues the Sandboxes that it concerns.

use std::{sync::Arc, time::Duration};

use k8s_openapi::{
    api::{
        core::v1::{PersistentVolumeClaim, Pod, Service},
        networking::v1::NetworkPolicy,
        node::v1::RuntimeClass,
    },
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use kube::{Resource, ResourceExt};
use tokio::task::JoinSet;
use torpor_api::{
    OperatingMode, PodSnapshot, PodSnapshotManualTrigger, Sandbox, SandboxClaim, SandboxNode,
    SandboxSnapshot, SandboxTemplate, SandboxWarmPool, SnapshotClass, SnapshotReason, annotations,
    conditions, labels, node::is_silence, reasons::restored,
};

pub use self::trim::{trim_node, trim_pod, trim_snapshot, trim_staged};
use self::{
    follow::{
        WatchSource, follow, follow_guarded, follow_of_cluster, in_pages, in_small_pages, unguarded,
    },
    trim::{trim, trim_claim, trim_sandbox, trim_service},
};
use crate::{
    cache::{Cache, Change, Key, key_of},
    context::Context,
    golden, outline,
    queue::{Lane, Queue},
    retention, sandbox, saved_pod,
    settings::Settings,
    staging,
};

pub mod extensions;
mod follow;
mod pod_snapshots;
mod trim;

/// Time that a controller confined to namespaces waits at its start for namespaces that cannot be
/// listed.
const LIST_TIMEOUT: Duration = Duration::from_secs(2);

/// Caches of all watched kinds. Large objects are kept as outlines ([`outline`]).
#[derive(Clone, Debug)]
pub struct Caches {
    /// Indexed by the UID of the controller; see [`extensions::sandbox_index`].
    pub sandboxes: Cache<Sandbox>,
    pub pods: Cache<Pod>,
    /// Pods that stage images. Indexed by the name hash of their template.
    pub staged: Cache<Pod>,
    pub volume_claims: Cache<PersistentVolumeClaim>,
    pub services: Cache<Service>,
    pub snapshots: Cache<SandboxSnapshot>,
    pub nodes: Cache<SandboxNode>,
    pub runtime_classes: Cache<RuntimeClass>,
    pub snapshot_classes: Cache<SnapshotClass>,
    /// Indexed by the name of their pool.
    pub claims: Cache<SandboxClaim>,
    /// Indexed by the name of their template.
    pub pools: Cache<SandboxWarmPool>,
    pub templates: Cache<SandboxTemplate>,
    pub policies: Cache<NetworkPolicy>,
    /// Empty if the kind is not served, as `pod_snapshots`.
    pub triggers: Cache<PodSnapshotManualTrigger>,
    /// Indexed by the name hash of their Sandbox.
    pub pod_snapshots: Cache<PodSnapshot>,
}

impl Default for Caches {
    fn default() -> Self {
        Self {
            sandboxes: Cache::new(extensions::sandbox_index).keeping(outline::of_sandbox),
            pods: Cache::new(|pod| pod.labels().get(labels::SANDBOX_NAME_HASH).cloned()),
            staged: Cache::new(staging::index),
            volume_claims: Cache::new(|_| None),
            services: Cache::new(|_| None),
            snapshots: Cache::new(golden::snapshot_index),
            nodes: Cache::new(|_| None),
            runtime_classes: Cache::new(|_| None),
            snapshot_classes: Cache::new(|_| None),
            claims: Cache::new(|claim: &SandboxClaim| Some(claim.spec.warm_pool_ref.name.clone()))
                .keeping(outline::of_claim),
            pools: Cache::new(|pool| Some(pool.spec.sandbox_template_ref.name.clone())),
            templates: Cache::new(|_| None).keeping(outline::of_template),
            policies: Cache::new(|_| None).keeping(outline::of_policy),
            triggers: Cache::new(|_| None),
            pod_snapshots: Cache::new(|one| one.labels().get(labels::SANDBOX_NAME_HASH).cloned()),
        }
    }
}

impl Caches {
    /// Waits until each kind has been listed once; before, absence from a cache proves nothing. A
    /// namespace that cannot be listed delays no other: see [`Caches::knows`].
    pub async fn wait_ready(&self, settings: &Settings) {
        tokio::join!(
            self.nodes.wait_ready(),
            self.runtime_classes.wait_ready(),
            self.snapshot_classes.wait_ready(),
        );
        let all = self.wait_whole(settings);
        if settings.namespaces.is_cluster() {
            all.await;
        } else {
            drop(tokio::time::timeout(LIST_TIMEOUT, all).await);
        }
    }

    /// Waits for the namespaced kinds. Those of the extensions are watched only when they are
    /// reconciled.
    async fn wait_whole(&self, settings: &Settings) {
        tokio::join!(
            self.sandboxes.wait_ready(),
            self.pods.wait_ready(),
            self.volume_claims.wait_ready(),
            self.services.wait_ready(),
            self.snapshots.wait_ready(),
            self.pod_snapshots.wait_ready(),
        );
        if settings.extensions {
            tokio::join!(
                self.claims.wait_ready(),
                self.pools.wait_ready(),
                self.templates.wait_ready(),
                self.staged.wait_ready(),
            );
        }
        if settings.watches_policies() {
            self.policies.wait_ready().await;
        }
    }

    /// Reports whether each kind of a namespace has been listed once.
    pub fn knows(&self, namespace: &str, settings: &Settings) -> bool {
        settings.namespaces.is_cluster() || self.unlisted(namespace, settings).is_empty()
    }

    /// Returns the kinds of a namespace that have not been listed yet.
    pub fn unlisted(&self, namespace: &str, settings: &Settings) -> Vec<&'static str> {
        let (extensions, policies) = (settings.extensions, settings.watches_policies());
        let kinds = [
            ("sandboxes", true, self.sandboxes.is_listed(namespace)),
            ("pods", true, self.pods.is_listed(namespace)),
            (
                "persistentvolumeclaims",
                true,
                self.volume_claims.is_listed(namespace),
            ),
            ("services", true, self.services.is_listed(namespace)),
            (
                "sandboxsnapshots",
                true,
                self.snapshots.is_listed(namespace),
            ),
            (
                "podsnapshots",
                true,
                self.pod_snapshots.is_listed(namespace),
            ),
            (
                "sandboxclaims",
                extensions,
                self.claims.is_listed(namespace),
            ),
            (
                "sandboxwarmpools",
                extensions,
                self.pools.is_listed(namespace),
            ),
            (
                "sandboxtemplates",
                extensions,
                self.templates.is_listed(namespace),
            ),
            (
                "networkpolicies",
                policies,
                self.policies.is_listed(namespace),
            ),
        ];
        let unlisted = kinds
            .into_iter()
            .filter(|(_, watched, listed)| *watched && !listed);
        unlisted.map(|(kind, ..)| kind).collect()
    }
}

/// Queues of objects that wait for a pass, by kind.
#[derive(Debug, Default)]
pub struct Queues {
    pub sandboxes: Queue,
    pub snapshots: Queue,
    pub claims: Queue,
    pub pools: Queue,
    pub templates: Queue,
    pub triggers: Queue,
    pub pod_snapshots: Queue,
    /// Sandboxes whose snapshots may have to be deleted.
    pub retention: Queue,
}

/// Starts all watches. They end when `tasks` is dropped or aborted.
pub fn start(context: &Arc<Context>, tasks: &mut JoinSet<()>) {
    let source = WatchSource::of(context);
    start_sandboxes(context, tasks);
    start_dependents(context, tasks);
    let shared = Arc::clone(context);
    tasks.spawn(follow_of_cluster(source.clone(), trim_node, move |event| {
        for change in shared.caches.nodes.apply_seen(event) {
            golden::node_changed(&shared, &change);
            staging::node_changed(&shared, &change);
            waiting_for_node(&change, &shared.caches)
                .into_iter()
                .for_each(|key| shared.queues.sandboxes.add(key));
        }
    }));
    let shared = Arc::clone(context);
    tasks.spawn(follow_of_cluster(source.clone(), trim, move |event| {
        shared.caches.runtime_classes.apply_seen(event);
    }));
    let shared = Arc::clone(context);
    tasks.spawn(follow_of_cluster(source, trim, move |event| {
        for change in shared.caches.snapshot_classes.apply_seen(event) {
            for key in naming_class(&change, &shared.caches.sandboxes) {
                shared.queues.retention.add(key.clone());
                shared.queues.sandboxes.add(key);
            }
        }
    }));
    if context.settings.extensions {
        extensions::start(context, tasks);
    }
    if context.settings.watches_policies() {
        extensions::start_policies(context, tasks);
    }
    pod_snapshots::start(context, tasks);
}

fn start_sandboxes(context: &Arc<Context>, tasks: &mut JoinSet<()>) {
    let shared = Arc::clone(context);
    tasks.spawn(follow_guarded(
        WatchSource::of(context),
        in_small_pages(),
        trim_sandbox,
        move |event| {
            for change in shared.caches.sandboxes.apply_seen(event) {
                sandbox_changed(&shared, &change);
            }
        },
    ));
    let shared = Arc::clone(context);
    tasks.spawn(follow_guarded(
        WatchSource::of(context),
        in_pages(),
        trim_snapshot,
        move |event| {
            for change in shared.caches.snapshots.apply_seen(event) {
                let Some(snapshot) = change.after.as_ref().or(change.before.as_ref()) else {
                    continue;
                };
                shared.queues.snapshots.add(key_of(&**snapshot));
                golden::changed(&shared, &**snapshot);
                pod_snapshots::image_changed(&shared, snapshot);
                let (namespace, _) = key_of(&**snapshot);
                let sandbox = snapshot.spec.sandbox_name.clone();
                shared.queues.retention.add((namespace, sandbox));
                named_by(snapshot, &shared.caches.sandboxes)
                    .into_iter()
                    .for_each(|key| shared.queues.sandboxes.add(key));
            }
        },
    ));
}

/// Queues the objects that a change of a Sandbox concerns.
pub fn sandbox_changed(context: &Context, change: &Change<Sandbox>) {
    let Some(sandbox) = change.after.as_ref().or(change.before.as_ref()) else {
        return;
    };
    if change.after.is_none() {
        context.metrics.forget(&sandbox.uid().unwrap_or_default());
    }
    let key = key_of(&**sandbox);
    // A snapshot may be older than its Sandbox.
    for snapshot in context.caches.snapshots.indexed(&key.0, &key.1) {
        if !snapshot.is_committed() {
            context.queues.snapshots.add(key_of(&*snapshot));
        }
    }
    let lane = sandbox::lane(sandbox, context);
    if of_retention(&change.before) != of_retention(&change.after) {
        context.queues.retention.add(key.clone());
        for sandbox in [&change.before, &change.after].into_iter().flatten() {
            copied_from(context, &key.0, retention::restored_from(sandbox));
        }
    }
    context.queues.sandboxes.add_in(lane, key);
    if context.settings.extensions {
        extensions::sandbox_changed(context, change);
    }
}

/// Returns the facts that decide about the deletion of snapshots: the class that a Sandbox names,
/// and the snapshot that it is a copy of.
fn of_retention(sandbox: &Option<Arc<Sandbox>>) -> Option<[Option<String>; 2]> {
    let sandbox = sandbox.as_ref()?;
    let own = sandbox.annotations().get(annotations::SNAPSHOT_CLASS);
    let of_template = || {
        let all = sandbox.spec.pod_template.annotations()?;
        all.get(annotations::SNAPSHOT_CLASS)
    };
    let class = own.or_else(of_template).cloned();
    Some([class, retention::restored_from(sandbox).map(str::to_owned)])
}

/// Queues the Sandbox of a snapshot that has become the source of a copy, or is one no longer.
fn copied_from(context: &Context, namespace: &str, snapshot: Option<&str>) {
    let found = snapshot.and_then(|name| context.caches.snapshots.get(namespace, name));
    if let Some(found) = found {
        let sandbox = found.spec.sandbox_name.clone();
        context
            .queues
            .retention
            .add((namespace.to_owned(), sandbox));
    }
}

/// Stores the apiserver's answer to a write of a Sandbox in the cache and queues its owner. The
/// Sandbox's own pass is left to the watch.
pub fn sandbox_written(context: &Context, sandbox: Sandbox) {
    if let Some(change) = context.caches.sandboxes.assume(sandbox)
        && context.settings.extensions
    {
        extensions::sandbox_changed(context, &change);
    }
}

/// Stores the apiserver's answer to a write of a Pod in the cache.
pub fn pod_written(context: &Context, mut pod: Pod) {
    trim_pod(&mut pod);
    context.caches.pods.assume(pod);
}

/// Queues a Sandbox after a change of one of its objects.
fn queue_sandbox(context: &Context, key: Key) {
    let found = context.caches.sandboxes.get(&key.0, &key.1);
    let lane = found.map_or(Lane::Awaited, |found| sandbox::lane(&found, context));
    context.queues.sandboxes.add_in(lane, key);
}

/// Starts the watches of the objects that belong to Sandboxes.
fn start_dependents(context: &Arc<Context>, tasks: &mut JoinSet<()>) {
    let source = WatchSource::of(context);
    let hashed = in_pages().labels(labels::SANDBOX_NAME_HASH);
    let shared = Arc::clone(context);
    tasks.spawn(follow(
        source.clone(),
        hashed.clone(),
        trim_pod,
        move |event| {
            for change in shared.caches.pods.apply_seen(event) {
                let owners = owners(&change);
                owners
                    .into_iter()
                    .for_each(|key| queue_sandbox(&shared, key));
            }
        },
    ));
    let shared = Arc::clone(context);
    // All Services, not only labelled ones: a foreign Service with a Sandbox's name is then seen
    // before the Sandbox's own is created. Where only labelled ones are watched, the create fails
    // because the name is taken.
    let services = if context.settings.cache_label_selectors {
        hashed.clone()
    } else {
        in_pages()
    };
    tasks.spawn(follow(
        source.clone(),
        services,
        trim_service,
        move |event| {
            shared
                .caches
                .services
                .apply_seen(event)
                .iter()
                .flat_map(owners)
                .for_each(|key| shared.queues.sandboxes.add(key));
        },
    ));
    // Volume claims queue nothing, as upstream: they are created before the Pod and not checked
    // again.
    let shared = Arc::clone(context);
    tasks.spawn(follow(source, hashed, trim_claim, move |event| {
        shared.caches.volume_claims.apply_seen(event);
    }));
}

/// Returns the Sandbox that controls an object, in any version.
pub(crate) fn sandbox_of<K: ResourceExt>(object: &K) -> Option<&OwnerReference> {
    object.owner_references().iter().find(|owner| {
        owner.controller == Some(true)
            && owner.kind == Sandbox::kind(&())
            && owner.api_version.starts_with("agents.x-k8s.io/")
    })
}

/// Returns the Sandboxes that control an object before and after the change.
fn owners<K: ResourceExt>(change: &Change<K>) -> Vec<Key> {
    let mut found = Vec::new();
    for object in [&change.before, &change.after].into_iter().flatten() {
        let namespace = object.namespace().unwrap_or_default();
        if let Some(owner) = sandbox_of(&**object) {
            let sandbox = (namespace, owner.name.clone());
            if !found.contains(&sandbox) {
                found.push(sandbox);
            }
        }
    }
    found
}

/// Returns the Sandbox of a snapshot, and those that start as a copy of it.
fn named_by(snapshot: &SandboxSnapshot, sandboxes: &Cache<Sandbox>) -> Vec<Key> {
    let (namespace, name) = key_of(snapshot);
    let copies = sandboxes.filtered(|sandbox| {
        sandbox.namespace().as_deref() == Some(&namespace)
            && names(sandbox, annotations::RESTORE_FROM, &name)
    });
    let own = (namespace, snapshot.spec.sandbox_name.clone());
    std::iter::once(own)
        .chain(copies.iter().map(|sandbox| key_of(&**sandbox)))
        .collect()
}

/// Reports whether an annotation of the Sandbox or of its pod template has this value.
fn names(sandbox: &Sandbox, annotation: &str, value: &str) -> bool {
    [
        sandbox.metadata.annotations.as_ref(),
        sandbox.spec.pod_template.annotations(),
    ]
    .into_iter()
    .flatten()
    .any(|all| all.get(annotation).is_some_and(|named| named == value))
}

/// Returns the Sandboxes with a next step, or a condition about their memory, that depends on the
/// abilities of a node.
///
/// A heartbeat alone queues none, unless it is the first after a silence: then the Sandboxes
/// without a Pod are queued, which wait for the node or report it as gone.
fn waiting_for_node(change: &Change<SandboxNode>, caches: &Caches) -> Vec<Key> {
    let abilities = |node: &Option<Arc<SandboxNode>>| {
        let node = node.as_ref()?;
        let (status, serves) = (node.status.clone()?, node.serves_images());
        Some((
            status.runtimes,
            status.fingerprint,
            status.runsc_builds,
            serves,
        ))
    };
    let is_able = abilities(&change.before) != abilities(&change.after);
    let Some(node) = change.after.as_ref().or(change.before.as_ref()) else {
        return Vec::new();
    };
    let name = node.name_any();
    if !is_able && !is_back(change) {
        return match has_other_images(change) {
            true => asking_node(&name, caches),
            false => Vec::new(),
        };
    }
    let waiting = caches.sandboxes.filtered(|sandbox| {
        let Some(status) = &sandbox.status else {
            return false;
        };
        let restored = conditions::find(&status.conditions, conditions::RESTORED);
        // The Pod of a running Sandbox without a node may wait for another one.
        let is_pending =
            status.node_name.is_empty() && sandbox.spec.operating_mode == OperatingMode::Running;
        is_able && (status.node_name == name || is_pending)
            || restored.is_some_and(|condition| condition.status == "False")
    });
    let asleep = caches.snapshots.filtered(|snapshot| {
        let status = snapshot.status.as_ref();
        snapshot.spec.reason == SnapshotReason::Suspend
            && status.is_some_and(|status| status.node_name.as_ref() == Some(&name))
    });
    let asleep = asleep.iter().map(|snapshot| {
        let (namespace, _) = key_of(&**snapshot);
        (namespace, snapshot.spec.sandbox_name.clone())
    });
    let waiting = waiting.iter().map(|sandbox| key_of(&**sandbox));
    waiting.chain(asleep).collect()
}

/// Reports whether the node's list of images has changed.
fn has_other_images(change: &Change<SandboxNode>) -> bool {
    let listed = |node: &Option<Arc<SandboxNode>>| {
        let status = node.as_ref().and_then(|node| node.status.clone());
        status.unwrap_or_default().sandboxes
    };
    listed(&change.before) != listed(&change.after)
}

/// Returns the Sandboxes that wait for the node's report on whether it holds their memory.
fn asking_node(node: &str, caches: &Caches) -> Vec<Key> {
    let asking = caches.sandboxes.filtered(|sandbox| {
        let status = sandbox.status.as_ref();
        let restored = status.and_then(|s| conditions::find(&s.conditions, conditions::RESTORED));
        restored.is_some_and(|restored| restored.reason == restored::ASKING_NODE)
            && saved_pod::last_pod(sandbox).is_some_and(|record| record.node_name == node)
    });
    asking.iter().map(|sandbox| key_of(&**sandbox)).collect()
}

/// Reports whether this is the agent's first heartbeat after a silence.
fn is_back(change: &Change<SandboxNode>) -> bool {
    let heard = |node: &Option<Arc<SandboxNode>>| {
        let status = node.as_ref()?.status.as_ref()?;
        Some(status.heartbeat_time.as_ref()?.0)
    };
    let heard = heard(&change.before).zip(heard(&change.after));
    heard.is_some_and(|(last, now)| is_silence(last, now))
}

fn naming_class(change: &Change<SnapshotClass>, sandboxes: &Cache<Sandbox>) -> Vec<Key> {
    let Some(class) = change.after.as_ref().or(change.before.as_ref()) else {
        return Vec::new();
    };
    let name = class.name_any();
    let naming = sandboxes.filtered(|sandbox| names(sandbox, annotations::SNAPSHOT_CLASS, &name));
    naming.iter().map(|sandbox| key_of(&**sandbox)).collect()
}

#[cfg(test)]
mod tests;
