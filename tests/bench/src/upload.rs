//! Time of a wake while the node's agent uploads an image to an S3 server, beside the same wake
//! without an upload.

use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use torpor_api::SandboxSnapshot;
use torpor_api::annotations::HIBERNATE;
use torpor_tests::case::Case;
use torpor_tests::pods::PYTHON;
use torpor_tests::two_nodes::with_class;
use torpor_tests::{sandboxes, wait};

use crate::elsewhere::{answers, ask};
use crate::sleeper::{PAUSE, Sleep, Sleeper};
use crate::stats::Times;
use crate::{node, setup, stop::Stop, table};

const NAMESPACE: &str = "torpor-bench-upload";
/// Number of sandboxes that are woken in each round.
const SMALL: usize = 4;
/// Time for the sandboxes to fall asleep.
const ASLEEP: Duration = Duration::from_secs(60);
/// Time for an image to be saved, and to be uploaded.
const SAVED: Duration = Duration::from_secs(120);

/// Holds random memory that a line "fresh" renews, and answers each connection.
const PROGRAM: &str = r#"
import os, socket, sys
size = int(sys.argv[1]) << 20; held = bytearray(os.urandom(size))
s = socket.create_server(("", 8080), backlog=64)
open("/tmp/ready", "w").close()
while True:
  c, _ = s.accept(); d = c.recv(100)
  if d == b"fresh": held[:] = os.urandom(size)
  c.sendall(d); c.close()"#;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Rounds, each with four wakes without an upload and four beside one
    #[arg(default_value_t = 8)]
    rounds: usize,
    /// Memory of the sandbox whose image is uploaded, in MiB: an upload is to last longer than
    /// four wakes
    #[arg(long, default_value_t = 600)]
    megabytes: u32,
}

pub(crate) async fn run(options: &Options, stop: &mut Stop) -> anyhow::Result<()> {
    setup::namespaced(NAMESPACE, stop, async |case| {
        println!(
            "{} rounds, an image of {} MiB, {}",
            options.rounds,
            options.megabytes,
            node::describe()?
        );
        with_class(case, async || measure(case, options).await).await
    })
    .await
}

async fn measure(case: &Case, options: &Options) -> anyhow::Result<()> {
    let megabytes = options.megabytes.to_string();
    let large = json!({
        "name": setup::MAIN, "image": PYTHON, "imagePullPolicy": "Never",
        "command": ["python3", "-c", PROGRAM, megabytes],
    });
    let large = sandboxes::sandbox("large", json!({ "containers": [large] }));
    case.create(large).await?;
    let large = case.sandbox_ready("large").await?;
    answers(&large).await?;
    let small = |number| {
        let command = ["python3", "-c", PROGRAM, "1"];
        let name = format!("small-{number}");
        setup::pod(&name, PYTHON, &command, setup::ready_file())
    };
    setup::start(case, (1..=SMALL).map(small).collect()).await?;
    let mut small = Sleeper::all(case).await?;
    small.retain(|name, _| name.starts_with("small"));
    let small: Vec<Sleeper> = small.into_values().collect();
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for round in 0..options.rounds {
        hibernate(case, &small).await?;
        for pod in &small {
            alone.push(pod.exchange(b"x").await?);
            tokio::time::sleep(PAUSE).await;
        }
        request(case, &small, None).await?;
        hibernate(case, &small).await?;
        beside.extend(beside_upload(case, &large, &small, round).await?);
        request(case, &small, None).await?;
    }
    ensure!(!beside.is_empty(), "each upload was over before a wake");
    let base = Times::of(&alone);
    println!("{}", table::row("wakes without an upload", &base, &base));
    let words = format!("{} wakes beside an upload", beside.len());
    println!("{}", table::row(&words, &Times::of(&beside), &base));
    Ok(())
}

/// Puts the sandboxes to sleep.
async fn hibernate(case: &Case, pods: &[Sleeper]) -> anyhow::Result<()> {
    request(case, pods, Some("true")).await?;
    Sleep::Hibernated.until(pods, ASLEEP).await
}

/// Requests that the sandboxes sleep, or withdraws the request.
async fn request(case: &Case, pods: &[Sleeper], value: Option<&str>) -> anyhow::Result<()> {
    for pod in pods {
        case.annotate(&pod.name, HIBERNATE, value).await?;
    }
    Ok(())
}

/// Wakes the sandboxes while an image is being uploaded; returns the times of the wakes that were
/// over before the upload was.
async fn beside_upload(
    case: &Case,
    large: &Pod,
    pods: &[Sleeper],
    round: usize,
) -> anyhow::Result<Vec<Duration>> {
    ask(large, b"fresh").await?;
    let name = format!("round-{round}");
    case.create(json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
        "metadata": { "name": name },
        "spec": { "sandboxName": "large", "snapshotClassName": NAMESPACE },
    }))
    .await?;
    until(case, &name, "the image is saved", |snapshot| {
        snapshot.is_committed()
    })
    .await?;
    let mut times = Vec::new();
    for pod in pods {
        let took = pod.exchange(b"x").await?;
        if case.snapshots().get(&name).await?.is_uploaded() {
            break;
        }
        times.push(took);
        tokio::time::sleep(PAUSE).await;
    }
    until(case, &name, "the image is uploaded", |snapshot| {
        snapshot.is_uploaded()
    })
    .await?;
    Ok(times)
}

async fn until(
    case: &Case,
    name: &str,
    words: &str,
    is_so: fn(&SandboxSnapshot) -> bool,
) -> anyhow::Result<()> {
    wait::object(case.snapshots(), name, words, SAVED, |found| {
        let snapshot = found.ok_or_else(|| "it is gone".to_owned())?;
        is_so(&snapshot)
            .then_some(())
            .ok_or_else(|| format!("{:?}", snapshot.conditions()))
    })
    .await
}
