//! The registry of the Pods' tasks.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::Notify;
use torpor_core::ids::PodUid;

/// Most tasks at once for Pods that only snapshots assign to this node. Tenants make such
/// snapshots; the other Pods wait for the next sweep.
const MAX_SNAPSHOT_TASKS: usize = 256;

/// The tasks of the Pods.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    of_pods: HashMap<PodUid, Task>,
    of_snapshots: usize,
}

#[derive(Debug)]
struct Task {
    notify: Arc<Notify>,
    origin: Origin,
}

/// The reason why a Pod gets a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// The Pod, or something that it has left, is on this node.
    Node,
    /// Only a snapshot assigns the Pod to this node.
    Snapshot,
}

impl Tasks {
    /// Wakes the Pod's task. Returns whether the Pod has one.
    pub(super) fn wake(&self, pod: &PodUid) -> bool {
        let task = self.of_pods.get(pod);
        task.inspect(|task| task.notify.notify_one()).is_some()
    }

    /// Registers a new task and returns the notification that wakes it. Returns none if the Pod has
    /// a task already, or gets none now because of the limit.
    pub(super) fn begin(&mut self, pod: &PodUid, origin: Origin) -> Option<Arc<Notify>> {
        let is_full = origin == Origin::Snapshot && self.of_snapshots >= MAX_SNAPSHOT_TASKS;
        if is_full || self.of_pods.contains_key(pod) {
            return None;
        }
        self.of_snapshots += usize::from(origin == Origin::Snapshot);
        let notify = Arc::new(Notify::new());
        let task = Task {
            notify: notify.clone(),
            origin,
        };
        self.of_pods.insert(pod.clone(), task);
        Some(notify)
    }

    pub(super) fn end(&mut self, pod: &PodUid) {
        let ended = self.of_pods.remove(pod);
        if ended.is_some_and(|task| task.origin == Origin::Snapshot) {
            self.of_snapshots -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_known_only_from_snapshots_get_a_limited_number_of_tasks() {
        let pod = |n: usize| PodUid::new(format!("pod-{n}")).expect("a UID");
        let mut tasks = Tasks::default();
        let began = (0..2 * MAX_SNAPSHOT_TASKS).filter(|n| {
            let begun = tasks.begin(&pod(*n), Origin::Snapshot);
            begun.is_some()
        });
        assert_eq!(began.count(), MAX_SNAPSHOT_TASKS);
        let own = PodUid::new("ours").expect("a UID");
        assert!(tasks.begin(&own, Origin::Node).is_some(), "never held up");
        assert!(tasks.begin(&own, Origin::Node).is_none(), "one for each");
        assert!(tasks.wake(&own) && tasks.wake(&pod(0)));
        assert!(!tasks.wake(&pod(MAX_SNAPSHOT_TASKS)));
        tasks.end(&pod(0));
        tasks.end(&own);
        let next = pod(MAX_SNAPSHOT_TASKS);
        assert!(tasks.begin(&next, Origin::Snapshot).is_some());
        assert!(tasks.begin(&pod(0), Origin::Snapshot).is_none());
    }
}
