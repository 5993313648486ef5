//! What users are told: conditions and snapshot states, as drafts for the API.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{ImageId, PodUid, SnapshotUid};

/// Where a sandbox is in its life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// No sandbox of this Pod.
    Absent,
    Running,
    /// Stands still because somebody asked for it.
    Paused,
    /// Stands still while its memory is being kept, or is about to be resumed.
    Saving,
    /// Paused, its memory in an image and pushed out, or about to be. Without an image: the runtime makes none.
    Dozing {
        image: Option<ImageId>,
    },
    Hibernated {
        image: ImageId,
    },
    Waking {
        image: ImageId,
    },
    /// A new Pod is being filled from an older Pod's image.
    Restoring,
    /// The state could not be found out.
    Unknown,
    /// Something is wrong that waiting alone will not mend.
    Failed {
        error: String,
    },
}

/// `status` of a condition.
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

/// Reasons that the planner uses; those of failures come with the failure.
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
    pub const PENDING: &str = "Pending";
    pub const COMMITTED: &str = "Committed";
    pub const SANDBOX_NOT_FOUND: &str = "SandboxNotFound";
}

/// How far a snapshot is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SnapshotState {
    /// Not begun; `message` says what is waited for.
    Pending {
        message: String,
    },
    Saving,
    /// No image; `reason` is one of SaveFailed, SandboxNotFound, RuntimeNotCapable, ImageMissing. What can be retried is.
    Failed {
        reason: String,
        message: String,
    },
    /// Its image is whole. `consumed_by`: the Pod that was restored from it. `stale`: the sandbox ran on after it was made.
    Committed {
        image: ImageId,
        consumed_by: Option<PodUid>,
        stale: bool,
    },
    /// Being deleted, its bytes are still there.
    Releasing,
    /// Being deleted, and nothing on this node is kept for it any more: the finalizer may go.
    Released,
}

/// Status of one snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotDraft {
    pub uid: SnapshotUid,
    pub name: String,
    pub state: SnapshotState,
}

/// Status of one sandbox and its snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusDraft {
    pub phase: Phase,
    /// Pod condition torpor.dev/Hibernated; `None`: the Pod never had to do with hibernation, leave it without.
    pub hibernated: Option<ConditionDraft>,
    /// Pod condition torpor.dev/Restored; `None`: leave it without.
    pub restored: Option<ConditionDraft>,
    pub snapshots: Vec<SnapshotDraft>,
    /// The image that holds the memory of a Pod that is gone, unless a Suspend snapshot has it already: the controller finds it by this.
    pub left: Option<ImageId>,
}
