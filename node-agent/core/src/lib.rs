//! What to do with one sandbox next: the pure half of the node agent.
//!
//! The agent looks at the node ([`Observed`]) and at the API ([`Desired`]), asks [`plan`] what follows, and does it step by step.
//! Nothing here reads a clock, a file or the network, so a plan depends on its arguments alone and years of bad luck can be
//! simulated in seconds (`tests/sim.rs`).
//!
//! - [`bandwidth`]: how much of the disk's time saves take
//! - [`ids`]: names that become path components, checked when they are made
//! - [`idle`]: since when a sandbox has been idle
//! - [`image_size`]: how large an image may become, and when a save is stopped
//! - [`pressure`]: which sandbox sleeps when the node is short of memory or swap
//! - [`queue`]: which sandbox saves next when more want to than may at once
//! - [`ledger`]: the append-only record of what was begun and done with a sandbox's memory
//! - [`state`]: what is wanted, what is there, what is allowed
//! - [`store_limit`]: how much of the images' disk one namespace may take
//! - [`steps`]: plans, their steps, and what became of a step
//! - [`status`]: what users are told
//! - [`planner`]: the decisions
//! - [`wake_line`]: which sandbox is restored next when more are to wake than may at once
//! - [`wake_on`]: which packets wake a sandbox

pub mod bandwidth;
pub mod idle;
pub mod ids;
pub mod image_size;
pub mod ledger;
pub mod planner;
pub mod pressure;
pub mod queue;
pub mod state;
pub mod status;
pub mod steps;
pub mod store_limit;
pub mod wake_line;
pub mod wake_on;

pub use ids::{
    ContainerId, ContainerName, ImageId, InvalidId, Namespace, PodUid, SandboxId, SnapshotUid,
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
