//! Which node may speak for an image: the one on which the saved Pod ran, by what no agent writes.

use kube::ResourceExt;
use torpor_api::{PodRecord, SandboxSnapshot, annotations, reasons::restored};

use super::resume::Obstacle;
use crate::{sandbox::dereference::Observed, saved_pod};

/// The record of the Pod whose memory a snapshot holds.
pub(super) fn record<'a>(
    observed: &'a Observed,
    snapshot: &SandboxSnapshot,
) -> Option<&'a PodRecord> {
    observed.saved_pods.get(&snapshot.name_any())
}

/// Node of a snapshot's Pod, as far as no agent alone says it.
pub(super) fn home<'a>(
    observed: &'a Observed,
    snapshot: &'a SandboxSnapshot,
) -> Option<&'a String> {
    saved_pod::home(snapshot, record(observed, snapshot))
}

/// Node of a snapshot in words: where its Pod ran, else where its status says that the image is.
pub(super) fn node_of_image<'a>(
    observed: &'a Observed,
    snapshot: &'a SandboxSnapshot,
) -> Option<&'a String> {
    let told = || snapshot.status.as_ref()?.node_name.as_ref();
    home(observed, snapshot).or_else(told)
}

/// Why a snapshot is not believed: another node than that of its Pod claims to hold the image.
pub(super) fn mismatch(observed: &Observed, snapshot: &SandboxSnapshot) -> Option<String> {
    let home = home(observed, snapshot)?;
    let told = snapshot.status.as_ref()?.node_name.as_ref()?;
    (told != home).then(|| {
        format!(
            "SandboxSnapshot {:?} says that its image is on node {told:?}, but its Pod ran on node {home:?}: \
             the agent of node {told:?} is not believed",
            snapshot.name_any()
        )
    })
}

/// The node from which an image is restored.
pub(super) fn trusted_node<'a>(
    observed: &'a Observed,
    snapshot: &'a SandboxSnapshot,
) -> Result<&'a String, Obstacle> {
    if let Some(why) = mismatch(observed, snapshot) {
        return Err((restored::NODE_MISMATCH, why));
    }
    home(observed, snapshot).ok_or_else(|| {
        let message = format!(
            "Nothing but its status says on which node the Pod of SandboxSnapshot {:?} ran, and a node's agent writes that. \
             An older version of Torpor made the snapshot; to trust it, annotate it with {}: \
             {{\"name\": \"<Pod>\", \"nodeName\": \"<node>\", \"uid\": \"<UID of the Pod>\"}}",
            snapshot.name_any(),
            annotations::SAVED_POD
        );
        (restored::NODE_MISMATCH, message)
    })
}
