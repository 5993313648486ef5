//! Starting the tasks of the Pods, and waking them.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use torpor_core::ids::PodUid;

use super::Driver;
use super::keeper_rules::{rules_now, send_rules};
use super::shared::pod_of;
use super::tasks::{Origin, Tasks};
use crate::reconcile::kubelet::may_be_taken_for_probed;

impl Driver {
    /// Begins the work once the caches are full. From then on a Pod that is not in them is gone.
    pub(crate) fn begin(&self) {
        self.begun.store(true, Ordering::Release);
        self.take_up();
    }

    /// Wakes or starts the task of a Pod about which the API reports a change. Returns whether the
    /// Pod concerns this node. The next sweep finds the Pods that only the node's disk has.
    pub(crate) fn wake_task(&self, pod: &PodUid) -> bool {
        if !self.begun.load(Ordering::Acquire) {
            return false;
        }
        if self.tasks().wake(pod) {
            return true;
        }
        let origin = if pod_of(&self.shared, pod).is_some() {
            Origin::Node
        } else if self.shared.snapshots.is_to_answer(pod) {
            Origin::Snapshot
        } else {
            return false;
        };
        self.start(pod, origin);
        true
    }

    /// Starts a task for every Pod that the API or the node's disk has and that has none. Reads the
    /// disk.
    pub(crate) fn take_up(&self) {
        let of_node = self.pods_of_node();
        for pod in &of_node {
            self.start(pod, Origin::Node);
        }
        for pod in self.shared.snapshots.to_answer().difference(&of_node) {
            self.start(pod, Origin::Snapshot);
        }
    }

    /// Wakes the task of a Pod that the API reports as changed. If the change may be the Pod's
    /// deletion, the Pod's keeper gets its new rules at once.
    pub(crate) fn changed(&self, pod: &Pod) {
        let Some(uid) = pod.uid().and_then(|uid| PodUid::new(uid).ok()) else {
            return;
        };
        if self.wake_task(&uid) && may_be_taken_for_probed(pod) {
            self.send_rules_of_deletion(uid, pod.clone());
        }
    }

    /// Sends the rules outside the Pod's task. The kubelet runs the hook now, and the task may be
    /// waiting for the apiserver.
    fn send_rules_of_deletion(&self, uid: PodUid, pod: Pod) {
        let shared = self.shared.clone();
        self.tracker.spawn_blocking(move || {
            if let Some(record) = shared.node.sandbox_of(&uid) {
                send_rules(&shared.node, &record, &rules_now(&shared, &uid, &pod), None);
            }
        });
    }

    fn start(&self, pod: &PodUid, origin: Origin) {
        let Some(notify) = self.tasks().begin(pod, origin) else {
            return;
        };
        let (driver, pod) = (self.clone(), pod.clone());
        self.tracker
            .spawn(async move { driver.drive(pod, notify).await });
    }

    pub(super) fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the Pods that run here or have left something here.
    fn pods_of_node(&self) -> BTreeSet<PodUid> {
        let shared = &self.shared;
        let node = &shared.node;
        let pods = shared.pods.state();
        let of_api = pods.iter().filter_map(|pod| PodUid::new(pod.uid()?).ok());
        let of_images = node.store.pods().unwrap_or_default();
        let mut all: BTreeSet<PodUid> = of_api.chain(node.pods()).chain(of_images).collect();
        all.extend(node.store.ledgers().unwrap_or_default());
        // If a Pod is removed while its sandbox is being restored, the restore may write its report
        // after the agent has forgotten the Pod.
        all.extend(node.records.reported().unwrap_or_default());
        all
    }
}
