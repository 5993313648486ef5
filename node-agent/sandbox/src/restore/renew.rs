//! Steps in a sandbox that continues from memory in a new place, because another sandbox may
//! continue from the same memory. They run before a peer receives anything from the sandbox.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};
use torpor_records::Role;
use torpor_records::{ContainerRecord, PodRecord};
use torpor_runsc::control::WaitStatus;
use torpor_runsc::exec::exec_args;
use torpor_runsc::spec::Spec;
use torpor_snapshots::Image;

use super::annotations::{ON_RESTORE_EXEC, ON_RESTORE_EXEC_CONTAINER, is_copy};
use super::refusal::Refusal;
use crate::generation;
use crate::node::Node;
use crate::process::{Process, nothing, own_program};

/// Limit for the helper that writes a generation, a few bytes.
const GENERATION_LIMIT: Duration = Duration::from_secs(5);
/// Limit for the user's command. The kubelet waits two minutes for a container's start.
const HOOK_LIMIT: Duration = Duration::from_secs(30);

/// Reason of a restore that failed because the user's command failed.
const HOOK_FAILED: &str = "OnRestoreExecFailed";

/// Gives each container another generation, and runs the user's command. The sandbox runs, and no
/// peer receives anything from it. The pause container comes first in `parts`. `give_back` releases
/// the turn and the settings that other wakes wait for, because the command may take long.
pub(super) fn renew(
    node: &Node,
    pod: &PodRecord,
    image: &Image,
    parts: &[ContainerRecord],
    give_back: &dyn Fn(),
) -> anyhow::Result<()> {
    let generation = generation::new()?;
    for part in parts.iter().filter(|part| part.role == Role::Container) {
        // The write fails in a read-only root file system, which has the generation that create
        // has placed there.
        if let Err(error) = set_generation(node, part, &generation) {
            crate::log_line!(
                "cannot set the generation of container {}: {error:#}",
                part.name
            );
        }
    }
    let pause = parts.iter().find(|part| part.role == Role::Sandbox);
    let spec = Spec(
        node.records
            .spec(&pause.context("the pod has no pause container")?.id)?,
    );
    let Some(command) = spec.annotation(ON_RESTORE_EXEC) else {
        return Ok(());
    };
    give_back();
    // The Pod has not run in a copy of a golden image, in whichever Pod it is restored.
    let copy = image.manifest().parent.is_some() || is_copy(&spec, image.id());
    run_hook(node, pod, parts, &spec, command, copy).map_err(|error| {
        let message = format!("the command of {ON_RESTORE_EXEC} failed: {error:#}");
        Refusal {
            reason: HOOK_FAILED,
            message,
        }
        .into()
    })
}

/// Sets the generation of a container. A helper (this program) writes the file in the container, so
/// that a program that watches the file gets an event.
fn set_generation(node: &Node, part: &ContainerRecord, generation: &str) -> anyhow::Result<()> {
    let capabilities = json!(["CAP_DAC_OVERRIDE"]);
    let process = json!({
        "args": ["torpor-generation", "set-generation", generation],
        "noNewPrivileges": true,
        "capabilities": { "bounding": capabilities, "effective": capabilities, "permitted": capabilities },
    });
    let args = exec_args(&process, &Value::Null, part.id.as_str())?;
    let ended = run(node, part, &args, Some(&own_program()?), GENERATION_LIMIT)?;
    anyhow::ensure!(ended.exit_code() == 0, "exit code {}", ended.exit_code());
    Ok(())
}

/// Runs the user's command in its container. `pause`: spec of the pause container, which has the
/// annotations. `copy`: others may continue from the same memory.
fn run_hook(
    node: &Node,
    pod: &PodRecord,
    parts: &[ContainerRecord],
    pause: &Spec,
    command: &str,
    copy: bool,
) -> anyhow::Result<()> {
    let words: Vec<String> =
        serde_json::from_str(command).context("it is not a JSON array of words")?;
    let name = pause
        .annotation(ON_RESTORE_EXEC_CONTAINER)
        .unwrap_or_default();
    let part = parts
        .iter()
        .find(|part| part.role == Role::Container && part.name == name);
    let part = part.with_context(|| format!("no container {name:?} runs in Pod {}", pod.name))?;
    let spec = node.records.spec(&part.id)?;
    let mut process = spec["process"].clone();
    process["args"] = json!(words);
    process["terminal"] = json!(false);
    let variable = match copy {
        true => "TORPOR_RESTORE=copy",
        false => "TORPOR_RESTORE=resume",
    };
    if let Some(env) = process["env"].as_array_mut() {
        env.push(json!(variable));
    }
    let args = exec_args(&process, &spec, part.id.as_str())?;
    let ended = run(node, part, &args, None, HOOK_LIMIT)?;
    anyhow::ensure!(
        ended.exit_code() == 0,
        "it ended with exit code {}",
        ended.exit_code()
    );
    Ok(())
}

/// Runs a process in the container to its end; returns its status. `program`: the program's file,
/// unless it is a file of the container. A process that takes longer than `limit` is killed.
fn run(
    node: &Node,
    part: &ContainerRecord,
    args: &Value,
    program: Option<&File>,
    limit: Duration,
) -> anyhow::Result<WaitStatus> {
    let nothing = nothing()?;
    let mut files = vec![nothing.as_fd(); 3];
    files.extend(program.map(AsFd::as_fd));
    let mut process =
        Process::begin(node, &part.sandbox, &part.id, args, &files).context("cannot run it")?;
    let ended = process.wait(limit);
    if ended.is_err() {
        process.end(node, &part.sandbox);
    }
    ended.with_context(|| format!("it did not end within {limit:?}"))
}
