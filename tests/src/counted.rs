//! Client of `counted.py`, the program in a sandbox that checks that its connections lose no byte
//! and get none twice.

use std::time::Duration;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::pods::{python, with};
use crate::{wait, witness};

/// Port of the exchange.
pub const PORT: u16 = 8090;
/// Port of the report.
const REPORT: u16 = 8091;
/// Time of silence after which a connection counts as lost: longer than a save and a wake on a busy
/// machine.
const SILENCE: Duration = Duration::from_secs(90);

/// Data that is sent in each direction of each connection.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub blocks: u64,
    /// A multiple of eight.
    pub bytes: usize,
    pub pace: Duration,
}

impl Plan {
    /// Returns the program's container, which makes `dial` connections to this port of its node.
    pub fn container(&self, dial: usize, port: u16) -> Value {
        let host = json!({ "fieldRef": { "fieldPath": "status.hostIP" } });
        let text = |name, value: String| json!({ "name": name, "value": value });
        let env = json!([
            text("BLOCKS", self.blocks.to_string()),
            text("BYTES", self.bytes.to_string()),
            text("PACE", self.pace.as_secs_f64().to_string()),
            text("DIAL", dial.to_string()),
            text("PORT", port.to_string()),
            { "name": "HOST", "valueFrom": host },
        ]);
        let ready = json!({ "tcpSocket": { "port": REPORT }, "periodSeconds": 1 });
        with(
            python("counted", include_str!("counted.py")),
            json!({ "env": env, "startupProbe": ready }),
        )
    }

    fn block(&self, number: u64) -> Vec<u8> {
        number.to_be_bytes().repeat(self.bytes / 8)
    }

    /// Runs the whole exchange on one connection.
    pub async fn exchange(&self, stream: TcpStream) -> anyhow::Result<()> {
        let (mut from, mut to) = stream.into_split();
        let send = async {
            let mut every = tokio::time::interval(self.pace);
            for number in 0..self.blocks {
                every.tick().await;
                to.write_all(&self.block(number))
                    .await
                    .with_context(|| format!("block {number} is not sent"))?;
            }
            to.shutdown().await.context("the end is not sent")
        };
        let receive = async {
            let mut block = vec![0; self.bytes];
            for number in 0..self.blocks {
                let read =
                    tokio::time::timeout(wait::scaled(SILENCE), from.read_exact(&mut block)).await;
                read.with_context(|| format!("block {number} does not come"))?
                    .with_context(|| format!("block {number} is not received"))?;
                ensure!(block == self.block(number), "block {number} is wrong");
            }
            let rest = tokio::time::timeout(wait::scaled(SILENCE), from.read(&mut block)).await;
            ensure!(
                rest.context("the end does not come")?? == 0,
                "more than was sent"
            );
            Ok(())
        };
        tokio::try_join!(send, receive).map(drop)
    }
}

/// Result of one of the program's connections; a direction that is still open has none.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Fate {
    /// `whole`, or the error's name in Python.
    pub sent: Option<String>,
    /// `whole`, `3 blocks` if it ended after these, or the error's name in Python.
    pub received: Option<String>,
}

impl Fate {
    /// Reports whether nothing was lost in either direction.
    pub fn is_whole(&self) -> bool {
        let whole = |part: &Option<String>| part.as_deref() == Some("whole");
        whole(&self.sent) && whole(&self.received)
    }
}

/// Opens a connection to the program.
pub async fn open(pod: &Pod) -> anyhow::Result<TcpStream> {
    connect(pod, PORT).await
}

/// Returns the results of the program's connections, in the order in which they began.
pub async fn fates(pod: &Pod) -> anyhow::Result<Vec<Fate>> {
    let mut stream = BufReader::new(connect(pod, REPORT).await?);
    let mut line = String::new();
    let read = tokio::time::timeout(wait::scaled(SILENCE), stream.read_line(&mut line)).await;
    read.context("no report in time")??;
    Ok(serde_json::from_str(&line)?)
}

async fn connect(pod: &Pod, port: u16) -> anyhow::Result<TcpStream> {
    let address = witness::address(pod)?;
    let stream = tokio::time::timeout(
        wait::scaled(SILENCE),
        TcpStream::connect((address.as_str(), port)),
    );
    let stream = stream.await.context("no connection in time")?;
    stream.with_context(|| format!("no connection to {address}:{port}"))
}

/// Listens for the program's own connections; returns the listener and its port.
pub async fn listen() -> anyhow::Result<(TcpListener, u16)> {
    let listener = TcpListener::bind("0.0.0.0:0").await?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

/// Accepts `count` connections.
pub async fn accept(listener: &TcpListener, count: usize) -> anyhow::Result<Vec<TcpStream>> {
    let mut streams = Vec::new();
    while streams.len() < count {
        let accepted = tokio::time::timeout(wait::scaled(SILENCE), listener.accept()).await;
        streams.push(accepted.context("not all connections come")??.0);
    }
    Ok(streams)
}
