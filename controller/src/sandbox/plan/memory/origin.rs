//! Determines the node whose reports about an image are trusted: the node on which the saved Pod
//! ran, from sources that no agent writes.

use kube::ResourceExt;
use torpor_api::{PodRecord, SandboxSnapshot, annotations, reasons::restored};

use super::resume::Obstacle;
use crate::{sandbox::dereference::Observed, saved_pod};

/// Returns the record of the Pod whose memory a snapshot holds.
pub(super) fn record<'a>(
    observed: &'a Observed,
    snapshot: &SandboxSnapshot,
) -> Option<&'a PodRecord> {
    observed.saved_pods.get(&snapshot.name_any())
}

/// Returns the node of a snapshot's Pod from sources other than the agent.
pub(super) fn pod_node<'a>(
    observed: &'a Observed,
    snapshot: &'a SandboxSnapshot,
) -> Option<&'a String> {
    saved_pod::pod_node(snapshot, record(observed, snapshot))
}

/// Returns the node of an image for messages: the node of its Pod, else the node in its status.
pub(super) fn node_of_image<'a>(
    observed: &'a Observed,
    snapshot: &'a SandboxSnapshot,
) -> Option<&'a String> {
    let reported = || snapshot.status.as_ref()?.node_name.as_ref();
    pod_node(observed, snapshot).or_else(reported)
}

/// Returns why a snapshot is not trusted: another node than that of its Pod claims to hold the
/// image.
pub(super) fn mismatch(observed: &Observed, snapshot: &SandboxSnapshot) -> Option<String> {
    let pod_node = pod_node(observed, snapshot)?;
    let reported = snapshot.status.as_ref()?.node_name.as_ref()?;
    (reported != pod_node).then(|| {
        format!(
            "SandboxSnapshot {:?} reports its image on node {reported:?}, but its Pod ran on node {pod_node:?}: \
             the report of node {reported:?}'s agent is not trusted",
            snapshot.name_any()
        )
    })
}

/// Returns the node from which an image is restored.
pub(super) fn trusted_node<'a>(
    observed: &'a Observed,
    snapshot: &'a SandboxSnapshot,
) -> Result<&'a String, Obstacle> {
    if let Some(why) = mismatch(observed, snapshot) {
        return Err((restored::NODE_MISMATCH, why));
    }
    pod_node(observed, snapshot).ok_or_else(|| {
        let message = format!(
            "Only the status of SandboxSnapshot {:?} names the node of its Pod, and a node's agent writes the status. \
             An older version of Torpor made the snapshot; to trust it, annotate it with {}: \
             {{\"name\": \"<Pod>\", \"nodeName\": \"<node>\", \"uid\": \"<UID of the Pod>\"}}",
            snapshot.name_any(),
            annotations::SAVED_POD
        );
        (restored::NODE_MISMATCH, message)
    })
}
