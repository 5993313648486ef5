//! API types of Torpor: upstream's Agent Sandbox kinds unchanged (`agents.x-k8s.io/v1beta1`,
//! `extensions.agents.x-k8s.io/v1beta1`) and Torpor's own (`torpor.dev/v1alpha1`). This crate is
//! the only place of every string that users or other programs see.
//!
//! The CustomResourceDefinitions in `deploy/crds` are generated from these types: `cargo run -p
//! torpor-api --bin torpor-crds -- deploy`.

// kube derives each kind through a private copy of its struct; the lint reports the copy's `pub`.
#![allow(unreachable_pub)]
// The lint reports printer columns of one kind that have the same type.
#![allow(clippy::duplicated_attributes)]

pub mod annotations;
pub mod answers;
pub mod archive;
pub mod conditions;
pub mod crds;
pub mod documented;
pub mod extensions;
pub mod hash;
pub mod install;
pub mod labels;
pub mod node;
pub mod pod_record;
pub mod pod_snapshot;
pub mod raw;
pub mod reasons;
pub mod retention;
pub mod sandbox;
pub mod snapshot;

mod list_types;
pub mod taker;
mod times;

pub use extensions::{SandboxClaim, SandboxTemplate, SandboxWarmPool};
pub use hash::name_hash;
pub use node::{SandboxNode, SandboxNodeStatus};
pub use pod_record::PodRecord;
pub use pod_snapshot::{PodSnapshot, PodSnapshotManualTrigger};
pub use sandbox::{OperatingMode, Sandbox, SandboxSpec, SandboxStatus, ShutdownPolicy};
pub use snapshot::{
    SandboxSnapshot, SandboxSnapshotSpec, SandboxSnapshotStatus, SnapshotClass, SnapshotReason,
};
