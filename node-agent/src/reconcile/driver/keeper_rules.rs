//! The rules by which the keepers act for a sleeping sandbox, and the requests that carry them.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use torpor_core::ids::{PodUid, SandboxId};
use torpor_core::state::{Desired, Live, NOT_WATCHED, Observed};
use torpor_records::{PodRecord, Probes};
use torpor_runsc::keeper::{self, Request, Rules};

use super::departure::snapshots_about;
use super::shared::Shared;
use crate::reconcile::execute::notify_pipe_keepers;
use crate::reconcile::kubelet::{probes, rules};
use crate::reconcile::node::{CALL_LIMIT, Node};

/// The kubelet's probes of the Pod, and the rules of the Pod's keeper that follow from them.
/// None if the API does not have the Pod.
pub(super) struct KubeletRules {
    pub(super) probes: Option<Probes>,
    pub(super) rules: Option<Rules>,
}

impl KubeletRules {
    pub(super) fn of(pod: Option<&Pod>, desired: &Desired) -> Self {
        Self {
            probes: pod.map(|pod| probes(pod, desired)),
            rules: pod.map(|pod| rules(pod, desired)),
        }
    }
}

/// The rules that this agent sent to a sandbox's keeper last.
pub(super) type SentRules = (SandboxId, Rules);

/// Sends the Pod's rules to its keeper if they differ from those that were `sent`. Returns
/// the rules that the keeper has got; none if there is no keeper.
pub(super) fn send_rules(
    node: &Node,
    pod: &PodRecord,
    rules: &Rules,
    sent: Option<SentRules>,
) -> Option<SentRules> {
    let new = (pod.sandbox.clone(), rules.clone());
    if sent.as_ref() == Some(&new) {
        return sent;
    }
    let request = Request::Rules(new.1.clone());
    match keeper::ask(&node.pause_dir(&new.0), &request, &[], CALL_LIMIT) {
        Ok(_) => Some(new),
        // The keeper does not run yet, or has ended.
        Err(keeper::Error::Gone { .. }) => None,
        Err(error) => {
            let error = crate::reconcile::observe::words(&error);
            tracing::warn!(pod_uid = %pod.pod_uid, error, "the Pod's keeper follows its old rules until the sandbox falls asleep again");
            Some(new)
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

/// Notifies the keepers that the sandbox dozes, so that they wake it. A repeated call is harmless.
/// `Err`: the reason why no packet would wake it. The caller holds the sandbox's lock.
pub(super) fn send_doze(node: &Node, pod: &PodRecord, rules: &Rules) -> Result<(), String> {
    let request = Request::Watch(rules.clone());
    let asked = keeper::ask(&node.pause_dir(&pod.sandbox), &request, &[], CALL_LIMIT);
    notify_pipe_keepers(node, &pod.sandbox);
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

/// Returns the rules of the Pod's keeper by the caches' latest objects.
pub(super) fn rules_now(shared: &Shared, uid: &PodUid, pod: &Pod) -> Rules {
    let snapshots = snapshots_about(shared, uid, pod.namespace().as_deref(), Some(pod));
    let references: Vec<_> = snapshots.iter().map(AsRef::as_ref).collect();
    let desired = crate::reconcile::desired::desired(uid, Some(pod), None, &references);
    rules(pod, &desired)
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
    use crate::reconcile::sandbox_index::tests::{record, sandbox};

    /// Starts a keeper that sends one answer, and returns the request to it.
    fn keeper_in(dir: &Path, answer: Answer) -> JoinHandle<Request> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None);
        let listener = listener.expect("a socket");
        let address = UnixAddr::new(&dir.join(keeper::SOCKET)).expect("an address");
        bind(listener.as_raw_fd(), &address).expect("bound");
        listen(&listener, Backlog::new(1).expect("a number")).expect("listens");
        std::thread::spawn(move || {
            let peer = accept4(listener.as_raw_fd(), flags).expect("a connection");
            // SAFETY: accept has just made this descriptor, and nothing else owns it.
            let peer = unsafe { OwnedFd::from_raw_fd(peer) };
            let (bytes, _) = keeper::receive(&peer).expect("a request");
            let answer = serde_json::to_vec(&answer).expect("words");
            keeper::send(&peer, &answer, &[]).expect("told");
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
        assert_eq!(send_doze(&node, &pod, &rules), Ok(()), "it is gone");
        let refused = |reason| Answer::refused(reason, "no veth pair".to_owned());
        for (answer, expected) in [
            (Answer::ok(serde_json::Value::Null), Ok(())),
            (refused("NoRecord"), Ok(())),
            (refused(NOT_WATCHED), Err("no veth pair".to_owned())),
        ] {
            let keeper_dir = node.pause_dir(&pod.sandbox);
            let keeper = keeper_in(&keeper_dir, answer);
            assert_eq!(send_doze(&node, &pod, &rules), expected);
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
