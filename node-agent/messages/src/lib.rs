//! Messages between the parts of Torpor on a node.
//!
//! Each is JSON in one message of a sequenced-packet socket. The types are those of the planner and
//! of the records, so that no second definition of them has to agree
//! ([decision](../../../docs/decisions/2026-11-28-shim-service.md)).
//!
//! | module | from | to |
//! |---|---|---|
//! | [`service`] | the agent | a pod's shim |
//! | [`keeper`] | the shim and its commands | a container's keeper |
//! | [`wire`] | | sockets, sending and receiving |

pub mod keeper;
pub mod service;
pub mod wire;
