//! Conditions and snapshot states for users, as drafts for the API.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{ImageId, PodUid, SnapshotUid};

/// The phase of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// The Pod has no sandbox.
    Absent,
    Running,
    /// The sandbox is paused because its user has requested a freeze.
    Paused,
    /// The sandbox is paused while its memory is being saved, or is about to be resumed.
    Saving,
    /// The sandbox is paused; its memory is in an image and pushed out of main memory, or about to
    /// be. Without `image` the runtime makes no images.
    Dozing {
        image: Option<ImageId>,
    },
    Hibernated {
        image: ImageId,
    },
    Waking {
        image: ImageId,
    },
    /// A new Pod is being restored from an older Pod's image.
    Restoring,
    /// The state could not be determined.
    Unknown,
    /// The sandbox has an error that waiting alone does not repair.
    Failed {
        error: String,
    },
}

/// The `status` of a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Truth {
    True,
    False,
}

impl fmt::Display for Truth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Truth::True => "True",
            Truth::False => "False",
        })
    }
}

/// A condition without its type and times.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConditionDraft {
    pub status: Truth,
    /// CamelCase; see [`reasons`].
    pub reason: String,
    pub message: String,
}

impl ConditionDraft {
    pub fn new(status: Truth, reason: &str, message: impl Into<String>) -> Self {
        Self {
            status,
            reason: reason.to_owned(),
            message: message.into(),
        }
    }
}

/// Condition reasons of the planner. The reason of a failure comes with the failure.
pub mod reasons {
    pub const HIBERNATED: &str = "Hibernated";
    pub const AWAKE: &str = "Awake";
    pub const WAKING: &str = "Waking";
    pub const SAVING: &str = "Saving";
    pub const SAVE_FAILED: &str = "SaveFailed";
    pub const DOZING: &str = "Dozing";
    pub const FROZEN: &str = "Frozen";
    pub const RUNTIME_NOT_CAPABLE: &str = "RuntimeNotCapable";
    pub const RESTORED: &str = "Restored";
    pub const ROLLED_BACK: &str = "RolledBack";
    pub const COLD_STARTED: &str = "ColdStarted";
    pub const IMAGE_MISSING: &str = "ImageMissing";
    pub const RESTORE_FAILED: &str = "RestoreFailed";
    pub const BOUND: &str = "Bound";
    pub const BINDING: &str = "Binding";
    pub const PENDING: &str = "Pending";
    pub const COMMITTED: &str = "Committed";
    pub const SANDBOX_NOT_FOUND: &str = "SandboxNotFound";
}

/// The state of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotState {
    /// The save has not begun; `message` names what it waits for.
    Pending {
        message: String,
    },
    Saving,
    /// The snapshot has no image. `reason` is one of SaveFailed, SandboxNotFound,
    /// RuntimeNotCapable, ImageMissing. Retriable work is retried.
    Failed {
        reason: String,
        message: String,
    },
    /// The image of the snapshot is whole. `consumed_by`: the Pod that was restored from it.
    /// `stale`: the sandbox ran on after the image was made.
    Committed {
        image: ImageId,
        consumed_by: Option<PodUid>,
        stale: bool,
    },
    /// The snapshot is being deleted; the bytes of its image are still there.
    Releasing,
    /// The snapshot is being deleted and nothing on this node is kept for it any more: its
    /// finalizer may go.
    Released,
}

/// The status of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotDraft {
    pub uid: SnapshotUid,
    pub name: String,
    pub state: SnapshotState,
}

/// The status of a sandbox and its snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusDraft {
    pub phase: Phase,
    /// Pod condition torpor.dev/Hibernated; `None`: hibernation never concerned the Pod, so it gets
    /// no such condition.
    pub hibernated: Option<ConditionDraft>,
    /// Pod condition torpor.dev/Restored; `None`: the Pod gets no such condition.
    pub restored: Option<ConditionDraft>,
    /// Pod condition torpor.dev/Bound; `None`: the Pod serves no claim that its sandbox is to
    /// receive.
    pub bound: Option<ConditionDraft>,
    pub snapshots: Vec<SnapshotDraft>,
    /// The image that holds the memory of a Pod that is gone, unless a Suspend snapshot has the
    /// image already. The controller finds the image by this field.
    pub left: Option<ImageId>,
}
