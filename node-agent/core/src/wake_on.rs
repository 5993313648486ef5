//! The packets that wake a sleeping sandbox: a setting that the agent passes to the keeper, which
//! receives the packets.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// The value of the annotation `torpor.dev/wake-on`, described in docs/how-to/wake.md.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WakeOn {
    #[default]
    Any,
    /// Only these packets wake the sandbox.
    Only {
        tcp: bool,
        udp: bool,
        icmp: bool,
        /// The Pod's TCP and UDP ports; empty: all of them.
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
