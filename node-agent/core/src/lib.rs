//! The decisions about one sandbox: the pure half of the node agent.
//!
//! The agent observes the node ([`Observed`]) and reads the API ([`Desired`]). [`plan`] returns the
//! steps that follow, and the agent executes the steps one by one. Nothing in this crate reads a
//! clock, a file or the network. A plan therefore depends on its arguments alone, and a test
//! simulates years of faults in seconds (`tests/sim`).
//!
//! - [`bandwidth`]: the share of the disk's time that saves take
//! - [`ids`]: names that become path components, checked when they are made
//! - [`idle`]: the time since which a sandbox has been idle
//! - [`image_size`]: the largest size of an image, and when a save is stopped
//! - [`pressure`]: the choice of the sandbox that sleeps when the node is short of memory or swap
//! - [`queue`]: the order of saves when more sandboxes want to save than may at once
//! - [`ledger`]: the append-only record of the actions begun and done with a sandbox's memory
//! - [`state`]: the input of the planner: request, observation, policy
//! - [`store_limit`]: the share of the images' disk that one namespace may take
//! - [`steps`]: plans, their steps, and the outcome of a step
//! - [`status`]: conditions and snapshot states for users
//! - [`planner`]: the decisions
//! - [`transition`]: waking, running on, staying in an image: written once, for the shim and for
//!   the simulation
//! - [`wake_line`]: the order of restores when more sandboxes are to wake than may at once
//! - [`wake_on`]: the packets that wake a sandbox

pub mod bandwidth;
pub mod idle;
pub mod ids;
pub mod image_size;
pub mod ledger;
pub mod planner;
pub mod pressure;
pub mod queue;
mod shortage;
pub mod state;
pub mod status;
pub mod steps;
pub mod store_limit;
mod time;
pub mod transition;
pub mod wake_line;
pub mod wake_on;

pub use ids::{
    ClaimUid, ContainerId, ContainerName, ImageId, InvalidId, Namespace, PodUid, SandboxId,
    SnapshotUid,
};
pub use ledger::{Entry, LedgerState, Memory};
pub use planner::plan;
pub use state::{
    Answer, Departure, Desired, Doze, Failure, Failures, ImageObserved, ImageState, Live, Observed,
    PodPresence, Policy, Power, Record, Restore, RolledBack, SleepAfter, SnapshotIntent,
    SnapshotReason, SnapshotWish,
};
pub use status::{ConditionDraft, Phase, SnapshotDraft, SnapshotState, StatusDraft};
pub use steps::{Action, Fence, Outcome, Plan, Reason, Step, StepKind};
pub use wake_on::WakeOn;
