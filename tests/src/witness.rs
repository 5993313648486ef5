//! Client of `witness.py`, the program in a sandbox that reports whether it is still the same.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpStream, UdpSocket};

use crate::pods::{python, with};
use crate::wait;

/// Port on which the program listens.
pub const PORT: u16 = 8080;
/// Time for an answer: hashing a hundred megabytes in gVisor on a busy machine takes a second.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
const START_LIMIT: Duration = Duration::from_secs(60);

/// Returns the program's container `witness`, which holds `megabytes` and the files.
pub fn container(megabytes: u32, files: &[&str]) -> Value {
    let env = json!([
        { "name": "MEGABYTES", "value": megabytes.to_string() },
        { "name": "FILES", "value": files.join(":") },
    ]);
    with(
        python("witness", include_str!("witness.py")),
        json!({ "env": env }),
    )
}

/// State that the program reports.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct State {
    /// Random text that is drawn at the program's start: another secret is another life.
    pub secret: String,
    /// Number that grows twenty times a second.
    pub counter: u64,
    /// SHA-256 of the memory that the program holds.
    pub digest: String,
    pub pid: u32,
    /// The program's child, while it runs.
    pub child: Option<u32>,
    pub hostname: String,
    /// By file: it holds the secret when it is opened by name.
    pub files: BTreeMap<String, bool>,
    /// By file that was opened at the start: it can still be read.
    pub open: BTreeMap<String, bool>,
}

impl State {
    /// Checks that `self` continues `before`: the same life, and no older state.
    pub fn goes_on_from(&self, before: &Self) -> anyhow::Result<()> {
        let differences = self.differences(before);
        anyhow::ensure!(
            differences.is_empty(),
            "{differences:?}: before {before:?}, now {self:?}"
        );
        Ok(())
    }

    fn differences(&self, before: &Self) -> Vec<&'static str> {
        let checks = [
            ("secret", self.secret == before.secret),
            ("memory", self.digest == before.digest),
            ("counter", self.counter >= before.counter),
            ("process", self.pid == before.pid),
            ("child", self.child.is_some() && self.child == before.child),
            ("hostname", self.hostname == before.hostname),
            ("files", self.files.values().all(|there| *there)),
            ("open files", self.open.values().all(|there| *there)),
        ];
        checks
            .into_iter()
            .filter(|(_, same)| !same)
            .map(|(name, _)| name)
            .collect()
    }
}

/// One connection to the program.
#[derive(Debug)]
pub struct Connection(BufReader<TcpStream>);

impl Connection {
    /// Connects to the Pod's address from the node.
    pub async fn open(pod: &Pod) -> anyhow::Result<Self> {
        let address = address(pod)?;
        let stream = tokio::time::timeout(
            wait::scaled(ANSWER_LIMIT),
            TcpStream::connect((address.as_str(), PORT)),
        );
        let stream = stream.await.context("no connection in time")?;
        Ok(Self(BufReader::new(
            stream.with_context(|| format!("no connection to {address}"))?,
        )))
    }

    /// Uses a connection that was made some other way.
    pub fn over(stream: TcpStream) -> Self {
        Self(BufReader::new(stream))
    }

    /// Sends a question whose answer is read later.
    pub async fn send(&mut self) -> anyhow::Result<()> {
        Ok(self.0.write_all(b"?\n").await?)
    }

    /// Asks on this connection and reads the answer.
    pub async fn ask(&mut self) -> anyhow::Result<State> {
        self.send().await?;
        self.answer().await
    }

    /// Reads the answer to a question that was sent.
    pub async fn answer(&mut self) -> anyhow::Result<State> {
        let asked = async {
            let mut line = String::new();
            self.0.read_line(&mut line).await?;
            anyhow::ensure!(!line.is_empty(), "the connection was closed");
            Ok(serde_json::from_str(&line)?)
        };
        tokio::time::timeout(wait::scaled(ANSWER_LIMIT), asked)
            .await
            .context("no answer in time")?
    }
}

/// Asks by one datagram, which is not repeated.
pub async fn ask_by_datagram(pod: &Pod) -> anyhow::Result<State> {
    let address: IpAddr = address(pod)?.parse()?;
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect((address, PORT)).await?;
    socket.send(b"?").await?;
    let mut answer = vec![0; 4096];
    let length = tokio::time::timeout(wait::scaled(ANSWER_LIMIT), socket.recv(&mut answer));
    let length = length.await.context("no answer in time")??;
    Ok(serde_json::from_slice(&answer[..length])?)
}

/// Opens a raw ICMP socket to the address.
fn icmp(address: IpAddr) -> std::io::Result<Socket> {
    let (domain, protocol) = match address {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6),
    };
    let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
    socket.connect(&SocketAddr::new(address, 0).into())?;
    Ok(socket)
}

/// Sends one ICMP echo request to the Pod and waits for the reply.
pub async fn echo(pod: &Pod) -> anyhow::Result<()> {
    let address: IpAddr = address(pod)?.parse()?;
    let replied = tokio::task::spawn_blocking(move || {
        let socket = icmp(address)?;
        socket.set_read_timeout(Some(wait::scaled(ANSWER_LIMIT)))?;
        // Type, code, checksum (of the rest; RFC 792), identifier and number. The kernel itself
        // sets the checksum of ICMPv6 (RFC 3542).
        let (request, reply) = match address {
            IpAddr::V4(_) => ([8, 0, 0x9f, 0x7f, 0x58, 0x7f, 0, 1], 0),
            IpAddr::V6(_) => ([128, 0, 0, 0, 0x58, 0x7f, 0, 1], 129),
        };
        (&socket).write_all(&request)?;
        loop {
            let mut packet = [0; 128];
            let length = (&socket).read(&mut packet)?;
            // The message is behind the header, which is read with IPv4 only: its length is in its
            // first byte.
            let header = match address {
                IpAddr::V4(_) => usize::from(packet[0] & 0xf) * 4,
                IpAddr::V6(_) => 0,
            };
            let message = packet.get(header..length).unwrap_or_default();
            if message.first() == Some(&reply) && message.get(4..8) == Some(&request[4..]) {
                return Ok(());
            }
        }
    });
    replied.await?
}

/// Sends `count` unrequested ICMP echo replies to the Pod, no faster than a loaded node takes them.
///
/// They do not wake a sleeping Pod, and wait for it.
pub async fn unasked_replies(pod: &Pod, count: usize) -> anyhow::Result<()> {
    let address: IpAddr = address(pod)?.parse()?;
    let socket = icmp(address)?;
    let reply = match address {
        IpAddr::V4(_) => [0, 0, 0xa7, 0x7f, 0x58, 0x7f, 0, 1],
        IpAddr::V6(_) => [129, 0, 0, 0, 0x58, 0x7f, 0, 1],
    };
    for number in 1..=count {
        (&socket).write_all(&reply)?;
        if number % 100 == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    Ok(())
}

/// Returns the Pod with its IPv6 address only; `None` where the cluster gives Pods none.
pub fn over_ipv6(pod: &Pod) -> Option<Pod> {
    let mut pod = pod.clone();
    let status = pod.status.as_mut()?;
    let mut ips = status.pod_ips.iter().flatten().map(|entry| &entry.ip);
    status.pod_ip = Some(ips.find(|ip| ip.contains(':'))?.clone());
    Some(pod)
}

/// Returns the Pod's address.
pub fn address(pod: &Pod) -> anyhow::Result<String> {
    let status = pod.status.as_ref().and_then(|status| status.pod_ip.clone());
    status.context("the Pod has no address")
}

/// Asks the program until it answers.
pub async fn ask(pod: &Pod) -> anyhow::Result<State> {
    wait::until("the witness answers", START_LIMIT, async || {
        let answer = async { Connection::open(pod).await?.ask().await };
        Ok(answer
            .await
            .map_err(|error: anyhow::Error| format!("{error:#}")))
    })
    .await
}
