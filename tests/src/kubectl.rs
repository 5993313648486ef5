//! kubectl with a time limit for every call, because an exec or a delete may hang.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};

use crate::wait;

/// Time for a command: an exec that wakes a sandbox takes a second on a loaded machine.
const LIMIT: Duration = Duration::from_secs(40);

/// Environment of a kubectl: it ends long before a garbage collection is needed (a quarter of its
/// time), and has no work for a second processor.
pub(crate) const LIGHT: [(&str, &str); 2] = [("GOGC", "off"), ("GOMAXPROCS", "1")];

/// Returns kubectl without arguments.
pub(crate) fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.envs(LIGHT);
    command
}

/// kubectl in one namespace.
#[derive(Debug, Clone)]
pub struct Kubectl {
    pub program: PathBuf,
    pub namespace: String,
}

/// Result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// Exit code; -1 if a signal ended the command.
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Ran {
    /// Returns standard output without the white space around it; an error unless the command
    /// succeeded.
    pub fn ok(self) -> anyhow::Result<String> {
        anyhow::ensure!(
            self.code == 0,
            "exit code {}: {}{}",
            self.code,
            self.err,
            self.out
        );
        Ok(self.out.trim().to_owned())
    }
}

impl Kubectl {
    /// Runs kubectl to its end, whatever the exit code.
    pub async fn run(&self, args: &[&str]) -> anyhow::Result<Ran> {
        self.run_with(args, None).await
    }

    /// Runs kubectl to its end with `input` as standard input.
    pub async fn run_with(&self, args: &[&str], input: Option<&[u8]>) -> anyhow::Result<Ran> {
        let child = self.spawn(args, input.is_some())?;
        to_the_end(child, args, input).await
    }

    /// Returns standard output of a command that must succeed.
    pub async fn ok(&self, args: &[&str]) -> anyhow::Result<String> {
        let ran = self.run(args).await?;
        ran.ok()
            .with_context(|| format!("kubectl {}", args.join(" ")))
    }

    /// Starts kubectl, which is killed when the result is dropped.
    pub fn spawn(&self, args: &[&str], input: bool) -> anyhow::Result<Child> {
        command(&self.program)
            .arg("--namespace")
            .arg(&self.namespace)
            .args(args)
            .stdin(if input { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot run {}", self.program.display()))
    }

    /// Runs `kubectl exec` in a container, whatever the exit code.
    ///
    /// Tests whose subject is not kubectl use [`crate::case::Case::exec`].
    pub async fn exec(&self, pod: &str, container: &str, command: &[&str]) -> anyhow::Result<Ran> {
        let mut args = vec!["exec", pod, "-c", container, "--"];
        args.extend(command);
        self.run(&args).await
    }

    /// Runs a shell line that must succeed by `kubectl exec`; returns its output.
    pub async fn sh(&self, pod: &str, container: &str, line: &str) -> anyhow::Result<String> {
        let ran = self.exec(pod, container, &["sh", "-c", line]).await?;
        ran.ok()
            .with_context(|| format!("in {pod}/{container}: {line}"))
    }
}

/// Waits for the end of a kubectl that was run with `args`.
pub(crate) async fn to_the_end(
    mut child: Child,
    args: &[&str],
    input: Option<&[u8]>,
) -> anyhow::Result<Ran> {
    let words = || format!("kubectl {}", args.join(" "));
    let fed = child.stdin.take().zip(input);
    let finished = async {
        if let Some((mut stdin, input)) = fed {
            // A kubectl that does not read to the end has ended: its exit code says why.
            let _ = stdin.write_all(input).await;
            drop(stdin);
        }
        child.wait_with_output().await
    };
    let output = tokio::time::timeout(wait::scaled(LIMIT), finished)
        .await
        .with_context(|| format!("{} did not end within {LIMIT:?}", words()))?
        .with_context(words)?;
    Ok(Ran {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}
