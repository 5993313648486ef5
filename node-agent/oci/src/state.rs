//! Commands that only read (`state`, `ps`, `features`), and pause and resume of a whole sandbox.

use std::time::SystemTime;

use anyhow::bail;
use serde_json::{Value, json};
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_core::transition::Ran;
use torpor_link::traffic;
use torpor_records::{SandboxState, WakeCause};
use torpor_runsc::held_open::keeper_lives;
use torpor_runsc::keeper::Answer;
use torpor_runsc::pause;

use torpor_sandbox::node::{CALL_LIMIT, Node};
use torpor_sandbox::restore::transitions;

/// Version of the OCI runtime spec of the printed state.
const OCI_VERSION: &str = "1.2.0";

pub(crate) fn state(node: &Node, id: &ContainerId) -> anyhow::Result<Value> {
    let record = node.container(id)?;
    let lives = keeper_lives(&node.records, &record);
    let status = match node.records.state(&record.sandbox)? {
        _ if !lives => "stopped",
        // A dozing sandbox counts as running: no user has paused it, and its next use resumes it.
        SandboxState::Running
            // Only the note is read: the process that pauses or resumes the sandbox at this moment
            // holds the lock, and this command does not wait for the lock.
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
    Ok(if keeper_lives(&node.records, &record) {
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
    if transitions::run_on(node, &record.sandbox, WakeCause::Asked)? == Ran::Already {
        bail!("the sandbox is not paused");
    }
    Ok(())
}

/// Verb of the agent: returns when the pod's links last carried traffic that is not noise.
pub(crate) fn traffic(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Answer> {
    match node.records.traffic(sandbox)? {
        Ok(watch) => Ok(Answer::ok(serde_json::to_value(traffic::last(watch)?)?)),
        Err(why) => bail!(why),
    }
}

/// Reports whether the sandbox lives and is paused, for any reason. The caller holds the lock.
pub(crate) fn is_paused(node: &Node, sandbox: &SandboxId) -> bool {
    // A connection would continue a sandbox whose processes are stopped.
    if node.runsc.is_stopped_by_signal(sandbox) {
        return true;
    }
    node.runsc.connect(sandbox).is_ok_and(|mut control| {
        pause::is_paused(&node.records, &mut control, sandbox, CALL_LIMIT).unwrap_or(false)
    })
}

/// Returns the features document of the OCI runtime spec.
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
