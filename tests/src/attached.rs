//! A client of `attach` without a terminal, and a program for it.

use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};

use crate::case::Case;
use crate::pods::{shell, with};
use crate::wait;

/// Returns the spec of a Pod that echoes each line of its standard input, which is a pipe.
pub fn echoes() -> serde_json::Value {
    let line = "while read line; do echo got $line; done";
    let container = with(shell("a", line), json!({ "stdin": true }));
    json!({ "containers": [container] })
}

/// A client of `attach`.
#[derive(Debug)]
pub struct Attached {
    _client: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Attached {
    /// Attaches to the Pod `p`.
    pub fn to(case: &Case) -> anyhow::Result<Self> {
        let mut client = case.kubectl.spawn(&["attach", "-i", "p"], true)?;
        let stdin = client.stdin.take().context("no input")?;
        let stdout = client.stdout.take().context("no output")?;
        Ok(Self {
            _client: client,
            stdin,
            lines: BufReader::new(stdout).lines(),
        })
    }

    /// Writes a line and checks the program's answer.
    pub async fn answers(&mut self, word: &str) -> anyhow::Result<()> {
        self.stdin.write_all(format!("{word}\n").as_bytes()).await?;
        let line = self.lines.next_line();
        let line = tokio::time::timeout(wait::scaled(Duration::from_secs(20)), line).await??;
        assert_eq!(line, Some(format!("got {word}")));
        Ok(())
    }
}
