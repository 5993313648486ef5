//! `delete`: nothing of the container is left afterwards: no process, no cgroup, no socket, no file. Images and ledgers
//! stay: they belong to the Pod, and the agent removes them when the Pod is gone.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use torpor_cgroup as cgroup;
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_records::Role;
use torpor_records::{ContainerRecord, SandboxState};
use torpor_runsc::held_open::{has_lost_its_shim, keeper_lives};
use torpor_runsc::keeper::{self, Request};

use crate::node::{CALL_LIMIT, COMMAND_LIMIT, Node};
use crate::restore::{self, end_processes, kill_processes};

/// A killed process leaves its cgroup within milliseconds, unless it is stuck in the kernel.
const CGROUP_EMPTY_LIMIT: Duration = Duration::from_secs(10);

/// containerd removes by force what a dead shim has left, once, and kills whoever needs more than five seconds. A wake or an end
/// that the shim's death came upon may hold the pod's lock for longer, and so may processes that nobody reaps: the work is
/// done by a process of its own, which goes on when this one is killed.
pub(crate) fn delete_surely(id: &ContainerId) -> anyhow::Result<()> {
    let removed = Command::new("/proc/self/exe")
        .arg0("torpor-remove")
        .arg("remove")
        .arg(id.as_str())
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        // Not our own standard error: containerd reads that to its end.
        .stderr(Stdio::piped())
        .spawn()
        .and_then(Child::wait_with_output)
        .context("cannot start the removal")?;
    let words = String::from_utf8_lossy(&removed.stderr);
    ensure!(removed.status.success(), "{}", words.trim());
    Ok(())
}

pub(crate) fn delete(node: &Node, id: &ContainerId, force: bool) -> anyhow::Result<()> {
    let record = match node.records.container(id) {
        Ok(record) => record,
        // A create that failed half-way leaves a directory without a record.
        Err(_) if force => return forget_half_made(node, id),
        Err(_) => bail!("container {} does not exist", id.as_str()),
    };
    let lock = node.records.lock(&record.sandbox).ok();
    if force && has_lost_its_shim(&record) {
        // The pod's shim is dead, and containerd gives the removal of each of its containers five seconds. `runsc delete`
        // waits for every process to be reaped, by whoever inherited it: so all of them end now, and are waited for once.
        let processes = cgroup::beside(&record.cgroup, record.sandbox.as_str());
        kill_processes(node, &processes)?;
    }
    match record.role {
        Role::Container if lock.is_some() => take_out(node, &record)?,
        Role::Container => delete_container(node, &record)?,
        Role::Sandbox => delete_sandbox(node, &record)?,
    }
    drop(lock);
    Ok(())
}

/// Removes what stands in the way of a container that is to be made: an earlier one of its name that containerd has lost. containerd that is
/// killed while it takes up a dead keeper's end forgets the container without having asked for its removal. The caller holds the lock.
pub(crate) fn supersede(node: &Node, next: &ContainerRecord) -> anyhow::Result<()> {
    for known in node.records.containers_of(&next.sandbox)? {
        if next.supersedes(&known) && !keeper_lives(&known) {
            take_out(node, &known)?;
        }
    }
    Ok(())
}

/// The caller holds the lock.
fn take_out(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    let state = node.records.state(&record.sandbox);
    if matches!(state, Ok(SandboxState::Running)) {
        restore::sleep_on(node, &record.sandbox)?;
    }
    delete_container(node, record)
}

fn delete_container(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    let state = node.records.state(&record.sandbox);
    if matches!(state, Ok(SandboxState::Running)) {
        node.runsc_of(&record.sandbox)
            .delete(record.id.as_str(), COMMAND_LIMIT)?;
    }
    end_keeper(node, record)?;
    remove_cgroup(node, &record.cgroup)?;
    node.records.remove_container(&record.id)?;
    Ok(())
}

fn delete_sandbox(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    for container in node.records.containers_of(&record.sandbox)? {
        // Sub-containers first, while their sandbox can still be asked.
        if container.role == Role::Container {
            delete_container(node, &container)?;
        }
    }
    // Once, for all of it: where a sandbox' records are is seen by those of its root container.
    let runsc = node.runsc_of(&record.sandbox);
    runsc.delete(record.sandbox.as_str(), COMMAND_LIMIT)?;
    // Not from the pod's record: what is to go must go also when that cannot be read.
    remove_cgroup(
        node,
        &cgroup::beside(&record.cgroup, record.sandbox.as_str()),
    )?;
    runsc.sweep(record.sandbox.as_str())?;
    end_keeper(node, record)?;
    remove_cgroup(node, &record.cgroup)?;
    node.records.remove_container(&record.id)?;
    forget_pod(node, &record.sandbox)
}

/// A wake or a creation that was cut off may have left the pod without its limit of processor time or with a wider one of memory, and its cgroup is the kubelet's: another
/// sandbox may come into it.
fn forget_pod(node: &Node, sandbox: &SandboxId) -> anyhow::Result<()> {
    restore::put_quotas_back(node, sandbox);
    restore::room::give_back(node, sandbox);
    node.records.remove_pod(sandbox)?;
    Ok(())
}

/// `create` failed before there was a record of the container.
fn forget_half_made(node: &Node, id: &ContainerId) -> anyhow::Result<()> {
    for runsc in node.runsc.that_know(id.as_str())? {
        runsc.delete(id.as_str(), COMMAND_LIMIT)?;
    }
    node.records.remove_container(id)?;
    let Ok(sandbox) = SandboxId::try_from(id.as_str().to_owned()) else {
        return Ok(());
    };
    if let Ok(pod) = node.records.pod(&sandbox) {
        kill_processes(node, &pod.cgroup)?;
        remove_cgroup(node, &pod.cgroup)?;
    }
    forget_pod(node, &sandbox)
}

/// It has usually ended: delete comes after the end. One that hangs on is killed with its cgroup.
fn end_keeper(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    let dir = node.records.container_dir(&record.id);
    match keeper::ask(&dir, &Request::Exit { code: 137 }, &[], CALL_LIMIT) {
        Ok(_) | Err(keeper::Error::Gone { .. }) => {}
        Err(_) => kill_processes(node, &record.cgroup)?,
    }
    Ok(())
}

fn remove_cgroup(node: &Node, path: &Path) -> anyhow::Result<()> {
    end_processes(node, path)?;
    let deadline = Instant::now() + CGROUP_EMPTY_LIMIT;
    loop {
        match node.cgroups.remove(path) {
            Ok(()) => return Ok(()),
            // The kernel takes an ended process out of its cgroup a moment after its end, and tells nobody on v1.
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
            Err(error) => return Err(error).context("the cgroup does not become empty"),
        }
    }
}
