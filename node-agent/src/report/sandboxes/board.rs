//! The latest plan of each Pod: the driver's tasks write it, the report reads it.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use tokio::sync::Notify;
use torpor_api::node::PlanReason;
use torpor_core::ids::{ImageId, PodUid};
use torpor_core::steps::{Plan, Reason};

/// The entries of all Pods.
#[derive(Debug, Default)]
pub(crate) struct Board {
    pods: Mutex<HashMap<PodUid, Latest>>,
    /// Notified when a left image changes.
    left_changed: Notify,
}

/// The entry of a Pod, from the latest plan of its task.
#[derive(Debug)]
pub(crate) struct Latest {
    reasons: Vec<PlanReason>,
    /// The agent watches the Pod's sandbox for idleness.
    watched: bool,
    /// Name of the Pod's Sandbox; None if the task has not read the Pod.
    sandbox: Option<String>,
    /// The API no longer has the Pod.
    is_gone: bool,
    left: Option<Left>,
}

/// The image that a Pod left when it was deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Left {
    pub(super) image: ImageId,
    /// Time at which the task found that the API no longer has the Pod.
    pub(super) since: Timestamp,
    /// The image is kept until a SandboxSnapshot names the Pod.
    is_unclaimed: bool,
}

impl Latest {
    /// Makes the entry from a plan. `gone_since` is the time at which the task found that the API
    /// no longer has the Pod, or None.
    pub(crate) fn of(
        plan: &Plan,
        watched: bool,
        sandbox: Option<&str>,
        gone_since: Option<Timestamp>,
    ) -> Self {
        let waits = |reason: &Reason| matches!(reason, Reason::Unclaimed { .. });
        let left = plan.status.left.clone().zip(gone_since);
        Self {
            reasons: plan.why.iter().map(plan_reason).collect(),
            watched,
            sandbox: sandbox.map(str::to_owned),
            is_gone: gone_since.is_some(),
            left: left.map(|(image, since)| Left {
                image,
                since,
                is_unclaimed: plan.why.iter().any(waits),
            }),
        }
    }
}

impl Board {
    pub(crate) fn note(&self, pod: &PodUid, latest: Latest) {
        let left = latest.left.clone();
        let before = self.lock().insert(pod.clone(), latest);
        if before.and_then(|before| before.left) != left {
            self.left_changed.notify_one();
        }
    }

    pub(crate) fn forget(&self, pod: &PodUid) {
        let before = self.lock().remove(pod);
        if before.is_some_and(|before| before.left.is_some()) {
            self.left_changed.notify_one();
        }
    }

    /// Waits until the image that a deleted Pod has left changes, appears or disappears.
    pub(crate) async fn left_changed(&self) {
        self.left_changed.notified().await;
    }

    /// Reports whether this Pod's image has waited longest among all images that wait for a
    /// SandboxSnapshot.
    pub(crate) fn is_oldest_unclaimed(&self, pod: &PodUid) -> bool {
        let pods = self.lock();
        let unclaimed = pods.iter().filter_map(|(pod, latest)| {
            let left = latest.left.as_ref().filter(|left| left.is_unclaimed)?;
            Some((left.since, pod))
        });
        unclaimed.min().is_some_and(|(_, oldest)| oldest == pod)
    }

    /// Returns the images that deleted Pods have left.
    pub(super) fn left(&self) -> Vec<(PodUid, Left)> {
        let pods = self.lock();
        let left = pods.iter().filter_map(|(pod, latest)| {
            let left = latest.left.clone()?;
            Some((pod.clone(), left))
        });
        left.collect()
    }

    /// Returns the planner's reasons about a Pod.
    pub(super) fn reasons(&self, pod: &PodUid) -> Vec<PlanReason> {
        let pods = self.lock();
        pods.get(pod)
            .map_or_else(Vec::new, |latest| latest.reasons.clone())
    }

    /// Reports whether the API no longer has the Pod and the Pod's task has planned for its images
    /// since.
    pub(super) fn is_gone(&self, pod: &PodUid) -> bool {
        self.lock().get(pod).is_some_and(|latest| latest.is_gone)
    }

    pub(super) fn sandbox_of(&self, pod: &PodUid) -> Option<String> {
        self.lock().get(pod)?.sandbox.clone()
    }

    /// Returns the number of sandboxes that the agent watches for idleness.
    pub(super) fn watched(&self) -> usize {
        self.lock().values().filter(|latest| latest.watched).count()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PodUid, Latest>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Converts a reason to its form in the API: its name, and its fields as `key=value`.
pub(super) fn plan_reason(reason: &Reason) -> PlanReason {
    use serde_json::Value;
    match serde_json::to_value(reason) {
        Ok(Value::String(reason)) => PlanReason {
            reason,
            detail: String::new(),
        },
        Ok(Value::Object(tagged)) => {
            let (reason, fields) = tagged.into_iter().next().unwrap_or_default();
            let fields = fields.as_object().cloned().unwrap_or_default();
            let pairs = fields.into_iter().map(|(key, value)| match value {
                Value::String(text) => format!("{key}={text}"),
                other => format!("{key}={other}"),
            });
            let detail = pairs.collect::<Vec<_>>().join(" ");
            PlanReason { reason, detail }
        }
        // serde serializes a reason as a name or as a name with fields, and as nothing else.
        _ => PlanReason::default(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use futures::FutureExt;

    use super::*;

    pub(crate) fn left(image: &str, since: i64, is_unclaimed: bool) -> Latest {
        Latest {
            reasons: Vec::new(),
            watched: false,
            sandbox: None,
            is_gone: true,
            left: Some(Left {
                image: ImageId::parse(image).expect("an image"),
                since: Timestamp::from_second(since).expect("a time"),
                is_unclaimed,
            }),
        }
    }

    #[test]
    fn the_oldest_unclaimed_image_goes_first() {
        let pod = |uid: &str| PodUid::new(uid).expect("a UID");
        let board = Board::default();
        board.note(&pod("claimed"), left("claimed.1", 1, false));
        board.note(&pod("old"), left("old.1", 2, true));
        board.note(&pod("new"), left("new.1", 3, true));
        let oldest =
            || ["claimed", "old", "new", "none"].map(|uid| board.is_oldest_unclaimed(&pod(uid)));
        assert_eq!(oldest(), [false, true, false, false]);
        board.forget(&pod("old"));
        assert_eq!(oldest(), [false, false, true, false]);
    }

    #[test]
    fn a_change_of_the_memory_that_a_pod_left_is_news_once() {
        let pod = PodUid::new("pod-a").expect("a UID");
        let board = Board::default();
        let changed = || board.left_changed().now_or_never().is_some();
        board.note(&pod, left("pod-a.1", 1, true));
        assert_eq!([changed(), changed()], [true, false]);
        board.note(&pod, left("pod-a.1", 1, true));
        assert!(!changed());
        board.note(&pod, left("pod-a.1", 1, false));
        assert!(changed());
        board.forget(&pod);
        assert!(changed());
    }
}
