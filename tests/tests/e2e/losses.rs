//! What the network loses of a sandbox' words before it falls asleep: gVisor's network stack forgets in a restore what it was to say again.

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

/// For what is said again after a time that doubles.
const LIMIT: Duration = Duration::from_secs(60);

/// Says again what it hears, byte for byte. After a `.` it ends the connection.
const ECHO: &str = "import socketserver
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while (word := self.request.recv(1)) and word != b'.':
            self.request.sendall(word)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
Server(('', 8080), Echo).serve_forever()";

/// A word to the program and what it says to that: the same, or that the connection ends.
#[derive(Debug, Clone, Copy)]
enum Word {
    Echoed,
    Ends,
}

impl Word {
    fn said(self) -> &'static [u8] {
        match self {
            Self::Echoed => b"?",
            Self::Ends => b".",
        }
    }

    fn heard(self) -> &'static [u8] {
        match self {
            Self::Echoed => b"?",
            Self::Ends => b"",
        }
    }
}

async fn hears(stream: &mut TcpStream, expected: &[u8]) -> anyhow::Result<()> {
    let mut byte = [0];
    let read = tokio::time::timeout(wait::scaled(LIMIT), stream.read(&mut byte)).await;
    let length = read.context("nothing has come in time")??;
    let heard = &byte[..length];
    ensure!(heard == expected, "{heard:?} in place of {expected:?}");
    Ok(())
}

/// A Pod, and a connection on which its program has answered.
async fn in_conversation(case: &Case) -> anyhow::Result<(Pod, TcpStream)> {
    let spec = json!({ "containers": [python("a", ECHO)] });
    let pod = case.start(pod("p", spec)).await?;
    let address = (witness::address(&pod)?, witness::PORT);
    let mut stream = wait::until("it listens", LIMIT, async || {
        let connected = TcpStream::connect(address.clone()).await;
        Ok(connected.map_err(|error| error.to_string()))
    })
    .await?;
    let word = Word::Echoed;
    stream.write_all(word.said()).await?;
    hears(&mut stream, word.heard()).await?;
    Ok((pod, stream))
}

/// What this machine loses of what is said between it and a Pod's port, until this is dropped.
struct Loss {
    table: String,
    /// The Pod's, as nftables matches it.
    family: &'static str,
    address: IpAddr,
}

impl Loss {
    /// Loses what the Pod says: data and ends of connections. Acknowledgements come through.
    fn of_words(case: &Case, pod: &Pod) -> anyhow::Result<Self> {
        let address: IpAddr = witness::address(pod)?.parse()?;
        let loss = Self {
            table: format!("torpor-{}", case.namespace),
            family: if address.is_ipv4() { "ip" } else { "ip6" },
            address,
        };
        nft(&format!("add table inet {}", loss.table))?;
        // Before anything else looks at them.
        loss.add(
            "chain",
            "said { type filter hook prerouting priority -300; }",
        )?;
        loss.add("chain", "heard { type filter hook output priority -300; }")?;
        // gVisor, as Linux, pushes the last data that it has.
        loss.lose_of_pod("tcp flags & (fin | psh) != 0 counter")?;
        Ok(loss)
    }

    /// Loses all that the Pod says, acknowledgements too.
    fn of_all(case: &Case, pod: &Pod) -> anyhow::Result<Self> {
        let loss = Self::of_words(case, pod)?;
        loss.lose_of_pod("")?;
        Ok(loss)
    }

    fn lose_of_pod(&self, what: &str) -> anyhow::Result<()> {
        let (family, address, port) = (self.family, self.address, witness::PORT);
        let rule = format!("said {family} saddr {address} tcp sport {port} {what} drop");
        self.add("rule", &rule)
    }

    /// And the Pod does not hear what is said to it.
    fn deafen(&self) -> anyhow::Result<()> {
        let (family, address, port) = (self.family, self.address, witness::PORT);
        let rule = format!("heard {family} daddr {address} tcp dport {port} drop");
        self.add("rule", &rule)
    }

    fn add(&self, what: &str, rest: &str) -> anyhow::Result<()> {
        nft(&format!("add {what} inet {} {rest}", self.table)).map(drop)
    }

    /// How many of the Pod's words were lost.
    fn words(&self) -> anyhow::Result<u64> {
        let listed = nft(&format!("list chain inet {} said", self.table))?;
        let mut after = listed
            .split_whitespace()
            .skip_while(|word| *word != "packets");
        let number = after.nth(1);
        Ok(number.with_context(|| listed.clone())?.parse()?)
    }

    async fn loses_another_word(&self) -> anyhow::Result<()> {
        let before = self.words()?;
        wait::until("the Pod says something", LIMIT, async || {
            wait::holds(self.words()? > before, || format!("{before} words"))
        })
        .await
    }
}

impl Drop for Loss {
    fn drop(&mut self) {
        let _ = nft(&format!("delete table inet {}", self.table));
    }
}

/// What it prints.
fn nft(command: &str) -> anyhow::Result<String> {
    let done = Command::new("nft").arg(command).output();
    let done = done.context("cannot run nft (Debian package nftables)")?;
    let words = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "nft {command}: {words}");
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// The client hears nothing, not even that it was heard, so it says its word again, which wakes the Pod.
async fn is_answered_who_repeats_himself(case: &Case, word: Word) -> anyhow::Result<()> {
    let (pod, mut stream) = in_conversation(case).await?;
    let loss = Loss::of_all(case, &pod)?;
    stream.write_all(word.said()).await?;
    loss.loses_another_word().await?;
    // A Pod that has heard data last is taken for one that owes an answer, and is woken as soon as it sleeps.
    loss.deafen()?;
    loss.loses_another_word().await?;
    let uid = uid(&case.hibernate("p").await?);
    let asleep = case.node.ledger_seq(&uid)?;
    drop(loss);
    wait::until("the client's repetition wakes it", LIMIT, async || {
        let entries = case.node.ledger_seq(&uid)? - asleep;
        wait::holds(entries > 0, || "no entry".to_owned())
    })
    .await?;
    case.annotate("p", HIBERNATE, None).await?;
    hears(&mut stream, word.heard()).await
}

#[tokio::test]
async fn what_a_sandbox_sent_and_lost_as_it_fell_asleep_is_sent_again_after_the_wake()
-> anyhow::Result<()> {
    case("lostword", async |case| {
        is_answered_who_repeats_himself(case, Word::Echoed).await
    })
    .await
}

#[tokio::test]
async fn the_end_that_a_sandbox_sent_and_lost_as_it_fell_asleep_is_sent_again_after_the_wake()
-> anyhow::Result<()> {
    case("lostend", async |case| {
        is_answered_who_repeats_himself(case, Word::Ends).await
    })
    .await
}

/// Linux' timers of a socket of which nothing is on its way (proc_net_tcp.rst in its documentation).
const NO_TIMER: &str = "00";

/// The client knows that it was heard, and waits.
async fn is_answered_who_waits(case: &Case, word: Word) -> anyhow::Result<()> {
    let (pod, mut stream) = in_conversation(case).await?;
    let loss = Loss::of_words(case, &pod)?;
    stream.write_all(word.said()).await?;
    loss.loses_another_word().await?;
    wait::until("the client's word is acknowledged", LIMIT, async || {
        let timer = timer(&stream)?;
        wait::holds(timer == NO_TIMER, || format!("timer {timer:?}"))
    })
    .await?;
    case.hibernate("p").await?;
    drop(loss);
    let nothing = ["python3", "-c", ""];
    case.kubectl.exec("p", "a", &nothing).await?.ok()?;
    case.annotate("p", HIBERNATE, None).await?;
    hears(&mut stream, word.heard()).await
}

#[tokio::test]
async fn what_a_sandbox_sent_and_lost_is_sent_again_to_a_peer_that_waits() -> anyhow::Result<()> {
    case("lostwaits", async |case| {
        is_answered_who_waits(case, Word::Echoed).await
    })
    .await
}

#[tokio::test]
async fn the_end_that_a_sandbox_sent_and_lost_is_sent_again_to_a_peer_that_waits()
-> anyhow::Result<()> {
    case("lostendwaits", async |case| {
        is_answered_who_waits(case, Word::Ends).await
    })
    .await
}
