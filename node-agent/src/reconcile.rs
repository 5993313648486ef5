//! What is wanted, what is there, and the steps from the one to the other: one task for each Pod.
//!
//! [`desired`] reads the API, [`observe`] reads the node, `torpor_core` plans, [`execute`] does one
//! step, and [`driver`] repeats that for each Pod of the node.

pub(crate) mod about;
pub(crate) mod desired;
pub(crate) mod driver;
pub(crate) mod execute;
pub(crate) mod known;
pub(crate) mod kubelet;
pub(crate) mod node;
pub(crate) mod observe;
pub(crate) mod shown;
