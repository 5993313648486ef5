//! Reconciliation of the Pods of this node: one task per Pod.
//!
//! [`desired`] reads the API, [`observe`] reads the node, `torpor_core` plans, [`execute`] does one
//! step, and [`driver`] repeats that for each Pod of the node.

pub(crate) mod desired;
pub(crate) mod driver;
pub(crate) mod execute;
pub(crate) mod kubelet;
pub(crate) mod manifest;
pub(crate) mod node;
pub(crate) mod observe;
pub(crate) mod references;
pub(crate) mod sandbox_index;
pub(crate) mod snapshot_index;
