//! Asks the peers of a sandbox that was restored where they are: see `torpor_link::question`.

use std::net::IpAddr;

use torpor_link::packet::Ends;
use torpor_link::question::{Question, Said};
use torpor_link::unacknowledged::{self, Unacknowledged};
use torpor_records::UnacknowledgedMap;

/// What goes out of the pod's link, whose Ethernet address is `from`: a frame to each peer that may not have all that was said. `own`: the
/// pod's addresses.
pub(super) fn frames(noted: UnacknowledgedMap, own: &[IpAddr], from: [u8; 6]) -> Vec<Vec<u8>> {
    let connections = match unacknowledged::read(noted) {
        Ok(connections) => connections,
        Err(error) => {
            // What was lost is said again once the program or a peer says something new.
            eprintln!("torpor-oci: {:#}", anyhow::Error::new(error));
            return Vec::new();
        }
    };
    let questions = connections
        .iter()
        .filter_map(|connection| Question::of(&said(connection), own));
    questions
        .filter_map(|question| question.frame(from))
        .collect()
}

fn said(connection: &Unacknowledged) -> Said {
    let ((local, local_port), (remote, remote_port)) = (connection.local, connection.remote);
    Said {
        ends: Ends {
            remote,
            remote_port,
            local,
            local_port,
        },
        first: connection.first,
        after: connection.after,
        acknowledged: connection.acknowledged,
        window: connection.window,
        timestamps: connection.timestamps,
        neighbour: connection.neighbour,
    }
}
