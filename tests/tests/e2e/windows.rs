//! Connections whose windows are closed when the Pod falls asleep: each side has more to say than the other makes room for.

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

/// Who has found no room tries again after a time that doubles: he may come back after as long again as there was none.
const LIMIT: Duration = Duration::from_secs(60);

/// What is said in either direction of a full connection: the numbers from 0 on, eight bytes each. More than the buffers on its way hold, so that each side has more to say in the end.
const WORDS: u64 = 1 << 20;

/// By a connection's first byte: reads all that follows once it may (`r`), lets all of these read (`!`), writes all that it has (`w`), or tells how far it has come with that (`?`).
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
                # From here on it stands still until there is room: a program that tries again and again is not idle.
                now['waits'] = True
                self.request.settimeout(None)
        self.request.shutdown(socket.SHUT_WR)
        self.request.recv(1)
    def tell(self, what):
        self.request.sendall(json.dumps(what).encode())
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
Server(('', 8080), Peer).serve_forever()";

/// What the program has read to the end of a connection.
#[derive(Debug, PartialEq, Eq, Deserialize)]
struct Read {
    bytes: usize,
    /// Where the first part begins in which something else came than was to come.
    wrong: Option<usize>,
}

/// What the program has written to a connection.
#[derive(Debug, Deserialize)]
struct Written {
    bytes: usize,
    /// For a second there was no room for more.
    waits: bool,
}

/// A connection on which the program does what the byte says.
async fn wish(pod: &Pod, wish: u8) -> anyhow::Result<TcpStream> {
    let connected = TcpStream::connect((witness::address(pod)?, witness::PORT));
    let connected = tokio::time::timeout(wait::scaled(LIMIT), connected).await;
    let mut stream = connected.context("no connection in time")??;
    stream.write_all(&[wish]).await?;
    Ok(stream)
}

/// All that the program says to that.
async fn answer(pod: &Pod, to: u8) -> anyhow::Result<String> {
    let mut stream = wish(pod, to).await?;
    let mut answer = String::new();
    let read = tokio::time::timeout(wait::scaled(LIMIT), stream.read_to_string(&mut answer)).await;
    read.context("no answer in time")??;
    Ok(answer)
}

/// The timer of a socket whose peer has no room for more: nothing of it is on its way, and when the timer has run down it asks for room (proc_net_tcp.rst in Linux' documentation).
const ASKS_FOR_ROOM: &str = "04";

/// Which timer this machine's kernel has set for its end of a connection; empty if it was not found.
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

/// Writes until the reader's window is closed and this machine's kernel takes no more; answers how much it has taken.
async fn fill(stream: &TcpStream, all: &[u8]) -> anyhow::Result<usize> {
    // However much the kernel likes to take.
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
        let full = taken == before && timer == ASKS_FOR_ROOM;
        wait::holds(full, || format!("{taken} bytes, timer {timer:?}"))
    })
    .await?;
    Ok(taken)
}

/// Reads to the end, after what was read before, and sees that it is all and nothing else.
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

/// Connections on which nobody makes room for what the other side has to say.
struct Full {
    pod: Pod,
    all: Vec<u8>,
    /// The program does not read it.
    to: TcpStream,
    /// So much of `all` has this machine's kernel taken for that one.
    taken: usize,
    /// The program writes to them, and nobody reads.
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
        let told = answer(&pod, b'?').await;
        Ok(told.map_err(|error| format!("{error:#}")))
    })
    .await?;
    Ok(pod)
}

/// Everything that there is to be said on a connection.
fn all() -> Vec<u8> {
    (0..WORDS).flat_map(u64::to_ne_bytes).collect()
}

/// Waits until the program has found no room for more on so many connections.
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
        // In this order: a Pod that has heard data last is taken for one that owes an answer, and is woken as soon as it sleeps.
        let to = wish(&pod, b'r').await?;
        let taken = fill(&to, &all).await?;
        let from = [wish(&pod, b'w').await?, wish(&pod, b'w').await?];
        has_no_room(&pod, from.len()).await?;
        Ok(Self {
            pod,
            all,
            to,
            taken,
            from,
        })
    }

    /// The Pod has fallen asleep by the annotation, which is taken back. Everybody reads, and all that was to be said has come once and in order.
    async fn flows(self, case: &Case, asleep_by: &str) -> anyhow::Result<()> {
        let Self {
            pod,
            all,
            mut to,
            taken,
            from: [mut early, late],
        } = self;
        // That there is room again is said to a Pod that sleeps, unless the peer that asks it for room has woken it. On the other connection it is said to one that has woken.
        let mut read = vec![0; usize::try_from(rustix::io::ioctl_fionread(&early)?)?];
        ensure!(!read.is_empty(), "nothing has come from the program");
        early.read_exact(&mut read).await?;
        case.annotate("p", asleep_by, None).await?;
        case.wake("p").await?;
        answer(&pod, b'!').await?;
        let write = async {
            to.write_all(&all[taken..]).await?;
            to.shutdown().await?;
            let mut told = String::new();
            to.read_to_string(&mut told).await?;
            let told: Read = serde_json::from_str(&told)?;
            let whole = Read {
                bytes: all.len(),
                wrong: None,
            };
            ensure!(told == whole, "the program has read {told:?}");
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
async fn what_waits_behind_closed_windows_comes_after_hibernation() -> anyhow::Result<()> {
    case("window", async |case| {
        let full = Full::begin(case).await?;
        let uid = uid(&full.pod);
        let (sentry, awake) = (case.node.sentry(&uid)?, case.node.ledger_seq(&uid)?);
        case.annotate("p", HIBERNATE, Some("true")).await?;
        // Begun, committed, asleep. The Pod itself may never say that it sleeps: its keeper answers a peer that asks for room, and is sent data by it, which wakes.
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
async fn what_waits_behind_closed_windows_comes_after_a_doze() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("dozewindow", async |case| {
        let full = Full::begin(case).await?;
        case.annotate("p", DOZE_AFTER, Some("3s")).await?;
        case.dozes("p").await?;
        full.flows(case, DOZE_AFTER).await
    })
    .await
}

/// Nobody wakes the Pod but who reads on after a break, and says only that there is room again.
#[tokio::test]
async fn who_reads_on_after_a_break_gets_the_rest_from_a_hibernated_pod() -> anyhow::Result<()> {
    case("readson", async |case| {
        let pod = started(case).await?;
        let from = wish(&pod, b'w').await?;
        has_no_room(&pod, 1).await?;
        case.hibernate("p").await?;
        // In the first second it could be a late acknowledgement: see Limits in docs/guarantees.md.
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
async fn who_reads_on_after_a_break_gets_the_rest_from_a_dozing_pod() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("dozereadson", async |case| {
        let pod = started(case).await?;
        let from = wish(&pod, b'w').await?;
        has_no_room(&pod, 1).await?;
        case.annotate("p", DOZE_AFTER, Some("3s")).await?;
        case.dozes("p").await?;
        read_all(from, Vec::new(), &all()).await
    })
    .await
}
