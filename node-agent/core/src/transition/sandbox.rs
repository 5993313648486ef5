//! The facts and acts of a sandbox that its transitions are written over.

use serde::{Deserialize, Serialize};

use crate::ids::ImageId;
use crate::ledger::{Entry, LedgerState};

/// State of a sandbox by the node's record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recorded {
    /// gVisor runs it or holds it paused. If gVisor does neither, it crashed.
    Running,
    /// There is no process, and `image` is its memory. `unstarted`: the sandbox has not run since
    /// it was made.
    Hibernated {
        image: ImageId,
        unstarted: Option<Origin>,
    },
    /// A new sandbox waits for the rest of the containers in `image`.
    Restoring,
}

/// Origin of the image in which a sandbox has slept since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// A golden image. The Pod has done nothing yet, so that a cold start loses nothing.
    Golden,
    /// An image of the Pod itself, whose earlier sandbox a reboot or the death of its shim ended.
    Own,
}

/// Why a sandbox has processes that do not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// It was idle: a caller that needs it resumes it.
    Doze,
    /// It is frozen, or was being saved when the process that paused it died.
    Other,
}

/// An image of the node's store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holding {
    Held,
    /// It is there, or may be, and cannot be read now.
    Unreadable,
    Missing,
}

/// The image that was a sandbox' memory until entry `seq` of the ledger, [`Entry::Awake`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    pub image: ImageId,
    pub seq: u64,
}

/// The result of a resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resumed {
    Runs,
    /// It was not paused.
    RanAlready,
    /// A gofer has ended. The sandbox is still paused, and the image is its memory.
    GoferGone,
}

/// How a sandbox came to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ran {
    /// It was not paused, or has no process.
    Already,
    Resumed,
    /// It had lost a gofer: it was ended, and restored from its image.
    Restored,
}

/// A sandbox that may be paused: what [`resume`] needs of it.
pub trait Paused {
    type Error;

    /// Returns whether it is paused; completes a pause or resume that a crash cut off.
    fn is_paused(&self) -> Result<bool, Self::Error>;

    /// Returns whether all its gofers live. gVisor kills a container whose gofer has ended as soon
    /// as the container may run.
    fn has_gofers(&self) -> Result<bool, Self::Error>;

    /// Resumes it; returns whether it was paused.
    fn let_run(&self) -> Result<bool, Self::Error>;

    /// Returns whether the error of [`Paused::let_run`] says that the sandbox ended before it
    /// received the call.
    fn never_ran(error: &Self::Error) -> bool;

    /// Appends [`Entry::Committed`] at `left.seq`: the image is the sandbox' memory again.
    fn take_back(&self, left: &Left) -> Result<(), Self::Error>;
}

/// A sandbox with its records, ledger and images.
pub trait Sandbox: Paused {
    /// Reads the node's record.
    fn recorded(&self) -> Result<Recorded, Self::Error>;

    /// Reads the ledger.
    fn ledger(&self) -> Result<LedgerState, Self::Error>;

    fn holding(&self, image: &ImageId) -> Holding;

    /// Why it is paused; none where it runs or has no process that answers.
    fn pause(&self) -> Result<Option<Pause>, Self::Error>;

    /// Returns whether the Pod's shim and all keepers live. Where one has ended, the kubelet
    /// recreates the Pod's sandbox, and would end one that woke.
    fn is_held_open(&self) -> Result<bool, Self::Error>;

    /// Returns whether the sandbox is being suspended: it goes on in another Pod.
    fn is_suspended(&self) -> Result<bool, Self::Error>;

    /// Appends to the ledger, durably; returns the entry's number.
    fn append(&self, entry: &Entry) -> Result<u64, Self::Error>;

    /// Appends to the ledger, durably, unless it has gone on since entry `seq`.
    fn append_at(&self, seq: u64, entry: &Entry) -> Result<(), Self::Error>;

    /// Returns whether the error of [`Sandbox::append_at`] says that the ledger had gone on.
    fn is_fenced(error: &Self::Error) -> bool;

    /// Records that the sandbox sleeps in `image`, then ends its processes. Twice does no harm.
    fn end(&self, image: &ImageId) -> Result<(), Self::Error>;

    /// Makes an image of this Pod with the content of another Pod's image; returns its id. Twice
    /// does no harm.
    fn copy(&self, image: &ImageId) -> Result<ImageId, Self::Error>;

    /// Records that the new sandbox sleeps in `image`, and has its keepers watch for callers.
    fn sleep_unstarted(&self, image: &ImageId, origin: Origin) -> Result<(), Self::Error>;

    /// Records that the Pod starts cold because `image` cannot be restored, and ends the sandbox:
    /// the kubelet makes another.
    fn start_cold(&self, image: &ImageId, error: &Self::Error) -> Result<(), Self::Error>;

    /// Returns whether the error says that the image cannot be restored. Any other may pass.
    fn is_final(error: &Self::Error) -> bool;

    /// Marks another Pod's image as this Pod's. Twice does no harm.
    fn take(&self, image: &ImageId) -> Result<(), Self::Error>;

    /// Removes the mark of [`Sandbox::take`].
    fn give_back(&self, image: &ImageId) -> Result<(), Self::Error>;

    /// Opens `image` and finds its containers. Fails where they cannot be restored here.
    fn open(&self, image: &ImageId) -> Result<(), Self::Error>;

    /// Restores the processes from `image`, which is open. `awake` is called when the sandbox runs
    /// and no peer has received anything from it; it gets a function that releases what other wakes
    /// wait for. On failure nothing of the sandbox runs. Records that it runs once `awake` has
    /// returned.
    fn restore(&self, image: &ImageId, awake: &Awake<'_, Self::Error>) -> Result<(), Self::Error>;

    /// Prepares a restored sandbox for another place: new identity, the user's hook. `release`
    /// releases what other wakes wait for.
    fn renew(&self, release: &dyn Fn()) -> Result<(), Self::Error>;

    /// Writes the report of a restore in another place.
    fn report(&self) -> Result<(), Self::Error>;

    /// The CamelCase reason of a restore that failed.
    fn reason(error: &Self::Error) -> String;

    /// Records that a sandbox runs whose wake was cut off after [`Entry::Awake`].
    fn catch_up(&self) -> Result<(), Self::Error>;

    /// The refusal of a transition.
    fn refuse(refusal: Refusal) -> Self::Error;
}

/// The callback of [`Sandbox::restore`].
pub type Awake<'a, E> = dyn Fn(&dyn Fn()) -> Result<(), E> + 'a;

/// Why a Pod whose shim or keeper has ended is not woken.
pub const NOT_HELD_OPEN: &str = "containerd's shim of the Pod or the keeper of one of its containers has ended: the kubelet recreates the sandbox";

/// Why a sandbox does not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the sandbox is being restored: not all of its containers run yet")]
    Restoring,
    #[error(
        "the sandbox is frozen (suspension-strategy Freeze, or a manual pause): set operatingMode to Running first"
    )]
    Frozen,
    #[error("the sandbox has lost a gofer, and its image cannot be read: the sandbox stays paused")]
    Unrestorable,
    #[error("{NOT_HELD_OPEN}, which then continues from its image; try again in a moment")]
    NotHeldOpen,
    #[error(
        "the Sandbox is being suspended, and its memory stays in its image: this Pod is about to be deleted"
    )]
    Suspending,
    #[error("another process resumed the sandbox without holding its lock")]
    Unlocked,
}
