//! Client required. Gathers everything that decides about one Sandbox; nothing is judged here.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod, Service};
use kube::ResourceExt;
use torpor_api::{
    PodRecord, Sandbox, SandboxNode, SandboxSnapshot, SnapshotClass,
    annotations::{self, Settings},
    name_hash,
};

use crate::{
    calls::{self, Apiserver},
    pod_snapshot::newest,
    saved_pod,
    watches::Caches,
};

/// What was seen of one Sandbox and of the objects around it.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    pub sandbox: Arc<Sandbox>,
    /// Pods of the namespace with the Sandbox's name hash, and the one with the Sandbox's Pod name, by name.
    pub pods: BTreeMap<String, Arc<Pod>>,
    /// Claims of the volume claim templates that exist, by name.
    pub claims: BTreeMap<String, Arc<PersistentVolumeClaim>>,
    /// The Service with the Sandbox's name.
    pub service: Option<Arc<Service>>,
    /// Snapshots that name the Sandbox, and the one that it is to be a copy of, by name.
    pub snapshots: BTreeMap<String, Arc<SandboxSnapshot>>,
    /// Records of the Pods whose memory they hold, by the snapshot's name.
    pub saved_pods: BTreeMap<String, PodRecord>,
    /// The apiserver was asked for the Sandbox itself.
    pub sandbox_is_certain: bool,
    /// The apiserver was asked for the snapshots itself.
    pub snapshots_are_certain: bool,
    /// What the nodes of the Pods and snapshots report, by name.
    pub nodes: BTreeMap<String, Arc<SandboxNode>>,
    /// Those of snapshots that the cluster has no more, as far as it was asked.
    pub gone_nodes: BTreeSet<String>,
    /// Handler of each RuntimeClass that a Pod or the template names.
    pub handlers: BTreeMap<String, String>,
    /// The snapshot class that the Sandbox names.
    pub snapshot_class: Option<Arc<SnapshotClass>>,
    /// Name of the newest of its PodSnapshots that can be had.
    pub pod_snapshot: Option<String>,
    /// Image of the sandbox runtime, if the controller was given one.
    pub runtime_image: Option<Arc<str>>,
}

/// A fact that only became known while acting.
#[derive(Clone, Debug)]
pub enum Fact {
    Pod(Arc<Pod>),
    NoPod(String),
    Claim(Arc<PersistentVolumeClaim>),
    Service(Arc<Service>),
    NoService,
    Snapshot(Arc<SandboxSnapshot>),
    NoSnapshot(String),
    /// The Sandbox's own metadata after a write of ours.
    Sandbox(Arc<Sandbox>),
}

impl Observed {
    /// Takes a newer fact in.
    pub fn learn(&mut self, fact: Fact) {
        match fact {
            Fact::Pod(pod) => drop(self.pods.insert(pod.name_any(), pod)),
            Fact::NoPod(name) => drop(self.pods.remove(&name)),
            Fact::Claim(claim) => drop(self.claims.insert(claim.name_any(), claim)),
            Fact::Service(service) => self.service = Some(service),
            Fact::NoService => self.service = None,
            Fact::Snapshot(snapshot) => {
                drop(self.snapshots.insert(snapshot.name_any(), snapshot));
            }
            Fact::NoSnapshot(name) => drop(self.snapshots.remove(&name)),
            Fact::Sandbox(sandbox) => self.sandbox = sandbox,
        }
    }
}

/// Name of the Pod of a Sandbox: what the annotation says, else the Sandbox's own name.
pub fn pod_name(sandbox: &Sandbox) -> String {
    match sandbox.annotations().get(annotations::POD_NAME) {
        Some(name) if !name.is_empty() => name.clone(),
        _ => sandbox.name_any(),
    }
}

/// Name of the claim of one volume claim template.
pub fn claim_name(template: &str, sandbox: &str) -> String {
    format!("{template}-{sandbox}")
}

/// Reads the caches. Asks the apiserver only for the Pod, or the image of one that slept, when the caches show none and that absence would be acted upon, and for the node of an image when no
/// agent reports from it.
pub async fn dereference(
    sandbox: Arc<Sandbox>,
    caches: &Caches,
    api: &Apiserver,
) -> Result<Observed, calls::Error> {
    let namespace = sandbox.namespace().unwrap_or_default();
    let name = sandbox.name_any();
    let mut observed = Observed {
        sandbox: Arc::clone(&sandbox),
        ..Observed::default()
    };
    let hash = name_hash(&name);
    for pod in caches.pods.indexed(&namespace, &hash) {
        observed.learn(Fact::Pod(pod));
    }
    let pod_name = pod_name(&sandbox);
    if let Some(pod) = caches.pods.get(&namespace, &pod_name) {
        observed.learn(Fact::Pod(pod));
    } else if super::plan::asks_for_the_named_pod(&observed) {
        // The cache holds only Pods with a name hash. A foreign Pod of that name, or one of ours that the watch has not shown yet, is only found by asking.
        if let Some(pod) = api.get::<Pod>(&namespace, &pod_name).await? {
            observed.learn(Fact::Pod(Arc::new(pod)));
        }
    }
    for template in &sandbox.spec.volume_claim_templates {
        if let Some(claim) = caches
            .volume_claims
            .get(&namespace, &claim_name(&template.metadata.name, &name))
        {
            observed.learn(Fact::Claim(claim));
        }
    }
    observed.service = caches.services.get(&namespace, &name);
    let kept = caches.pod_snapshots.indexed(&namespace, &hash);
    observed.pod_snapshot = newest(&kept).map(ResourceExt::name_any);
    for snapshot in caches.snapshots.indexed(&namespace, &name) {
        observed.learn(Fact::Snapshot(snapshot));
    }
    gather_memory(&mut observed, caches, api).await?;
    Ok(observed)
}

/// What Torpor's part looks at. To be gathered again when a fact came in, since it may name another node, or say that there is no Pod.
pub async fn gather_memory(
    observed: &mut Observed,
    caches: &Caches,
    api: &Apiserver,
) -> Result<(), calls::Error> {
    if super::plan::asks_for_sandbox(observed) {
        ask_for_sandbox(observed, api).await?;
    }
    if super::plan::asks_for_snapshots(observed) {
        ask_for_snapshots(observed, api).await?;
    }
    gather_cached(observed, caches);
    for node in super::plan::asks_for_nodes(observed, Timestamp::now()) {
        if !api.exists::<Node>(&node).await? {
            observed.gone_nodes.insert(node);
        }
    }
    Ok(())
}

/// The watch of Sandboxes may be behind. One that was deleted, or made anew under its name, is the
/// next pass's.
async fn ask_for_sandbox(observed: &mut Observed, api: &Apiserver) -> Result<(), calls::Error> {
    let known = Arc::clone(&observed.sandbox);
    let namespace = known.namespace().unwrap_or_default();
    let found = api.get::<Sandbox>(&namespace, &known.name_any()).await?;
    if let Some(found) = found.filter(|found| found.uid() == known.uid()) {
        observed.learn(Fact::Sandbox(Arc::new(found)));
    }
    observed.sandbox_is_certain = true;
    Ok(())
}

/// The watch of snapshots may be behind the others.
async fn ask_for_snapshots(observed: &mut Observed, api: &Apiserver) -> Result<(), calls::Error> {
    let sandbox = Arc::clone(&observed.sandbox);
    let namespace = sandbox.namespace().unwrap_or_default();
    for snapshot in api.list::<SandboxSnapshot>(&namespace).await? {
        if snapshot.spec.sandbox_name == sandbox.name_any() {
            observed.learn(Fact::Snapshot(Arc::new(snapshot)));
        }
    }
    observed.snapshots_are_certain = true;
    Ok(())
}

/// Nodes that hold memory of the Sandbox, or may: those on which saved Pods ran, those that
/// snapshots name, and that of the last Pod.
pub(super) fn nodes_of_memory(observed: &Observed) -> BTreeSet<String> {
    let told = observed.snapshots.values().filter_map(|snapshot| {
        let status = snapshot.status.as_ref()?;
        status.node_name.clone()
    });
    let homes = observed.snapshots.values().filter_map(|snapshot| {
        let record = observed.saved_pods.get(&snapshot.name_any());
        saved_pod::home(snapshot, record).cloned()
    });
    let last = saved_pod::last_pod(&observed.sandbox);
    let last = last.into_iter().map(|record| record.node_name);
    told.chain(homes).chain(last).collect()
}

/// What is recorded of the Pods of the snapshots: the snapshot that is copied is of another
/// Sandbox.
fn gather_saved_pods(observed: &mut Observed, caches: &Caches) {
    let namespace = observed.sandbox.namespace().unwrap_or_default();
    let mut found = BTreeMap::new();
    for (name, snapshot) in &observed.snapshots {
        let of = &snapshot.spec.sandbox_name;
        let own = (*of == observed.sandbox.name_any()).then(|| Arc::clone(&observed.sandbox));
        let sandbox = own.or_else(|| caches.sandboxes.get(&namespace, of));
        let cached = caches.pods.indexed(&namespace, &name_hash(of));
        let pods = cached.iter().map(|pod| &**pod);
        if let Some(record) = saved_pod::saved_pod(snapshot, pods, sandbox.as_deref()) {
            found.insert(name.clone(), record);
        }
    }
    observed.saved_pods = found;
}

/// Named snapshot, nodes, runtime handlers, snapshot class.
fn gather_cached(observed: &mut Observed, caches: &Caches) {
    let sandbox = Arc::clone(&observed.sandbox);
    let namespace = &sandbox.namespace().unwrap_or_default();
    let settings = Settings::read(
        sandbox.metadata.annotations.as_ref(),
        sandbox.spec.pod_template.annotations(),
    );
    if let Some(snapshot) = settings
        .restore_from
        .and_then(|name| caches.snapshots.get(namespace, &name))
    {
        observed.learn(Fact::Snapshot(snapshot));
    }
    observed.snapshot_class = settings
        .snapshot_class
        .and_then(|name| caches.snapshot_classes.get("", &name));
    let mut nodes: Vec<String> = observed
        .pods
        .values()
        .filter_map(|pod| pod.spec.as_ref()?.node_name.clone())
        .collect();
    gather_saved_pods(observed, caches);
    nodes.extend(nodes_of_memory(observed));
    for name in nodes {
        if let Some(node) = caches.nodes.get("", &name) {
            observed.nodes.insert(name, node);
        }
    }
    let mut classes: Vec<String> = observed
        .pods
        .values()
        .filter_map(|pod| pod.spec.as_ref()?.runtime_class_name.clone())
        .collect();
    classes.extend(super::pod_spec::runtime_class_name(
        &sandbox.spec.pod_template.spec,
    ));
    for name in classes {
        if let Some(class) = caches.runtime_classes.get("", &name) {
            observed.handlers.insert(name, class.handler.clone());
        }
    }
}
