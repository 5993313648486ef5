//! The watches: one per kind, each into a cache, each event waking the Sandboxes that it concerns.

use std::{fmt::Debug, pin::pin, sync::Arc};

use futures::StreamExt;
use k8s_openapi::api::{
    core::v1::{PersistentVolumeClaim, Pod, PodSpec, Service, ServiceSpec},
    node::v1::RuntimeClass,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    core::{DeserializeGuard, error_boundary::InvalidObject},
    runtime::{
        WatchStreamExt,
        reflector::{self, ObjectRef, Store, store},
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::{sync::mpsc, task::JoinSet};
use torpor_api::{
    Sandbox, SandboxNode, SandboxSnapshot, SnapshotClass, annotations, conditions, labels,
};

use crate::cache::{Cache, Change};

/// Everything that is watched beside Sandboxes.
#[derive(Clone, Debug)]
pub struct Caches {
    pub pods: Cache<Pod>,
    pub claims: Cache<PersistentVolumeClaim>,
    pub services: Cache<Service>,
    pub snapshots: Cache<SandboxSnapshot>,
    pub nodes: Cache<SandboxNode>,
    pub runtime_classes: Cache<RuntimeClass>,
    pub snapshot_classes: Cache<SnapshotClass>,
}

impl Default for Caches {
    fn default() -> Self {
        Self {
            pods: Cache::new(|pod| pod.labels().get(labels::SANDBOX_NAME_HASH).cloned()),
            claims: Cache::new(|_| None),
            services: Cache::new(|_| None),
            snapshots: Cache::new(|snapshot| Some(snapshot.spec.sandbox_name.clone())),
            nodes: Cache::new(|_| None),
            runtime_classes: Cache::new(|_| None),
            snapshot_classes: Cache::new(|_| None),
        }
    }
}

impl Caches {
    /// Waits until each kind has been listed once; only then is an absence worth anything.
    pub async fn wait_ready(&self) {
        let Self {
            pods,
            claims,
            services,
            snapshots,
            nodes,
            runtime_classes,
            snapshot_classes,
        } = self;
        tokio::join!(
            pods.wait_ready(),
            claims.wait_ready(),
            services.wait_ready(),
            snapshots.wait_ready(),
            nodes.wait_ready(),
            runtime_classes.wait_ready(),
            snapshot_classes.wait_ready(),
        );
    }

    /// Kinds whose first list is not complete yet.
    pub fn not_ready(&self) -> Vec<&'static str> {
        let Self {
            pods,
            claims,
            services,
            snapshots,
            nodes,
            runtime_classes,
            snapshot_classes,
        } = self;
        [
            ("Pod", pods.is_ready()),
            ("PersistentVolumeClaim", claims.is_ready()),
            ("Service", services.is_ready()),
            ("SandboxSnapshot", snapshots.is_ready()),
            ("SandboxNode", nodes.is_ready()),
            ("RuntimeClass", runtime_classes.is_ready()),
            ("SnapshotClass", snapshot_classes.is_ready()),
        ]
        .into_iter()
        .filter_map(|(kind, ready)| (!ready).then_some(kind))
        .collect()
    }
}

/// Where the watches put the names of what is to be looked at. Unbounded, since both readers only drop the names into a set; what is in flight is bounded by the
/// watches themselves.
#[derive(Clone, Debug)]
pub struct Queues {
    pub sandboxes: mpsc::UnboundedSender<ObjectRef<Sandbox>>,
    pub snapshots: mpsc::UnboundedSender<ObjectRef<SandboxSnapshot>>,
}

/// The stores that the two reconcilers take their objects from.
#[derive(Debug)]
pub struct Stores {
    pub sandboxes: Store<Sandbox>,
    pub snapshots: Store<SandboxSnapshot>,
}

/// Starts all watches. They end when `tasks` is dropped or aborted.
pub fn start(client: &Client, caches: &Caches, queues: &Queues, tasks: &mut JoinSet<()>) -> Stores {
    let (sandboxes, writer) = reflector::store();
    let known = caches.snapshots.clone();
    tasks.spawn(watch_sandboxes(
        client.clone(),
        writer,
        known,
        queues.clone(),
    ));
    let (snapshots, writer) = reflector::store();
    let followed = Snapshots {
        cache: caches.snapshots.clone(),
        sandboxes: sandboxes.clone(),
        queues: queues.clone(),
    };
    tasks.spawn(watch_snapshots(client.clone(), writer, followed));
    let hashed = watcher::Config::default().labels(labels::SANDBOX_NAME_HASH);
    let all = watcher::Config::default;
    let Caches {
        pods,
        claims,
        services,
        nodes,
        runtime_classes,
        snapshot_classes,
        snapshots: _,
    } = caches.clone();
    let queue = queues.sandboxes.clone();
    tasks.spawn(follow(
        client.clone(),
        hashed.clone(),
        trim_pod,
        move |event| {
            pods.apply(event)
                .iter()
                .flat_map(owners)
                .for_each(|sandbox| wake(&queue, sandbox));
        },
    ));
    let queue = queues.sandboxes.clone();
    // All Services, not only ours: one that somebody else owns under a Sandbox's name has to be seen.
    tasks.spawn(follow(client.clone(), all(), trim_service, move |event| {
        services
            .apply(event)
            .iter()
            .flat_map(owners)
            .for_each(|sandbox| wake(&queue, sandbox));
    }));
    // Claims wake nobody, as upstream: they are made before the Pod and not looked at again.
    tasks.spawn(follow(client.clone(), hashed, trim_claim, move |event| {
        claims.apply(event);
    }));
    let (queue, known) = (queues.sandboxes.clone(), sandboxes.clone());
    tasks.spawn(follow_guarded(client.clone(), trim, move |event| {
        for change in nodes.apply(event) {
            waiting_for_node(&change, &known)
                .into_iter()
                .for_each(|s| wake(&queue, s));
        }
    }));
    tasks.spawn(follow(client.clone(), all(), trim, move |event| {
        runtime_classes.apply(event);
    }));
    let (queue, known) = (queues.sandboxes.clone(), sandboxes.clone());
    tasks.spawn(follow_guarded(client.clone(), trim, move |event| {
        for change in snapshot_classes.apply(event) {
            naming_class(&change, &known)
                .into_iter()
                .for_each(|s| wake(&queue, s));
        }
    }));
    Stores {
        sandboxes,
        snapshots,
    }
}

/// Reads a watch for ever and hands each event on. Faults of the watch are retried with a growing delay.
async fn follow<K>(
    client: Client,
    config: watcher::Config,
    trim: fn(&mut K),
    mut take: impl FnMut(Event<K>) + Send + 'static,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut events = pin!(watcher(Api::<K>::all(client), config).default_backoff());
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => take(event.modify(trim)),
            Err(error) => tracing::warn!(kind = %K::kind(&()), %error, "watch interrupted"),
        }
    }
}

/// As [`follow`], for kinds that are checked only by a schema: an object that the schema lets through and our type does not is left out, and stops nothing else.
/// (A time with 13 decimals is one.)
async fn follow_guarded<K>(
    client: Client,
    trim: fn(&mut K),
    mut take: impl FnMut(Event<K>) + Send + 'static,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let config = watcher::Config::default();
    follow::<DeserializeGuard<K>>(
        client,
        config,
        |_| {},
        move |event| {
            if let Some(event) = unguarded(event) {
                take(event.modify(trim));
            }
        },
    )
    .await;
}

/// The event, unless its object cannot be read.
fn unguarded<K: Resource<DynamicType = ()>>(event: Event<DeserializeGuard<K>>) -> Option<Event<K>> {
    let readable = |object: DeserializeGuard<K>| match object.0 {
        Ok(object) => Some(object),
        Err(InvalidObject { error, metadata }) => {
            let (namespace, name) = (metadata.namespace, metadata.name);
            tracing::warn!(kind = %K::kind(&()), namespace, name, error, "left out: cannot be read");
            None
        }
    };
    Some(match event {
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
        Event::InitApply(object) => Event::InitApply(readable(object)?),
        Event::Apply(object) => Event::Apply(readable(object)?),
        Event::Delete(object) => Event::Delete(readable(object)?),
    })
}

async fn watch_sandboxes(
    client: Client,
    mut writer: store::Writer<Sandbox>,
    snapshots: Cache<SandboxSnapshot>,
    queues: Queues,
) {
    let store = writer.as_reader();
    follow_guarded(client, trim, move |event| {
        writer.apply_watcher_event(&event);
        match &event {
            Event::Apply(sandbox) | Event::Delete(sandbox) => {
                wake(&queues.sandboxes, ObjectRef::from_obj(sandbox));
                // A snapshot may have been made before its Sandbox.
                let namespace = sandbox.namespace().unwrap_or_default();
                for snapshot in snapshots.indexed(&namespace, &sandbox.name_any()) {
                    if !snapshot.is_committed() {
                        wake(&queues.snapshots, ObjectRef::from_obj(&*snapshot));
                    }
                }
            }
            // Any of them may have changed while nobody watched.
            Event::InitDone => {
                for sandbox in store.state() {
                    wake(&queues.sandboxes, ObjectRef::from_obj(&*sandbox));
                }
            }
            Event::Init | Event::InitApply(_) => {}
        }
    })
    .await;
}

struct Snapshots {
    cache: Cache<SandboxSnapshot>,
    sandboxes: Store<Sandbox>,
    queues: Queues,
}

async fn watch_snapshots(
    client: Client,
    mut writer: store::Writer<SandboxSnapshot>,
    Snapshots {
        cache,
        sandboxes,
        queues,
    }: Snapshots,
) {
    follow_guarded(client, trim, move |event| {
        writer.apply_watcher_event(&event);
        for change in cache.apply(event) {
            let Some(snapshot) = change.after.as_ref().or(change.before.as_ref()) else {
                continue;
            };
            wake(&queues.snapshots, ObjectRef::from_obj(snapshot));
            named_by(snapshot, &sandboxes).for_each(|s| wake(&queues.sandboxes, s));
        }
    })
    .await;
}

fn wake<K: Resource<DynamicType = ()>>(
    queue: &mpsc::UnboundedSender<ObjectRef<K>>,
    object: ObjectRef<K>,
) {
    // The reader is gone only when the program is ending.
    let _ = queue.send(object);
}

/// The Sandbox that controls an object, before or after the change.
fn owners<K: ResourceExt>(change: &Change<K>) -> Vec<ObjectRef<Sandbox>> {
    let mut found = Vec::new();
    for object in [&change.before, &change.after].into_iter().flatten() {
        let namespace = object.namespace().unwrap_or_default();
        let controller = object.owner_references().iter().find(|owner| {
            owner.controller == Some(true)
                && owner.kind == Sandbox::kind(&())
                && owner.api_version.starts_with("agents.x-k8s.io/")
        });
        if let Some(owner) = controller {
            let sandbox = ObjectRef::new(&owner.name).within(&namespace);
            if !found.contains(&sandbox) {
                found.push(sandbox);
            }
        }
    }
    found
}

/// The Sandbox that a snapshot is of, and those that start as a copy of it.
fn named_by(
    snapshot: &SandboxSnapshot,
    sandboxes: &Store<Sandbox>,
) -> impl Iterator<Item = ObjectRef<Sandbox>> {
    let namespace = snapshot.namespace().unwrap_or_default();
    let name = snapshot.name_any();
    let own = ObjectRef::new(&snapshot.spec.sandbox_name).within(&namespace);
    let copies = sandboxes.state_filter(|sandbox| {
        sandbox.namespace().as_deref() == Some(&namespace)
            && [
                sandbox.metadata.annotations.as_ref(),
                sandbox.spec.pod_template.annotations(),
            ]
            .into_iter()
            .flatten()
            .any(|all| all.get(annotations::RESTORE_FROM) == Some(&name))
    });
    std::iter::once(own).chain(
        copies
            .into_iter()
            .map(|sandbox| ObjectRef::from_obj(&*sandbox)),
    )
}

/// Sandboxes whose next step depends on what a node can do. A heartbeat alone wakes nobody.
fn waiting_for_node(
    change: &Change<SandboxNode>,
    sandboxes: &Store<Sandbox>,
) -> Vec<ObjectRef<Sandbox>> {
    let abilities = |node: &Option<Arc<SandboxNode>>| {
        let status = node.as_ref()?.status.clone()?;
        Some((status.runtimes, status.fingerprint))
    };
    if abilities(&change.before) == abilities(&change.after) {
        return Vec::new();
    }
    let Some(node) = change.after.as_ref().or(change.before.as_ref()) else {
        return Vec::new();
    };
    let name = node.name_any();
    let waiting = sandboxes.state_filter(|sandbox| {
        let Some(status) = &sandbox.status else {
            return false;
        };
        let restored = conditions::find(&status.conditions, conditions::RESTORED);
        status.node_name == name || restored.is_some_and(|condition| condition.status == "False")
    });
    waiting
        .iter()
        .map(|sandbox| ObjectRef::from_obj(&**sandbox))
        .collect()
}

fn naming_class(
    change: &Change<SnapshotClass>,
    sandboxes: &Store<Sandbox>,
) -> Vec<ObjectRef<Sandbox>> {
    let Some(class) = change.after.as_ref().or(change.before.as_ref()) else {
        return Vec::new();
    };
    let name = class.name_any();
    let naming = sandboxes.state_filter(|sandbox| {
        [
            sandbox.metadata.annotations.as_ref(),
            sandbox.spec.pod_template.annotations(),
        ]
        .into_iter()
        .flatten()
        .any(|all| all.get(annotations::SNAPSHOT_CLASS) == Some(&name))
    });
    naming
        .iter()
        .map(|sandbox| ObjectRef::from_obj(&**sandbox))
        .collect()
}

fn trim<K: Resource>(object: &mut K) {
    object.meta_mut().managed_fields = None;
}

/// A Pod without what nobody here reads, which is most of it.
fn trim_pod(pod: &mut Pod) {
    trim(pod);
    if let Some(spec) = pod.spec.take() {
        pod.spec = Some(PodSpec {
            node_name: spec.node_name,
            runtime_class_name: spec.runtime_class_name,
            ..PodSpec::default()
        });
    }
    if let Some(status) = &mut pod.status {
        status.container_statuses = None;
        status.init_container_statuses = None;
        status.ephemeral_container_statuses = None;
    }
}

fn trim_service(service: &mut Service) {
    trim(service);
    service.status = None;
    if let Some(spec) = service.spec.take() {
        service.spec = Some(ServiceSpec {
            cluster_ip: spec.cluster_ip,
            ports: spec.ports,
            selector: spec.selector,
            ..ServiceSpec::default()
        });
    }
}

fn trim_claim(claim: &mut PersistentVolumeClaim) {
    trim(claim);
    claim.spec = None;
    claim.status = None;
}
