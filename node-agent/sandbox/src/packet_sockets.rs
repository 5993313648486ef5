//! Packet filters of a sandbox' sockets, so that the sandbox receives no packets for routers: see
//! `torpor_link::filter`.

use torpor_core::ids::SandboxId;
use torpor_link::filter::leave_out_for_routers;
use torpor_runsc_direct::packet_sockets::packet_sockets;

use crate::node::Node;

/// Excludes packets for routers from the sockets of a sandbox that was just started or restored.
/// On failure the sandbox receives packets that it does not need, without other harm.
pub fn exclude_router_packets(node: &Node, sandbox: &SandboxId) {
    let exclude = || -> anyhow::Result<()> {
        let sockets = packet_sockets(&node.runsc.of(sandbox), sandbox.as_str())?;
        Ok(sockets.iter().try_for_each(leave_out_for_routers)?)
    };
    if let Err(error) = exclude() {
        crate::log_line!("the sandbox receives packets that are for routers: {error:#}");
    }
}
