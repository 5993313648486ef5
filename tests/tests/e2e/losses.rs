//! Packets of a sandbox that the network loses before the sandbox falls asleep: in a restore
//! gVisor's network stack forgets what it had to send again.

use std::net::IpAddr;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use torpor_api::annotations::HIBERNATE;
use torpor_tests::case::{Case, case, uid};
use torpor_tests::pods::{pod, python};
use torpor_tests::wait;
use torpor_tests::witness;

use crate::windows::timer;

/// Time for a retransmission, whose interval doubles.
const LIMIT: Duration = Duration::from_secs(60);

/// Program that echoes each byte, and ends the connection after a `.`.
const ECHO: &str = "import socketserver
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while (word := self.request.recv(1)) and word != b'.':
            self.request.sendall(word)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
Server(('', 8080), Echo).serve_forever()";

/// A byte to the program, and its answer: the same byte, or the end of the connection.
#[derive(Debug, Clone, Copy)]
enum Word {
    Echoed,
    Ends,
}

impl Word {
    fn sent(self) -> &'static [u8] {
        match self {
            Self::Echoed => b"?",
            Self::Ends => b".",
        }
    }

    fn expected(self) -> &'static [u8] {
        match self {
            Self::Echoed => b"?",
            Self::Ends => b"",
        }
    }
}

async fn receives(stream: &mut TcpStream, expected: &[u8]) -> anyhow::Result<()> {
    let mut byte = [0];
    let read = tokio::time::timeout(wait::scaled(LIMIT), stream.read(&mut byte)).await;
    let length = read.context("nothing has come in time")??;
    let received = &byte[..length];
    ensure!(
        received == expected,
        "{received:?} in place of {expected:?}"
    );
    Ok(())
}

/// Starts a Pod, and opens a connection on which its program has answered.
async fn connected_pod(case: &Case) -> anyhow::Result<(Pod, TcpStream)> {
    let spec = json!({ "containers": [python("a", ECHO)] });
    let pod = case.start(pod("p", spec)).await?;
    let address = (witness::address(&pod)?, witness::PORT);
    let mut stream = wait::until("it listens", LIMIT, async || {
        let connected = TcpStream::connect(address.clone()).await;
        Ok(connected.map_err(|error| error.to_string()))
    })
    .await?;
    let word = Word::Echoed;
    stream.write_all(word.sent()).await?;
    receives(&mut stream, word.expected()).await?;
    Ok((pod, stream))
}

/// Loss of packets between this machine and a Pod's port, until drop.
struct Loss {
    table: String,
    /// Family of the Pod's address, as nftables matches it.
    family: &'static str,
    address: IpAddr,
}

impl Loss {
    /// Drops the Pod's data and ends of connections; acknowledgements come through.
    fn of_data(case: &Case, pod: &Pod) -> anyhow::Result<Self> {
        let address: IpAddr = witness::address(pod)?.parse()?;
        let loss = Self {
            table: format!("torpor-{}", case.namespace),
            family: if address.is_ipv4() { "ip" } else { "ip6" },
            address,
        };
        nft(&format!("add table inet {}", loss.table))?;
        // The chains see the packets before anything else does.
        loss.add(
            "chain",
            "from_pod { type filter hook prerouting priority -300; }",
        )?;
        loss.add("chain", "to_pod { type filter hook output priority -300; }")?;
        // gVisor, as Linux, sets PSH on the last data that it has.
        loss.drop_packets_of_pod("tcp flags & (fin | psh) != 0 counter")?;
        Ok(loss)
    }

    /// Drops all packets of the Pod, acknowledgements too.
    fn of_all(case: &Case, pod: &Pod) -> anyhow::Result<Self> {
        let loss = Self::of_data(case, pod)?;
        loss.drop_packets_of_pod("")?;
        Ok(loss)
    }

    fn drop_packets_of_pod(&self, what: &str) -> anyhow::Result<()> {
        let (family, address, port) = (self.family, self.address, witness::PORT);
        let rule = format!("from_pod {family} saddr {address} tcp sport {port} {what} drop");
        self.add("rule", &rule)
    }

    /// Drops the packets to the Pod as well.
    fn drop_packets_to_pod(&self) -> anyhow::Result<()> {
        let (family, address, port) = (self.family, self.address, witness::PORT);
        let rule = format!("to_pod {family} daddr {address} tcp dport {port} drop");
        self.add("rule", &rule)
    }

    fn add(&self, what: &str, rest: &str) -> anyhow::Result<()> {
        nft(&format!("add {what} inet {} {rest}", self.table)).map(drop)
    }

    /// Returns the number of the Pod's dropped packets with data or ends of connections.
    fn dropped(&self) -> anyhow::Result<u64> {
        let listed = nft(&format!("list chain inet {} from_pod", self.table))?;
        let mut after = listed
            .split_whitespace()
            .skip_while(|word| *word != "packets");
        let number = after.nth(1);
        Ok(number.with_context(|| listed.clone())?.parse()?)
    }

    async fn drops_another_packet(&self) -> anyhow::Result<()> {
        let before = self.dropped()?;
        wait::until("the Pod sends another packet", LIMIT, async || {
            wait::holds(self.dropped()? > before, || format!("{before} packets"))
        })
        .await
    }
}

impl Drop for Loss {
    fn drop(&mut self) {
        let _ = nft(&format!("delete table inet {}", self.table));
    }
}

/// Runs nft; returns its output.
fn nft(command: &str) -> anyhow::Result<String> {
    let done = Command::new("nft").arg(command).output();
    let done = done.context("cannot run nft (Debian package nftables)")?;
    let words = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "nft {command}: {words}");
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// The client gets no acknowledgement, so it sends its byte again, which wakes the Pod.
async fn a_client_that_retransmits_is_answered(case: &Case, word: Word) -> anyhow::Result<()> {
    let (pod, mut stream) = connected_pod(case).await?;
    let loss = Loss::of_all(case, &pod)?;
    stream.write_all(word.sent()).await?;
    loss.drops_another_packet().await?;
    // A Pod that received data last is assumed to owe an answer, and is woken as soon as it sleeps.
    loss.drop_packets_to_pod()?;
    loss.drops_another_packet().await?;
    let uid = uid(&case.hibernate("p").await?);
    let asleep = case.node.ledger_seq(&uid)?;
    drop(loss);
    wait::until(
        "the client's retransmission wakes the Pod",
        LIMIT,
        async || {
            let entries = case.node.ledger_seq(&uid)? - asleep;
            wait::holds(entries > 0, || "no entry".to_owned())
        },
    )
    .await?;
    case.annotate("p", HIBERNATE, None).await?;
    receives(&mut stream, word.expected()).await
}

#[tokio::test]
async fn data_lost_as_a_sandbox_fell_asleep_is_sent_again_after_the_wake() -> anyhow::Result<()> {
    case("lostword", async |case| {
        a_client_that_retransmits_is_answered(case, Word::Echoed).await
    })
    .await
}

#[tokio::test]
async fn an_end_of_connection_lost_as_a_sandbox_fell_asleep_is_sent_again_after_the_wake()
-> anyhow::Result<()> {
    case("lostend", async |case| {
        a_client_that_retransmits_is_answered(case, Word::Ends).await
    })
    .await
}

/// Timer that Linux shows for a socket with nothing on its way (proc_net_tcp.rst in its
/// documentation).
const NO_TIMER: &str = "00";

/// The client's byte is acknowledged, so the client waits.
async fn a_client_that_waits_is_answered(case: &Case, word: Word) -> anyhow::Result<()> {
    let (pod, mut stream) = connected_pod(case).await?;
    let loss = Loss::of_data(case, &pod)?;
    stream.write_all(word.sent()).await?;
    loss.drops_another_packet().await?;
    wait::until("the client's byte is acknowledged", LIMIT, async || {
        let timer = timer(&stream)?;
        wait::holds(timer == NO_TIMER, || format!("timer {timer:?}"))
    })
    .await?;
    case.hibernate("p").await?;
    drop(loss);
    let nothing = ["python3", "-c", ""];
    case.kubectl.exec("p", "a", &nothing).await?.ok()?;
    case.annotate("p", HIBERNATE, None).await?;
    receives(&mut stream, word.expected()).await
}

#[tokio::test]
async fn data_that_the_network_lost_is_sent_again_to_a_peer_that_waits() -> anyhow::Result<()> {
    case("lostwaits", async |case| {
        a_client_that_waits_is_answered(case, Word::Echoed).await
    })
    .await
}

#[tokio::test]
async fn an_end_of_connection_that_the_network_lost_is_sent_again_to_a_peer_that_waits()
-> anyhow::Result<()> {
    case("lostendwaits", async |case| {
        a_client_that_waits_is_answered(case, Word::Ends).await
    })
    .await
}
