//! Client required. Gathers the objects that decide about one Sandbox, without judging them.

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
    golden::{
        self,
        images::{self, Images},
    },
    pod_snapshot::newest,
    saved_pod,
    watches::Caches,
};

/// Observed state of one Sandbox and of the objects around it.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    pub sandbox: Arc<Sandbox>,
    /// Pods with the Sandbox's name hash, and the Pod with the Sandbox's Pod name, by name.
    pub pods: BTreeMap<String, Arc<Pod>>,
    /// Existing PersistentVolumeClaims of the volume claim templates, by name.
    pub claims: BTreeMap<String, Arc<PersistentVolumeClaim>>,
    /// Service with the Sandbox's name.
    pub service: Option<Arc<Service>>,
    /// Snapshots of the Sandbox, and the one that it starts as a copy of, by name.
    pub snapshots: BTreeMap<String, Arc<SandboxSnapshot>>,
    /// Records of the Pods whose memory the snapshots hold, by the snapshot's name.
    pub saved_pods: BTreeMap<String, PodRecord>,
    /// True if the Sandbox was read from the apiserver.
    pub sandbox_is_certain: bool,
    /// True if the snapshots were read from the apiserver.
    pub snapshots_are_certain: bool,
    /// SandboxNodes of the nodes of the Pods and snapshots, by name.
    pub nodes: BTreeMap<String, Arc<SandboxNode>>,
    /// All SandboxNodes, if the Sandbox has an image; else none.
    pub cluster: Vec<Candidate>,
    /// UID of the cluster, if the Sandbox is to be archived.
    pub cluster_uid: Option<String>,
    /// Nodes of snapshots that take no new Pods, as far as the apiserver was asked.
    pub cordoned: BTreeSet<String>,
    /// Nodes of snapshots that no longer exist, as far as the apiserver was asked.
    pub gone_nodes: BTreeSet<String>,
    /// Handler of each RuntimeClass that a Pod or the template names.
    pub handlers: BTreeMap<String, String>,
    /// SnapshotClass that the Sandbox names.
    pub snapshot_class: Option<Arc<SnapshotClass>>,
    /// Name of the newest available PodSnapshot of the Sandbox.
    pub pod_snapshot: Option<String>,
    /// Golden images that a new Pod of an unclaimed member may start from.
    pub golden: Option<Images>,
    /// Image of the sandbox runtime, if the controller was given one.
    pub runtime_image: Option<Arc<str>>,
}

/// Node that may restore an image of another node.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub node: Arc<SandboxNode>,
    /// The node's agent has not reported for too long.
    pub is_silent: bool,
}

/// Fact that a pass learned while it applied a plan.
#[derive(Clone, Debug)]
pub enum Fact {
    Pod(Arc<Pod>),
    NoPod(String),
    Claim(Arc<PersistentVolumeClaim>),
    Service(Arc<Service>),
    NoService,
    Snapshot(Arc<SandboxSnapshot>),
    NoSnapshot(String),
    /// The Sandbox after a write of this controller.
    Sandbox(Arc<Sandbox>),
}

impl Observed {
    /// Adds a newer fact.
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

/// Returns the Pod name of a Sandbox: the annotation's value, else the Sandbox's own name.
pub fn pod_name(sandbox: &Sandbox) -> String {
    match sandbox.annotations().get(annotations::POD_NAME) {
        Some(name) if !name.is_empty() => name.clone(),
        _ => sandbox.name_any(),
    }
}

/// Returns the name of the PersistentVolumeClaim of a volume claim template.
pub fn claim_name(template: &str, sandbox: &str) -> String {
    format!("{template}-{sandbox}")
}

/// Gathers the state around a Sandbox from the caches.
///
/// It asks the apiserver in two cases. It asks for the Pod, or the image of a Sandbox that slept,
/// when the caches show none and the plan would act on the absence. It asks for the node of an
/// image when no agent reports from that node.
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
    } else if super::plan::must_confirm_pod(&observed) {
        // The cache holds only Pods with a name hash. Only a request finds a foreign Pod of that
        // name, or a Pod of ours that the watch has not shown yet.
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
    let named = |key| sandbox.annotations().get(key);
    let template = named(annotations::SANDBOX_TEMPLATE_REF);
    let golden = template.zip(named(annotations::GOLDEN_SANDBOX));
    observed.golden = golden.and_then(|(template, golden)| {
        images::of(&golden::snapshots_of(caches, &namespace, template, golden))
    });
    gather_memory(&mut observed, caches, api).await?;
    Ok(observed)
}

/// Gathers the objects that decide about memory.
///
/// It must run again after a new fact, which may name another node or the absence of the Pod.
pub async fn gather_memory(
    observed: &mut Observed,
    caches: &Caches,
    api: &Apiserver,
) -> Result<(), calls::Error> {
    if super::plan::must_confirm_sandbox(observed) {
        ask_for_sandbox(observed, api).await?;
    }
    if super::plan::must_confirm_snapshots(observed) {
        ask_for_snapshots(observed, api).await?;
    }
    gather_cached(observed, caches);
    for node in super::plan::nodes_to_confirm(observed, Timestamp::now()) {
        if !api.exists::<Node>(&node).await? {
            observed.gone_nodes.insert(node);
        }
    }
    gather_cluster(observed, caches, api).await
}

/// Gathers what decides about a restore on another node than the image's own.
///
/// The SandboxNode of a Pod that took an image is read from the apiserver: the watch may not have
/// shown yet that this node has claimed the image.
async fn gather_cluster(
    observed: &mut Observed,
    caches: &Caches,
    api: &Apiserver,
) -> Result<(), calls::Error> {
    for node in super::plan::nodes_to_examine(observed) {
        let found = api.get_cluster::<Node>(&node).await?;
        let spec = found.and_then(|node| node.spec);
        if spec.is_some_and(|spec| spec.unschedulable == Some(true)) {
            observed.cordoned.insert(node);
        }
    }
    let mut snapshots = observed.snapshots.values();
    if !snapshots.any(|one| one.is_uploaded() || one.is_committed()) {
        return Ok(());
    }
    let mut nodes = caches.nodes.filtered(|_| true);
    for taker in super::plan::nodes_of_takers(observed) {
        if let Some(fresh) = api.get_cluster::<SandboxNode>(&taker).await? {
            nodes.retain(|node| node.name_any() != taker);
            nodes.push(Arc::new(fresh));
        }
    }
    let now = Timestamp::now();
    let candidates = nodes.into_iter().map(|node| Candidate {
        is_silent: node.is_silent(now) || node.status.is_none(),
        node,
    });
    observed.cluster = candidates.collect();
    Ok(())
}

/// Reads the Sandbox from the apiserver, because the watch may be behind.
///
/// The next pass handles a Sandbox that was deleted or created again under its name.
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

/// Reads the snapshots from the apiserver, because their watch may be behind the others.
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

/// Returns the nodes that hold or may hold memory of the Sandbox: the nodes of saved Pods, the
/// nodes that snapshots name, and the node of the last Pod.
pub(super) fn nodes_of_memory(observed: &Observed) -> BTreeSet<String> {
    let reported = observed.snapshots.values().filter_map(|snapshot| {
        let status = snapshot.status.as_ref()?;
        status.node_name.clone()
    });
    let pod_nodes = observed.snapshots.values().filter_map(|snapshot| {
        let record = observed.saved_pods.get(&snapshot.name_any());
        saved_pod::pod_node(snapshot, record).cloned()
    });
    let last = saved_pod::last_pod(&observed.sandbox);
    let last = last.into_iter().map(|record| record.node_name);
    let takers = observed
        .snapshots
        .values()
        .filter_map(|one| super::plan::node_of_taker(one));
    reported
        .chain(pod_nodes)
        .chain(last)
        .chain(takers)
        .collect()
}

/// Gathers the records of the snapshots' Pods. A snapshot that is copied belongs to another
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

/// Gathers the named snapshot, nodes, runtime handlers and SnapshotClass from the caches.
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
    let class = sandbox.spec.pod_template.spec.runtime_class_name();
    classes.extend(class.map(str::to_owned));
    for name in classes {
        if let Some(class) = caches.runtime_classes.get("", &name) {
            observed.handlers.insert(name, class.handler.clone());
        }
    }
}
