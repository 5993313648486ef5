//! Programs of the workspace that cargo builds for a benchmark.

use std::{path::PathBuf, process::Stdio};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tokio::process::Command;
use torpor_tests::repository;

/// Returns cargo's target directory.
pub(crate) fn target() -> PathBuf {
    let set = std::env::var_os("CARGO_TARGET_DIR");
    set.map_or_else(|| repository().join("target"), PathBuf::from)
}

/// Builds by a cargo command with the profile of the development cluster; returns the program of
/// that name.
pub(crate) async fn build(command: &[&str], name: &str) -> anyhow::Result<PathBuf> {
    let (verb, options) = command.split_first().context("no command of cargo")?;
    let ran = Command::new("cargo")
        .args([
            verb,
            "--locked",
            "--profile",
            "cluster",
            "--message-format=json",
        ])
        .args(options)
        .current_dir(repository())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .output()
        .await
        .context("cargo")?;
    ensure!(
        ran.status.success(),
        "cargo {}: {}",
        command.join(" "),
        ran.status
    );
    let program = executable(&String::from_utf8(ran.stdout)?, name);
    program.with_context(|| format!("cargo did not print where it built {name}"))
}

/// Returns the program of a target, given the messages of cargo.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    let mut programs = messages.lines().filter_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        let of_target = message["target"]["name"] == name;
        message["executable"]
            .as_str()
            .filter(|_| of_target)
            .map(PathBuf::from)
    });
    programs.next_back()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_that_of_the_target() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"serve"},"executable":null}
{"reason":"compiler-artifact","target":{"name":"serve"},"executable":"/t/serve-1"}
{"reason":"compiler-artifact","target":{"name":"other"},"executable":"/t/other"}
{"reason":"build-finished","success":true}
"#;
        assert_eq!(executable(messages, "serve"), Some("/t/serve-1".into()));
        assert_eq!(executable(messages, "none"), None);
    }

    #[test]
    fn the_repository_has_this_crate() {
        assert!(repository().join("tests/bench/Cargo.toml").exists());
    }
}
