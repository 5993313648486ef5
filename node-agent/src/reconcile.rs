//! Reconciliation of the Pods of this node: one task per Pod.
//!
//! [`desired`] reads the API, [`observe`] reads the node, `torpor_core` plans, [`shim`] has the
//! Pod's shim take the steps, and [`driver`] repeats that for each Pod of the node.

pub(crate) mod desired;
pub(crate) mod driver;
pub(crate) mod kubelet;
pub(crate) mod manifest;
pub(crate) mod node;
pub(crate) mod observe;
pub(crate) mod references;
pub(crate) mod sandbox_index;
pub(crate) mod shim;
pub(crate) mod snapshot_index;
#[cfg(test)]
pub(crate) mod steps_for_tests;
