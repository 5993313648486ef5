//! Cost of a hibernated sandbox and time of its wake, beside bare runsc on the same machine.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use clap::Args;
use serde_json::{Value, json};
use torpor_api::annotations::HIBERNATE;
use torpor_tests::{
    case::Case,
    pods::{BUSYBOX, PYTHON},
    wait,
};

use crate::{
    node,
    runsc::{Runsc, Spec},
    setup::{self, MAIN},
    sleeper::Sleeper,
    stats::Times,
    stop::Stop,
    table,
};

mod creates;
mod remaining;
mod saves;

const NAMESPACE: &str = "torpor-bench";
/// Name of bare runsc's container.
const BARE: &str = "bare";
/// Command of a small sandbox.
const IDLE: [&str; 3] = ["sh", "-c", "while :; do sleep 1000; done"];
/// Command of a sandbox with 100 MB.
const FULL: [&str; 3] = [
    "python3",
    "-c",
    "import os,time; block = os.urandom(100 << 20); print(1, flush=True); time.sleep(1e9)",
];
/// Memory in bytes at which the program of [`FULL`] has its block.
const FULL_BYTES: u64 = 100_000_000;
/// Time for a program to have its memory.
const FILLED: Duration = Duration::from_secs(60);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Wakes of each kind, and Pods and Sandboxes that are created
    #[arg(default_value_t = 20)]
    runs: usize,
    /// Hibernated Pods beside the first, over which memory and processor time are divided
    #[arg(long, default_value_t = 19)]
    sleepers: usize,
}

pub(crate) async fn run(options: &Options, stop: &mut Stop) -> anyhow::Result<()> {
    setup::namespaced(NAMESPACE, stop, async |case| {
        let full = setup::pod("large", PYTHON, &FULL, json!({}));
        setup::start(case, vec![idle("small"), full]).await?;
        wait::until("the program has its memory", FILLED, async || {
            wait::holds(case.log("large", MAIN).await? == "1", String::new)
        })
        .await?;
        println!("{} runs each, {}", options.runs, node::describe()?);
        let small = Subject {
            pod: "small",
            words: "small",
            command: &IDLE,
            bytes: 0,
        };
        wakes(case, options.runs, &small).await?;
        let large = Subject {
            pod: "large",
            words: "100 MB",
            command: &FULL,
            bytes: FULL_BYTES,
        };
        wakes(case, options.runs, &large).await?;
        saves::measure(case, "large").await?;
        remaining::measure(case, options.sleepers).await?;
        creates::measure(case, options.runs).await
    })
    .await
}

/// Returns a small Pod.
fn idle(name: &str) -> Value {
    setup::pod(name, BUSYBOX, &IDLE, json!({}))
}

/// A Pod that is woken, and the same program for bare runsc.
#[derive(Debug)]
struct Subject<'a> {
    pod: &'a str,
    words: &'a str,
    command: &'a [&'a str],
    /// Memory at which the program is as large as in the Pod.
    bytes: u64,
}

async fn wakes(case: &Case, runs: usize, subject: &Subject<'_>) -> anyhow::Result<()> {
    let pod = Sleeper::of(case, subject.pod).await?;
    let runsc = prepare_bare(case, subject, &pod).await?;
    let (mut bare, mut woken) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        case.hibernate(&pod.name).await?;
        woken.push(pod.exec(case, &["echo", "ok"]).await?);
        case.annotate(&pod.name, HIBERNATE, None).await?;
        bare.push(restore_bare(&runsc).await?);
    }
    let (bare, woken) = (Times::of(&bare), Times::of(&woken));
    let words = |what: &str| format!("{}: {what}", subject.words);
    println!(
        "{}",
        table::row(&words("bare create + restore"), &bare, &bare)
    );
    println!(
        "{}",
        table::row(&words("ExecSync into a hibernated Pod"), &woken, &bare)
    );
    println!(
        "    last wake, stages (us since its begin): {}",
        pod.record("wake.json")
    );
    Ok(())
}

/// Saves the same program without Kubernetes: one container, the flags that Torpor uses, its own
/// network namespace.
async fn prepare_bare(case: &Case, subject: &Subject<'_>, pod: &Sleeper) -> anyhow::Result<Runsc> {
    let config = &case.node.config;
    let mut runsc = Runsc::new(&config.runsc, &config.platform)?;
    let network = runsc.network(NAMESPACE)?;
    let spec = Spec {
        root: &root_of(case, pod)?,
        args: subject.command,
        annotations: json!({}),
        network: &network,
    };
    runsc.write_bundle(BARE, &spec)?;
    runsc.create(BARE).await?;
    runsc.start(BARE, None).await?;
    wait::until("bare runsc has the program's memory", FILLED, async || {
        let bytes = runsc.usage(BARE).await?;
        wait::holds(bytes >= subject.bytes, || format!("{bytes} bytes"))
    })
    .await?;
    runsc.checkpoint(BARE).await?;
    runsc.delete(BARE).await?;
    Ok(runsc)
}

/// Returns the root file system of a Pod's container.
fn root_of(case: &Case, pod: &Sleeper) -> anyhow::Result<PathBuf> {
    let record = case.node.container(&pod.uid, MAIN)?;
    let path = case
        .node
        .records
        .container_dir(&record.id)
        .join("config.json");
    let spec = fs::read(&path).with_context(|| path.display().to_string())?;
    let spec: Value = serde_json::from_slice(&spec)?;
    let root = spec["root"]["path"].as_str();
    Ok(root.context("no root in the container's spec")?.into())
}

async fn restore_bare(runsc: &Runsc) -> anyhow::Result<Duration> {
    let begin = Instant::now();
    runsc.create(BARE).await?;
    runsc.restore(BARE).await?;
    let took = begin.elapsed();
    runsc.delete(BARE).await?;
    Ok(took)
}
