//! When a sandbox sleeps: idle times, the node's memory and swap, turns to save.

pub(crate) mod idle;
pub(crate) mod left;
pub(crate) mod pressure;
pub(crate) mod probe_gap;
pub(crate) mod saves;
pub(crate) mod sleep;
pub(crate) mod swap;
