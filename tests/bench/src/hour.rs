//! Connections that go on after a long silence: WebSockets, every other one with TCP keepalives,
//! and SSH to a Pod that hibernates. Fails if a connection is lost or the Pod wakes meanwhile.

use std::{
    fs,
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use rustix::net::sockopt;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    process::{Child, ChildStdin, ChildStdout, Command},
};
use torpor_api::conditions::POD_HIBERNATED;
use torpor_tests::{
    case::Case,
    pods::{self, PYTHON, mounts},
    repository,
    sleep::restarts,
    websocket::WebSocket,
};

use crate::{setup, sleeper::PORT, stop::Stop};

const NAMESPACE: &str = "torpor-bench-hour";
const IMAGE: &str = "torpor.dev/bench-ssh:dev";
const POD: &str = "hour";
/// Port of the Pod's SSH server.
const SSH: u16 = 2222;
/// Time for an answer.
const LIMIT: Duration = Duration::from_secs(60);
/// Time after which a Pod that a late packet has woken sleeps again.
const SETTLE: Duration = Duration::from_secs(20);
/// Keepalives as programs in Go and many proxies send them: seconds until the first, seconds
/// between two, and how many.
const KEEPALIVES: [u32; 3] = [15, 15, 9];
/// Answers as the demo's program does over a WebSocket: each line with its number on this
/// connection.
const ECHO: &str = r#"n=0; while read -r line; do n=$((n + 1)); echo "$n $line"; done"#;
/// Files of the program that answers WebSockets.
const PROGRAM: [&str; 2] = ["holder.py", "websocket.py"];

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Seconds of silence
    #[arg(default_value_t = 3600)]
    seconds: u64,
    /// Connections
    #[arg(default_value_t = 20)]
    connections: usize,
}

pub(crate) async fn run(options: &Options, stop: &mut Stop) -> anyhow::Result<()> {
    stop.unless(load_image()).await?;
    setup::namespaced(NAMESPACE, stop, async |case| {
        case.create(program()?).await?;
        setup::start(case, vec![pod()]).await?;
        measure(case, options).await
    })
    .await
}

/// Builds the image with an SSH server, and loads it into the node.
///
/// Root logs in without a password: the Pod exists for this run alone and has no data.
async fn load_image() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (passwd, image) = (dir.path().join("passwd"), dir.path().join("ssh.tar"));
    fs::write(&passwd, "root::0:0:root:/:/bin/sh\n")?;
    let hack = repository().join("hack");
    let file = format!("{}:etc/passwd", passwd.display());
    let mut build = Command::new(hack.join("image"));
    build.args(["debian", IMAGE]).arg(&image);
    build.args(["--packages", "dropbear-bin,busybox-static", &file]);
    let mut load = Command::new(hack.join("cluster"));
    load.arg("load-image").arg(&image);
    for mut command in [build, load] {
        let status = command.kill_on_drop(true).status().await?;
        ensure!(status.success(), "{command:?}: {status}");
    }
    Ok(())
}

fn program() -> anyhow::Result<Value> {
    let dir = repository().join("hack/demo");
    let read = |name: &&str| {
        let path: &Path = &dir.join(name);
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        anyhow::Ok(((*name).to_owned(), Value::from(text)))
    };
    let files = PROGRAM
        .iter()
        .map(read)
        .collect::<anyhow::Result<serde_json::Map<_, _>>>()?;
    Ok(json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "program"}, "data": files,
    }))
}

fn pod() -> Value {
    let probe = |port: u16| json!({"tcpSocket": {"port": port}, "periodSeconds": 1, "failureThreshold": 60});
    let volumes = [
        ("program", "/program"),
        ("data", "/data"),
        ("scratch", "/scratch"),
    ];
    pods::pod(
        POD,
        json!({
            "containers": [
                {
                    "name": "websocket", "image": PYTHON, "imagePullPolicy": "Never",
                    "command": ["python3", "/program/holder.py"],
                    "startupProbe": probe(PORT), "volumeMounts": mounts(&volumes),
                },
                {
                    "name": "ssh", "image": IMAGE, "imagePullPolicy": "Never",
                    "command": ["sh", "-c", "mkdir -p /etc/dropbear && exec dropbear -F -E -R -B -p 2222"],
                    "startupProbe": probe(SSH),
                },
            ],
            "volumes": [
                {"name": "program", "configMap": {"name": "program"}},
                {"name": "data", "emptyDir": {}},
                {"name": "scratch", "emptyDir": {}},
            ],
        }),
    )
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    WebSocket,
    WithKeepalives,
    Ssh,
}

const KINDS: [Kind; 3] = [Kind::WebSocket, Kind::WithKeepalives, Kind::Ssh];

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::WebSocket => "WebSocket",
            Self::WithKeepalives => "WebSocket with keepalives",
            Self::Ssh => "SSH",
        }
    }
}

#[derive(Debug)]
enum Connection {
    WebSocket(WebSocket),
    Ssh {
        input: ChildStdin,
        output: BufReader<ChildStdout>,
        /// Killed at the end.
        _process: Child,
    },
}

impl Connection {
    async fn open(kind: Kind, address: &str) -> anyhow::Result<Self> {
        if kind == Kind::Ssh {
            return Self::ssh(address);
        }
        let stream = TcpStream::connect((address, PORT)).await?;
        if kind == Kind::WithKeepalives {
            let [idle, interval, count] = KEEPALIVES;
            let seconds = |number: u32| Duration::from_secs(u64::from(number));
            sockopt::set_tcp_keepidle(&stream, seconds(idle))?;
            sockopt::set_tcp_keepintvl(&stream, seconds(interval))?;
            sockopt::set_tcp_keepcnt(&stream, count)?;
            sockopt::set_socket_keepalive(&stream, true)?;
        }
        let host = format!("{address}:{PORT}");
        Ok(Self::WebSocket(
            WebSocket::open(stream, &host, "/echo").await?,
        ))
    }

    fn ssh(address: &str) -> anyhow::Result<Self> {
        let options = [
            "BatchMode=yes",
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "LogLevel=ERROR",
        ];
        let mut process = Command::new("ssh")
            .args(["-T", "-F", "/dev/null", "-p", &SSH.to_string()])
            .args(options.iter().flat_map(|option| ["-o", option]))
            .args([&format!("root@{address}"), ECHO])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("ssh is missing (Debian package openssh-client)")?;
        Ok(Self::Ssh {
            input: process.stdin.take().context("no pipe")?,
            output: BufReader::new(process.stdout.take().context("no pipe")?),
            _process: process,
        })
    }

    /// Sends a text and returns the answer.
    async fn exchange(&mut self, text: &str) -> anyhow::Result<String> {
        match self {
            Self::WebSocket(socket) => {
                socket.send(text).await?;
                socket.receive().await
            }
            Self::Ssh { input, output, .. } => {
                input.write_all(format!("{text}\n").as_bytes()).await?;
                input.flush().await?;
                let mut line = String::new();
                output.read_line(&mut line).await?;
                Ok(line.trim().to_owned())
            }
        }
    }

    /// Sends a text, which must come back with its number; returns the time of the answer.
    async fn check(&mut self, kind: Kind, text: &str, number: u32) -> anyhow::Result<Duration> {
        let begin = Instant::now();
        let answer = tokio::time::timeout(LIMIT, self.exchange(text)).await;
        let took = begin.elapsed();
        let answer = answer.with_context(|| format!("{}: no answer", kind.name()))?;
        let answer = answer.with_context(|| kind.name())?;
        let expected = format!("{number} {text}");
        ensure!(answer == expected, "{}: {answer:?} came", kind.name());
        Ok(took)
    }
}

async fn measure(case: &Case, options: &Options) -> anyhow::Result<()> {
    let pod = case.pods().get(POD).await?;
    let address = pod
        .status
        .and_then(|status| status.pod_ip)
        .context("no address")?;
    let kinds: Vec<Kind> = KINDS
        .into_iter()
        .cycle()
        .take(options.connections)
        .collect();
    let mut connections = Vec::new();
    for (number, &kind) in kinds.iter().enumerate() {
        let mut connection = Connection::open(kind, &address).await?;
        connection
            .check(kind, &format!("before-{number}"), 1)
            .await?;
        connections.push(connection);
    }
    let asleep = hibernate(case).await?;
    let count = |kind: Kind| kinds.iter().filter(|one| **one == kind).count();
    let of_each = KINDS
        .map(|kind| format!("{} {}", count(kind), kind.name()))
        .join(", ");
    println!(
        "{} connections ({of_each}) to a Pod that hibernates; silence for {} s from {:.0} on",
        kinds.len(),
        options.seconds,
        jiff::Timestamp::now()
    );
    // The silence is what is measured.
    tokio::time::sleep(Duration::from_secs(options.seconds)).await;
    let mut faults = Vec::new();
    let now = hibernated(&case.pods().get(POD).await?);
    if now == asleep && now.0 == "True" {
        println!("it has slept all the time, since {}", now.1);
    } else {
        faults.push(format!("the Pod was woken: {asleep:?}, then {now:?}"));
    }
    faults.extend(speak(&kinds, &mut connections).await);
    let restarts = restarts(&case.pods().get(POD).await?);
    if restarts > 0 {
        faults.push(format!("{restarts} restarts"));
    }
    for fault in &faults {
        println!("WRONG: {fault}");
    }
    if faults.is_empty() {
        Ok(())
    } else {
        bail!("{} faults", faults.len())
    }
}

/// Uses all connections at once, prints the times of their answers, and returns the faults.
async fn speak(kinds: &[Kind], connections: &mut [Connection]) -> Vec<String> {
    let checks = kinds.iter().zip(connections).enumerate();
    let checks = checks.map(|(number, (kind, connection))| async move {
        connection.check(*kind, &format!("after-{number}"), 2).await
    });
    let (mut times, mut faults) = (Vec::new(), Vec::new());
    for checked in join_all(checks).await {
        match checked {
            Ok(took) => times.push(took),
            Err(error) => faults.push(format!("{error:#}")),
        }
    }
    if let (Some(first), Some(last)) = (times.iter().min(), times.iter().max()) {
        println!(
            "{} of {} go on: the first answer came after {} ms, the last after {} ms",
            times.len(),
            kinds.len(),
            first.as_millis(),
            last.as_millis()
        );
    }
    faults
}

/// Hibernates the Pod; returns its condition once it stays asleep.
async fn hibernate(case: &Case) -> anyhow::Result<(String, String)> {
    case.hibernate(POD).await?;
    // A packet may have been on its way, which wakes the Pod once more.
    tokio::time::sleep(SETTLE).await;
    Ok(hibernated(&case.asleep(POD).await?))
}

/// Returns status and last transition of the condition that shows whether the Pod sleeps.
fn hibernated(pod: &Pod) -> (String, String) {
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    let found = conditions.find(|condition| condition.type_ == POD_HIBERNATED);
    let since = |time: &k8s_openapi::apimachinery::pkg::apis::meta::v1::Time| time.0.to_string();
    found.map_or_else(Default::default, |condition| {
        let transition = condition.last_transition_time.as_ref();
        (
            condition.status.clone(),
            transition.map(since).unwrap_or_default(),
        )
    })
}
