//! The kubectl plugin as a user runs it: kubectl finds it in PATH.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::Context;
use serde_json::Value;
use tokio::process::Command;

use crate::case::Case;
use crate::kubectl::{Ran, command, to_the_end};

/// Environment variable: folder into which `hack/plugin` put the plugin; without it only PATH is
/// searched.
const TORPOR_PLUGIN: &str = "TORPOR_PLUGIN";
/// Program that kubectl runs for `kubectl torpor`.
const PROGRAM: &str = "kubectl-torpor";

impl Case {
    /// Runs `kubectl torpor …` in the test's namespace to the end, whatever the exit code.
    pub async fn torpor(&self, args: &[&str]) -> anyhow::Result<Ran> {
        let mut line = vec!["torpor"];
        line.extend(args);
        // kubectl allows no flag of its own before a plugin's name.
        line.extend(["--namespace", &self.namespace]);
        self.run_plugin(&line).await
    }

    /// Runs kubectl with the plugin in its PATH and these arguments alone.
    pub async fn run_plugin(&self, line: &[&str]) -> anyhow::Result<Ran> {
        let mut kubectl = command(&self.kubectl.program);
        kubectl.args(line).env("PATH", path());
        let ran = run(kubectl, line).await?;
        anyhow::ensure!(
            !ran.err.contains("unknown command \"torpor\""),
            "kubectl does not find the plugin: hack/plugin FOLDER, then {TORPOR_PLUGIN}=FOLDER"
        );
        Ok(ran)
    }

    /// Returns the output of a `kubectl torpor …` that must succeed.
    pub async fn torpor_output(&self, args: &[&str]) -> anyhow::Result<String> {
        let ran = self.torpor(args).await?;
        ran.ok()
            .with_context(|| format!("kubectl torpor {}", args.join(" ")))
    }

    /// Returns one Sandbox as `get -o json` prints it.
    ///
    /// Runs the plugin itself: tests poll this, and kubectl takes longer to find the plugin than
    /// the plugin takes to answer.
    pub async fn torpor_view(&self, sandbox: &str) -> anyhow::Result<Value> {
        let line = ["get", sandbox, "-o", "json", "--namespace", &self.namespace];
        let mut plugin = Command::new(program());
        plugin.args(line);
        let said = run(plugin, &line).await?.ok();
        let text = said.with_context(|| format!("{PROGRAM} {}", line.join(" ")))?;
        let listing: Value = serde_json::from_str(&text)?;
        let items = listing["items"].as_array().map_or(&[][..], Vec::as_slice);
        anyhow::ensure!(items.len() == 1, "other than one Sandbox: {text}");
        Ok(items[0].clone())
    }
}

async fn run(mut program: Command, line: &[&str]) -> anyhow::Result<Ran> {
    let child = program
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("cannot run {program:?}"))?;
    to_the_end(child, line, None).await
}

/// Returns the plugin's path, or its bare name if [`TORPOR_PLUGIN`] is not set.
fn program() -> PathBuf {
    let folder = std::env::var_os(TORPOR_PLUGIN).unwrap_or_default();
    PathBuf::from(folder).join(PROGRAM)
}

fn path() -> OsString {
    let known = std::env::var_os("PATH").unwrap_or_default();
    match std::env::var_os(TORPOR_PLUGIN).filter(|folder| !folder.is_empty()) {
        Some(mut folder) => {
            folder.push(":");
            folder.push(known);
            folder
        }
        None => known,
    }
}
