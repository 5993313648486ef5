//! Steps in a sandbox that goes on from memory in a new place, before it is heard: another one may
//! go on from the same memory.

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

use super::{ON_RESTORE_EXEC, ON_RESTORE_EXEC_CONTAINER, RESTORE_COPY, Refusal};
use crate::generation;
use crate::node::Node;
use crate::process::{Process, nothing, own_program};

/// Writes a few bytes.
const GENERATION_LIMIT: Duration = Duration::from_secs(5);
/// The kubelet waits two minutes for a container's start.
const HOOK_LIMIT: Duration = Duration::from_secs(30);

/// Why the user's command keeps the sandbox from going on.
const HOOK_FAILED: &str = "OnRestoreExecFailed";

/// Gives each container another generation, and runs the user's command. The sandbox runs, and is
/// not heard; its first container comes first in `parts`. `give_back` gives back what other wakes
/// wait for: the command may take long.
pub(super) fn renew(
    node: &Node,
    pod: &PodRecord,
    parts: &[ContainerRecord],
    give_back: &dyn Fn(),
) -> anyhow::Result<()> {
    let generation = generation::new()?;
    for part in parts.iter().filter(|part| part.role == Role::Container) {
        // A read-only root file system has that of its new container.
        if let Err(error) = set_generation(node, part, &generation) {
            eprintln!(
                "torpor-oci: cannot set the generation of container {}: {error:#}",
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
    run_hook(node, pod, parts, &spec, command).map_err(|error| {
        let message = format!("the command of {ON_RESTORE_EXEC} failed: {error:#}");
        Refusal {
            reason: HOOK_FAILED,
            message,
        }
        .into()
    })
}

/// A helper (this program) does it in the container, so that a program that watches the file is
/// told.
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

fn run_hook(
    node: &Node,
    pod: &PodRecord,
    parts: &[ContainerRecord],
    pause: &Spec,
    command: &str,
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
    let what = match pause.annotation(RESTORE_COPY) {
        Some("true") => "TORPOR_RESTORE=copy",
        _ => "TORPOR_RESTORE=resume",
    };
    if let Some(env) = process["env"].as_array_mut() {
        env.push(json!(what));
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

/// Runs a process in the container to its end. `program`: its file, where it is none of the
/// container's. One that takes too long is killed.
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
