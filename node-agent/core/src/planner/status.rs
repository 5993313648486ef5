//! The status of a plan, for users.

use super::view::View;
use crate::ids::{ContainerName, ImageId};
use crate::ledger::{Entry, Memory};
use crate::state::{
    Failure, Live, PodPresence, Policy, Power, Restore, RolledBack, SnapshotIntent, SnapshotReason,
    SnapshotWish,
};
use crate::status::{
    ConditionDraft, Phase, SnapshotDraft, SnapshotState, StatusDraft, Truth, reasons,
};
use crate::steps::{Reason, Step, StepKind};

pub(super) fn describe(
    view: &View<'_>,
    policy: &Policy,
    steps: &[Step],
    why: &[Reason],
) -> StatusDraft {
    let describer = Describer {
        view,
        policy,
        steps,
        why,
    };
    StatusDraft {
        phase: describer.phase(),
        hibernated: describer.hibernated(),
        restored: describer.restored(),
        bound: describer.bound(),
        snapshots: view
            .desired
            .snapshots
            .iter()
            .map(|s| describer.snapshot(s))
            .collect(),
        left: view.left().cloned(),
    }
}

struct Describer<'a> {
    view: &'a View<'a>,
    policy: &'a Policy,
    steps: &'a [Step],
    why: &'a [Reason],
}

impl Describer<'_> {
    fn begins(&self, kind: StepKind) -> bool {
        self.steps.iter().any(|step| step.action.kind() == kind)
    }

    fn saves(&self) -> bool {
        self.begins(StepKind::Checkpoint)
            || self.begins(StepKind::Commit)
            || self.begins(StepKind::End)
    }

    fn phase(&self) -> Phase {
        let (view, observed) = (self.view, self.view.observed);
        if let Some(fault) = view.corrupt {
            return Phase::Failed {
                error: ledger_message(fault),
            };
        }
        if let Restore::Failed { reason: _, message } = &observed.restore {
            return Phase::Failed {
                error: message.clone(),
            };
        }
        if observed.restore == Restore::InProgress {
            return Phase::Restoring;
        }
        if observed.busy {
            return self.phase_by_ledger();
        }
        match observed.live {
            Live::Unknown => Phase::Unknown,
            _ if self.saves() => Phase::Saving,
            Live::Running => Phase::Running,
            Live::Paused if view.target == Power::Frozen => Phase::Paused,
            Live::Paused if view.dozes_unsaved() && observed.doze.is_some() => {
                Phase::Dozing { image: None }
            }
            Live::Paused if view.target == Power::Dozing => match &view.fresh {
                Some(image) => Phase::Dozing {
                    image: Some(image.clone()),
                },
                None => Phase::Saving,
            },
            Live::Paused => Phase::Saving,
            Live::None => self.phase_without_sandbox(),
        }
    }

    /// Returns the phase while another process acts: by the ledger, the action of that process.
    fn phase_by_ledger(&self) -> Phase {
        match (&self.view.ledger.memory, self.view.observed.live) {
            (
                Memory::Asleep { image, .. } | Memory::Waking { image },
                Live::None | Live::Unknown,
            ) => Phase::Waking {
                image: image.clone(),
            },
            (Memory::Saving { .. } | Memory::Committed { .. }, _) => Phase::Saving,
            (_, Live::Running) => Phase::Running,
            (_, Live::Paused) => Phase::Saving,
            (_, Live::None | Live::Unknown) => Phase::Unknown,
        }
    }

    fn phase_without_sandbox(&self) -> Phase {
        let Some(image) = self.view.hibernated_in() else {
            return Phase::Absent;
        };
        if let Some(missing) = self.missing() {
            return Phase::Failed {
                error: missing_message(missing),
            };
        }
        match self.begins(StepKind::Wake) {
            true => Phase::Waking {
                image: image.clone(),
            },
            false => Phase::Hibernated {
                image: image.clone(),
            },
        }
    }

    /// Returns the image that should hold the memory and is not in the store.
    fn missing(&self) -> Option<&ImageId> {
        self.why.iter().find_map(|reason| match reason {
            Reason::ImageMissing { image } => Some(image),
            _ => None,
        })
    }

    fn hibernated(&self) -> Option<ConditionDraft> {
        let (view, observed) = (self.view, self.view.observed);
        let is_wanted =
            view.target != Power::Awake || view.shallow || view.desired.sleep.first().is_some();
        let has_history =
            view.ledger.seq > 0 || view.corrupt.is_some() || view.desired.has_sleep_condition;
        if view.desired.pod == PodPresence::Gone || !(is_wanted || has_history) {
            return None;
        }
        let no = |reason, message: String| Some(ConditionDraft::new(Truth::False, reason, message));
        if let Some(fault) = view.corrupt {
            return no(reasons::SAVE_FAILED, ledger_message(fault));
        }
        if let Some(image) = self.asleep_without_keepers() {
            let message =
                format!("The sandbox sleeps in image {image}; its containers have ended.");
            return Some(ConditionDraft::new(
                Truth::True,
                reasons::HIBERNATED,
                message,
            ));
        }
        match self.phase() {
            Phase::Hibernated { image } => {
                let message = self.hibernated_message(&image);
                Some(ConditionDraft::new(
                    Truth::True,
                    reasons::HIBERNATED,
                    message,
                ))
            }
            Phase::Failed { error } => match view.hibernated_in() {
                Some(_) => Some(ConditionDraft::new(Truth::True, reasons::HIBERNATED, error)),
                None => no(reasons::AWAKE, "The sandbox is not asleep.".into()),
            },
            Phase::Dozing { image } => match self.save_failure() {
                Some(failure) => no(reasons::SAVE_FAILED, self.save_failure_message(failure)),
                None => self.dozing(image.as_ref()),
            },
            Phase::Waking { image } => no(reasons::WAKING, format!("Restoring image {image}.")),
            Phase::Restoring => no(reasons::WAKING, "The Pod is being restored.".into()),
            Phase::Paused => no(
                reasons::FROZEN,
                "The sandbox is paused, its memory is kept.".into(),
            ),
            // A failure stays in the status until a save succeeds, even during the next attempt.
            Phase::Saving | Phase::Running | Phase::Absent | Phase::Unknown => {
                if let Some(failure) = self.save_failure() {
                    return no(reasons::SAVE_FAILED, self.save_failure_message(failure));
                }
                if self.phase() == Phase::Saving {
                    return no(
                        reasons::SAVING,
                        "The sandbox's memory is being saved.".into(),
                    );
                }
                let to_sleep = match observed.dozes_unsaved {
                    true => view.wants_image(),
                    false => view.sleeps() || view.desired.sleep.first().is_some(),
                };
                match &observed.capable {
                    Err(why) if to_sleep => {
                        let instead = self.instead_of_sleep();
                        let text = format!("The runtime cannot save memory: {why}{instead}");
                        no(reasons::RUNTIME_NOT_CAPABLE, text)
                    }
                    _ => no(reasons::AWAKE, self.awake_message()),
                }
            }
        }
    }

    /// Returns the image of a sandbox that sleeps and whose keepers have ended. The kubelet starts
    /// the containers again, or has ended the Pod; for an ended Pod the controller reads this
    /// condition.
    fn asleep_without_keepers(&self) -> Option<&ImageId> {
        let (view, observed) = (self.view, self.view.observed);
        let asleep = matches!(view.ledger.memory, Memory::Asleep { .. });
        let left = observed.live == Live::None
            && observed.record.is_none()
            && observed.restore != Restore::InProgress;
        view.fresh.as_ref().filter(|_| asleep && left)
    }

    /// Returns the condition of a sandbox that dozes by itself, or because its runtime has no
    /// deeper sleep. Without an image the condition warns that the memory is not safe.
    fn dozing(&self, image: Option<&ImageId>) -> Option<ConditionDraft> {
        const NO_IMAGE: &str = "The sandbox has no image: its memory is lost when its Pod, its processes or the node end";
        let (reason, text) = match (image, &self.view.observed.capable) {
            (Some(image), _) => (
                reasons::DOZING,
                format!(
                    "The sandbox was idle and dozes until it is needed; image {image} holds its memory, too."
                ),
            ),
            (None, Err(why)) if self.view.shallow && !self.view.by_itself => (
                reasons::RUNTIME_NOT_CAPABLE,
                format!(
                    "The runtime cannot hibernate: {why}. The sandbox dozes instead until it is needed. {NO_IMAGE}."
                ),
            ),
            (None, _) => (
                reasons::DOZING,
                format!("The sandbox was idle and dozes until it is needed. {NO_IMAGE}."),
            ),
        };
        Some(ConditionDraft::new(Truth::False, reason, text))
    }

    /// Returns the text about the doze that replaces a hibernation which the runtime cannot do.
    fn instead_of_sleep(&self) -> String {
        let observed = self.view.observed;
        match (&observed.can_doze, observed.dozes_unsaved) {
            (_, false) => String::new(),
            (Ok(()), true) => "; an idle sandbox dozes instead, without an image".to_owned(),
            (Err(why), true) => format!("; the sandbox cannot doze either: {why}"),
        }
    }

    fn hibernated_message(&self, image: &ImageId) -> String {
        let held = match self.view.by_itself {
            true => format!("The sandbox was idle and sleeps in image {image} until it is needed."),
            false => format!("The sandbox sleeps in image {image}."),
        };
        let held = match self.left_by_exec() {
            Some(left) => {
                format!(
                    "{held} Hibernation ends the processes that kubectl exec left behind: {left}."
                )
            }
            None => held,
        };
        let held = match &self.view.observed.not_watched {
            Some(why) => format!("{held} Only the API or an exec wakes the sandbox: {why}."),
            None => held,
        };
        match (&self.view.observed.failures.wake, &self.view.ledger.memory) {
            (Some(Failure { message, count, .. }), _) => {
                format!("{held} The last wake failed (attempt {count}): {message}")
            }
            (None, Memory::WakeFailed { reason, .. }) => {
                format!("{held} The last wake failed: {reason}")
            }
            (None, _) => held,
        }
    }

    fn awake_message(&self) -> String {
        let debugged = self.why.iter().find_map(|reason| match reason {
            Reason::Debugged { container } => Some(container),
            _ => None,
        });
        if let Some(container) = debugged {
            return format!("The sandbox is awake: it {}.", not_saved_beside(container));
        }
        if let (Err(why), Some(_)) = (
            &self.view.observed.idle_known,
            self.view.desired.sleep.first(),
        ) {
            return format!(
                "The sandbox is awake and does not fall asleep by itself, because the agent cannot determine whether it is idle: {why}"
            );
        }
        if self.why.contains(&Reason::NotReady) {
            return "The sandbox is awake and does not fall asleep by itself before it is ready: while a sandbox sleeps, Torpor answers the kubelet's probes in its place.".to_owned();
        }
        if let (Err(why), Some(_)) = (&self.view.observed.can_doze, self.view.desired.sleep.doze) {
            return format!("The sandbox is awake and does not doze: {why}");
        }
        if let (Some(left), Some(_)) = (self.left_by_exec(), self.view.desired.sleep.hibernate) {
            return format!(
                "The sandbox is awake and does not hibernate by itself: processes that kubectl exec left behind would end ({left})."
            );
        }
        if !self.why.contains(&Reason::InUse) {
            return "The sandbox is awake.".to_owned();
        }
        match self.view.observed.sessions {
            0 => "The sandbox is awake: it was used a moment ago.".to_owned(),
            n => format!("The sandbox is awake: {n} sessions are open."),
        }
    }

    /// Returns the names of the first few processes that exec left behind.
    fn left_by_exec(&self) -> Option<String> {
        const NAMED: usize = 5;
        let left = &self.view.observed.left_by_exec;
        let named = left.get(..NAMED).unwrap_or(left).join(", ");
        let more = left.len().saturating_sub(NAMED);
        match (left.is_empty(), more) {
            (true, _) => None,
            (false, 0) => Some(named),
            (false, more) => Some(format!("{named} and {more} more")),
        }
    }

    /// Returns the failure of a save that is still wanted.
    fn save_failure(&self) -> Option<&Failure> {
        let view = self.view;
        let wanted = view.target != Power::Awake
            || view.desired.sleep.first().is_some()
            || view.needing_image().next().is_some();
        self.view.observed.failures.save.as_ref().filter(|_| wanted)
    }

    fn save_failure_message(&self, failure: &Failure) -> String {
        let Failure {
            step,
            reason,
            message,
            at: _,
            count,
        } = failure;
        let (min, max) = self.view.save_backoff(self.policy);
        let again = failure.retry_at(min, max);
        format!(
            "{step:?} failed ({reason}, attempt {count}): {message}. Nothing was lost; next attempt from {again:.0}."
        )
    }

    fn restored(&self) -> Option<ConditionDraft> {
        let draft = ConditionDraft::new;
        let observed = self.view.observed;
        if let Some(image) = self.missing() {
            return Some(draft(
                Truth::False,
                reasons::IMAGE_MISSING,
                missing_message(image),
            ));
        }
        if self.view.hibernated_in().is_some() {
            if let Some(failure) = &observed.failures.wake {
                let reason = restore_reason(&failure.reason);
                return Some(draft(Truth::False, reason, failure.message.clone()));
            }
            if let Memory::WakeFailed { image, reason } = &self.view.ledger.memory {
                let message = format!("Image {image} could not be restored: {reason}");
                return Some(draft(Truth::False, restore_reason(reason), message));
            }
        }
        match &observed.restore {
            Restore::NotAsked | Restore::InProgress => None,
            Restore::Done {
                image,
                rolled_back: None,
            } => {
                let message = format!("The Pod continues from image {image}.");
                Some(draft(Truth::True, reasons::RESTORED, message))
            }
            Restore::Done {
                image,
                rolled_back: Some(RolledBack { made, age }),
            } => {
                let age = age.as_secs();
                let message = format!(
                    "The sandbox ended while it was awake and was rolled back to its last image {image}, made {made:.0}, {age} s before: \
                     its work since then is lost."
                );
                Some(draft(Truth::True, reasons::ROLLED_BACK, message))
            }
            Restore::ColdStarted { message } => {
                Some(draft(Truth::False, reasons::COLD_STARTED, message.clone()))
            }
            Restore::Failed { reason, message } => {
                Some(draft(Truth::False, reason, message.clone()))
            }
        }
    }

    fn bound(&self) -> Option<ConditionDraft> {
        let (desired, observed) = (self.view.desired, self.view.observed);
        let claim = desired.claim.as_ref();
        let claim = claim.filter(|_| desired.pod != PodPresence::Gone)?;
        let draft = ConditionDraft::new;
        if observed.bound.as_ref() == Some(claim) {
            let message = format!("Claim {claim} has arrived in the sandbox.");
            return Some(draft(Truth::True, reasons::BOUND, message));
        }
        // A sandbox that sleeps receives its claim once it runs; the Pod's condition stays.
        if observed.live == Live::None && self.view.ledger.memory.image().is_some() {
            return None;
        }
        Some(match &observed.failures.bind {
            Some(Failure {
                reason,
                message,
                count,
                ..
            }) => {
                let message = format!("{message} (attempt {count}).");
                draft(Truth::False, reason, message)
            }
            None => {
                let message = format!("Claim {claim} is on its way into the sandbox.");
                draft(Truth::False, reasons::BINDING, message)
            }
        })
    }

    fn snapshot(&self, snapshot: &SnapshotIntent) -> SnapshotDraft {
        let state = match snapshot.wish {
            SnapshotWish::Delete => self.deleted_state(snapshot),
            SnapshotWish::Keep => self.kept_state(snapshot),
        };
        SnapshotDraft {
            uid: snapshot.uid.clone(),
            name: snapshot.name.clone(),
            state,
        }
    }

    fn deleted_state(&self, snapshot: &SnapshotIntent) -> SnapshotState {
        let view = self.view;
        let images = view.images_of_deleted(snapshot);
        let in_store = |image: &ImageId| view.observed.images.iter().any(|i| i.id == *image);
        // The image is kept for another snapshot, or as the memory of a sandbox that cannot or must
        // not be woken for the deletion.
        let kept = |image: &ImageId| {
            view.is_referenced(image) || self.stays_as_memory(image) || view.is_last_image(image)
        };
        match images.iter().any(|image| in_store(image) && !kept(image)) {
            true => SnapshotState::Releasing,
            false => SnapshotState::Released,
        }
    }

    fn stays_as_memory(&self, image: &ImageId) -> bool {
        let view = self.view;
        let can_run = view.observed.live != Live::None || view.observed.record.is_some();
        view.is_memory(image) && view.held(image) && (view.sleeps() || !can_run)
    }

    fn kept_state(&self, snapshot: &SnapshotIntent) -> SnapshotState {
        let view = self.view;
        let failed = |reason: &str, message: String| SnapshotState::Failed {
            reason: reason.to_owned(),
            message,
        };
        if let Some(image) = view.image_of(snapshot) {
            let committed = self.committed_state(image);
            match (snapshot.reason, view.desired.pod) {
                _ if !view.held(image) && !self.suspends_again(snapshot) => {
                    return failed(reasons::IMAGE_MISSING, missing_message(image));
                }
                // Until the sandbox sleeps it could run on, and its Pod must not be deleted yet.
                (SnapshotReason::Suspend, PodPresence::Present) if !self.is_at_rest(image) => {}
                (SnapshotReason::Suspend | SnapshotReason::Manual, _) => return committed,
            }
        }
        if let Some(fault) = view.corrupt {
            return failed(reasons::SAVE_FAILED, ledger_message(fault));
        }
        if self.adopts_for(snapshot) {
            return SnapshotState::Saving;
        }
        if view.desired.pod != PodPresence::Present && self.may_be_in_image() {
            let message = "The Pod is ending; the agent is about to keep its image.";
            return SnapshotState::Pending {
                message: message.to_owned(),
            };
        }
        if view.desired.pod != PodPresence::Present {
            let message = "The Pod has ended or is being deleted; there is no memory to save.";
            return failed(reasons::SANDBOX_NOT_FOUND, message.to_owned());
        }
        if let Some(failure) = self.view.observed.failures.save.as_ref() {
            return failed(reasons::SAVE_FAILED, self.save_failure_message(failure));
        }
        if self.saves() || matches!(self.phase(), Phase::Saving) {
            return SnapshotState::Saving;
        }
        if let (Err(why), None) = (&view.observed.capable, &view.fresh) {
            let message = format!("The runtime cannot save memory: {why}");
            return failed(reasons::RUNTIME_NOT_CAPABLE, message);
        }
        SnapshotState::Pending {
            message: self.pending_message(),
        }
    }

    /// Returns whether an image of a Pod that ends may yet turn out to be its memory. Another
    /// process is still at work on it, or by the ledger the memory is in an image of the Pod that
    /// is about to be kept or cannot be found at the moment. If the status denied such an image,
    /// its reader would give the memory up.
    fn may_be_in_image(&self) -> bool {
        let (view, observed) = (self.view, self.view.observed);
        let memory = &view.ledger.memory;
        let own = |image: &ImageId| image.pod() == &view.desired.pod_uid;
        let cut_off = matches!(memory, Memory::Saving { .. }) && view.fresh.is_none();
        observed.busy
            || observed.live == Live::Unknown
            || memory.image().is_some_and(own) && !cut_off
    }

    /// Returns whether the plan lets the snapshot adopt the image that is the sandbox's memory.
    fn adopts_for(&self, snapshot: &SnapshotIntent) -> bool {
        let mut adopted = self.steps.iter().filter_map(|step| step.before.as_ref());
        adopted.any(|entry| {
            matches!(entry, Entry::Adopted { snapshots, .. } if snapshots.contains(&snapshot.uid))
        })
    }

    fn committed_state(&self, image: &ImageId) -> SnapshotState {
        let in_store = self.view.observed.images.iter().find(|i| i.id == *image);
        // Without a ledger nothing contradicts the image (its Pod is long gone). A ledger that
        // cannot be read is not trusted.
        let stale = self.view.corrupt.is_some()
            || self.view.ledger.seq > 0 && self.view.ledger.is_stale(image);
        SnapshotState::Committed {
            image: image.clone(),
            consumed_by: in_store.and_then(|i| i.consumed_by.clone()),
            stale,
        }
    }

    /// Returns whether a Suspend snapshot whose image is lost can be made again from its sandbox.
    fn suspends_again(&self, snapshot: &SnapshotIntent) -> bool {
        snapshot.reason == SnapshotReason::Suspend
            && self.view.desired.pod == PodPresence::Present
            && self.view.observed.live != Live::None
    }

    /// Returns whether no part of the sandbox runs or is about to run, and the image is its memory.
    /// A process that is at work on the sandbox may be restoring it at this moment.
    fn is_at_rest(&self, image: &ImageId) -> bool {
        let observed = self.view.observed;
        !observed.busy && observed.live == Live::None && self.view.fresh.as_ref() == Some(image)
    }

    fn pending_message(&self) -> String {
        if let Some(container) = &self.view.observed.added {
            return format!("The sandbox {}.", not_saved_beside(container));
        }
        match (self.view.observed.live, self.view.awaited_container()) {
            (Live::None, _) => "Waiting for the sandbox to start.".to_owned(),
            (Live::Unknown, _) => "Waiting for the state of the sandbox to be known.".to_owned(),
            (Live::Running, Some(container)) => {
                format!("The save waits until container \"{container}\" has been started again.")
            }
            (Live::Running | Live::Paused, _) => "The sandbox waits to be saved.".to_owned(),
        }
    }
}

fn not_saved_beside(container: &ContainerName) -> String {
    format!(
        "is not saved while container \"{container}\" runs: the container was added to the Pod (as by kubectl debug), and a sandbox restored from the image would lack it. End its program"
    )
}

/// Returns the reason of the Restored condition for the reason of a failed wake. An unknown outcome
/// is a failed restore to a user.
fn restore_reason(reason: &str) -> &str {
    match reason {
        "ImageMissing"
        | "ImageCorrupt"
        | "ImageStale"
        | "FingerprintMismatch"
        | "SpecMismatch"
        | "RunscRevoked"
        | "OnRestoreExecFailed" => reason,
        _ => reasons::RESTORE_FAILED,
    }
}

fn ledger_message(fault: &str) -> String {
    format!("{fault}. Nothing is saved or restored until the ledger is moved away.")
}

fn missing_message(image: &ImageId) -> String {
    format!(
        "Image {image} is not in this node's store. Delete the Pod to start cold, or restore another snapshot."
    )
}
