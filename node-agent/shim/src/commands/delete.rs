//! `delete`: remove a container's processes, cgroup, socket and files. Images and ledgers stay:
//! they belong to the Pod, and the agent removes them when the Pod is gone.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use torpor_cgroup as cgroup;
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_messages::keeper::{self, Request};
use torpor_records::Role;
use torpor_records::{ContainerRecord, Error, SandboxState};
use torpor_runsc::held_open::{has_lost_its_shim, keeper_lives};

use torpor_sandbox::node::{CALL_LIMIT, COMMAND_LIMIT, Node};
use torpor_sandbox::restore::{self, end_processes, kill_processes, transitions};

use crate::KILLED;

/// Limit for a cgroup to become empty. A killed process leaves its cgroup within milliseconds,
/// unless it is stuck in the kernel.
const CGROUP_EMPTY_LIMIT: Duration = Duration::from_secs(10);

/// Deletes a container. A container that is gone is no error: the removal of its pod's sandbox has
/// removed it. `force`: containerd deletes the containers of a dead shim once, by force.
pub(crate) fn delete(node: &Node, id: &ContainerId, force: bool) -> anyhow::Result<()> {
    let is_gone = |found: &Result<ContainerRecord, Error>| matches!(found, Err(Error::Missing(_)));
    let record = match node.records.container(id) {
        Ok(record) => record,
        // A create that failed half-way leaves a directory without a record.
        Err(_) if force => return remove_partial(node, id),
        gone if is_gone(&gone) => return Ok(()),
        Err(error) => return Err(error).context("cannot delete the container"),
    };
    let lock = node.records.lock(&record.sandbox).ok();
    if is_gone(&node.records.container(id)) {
        return Ok(());
    }
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

/// Ends the container's keeper, which has usually ended before `delete`.
fn end_keeper(node: &Node, record: &ContainerRecord) -> anyhow::Result<()> {
    let dir = node.records.container_dir(&record.id);
    let end = || match keeper::ask(&dir, &Request::Exit { code: KILLED }, &[], CALL_LIMIT) {
        Ok(_) | Err(keeper::Error::Gone { .. }) => Ok(()),
        Err(error) => Err(error),
    };
    // A keeper that ends by itself at this moment closes the connection without an answer.
    end()
        .or_else(|_| end())
        .context("cannot end the container's keeper")
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

#[cfg(test)]
mod tests {
    use serde_json::json;
    use torpor_cgroup::Hierarchies;
    use torpor_records::Records;
    use torpor_records::config::Config;
    use torpor_runsc::command::NodeRunsc;
    use torpor_sandbox::restore::Refusal;

    use super::*;
    use crate::commands::kill::{FINISHED, kill};

    /// The removal of a pod's pause container removes its other containers, and containerd deletes
    /// each of them afterwards.
    #[test]
    fn a_container_that_is_gone_is_deleted_and_has_no_process_to_signal() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("cgroup.controllers"), "cpu").expect("written");
        let config: Config = serde_json::from_value(json!({
            "runsc": "/runsc",
            "runsc_digest": "",
            "state_dir": dir.path().join("state"),
            "store_dir": dir.path().join("store"),
            "kubelet_root": "/",
        }))
        .expect("a configuration");
        let node = Node {
            runsc: NodeRunsc::new(&config),
            records: Records::new(&config),
            cgroups: Hierarchies::find(dir.path()).expect("found"),
            config,
        };
        let gone = ContainerId::try_from("c".repeat(64)).expect("an id");
        for force in [false, true] {
            delete(&node, &gone, force).expect("there is nothing to delete");
        }
        let error = kill(&node, &gone, 9, false).expect_err("no process");
        let refusal = error.downcast_ref::<Refusal>().expect("a reason");
        assert_eq!(refusal.reason, FINISHED);
    }
}
