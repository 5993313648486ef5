//! Sends keepalives to the peers of a restored sandbox: see `torpor_link::question`.

use std::net::IpAddr;

use torpor_link::question::KeepaliveProbe;
use torpor_link::unacknowledged;
use torpor_records::UnacknowledgedMap;

/// Returns an Ethernet frame to each peer that may not have all data of the sandbox.
///
/// `map`: the pod's connections with unacknowledged data. `pod_ips`: the pod's addresses. `from`:
/// the Ethernet address of the pod's end of the link.
pub(super) fn frames(map: UnacknowledgedMap, pod_ips: &[IpAddr], from: [u8; 6]) -> Vec<Vec<u8>> {
    let connections = match unacknowledged::read(map) {
        Ok(connections) => connections,
        Err(error) => {
            // The sandbox then repeats lost data after its program or a peer has sent new data.
            torpor_sandbox::log_line!("{:#}", anyhow::Error::new(error));
            return Vec::new();
        }
    };
    let keepalives = connections
        .iter()
        .filter_map(|connection| KeepaliveProbe::of(connection, pod_ips));
    keepalives
        .filter_map(|keepalive| keepalive.frame(from))
        .collect()
}
