//! `delete`: remove a container's processes, cgroup, socket and files. Images and ledgers stay:
//! they belong to the Pod, and the agent removes them when the Pod is gone.

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

use torpor_sandbox::node::{CALL_LIMIT, COMMAND_LIMIT, Node};
use torpor_sandbox::restore::{self, end_processes, kill_processes, transitions};

/// Limit for a cgroup to become empty. A killed process leaves its cgroup within milliseconds,
/// unless it is stuck in the kernel.
const CGROUP_EMPTY_LIMIT: Duration = Duration::from_secs(10);

/// Deletes a container by force, in another process, and waits for that process.
///
/// containerd deletes the containers of a dead shim once, by force, and kills a delete that takes
/// more than five seconds. The delete may take longer: a wake or an end that runs when the shim
/// dies holds the pod's lock, and ended processes may be reaped late. The other process continues
/// when containerd kills this one.
pub(crate) fn delete_by_force(id: &ContainerId) -> anyhow::Result<()> {
    let removed = Command::new("/proc/self/exe")
        .arg0("torpor-remove")
        .arg("remove")
        .arg(id.as_str())
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        // containerd reads the standard error of this process to its end, so the other process
        // gets a pipe.
        .stderr(Stdio::piped())
        .spawn()
        .and_then(Child::wait_with_output)
        .context("cannot start the removal")?;
    let message = String::from_utf8_lossy(&removed.stderr);
    ensure!(removed.status.success(), "{}", message.trim());
    Ok(())
}

pub(crate) fn delete(node: &Node, id: &ContainerId, force: bool) -> anyhow::Result<()> {
    let record = match node.records.container(id) {
        Ok(record) => record,
        // A create that failed half-way leaves a directory without a record.
        Err(_) if force => return remove_partial(node, id),
        Err(_) => bail!("container {} does not exist", id.as_str()),
    };
    let lock = node.records.lock(&record.sandbox).ok();
    if force && has_lost_its_shim(&record) {
        // The pod's shim is dead, and containerd allows five seconds for each container's removal.
        // `runsc delete` waits until the process that inherited the sandbox' processes has reaped
        // each of them. So all of them end now, with one wait for all.
        let processes = cgroup::beside(&record.cgroup, record.sandbox.as_str());
        kill_processes(node, &processes)?;
    }
    match record.role {
        Role::Container if lock.is_some() => delete_from_sandbox(node, &record)?,
        Role::Container => delete_container(node, &record)?,
        Role::Sandbox => delete_sandbox(node, &record)?,
    }
    drop(lock);
    Ok(())
}

/// Deletes earlier containers with the name of `next`, which is about to be created. containerd
/// loses a container when it is killed while it handles the end of the container's keeper: then
/// containerd never requests the removal. The caller holds the lock.
pub(crate) fn delete_superseded(node: &Node, next: &ContainerRecord) -> anyhow::Result<()> {
    for known in node.records.containers_of(&next.sandbox)? {
        if next.supersedes(&known) && !keeper_lives(&node.records, &known) {
            delete_from_sandbox(node, &known)?;
        }
    }
    Ok(())
}

/// Deletes a container whose sandbox stays. If the memory of a paused sandbox is in an image, the
/// sandbox' processes end first. The caller holds the lock.
fn delete_from_sandbox(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    let state = node.records.state(&record.sandbox);
    if matches!(state, Ok(SandboxState::Running)) {
        transitions::stay_in_image(node, &record.sandbox)?;
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
        // The sandbox must still answer while its other containers are deleted.
        if container.role == Role::Container {
            delete_container(node, &container)?;
        }
    }
    let runsc = node.runsc_of(&record.sandbox);
    runsc.delete(record.sandbox.as_str(), COMMAND_LIMIT)?;
    // The container's cgroup gives the path: a pod whose record cannot be read is removed, too.
    remove_cgroup(
        node,
        &cgroup::beside(&record.cgroup, record.sandbox.as_str()),
    )?;
    runsc.sweep(record.sandbox.as_str())?;
    end_keeper(node, record)?;
    remove_cgroup(node, &record.cgroup)?;
    node.records.remove_container(&record.id)?;
    remove_pod(node, &record.sandbox)
}

/// Removes the pod's records and restores its limits. An interrupted wake or creation may have left
/// the pod without its limit of processor time, or with a raised limit of memory. The pod's cgroup
/// belongs to the kubelet and may get another sandbox.
fn remove_pod(node: &Node, sandbox: &SandboxId) -> anyhow::Result<()> {
    restore::put_quotas_back(node, sandbox);
    restore::room::give_back(node, sandbox);
    node.records.remove_pod(sandbox)?;
    Ok(())
}

/// Removes a container whose `create` failed before it wrote the container's record.
fn remove_partial(node: &Node, id: &ContainerId) -> anyhow::Result<()> {
    for runsc in node.runsc.runscs_with_record(id.as_str())? {
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
    remove_pod(node, &sandbox)
}

/// Ends the container's keeper, which has usually ended before `delete`. A keeper that does not
/// answer is killed with its cgroup.
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
            // The kernel removes an ended process from its cgroup a moment after the end. With
            // cgroup v1 there is no event for that.
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
            Err(error) => return Err(error).context("the cgroup does not become empty"),
        }
    }
}
