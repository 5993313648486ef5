//! Packets to a Pod that sleeps: a packet is held, wakes the sandbox, and is answered by it.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use torpor_api::annotations::{DOZE_AFTER, HIBERNATE, WAKE_ON};
use torpor_api::conditions::POD_HIBERNATED;
use torpor_core::ids::Namespace;
use torpor_records::{SandboxState, WakeCause};
use torpor_runsc::wake_slots::{WakeSlot, WakeSlots};
use torpor_tests::case::{Case, case, condition, uid};
use torpor_tests::pods::{pod, python, with};
use torpor_tests::sleep::restarts;
use torpor_tests::swap::Swap;
use torpor_tests::wait;
use torpor_tests::witness::{self, Connection};

/// Time to fall asleep and to wake once.
const LIMIT: Duration = Duration::from_secs(90);

fn witness_pod() -> serde_json::Value {
    let container = witness::container(5, &[]);
    pod("p", json!({ "containers": [container] }))
}

/// Packet that wakes a Pod.
#[derive(Debug, Clone, Copy)]
enum Packet {
    /// First packet of a connection.
    First,
    /// Data on a connection that existed before.
    Data,
    /// Datagram, which is not sent again.
    Datagram,
    /// Echo request, which gVisor itself answers.
    Echo,
}

const PACKETS: [Packet; 4] = [Packet::First, Packet::Data, Packet::Datagram, Packet::Echo];

/// Sends a packet to a sleeping Pod, and checks that the same program answers.
async fn answers_from_sleep(
    case: &Case,
    pod: &Pod,
    packet: Packet,
    sleeps: impl AsyncFnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (name, uid) = (pod.name_any(), uid(pod));
    let before = witness::ask(pod).await?;
    let mut connection = Connection::open(pod).await?;
    connection.ask().await?;
    sleeps().await?;
    let asleep = case.node.ledger_seq(&uid)?;
    let after = match packet {
        Packet::First => Connection::open(pod).await?.ask().await?,
        Packet::Data => connection.ask().await?,
        Packet::Datagram => witness::ask_by_datagram(pod).await?,
        Packet::Echo => {
            witness::echo(pod).await?;
            witness::ask(pod).await?
        }
    };
    after.goes_on_from(&before)?;
    ensure!(case.node.ledger_seq(&uid)? > asleep, "it did not sleep");
    let pod = case.wake(&name).await?;
    ensure!(restarts(&pod) == 0, "a container was restarted");
    Ok(())
}

/// Puts a Pod to sleep again and again, and wakes it by another packet each time.
///
/// `over` returns the Pod with the address that is used, if the Pod has such an address.
async fn packets_wake(
    case: &Case,
    pod: serde_json::Value,
    packets: &[Packet],
    over: fn(&Pod) -> Option<Pod>,
    sleeps: impl AsyncFn(&Pod) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let pod = case.start(pod).await?;
    let Some(pod) = over(&pod) else {
        // hack/cluster gives Pods IPv6 addresses where the machine has IPv6.
        eprintln!("not tested: Pods of this cluster have no such address");
        return Ok(());
    };
    for packet in packets {
        let answered = answers_from_sleep(case, &pod, *packet, async || sleeps(&pod).await).await;
        answered.with_context(|| format!("{packet:?}"))?;
    }
    Ok(())
}

async fn any_packet_wakes(case: &Case, over: fn(&Pod) -> Option<Pod>) -> anyhow::Result<()> {
    let hibernates = async |_: &Pod| case.hibernate("p").await.map(drop);
    packets_wake(case, witness_pod(), &PACKETS, over, hibernates).await
}

async fn packets_wake_a_dozing_pod(
    case: &Case,
    packets: &[Packet],
    over: fn(&Pod) -> Option<Pod>,
) -> anyhow::Result<()> {
    let idle = json!({ "metadata": { "annotations": { DOZE_AFTER: "3s" } } });
    let dozes = async |pod: &Pod| {
        let uid = uid(pod);
        wait::until("it dozes", LIMIT, async || {
            wait::holds(case.node.dozes(&uid)?, || "awake".to_owned())
        })
        .await
    };
    packets_wake(case, with(witness_pod(), idle), packets, over, dozes).await
}

#[tokio::test]
async fn any_packet_wakes_a_hibernated_pod_and_is_answered() -> anyhow::Result<()> {
    case("packet", async |case| {
        any_packet_wakes(case, |pod| Some(pod.clone())).await
    })
    .await
}

#[tokio::test]
async fn any_packet_over_ipv6_wakes_a_hibernated_pod_and_is_answered() -> anyhow::Result<()> {
    case("packet6", async |case| {
        any_packet_wakes(case, witness::over_ipv6).await
    })
    .await
}

#[tokio::test]
async fn a_connection_and_data_on_one_wake_a_dozing_pod_and_are_answered() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("connectdoze", async |case| {
        let packets = [Packet::First, Packet::Data];
        packets_wake_a_dozing_pod(case, &packets, |pod| Some(pod.clone())).await
    })
    .await
}

#[tokio::test]
async fn a_datagram_and_a_ping_wake_a_dozing_pod_and_are_answered() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("datagramdoze", async |case| {
        let packets = [Packet::Datagram, Packet::Echo];
        packets_wake_a_dozing_pod(case, &packets, |pod| Some(pod.clone())).await
    })
    .await
}

/// The same packets wake in both depths of sleep; tests of a hibernated Pod cover them over IPv6.
/// This test shows that they reach a Pod that dozes.
#[tokio::test]
async fn a_packet_over_ipv6_wakes_a_dozing_pod_and_is_answered() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("packetdoze6", async |case| {
        packets_wake_a_dozing_pod(case, &[Packet::Data, Packet::Datagram], witness::over_ipv6).await
    })
    .await
}

const MANY: usize = 1000;

/// Program that answers each line with a word that it drew at its start, on as many connections at
/// once as may wait.
const NAMED: &str = "import asyncio, os
name = os.urandom(8).hex().encode() + b'\\n'
async def answer(reader, writer):
    await reader.readline()
    writer.write(name)
    writer.close()
async def main():
    server = await asyncio.start_server(answer, '', 8080, backlog=1024)
    await server.serve_forever()
asyncio.run(main())";

async fn name_of(address: &str) -> anyhow::Result<String> {
    let asked = async {
        let mut stream = tokio::net::TcpStream::connect((address, 8080)).await?;
        stream.write_all(b"?\n").await?;
        let mut name = String::new();
        stream.read_to_string(&mut name).await?;
        anyhow::Ok(name)
    };
    tokio::time::timeout(wait::scaled(LIMIT), asked).await?
}

#[tokio::test]
async fn many_connections_at_once_are_one_wake_and_all_are_answered() -> anyhow::Result<()> {
    case("packets", async |case| {
        let spec = json!({ "containers": [python("a", NAMED)] });
        let pod = case.start(pod("p", spec)).await?;
        let address = witness::address(&pod)?;
        let before = wait::until("it answers", LIMIT, async || {
            let name = name_of(&address).await;
            Ok(name.map_err(|error| error.to_string()))
        })
        .await?;
        let uid = uid(&case.hibernate("p").await?);
        let asleep = case.node.ledger_seq(&uid)?;
        let began = Instant::now();
        let answers = futures::future::join_all((0..MANY).map(|_| name_of(&address))).await;
        for answer in answers {
            assert_eq!(answer?, before);
        }
        // The Pod falls asleep again after ten seconds: on a loaded machine some connections are
        // not answered by then.
        woken(case, &uid, asleep, began.elapsed().as_secs() / 10)
    })
    .await
}

/// Number of packets: twice as many as may wait for one sandbox (`torpor_link::held`).
const TOO_MANY: usize = 4096;
/// Least time of a connection whose first packet is sent again, as a client's kernel does after a
/// second.
const SENT_AGAIN: Duration = Duration::from_millis(900);

#[tokio::test]
async fn connections_without_room_among_the_held_packets_are_answered_all_the_same()
-> anyhow::Result<()> {
    case("noroom", async |case| {
        let pod = case.start(witness_pod()).await?;
        let before = witness::ask(&pod).await?;
        let uid = uid(&case.hibernate("p").await?);
        let asleep = case.node.ledger_seq(&uid)?;
        witness::unasked_replies(&pod, TOO_MANY).await?;
        ensure!(case.node.ledger_seq(&uid)? == asleep, "woken");
        let began = Instant::now();
        let asked = (0..50).map(|_| async { Connection::open(&pod).await?.ask().await });
        for answer in try_join_all(asked).await? {
            answer.goes_on_from(&before)?;
        }
        ensure!(began.elapsed() >= SENT_AGAIN, "each of them had room");
        Ok(())
    })
    .await
}

/// Checks the ledger since a sleep: begin and end of the wake, by now or soon the removal of its
/// image, and six entries for each further sleep and wake.
fn woken(case: &Case, uid: &str, asleep: u64, again: u64) -> anyhow::Result<()> {
    let entries = case.node.ledger_seq(uid)? - asleep;
    let expected = (2..=3 + 6 * again).contains(&entries);
    ensure!(expected, "{entries} entries in the ledger");
    Ok(())
}

/// Waits until the Pod sleeps with more than `entries` entries in its ledger, so that it has been
/// awake.
async fn sleeps_again(case: &Case, uid: &str, entries: u64) -> anyhow::Result<Pod> {
    let asleep = |pod: &Pod| {
        let told = condition(pod, POD_HIBERNATED).0 == "True";
        told && case.node.ledger_seq(uid).is_ok_and(|now| now > entries)
    };
    case.pod_until("p", "it has woken and sleeps again", LIMIT, asleep)
        .await
}

#[tokio::test]
async fn a_port_scan_wakes_a_pod_once_and_an_abandoned_connection_does_no_harm()
-> anyhow::Result<()> {
    case("scan", async |case| {
        let pod = case.start(witness_pod()).await?;
        let before = witness::ask(&pod).await?;
        let uid = uid(&case.hibernate("p").await?);
        let asleep = case.node.ledger_seq(&uid)?;
        let address = witness::address(&pod)?;
        let knock = |port| {
            let connect = tokio::net::TcpStream::connect((address.as_str(), port));
            tokio::time::timeout(Duration::from_secs(3), connect)
        };
        let scan = futures::future::join_all((1..=500).map(knock)).await;
        ensure!(
            !scan.iter().any(|port| matches!(port, Ok(Ok(_)))),
            "a port without a server took a connection"
        );
        let after = Connection::open(&pod).await?.ask().await?;
        after.goes_on_from(&before)?;
        woken(case, &uid, asleep, 0)?;
        // The request to sleep remains: the Pod sleeps again when nothing speaks to it.
        sleeps_again(case, &uid, asleep + 3).await?;
        let asleep = case.node.ledger_seq(&uid)?;
        // The client is gone before anything can have answered.
        let gives_up = tokio::net::TcpStream::connect((address.as_str(), witness::PORT));
        let gave_up = tokio::time::timeout(Duration::from_millis(1), gives_up).await;
        ensure!(gave_up.is_err(), "{gave_up:?}");
        let slept = sleeps_again(case, &uid, asleep + 3).await?;
        assert_eq!(restarts(&slept), 0);
        let after = Connection::open(&pod).await?.ask().await?;
        after.goes_on_from(&before)
    })
    .await
}

/// Connections begin from before the Pod falls asleep until a while after its wake, every 20 ms
/// from the moment when the save begins.
///
/// No connection is refused or reset, and each is answered.
#[tokio::test]
async fn connections_are_answered_in_every_moment_of_falling_asleep() -> anyhow::Result<()> {
    case("moments", async |case| {
        let pod = case.start(witness_pod()).await?;
        let before = witness::ask(&pod).await?;
        let sandbox = case.node.sandbox_of(&uid(&pod))?.sandbox;
        case.annotate("p", HIBERNATE, Some("true")).await?;
        let deadline = Instant::now() + LIMIT;
        let mut connections = tokio::task::JoinSet::new();
        let mut last = None;
        while last != Some(0) {
            // Before the save begins such a rate would be more than a program on a busy machine can
            // answer.
            let saving = case.node.ledger_seq(&uid(&pod))? > 0;
            tokio::time::sleep(Duration::from_millis(if saving { 20 } else { 200 })).await;
            let (pod, before) = (pod.clone(), before.clone());
            connections.spawn(async move {
                let mut connection = Connection::open(&pod).await?;
                connection.ask().await?.goes_on_from(&before)
            });
            last = match last {
                Some(more) => Some(more - 1),
                None => case.node.records.last_call(&sandbox).map(|_| 20),
            };
            ensure!(Instant::now() < deadline, "no packet has woken it");
        }
        // Otherwise the Pod would be put to sleep again, with connections that take longer to
        // answer than they may.
        case.annotate("p", HIBERNATE, None).await?;
        while let Some(answered) = connections.join_next().await {
            answered??;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_pod_is_woken_by_the_named_packets_and_does_not_answer_other_packets()
-> anyhow::Result<()> {
    case("wakeon", async |case| {
        let only = json!({ "metadata": { "annotations": { WAKE_ON: "tcp,ports=8080" } } });
        let pod = case.start(with(witness_pod(), only)).await?;
        let before = witness::ask(&pod).await?;
        let uid = uid(&case.hibernate("p").await?);
        let asleep = case.node.ledger_seq(&uid)?;
        let soon = Duration::from_secs(3);
        // There is neither an answer nor a refusal.
        let datagram = tokio::time::timeout(soon, witness::ask_by_datagram(&pod)).await;
        ensure!(datagram.is_err(), "{datagram:?}");
        let address = (witness::address(&pod)?, 8081);
        let stream = tokio::time::timeout(soon, tokio::net::TcpStream::connect(address)).await;
        ensure!(stream.is_err(), "{stream:?}");
        ensure!(case.node.ledger_seq(&uid)? == asleep, "woken");
        let answer = Connection::open(&pod).await?.ask().await?;
        answer.goes_on_from(&before)?;
        // The Pod falls asleep again, and follows the new annotation from then on.
        sleeps_again(case, &uid, asleep + 2).await?;
        case.annotate("p", WAKE_ON, Some("udp")).await?;
        wait::until("a datagram wakes it", LIMIT, async || {
            let asked = tokio::time::timeout(soon, witness::ask_by_datagram(&pod)).await;
            Ok(asked.map_err(|_| "no answer".to_owned()))
        })
        .await??
        .goes_on_from(&before)
    })
    .await
}

/// Program that answers each line after six seconds: a loaded machine begins to save within that.
const SLOW: &str = "import socketserver, time
class Slow(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            time.sleep(6)
            self.wfile.write(line)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
Server(('', 8080), Slow).serve_forever()";

/// The client sends nothing more: the kernel has acknowledged the question.
#[tokio::test]
async fn a_request_that_was_open_when_the_pod_fell_asleep_is_answered() -> anyhow::Result<()> {
    case("question", async |case| {
        // The port is not probed: the node's packets to a probed port may be a probe.
        let pod = case
            .start(pod("p", json!({ "containers": [python("a", SLOW)] })))
            .await?;
        let uid = uid(&pod);
        let awake = case.node.ledger_seq(&uid)?;
        let address = (witness::address(&pod)?, 8080);
        let mut stream = wait::until("it listens", LIMIT, async || {
            let connected = tokio::net::TcpStream::connect(address.clone()).await;
            Ok(connected.map_err(|error| error.to_string()))
        })
        .await?;
        stream.write_all(b"?\n").await?;
        case.annotate("p", HIBERNATE, Some("true")).await?;
        let mut answer = [0; 2];
        tokio::time::timeout(wait::scaled(LIMIT), stream.read_exact(&mut answer)).await??;
        ensure!(&answer == b"?\n", "{answer:?}");
        let entries = case.node.ledger_seq(&uid)? - awake;
        // Begun, committed, asleep, waking; the end of the wake is recorded a moment after the Pod
        // runs.
        ensure!(entries >= 4, "{entries} entries: it did not sleep");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_connection_is_answered_when_it_is_its_sandbox_turn_to_wake() -> anyhow::Result<()> {
    case("turn", async |case| {
        let pod = case.start(witness_pod()).await?;
        let before = witness::ask(&pod).await?;
        let uid = uid(&case.hibernate("p").await?);
        let limit = case.node.config.wakes_at_once;
        let turns = WakeSlots::new(&case.node.config.state_dir, limit);
        ensure!(limit > 0, "the installer sets a limit");
        let namespace = Namespace::new(case.namespace.clone())?;
        let take = |_| turns.take(WakeCause::Asked, &namespace);
        let taken: Vec<WakeSlot> = (0..limit).map(take).collect();
        let speak = async { Connection::open(&pod).await?.ask().await };
        let give_back = async {
            wait::until("the wake waits for its turn", LIMIT, async || {
                wait::holds(turns.is_client_waiting(), || "no wake waits".to_owned())
            })
            .await?;
            let state = case.node.state_of(&uid)?;
            let asleep = matches!(state, SandboxState::Hibernated { .. });
            ensure!(asleep, "{state:?} out of turn");
            drop(taken);
            anyhow::Ok(())
        };
        let (answer, given) = tokio::join!(speak, give_back);
        given?;
        answer?.goes_on_from(&before)
    })
    .await
}
