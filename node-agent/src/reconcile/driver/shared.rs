//! The state that all tasks of the driver share.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use kube::runtime::reflector::{ObjectRef, Store as Cache};
use torpor_core::ids::PodUid;
use torpor_core::state::Policy;

use super::ask::Asked;
use crate::kata::Kata;
use crate::policy::pressure::state::NodePressure;
use crate::policy::saves::Saves;
use crate::policy::sleep::class_name;
use crate::reconcile::node::Node;
use crate::reconcile::snapshot_index::SnapshotIndex;
use crate::report::metrics::Metrics;
use crate::report::publish::Publisher;
use crate::report::sandboxes::Board;
use crate::report::spans::Spans;

/// The caches, the node and the services of all tasks.
pub(crate) struct Shared {
    pub(crate) node: Arc<Node>,
    pub(crate) pods: Cache<Pod>,
    pub(crate) snapshots: Arc<SnapshotIndex>,
    pub(crate) classes: Cache<RuntimeClass>,
    pub(crate) publisher: Publisher,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) policy: Policy,
    pub(crate) board: Arc<Board>,
    pub(crate) saves: Arc<Saves>,
    pub(crate) pressure: Arc<NodePressure>,
    pub(crate) spans: Arc<Spans>,
    /// The Kata sandboxes of this node. None if no Kata handler is configured.
    pub(crate) kata: Option<Arc<Kata>>,
    /// Answers of the apiserver about Pods that are gone.
    pub(crate) asked: Asked,
}

/// Returns the Pod with this UID from the cache.
pub(super) fn pod_of(shared: &Shared, uid: &PodUid) -> Option<Arc<Pod>> {
    shared
        .pods
        .find(|pod| pod.uid().as_deref() == Some(uid.as_str()))
}

/// Returns the Pod's RuntimeClass from the cache.
pub(super) fn class_of(shared: &Shared, pod: &Pod) -> Option<Arc<RuntimeClass>> {
    let name = class_name(pod)?;
    shared.classes.get(&ObjectRef::new(name))
}
