//! The latest of each Pod: the drivers' tasks write, the report reads.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use tokio::sync::Notify;
use torpor_api::node::PlanReason;
use torpor_core::ids::{ImageId, PodUid};
use torpor_core::steps::{Plan, Reason};

/// The latest of each Pod.
#[derive(Debug, Default)]
pub(crate) struct Board {
    pods: Mutex<HashMap<PodUid, Latest>>,
    news: Notify,
}

/// What a Pod's task has planned.
#[derive(Debug)]
pub(crate) struct Latest {
    reasons: Vec<PlanReason>,
    /// Whether it is watched for idleness.
    watched: bool,
    /// Name of its Sandbox, where the Pod was seen.
    sandbox: Option<String>,
    /// Whether the API has the Pod no more.
    is_gone: bool,
    left: Option<Left>,
}

/// Memory that a Pod left which is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Left {
    pub(super) image: ImageId,
    /// When the Pod was found gone.
    pub(super) since: Timestamp,
    /// It waits for a snapshot that claims it.
    is_unclaimed: bool,
}

impl Latest {
    /// `gone_since`: when the Pod was found gone, if it is.
    pub(crate) fn of(
        plan: &Plan,
        watched: bool,
        sandbox: Option<&str>,
        gone_since: Option<Timestamp>,
    ) -> Self {
        let waits = |reason: &Reason| matches!(reason, Reason::Unclaimed { .. });
        let left = plan.status.left.clone().zip(gone_since);
        Self {
            reasons: plan.why.iter().map(told).collect(),
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
            self.news.notify_one();
        }
    }

    pub(crate) fn forget(&self, pod: &PodUid) {
        let before = self.lock().remove(pod);
        if before.is_some_and(|before| before.left.is_some()) {
            self.news.notify_one();
        }
    }

    /// Waits until a Pod that is gone has left something else than before.
    pub(crate) async fn news(&self) {
        self.news.notified().await;
    }

    /// Whether of all images that wait for a snapshot this Pod's has waited for longest.
    pub(crate) fn is_oldest_unclaimed(&self, pod: &PodUid) -> bool {
        let pods = self.lock();
        let unclaimed = pods.iter().filter_map(|(pod, latest)| {
            let left = latest.left.as_ref().filter(|left| left.is_unclaimed)?;
            Some((left.since, pod))
        });
        unclaimed.min().is_some_and(|(_, oldest)| oldest == pod)
    }

    /// What Pods left that are gone.
    pub(super) fn left(&self) -> Vec<(PodUid, Left)> {
        let pods = self.lock();
        let left = pods.iter().filter_map(|(pod, latest)| {
            let left = latest.left.clone()?;
            Some((pod.clone(), left))
        });
        left.collect()
    }

    pub(super) fn of(&self, pod: &PodUid) -> Vec<PlanReason> {
        let pods = self.lock();
        pods.get(pod)
            .map_or_else(Vec::new, |latest| latest.reasons.clone())
    }

    /// Whether it was planned what becomes of the Pod's images now that the API has it no more.
    pub(super) fn is_gone(&self, pod: &PodUid) -> bool {
        self.lock().get(pod).is_some_and(|latest| latest.is_gone)
    }

    pub(super) fn sandbox_of(&self, pod: &PodUid) -> Option<String> {
        self.lock().get(pod)?.sandbox.clone()
    }

    /// How many are watched for idleness.
    pub(super) fn watched(&self) -> usize {
        self.lock().values().filter(|latest| latest.watched).count()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PodUid, Latest>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reason in the API's words: its name, and what it carries as `key=value`.
pub(super) fn told(reason: &Reason) -> PlanReason {
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
        // A reason is a name, or a name with fields: serde writes nothing else of it.
        _ => PlanReason::default(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use futures::FutureExt;

    use super::*;

    pub(in crate::report::sandboxes) fn left(
        image: &str,
        since: i64,
        is_unclaimed: bool,
    ) -> Latest {
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
    fn the_disk_takes_the_oldest_image_that_nobody_claims_first() {
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
    fn what_a_pod_left_is_news_once() {
        let pod = PodUid::new("pod-a").expect("a UID");
        let board = Board::default();
        let is_news = || board.news().now_or_never().is_some();
        board.note(&pod, left("pod-a.1", 1, true));
        assert_eq!([is_news(), is_news()], [true, false]);
        board.note(&pod, left("pod-a.1", 1, true));
        assert!(!is_news());
        board.note(&pod, left("pod-a.1", 1, false));
        assert!(is_news());
        board.forget(&pod);
        assert!(is_news());
    }
}
