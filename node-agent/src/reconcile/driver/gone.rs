//! A Pod that goes: how, and what is told of the memory that it leaves.

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

use super::written::Written;
use super::{Driver, LOOK, Look, RETRY, Remembered, Shared, Turn, untold};
use crate::reconcile::about::{named_pod, sandbox_name, stands_for};
use crate::reconcile::desired::condition;
use crate::reconcile::node::Node;
use crate::reconcile::shown::may_be_of_node;

/// Why a Pod has failed that its kubelet ended with the node (Kubernetes, `pkg/kubelet/nodeshutdown`).
const NODE_SHUTDOWN: &str = "NodeShutdown";

/// How a Pod goes, as far as its task has seen it. After a restart of the agent its grace time begins anew.
#[derive(Debug, Clone, Default)]
pub(super) struct Going {
    /// When it was last seen, somebody had deleted it to be rid of it.
    by_user: bool,
    /// When it was first found gone.
    since: Option<Timestamp>,
    /// The apiserver's answer, for the next plan alone.
    pub(super) answer: Option<Answer>,
    /// Name and UID of its Sandbox.
    sandbox: Option<(String, String)>,
}

impl Going {
    pub(super) fn departure(&mut self, pod: Option<&Pod>, now: Timestamp) -> Option<Departure> {
        let answer = self.answer.take();
        if let Some(pod) = pod {
            self.by_user = is_deleted_by_user(pod);
            self.since = None;
            self.sandbox = sandbox_of(pod);
            return None;
        }
        Some(Departure {
            since: *self.since.get_or_insert(now),
            by_user: self.by_user,
            // Whoever knows the disk says so.
            disk_short: false,
            answer,
        })
    }

    pub(crate) fn since(&self) -> Option<Timestamp> {
        self.since
    }

    /// Name of its Sandbox, where the Pod was seen.
    pub(crate) fn sandbox(&self) -> Option<&str> {
        self.sandbox.as_ref().map(|(name, _)| name.as_str())
    }
}

/// Whether somebody deleted the Pod to be rid of it: neither was it evicted, nor had its kubelet ended it for the node's sake.
fn is_deleted_by_user(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let shut_down = status.and_then(|status| status.reason.as_deref()) == Some(NODE_SHUTDOWN);
    let evicted =
        condition(pod, conditions::POD_DISRUPTION_TARGET).is_some_and(|said| said.status == "True");
    pod.metadata.deletion_timestamp.is_some() && !evicted && !shut_down
}

fn sandbox_of(pod: &Pod) -> Option<(String, String)> {
    let name = sandbox_name(pod)?;
    let mut owners = pod.metadata.owner_references.iter().flatten();
    let uid = owners
        .find(|owner| owner.controller == Some(true))?
        .uid
        .clone();
    Some((name.to_owned(), uid))
}

/// What is wanted, the images' disk considered. Reads the disk.
pub(super) fn with_disk(shared: &Shared, desired: &Desired) -> Desired {
    let mut desired = desired.clone();
    if let Some(departure) = &mut desired.departure
        && shared.board.is_oldest_unclaimed(&desired.pod_uid)
    {
        let node = &shared.node;
        // Where a save that is under way would be stopped: a node may be below its whole reserve for long.
        departure.disk_short = node.store.check_room(0, node.limits.reserve / 2).is_err();
    }
    desired
}

/// Memory that nobody has claimed, which its plan removes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GivenUp {
    image: ImageId,
    disk_short: bool,
    namespace: String,
    pod_name: String,
    sandbox_name: String,
}

impl GivenUp {
    fn words(&self, node: &str, grace: Duration) -> String {
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

/// What the plan gives up, by the images' manifests: they go with the images.
pub(super) fn given_up(node: &Node, namespace: Option<&Namespace>, plan: &Plan) -> Vec<GivenUp> {
    let of = |reason: &Reason| match reason {
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
    plan.why.iter().filter_map(of).collect()
}

/// What is left on the disk of a Pod that the API has no more.
struct Left {
    namespace: Option<String>,
    has_image: bool,
}

fn left(node: &Node, pod: &PodUid) -> Left {
    let record = node.sandbox_of(pod);
    let images = node.store.list_pod(pod).unwrap_or_default();
    let of_record = record.map(|record| record.namespace);
    let of_images = || images.first().map(|image| image.namespace.clone());
    Left {
        namespace: of_record.or_else(of_images).map(|name| name.to_string()),
        has_image: !images.is_empty(),
    }
}

/// Those of the snapshots without our finalizer that this node takes on. Of a Pod that is gone: one that names it, where its image is here, or where this node is asked for it by name.
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

/// The snapshots about a Pod: those that name it, and those that name only the Sandbox that it stands for.
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

impl Driver {
    /// The snapshots about the Pod, and whether an image of it is here, if it is gone.
    pub(super) async fn snapshots_of(
        &self,
        uid: &PodUid,
        pod: Option<&Pod>,
    ) -> Result<(Vec<Arc<SandboxSnapshot>>, bool), tokio::task::JoinError> {
        let left = match pod {
            Some(pod) => Left {
                namespace: pod.namespace(),
                has_image: false,
            },
            None => {
                let (shared, uid) = (self.shared.clone(), uid.clone());
                tokio::task::spawn_blocking(move || left(&shared.node, &uid)).await?
            }
        };
        let namespace = left.namespace.as_deref();
        let about = snapshots_about(&self.shared, uid, namespace, pod);
        Ok((about, left.has_image))
    }

    /// Our finalizer goes on a snapshot before a byte is written for it; the cache then shows it to the next turn.
    pub(super) async fn adopt(
        &self,
        snapshots: &[Arc<SandboxSnapshot>],
        pod: Option<&Pod>,
        has_image: bool,
    ) -> Result<(), Duration> {
        let publisher = &self.shared.publisher;
        let node = publisher.node_name();
        let mut result = Ok(());
        for snapshot in to_adopt(snapshots, node, pod.is_some(), has_image) {
            match publisher.adopt(snapshot).await {
                Ok(()) => result = Err(LOOK),
                Err(error) => {
                    let error = crate::reconcile::observe::words(&error);
                    tracing::warn!(
                        snapshot = snapshot.name_any(),
                        error,
                        "cannot write the finalizer"
                    );
                    result = Err(RETRY);
                }
            }
        }
        result
    }

    /// The last that is said of a Pod of which nothing is left.
    pub(super) async fn end(
        &self,
        pod: &PodUid,
        snapshots: &[Arc<SandboxSnapshot>],
        look: &Look,
        written: &mut Written,
    ) -> Turn {
        if let Err(error) = self.tell(None, snapshots, look, written).await {
            untold(pod, &error);
            return Turn::Wait(RETRY);
        }
        self.shared.board.forget(pod);
        if let Some(kata) = &self.shared.kata {
            kata.forget(pod);
        }
        Turn::Nothing
    }

    /// Says which memory is lost now, and why, on the Sandbox: of what went. Whoever asked for it later is told by the controller.
    pub(super) async fn tell_given_up(&self, given_up: Vec<GivenUp>, remembered: &Remembered) {
        for one in given_up {
            let images = self.shared.node.store.list_pod(one.image.pod());
            let is_there = images.is_ok_and(|all| all.iter().any(|image| image.id == one.image));
            if is_there {
                continue;
            }
            self.shared.metrics.gave_up(one.disk_short);
            let sandbox = remembered.going.sandbox.as_ref();
            let uid = sandbox.map(|(_, uid)| uid.clone());
            let publisher = &self.shared.publisher;
            let words = one.words(publisher.node_name(), self.shared.policy.unclaimed_grace);
            let (namespace, name) = (one.namespace, one.sandbox_name);
            publisher
                .memory_given_up(namespace, name, uid, &words)
                .await;
        }
    }
}

/// The Pod that a snapshot is about, by what the watches show.
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
    fn a_pod_is_deleted_to_be_rid_of_it_unless_it_is_evicted_or_its_kubelet_has_ended_it() {
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
    fn how_a_pod_went_is_known_by_how_it_was_last_seen_and_its_grace_begins_when_it_is_found_gone()
    {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let mut seen = Going::default();
        assert_eq!(seen.departure(Some(&going(disrupted("x"))), at(1)), None);
        let gone = seen.departure(None, at(2)).expect("it is gone");
        assert_eq!((gone.since, gone.by_user), (at(2), false));
        seen.answer = Some(Answer::default());
        let later = seen.departure(None, at(3)).expect("it is gone");
        assert_eq!((later.since, later.answer.is_some()), (at(2), true));
        let after = seen.departure(None, at(4)).expect("it is gone");
        assert_eq!(after.answer, None, "an answer is for one plan");
        // The watch was behind.
        seen.departure(Some(&going(deleted())), at(5));
        let again = seen.departure(None, at(6)).expect("it is gone");
        assert_eq!((again.since, again.by_user), (at(6), true));
        assert_eq!(
            seen.sandbox.as_ref().map(|(name, uid)| (&**name, &**uid)),
            Some(("s", "sandbox-1"))
        );
        // An agent that never saw it knows nothing of that.
        let unseen = Going::default().departure(None, at(7)).expect("it is gone");
        assert!(!unseen.by_user);
    }

    #[test]
    fn a_snapshot_of_a_pod_that_is_gone_is_taken_on_where_its_image_is_or_by_the_node_that_it_names()
     {
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
