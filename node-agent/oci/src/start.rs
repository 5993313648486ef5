//! `start`: run the container, or, in a pod that continues an image, note that it is there and restore the pod when it
//! was the last one.

use torpor_core::ids::ContainerId;
use torpor_records::Role;
use torpor_records::{SandboxState, WakeCause};
use torpor_runsc::command::Stdio3;
use torpor_runsc::keeper::{self, Request};

use crate::doze;
use crate::node::{CALL_LIMIT, COMMAND_LIMIT, Node};
use crate::packet_sockets;
use crate::restore;

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
            // It may have dozed off since the container's creation.
            doze::rouse(node, &record.sandbox, WakeCause::Container)?;
            node.cgroups.place(&pod.cgroup, std::process::id())?;
            let stdio = if record.terminal {
                None
            } else {
                Some(stdio_of(&dir)?)
            };
            node.runsc_of(&record.sandbox)
                .start(id.as_str(), stdio, COMMAND_LIMIT)?;
            if record.role == Role::Sandbox {
                packet_sockets::narrow(node, &record.sandbox);
            }
            keeper::ask(&dir, &Request::Attach, &[], CALL_LIMIT)?;
            Ok(())
        }
        SandboxState::Restoring { image, started } => {
            restore::arrive(node, &pod, &image, started, &record)
        }
        SandboxState::Hibernated { .. } => {
            anyhow::bail!(
                "the sandbox is hibernated, and container {} is not part of it",
                record.name
            )
        }
    }
}

/// Copies of the standard streams that the keeper holds.
pub(crate) fn stdio_of(dir: &std::path::Path) -> anyhow::Result<Stdio3> {
    let (_, files) = keeper::ask(dir, &Request::Stdio, &[], CALL_LIMIT)?;
    let [stdin, stdout, stderr] = <[_; 3]>::try_from(files)
        .map_err(|files| anyhow::anyhow!("the keeper sent {} streams, not 3", files.len()))?;
    Ok(Stdio3 {
        stdin,
        stdout,
        stderr,
    })
}
