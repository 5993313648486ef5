//! The end of containers whose gofer has ended.

use nix::sys::signal::Signal;
use torpor_core::ids::SandboxId;
use torpor_records::ContainerRecord;
use torpor_runsc::control::{ContainerState, Error, SignalScope};

use crate::node::{CALL_LIMIT, Node};

/// Ends each container of a running sandbox whose gofer, the process that serves its files, has
/// ended. The kubelet then starts the container anew.
///
/// gVisor itself ends such a container only if gVisor has started the container's program: then it
/// watches the gofer (`runsc/boot/loader.go`, `startGoferMonitor`). In a restored sandbox the
/// container would run on without its files and could not be saved. The caller holds the sandbox's
/// lock.
pub fn end_containers_without(node: &Node, sandbox: &SandboxId) {
    let runsc = node.runsc.of(sandbox);
    let has_lost_gofer = |container: &ContainerRecord| {
        // A container without a record of runsc is about to go.
        (runsc.has_lost_gofer(container.id.as_str(), sandbox.as_str())).unwrap_or(false)
    };
    let containers = node.records.containers_of(sandbox);
    for container in containers.unwrap_or_default() {
        if !has_lost_gofer(&container) {
            continue;
        }
        let name = &container.name;
        match end(node, &container) {
            Ok(true) => {
                crate::log_line!("ended container {name:?}, because its gofer has ended");
            }
            // An ended container stays on record until containerd deletes it.
            Ok(false) => {}
            Err(error) => {
                let error = anyhow::Error::new(error);
                crate::log_line!("cannot end container {name:?}, whose gofer has ended: {error:#}");
            }
        }
    }
}

/// Ends the container. Returns whether it ran.
fn end(node: &Node, container: &ContainerRecord) -> Result<bool, Error> {
    let mut control = node.runsc.connect(&container.sandbox)?;
    let id = container.id.as_str();
    if control.container_state(id, CALL_LIMIT)? != ContainerState::Running {
        return Ok(false);
    }
    let kill = Signal::SIGKILL as i32;
    control.signal(id, 0, kill, SignalScope::All, CALL_LIMIT)?;
    Ok(true)
}
