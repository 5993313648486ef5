//! The rules by which a Pod's shim acts for a sleeping sandbox.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use torpor_core::ids::{PodUid, SandboxId};
use torpor_core::state::{Desired, Live, Observed};
use torpor_records::{PodRecord, Probes, Rules};

use super::departure::snapshots_about;
use super::shared::Shared;
use crate::reconcile::kubelet::{probes, rules};
use crate::reconcile::node::Node;
use crate::reconcile::observe::words;
use crate::reconcile::shim::Shim;

/// The kubelet's probes of a Pod, and the rules of its shim that follow from the Pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KubeletRules {
    pub(super) probes: Probes,
    pub(super) rules: Rules,
}

impl KubeletRules {
    /// None if the API does not have the Pod.
    pub(super) fn of(pod: Option<&Pod>, desired: &Desired) -> Option<Self> {
        pod.map(|pod| Self::of_pod(pod, desired))
    }

    fn of_pod(pod: &Pod, desired: &Desired) -> Self {
        Self {
            probes: probes(pod, desired),
            rules: rules(pod, desired),
        }
    }
}

/// The rules that this agent sent to a sandbox's shim last.
pub(super) type SentRules = (SandboxId, KubeletRules);

/// Sends the Pod's rules to its shim if they differ from those that were `sent`. Returns
/// the rules that the shim has got; none if no shim serves the Pod.
pub(super) fn send_rules(
    node: &Node,
    pod: &PodRecord,
    rules: &KubeletRules,
    sent: Option<SentRules>,
) -> Option<SentRules> {
    let new = (pod.sandbox.clone(), rules.clone());
    if sent.as_ref() == Some(&new) {
        return sent;
    }
    match Shim::of(&node.records, &pod.sandbox).follow(&rules.rules, &rules.probes) {
        Ok(true) => Some(new),
        // The shim does not serve yet, or has ended.
        Ok(false) => None,
        Err(error) => {
            tracing::warn!(pod_uid = %pod.pod_uid, error = words(&error), "the Pod's shim follows its old rules");
            None
        }
    }
}

/// Returns whether a sandbox dozes that this task has not observed before. `handled`: the sandbox
/// that it observed last. An earlier agent may have died right after the pause, before it notified
/// the keepers.
pub(super) fn is_found_dozing(handled: Option<&SandboxId>, observed: &Observed) -> bool {
    let dozes = observed.live == Live::Paused && observed.doze.is_some();
    dozes && !observed.busy && observed.sandbox.as_ref() != handled
}

/// Returns the rules of the Pod's shim by the caches' latest objects.
pub(super) fn rules_now(shared: &Shared, uid: &PodUid, pod: &Pod) -> KubeletRules {
    let snapshots = snapshots_about(shared, uid, pod.namespace().as_deref(), Some(pod));
    let references: Vec<_> = snapshots.iter().map(AsRef::as_ref).collect();
    let desired = crate::reconcile::desired::desired(uid, Some(pod), None, &references);
    KubeletRules::of_pod(pod, &desired)
}

#[cfg(test)]
mod tests {
    use torpor_core::state::Doze;

    use super::*;
    use crate::reconcile::sandbox_index::tests::sandbox;

    #[test]
    fn a_doze_is_found_once_and_not_while_another_process_is_at_work() {
        let dozing = Observed {
            sandbox: Some(sandbox('a')),
            live: Live::Paused,
            doze: Some(Doze { reclaimed: false }),
            ..Observed::nothing()
        };
        assert!(is_found_dozing(None, &dozing));
        assert!(is_found_dozing(Some(&sandbox('b')), &dozing), "made anew");
        assert!(!is_found_dozing(Some(&sandbox('a')), &dozing));
        for other in [
            Observed {
                busy: true,
                ..dozing.clone()
            },
            Observed {
                doze: None,
                ..dozing.clone()
            },
            Observed {
                live: Live::Running,
                ..dozing
            },
        ] {
            assert!(!is_found_dozing(None, &other), "{other:?}");
        }
    }
}
