//! The policy of sleep: idle times, the node's memory and swap, turns to save.

pub(crate) mod idle;
pub(crate) mod pressure;
pub(crate) mod saves;
pub(crate) mod sleep;
pub(crate) mod swap;
