//! `start`: run a container. A container of a pod that is being restored is only recorded, until
//! the last container of the image is started: then the whole pod is restored.

use torpor_core::ids::ContainerId;
use torpor_messages::keeper::{self, Request};
use torpor_records::Role;
use torpor_records::{SandboxState, WakeCause};

use torpor_sandbox::node::{CALL_LIMIT, COMMAND_LIMIT, Node};
use torpor_sandbox::packet_sockets;
use torpor_sandbox::restore::{self, transitions};
use torpor_sandbox::streams::stdio_of;

pub(crate) fn start(node: &Node, id: &ContainerId) -> anyhow::Result<()> {
    let record = node.container(id)?;
    let dir = node.records.container_dir(id);
    if let Some(code) = record.completed {
        keeper::ask(&dir, &Request::Exit { code }, &[], CALL_LIMIT)?;
        return Ok(());
    }
    let _lock = node.records.lock(&record.sandbox)?;
    let pod = node.records.pod(&record.sandbox)?;
    match node.records.state(&record.sandbox)? {
        SandboxState::Running => {
            // The sandbox may doze since the container's creation.
            transitions::rouse(node, &record.sandbox, WakeCause::Container)?;
            node.cgroups.place(&pod.cgroup, std::process::id())?;
            let stdio = if record.terminal {
                None
            } else {
                Some(stdio_of(&dir)?)
            };
            node.runsc_of(&record.sandbox)
                .start(id.as_str(), stdio, COMMAND_LIMIT)?;
            if record.role == Role::Sandbox {
                packet_sockets::exclude_router_packets(node, &record.sandbox);
            }
            keeper::ask(&dir, &Request::Attach, &[], CALL_LIMIT)?;
            Ok(())
        }
        SandboxState::Restoring { image, started } => {
            restore::container_started(node, &pod, &image, started, &record)
        }
        SandboxState::Hibernated { .. } => {
            anyhow::bail!(
                "the sandbox is hibernated, and container {} is not part of it",
                record.name
            )
        }
    }
}
