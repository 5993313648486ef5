//! Plans, their steps, and what became of a step.
//!
//! # How a step is executed
//! 1. Compare the [`Fence`]: another sandbox id or ledger sequence than planned for → [`Outcome::Stale`], nothing is done.
//! 2. Append `before` to the ledger, durably.
//! 3. Act: one call, given by [`Action`]. Doing it twice does no harm; the second time the answer is [`Outcome::Already`].
//! 4. On `Done` or `Already` append `after` to the ledger, durably.
//! 5. On anything but `Done` or `Already`, drop the rest of the plan. Note the outcome in [`crate::Failures::note`].
//!
//! Before the first step look whether there is room for the image that the plan is for, if a sandbox that runs is stopped for one
//! ([`Plan::stops_for`]). After a plan with steps, observe and plan again at once. After one without, wait for a change or for `wake_at`.
//! The whole plan runs under the sandbox's lock, observation included.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::ids::{ContainerName, ImageId, PodUid, SandboxId};
use crate::ledger::Entry;
use crate::pressure::Resource;
use crate::queue::Urgency;
use crate::state::{Live, Observed};
use crate::status::StatusDraft;

/// What a plan was made for. Only that may be changed by it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fence {
    pub pod_uid: PodUid,
    /// The sandbox that was observed, if any.
    pub sandbox_id: Option<SandboxId>,
    /// Ledger sequence before the step's own entries; a step counts those of the steps before it.
    pub ledger_seq: u64,
}

/// One step, complete: nothing is left to be chosen when it is executed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub fence: Fence,
    /// Ledger entry that must be durable before the act.
    pub before: Option<Entry>,
    pub action: Action,
    /// Ledger entry that is appended when the act is done.
    pub after: Option<Entry>,
}

/// The act of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Stop the sandbox's processor time; it stays in memory.
    Pause,
    /// The same, for as long as its user wishes: nobody wakes it, and the kubelet's probes are answered for it. Only of a sandbox whose memory
    /// is in no image: what arrives reaches its network stack.
    Freeze,
    /// The same as a pause, with a note that it is for idleness: whoever needs it resumes it. One that is paused gets the note.
    Doze,
    /// Push the memory of a dozing sandbox, which is in `image` too, out of main memory, and note that. Without one: of a runtime
    /// that makes none.
    Reclaim { image: Option<ImageId> },
    /// Let it run on.
    Resume,
    /// Read the paused sandbox's memory into a fresh partial image; the sandbox stays paused.
    Checkpoint { image: ImageId },
    /// Make the partial image durable, write its manifest, move it to its place. `Already` if it lies there.
    Commit { image: ImageId },
    /// Note in /run that the sandbox sleeps in `image`, then end its processes. Its keepers stay.
    End { image: ImageId },
    /// Verify `image`, restore the sandbox from it, drop the note in /run. Removes a half-made sandbox first.
    /// When it fails for certain (no sandbox runs), the executor appends [`Entry::WakeFailed`] with the reason.
    Wake { image: ImageId },
    /// Only the ledger changes.
    Record,
    /// Drop a note in /run that the ledger contradicts. If no sandbox runs, its keepers then report the containers' end.
    ForgetSleep,
    /// Remove what an unfinished save or removal left.
    DiscardPartial { image: ImageId },
    /// Remove a committed image.
    DiscardImage { image: ImageId },
    /// Give back an image of another Pod, which this one has taken and never run: the next Pod may be restored from it.
    ReleaseImage { image: ImageId },
    /// Remove the ledger of a Pod that is gone.
    DiscardLedger,
}

/// [`Action`] without its data: a metric label.
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
            Action::Record => StepKind::Record,
            Action::ForgetSleep => StepKind::ForgetSleep,
            Action::DiscardPartial { .. } => StepKind::DiscardPartial,
            Action::DiscardImage { .. } => StepKind::DiscardImage,
            Action::ReleaseImage { .. } => StepKind::ReleaseImage,
            Action::DiscardLedger => StepKind::DiscardLedger,
        }
    }
}

/// What became of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    Done,
    /// It was so before.
    Already,
    /// It is certain that it was not done. `reason` is CamelCase.
    Failed {
        reason: String,
        message: String,
    },
    /// Nobody knows whether it was done: a call timed out or its connection broke.
    Unknown {
        message: String,
    },
    /// The fence did not fit; nothing was tried.
    Stale,
}

/// Why a plan says what it says, for logs, events and tests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// Another actor holds the lock.
    Busy,
    /// The state of the sandbox could not be found out.
    LiveUnknown,
    /// The ledger cannot be trusted.
    LedgerCorrupt,
    /// torpor-oci is filling the Pod from an image.
    Restoring,
    /// Asked to sleep.
    SleepWanted,
    /// Idle for as long as was asked for.
    Idle,
    /// Idle, and the node is short of something.
    Pressure { short_of: Resource },
    /// Dozes because it was idle.
    Dozing,
    /// Asked to run.
    AwakeWanted,
    /// Asked to stand still.
    FreezeWanted,
    /// A snapshot wants an image.
    SnapshotWanted,
    /// The image that the sandbox sleeps in shall be deleted.
    DeletionWanted,
    /// An image that holds the sandbox's memory serves a snapshot too.
    ImageAdopted,
    /// It sleeps as asked.
    Sleeping,
    /// Runs or stands still, as asked.
    Settled,
    /// The sandbox runs although the ledger says otherwise.
    AwakeUnrecorded,
    /// The note in /run says asleep, the ledger does not.
    RecordStale,
    /// A save was not finished.
    SaveUnfinished,
    /// The end of a sandbox that hibernates was cut off: some of its processes may be gone.
    EndUnfinished,
    /// The runtime cannot save.
    NotCapable,
    /// Somebody has a session open, or had one a moment ago.
    InUse,
    /// It could fall asleep by itself, and does not while its probes fail: see [`crate::state::Desired::ready`].
    NotReady,
    /// A container runs in it that its Pod's spec does not have (`kubectl debug` adds such).
    Debugged { container: ContainerName },
    /// Other sandboxes of the node are being saved; this one waits for its turn.
    AwaitingTurn { urgency: Urgency },
    /// The same of one that is idle, until the disk is free of the images before it: their bandwidth is limited.
    AwaitingBandwidth,
    /// Waiting after a failure.
    Backoff { until: Timestamp },
    /// The memory is in an image and the kubelet is to bring the containers back.
    AwaitingContainers,
    /// No sandbox.
    NoSandbox,
    /// The memory should be in an image that the store does not have.
    ImageMissing { image: ImageId },
    /// Nothing refers to an image any more.
    Garbage { image: ImageId },
    /// The Pod is gone and `image` is its memory: until then it waits for a snapshot that claims it.
    Unclaimed { image: ImageId, until: Timestamp },
    /// `image` is the memory of a Pod that is gone, and the apiserver has not said yet that nobody claims it.
    Asking { image: ImageId },
    /// No snapshot has claimed the memory of a Pod that is gone, and `image` is being removed. `disk_short`: before the grace time was over.
    GivenUp { image: ImageId, disk_short: bool },
    /// The Pod is being deleted.
    PodTerminating,
    /// The Pod is gone.
    PodGone,
    /// All image numbers of this Pod are used up.
    NumbersExhausted,
}

/// What to do next with one sandbox, and what to tell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// Describes what was observed and what the steps begin; write it before executing them.
    pub status: StatusDraft,
    /// When to plan again although nothing changed.
    pub wake_at: Option<Timestamp>,
    pub why: Vec<Reason>,
    /// Whether to ask the apiserver itself about the Pod, once the steps are done, and to plan again with its answer ([`crate::state::Departure::answer`]).
    pub asks: bool,
}

impl Reason {
    /// Why a turn to save is waited for, if this says so.
    pub fn awaited_turn(&self) -> Option<Urgency> {
        match self {
            Reason::AwaitingTurn { urgency } => Some(*urgency),
            Reason::AwaitingBandwidth => Some(Urgency::ByItself),
            _ => None,
        }
    }
}

impl Plan {
    /// What a sandbox that runs is about to stand still for, if that is an image: the step that makes one, or the doze of which one is made
    /// in a plan of its own. Where there is no room for it, this is what fails, before anything is done.
    pub fn stops_for(&self, observed: &Observed) -> Option<&Step> {
        let runs = observed.live == Live::Running && observed.capable.is_ok();
        let needs_room =
            |step: &&Step| matches!(step.action, Action::Checkpoint { .. } | Action::Doze);
        self.steps.iter().find(needs_room).filter(|_| runs)
    }

    /// Whether it puts a sandbox to sleep, or deeper, although nobody has asked for that: whoever needs it must be able to wake it.
    pub fn sleeps_by_itself(&self) -> bool {
        let of_idleness = |reason: &Reason| {
            matches!(
                reason,
                Reason::Idle | Reason::Pressure { .. } | Reason::Dozing
            )
        };
        self.why.iter().any(of_idleness)
    }

    /// Why it waits for a turn to save, if it does.
    pub fn awaits_turn(&self) -> Option<Urgency> {
        self.why.iter().find_map(Reason::awaited_turn)
    }
}
