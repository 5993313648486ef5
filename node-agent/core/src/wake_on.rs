//! Which packets wake a sandbox that sleeps: what the planner's side tells the keeper, which sees the packets.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// As `torpor.dev/wake-on` says; that annotation's meaning is told in docs/how-to/wake.md.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WakeOn {
    #[default]
    Any,
    /// Of nothing else than these.
    Only {
        tcp: bool,
        udp: bool,
        icmp: bool,
        /// The pod's TCP and UDP ports; empty: all of them.
        ports: Vec<RangeInclusive<u16>>,
    },
}

impl WakeOn {
    pub const NOTHING: Self = Self::Only {
        tcp: false,
        udp: false,
        icmp: false,
        ports: Vec::new(),
    };
}
