//! What is wanted, what is there, what is allowed.
//!
//! ```text
//!              pause                checkpoint, commit             end
//!   Running ──────────► Paused ───────────────────────► Paused ─────────► Hibernated
//!      ▲ ◄───────────────┘ resume (nothing was saved)      │ image = memory    │
//!      │ ◄─────────────────────────────────────────────────┘ resume            │ wake
//!      └◄──────────────────────────── Waking ◄─────────────────────────────────┘
//! ```
//! Dozing is the middle of it: paused for idleness, committed, its memory reclaimed; a resume is its wake, an end its deeper sleep.
//!
//! Beside each: `Absent` (the kubelet has not made the sandbox, or it died), `Restoring` (a new Pod is being filled from an older
//! Pod's image) and `Failed`. The names are those of [`crate::status::Phase`]; the planner itself keeps no state: it derives
//! everything from [`Observed`], so that after a crash it goes on where the world is, not where it thought it was.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::ids::{ContainerName, ImageId, PodUid, SandboxId, SnapshotUid};
use crate::ledger::LedgerState;
use crate::pressure::Pressure;
use crate::steps::{Action, Outcome, StepKind};

/// How much the sandbox shall run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Power {
    /// Run.
    Awake,
    /// Memory in an image, no processes.
    Asleep,
    /// Paused, memory where it is. A sandbox that sleeps already is left asleep: that is at least as still.
    Frozen,
    /// Paused, memory in an image, and pushed out of main memory. Nobody asks for it: an idle sandbox does it by itself. Of a runtime
    /// that makes no images (see [`Observed::dozes_unsaved`]) it is as deep as sleep goes, and there is no image.
    Dozing,
}

/// Whether the Pod is there, by the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodPresence {
    Present,
    /// `deletionTimestamp` is set, or the kubelet has ended it for good: it is taken down; nothing new is begun with it.
    Terminating,
    /// No Pod of this UID. Say so only with a synced cache.
    Gone,
}

/// Why a snapshot is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotReason {
    /// The Pod is about to be deleted: the sandbox must be asleep in this image, and not run on.
    Suspend,
    /// A point in time; the sandbox goes on as it was.
    Manual,
}

/// What is wanted of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotWish {
    Keep,
    /// `deletionTimestamp` is set.
    Delete,
}

/// One SandboxSnapshot of this Pod. Hand in only those that carry our finalizer (no byte is written for others).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotIntent {
    pub uid: SnapshotUid,
    /// `namespace/name`, for messages.
    pub name: String,
    /// The Pod whose memory it is (spec.podUID, or the Pod that spec.sandboxName stood for when it was accepted).
    pub pod_uid: PodUid,
    pub reason: SnapshotReason,
    /// `status.imageID` with condition Committed=True, as far as the cache knows.
    pub image: Option<ImageId>,
    pub wish: SnapshotWish,
}

/// How a Pod went that the API has no more, and what becomes of the images that it left.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Departure {
    /// When the agent found the Pod gone.
    pub since: Timestamp,
    /// When the agent last saw the Pod, somebody had deleted it to be rid of it: it was neither evicted nor ended by its kubelet. There is no grace time then.
    pub by_user: bool,
    /// The images' disk is short of room, and these images are the oldest that nobody claims: the grace time is over.
    pub disk_short: bool,
    /// The apiserver's answer, asked for this plan ([`crate::Plan::asks`]). The watches may be behind it.
    pub answer: Option<Answer>,
}

/// The apiserver's own answer about a Pod that the watch shows no more.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// It has the Pod.
    pub has_pod: bool,
    /// Snapshots of this node that name the Pod and are not being deleted.
    pub snapshots: BTreeSet<SnapshotUid>,
    /// Those that are being deleted.
    pub deleting: BTreeSet<SnapshotUid>,
}

/// What the API asks for, for one Pod UID.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Desired {
    pub pod_uid: PodUid,
    pub pod: PodPresence,
    /// How it went, of a Pod that is [`PodPresence::Gone`]. Without it nothing of the Pod's memory is removed.
    pub departure: Option<Departure>,
    /// From the Pod's annotations. A Suspend snapshot of a present Pod makes it [`Power::Asleep`] whatever this says.
    pub power: Power,
    /// When it may fall asleep by itself, while [`Power::Awake`] is wanted.
    pub sleep: SleepAfter,
    /// Whether it may sleep for the node's sake, and is asked to.
    pub pressure: Pressure,
    /// Its Pod is being taken away for the node's sake (a drain, a taint, a preemption): another one is to go on with its memory.
    pub evicted: bool,
    /// When it crashes while it is awake it goes on from its last image, which is kept for that.
    pub keep_last_image: bool,
    /// Times at which it is to be awake, whatever made it sleep, unless it is frozen or being suspended.
    pub wake_up: BTreeSet<Timestamp>,
    pub snapshots: Vec<SnapshotIntent>,
    /// Whether its Pod has a word about its sleep already, which may be that of an agent that died right after it: it is kept true.
    pub told: bool,
    /// Its containers but for those that have ended for good: an image without one of them would have no place for it.
    pub containers: BTreeSet<ContainerName>,
    /// By the kubelet's startup and readiness probes, where it has any, they have started and are ready. While it sleeps its probes are
    /// answered for it: one that is not ready would pass for ready, and one that hangs would not be restarted. It does not fall asleep by itself.
    pub ready: bool,
}

/// Idle times after which a sandbox falls asleep by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SleepAfter {
    /// Then it is paused, its memory goes into an image and is pushed into swap.
    pub doze: Option<Duration>,
    /// Then its memory goes into an image and its processes end.
    pub hibernate: Option<Duration>,
}

impl SleepAfter {
    /// The shortest of them: when it is worth finding out whether the sandbox is idle.
    pub fn first(&self) -> Option<Duration> {
        self.doze.into_iter().chain(self.hibernate).min()
    }
}

impl Desired {
    /// What the sandbox shall do, Suspend snapshots considered; not what it does by itself.
    pub fn target(&self) -> Power {
        match self.suspending() {
            true => Power::Asleep,
            false => self.power,
        }
    }

    /// When it was last to be awake.
    pub(crate) fn called_at(&self, now: Timestamp) -> Option<Timestamp> {
        self.wake_up.range(..=now).next_back().copied()
    }

    /// Whether a Suspend snapshot of this Pod is wanted.
    pub fn suspending(&self) -> bool {
        self.kept_snapshots()
            .any(|s| s.reason == SnapshotReason::Suspend)
    }

    /// Snapshots of this Pod that are not being deleted.
    pub fn kept_snapshots(&self) -> impl Iterator<Item = &SnapshotIntent> {
        let of_pod = |s: &&SnapshotIntent| s.pod_uid == self.pod_uid;
        self.snapshots
            .iter()
            .filter(of_pod)
            .filter(|s| s.wish == SnapshotWish::Keep)
    }
}

/// The sandbox's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Live {
    /// None. A sandbox that was created but not restored yet counts as none: [`Action::Wake`] removes it first.
    None,
    Running,
    Paused,
    /// Could not be found out (a call timed out): only look again.
    Unknown,
}

/// The runtime's note under /run that the sandbox sleeps in place: its keepers hold the containers open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub image: ImageId,
}

/// The runtime's note under /run that the sandbox is paused because it was idle: whoever needs it resumes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doze {
    /// Its memory was pushed out.
    pub reclaimed: bool,
}

/// How far an image in the store is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageState {
    /// Whole, durable, with a manifest.
    Committed,
    /// Being written, or left over from a crash (while saving or while being removed).
    Partial,
}

/// One image of this Pod in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageObserved {
    pub id: ImageId,
    pub state: ImageState,
    /// The Pod that was restored from it.
    pub consumed_by: Option<PodUid>,
    /// A Pod of this node is being restored from it at this moment.
    pub being_restored: bool,
}

/// A sandbox crashed while it was awake and went back to its last image, as its user wishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolledBack {
    /// When the image was made.
    pub made: Timestamp,
    /// How old it was when the sandbox went back to it.
    pub age: Duration,
}

/// What torpor-oci made of the `restore-image` annotation of this Pod, or of a crash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Restore {
    /// The Pod has no such annotation.
    NotAsked,
    /// Not all containers are there yet.
    InProgress,
    /// The Pod goes on from the image.
    Done {
        image: ImageId,
        /// It had left that image behind.
        rolled_back: Option<RolledBack>,
    },
    /// The Pod was started without the memory, as its policy allows; `message` says why.
    ColdStarted { message: String },
    /// The Pod has no memory and was not started; `reason` is CamelCase.
    Failed { reason: String, message: String },
}

/// What is on the node, for one Pod UID.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observed {
    /// The current sandbox of the Pod, if the runtime knows one.
    pub sandbox: Option<SandboxId>,
    pub live: Live,
    /// The containers that were started in the sandbox, unless it dozes.
    pub containers: BTreeSet<ContainerName>,
    /// One of those that are there that the Pod's spec does not have (`kubectl debug` adds such). Whoever goes on from an image would lack it.
    pub added: Option<ContainerName>,
    pub record: Option<Record>,
    pub doze: Option<Doze>,
    /// `Err`: this node cannot push memory out, in words.
    pub can_doze: Result<(), String>,
    /// `Err`: the ledger is corrupt, in words.
    pub ledger: Result<LedgerState, String>,
    pub images: Vec<ImageObserved>,
    /// `Err`: the runtime cannot save, in words.
    pub capable: Result<(), String>,
    /// The runtime cannot save, and its sandboxes doze without an image: what ends one that dozes ends its memory.
    pub dozes_unsaved: bool,
    pub restore: Restore,
    /// It is its turn to save: see [`crate::queue`].
    pub save_turn: bool,
    /// It has asked for its turn and waits for bandwidth.
    pub held_back: bool,
    /// Open exec, attach and port-forward sessions: hold off in-place hibernation (not Suspend, not snapshots).
    pub sessions: u32,
    /// Since when it has been idle, by [`crate::idle`]; none: not known, or nobody asked. Say so only when packets and the program's
    /// mark have been asked about, if it is long enough for [`Desired::sleep`].
    pub idle_since: Option<Timestamp>,
    /// Names of processes that `kubectl exec` has left behind, as they were last looked for: a
    /// restore ends them, a doze does not.
    pub left_by_exec: Vec<String>,
    /// `Err`: it cannot be found out whether it is idle, in words.
    pub idle_known: Result<(), String>,
    /// When somebody outside (an exec, a packet) last woke it, if known: see [`Policy::linger`]. Not when a plan did.
    pub awake_since: Option<Timestamp>,
    /// When it last woke in place, whoever woke it.
    pub woke_at: Option<Timestamp>,
    /// Why packets do not wake it, if they did not when it last fell asleep, or was to.
    pub not_watched: Option<String>,
    /// When it fell asleep, if it dozes or hibernates.
    pub asleep_since: Option<Timestamp>,
    /// What failed lately; see [`Failures::note`].
    pub failures: Failures,
    /// Somebody else holds the sandbox's lock (a keeper that wakes it).
    pub busy: bool,
}

impl Observed {
    /// Nothing of the Pod on the node.
    pub fn nothing() -> Self {
        Self {
            sandbox: None,
            live: Live::None,
            containers: BTreeSet::new(),
            added: None,
            record: None,
            doze: None,
            can_doze: Ok(()),
            ledger: Ok(LedgerState::default()),
            images: Vec::new(),
            capable: Ok(()),
            dozes_unsaved: false,
            restore: Restore::NotAsked,
            save_turn: true,
            held_back: false,
            sessions: 0,
            idle_since: None,
            left_by_exec: Vec::new(),
            idle_known: Ok(()),
            awake_since: None,
            woke_at: None,
            not_watched: None,
            asleep_since: None,
            failures: Failures::default(),
            busy: false,
        }
    }
}

/// Times that plans keep to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Wait after the first failed save; doubles with each.
    pub save_backoff_min: Duration,
    pub save_backoff_max: Duration,
    /// The same for a sleep that nobody asked for: what cannot be saved is left in peace.
    pub idle_backoff_min: Duration,
    pub idle_backoff_max: Duration,
    /// Wait after the first failed wake; doubles with each.
    pub wake_backoff_min: Duration,
    pub wake_backoff_max: Duration,
    /// Wait after a failed resume, removal or record; doubles up to `save_backoff_max`.
    pub upkeep_backoff_min: Duration,
    /// When to look again while another actor is at work or the state is unknown.
    pub look_again: Duration,
    /// How long a sandbox that woke for somebody runs at least before in-place hibernation takes it again.
    pub linger: Duration,
    /// How long the image of a Pod that is gone waits for a snapshot that claims it, unless somebody deleted the Pod to be rid of it.
    pub unclaimed_grace: Duration,
    /// When to ask the apiserver again whose answer the watches do not show yet.
    pub ask_again: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            save_backoff_min: Duration::from_secs(5),
            save_backoff_max: Duration::from_secs(300),
            idle_backoff_min: Duration::from_secs(300),
            idle_backoff_max: Duration::from_secs(3600),
            wake_backoff_min: Duration::from_secs(1),
            wake_backoff_max: Duration::from_secs(60),
            upkeep_backoff_min: Duration::from_secs(1),
            look_again: Duration::from_millis(200),
            linger: Duration::from_secs(10),
            unclaimed_grace: Duration::from_secs(600),
            ask_again: Duration::from_secs(5),
        }
    }
}

/// One kind of work that failed, `count` times in a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub step: StepKind,
    /// CamelCase, for conditions.
    pub reason: String,
    pub message: String,
    pub at: Timestamp,
    pub count: u32,
}

/// Failures that are not yet made good, by the kind of work. Kept in memory: after a restart of the agent everything is tried at once.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Failures {
    /// Pause, Freeze, Doze, Checkpoint, Commit, Reclaim, End.
    pub save: Option<Failure>,
    /// Wake.
    pub wake: Option<Failure>,
    /// DiscardPartial, DiscardImage, ReleaseImage, DiscardLedger. What cannot be removed keeps no sandbox standing still.
    pub removal: Option<Failure>,
    /// Everything else.
    pub upkeep: Option<Failure>,
}

impl Failures {
    /// Takes note of how the sandbox is found. One that lives has woken, whoever woke it: what failed before it did is made good. So is the end
    /// of one that runs: it was saved, and says nothing of the next save.
    pub fn saw(&mut self, live: Live) {
        if matches!(live, Live::Running | Live::Paused) {
            self.wake = None;
        }
        let ends = |failure: &Failure| failure.step == StepKind::End;
        if live == Live::Running && self.save.as_ref().is_some_and(ends) {
            self.save = None;
        }
    }

    /// Takes note of what became of a step. Call it for each executed step.
    ///
    /// An unknown outcome counts as a failure here, so that a call that always times out is not repeated without a pause.
    /// A stale fence counts as nothing. The save that succeeds in the end is the one that commits.
    pub fn note(&mut self, action: &Action, outcome: &Outcome, now: Timestamp) {
        let step = action.kind();
        let place = match step {
            StepKind::Pause
            | StepKind::Freeze
            | StepKind::Doze
            | StepKind::Checkpoint
            | StepKind::Commit
            | StepKind::Reclaim
            | StepKind::End => &mut self.save,
            StepKind::Wake => &mut self.wake,
            StepKind::DiscardPartial
            | StepKind::DiscardImage
            | StepKind::ReleaseImage
            | StepKind::DiscardLedger => &mut self.removal,
            StepKind::Resume | StepKind::Record | StepKind::ForgetSleep => &mut self.upkeep,
        };
        let (reason, message) = match outcome {
            Outcome::Stale => return,
            Outcome::Done | Outcome::Already => {
                let same = place.as_ref().is_some_and(|failure| failure.step == step);
                if same || step == StepKind::Commit || step == StepKind::End {
                    *place = None;
                }
                return;
            }
            Outcome::Failed { reason, message } => (reason.clone(), message.clone()),
            Outcome::Unknown { message } => ("Unknown".to_owned(), message.clone()),
        };
        let count = place
            .as_ref()
            .map_or(1, |failure| failure.count.saturating_add(1));
        *place = Some(Failure {
            step,
            reason,
            message,
            at: now,
            count,
        });
    }
}

/// Reason of a sleep that failed because nothing that arrives would wake the sandbox. One that was asked for does not fail for that.
pub const NOT_WATCHED: &str = "NotWatched";
/// Reason of a save that failed because a container had ended, and nobody has noticed yet.
pub const CONTAINER_NOT_RUNNING: &str = "ContainerNotRunning";

impl Failure {
    /// Whether it is over in a moment without anybody's doing: the kubelet brings the container back.
    pub(crate) fn passes(&self) -> bool {
        self.reason == CONTAINER_NOT_RUNNING
    }

    /// When the work may be tried again: `min`, doubled with each failure, at most `max`.
    pub fn retry_at(&self, min: Duration, max: Duration) -> Timestamp {
        let doubled = 2_u32.saturating_pow(self.count.saturating_sub(1).min(30));
        let wait = min.saturating_mul(doubled).min(max);
        later(self.at, wait)
    }
}

/// `at + wait`, at most the end of time.
pub(crate) fn later(at: Timestamp, wait: Duration) -> Timestamp {
    at.checked_add(wait).unwrap_or(Timestamp::MAX)
}
