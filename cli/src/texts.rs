//! Texts for reasons, and remedies: a short form of docs/how-to/conditions.md for terminals.

use torpor_api::reasons::{hibernated, plan, restored, snapshot};

/// Returns the text for a reason of the agent's planner; `None` for an unknown reason.
pub fn plan_text(reason: &str) -> Option<&'static str> {
    Some(match reason {
        plan::BUSY => {
            "another operation is changing the sandbox at this moment (a wake, a deletion)"
        }
        plan::LIVE_UNKNOWN => {
            "the sandbox did not answer a query of its state; the agent queries it again"
        }
        plan::LEDGER_CORRUPT => "the ledger of the sandbox is corrupt: no save and no wake",
        plan::RESTORING => "the sandbox is being restored from an image",
        plan::SLEEP_WANTED => "sleep is requested",
        plan::AWAKE_WANTED => "running is requested",
        plan::CLAIM_WAITS => "its claim has not arrived in the sandbox yet",
        plan::FREEZE_WANTED => "a freeze is requested: a pause with the memory in place",
        plan::SNAPSHOT_WANTED => "a SandboxSnapshot requests an image of the sandbox",
        plan::DELETION_WANTED => {
            "the image that holds the sandbox's memory is to be deleted; the sandbox has to wake first"
        }
        plan::IMAGE_ADOPTED => {
            "the image that holds the sandbox's memory also serves a SandboxSnapshot"
        }
        plan::IDLE => "the sandbox has been idle for the time after which it sleeps",
        plan::DOZING => {
            "the sandbox dozes: it is paused with its memory in swap, and resumes when it is used"
        }
        plan::PRESSURE => {
            "the node is short of memory or swap; the sandbox has been idle longest and sleeps before its time"
        }
        plan::SLEEPING => {
            "the sandbox sleeps, on request or because it was idle; it wakes when it is used"
        }
        plan::SETTLED => "the sandbox is in the requested state; nothing to do",
        plan::AWAKE_UNRECORDED => "the sandbox runs; the agent is recording that in the ledger",
        plan::RECORD_STALE => {
            "a note on the node records a sleep of the sandbox, which runs; the agent removes the note"
        }
        plan::SAVE_UNFINISHED => "a save was interrupted; the agent completes or reverts it",
        plan::END_UNFINISHED => {
            "hibernation was interrupted while it ended the processes; the agent ends them, and wakes the sandbox if it is to run"
        }
        plan::NOT_CAPABLE => "the runtime on the node cannot save a sandbox",
        plan::IN_USE => {
            "the sandbox is to sleep, but is in use: an exec, an attach or a port-forward is open, or woke it less than 10 s ago"
        }
        plan::NOT_READY => {
            "a startup or readiness probe fails: an idle sandbox sleeps only once it is ready, because its probes are answered for it while it sleeps"
        }
        plan::DEBUGGED => {
            "a container of kubectl debug runs in the sandbox: nothing is saved until the container has ended"
        }
        plan::AWAITING_TURN => "the node is saving other sandboxes; this sandbox waits for them",
        plan::AWAITING_BANDWIDTH => {
            "the sandbox is idle; its save waits until the node's disk has had time for the images before it (--save-bandwidth), and delays no other operation"
        }
        plan::BACKOFF => "an operation failed; the agent retries it after a delay",
        plan::AWAITING_CONTAINERS => {
            "the memory is in an image; the kubelet has to create the containers first"
        }
        plan::NO_SANDBOX => "the Pod has no sandbox on its node (yet)",
        plan::IMAGE_MISSING => "the image that holds the sandbox's memory is not on the node",
        plan::GARBAGE => "an unreferenced image is being removed",
        plan::UNCLAIMED => {
            "the Pod is gone; its memory is kept for a while for a SandboxSnapshot that names the Pod"
        }
        plan::ASKING => {
            "before the memory of a Pod that is gone is removed, or a sandbox whose snapshot was deleted is woken, the agent asks the apiserver for the Pod and its SandboxSnapshots"
        }
        plan::GIVEN_UP => {
            "the Pod is gone, no SandboxSnapshot names it, and its memory is being removed"
        }
        plan::POD_TERMINATING => "the Pod is being deleted; no new operation starts",
        plan::POD_GONE => "the Pod is gone",
        plan::NUMBERS_EXHAUSTED => "all image numbers of this Pod are used up",
        _ => return None,
    })
}

/// Returns the text for the cause of a wake, to follow "woken".
pub fn cause_text(cause: &str) -> &'static str {
    match cause {
        "Asked" => "through the API",
        "Clock" => "by the clock, at the time of next-wakeup",
        "Exec" => "by an exec",
        "Forward" => "by a port-forward",
        "Signal" => "by a signal",
        "Container" => "for a container that was added to its Pod",
        "Typed" => "by input to an attach",
        "Packet" => "by a packet",
        // Older agents do not distinguish the three.
        _ => "by a cause that this version of kubectl-torpor does not know",
    }
}

/// Returns the text for the kind of sleep, to follow "from".
pub fn sleep_text(from: &str) -> &'static str {
    match from {
        "Dozing" => "a doze",
        _ => "hibernation",
    }
}

/// Returns the remedy for a reason of a condition; `None` where waiting is enough.
pub fn remedy(reason: &str) -> Option<&'static str> {
    Some(match reason {
        hibernated::RUNTIME_NOT_CAPABLE => {
            "set the RuntimeClass torpor in the pod template; `kubectl torpor doctor` names the nodes that cannot hibernate"
        }
        hibernated::INVALID_ANNOTATION => "correct the annotation that the message names",
        hibernated::SNAPSHOT_CLASS_NOT_SUPPORTED => {
            "correct the SnapshotClass, or remove the annotation torpor.dev/snapshot-class"
        }
        hibernated::SAVE_FAILED => {
            "depends on the reason in the message (DiskFull: delete SandboxSnapshots or enlarge the disk; NamespaceStoreFull: delete SandboxSnapshots or sleeping Sandboxes of the namespace; CheckpointFailed: gVisor cannot save a state of the program; NotWatched: the Pod's link is no veth pair, so that no packet could wake the sandbox); the agent retries the save"
        }
        restored::NODE_UNAVAILABLE => {
            "bring the node back, or start without the memory: kubectl annotate sandbox NAME torpor.dev/on-restore-failure=ColdStart"
        }
        restored::ASKING_NODE => {
            "wait: the node reports at least every 30 s; if the reason stays, check the node's agent (`kubectl torpor doctor`)"
        }
        restored::NODE_MISMATCH => {
            "check the agent of the node that claims the image, which may be compromised, and delete the SandboxSnapshot if it is wrong; to start without the memory: torpor.dev/on-restore-failure=ColdStart"
        }
        restored::FINGERPRINT_MISMATCH => {
            "add a node with what the message names (--older-runsc of the installer brings a build of runsc to a node), or start without the memory: torpor.dev/on-restore-failure=ColdStart"
        }
        restored::RUNSC_REVOKED => {
            "the build of gVisor that the image needs is revoked on the node: ask its operator, or start without the memory: torpor.dev/on-restore-failure=ColdStart"
        }
        restored::SPEC_MISMATCH => {
            "revert the change of the pod template, or start without the memory: torpor.dev/on-restore-failure=ColdStart"
        }
        restored::IMAGE_MISSING | restored::IMAGE_CORRUPT => {
            "restore another snapshot (torpor.dev/restore-from), or start without the memory: torpor.dev/on-restore-failure=ColdStart"
        }
        restored::IMAGE_STALE => "torpor.dev/restore-from starts a copy of the image nevertheless",
        restored::RESTORE_FAILED => {
            "the restore is retried; if it keeps failing, start without the memory: torpor.dev/on-restore-failure=ColdStart"
        }
        restored::SNAPSHOT_NOT_FOUND | restored::SNAPSHOT_NOT_READY => {
            "create the SandboxSnapshot or wait until it is ready, or remove the annotation torpor.dev/restore-from"
        }
        restored::FETCHING => "wait: the message has the progress",
        restored::UPLOADING => {
            "wait: the condition Uploaded of the SandboxSnapshot has the progress; or uncordon the node that holds the image"
        }
        restored::SOURCE_NODE_UNAVAILABLE => {
            "check the agent of the node that holds the image, and that agents reach each other at port 9646; the fetch is retried"
        }
        restored::REPOSITORY_UNAVAILABLE => {
            "check the object store that the SnapshotClass names, and its bucket; the fetch is retried"
        }
        restored::REPOSITORY_DENIED => {
            "correct the credentials in the Secret torpor-repository; the fetch is retried"
        }
        restored::KEY_MISSING => {
            "put the encryption key that the message names back into the Secret torpor-repository-keys"
        }
        restored::KEY_SERVICE_UNAVAILABLE => {
            "check the KMS plug-in at the socket that the message names, on the Pod's node; the fetch is retried"
        }
        restored::NO_ROOM => "make room on the node's disk; the fetch is retried",
        restored::IMAGE_CLAIMED => {
            "bring the agent of the node that the message names back (`kubectl torpor doctor` checks it)"
        }
        snapshot::SANDBOX_NOT_FOUND => {
            "delete the SandboxSnapshot: its Sandbox or the Pod is gone, so there is no memory to save"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_of_the_planner_has_a_text() {
        for reason in plan::ALL {
            assert!(plan_text(reason).is_some(), "{reason}");
        }
        assert_eq!(plan_text("SomethingNewer"), None);
    }

    #[test]
    fn every_cause_of_a_wake_has_a_text() {
        let unknown = cause_text("Moonlight");
        for cause in torpor_api::node::WAKE_CAUSES {
            assert_ne!(cause_text(cause), unknown, "{cause}");
        }
    }

    #[test]
    fn every_reason_of_a_failed_restore_has_a_remedy() {
        for reason in restored::ALL {
            let fine = [
                restored::RESTORED,
                restored::ROLLED_BACK,
                restored::COLD_STARTED,
            ]
            .contains(reason);
            assert_eq!(remedy(reason).is_none(), fine, "{reason}");
        }
    }
}
