//! Time of a resume on the node that holds the image, and on another node that fetches it: from
//! that node, if it serves its images, else from an S3 server. Beside it the bare transfer of as
//! many bytes from the S3 server by the same client.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Args;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use serde_json::json;
use torpor_api::annotations::SNAPSHOT_CLASS;
use torpor_api::snapshot::Upload;
use torpor_tests::case::{Case, node_of};
use torpor_tests::pods::PYTHON;
use torpor_tests::two_nodes::{ENDPOINT, nodes_serve_images, on_both};
use torpor_tests::{sandboxes, wait};

use crate::{node, setup, stats::Times, stop::Stop, table};

const NAMESPACE: &str = "torpor-bench-elsewhere";
/// Time limit of an upload.
const UPLOADED: Duration = Duration::from_secs(120);

/// Holds random memory, answers each connection, and changes a fiftieth of it on demand.
const PROGRAM: &str = r#"
import os, socket, sys
held = bytearray(os.urandom(int(sys.argv[1]) << 20)); part = len(held) // 50
s = socket.create_server(("", 8080), backlog=64)
while True:
  c, _ = s.accept(); d = c.recv(100)
  if d == b"change": held[:part] = os.urandom(part)
  c.sendall(d); c.close()"#;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Rounds, each with a resume on either node
    #[arg(default_value_t = 5)]
    rounds: usize,
    /// Memory of the sandbox in MiB
    #[arg(long, default_value_t = 100)]
    megabytes: u32,
}

pub(crate) async fn run(options: &Options, stop: &mut Stop) -> anyhow::Result<()> {
    setup::namespaced(NAMESPACE, stop, async |case| {
        let from = match nodes_serve_images(case).await? {
            true => "the node that holds them",
            false => "the S3 server",
        };
        println!(
            "{} rounds with {} MiB, images from {from}, {}",
            options.rounds,
            options.megabytes,
            node::describe()?
        );
        on_both(case, async || measure(case, options).await).await
    })
    .await
}

/// Times and sizes of all rounds.
#[derive(Default)]
struct Figures {
    here: Vec<Duration>,
    elsewhere: Vec<Duration>,
    bare: Vec<Duration>,
    uploads: Vec<Duration>,
    /// Share of the image that the upload after a change of 2 percent sent.
    changed: Vec<f64>,
    sent: i64,
}

async fn measure(case: &Case, options: &Options) -> anyhow::Result<()> {
    let megabytes = options.megabytes.to_string();
    let container = json!({
        "name": setup::MAIN, "image": PYTHON, "imagePullPolicy": "Never",
        "command": ["python3", "-c", PROGRAM, megabytes],
    });
    let mut sandbox = sandboxes::sandbox("s", json!({ "containers": [container] }));
    sandbox["metadata"]["annotations"] = json!({ SNAPSHOT_CLASS: NAMESPACE });
    case.create(sandbox).await?;
    let mut pod = case.sandbox_ready("s").await?;
    answers(&pod).await?;
    let s3 = AmazonS3Builder::new()
        .with_url("s3://torpor")
        .with_endpoint(ENDPOINT)
        .with_region("us-east-1")
        .with_allow_http(true)
        .with_access_key_id("torpor-dev")
        .with_secret_access_key("torpor-dev-secret")
        .build()?;
    let mut figures = Figures::default();
    for _ in 0..options.rounds {
        // The image's own node.
        let first = suspend(case, &mut figures).await?;
        figures.sent = figures.sent.max(first.sent_bytes);
        let (next, took) = resume(case).await?;
        ensure!(
            node_of(&next) == node_of(&pod),
            "it resumed on another node"
        );
        figures.here.push(took);
        // Another node, after a small change.
        ask(&next, b"change").await?;
        let second = suspend(case, &mut figures).await?;
        figures
            .changed
            .push(second.sent_bytes as f64 / second.total_bytes as f64);
        let here = node_of(&next);
        case.cordon(&here, true).await?;
        let (moved, took) = resume(case).await?;
        case.cordon(&here, false).await?;
        ensure!(node_of(&moved) != here, "it resumed on the same node");
        figures.elsewhere.push(took);
        figures.bare.push(transfer(&s3, figures.sent).await?);
        pod = moved;
    }
    print(&figures);
    Ok(())
}

/// Suspends the Sandbox and waits for the upload.
async fn suspend(case: &Case, figures: &mut Figures) -> anyhow::Result<Upload> {
    case.suspend("s").await?;
    let began = Instant::now();
    let upload = wait::until("the image is uploaded", UPLOADED, async || {
        let all = case.snapshots().list(&ListParams::default()).await?;
        let uploaded = all.items.into_iter().find(|one| one.is_uploaded());
        let upload = uploaded.and_then(|one| one.status?.upload);
        Ok(upload.ok_or_else(|| "not yet".to_owned()))
    })
    .await?;
    figures.uploads.push(began.elapsed());
    Ok(upload)
}

/// Time until the program serves.
const SERVES: Duration = Duration::from_secs(60);

/// Resumes the Sandbox; returns its Pod and the time until the program answered.
async fn resume(case: &Case) -> anyhow::Result<(Pod, Duration)> {
    let began = Instant::now();
    let pod = case.run("s").await?;
    answers(&pod).await?;
    Ok((pod, began.elapsed()))
}

/// Waits until the program answers.
pub(crate) async fn answers(pod: &Pod) -> anyhow::Result<()> {
    wait::until("the program answers", SERVES, async || {
        Ok(ask(pod, b"x").await.map_err(|error| error.to_string()))
    })
    .await
}

pub(crate) async fn ask(pod: &Pod, question: &[u8]) -> anyhow::Result<()> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let address = pod.status.as_ref().and_then(|status| status.pod_ip.clone());
    let address = address.context("the Pod has no address")?;
    let mut stream = tokio::net::TcpStream::connect((address, 8080)).await?;
    stream.write_all(question).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    ensure!(answer == question, "the program answered {answer:?}");
    Ok(())
}

/// Returns the time to fetch one object of this size.
async fn transfer(s3: &AmazonS3, bytes: i64) -> anyhow::Result<Duration> {
    let path = Path::from(format!("{NAMESPACE}/bare"));
    let content = vec![7; usize::try_from(bytes)?];
    s3.put(&path, PutPayload::from(content)).await?;
    let began = Instant::now();
    let fetched = s3.get(&path).await?.bytes().await?;
    let took = began.elapsed();
    ensure!(
        fetched.len() as i64 == bytes,
        "{} bytes were fetched",
        fetched.len()
    );
    s3.delete(&path).await?;
    Ok(took)
}

fn print(figures: &Figures) {
    let here = Times::of(&figures.here);
    let elsewhere = Times::of(&figures.elsewhere);
    let bare = Times::of(&figures.bare);
    println!(
        "{}",
        table::row(
            "resume on the image's own node, until it answers",
            &here,
            &here
        )
    );
    println!(
        "{}",
        table::row("resume on the other node", &elsewhere, &here)
    );
    println!(
        "{}",
        table::row(
            "bare transfer of the bytes of the first upload",
            &bare,
            &here
        )
    );
    let sum = here.p50 + bare.p50;
    let words = "other node, of own node and bare transfer together";
    println!("{}", table::value(words, elsewhere.p50 / sum, "x", None));
    let uploads = Times::of(&figures.uploads);
    println!(
        "{}",
        table::row("upload, from the end of the Pod", &uploads, &here)
    );
    let changed = figures.changed.iter().sum::<f64>() / figures.changed.len().max(1) as f64;
    println!(
        "{}",
        table::value(
            "sent after a change of 2 percent",
            100.0 * changed,
            "percent",
            None
        )
    );
}
