//! Connections whose windows are closed when the Pod falls asleep: each side has more to send than
//! the other has room for.

use std::io::ErrorKind;
use std::time::Duration;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use torpor_api::annotations::{DOZE_AFTER, HIBERNATE};
use torpor_tests::case::{Case, case, uid};
use torpor_tests::pods::{pod, python, with};
use torpor_tests::sleep::{SLEEP_LIMIT, restarts};
use torpor_tests::swap::Swap;
use torpor_tests::wait;
use torpor_tests::witness;

/// Time for a transfer: a sender without room tries again after a time that doubles, so it may wait
/// as long again as there was no room.
const LIMIT: Duration = Duration::from_secs(60);

/// Number of words in either direction of a full connection: the numbers from 0 on, eight bytes
/// each.
///
/// They are more than the buffers on the way hold, so that each side has more to send in the end.
const WORDS: u64 = 1 << 20;

/// Program that acts by the first byte of a connection.
///
/// - `r`: reads all that follows, once it may
/// - `!`: lets all of these connections read
/// - `w`: writes all words
/// - `?`: reports how far all the writers have come
const FULL: &str = "import array, json, os, socket, socketserver, threading
ALL = array.array('Q', range(int(os.environ['WORDS']))).tobytes()
may_read, written = threading.Event(), []
class Peer(socketserver.BaseRequestHandler):
    def handle(self):
        wish = self.request.recv(1)
        if wish == b'r':
            self.read()
        elif wish == b'w':
            self.write()
        elif wish == b'!':
            may_read.set()
        elif wish == b'?':
            self.tell(written)
    def read(self):
        may_read.wait()
        now = {'bytes': 0, 'wrong': None}
        while data := self.request.recv(1 << 16):
            if now['wrong'] is None and data != ALL[now['bytes']:now['bytes'] + len(data)]:
                now['wrong'] = now['bytes']
            now['bytes'] += len(data)
        self.tell(now)
    def write(self):
        now = {'bytes': 0, 'waits': False}
        written.append(now)
        self.request.settimeout(1)
        while now['bytes'] < len(ALL):
            try:
                now['bytes'] += self.request.send(ALL[now['bytes']:now['bytes'] + (1 << 16)])
            except TimeoutError:
                # From here on the call blocks until there is room: a program that polls is not
                # idle.
                now['waits'] = True
                self.request.settimeout(None)
        self.request.shutdown(socket.SHUT_WR)
        self.request.recv(1)
    def tell(self, what):
        self.request.sendall(json.dumps(what).encode())
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
Server(('', 8080), Peer).serve_forever()";

/// Data that the program has read up to the end of a connection.
#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Read {
    bytes: usize,
    /// Offset of the first part that differs from the expected data.
    wrong: Option<usize>,
}

/// Data that the program has written to a connection.
#[derive(Debug, Deserialize)]
struct Written {
    bytes: usize,
    /// For a second there was no room for more.
    waits: bool,
}

/// Opens a connection on which the program acts by this byte.
async fn connect(pod: &Pod, action: u8) -> anyhow::Result<TcpStream> {
    let connected = TcpStream::connect((witness::address(pod)?, witness::PORT));
    let connected = tokio::time::timeout(wait::scaled(LIMIT), connected).await;
    let mut stream = connected.context("no connection in time")??;
    stream.write_all(&[action]).await?;
    Ok(stream)
}

/// Returns the program's whole answer to a byte.
async fn answer(pod: &Pod, to: u8) -> anyhow::Result<String> {
    let mut stream = connect(pod, to).await?;
    let mut answer = String::new();
    let read = tokio::time::timeout(wait::scaled(LIMIT), stream.read_to_string(&mut answer)).await;
    read.context("no answer in time")??;
    Ok(answer)
}

/// Timer of a socket whose peer has no room for more: nothing of the socket is on its way, and at
/// the timer's end the socket asks for room (proc_net_tcp.rst in Linux' documentation).
const PERSIST_TIMER: &str = "04";

/// Returns the timer that this machine's kernel has set for its end of a connection; empty if the
/// connection was not found.
pub(crate) fn timer(stream: &TcpStream) -> anyhow::Result<String> {
    let (own, peer) = (stream.local_addr()?, stream.peer_addr()?);
    let table = if own.is_ipv4() { "tcp" } else { "tcp6" };
    let table = std::fs::read_to_string(format!("/proc/self/net/{table}"))?;
    let is_at = |end: &str, port: u16| end.ends_with(&format!(":{port:04X}"));
    let timer = table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (own_end, peer_end) = (fields.get(1)?, fields.get(2)?);
        let (timer, _) = fields.get(5)?.split_once(':')?;
        (is_at(own_end, own.port()) && is_at(peer_end, peer.port())).then(|| timer.to_owned())
    });
    Ok(timer.unwrap_or_default())
}

/// Writes until the reader's window is closed and this machine's kernel takes no more; returns how
/// much the kernel has taken.
async fn fill(stream: &TcpStream, all: &[u8]) -> anyhow::Result<usize> {
    // Otherwise the kernel would choose the size of the buffer.
    rustix::net::sockopt::set_socket_send_buffer_size(stream, 256 << 10)?;
    let mut taken = 0;
    wait::until("there is no room for more", LIMIT, async || {
        let before = taken;
        while taken < all.len() {
            match stream.try_write(&all[taken..]) {
                Ok(bytes) => taken += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
        }
        ensure!(taken < all.len(), "there was room for all of it");
        let timer = timer(stream)?;
        let full = taken == before && timer == PERSIST_TIMER;
        wait::holds(full, || format!("{taken} bytes, timer {timer:?}"))
    })
    .await?;
    Ok(taken)
}

/// Reads to the end, after what was read before, and checks that it is all words and nothing else.
async fn read_all(mut stream: TcpStream, mut read: Vec<u8>, all: &[u8]) -> anyhow::Result<()> {
    let end = tokio::time::timeout(wait::scaled(LIMIT), stream.read_to_end(&mut read)).await;
    end.with_context(|| format!("no end after {} bytes", read.len()))??;
    let wrong = || read.iter().zip(all).position(|(came, said)| came != said);
    ensure!(
        read == all,
        "{} bytes came, the first wrong one is {:?}",
        read.len(),
        wrong()
    );
    Ok(())
}

/// Connections on which neither side makes room for the other's data.
struct Full {
    pod: Pod,
    all: Vec<u8>,
    /// Connection that the program does not read.
    to: TcpStream,
    /// Bytes of `all` that this machine's kernel has taken for `to`.
    taken: usize,
    /// Connections to which the program writes, and which the test does not read.
    from: [TcpStream; 2],
}

/// Starts the Pod and waits until its program listens.
async fn started(case: &Case) -> anyhow::Result<Pod> {
    let env = json!([{ "name": "WORDS", "value": WORDS.to_string() }]);
    let container = with(python("a", FULL), json!({ "env": env }));
    let pod = case
        .start(pod("p", json!({ "containers": [container] })))
        .await?;
    wait::until("it listens", LIMIT, async || {
        let report = answer(&pod, b'?').await;
        Ok(report.map_err(|error| format!("{error:#}")))
    })
    .await?;
    Ok(pod)
}

/// Returns all words of one direction of a connection.
fn all() -> Vec<u8> {
    (0..WORDS).flat_map(u64::to_ne_bytes).collect()
}

/// Waits until the program has found no room for more on `connections` connections.
async fn has_no_room(pod: &Pod, connections: usize) -> anyhow::Result<()> {
    wait::until("the program has no room", LIMIT, async || {
        let written: Vec<Written> = serde_json::from_str(&answer(pod, b'?').await?)?;
        let waits = |written: &Written| written.waits && written.bytes < all().len();
        let full = written.len() == connections && written.iter().all(waits);
        wait::holds(full, || format!("{written:?}"))
    })
    .await
}

impl Full {
    async fn begin(case: &Case) -> anyhow::Result<Self> {
        let (pod, all) = (started(case).await?, all());
        // The order matters: a Pod that received data last is assumed to owe an answer, and is
        // woken as soon as it sleeps.
        let to = connect(&pod, b'r').await?;
        let taken = fill(&to, &all).await?;
        let from = [connect(&pod, b'w').await?, connect(&pod, b'w').await?];
        has_no_room(&pod, from.len()).await?;
        Ok(Self {
            pod,
            all,
            to,
            taken,
            from,
        })
    }

    /// Withdraws the annotation by which the Pod fell asleep; then both sides read, and all data
    /// must arrive once and in order.
    async fn flows(self, case: &Case, asleep_by: &str) -> anyhow::Result<()> {
        let Self {
            pod,
            all,
            mut to,
            taken,
            from: [mut early, late],
        } = self;
        // The window of `early` opens while the Pod sleeps, unless the peer that asks for room has
        // woken the Pod. The window of `late` opens after the wake.
        let mut read = vec![0; usize::try_from(rustix::io::ioctl_fionread(&early)?)?];
        ensure!(!read.is_empty(), "nothing has come from the program");
        early.read_exact(&mut read).await?;
        case.annotate("p", asleep_by, None).await?;
        case.wake("p").await?;
        answer(&pod, b'!').await?;
        let write = async {
            to.write_all(&all[taken..]).await?;
            to.shutdown().await?;
            let mut report = String::new();
            to.read_to_string(&mut report).await?;
            let report: Read = serde_json::from_str(&report)?;
            let whole = Read {
                bytes: all.len(),
                wrong: None,
            };
            ensure!(report == whole, "the program has read {report:?}");
            anyhow::Ok(())
        };
        let write = async {
            let written = tokio::time::timeout(wait::scaled(LIMIT), write).await;
            written.context("the program does not read to the end")?
        };
        tokio::try_join!(
            write,
            read_all(early, read, &all),
            read_all(late, Vec::new(), &all)
        )?;
        ensure!(
            restarts(&case.pods().get("p").await?) == 0,
            "a container was restarted"
        );
        Ok(())
    }
}

#[tokio::test]
async fn data_behind_closed_windows_arrives_after_hibernation() -> anyhow::Result<()> {
    case("window", async |case| {
        let full = Full::begin(case).await?;
        let uid = uid(&full.pod);
        let (sentry, awake) = (case.node.sentry(&uid)?, case.node.ledger_seq(&uid)?);
        case.annotate("p", HIBERNATE, Some("true")).await?;
        // Begun, committed, asleep. The Pod's condition may never show sleep: its keeper answers a
        // peer that asks for room, and gets data from the peer, which wakes the Pod.
        wait::until("it falls asleep", SLEEP_LIMIT, async || {
            let entries = case.node.ledger_seq(&uid)? - awake;
            wait::holds(entries >= 3, || format!("{entries} entries"))
        })
        .await?;
        full.flows(case, HIBERNATE).await?;
        ensure!(
            case.node.sentry(&uid)? != sentry,
            "it was not restored from an image"
        );
        Ok(())
    })
    .await
}

#[tokio::test]
async fn data_behind_closed_windows_arrives_after_a_doze() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("dozewindow", async |case| {
        let full = Full::begin(case).await?;
        case.annotate("p", DOZE_AFTER, Some("3s")).await?;
        case.dozes("p").await?;
        full.flows(case, DOZE_AFTER).await
    })
    .await
}

/// Only the client that reads on after a break wakes the Pod, and its packet says only that there
/// is room again.
#[tokio::test]
async fn a_client_that_reads_on_after_a_break_gets_the_rest_from_a_hibernated_pod()
-> anyhow::Result<()> {
    case("readson", async |case| {
        let pod = started(case).await?;
        let from = connect(&pod, b'w').await?;
        has_no_room(&pod, 1).await?;
        case.hibernate("p").await?;
        // In the first second the packet could be a late acknowledgement: see Limits in
        // docs/guarantees.md.
        let sandbox = case.node.sandbox_of(&uid(&pod))?.sandbox;
        wait::until("it has slept for a second", LIMIT, async || {
            let since = case.node.records.asleep_since(&sandbox);
            let slept = since.and_then(|since| since.elapsed().ok());
            let long = slept.is_some_and(|slept| slept > Duration::from_secs(1));
            wait::holds(long, || format!("{slept:?}"))
        })
        .await?;
        read_all(from, Vec::new(), &all()).await
    })
    .await
}

#[tokio::test]
async fn a_client_that_reads_on_after_a_break_gets_the_rest_from_a_dozing_pod() -> anyhow::Result<()>
{
    let _swap = Swap::on()?;
    case("dozereadson", async |case| {
        let pod = started(case).await?;
        let from = connect(&pod, b'w').await?;
        has_no_room(&pod, 1).await?;
        case.annotate("p", DOZE_AFTER, Some("3s")).await?;
        case.dozes("p").await?;
        read_all(from, Vec::new(), &all()).await
    })
    .await
}
