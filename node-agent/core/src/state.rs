//! The input of the planner: request ([`Desired`]), observation ([`Observed`]), times ([`Policy`]).
//!
//! ```text
//!              pause                checkpoint, commit             end
//!   Running ──────────► Paused ───────────────────────► Paused ─────────► Hibernated
//!      ▲ ◄───────────────┘ resume (nothing was saved)      │ image = memory    │
//!      │ ◄─────────────────────────────────────────────────┘ resume            │ wake
//!      └◄──────────────────────────── Waking ◄─────────────────────────────────┘
//! ```
//! Dozing is the state in the middle: the sandbox is paused for idleness, its image is committed,
//! its memory is reclaimed. A resume wakes a dozing sandbox; an end makes it hibernate.
//!
//! Three states stand beside these: `Absent` (the kubelet has not made the sandbox, or the sandbox
//! died), `Restoring` (a new Pod is being restored from an older Pod's image) and `Failed`. The
//! names are those of [`crate::status::Phase`]. The planner keeps no state of its own: it derives
//! every plan from [`Observed`]. After a crash of the agent the planner therefore continues from
//! the real state of the node.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::ids::{ClaimUid, ContainerName, ImageId, PodUid, SandboxId, SnapshotUid};
use crate::ledger::LedgerState;
use crate::shortage::Pressure;
use crate::steps::{Action, Outcome, StepKind};
use crate::time::later;

/// The wanted depth of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Power {
    /// The sandbox runs.
    Awake,
    /// The memory is in an image; there are no processes.
    Asleep,
    /// The sandbox is paused and its memory stays in place. A sandbox that sleeps already stays
    /// asleep, because a sleeping sandbox does not run either.
    Frozen,
    /// The sandbox is paused; its memory is in an image and pushed out of main memory. The API has
    /// no such request: the sandbox dozes because it is idle. For a runtime that makes no images
    /// (see [`Observed::dozes_unsaved`]) this is the deepest sleep, and there is no image.
    Dozing,
}

/// The presence of the Pod in the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PodPresence {
    Present,
    /// `deletionTimestamp` is set, or the kubelet has ended the Pod for good. The Pod is being
    /// taken down; no new work begins with it.
    Terminating,
    /// The API has no Pod of this UID. Only a synced cache proves that.
    Gone,
}

/// The purpose of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotReason {
    /// The Pod is about to be deleted: its sandbox must sleep in this image and not run on.
    Suspend,
    /// The snapshot keeps a point in time; the sandbox continues as before.
    Manual,
}

/// The wish for a snapshot: keep or delete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotWish {
    Keep,
    /// `deletionTimestamp` is set.
    Delete,
}

/// A SandboxSnapshot of this Pod. The caller passes only snapshots that carry Torpor's finalizer:
/// no byte is written for others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotIntent {
    pub uid: SnapshotUid,
    /// `namespace/name`, for messages.
    pub name: String,
    /// The Pod whose memory the snapshot holds: spec.podUID, or the Pod that spec.sandboxName stood
    /// for when the snapshot was accepted.
    pub pod_uid: PodUid,
    pub reason: SnapshotReason,
    /// `status.imageID`, if condition Committed is True, by the cache.
    pub image: Option<ImageId>,
    pub wish: SnapshotWish,
}

/// The end of a Pod that the API does not have any more, for the decisions about its images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Departure {
    /// Time at which the agent found the Pod gone.
    pub since: Timestamp,
    /// By the agent's last observation, a user had deleted the Pod to get rid of it: the Pod was
    /// neither evicted nor ended by its kubelet. Such a Pod has no grace time.
    pub by_user: bool,
    /// The images' disk is short of room, and these images are the oldest that no snapshot claims.
    /// This ends the grace time.
    pub disk_short: bool,
}

/// The apiserver's own answer about a Pod. The watches may be behind it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The apiserver has the Pod.
    pub has_pod: bool,
    /// Snapshots of this node that name the Pod and are not being deleted.
    pub snapshots: BTreeSet<SnapshotUid>,
    /// Snapshots of this node that name the Pod and are being deleted.
    pub deleting: BTreeSet<SnapshotUid>,
}

/// The request of the API for one Pod UID.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Desired {
    pub pod_uid: PodUid,
    pub pod: PodPresence,
    /// The end of the Pod, if the Pod is [`PodPresence::Gone`]. Without it the memory of the Pod is
    /// never removed.
    pub departure: Option<Departure>,
    /// The apiserver's own answer about the Pod, requested for this plan ([`crate::Plan::asks`]).
    pub answer: Option<Answer>,
    /// The request of the Pod's annotations. A Suspend snapshot of a present Pod overrides it with
    /// [`Power::Asleep`].
    pub power: Power,
    /// Idle times after which the sandbox falls asleep by itself while [`Power::Awake`] is wanted.
    pub sleep: SleepAfter,
    /// The permission, and the request, to sleep for the node's sake.
    pub pressure: Pressure,
    /// The Pod is being evicted for the node's sake (a drain, a taint, a preemption). Another Pod
    /// is to continue with its memory.
    pub evicted: bool,
    /// The last image is kept. A sandbox that crashes while it is awake continues from that image.
    pub keep_last_image: bool,
    /// Times at which the sandbox is to be awake, whatever the reason of its sleep is. These times
    /// do not apply to a sandbox that is frozen or being suspended.
    pub wake_up: BTreeSet<Timestamp>,
    pub snapshots: Vec<SnapshotIntent>,
    /// The claim that the Pod serves, if its sandbox is to receive the claim's files and to run the
    /// claim's command. Until then the sandbox does not fall asleep by itself.
    pub claim: Option<ClaimUid>,
    /// The Pod has a condition about its sleep already. An agent that ended right afterwards may
    /// have written it; this agent keeps it up to date.
    pub has_sleep_condition: bool,
    /// The containers of the Pod, without the containers that have ended for good. An image that
    /// lacks one of them could not restore it.
    pub containers: BTreeSet<ContainerName>,
    /// By the kubelet's startup and readiness probes, where the containers have any, the containers
    /// have started and are ready. While the sandbox sleeps, its probes are answered for it. A
    /// sandbox that is not ready would therefore pass for ready, and one that hangs would not
    /// be restarted. A sandbox that is not ready does not fall asleep by itself.
    pub ready: bool,
}

/// Idle times after which a sandbox falls asleep by itself; `None`: never.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SleepAfter {
    /// Time until the doze: the sandbox is paused, its memory goes into an image and is pushed into
    /// swap.
    pub doze: Option<Duration>,
    /// Time until the hibernation: the memory goes into an image and the processes end.
    pub hibernate: Option<Duration>,
}

impl SleepAfter {
    /// Returns the shorter time: from then on the agent needs to know whether the sandbox is idle.
    pub fn first(&self) -> Option<Duration> {
        self.doze.into_iter().chain(self.hibernate).min()
    }
}

impl Desired {
    /// Returns the requested depth, Suspend snapshots considered and idleness not considered.
    pub fn target(&self) -> Power {
        match self.suspending() {
            true => Power::Asleep,
            false => self.power,
        }
    }

    /// Returns the latest time of `wake_up` that has come.
    pub(crate) fn due_wake_up(&self, now: Timestamp) -> Option<Timestamp> {
        self.wake_up.range(..=now).next_back().copied()
    }

    /// Returns whether a Suspend snapshot of this Pod is wanted.
    pub fn suspending(&self) -> bool {
        self.kept_snapshots()
            .any(|s| s.reason == SnapshotReason::Suspend)
    }

    /// Returns the snapshots of this Pod that are not being deleted.
    pub fn kept_snapshots(&self) -> impl Iterator<Item = &SnapshotIntent> {
        let of_pod = |s: &&SnapshotIntent| s.pod_uid == self.pod_uid;
        self.snapshots
            .iter()
            .filter(of_pod)
            .filter(|s| s.wish == SnapshotWish::Keep)
    }
}

/// The state of the sandbox's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Live {
    /// There are no processes. A sandbox that was created but not restored yet counts as none:
    /// [`Action::Wake`] removes it first.
    None,
    Running,
    Paused,
    /// The state could not be determined (a call timed out). The only plan is another observation.
    Unknown,
}

/// The note under /run that the sandbox sleeps in place. Keepers hold its containers open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub image: ImageId,
}

/// The note under /run that the sandbox is paused because it was idle. A caller that needs the
/// sandbox resumes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Doze {
    /// The memory was pushed out of main memory.
    pub reclaimed: bool,
}

/// The state of an image in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ImageState {
    /// The image is whole and durable and has a manifest.
    Committed,
    /// The image is being written, or is left over from a crash during a save or a removal.
    Partial,
}

/// An image of this Pod in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageObserved {
    pub id: ImageId,
    pub state: ImageState,
    /// The Pod that was restored from the image.
    pub consumed_by: Option<PodUid>,
    /// A Pod of this node is being restored from the image at this moment.
    pub being_restored: bool,
}

/// A roll back: the sandbox crashed while it was awake and went back to its last image, as its user
/// requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolledBack {
    /// Time at which the image was made.
    pub made: Timestamp,
    /// Age of the image when the sandbox went back to it.
    pub age: Duration,
}

/// The result of the restore that the Pod's `restore-image` annotation or a crash requires.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Restore {
    /// The Pod has no such annotation.
    NotAsked,
    /// Some containers are not restored yet.
    InProgress,
    /// The Pod continues from the image.
    Done {
        image: ImageId,
        /// The sandbox had run on after that image was made.
        rolled_back: Option<RolledBack>,
    },
    /// The Pod was started without the memory, as its policy allows; `message` has the cause.
    ColdStarted { message: String },
    /// The Pod has no memory and was not started; `reason` is CamelCase.
    Failed { reason: String, message: String },
}

/// The state of the node for one Pod UID.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observed {
    /// The current sandbox of the Pod, if the runtime has one.
    pub sandbox: Option<SandboxId>,
    pub live: Live,
    /// The containers that were started in the sandbox; not read while it dozes.
    pub containers: BTreeSet<ContainerName>,
    /// A running container that is not in the Pod's spec (`kubectl debug` adds such containers). A
    /// sandbox restored from an image would lack it.
    pub added: Option<ContainerName>,
    pub record: Option<Record>,
    pub doze: Option<Doze>,
    /// `Err`: this node cannot push memory out; the text has the cause.
    pub can_doze: Result<(), String>,
    /// `Err`: the ledger is corrupt; the text has the cause.
    pub ledger: Result<LedgerState, String>,
    pub images: Vec<ImageObserved>,
    /// `Err`: the runtime cannot save; the text has the cause.
    pub capable: Result<(), String>,
    /// The runtime cannot save, and its sandboxes doze without an image. The end of a dozing
    /// sandbox then ends its memory.
    pub dozes_unsaved: bool,
    pub restore: Restore,
    /// The sandbox has its turn to save: see [`crate::queue`].
    pub save_turn: bool,
    /// The sandbox waits for its turn because of the limited bandwidth.
    pub held_back: bool,
    /// Number of open exec, attach and port-forward sessions. A session delays in-place
    /// hibernation, but neither Suspend nor snapshots.
    pub sessions: u32,
    /// Time since which the sandbox has been idle, by [`crate::idle`]; `None`: not known, or not
    /// determined. A time long enough for [`Desired::sleep`] may be given only after packets and
    /// the program's mark have been checked.
    pub idle_since: Option<Timestamp>,
    /// Names of the processes that `kubectl exec` left behind, as of the last check. A restore ends
    /// these processes, a doze does not.
    pub left_by_exec: Vec<String>,
    /// `Err`: it cannot be determined whether the sandbox is idle; the text has the cause.
    pub idle_known: Result<(), String>,
    /// Time at which a caller outside (an exec, a packet) last woke the sandbox, if known: see
    /// [`Policy::linger`]. The wake of a plan does not count.
    pub awake_since: Option<Timestamp>,
    /// Time of the last wake in place, whatever its cause.
    pub woke_at: Option<Timestamp>,
    /// The cause why packets do not wake the sandbox, determined when it last fell asleep or was
    /// about to; `None`: packets wake it.
    pub not_watched: Option<String>,
    /// Time at which the sandbox fell asleep, if it dozes or hibernates.
    pub asleep_since: Option<Timestamp>,
    /// The claim that has arrived in the sandbox.
    pub bound: Option<ClaimUid>,
    /// Recent failures; see [`Failures::note`].
    pub failures: Failures,
    /// Another process (a command of the shim that wakes the sandbox) holds the sandbox's lock.
    pub busy: bool,
}

impl Observed {
    /// Returns the observation of a node that has nothing of the Pod.
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
            bound: None,
            failures: Failures::default(),
            busy: false,
        }
    }
}

/// The times that plans keep to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// Wait after the first failed save; doubles with each failure.
    pub save_backoff_min: Duration,
    pub save_backoff_max: Duration,
    /// Wait after the first failed save of a sandbox that sleeps because of idleness; doubles with
    /// each failure. This wait is longer: a sandbox that cannot be saved is tried rarely.
    pub idle_backoff_min: Duration,
    pub idle_backoff_max: Duration,
    /// Wait after the first failed wake; doubles with each failure.
    pub wake_backoff_min: Duration,
    pub wake_backoff_max: Duration,
    /// Wait after the first failed resume, removal or record; doubles up to `save_backoff_max`.
    pub upkeep_backoff_min: Duration,
    /// Time to the next observation while another process acts or the state is unknown.
    pub look_again: Duration,
    /// Shortest time for which a sandbox that woke for a caller runs before it hibernates in place
    /// again.
    pub linger: Duration,
    /// Time for which the image of a Pod that is gone waits for a snapshot that claims it, unless a
    /// user deleted the Pod to remove it.
    pub unclaimed_grace: Duration,
    /// Time to the next request to the apiserver while the watches do not show its last answer yet.
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

/// Work of one kind that failed, `count` times in a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub step: StepKind,
    /// CamelCase, for conditions.
    pub reason: String,
    pub message: String,
    pub at: Timestamp,
    pub count: u32,
}

/// Failures that no later success has cleared, by the kind of work. The failures are kept in
/// memory: after a restart of the agent all work is tried at once.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Failures {
    /// Failure of Pause, Freeze, Doze, Checkpoint, Commit, Reclaim or End.
    pub save: Option<Failure>,
    /// Failure of Wake.
    pub wake: Option<Failure>,
    /// Failure of Bind.
    pub bind: Option<Failure>,
    /// Failure of DiscardPartial, DiscardImage, ReleaseImage or DiscardLedger. A failed removal
    /// does not delay a resume: the removals have a failure of their own.
    pub removal: Option<Failure>,
    /// Failure of any other step.
    pub upkeep: Option<Failure>,
}

impl Failures {
    /// Clears the failures that the observed state disproves. A sandbox that lives has woken,
    /// whatever woke it: an earlier failure of a wake is cleared. A sandbox that runs was saved:
    /// a failure of its end is cleared, because that failure does not concern the next save.
    pub fn saw(&mut self, live: Live) {
        if matches!(live, Live::Running | Live::Paused) {
            self.wake = None;
        }
        let ends = |failure: &Failure| failure.step == StepKind::End;
        if live == Live::Running && self.save.as_ref().is_some_and(ends) {
            self.save = None;
        }
    }

    /// Records the outcome of a step. The executor calls this for each executed step.
    ///
    /// An unknown outcome counts as a failure here, so that a call that always times out is not
    /// repeated without a pause. A stale fence counts as nothing. A save has succeeded once its
    /// commit has: a successful commit or end clears every failure of a save.
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
            StepKind::Bind => &mut self.bind,
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

/// Reason of a sleep by idleness that failed because nothing that arrives would wake the sandbox. A
/// requested sleep does not fail for that cause.
pub const NOT_WATCHED: &str = "NotWatched";
/// Reason of a save that failed because a container had ended, unnoticed by the kubelet so far.
pub const CONTAINER_NOT_RUNNING: &str = "ContainerNotRunning";

impl Failure {
    /// Returns whether the cause passes by itself: the kubelet starts the container again.
    pub(crate) fn is_transient(&self) -> bool {
        self.reason == CONTAINER_NOT_RUNNING
    }

    /// Returns the time of the next attempt. The wait is `min`, doubled with each failure, at most
    /// `max`.
    pub fn retry_at(&self, min: Duration, max: Duration) -> Timestamp {
        let doubled = 2_u32.saturating_pow(self.count.saturating_sub(1).min(30));
        let wait = min.saturating_mul(doubled).min(max);
        later(self.at, wait)
    }
}
