//! What those who speak for a sandbox that sleeps go by, and are told.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use torpor_core::ids::{PodUid, SandboxId};
use torpor_core::state::Desired;
use torpor_gvisor::keeper::{self, Request, Rules};
use torpor_gvisor::record::{PodRecord, Probes};

use super::{Driver, Shared};
use crate::desired::snapshots_about;
use crate::kubelet::{may_be_taken_for_probed, probes, rules};
use crate::node::{CALL_LIMIT, Node};

/// What the kubelet does with the Pod, if the API has it: what it probes, and what follows for who speaks for the Pod.
pub(super) struct Kubelet {
    pub(super) probes: Option<Probes>,
    pub(super) rules: Option<Rules>,
}

impl Kubelet {
    pub(super) fn of(pod: Option<&Pod>, desired: &Desired) -> Self {
        Self {
            probes: pod.map(|pod| probes(pod, desired)),
            rules: pod.map(|pod| rules(pod, desired)),
        }
    }
}

/// What a sandbox' keeper goes by, as far as this agent has told it.
pub(super) type Told = (SandboxId, Rules);

/// A keeper that holds packets for a sleeping Pod is told when the Pod's rules have changed.
pub(super) fn tell_rules(
    node: &Node,
    pod: &PodRecord,
    rules: &Rules,
    told: Option<Told>,
) -> Option<Told> {
    let new = (pod.sandbox.clone(), rules.clone());
    if told.as_ref() == Some(&new) {
        return told;
    }
    let request = Request::Rules(new.1.clone());
    match keeper::ask(&node.pause_dir(&new.0), &request, &[], CALL_LIMIT) {
        Ok(_) => Some(new),
        // It is not there yet, or no longer.
        Err(keeper::Error::Gone { .. }) => None,
        Err(error) => {
            let error = crate::observe::words(&error);
            tracing::warn!(pod_uid = %pod.pod_uid, error, "the Pod's keeper goes by its old rules until the sandbox falls asleep again");
            Some(new)
        }
    }
}

/// What the Pod's keeper is to go by, by what the API has said last.
pub(super) fn rules_now(shared: &Shared, uid: &PodUid, pod: &Pod) -> Rules {
    let all = shared.snapshots.state();
    let snapshots = snapshots_about(all, uid, pod.namespace().as_deref(), &[pod]);
    let references: Vec<_> = snapshots.iter().map(AsRef::as_ref).collect();
    let desired = crate::desired::desired(uid, Some(pod), None, &references);
    rules(pod, &desired)
}

impl Driver {
    /// The API says that the Pod changed.
    pub(crate) fn changed(&self, pod: &Pod) {
        let Some(uid) = pod.uid().and_then(|uid| PodUid::new(uid).ok()) else {
            return;
        };
        if self.poke_if_kept(&uid) && may_be_taken_for_probed(pod) {
            self.tell_of_deletion(uid, pod.clone());
        }
    }

    /// The kubelet runs the hook now, and the Pod's task may be in the middle of calls to the API: the keeper does not wait for them.
    fn tell_of_deletion(&self, uid: PodUid, pod: Pod) {
        let shared = self.shared.clone();
        self.tracker.spawn_blocking(move || {
            if let Some(record) = shared.node.sandbox_of(&uid) {
                tell_rules(&shared.node, &record, &rules_now(&shared, &uid, &pod), None);
            }
        });
    }
}
