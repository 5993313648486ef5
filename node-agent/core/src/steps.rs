//! Plans, their steps, and the outcome of a step.
//!
//! # How a step is executed
//! 1. Compare the [`Fence`] with the node. If the sandbox id or the ledger sequence differs from
//!    the planned one, the outcome is [`Outcome::Stale`] and nothing is done.
//! 2. Append `before` to the ledger, durably.
//! 3. Act: one call, given by [`Action`]. An act that is done twice does no harm; the second act
//!    returns [`Outcome::Already`].
//! 4. On `Done` or `Already` append `after` to the ledger, durably.
//! 5. On any other outcome drop the rest of the plan. Pass each outcome to
//!    [`crate::Failures::note`].
//!
//! [`Plan::stops_for`] names the image for which a running sandbox is about to stop. The agent
//! checks before the first step that there is room for that image.
//!
//! After a plan with steps, observe and plan again at once. After a plan without steps, wait for a
//! change or for `wake_at`. The steps of a plan run under the sandbox's lock. The observation does
//! too, and the lock is free between them: where the state differs from the observed one, no step
//! is taken.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::ids::{ClaimUid, ContainerName, ImageId, PodUid, SandboxId};
use crate::ledger::Entry;
use crate::queue::Urgency;
use crate::shortage::Resource;
use crate::status::StatusDraft;

/// The state that a step was planned for. The step changes nothing if the node's state differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fence {
    pub pod_uid: PodUid,
    /// The observed sandbox; `None`: the Pod had none.
    pub sandbox_id: Option<SandboxId>,
    /// Ledger sequence before the step's own entries. The entries of the plan's earlier steps are
    /// included.
    pub ledger_seq: u64,
}

/// A step of a plan. The step is complete: its executor makes no choice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub fence: Fence,
    /// Ledger entry that is durable before the act begins.
    pub before: Option<Entry>,
    pub action: Action,
    /// Ledger entry that is appended after the act is done.
    pub after: Option<Entry>,
}

/// The act of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Stops the processor time of the sandbox; its memory stays in place.
    Pause,
    /// Pauses the sandbox until its user ends the freeze. Nothing else wakes the sandbox, and the
    /// kubelet's probes are answered for it. This action is planned only for a sandbox whose memory
    /// is in no image: incoming packets reach its network stack.
    Freeze,
    /// Pauses the sandbox and notes that idleness is the reason: a caller that needs the sandbox
    /// resumes it. A sandbox that is already paused receives only the note.
    Doze,
    /// Pushes the memory of a dozing sandbox out of main memory and notes that. `image` holds the
    /// memory, too; `None`: the runtime makes no images.
    Reclaim { image: Option<ImageId> },
    /// Continues the paused sandbox.
    Resume,
    /// Writes the paused sandbox's memory to a new partial image. The sandbox stays paused.
    Checkpoint { image: ImageId },
    /// Makes the partial image durable, writes its manifest and moves it to its final place. The
    /// outcome is `Already` if the image is there.
    Commit { image: ImageId },
    /// Notes in /run that the sandbox sleeps in `image`, then ends its processes; its keepers stay.
    End { image: ImageId },
    /// Removes a sandbox that an earlier restore left incomplete, verifies `image`, restores the
    /// sandbox from it and removes the note in /run. If the wake fails for certain (no sandbox
    /// runs), the executor appends [`Entry::WakeFailed`] with the reason.
    Wake { image: ImageId },
    /// Waits until the kubelet has written the claim's files into the volume of the running
    /// sandbox, runs the user's command there, and notes in /run that the claim has arrived. Where
    /// the sandbox has a mark of the same claim, the command ran before and does not run again.
    Bind { claim: ClaimUid },
    /// Changes nothing but the ledger.
    Record,
    /// Removes a note in /run that the ledger contradicts. If no sandbox runs, its keepers then
    /// report that the containers have ended.
    ForgetSleep,
    /// Removes the rest of an unfinished save or removal.
    DiscardPartial { image: ImageId },
    /// Removes a committed image.
    DiscardImage { image: ImageId },
    /// Releases an image of another Pod that this Pod took for its restore and never ran from. The
    /// next Pod may be restored from the image.
    ReleaseImage { image: ImageId },
    /// Removes the ledger of a Pod that is gone.
    DiscardLedger,
}

/// The kind of an [`Action`], without its data: a metric label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum StepKind {
    Pause,
    Freeze,
    Doze,
    Reclaim,
    Resume,
    Checkpoint,
    Commit,
    End,
    Wake,
    Bind,
    Record,
    ForgetSleep,
    DiscardPartial,
    DiscardImage,
    ReleaseImage,
    DiscardLedger,
}

impl Action {
    pub fn kind(&self) -> StepKind {
        match self {
            Action::Pause => StepKind::Pause,
            Action::Freeze => StepKind::Freeze,
            Action::Doze => StepKind::Doze,
            Action::Reclaim { .. } => StepKind::Reclaim,
            Action::Resume => StepKind::Resume,
            Action::Checkpoint { .. } => StepKind::Checkpoint,
            Action::Commit { .. } => StepKind::Commit,
            Action::End { .. } => StepKind::End,
            Action::Wake { .. } => StepKind::Wake,
            Action::Bind { .. } => StepKind::Bind,
            Action::Record => StepKind::Record,
            Action::ForgetSleep => StepKind::ForgetSleep,
            Action::DiscardPartial { .. } => StepKind::DiscardPartial,
            Action::DiscardImage { .. } => StepKind::DiscardImage,
            Action::ReleaseImage { .. } => StepKind::ReleaseImage,
            Action::DiscardLedger => StepKind::DiscardLedger,
        }
    }
}

/// The outcome of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    Done,
    /// The state was as wanted before the step.
    Already,
    /// The action was certainly not done. `reason` is CamelCase.
    Failed {
        reason: String,
        message: String,
    },
    /// It is not known whether the action was done: a call timed out or its connection broke.
    Unknown {
        message: String,
    },
    /// The fence did not match; nothing was tried.
    Stale,
}

impl Outcome {
    /// Returns a failure with the error's text.
    pub fn failed(reason: &str, error: &(dyn std::error::Error + 'static)) -> Self {
        Self::Failed {
            reason: reason.to_owned(),
            message: words(error),
        }
    }

    /// Returns an outcome that is not known because of the error.
    pub fn unknown(error: &(dyn std::error::Error + 'static)) -> Self {
        Self::Unknown {
            message: words(error),
        }
    }

    /// Reports whether the next step of the plan may follow.
    pub fn is_success(&self) -> bool {
        matches!(self, Self::Done | Self::Already)
    }
}

/// Returns the text of an error with all its causes.
pub fn words(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// A reason for the content of a plan, for logs, events and tests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// Another process holds the lock.
    Busy,
    /// The state of the sandbox could not be determined.
    LiveUnknown,
    /// The ledger cannot be trusted.
    LedgerCorrupt,
    /// The shim is restoring the Pod from an image.
    Restoring,
    /// The API requests sleep.
    SleepWanted,
    /// The sandbox has been idle for its configured time.
    Idle,
    /// The sandbox is idle, and the node is short of a resource.
    Pressure { short_of: Resource },
    /// The sandbox dozes because it was idle.
    Dozing,
    /// The API requests that the sandbox runs.
    AwakeWanted,
    /// The API requests a freeze.
    FreezeWanted,
    /// The sandbox serves a claim that has not arrived in it.
    ClaimWaits,
    /// A snapshot needs an image.
    SnapshotWanted,
    /// The image that the sandbox sleeps in is to be deleted.
    DeletionWanted,
    /// An image that holds the sandbox's memory becomes the image of a snapshot, too.
    ImageAdopted,
    /// The sandbox sleeps, as requested.
    Sleeping,
    /// The sandbox runs or is paused, as requested.
    Settled,
    /// The sandbox runs; by the ledger it does not.
    AwakeUnrecorded,
    /// By the note in /run the sandbox sleeps; by the ledger it does not.
    RecordStale,
    /// A save was not finished.
    SaveUnfinished,
    /// The end of a hibernating sandbox was interrupted: some of its processes may be gone.
    EndUnfinished,
    /// The runtime cannot save.
    NotCapable,
    /// A session is open, or was open a moment ago.
    InUse,
    /// The sandbox could fall asleep by itself, and does not while its probes fail: see
    /// [`crate::state::Desired::ready`].
    NotReady,
    /// A container runs in the sandbox that is not in its Pod's spec (`kubectl debug` adds such
    /// containers).
    Debugged { container: ContainerName },
    /// Other sandboxes of the node are being saved; this sandbox waits for its turn.
    AwaitingTurn { urgency: Urgency },
    /// The sandbox is idle and waits until the disk has written the images before its own: the
    /// bandwidth of images is limited.
    AwaitingBandwidth,
    /// The next attempt after a failure waits.
    Backoff { until: Timestamp },
    /// The memory is in an image, and the kubelet is to start the containers again.
    AwaitingContainers,
    /// The Pod has no sandbox.
    NoSandbox,
    /// By the ledger the memory is in an image, and the store does not have that image.
    ImageMissing { image: ImageId },
    /// Nothing refers to the image any more.
    Garbage { image: ImageId },
    /// The Pod is gone and `image` is its memory. The image waits until then for a snapshot that
    /// claims it.
    Unclaimed { image: ImageId, until: Timestamp },
    /// `image` is the memory of a Pod that is gone. The apiserver has not confirmed yet that no
    /// snapshot claims it.
    Asking { image: ImageId },
    /// No snapshot has claimed the memory of a Pod that is gone, and `image` is being removed.
    /// `disk_short`: the removal comes before the end of the grace time.
    GivenUp { image: ImageId, disk_short: bool },
    /// The Pod is being deleted.
    PodTerminating,
    /// The Pod is gone.
    PodGone,
    /// All image numbers of this Pod are used up.
    NumbersExhausted,
}

/// The next steps for one sandbox, and the status for its user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// Status that describes the observation and the steps that begin. Write it before the steps
    /// are executed.
    pub status: StatusDraft,
    /// Time to plan again if nothing changes before.
    pub wake_at: Option<Timestamp>,
    pub why: Vec<Reason>,
    /// The plan needs the apiserver's own answer about the Pod. The agent then requests it after
    /// the steps and plans again with it ([`crate::state::Departure::answer`]).
    pub asks: bool,
}

impl Reason {
    /// Returns the urgency of the save that waits for its turn, if the reason is such a wait.
    pub fn awaited_turn(&self) -> Option<Urgency> {
        match self {
            Reason::AwaitingTurn { urgency } => Some(*urgency),
            Reason::AwaitingBandwidth => Some(Urgency::ByItself),
            _ => None,
        }
    }
}

impl Plan {
    /// Returns whether the plan puts a sandbox to sleep, or deeper to sleep, because of idleness
    /// and without a request. A caller that needs such a sandbox must be able to wake it.
    pub fn sleeps_by_itself(&self) -> bool {
        let is_idleness = |reason: &Reason| {
            matches!(
                reason,
                Reason::Idle | Reason::Pressure { .. } | Reason::Dozing
            )
        };
        self.why.iter().any(is_idleness)
    }

    /// Returns the urgency of the save that waits for its turn, if the plan has such a save.
    pub fn awaits_turn(&self) -> Option<Urgency> {
        self.why.iter().find_map(Reason::awaited_turn)
    }
}
