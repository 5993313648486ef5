//! Established TCP connections of a Pod that hibernates in place: nothing on them is lost or comes
//! twice, whichever side made them.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::future::{join_all, try_join_all};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use torpor_api::annotations::{DOZE_AFTER, HIBERNATE};
use torpor_tests::case::{Case, case, uid};
use torpor_tests::counted::{Fate, Plan, accept, fates, listen, open};
use torpor_tests::pods::{pod, python, with};
use torpor_tests::sandboxes::sandbox;
use torpor_tests::sleep::{is_dozing, restarts};
use torpor_tests::swap::Swap;
use torpor_tests::wait;
use torpor_tests::witness::{self, Connection};

/// Time for the program to read, after the wake, what has waited for it.
const LIMIT: Duration = Duration::from_secs(60);

/// Asks for the results now and then, which wakes the Pod.
///
/// A client that has sent everything and only receives does not wake the Pod. Neither does a client
/// whose connection was accepted in the moment of the save and that waits for the first data: it
/// has to ask again.
async fn ask_now_and_then(pod: &Pod) -> anyhow::Result<()> {
    loop {
        if let Ok(fates_now) = tokio::time::timeout(Duration::from_secs(5), fates(pod)).await {
            fates_now?;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Checks that no exchange has failed.
fn whole(exchanges: Vec<anyhow::Result<()>>) -> anyhow::Result<()> {
    let all = exchanges.len();
    let failed: Vec<String> = exchanges
        .into_iter()
        .enumerate()
        .filter_map(|(number, ended)| Some(format!("{number}: {:#}", ended.err()?)))
        .collect();
    let first = failed.first().map_or("", String::as_str);
    ensure!(
        failed.is_empty(),
        "{} of {all} connections are broken, the first one is number {first}",
        failed.len()
    );
    Ok(())
}

/// Asks the Pod to sleep while all connections are busy, and waits until everything is exchanged.
///
/// The Pod falls asleep, is woken by what arrives, and falls asleep again after ten seconds.
async fn exchange_while_it_falls_asleep(
    case: &Case,
    plan: Plan,
    inward: usize,
    outward: usize,
    sleeps: u64,
) -> anyhow::Result<()> {
    let (listener, port) = listen().await?;
    let container = plan.container(outward, port);
    let pod = case
        .start(pod("p", json!({ "containers": [container] })))
        .await?;
    let mut streams = accept(&listener, outward).await?;
    streams.extend(try_join_all((0..inward).map(|_| open(&pod))).await?);
    let before = case.node.ledger_seq(&uid(&pod))?;
    case.annotate("p", HIBERNATE, Some("true")).await?;
    let exchanges = join_all(streams.into_iter().map(|stream| plan.exchange(stream)));
    tokio::select! {
        done = exchanges => whole(done).with_context(|| case.node.ledger_words(&uid(&pod)))?,
        asked = ask_now_and_then(&pod) => asked?,
    }
    // Each sleep has five entries: begun, committed, asleep, waking, awake. In the end the Pod may
    // sleep once more.
    let entries = case.node.ledger_seq(&uid(&pod))? - before;
    ensure!(
        entries >= 5 * sleeps,
        "{entries} entries: it has not slept {sleeps} times"
    );
    wait::until("the program has received everything", LIMIT, async || {
        let fates = fates(&pod).await?;
        let whole = fates.len() == inward + outward && fates.iter().all(|fate| fate.is_whole());
        wait::holds(whole, || format!("{fates:?}"))
    })
    .await?;
    ensure!(
        restarts(&case.pods().get("p").await?) == 0,
        "a container was restarted"
    );
    Ok(())
}

#[tokio::test]
async fn bytes_in_flight_both_ways_are_neither_lost_nor_repeated() -> anyhow::Result<()> {
    case("flight", async |case| {
        // Data moves in each instant of a save and of a wake.
        let plan = Plan {
            blocks: 1500,
            bytes: 16 << 10,
            pace: Duration::from_millis(20),
        };
        exchange_while_it_falls_asleep(case, plan, 1, 1, 2).await
    })
    .await
}

#[tokio::test]
async fn hundreds_of_connections_in_both_directions_survive() -> anyhow::Result<()> {
    case("hundred", async |case| {
        let plan = Plan {
            blocks: 20,
            bytes: 1 << 10,
            pace: Duration::from_secs(1),
        };
        exchange_while_it_falls_asleep(case, plan, 100, 100, 2).await
    })
    .await
}

fn witness_pod() -> serde_json::Value {
    pod("p", json!({ "containers": [witness::container(5, &[])] }))
}

/// Checks that nothing wakes the Pod for this time.
async fn sleeps_for(case: &Case, uid: &str, time: Duration) -> anyhow::Result<()> {
    let asleep = case.node.ledger_seq(uid)?;
    let end = Instant::now() + time;
    while Instant::now() < end {
        ensure!(
            case.node.ledger_seq(uid)? == asleep,
            "something has woken it"
        );
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

/// Makes the connection fail after three seconds without an answer.
fn keep_alive(stream: &TcpStream) -> rustix::io::Result<()> {
    use rustix::net::sockopt;
    let second = Duration::from_secs(1);
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, second)?;
    sockopt::set_tcp_keepintvl(stream, second)?;
    sockopt::set_tcp_keepcnt(stream, 3)
}

#[tokio::test]
async fn keepalives_are_answered_while_the_pod_sleeps_and_do_not_wake_it() -> anyhow::Result<()> {
    case("keepalive", async |case| {
        let pod = case.start(witness_pod()).await?;
        witness::ask(&pod).await?;
        let address = (witness::address(&pod)?, witness::PORT);
        let stream = TcpStream::connect(address).await?;
        keep_alive(&stream)?;
        let mut connection = Connection::over(stream);
        let before = connection.ask().await?;
        let uid = uid(&case.hibernate("p").await?);
        // This is many times as long as a peer without an answer would wait.
        sleeps_for(case, &uid, Duration::from_secs(15)).await?;
        connection.ask().await?.goes_on_from(&before)?;
        // The sandbox itself answers the next keepalives as before.
        tokio::time::sleep(Duration::from_secs(5)).await;
        connection.ask().await?.goes_on_from(&before)
    })
    .await
}

/// Program that gives its peers up after three seconds without an answer to its own keepalives.
const KEEPING: &str = "import socket, socketserver
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        for option, value in [(socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)]:
            self.request.setsockopt(socket.IPPROTO_TCP, option, value)
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        while (data := self.request.recv(100)): self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
Server(('', 8080), Echo).serve_forever()";

async fn echo(stream: &mut TcpStream) -> anyhow::Result<()> {
    let mut answer = [0];
    stream.write_all(b"x").await?;
    let read = tokio::time::timeout(wait::scaled(LIMIT), stream.read_exact(&mut answer)).await;
    read.context("no answer in time")??;
    Ok(())
}

/// The network stack of a dozing sandbox sends keepalives until it is stopped, and receives the
/// answers.
///
/// From then on the keeper answers for the sandbox, and no host tells the peer that there is no
/// such connection.
#[tokio::test]
async fn keepalives_of_both_sides_are_answered_during_a_doze() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("dozealive", async |case| {
        let doze = json!({ "metadata": { "annotations": { DOZE_AFTER: "6s" } } });
        let spec = json!({ "containers": [python("a", KEEPING)] });
        let pod = case.start(with(pod("p", spec), doze)).await?;
        let address = (witness::address(&pod)?, witness::PORT);
        let mut stream = wait::until("it listens", LIMIT, async || {
            let connected = TcpStream::connect(address.clone()).await;
            Ok(connected.map_err(|error| error.to_string()))
        })
        .await?;
        keep_alive(&stream)?;
        echo(&mut stream).await?;
        let pod = case.dozes("p").await?;
        let asleep = case.node.ledger_seq(&uid(&pod))?;
        tokio::time::sleep(Duration::from_secs(15)).await;
        ensure!(
            is_dozing(&case.pods().get("p").await?),
            "something has woken it"
        );
        echo(&mut stream).await?;
        ensure!(
            case.node.ledger_seq(&uid(&pod))? > asleep,
            "it did not doze"
        );
        Ok(())
    })
    .await
}

/// A peer ends its connection while the Pod sleeps, in order or at once.
#[tokio::test]
async fn a_peer_that_disconnects_while_the_pod_sleeps_is_gone_after_the_wake() -> anyhow::Result<()>
{
    case("gone", async |case| {
        // The program sends something and has more to send, so that neither side has ended
        // anything.
        let plan = Plan {
            blocks: 2,
            bytes: 8,
            pace: Duration::from_secs(1000),
        };
        let (listener, port) = listen().await?;
        let container = plan.container(1, port);
        let pod = case
            .start(pod("p", json!({ "containers": [container] })))
            .await?;
        let mut streams = accept(&listener, 1).await?;
        streams.push(open(&pod).await?);
        streams.push(open(&pod).await?);
        for stream in &mut streams {
            // A peer that closes its connection with unread data resets it.
            let mut block = [0; 8];
            tokio::time::timeout(wait::scaled(LIMIT), stream.read_exact(&mut block)).await??;
        }
        let uid = uid(&case.hibernate("p").await?);
        if let Some(reset) = streams.pop() {
            reset.set_zero_linger()?;
        }
        drop(streams);
        sleeps_for(case, &uid, Duration::from_secs(5)).await?;
        // This request wakes the Pod.
        wait::until(
            "the program sees that its peers are gone",
            LIMIT,
            async || {
                let mut ends: Vec<_> = fates(&pod)
                    .await?
                    .into_iter()
                    .map(|fate| fate.received)
                    .collect();
                ends.sort();
                let expected = ["0 blocks", "0 blocks", "ConnectionResetError"];
                let seen = ends.iter().flatten().eq(expected);
                wait::holds(seen, || format!("{ends:?}"))
            },
        )
        .await
    })
    .await
}

/// Checks how the program's connections, one of each direction, end in a Pod with another address.
///
/// The program sends on them at this pace.
async fn ends_at_another_address(
    case: &Case,
    name: &str,
    pace: Duration,
    expected: Fate,
) -> anyhow::Result<()> {
    // Both directions of each connection are busy for longer than this test lasts.
    let plan = Plan {
        blocks: 100_000,
        bytes: 8,
        pace,
    };
    let (listener, port) = listen().await?;
    let containers = json!({ "containers": [plan.container(1, port)] });
    case.create(sandbox(name, containers)).await?;
    let pod = case.sandbox_ready(name).await?;
    let mut streams = accept(&listener, 1).await?;
    streams.push(open(&pod).await?);
    let both = |fates: &[Fate], expected: &Fate| {
        fates.len() == 2 && fates.iter().all(|one| one == expected)
    };
    let at_work = Fate {
        sent: None,
        received: None,
    };
    // The program sees a connection a moment after its client does.
    wait::until("both connections are at work", LIMIT, async || {
        let fates = fates(&pod).await?;
        wait::holds(both(&fates, &at_work), || format!("{fates:?}"))
    })
    .await?;
    case.suspend(name).await?;
    let pod = case.resume(name).await?;
    let words = "the program sees that its connections have ended";
    wait::until(words, LIMIT, async || {
        let fates = fates(&pod).await?;
        wait::holds(both(&fates, &expected), || format!("{fates:?}"))
    })
    .await
}

/// In a new Pod the sandbox has another address: its connections cannot continue, and its program
/// must see that.
///
/// gVisor tells a receiver that the peer has ended the connection, and a sender that nothing
/// listens.
#[tokio::test]
async fn connections_of_an_address_that_is_gone_end_for_the_program() -> anyhow::Result<()> {
    case("address", async |case| {
        let over = |sent: Option<&str>| Fate {
            sent: sent.map(str::to_owned),
            received: Some("0 blocks".to_owned()),
        };
        let often = Duration::from_millis(100);
        let sends = ends_at_another_address(case, "sends", often, over(Some("BrokenPipeError")));
        // After its first block it has nothing to send.
        let seldom = Duration::from_secs(10_000);
        let receives = ends_at_another_address(case, "receives", seldom, over(None));
        tokio::try_join!(sends, receives).map(drop)
    })
    .await
}

const WAKES: u64 = 4;

/// Returns a Pod that sends a number to its node a thousand times a second, each once.
fn sender(port: u16) -> serde_json::Value {
    let program = format!(
        "import os, socket, time
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
number = 0
while True:
    link.sendto(b'%d' % number, (os.environ['NODE'], {port}))
    number += 1
    if number % 100 == 0:
        open('/m', 'w').write(str(number))
        os.replace('/m', '/n')
    time.sleep(0.001)"
    );
    let node =
        json!({ "name": "NODE", "valueFrom": { "fieldRef": { "fieldPath": "status.hostIP" } } });
    let container = with(python("a", &program), json!({ "env": [node] }));
    pod("p", json!({ "containers": [container] }))
}

/// Socket that receives the numbers.
struct Receiver(tokio::net::UdpSocket);

impl Receiver {
    fn begin() -> anyhow::Result<(Self, u16)> {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
        // The buffer covers seconds in which this test does not get the processor.
        nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::RcvBufForce, &(8 << 20))?;
        socket.set_nonblocking(true)?;
        let port = socket.local_addr()?.port();
        Ok((Self(tokio::net::UdpSocket::from_std(socket)?), port))
    }

    async fn next(&self) -> anyhow::Result<u64> {
        let mut word = [0; 32];
        let length = tokio::time::timeout(wait::scaled(LIMIT), self.0.recv(&mut word)).await??;
        Ok(str::from_utf8(&word[..length])?.parse()?)
    }
}

/// gVisor's programs run before their wake is recorded.
///
/// Packets of that moment are held, so that their receiver never meets an older state.
#[tokio::test]
async fn packets_that_a_sandbox_sends_while_it_wakes_arrive_once_and_in_order() -> anyhow::Result<()>
{
    case("sender", async |case| {
        let (receiver, port) = Receiver::begin()?;
        case.start(sender(port)).await?;
        let (mut last, mut missing) = (receiver.next().await?, 0);
        for _ in 0..WAKES {
            case.hibernate("p").await?;
            case.wake("p").await?;
            // These are all numbers from before the sleep, and those since.
            let now = case.counted("p").await?;
            while last <= now {
                let number = receiver.next().await?;
                ensure!(number > last, "{number} arrived after {last}");
                missing += number - last - 1;
                last = number;
            }
        }
        // As on any link, a packet may be lost in the instant in which the link is opened.
        ensure!(missing <= WAKES, "{missing} never arrived");
        Ok(())
    })
    .await
}
