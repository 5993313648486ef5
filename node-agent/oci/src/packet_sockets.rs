//! A sandbox hears nothing that is for routers: see `torpor_link::filter`.

use torpor_core::ids::SandboxId;
use torpor_link::filter::leave_out_for_routers;
use torpor_runsc_direct::packet_sockets::packet_sockets;

use crate::node::Node;

/// For a sandbox that was just started or restored. One whose sockets cannot be had hears more than it needs, and is no worse for it.
pub(crate) fn narrow(node: &Node, sandbox: &SandboxId) {
    let narrowed = || -> anyhow::Result<()> {
        let sockets = packet_sockets(&node.runsc.of(sandbox), sandbox.as_str())?;
        Ok(sockets.iter().try_for_each(leave_out_for_routers)?)
    };
    if let Err(error) = narrowed() {
        eprintln!("torpor-oci: the sandbox receives packets that are for routers: {error:#}");
    }
}
