//! The addresses of a pod's interface, which gVisor takes when it starts.

use std::path::Path;

use torpor_link::net;
use torpor_records::Addresses;

/// Puts the pod's addresses back on its interface: without them no peer finds a pod whose sandbox
/// has no process, and no packet wakes it. A failure is logged, and the next wake puts them back,
/// too.
pub fn put_back(namespace: &Path, addresses: &Addresses) {
    if let Err(error) = net::put_back(namespace, addresses) {
        crate::log_line!("{:#}", anyhow::Error::new(error));
    }
}
