//! Reasons in words, and remedies: docs/operations.md, short enough for a terminal.

use torpor_api::reasons::{hibernated, plan, restored, snapshot};

/// What a reason of the agent's planner means.
pub fn of_plan(reason: &str) -> Option<&'static str> {
    Some(match reason {
        plan::BUSY => "somebody else is changing the sandbox at this moment (a wake, a deletion)",
        plan::LIVE_UNKNOWN => {
            "the sandbox did not answer when it was asked what it does; it is asked again"
        }
        plan::LEDGER_CORRUPT => {
            "the ledger of its memory cannot be trusted, so that nothing is saved or woken"
        }
        plan::RESTORING => "the Pod is being filled from an image",
        plan::SLEEP_WANTED => "it was asked to sleep",
        plan::AWAKE_WANTED => "it was asked to run",
        plan::FREEZE_WANTED => "it was asked to stand still with its memory where it is",
        plan::SNAPSHOT_WANTED => "a SandboxSnapshot wants an image of it",
        plan::DELETION_WANTED => {
            "the image that it sleeps in shall be deleted, so that it has to wake first"
        }
        plan::IMAGE_ADOPTED => "the image that holds its memory serves a SandboxSnapshot too",
        plan::IDLE => "it has been idle for as long as it was to wait before it sleeps",
        plan::DOZING => {
            "it dozes: it stands still with its memory in swap, until somebody needs it"
        }
        plan::PRESSURE => {
            "it has been idle for longest and its node is short of memory or swap, so that it sleeps before its time"
        }
        plan::SLEEPING => {
            "it sleeps, as it was asked to or because nobody has used it, until somebody needs it"
        }
        plan::SETTLED => "it is as it was asked to be; nothing has to be done",
        plan::AWAKE_UNRECORDED => "it runs, and the ledger is being told so",
        plan::RECORD_STALE => {
            "a note on the node says that it sleeps, which it does not; the note is taken away"
        }
        plan::SAVE_UNFINISHED => "a save was cut off; it is finished or taken back",
        plan::END_UNFINISHED => {
            "its end was cut off while it fell asleep; it is ended, and woken if it is wanted"
        }
        plan::NOT_CAPABLE => "the runtime on its node cannot save a sandbox",
        plan::IN_USE => {
            "it shall sleep, but somebody uses it: an exec, an attach or a port-forward is open, or woke it less than 10 s ago"
        }
        plan::NOT_READY => {
            "a startup or readiness probe of it fails: it does not fall asleep by itself before it is ready, because its probes are answered for it while it sleeps"
        }
        plan::DEBUGGED => {
            "a container that kubectl debug has added runs in it: nothing is saved until that has ended"
        }
        plan::AWAITING_TURN => "other sandboxes of its node are being saved; it waits for its turn",
        plan::AWAITING_BANDWIDTH => {
            "it is idle, and is saved when the disk of its node has had time for the images before it (--save-bandwidth); nobody else has to wait for it"
        }
        plan::BACKOFF => "something failed, and is tried again after a wait",
        plan::AWAITING_CONTAINERS => {
            "its memory is in an image, and the kubelet has to bring the containers back first"
        }
        plan::NO_SANDBOX => "the Pod has no sandbox on its node (yet)",
        plan::IMAGE_MISSING => "its memory should be in an image that is not on the node",
        plan::GARBAGE => "an image that nothing refers to is being removed",
        plan::UNCLAIMED => {
            "the Pod is gone, and its memory is kept for a while for a SandboxSnapshot that names the Pod"
        }
        plan::ASKING => {
            "the Pod is gone; before its memory goes, the apiserver is asked whether a SandboxSnapshot names the Pod"
        }
        plan::GIVEN_UP => {
            "the Pod is gone, no SandboxSnapshot has named it, and its memory is being removed"
        }
        plan::POD_TERMINATING => "the Pod is being deleted; nothing new is begun with it",
        plan::POD_GONE => "the Pod is gone",
        plan::NUMBERS_EXHAUSTED => "all image numbers of this Pod are used up",
        _ => return None,
    })
}

/// Who woke a sandbox, behind "woken".
pub fn of_cause(cause: &str) -> &'static str {
    match cause {
        "Asked" => "through the API",
        "Clock" => "by the clock, at the time that was set",
        "Exec" => "by an exec",
        "Forward" => "by a port-forward",
        "Signal" => "by a signal",
        "Container" => "for a container that was added to its Pod",
        "Typed" => "by what was typed into an attach",
        "Packet" => "by a packet",
        // What versions say that know no more.
        "Called" => "by an exec, a port-forward or a signal",
        _ => "by something that this kubectl-torpor does not know",
    }
}

/// How deep it slept, behind "from".
pub fn of_depth(from: &str) -> &'static str {
    match from {
        "Dozing" => "a doze",
        _ => "hibernation",
    }
}

/// What to do about a reason of a condition, where waiting is not enough.
pub fn remedy(reason: &str) -> Option<&'static str> {
    Some(match reason {
        hibernated::RUNTIME_NOT_CAPABLE => {
            "give the Pod the RuntimeClass torpor; `kubectl torpor doctor` tells which nodes can hibernate"
        }
        hibernated::INVALID_ANNOTATION => "correct the annotation as the message says",
        hibernated::SNAPSHOT_CLASS_NOT_SUPPORTED => {
            "remove the annotation torpor.dev/snapshot-class"
        }
        hibernated::SAVE_FAILED => {
            "by the reason in the message (DiskFull: delete SandboxSnapshots or enlarge the disk; NamespaceStoreFull: delete SandboxSnapshots or sleeping Sandboxes of the namespace; CheckpointFailed: gVisor cannot save what the program does; NotWatched: its link is no veth pair, so that no packet could wake it); it is tried again by itself"
        }
        restored::NODE_UNAVAILABLE => {
            "bring the node back, or start without the memory: kubectl annotate sandbox NAME torpor.dev/on-restore-failure=ColdStart"
        }
        restored::ASKING_NODE => {
            "wait: the node reports every 30 s at the latest; if it stays, look at its agent (`kubectl torpor doctor`)"
        }
        restored::NODE_MISMATCH => {
            "look at the agent of the node that claims the image, which may have been taken over, and delete the SandboxSnapshot if it is not right; to start without the memory: torpor.dev/on-restore-failure=ColdStart"
        }
        restored::FINGERPRINT_MISMATCH => {
            "go back to the runtime that made the image, or start without the memory: torpor.dev/on-restore-failure=ColdStart"
        }
        restored::RUNSC_REVOKED => {
            "ask the node's operator: the build of gVisor that the image needs is revoked there; or start without the memory: torpor.dev/on-restore-failure=ColdStart"
        }
        restored::SPEC_MISMATCH => {
            "undo the change of the pod template, or start without the memory: torpor.dev/on-restore-failure=ColdStart"
        }
        restored::IMAGE_MISSING | restored::IMAGE_CORRUPT => {
            "restore another snapshot (torpor.dev/restore-from), or start without the memory: torpor.dev/on-restore-failure=ColdStart"
        }
        restored::IMAGE_STALE => "torpor.dev/restore-from starts a copy of it all the same",
        restored::RESTORE_FAILED => {
            "it is tried again; if it stays: torpor.dev/on-restore-failure=ColdStart starts without the memory"
        }
        restored::SNAPSHOT_NOT_FOUND | restored::SNAPSHOT_NOT_READY => {
            "create the SandboxSnapshot, wait for it, or remove the annotation torpor.dev/restore-from"
        }
        snapshot::SANDBOX_NOT_FOUND => "delete the SandboxSnapshot: there is no memory to save",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_of_the_planner_has_words() {
        for reason in plan::ALL {
            assert!(of_plan(reason).is_some(), "{reason}");
        }
        assert_eq!(of_plan("SomethingNewer"), None);
    }

    #[test]
    fn every_cause_of_a_wake_has_words() {
        let unknown = of_cause("Moonlight");
        for cause in torpor_api::node::WAKE_CAUSES {
            assert_ne!(of_cause(cause), unknown, "{cause}");
        }
    }

    #[test]
    fn every_reason_why_memory_was_not_brought_back_has_a_remedy() {
        for reason in restored::ALL {
            let fine = [
                restored::RESTORED,
                restored::ROLLED_BACK,
                restored::COLD_STARTED,
            ]
            .contains(&reason);
            assert_eq!(remedy(reason).is_none(), fine, "{reason}");
        }
    }
}
