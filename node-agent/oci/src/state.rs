//! Commands that ask: state, ps, features; and pause and resume of a whole sandbox.

use std::time::SystemTime;

use anyhow::bail;
use serde_json::{Value, json};
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_link::traffic;
use torpor_records::{SandboxState, WakeCause};
use torpor_runsc::held_open::keeper_lives;
use torpor_runsc::keeper::Answer;
use torpor_runsc::pause;

use crate::node::{CALL_LIMIT, Node};
use crate::restore;

/// The OCI runtime spec version of the state that is printed.
const OCI_VERSION: &str = "1.2.0";

pub(crate) fn state(node: &Node, id: &ContainerId) -> anyhow::Result<Value> {
    let record = node.container(id)?;
    let lives = keeper_lives(&record);
    let status = match node.records.state(&record.sandbox)? {
        _ if !lives => "stopped",
        // A doze is nobody's wish, and ends as soon as somebody wants something.
        SandboxState::Running
            // Whoever pauses or resumes it at this moment has the lock; nobody waits for that here.
            if node.records.is_noted_paused(&record.sandbox)
                && node.records.doze(&record.sandbox)?.is_none() =>
        {
            "paused"
        }
        _ => "running",
    };
    Ok(json!({
        "ociVersion": OCI_VERSION,
        "id": id.as_str(),
        "status": status,
        "pid": if lives { record.keeper_pid } else { 0 },
        "bundle": node.records.container_dir(id),
    }))
}

pub(crate) fn processes(node: &Node, id: &ContainerId) -> anyhow::Result<Value> {
    let record = node.container(id)?;
    Ok(if keeper_lives(&record) {
        json!([record.keeper_pid])
    } else {
        json!([])
    })
}

pub(crate) fn pause(node: &Node, id: &ContainerId) -> anyhow::Result<()> {
    let record = node.container(id)?;
    let _lock = node.records.lock(&record.sandbox)?;
    if node.records.state(&record.sandbox)? != SandboxState::Running {
        bail!("the sandbox is not running");
    }
    let mut control = node.runsc.connect(&record.sandbox)?;
    let now = SystemTime::now();
    pause::pause(
        &node.records,
        &mut control,
        &record.sandbox,
        now,
        CALL_LIMIT,
    )?;
    Ok(())
}

pub(crate) fn resume(node: &Node, id: &ContainerId) -> anyhow::Result<()> {
    let record = node.container(id)?;
    let _lock = node.records.lock(&record.sandbox)?;
    let mut control = node.runsc.connect(&record.sandbox)?;
    if !restore::run_on(node, &mut control, &record.sandbox, WakeCause::Asked)? {
        bail!("the sandbox is not paused");
    }
    Ok(())
}

/// Verb of the agent: when the pod's links last carried something that was not noise.
pub(crate) fn traffic(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Answer> {
    match node.records.traffic(sandbox)? {
        Ok(watch) => Ok(Answer::ok(serde_json::to_value(traffic::last(watch)?)?)),
        Err(why) => bail!(why),
    }
}

/// An exec into a paused sandbox would wait for as long as the pause lasts.
pub(crate) fn refuse_frozen(node: &Node, sandbox: &SandboxId) -> anyhow::Result<()> {
    if stands_still(node, sandbox) {
        bail!(
            "the sandbox is frozen (suspension-strategy Freeze, or a manual pause): set operatingMode to Running first"
        );
    }
    Ok(())
}

/// Whether it lives and is paused, whatever for. The caller holds the lock.
pub(crate) fn stands_still(node: &Node, sandbox: &SandboxId) -> bool {
    // Whoever connects would let it go on.
    if node.runsc.is_halted(sandbox) {
        return true;
    }
    node.runsc.connect(sandbox).is_ok_and(|mut control| {
        pause::is_paused(&node.records, &mut control, sandbox, CALL_LIMIT).unwrap_or(false)
    })
}

/// OCI runtime-spec features document.
pub(crate) fn features() -> Value {
    json!({
        "ociVersionMin": "1.0.0",
        "ociVersionMax": OCI_VERSION,
        "mountOptions": ["bind", "rbind", "ro", "rw", "nosuid", "nodev", "noexec", "private", "rprivate", "rslave"],
        "linux": {
            "namespaces": ["cgroup", "ipc", "mount", "network", "pid", "user", "uts"],
            "cgroup": { "v1": true, "v2": true, "systemd": false, "systemdUser": false },
            "seccomp": { "enabled": false },
            "apparmor": { "enabled": false },
            "selinux": { "enabled": false }
        }
    })
}
