//! Which Pods have a task, and which get one.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

use kube::ResourceExt;
use tokio::sync::Notify;
use torpor_core::ids::PodUid;

use super::{Driver, pod_of};

/// Most tasks at once of Pods of which only snapshots tell that they were on this node. Tenants make those; the others wait for the next sweep.
const MAX_STRANGERS: usize = 256;

/// The tasks of the Pods.
#[derive(Debug, Default)]
pub(super) struct Tasks {
    of_pods: HashMap<PodUid, Task>,
    strangers: usize,
}

#[derive(Debug)]
struct Task {
    notify: Arc<Notify>,
    whose: Whose,
}

/// What is known of the Pod that gets a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Whose {
    /// It is on this node, or something of it is.
    Ours,
    /// Only a snapshot says so.
    Stranger,
}

impl Tasks {
    /// Wakes the Pod's task, if it has one.
    fn wake(&self, pod: &PodUid) -> bool {
        let task = self.of_pods.get(pod);
        task.inspect(|task| task.notify.notify_one()).is_some()
    }

    /// What a new task is woken by; none if the Pod has one, or gets none now.
    fn begin(&mut self, pod: &PodUid, whose: Whose) -> Option<Arc<Notify>> {
        let is_full = whose == Whose::Stranger && self.strangers >= MAX_STRANGERS;
        if is_full || self.of_pods.contains_key(pod) {
            return None;
        }
        self.strangers += usize::from(whose == Whose::Stranger);
        let notify = Arc::new(Notify::new());
        let task = Task {
            notify: notify.clone(),
            whose,
        };
        self.of_pods.insert(pod.clone(), task);
        Some(notify)
    }

    pub(super) fn end(&mut self, pod: &PodUid) {
        let ended = self.of_pods.remove(pod);
        if ended.is_some_and(|task| task.whose == Whose::Stranger) {
            self.strangers -= 1;
        }
    }
}

impl Driver {
    /// The caches are full: from now on a Pod that is not in them is gone.
    pub(crate) fn begin(&self) {
        self.begun.store(true, Ordering::Release);
        self.take_up();
    }

    /// The API says that something about the Pod changed; whether the Pod has anything to do with this node. What only the node's disk knows is found by the next sweep.
    pub(crate) fn poke_if_kept(&self, pod: &PodUid) -> bool {
        if !self.begun.load(Ordering::Acquire) {
            return false;
        }
        if self.tasks().wake(pod) {
            return true;
        }
        let whose = if pod_of(&self.shared, pod).is_some() {
            Whose::Ours
        } else if self.shared.snapshots.is_to_answer(pod) {
            Whose::Stranger
        } else {
            return false;
        };
        self.start(pod, whose);
        true
    }

    /// Every Pod that this node knows of, from the API or from its own disk, gets a task, which looks by itself from then on. Reads the disk.
    pub(crate) fn take_up(&self) {
        let ours = self.ours();
        for pod in &ours {
            self.start(pod, Whose::Ours);
        }
        for pod in self.shared.snapshots.to_answer().difference(&ours) {
            self.start(pod, Whose::Stranger);
        }
    }

    fn start(&self, pod: &PodUid, whose: Whose) {
        let Some(notify) = self.tasks().begin(pod, whose) else {
            return;
        };
        let (driver, pod) = (self.clone(), pod.clone());
        self.tracker
            .spawn(async move { driver.drive(pod, notify).await });
    }

    pub(super) fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pods that run here, or of which something is left here.
    fn ours(&self) -> BTreeSet<PodUid> {
        let shared = &self.shared;
        let node = &shared.node;
        let pods = shared.pods.state();
        let of_api = pods.iter().filter_map(|pod| PodUid::new(pod.uid()?).ok());
        let of_images = node.store.pods().unwrap_or_default();
        let mut ours: BTreeSet<PodUid> = of_api.chain(node.pods()).chain(of_images).collect();
        ours.extend(node.store.ledgers().unwrap_or_default());
        // A restore that was under way when its Pod was removed may tell of its end after the agent has forgotten the Pod.
        ours.extend(node.records.reported().unwrap_or_default());
        ours
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_snapshots_tell_of_gets_so_many_tasks_and_no_more() {
        let pod = |n: usize| PodUid::new(format!("pod-{n}")).expect("a UID");
        let mut tasks = Tasks::default();
        let began = (0..2 * MAX_STRANGERS).filter(|n| {
            let begun = tasks.begin(&pod(*n), Whose::Stranger);
            begun.is_some()
        });
        assert_eq!(began.count(), MAX_STRANGERS);
        let ours = PodUid::new("ours").expect("a UID");
        assert!(tasks.begin(&ours, Whose::Ours).is_some(), "never held up");
        assert!(tasks.begin(&ours, Whose::Ours).is_none(), "one for each");
        assert!(tasks.wake(&ours) && tasks.wake(&pod(0)));
        assert!(!tasks.wake(&pod(MAX_STRANGERS)));
        tasks.end(&pod(0));
        tasks.end(&ours);
        assert!(tasks.begin(&pod(MAX_STRANGERS), Whose::Stranger).is_some());
        assert!(tasks.begin(&pod(0), Whose::Stranger).is_none());
    }
}
