//! The resources that a node can be short of, and the effect of a shortage on one sandbox.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A resource that a node can be short of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Resource {
    Memory,
    Swap,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Resource::Memory => "memory",
            Resource::Swap => "swap",
        })
    }
}

/// The effect of a node's shortage on one sandbox: a part of [`crate::Desired`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Pressure {
    /// The sandbox may be put to sleep for the node's sake.
    pub may: bool,
    /// An annotation switches dozing off. The sandbox therefore does not doze for the node's sake
    /// either.
    pub never_dozes: bool,
    /// An annotation switches hibernation off. The sandbox therefore does not hibernate for the
    /// node's sake either.
    pub never_hibernates: bool,
    /// The sandbox is requested to sleep because the node is short of this resource.
    pub short_of: Option<Resource>,
}

impl Pressure {
    /// Returns whether the sandbox may be hibernated for the node's sake.
    pub fn may_hibernate(&self) -> bool {
        self.may && !self.never_hibernates
    }
}
