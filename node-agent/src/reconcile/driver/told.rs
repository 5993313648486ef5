//! What those who speak for a sandbox that sleeps go by, and are told.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use torpor_core::ids::{PodUid, SandboxId};
use torpor_core::state::{Desired, Live, NOT_WATCHED, Observed};
use torpor_records::{PodRecord, Probes};
use torpor_runsc::keeper::{self, Request, Rules};

use super::gone::snapshots_about;
use super::{Driver, Shared};
use crate::reconcile::execute::tell_those_with_pipes;
use crate::reconcile::kubelet::{may_be_taken_for_probed, probes, rules};
use crate::reconcile::node::{CALL_LIMIT, Node};

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
            let error = crate::reconcile::observe::words(&error);
            tracing::warn!(pod_uid = %pod.pod_uid, error, "the Pod's keeper follows its old rules until the sandbox falls asleep again");
            Some(new)
        }
    }
}

/// Whether a sandbox dozes that this task has not had in hand before (`known`: the one that it has): an agent before it may have died right after the pause,
/// and have told nobody who is to wake it.
pub(super) fn is_found_dozing(known: Option<&SandboxId>, observed: &Observed) -> bool {
    let dozes = observed.live == Live::Paused && observed.doze.is_some();
    dozes && !observed.busy && observed.sandbox.as_ref() != known
}

/// Those who wake a sandbox that dozes are told, or told once more. `Err`: no packet wakes it, in words. The caller holds the sandbox' lock.
pub(super) fn tell_of_doze(node: &Node, pod: &PodRecord, rules: &Rules) -> Result<(), String> {
    let request = Request::Watch(rules.clone());
    let asked = keeper::ask(&node.pause_dir(&pod.sandbox), &request, &[], CALL_LIMIT);
    tell_those_with_pipes(node, &pod.sandbox);
    match asked {
        Ok(_) => Ok(()),
        Err(keeper::Error::Refused { reason, message }) if reason == NOT_WATCHED => Err(message),
        Err(error) => {
            let error = crate::reconcile::observe::words(&error);
            tracing::warn!(pod_uid = %pod.pod_uid, error, "cannot notify the Pod's keeper of the doze");
            Ok(())
        }
    }
}

/// What the Pod's keeper is to go by, by what the API has said last.
pub(super) fn rules_now(shared: &Shared, uid: &PodUid, pod: &Pod) -> Rules {
    let snapshots = snapshots_about(shared, uid, pod.namespace().as_deref(), Some(pod));
    let references: Vec<_> = snapshots.iter().map(AsRef::as_ref).collect();
    let desired = crate::reconcile::desired::desired(uid, Some(pod), None, &references);
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

#[cfg(test)]
mod tests {
    #![allow(unsafe_code)]

    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::path::Path;
    use std::thread::JoinHandle;

    use nix::sys::socket::{
        AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, listen, socket,
    };
    use torpor_core::state::Doze;
    use torpor_runsc::keeper::Answer;

    use super::*;
    use crate::reconcile::execute::tests::node_in;
    use crate::reconcile::known::tests::{record, sandbox};

    /// A keeper that gives one answer, and what it was asked.
    fn keeper_in(dir: &Path, answer: Answer) -> JoinHandle<Request> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None);
        let listener = listener.expect("a socket");
        let address = UnixAddr::new(&dir.join(keeper::SOCKET)).expect("an address");
        bind(listener.as_raw_fd(), &address).expect("bound");
        listen(&listener, Backlog::new(1).expect("a number")).expect("listens");
        std::thread::spawn(move || {
            let peer = accept4(listener.as_raw_fd(), flags).expect("a connection");
            // SAFETY: accept has just made this descriptor; nobody else owns it.
            let peer = unsafe { OwnedFd::from_raw_fd(peer) };
            let (bytes, _) = keeper::receive(&peer).expect("a request");
            let said = serde_json::to_vec(&answer).expect("words");
            keeper::send(&peer, &said, &[]).expect("told");
            serde_json::from_slice(&bytes).expect("understood")
        })
    }

    #[test]
    fn a_doze_that_is_found_is_told_to_the_keeper_that_may_not_have_heard_of_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let node = node_in(dir.path());
        let pod = record('a', "pod-a");
        let records = &node.records;
        let pause = pod.sandbox.clone().into();
        records.create_container_dir(&pause).expect("made");
        let rules = Rules {
            probes: vec![80],
            ..Rules::default()
        };
        assert_eq!(tell_of_doze(&node, &pod, &rules), Ok(()), "it is gone");
        let refused = |reason| Answer::refused(reason, "no veth pair".to_owned());
        for (answer, told) in [
            (Answer::ok(serde_json::Value::Null), Ok(())),
            (refused("NoRecord"), Ok(())),
            (refused(NOT_WATCHED), Err("no veth pair".to_owned())),
        ] {
            let keeper_dir = node.pause_dir(&pod.sandbox);
            let keeper = keeper_in(&keeper_dir, answer);
            assert_eq!(tell_of_doze(&node, &pod, &rules), told);
            let asked = keeper.join().expect("asked");
            assert_eq!(asked, Request::Watch(rules.clone()));
            std::fs::remove_file(keeper_dir.join(keeper::SOCKET)).expect("removed");
        }
    }

    #[test]
    fn a_doze_is_found_once_and_by_who_has_the_sandbox_in_hand() {
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
