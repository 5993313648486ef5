//! Ending containers whose gofer has ended.

use torpor_core::state::{Live, Observed};
use torpor_gvisor::control::SignalScope;
use torpor_gvisor::record::{ContainerRecord, PodRecord};

use crate::node::{CALL_LIMIT, Node};
use crate::observe::words;

/// Ends the containers of a sandbox that runs whose gofer (the process that serves their files) has ended, so that the kubelet starts them anew.
///
/// gVisor does so by itself, but not in a sandbox that was restored: it watches the gofer of a container whose program it has begun (`runsc/boot/loader.go`,
/// `startGoferMonitor`). Such a container would run on without its files and could not be saved. The caller holds the sandbox' lock.
pub(super) fn end_containers_without(node: &Node, record: &PodRecord, observed: &Observed) {
    if observed.live != Live::Running {
        return;
    }
    let runsc = node.runsc.of(&record.sandbox);
    let has_gofer = |container: &ContainerRecord| {
        // What runsc has no record of any more is about to go.
        (runsc.has_gofer(container.id.as_str(), record.sandbox.as_str())).unwrap_or(true)
    };
    let containers = node.records.containers_of(&record.sandbox);
    for container in containers.unwrap_or_default() {
        if has_gofer(&container) {
            continue;
        }
        tracing::warn!(pod_uid = %record.pod_uid, container = container.name, "the container's gofer has ended: so is the container");
        let ended = node.runsc.connect(&record.sandbox).and_then(|mut control| {
            control.signal(container.id.as_str(), 0, KILL, SignalScope::All, CALL_LIMIT)
        });
        if let Err(error) = ended {
            tracing::warn!(pod_uid = %record.pod_uid, error = words(&error), "a container without its gofer is not ended");
        }
    }
}

/// SIGKILL (signal(7)).
const KILL: i32 = 9;
