//! Processes that run to their end in a container: the user's commands at turns of a sandbox's
//! life, and Torpor's helper.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use torpor_records::ContainerRecord;
use torpor_runsc::exec::exec_args;

use crate::claim::{add_variables, set_variables};
use crate::node::Node;
use crate::process::{Process, helper, nothing};

/// Limit for a user's command. The kubelet waits two minutes for a container's start.
const LIMIT: Duration = Duration::from_secs(30);
/// Limit for a helper, which reads or writes a few bytes.
const HELPER_LIMIT: Duration = Duration::from_secs(5);

/// Runs a user's command as a process of the container, with these variables besides the
/// container's and the claim's. `command`: a JSON array of words. Errors: it does not end within
/// [`LIMIT`], or with an exit code other than 0.
pub(crate) fn run(
    node: &Node,
    part: &ContainerRecord,
    command: &str,
    variables: &[(String, String)],
) -> anyhow::Result<()> {
    let words: Vec<String> =
        serde_json::from_str(command).context("it is not a JSON array of words")?;
    let spec = node.records.spec(&part.id)?;
    let mut process = spec["process"].clone();
    process["args"] = json!(words);
    process["terminal"] = json!(false);
    add_variables(&mut process, &spec);
    set_variables(&mut process, variables);
    let args = exec_args(&process, &spec, part.id.as_str())?;
    let code = end_of(node, part, &args, None, LIMIT)?;
    ensure!(code == 0, "it ended with exit code {code}");
    Ok(())
}

/// Runs a command of the helper ([`torpor_inside`]) in the container, so that a program there that
/// watches the changed file gets an event. Errors: it fails.
pub(crate) fn run_helper(
    node: &Node,
    part: &ContainerRecord,
    words: &[&str],
) -> anyhow::Result<()> {
    let capabilities = json!(["CAP_DAC_OVERRIDE"]);
    let words = [&["torpor-helper"], words].concat();
    let process = json!({
        "args": words,
        "noNewPrivileges": true,
        "capabilities": { "bounding": capabilities, "effective": capabilities, "permitted": capabilities },
    });
    let args = exec_args(&process, &Value::Null, part.id.as_str())?;
    let code = end_of(node, part, &args, Some(&helper()?), HELPER_LIMIT)?;
    ensure!(code == 0, "exit code {code}");
    Ok(())
}

/// Runs a process in the container to its end; returns its exit code. `program`: the program's
/// file, unless it is a file of the container. A process that takes longer than `limit` is killed.
fn end_of(
    node: &Node,
    part: &ContainerRecord,
    args: &Value,
    program: Option<&File>,
    limit: Duration,
) -> anyhow::Result<u8> {
    let nothing = nothing()?;
    let mut files = vec![nothing.as_fd(); 3];
    files.extend(program.map(AsFd::as_fd));
    let mut process =
        Process::begin(node, &part.sandbox, &part.id, args, &files).context("cannot run it")?;
    let ended = process.wait(limit);
    if ended.is_err() {
        process.end(node, &part.sandbox);
    }
    let ended = ended.with_context(|| format!("it did not end within {limit:?}"))?;
    Ok(ended.exit_code())
}
