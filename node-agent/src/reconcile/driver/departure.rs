//! Pods that go: how they went, and the memory and the snapshots that they leave.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use torpor_api::conditions;
use torpor_api::snapshot::SandboxSnapshot;
use torpor_core::ids::{ImageId, Namespace, PodUid};
use torpor_core::state::{Answer, Departure, Desired};
use torpor_core::steps::{Plan, Reason};

use super::shared::Shared;
use crate::reconcile::desired::condition;
use crate::reconcile::node::Node;
use crate::reconcile::references::{named_pod, sandbox_name, stands_for};
use crate::reconcile::snapshot_index::may_be_of_node;

/// Status reason of a Pod that its kubelet ended at the node's shutdown (Kubernetes,
/// `pkg/kubelet/nodeshutdown`).
const NODE_SHUTDOWN: &str = "NodeShutdown";

/// How a Pod goes, as its task has observed it. After a restart of the agent the grace time begins
/// anew.
#[derive(Debug, Clone, Default)]
pub(super) struct Going {
    /// The last observation of the Pod showed that a user had deleted it.
    by_user: bool,
    /// When the task first found the Pod gone.
    since: Option<Timestamp>,
    /// The apiserver's answer, for the next plan only.
    pub(super) answer: Option<Answer>,
    /// Name and UID of the Pod's Sandbox.
    sandbox: Option<(String, String)>,
}

impl Going {
    /// Records the Pod, or returns how it went if it is gone.
    pub(super) fn departure(&mut self, pod: Option<&Pod>, now: Timestamp) -> Option<Departure> {
        if let Some(pod) = pod {
            self.by_user = is_deleted_by_user(pod);
            self.since = None;
            self.sandbox = sandbox_of(pod);
            return None;
        }
        Some(Departure {
            since: *self.since.get_or_insert(now),
            by_user: self.by_user,
            // `with_disk` sets it.
            disk_short: false,
        })
    }

    /// Returns when the task first found the Pod gone.
    pub(super) fn since(&self) -> Option<Timestamp> {
        self.since
    }

    /// Returns the name of the Pod's Sandbox. None if the task never observed the Pod.
    pub(super) fn sandbox(&self) -> Option<&str> {
        self.sandbox.as_ref().map(|(name, _)| name.as_str())
    }

    pub(super) fn sandbox_uid(&self) -> Option<String> {
        self.sandbox.as_ref().map(|(_, uid)| uid.clone())
    }
}

/// Returns whether a user deleted the Pod. A Pod that was evicted, or that its kubelet ended at the
/// node's shutdown, was not deleted by a user.
fn is_deleted_by_user(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let shut_down = status.and_then(|status| status.reason.as_deref()) == Some(NODE_SHUTDOWN);
    let evicted = condition(pod, conditions::POD_DISRUPTION_TARGET)
        .is_some_and(|found| found.status == "True");
    pod.metadata.deletion_timestamp.is_some() && !evicted && !shut_down
}

/// Returns name and UID of the Sandbox that controls the Pod.
fn sandbox_of(pod: &Pod) -> Option<(String, String)> {
    let name = sandbox_name(pod)?;
    let mut owners = pod.metadata.owner_references.iter().flatten();
    let uid = owners
        .find(|owner| owner.controller == Some(true))?
        .uid
        .clone();
    Some((name.to_owned(), uid))
}

/// Returns `desired` with the state of the images' disk added. Reads the disk.
pub(super) fn with_disk(shared: &Shared, desired: &Desired) -> Desired {
    let mut desired = desired.clone();
    if let Some(departure) = &mut desired.departure
        && shared.board.is_oldest_unclaimed(&desired.pod_uid)
    {
        let node = &shared.node;
        // The limit at which a save under way is stopped. The whole reserve would be the wrong
        // limit: a node may have less than that free for long.
        departure.disk_short = node.store.check_room(0, node.limits.reserve / 2).is_err();
    }
    desired
}

/// An unclaimed image that the plan removes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GivenUp {
    pub(super) image: ImageId,
    pub(super) disk_short: bool,
    pub(super) namespace: String,
    pod_name: String,
    pub(super) sandbox_name: String,
}

impl GivenUp {
    /// Returns the text of the Event.
    pub(super) fn words(&self, node: &str, grace: Duration) -> String {
        let Self {
            image,
            disk_short,
            pod_name,
            ..
        } = self;
        let why = match disk_short {
            true => "the images' disk is short of room, and this image was the oldest that no SandboxSnapshot named".to_owned(),
            false => format!(
                "no SandboxSnapshot has named the Pod within {} s (--unclaimed-image-grace)",
                grace.as_secs()
            ),
        };
        format!(
            "The memory of the deleted Pod {pod_name:?} was removed from node {node:?} (image {image}): {why}. The Sandbox's next Pod starts without it"
        )
    }
}

/// Returns the images that the plan gives up. Their manifests are read now, because they go
/// with the images.
pub(super) fn given_up(node: &Node, namespace: Option<&Namespace>, plan: &Plan) -> Vec<GivenUp> {
    let given_up = |reason: &Reason| match reason {
        Reason::GivenUp { image, disk_short } => {
            let found = node.store.image(namespace?, image).ok();
            let manifest = found.as_ref().map(|image| image.manifest());
            Some(GivenUp {
                image: image.clone(),
                disk_short: *disk_short,
                namespace: namespace?.to_string(),
                pod_name: manifest.map(|m| m.pod_name.clone()).unwrap_or_default(),
                sandbox_name: manifest.map(|m| m.sandbox_name.clone()).unwrap_or_default(),
            })
        }
        _ => None,
    };
    plan.why.iter().filter_map(given_up).collect()
}

/// The remains on the disk of a Pod that the API has no more.
pub(super) struct Remains {
    pub(super) namespace: Option<String>,
    pub(super) has_image: bool,
}

/// Reads the Pod's remains from the disk.
pub(super) fn remains(node: &Node, pod: &PodUid) -> Remains {
    let record = node.sandbox_of(pod);
    let images = node.store.list_pod(pod).unwrap_or_default();
    let of_record = record.map(|record| record.namespace);
    let of_images = || images.first().map(|image| image.namespace.clone());
    Remains {
        namespace: of_record.or_else(of_images).map(|name| name.to_string()),
        has_image: !images.is_empty(),
    }
}

/// Returns the snapshots without Torpor's finalizer that this node takes on.
///
/// If the Pod is gone, the snapshot has to name it; in addition an image of the Pod has to be
/// on this node, or the snapshot has to name this node.
pub(super) fn to_adopt<'a>(
    snapshots: &'a [Arc<SandboxSnapshot>],
    node: &str,
    is_there: bool,
    has_image: bool,
) -> impl Iterator<Item = &'a Arc<SandboxSnapshot>> {
    let is_ours = move |snapshot: &SandboxSnapshot| {
        let is_asked = snapshot.spec.node_name.as_deref() == Some(node);
        let is_named = snapshot.spec.pod_uid.is_some();
        may_be_of_node(snapshot, node) && (is_there || is_named && (has_image || is_asked))
    };
    let is_fresh = |snapshot: &SandboxSnapshot| {
        !snapshot.is_adopted() && snapshot.metadata.deletion_timestamp.is_none()
    };
    snapshots
        .iter()
        .filter(move |snapshot| is_fresh(snapshot) && is_ours(snapshot))
}

/// Returns the snapshots about a Pod: those that name it, and those that name only its Sandbox
/// if it is the Sandbox's current Pod.
pub(super) fn snapshots_about(
    shared: &Shared,
    uid: &PodUid,
    namespace: Option<&str>,
    pod: Option<&Pod>,
) -> Vec<Arc<SandboxSnapshot>> {
    let mut about = shared.snapshots.of_pod(uid, namespace);
    let Some(pod) = pod else {
        return about;
    };
    let unnamed = shared.snapshots.of_sandbox_of(pod);
    if let (false, Some(sandbox)) = (unnamed.is_empty(), sandbox_name(pod)) {
        let stands = shared.pods.find(|pod| stands_for(pod, namespace, sandbox));
        if stands.and_then(|stands| stands.uid()) == pod.uid() {
            about.extend(unnamed);
        }
    }
    about
}

/// Returns the Pod that a snapshot is about, from the caches.
pub(crate) fn pod_about(shared: &Shared, snapshot: &SandboxSnapshot) -> Option<PodUid> {
    let standing = || {
        let namespace = snapshot.metadata.namespace.as_deref();
        let sandbox = &snapshot.spec.sandbox_name;
        let pod = shared
            .pods
            .find(|pod| stands_for(pod, namespace, sandbox))?;
        PodUid::new(pod.uid()?).ok()
    };
    named_pod(snapshot).or_else(standing)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::reconcile::desired::tests::{pod, snapshot};

    fn going(change: serde_json::Value) -> Pod {
        let mut object = serde_json::to_value(pod(json!({}))).expect("JSON");
        torpor_test_apiserver::merge_patch::apply(&mut object, &change);
        serde_json::from_value(object).expect("a Pod")
    }

    fn deleted() -> serde_json::Value {
        json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } })
    }

    fn disrupted(reason: &str) -> serde_json::Value {
        let condition = json!({ "type": "DisruptionTarget", "status": "True", "reason": reason });
        json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" }, "status": { "conditions": [condition] } })
    }

    #[test]
    fn a_deletion_is_the_users_unless_an_eviction_or_the_kubelet_ended_the_pod() {
        assert!(!is_deleted_by_user(&going(json!({}))));
        assert!(is_deleted_by_user(&going(deleted())));
        assert!(!is_deleted_by_user(&going(disrupted(
            "EvictionByEvictionAPI"
        ))));
        let mut shut_down = deleted();
        shut_down["status"] = json!({ "phase": "Failed", "reason": "NodeShutdown" });
        assert!(!is_deleted_by_user(&going(shut_down)));
    }

    #[test]
    fn a_departure_has_the_last_seen_cause_and_begins_when_the_pod_is_found_gone() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let mut seen = Going::default();
        assert_eq!(seen.departure(Some(&going(disrupted("x"))), at(1)), None);
        let gone = seen.departure(None, at(2)).expect("it is gone");
        assert_eq!((gone.since, gone.by_user), (at(2), false));
        let later = seen.departure(None, at(3)).expect("it is gone");
        assert_eq!(later.since, at(2));
        // The watch was behind: the Pod is still there.
        seen.departure(Some(&going(deleted())), at(5));
        let again = seen.departure(None, at(6)).expect("it is gone");
        assert_eq!((again.since, again.by_user), (at(6), true));
        assert_eq!(
            seen.sandbox.as_ref().map(|(name, uid)| (&**name, &**uid)),
            Some(("s", "sandbox-1"))
        );
        // An agent that never observed the Pod cannot know that a user deleted it.
        let unseen = Going::default().departure(None, at(7)).expect("it is gone");
        assert!(!unseen.by_user);
    }

    #[test]
    fn a_gone_pods_snapshot_is_adopted_by_its_images_node_or_the_named_node() {
        let of = |spec: serde_json::Value| vec![Arc::new(snapshot(spec, &[]))];
        let takes = |spec: serde_json::Value, is_there, has_image| {
            to_adopt(&of(spec), "node", is_there, has_image).count() == 1
        };
        let named = json!({ "sandboxName": "s", "podUID": "pod-1" });
        let asked = json!({ "sandboxName": "s", "podUID": "pod-1", "nodeName": "node" });
        let foreign = json!({ "sandboxName": "s", "podUID": "pod-1", "nodeName": "other" });
        let unnamed = json!({ "sandboxName": "s" });
        assert!(takes(unnamed.clone(), true, false));
        assert!(
            !takes(unnamed, false, true),
            "the Sandbox may have another Pod now"
        );
        assert!(takes(named.clone(), false, true));
        assert!(!takes(named, false, false), "it may be another node's");
        assert!(takes(asked, false, false), "to be told that there is none");
        for (is_there, has_image) in [(true, false), (false, true)] {
            assert!(!takes(foreign.clone(), is_there, has_image));
        }
    }
}
