//! A running `kubectl port-forward`, and connections through it.

use std::time::Duration;

use anyhow::Context;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStderr, ChildStdout};

use crate::kubectl::Kubectl;
use crate::wait;

/// Time for a connection, which may wake a sandbox first.
const LIMIT: Duration = Duration::from_secs(40);

/// A running `kubectl port-forward` and its port on this machine; it ends on drop.
#[derive(Debug)]
pub struct Forward {
    _child: Child,
    /// Kept open: kubectl writes a line for each connection.
    _out: Lines<BufReader<ChildStdout>>,
    err: Lines<BufReader<ChildStderr>>,
    port: u16,
}

impl Forward {
    /// Starts the port-forward and waits until it listens.
    pub async fn open(kubectl: &Kubectl, pod: &str, port: u16) -> anyhow::Result<Self> {
        let (pod, ports) = (format!("pod/{pod}"), format!(":{port}"));
        let args = ["port-forward", "--address=127.0.0.1", &pod, &ports];
        let mut child = kubectl.spawn(&args, false)?;
        let out = child.stdout.take().context("no standard output")?;
        let err = child.stderr.take().context("no standard error")?;
        let (mut out, err) = (BufReader::new(out).lines(), BufReader::new(err).lines());
        // "Forwarding from 127.0.0.1:40123 -> 8080"
        let line = tokio::time::timeout(wait::scaled(LIMIT), out.next_line()).await;
        let line = line.context("kubectl does not listen")??;
        let line = line.context("kubectl ended before it listened")?;
        let own = line
            .split_whitespace()
            .find_map(|word| word.strip_prefix("127.0.0.1:")?.parse().ok());
        Ok(Self {
            _child: child,
            _out: out,
            err,
            port: own.with_context(|| format!("no port in {line:?}"))?,
        })
    }

    /// Opens a connection to kubectl's port.
    pub async fn connect(&self) -> anyhow::Result<TcpStream> {
        Ok(TcpStream::connect(("127.0.0.1", self.port)).await?)
    }

    /// Sends bytes and reads until the other side closes.
    pub async fn exchange(&self, sent: &[u8]) -> anyhow::Result<Vec<u8>> {
        let exchanged = async {
            let mut stream = self.connect().await?;
            stream.write_all(sent).await?;
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await?;
            Ok(answer)
        };
        let answer = tokio::time::timeout(wait::scaled(LIMIT), exchanged).await;
        answer.context("no answer in time")?
    }

    /// Returns kubectl's message about a connection that failed.
    pub async fn complaint(&mut self) -> anyhow::Result<String> {
        let line = tokio::time::timeout(wait::scaled(LIMIT), self.err.next_line()).await;
        let line = line.context("kubectl prints no error")??;
        line.context("kubectl ended without an error message")
    }
}
