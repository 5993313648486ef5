//! The rules by which a pod's shim acts for a sandbox that sleeps.

use serde::{Deserialize, Serialize};
use torpor_core::wake_on::WakeOn;

/// Rules by which a keeper holds packets for a sleeping pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rules {
    /// TCP ports at which the keeper answers the kubelet's probes for the pod.
    pub probes: Vec<u16>,
    /// More such ports, at which the kubelet makes some probes over TLS.
    #[serde(default)]
    pub tls_probes: Vec<u16>,
    /// Ports of `probes` and `tls_probes` to which the kubelet also makes the request of a hook,
    /// once the Pod is being deleted. The kubelet makes no probes then.
    #[serde(default)]
    pub hooks: Vec<u16>,
    /// True: the sandbox continues from its image in another Pod. Its containers do not run their
    /// hooks now, so the keeper answers hooks as it answers probes.
    #[serde(default)]
    pub suspends: bool,
    /// Packets that wake the sandbox.
    #[serde(default)]
    pub wake_on: WakeOn,
}

impl Rules {
    /// Returns the rules for a keeper that answers probes over TLS like all other probes: their
    /// ports are among `probes`.
    #[must_use]
    pub fn with_tls(mut self) -> Self {
        self.probes.append(&mut self.tls_probes);
        self
    }
}
