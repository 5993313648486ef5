//! Runs one load, from an idle control plane to the results.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use futures::future::try_join_all;
use kube::{
    Api, Client, Config,
    api::{DeleteParams, PostParams},
    config::{KubeConfigOptions, Kubeconfig},
};
use serde::{Deserialize, Serialize};
use tokio::{sync::mpsc, task::JoinSet};
use torpor_api::SandboxClaim;

use super::{
    audit::{self, Writes},
    bare::{self, Bare},
    board::{Board, Record},
    controller::Controller,
    counters,
    load::{Arrival, Load},
    objects,
};
use crate::stats::Times;

/// Time for pools to become full: five thousand members take a few minutes.
const FILL: Duration = Duration::from_secs(420);
/// Time for waiting claims to become Ready when no more come.
const DRAIN: Duration = Duration::from_secs(120);
/// Time after the last claim was sent at which the backlog is counted.
const SETTLE: Duration = Duration::from_secs(1);

/// Load, paths and processes.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub load: Load,
    /// Seconds during which claims come at random.
    pub seconds: u32,
    /// The controller's binary.
    pub controller: PathBuf,
    /// Further setup of the controller, separated by spaces.
    pub controller_args: String,
    pub controller_log: PathBuf,
    /// Kubeconfig of the load itself.
    pub kubeconfig: PathBuf,
    pub controller_kubeconfig: PathBuf,
    /// The API server's log of the controller's writes.
    pub audit_log: PathBuf,
    /// The control plane's processes, as NAME=PID, separated by commas.
    pub processes: String,
}

/// Results of a load. Times are in milliseconds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub load: String,
    pub load_average_before: String,
    pub bare: Option<Bare>,
    pub pools: usize,
    pub members: i32,
    pub fill_seconds: f64,
    /// Times from the moment before a claim is sent until the watch shows it Ready.
    pub all: Times,
    /// Times of claims that took a member of a pool.
    pub warm: Times,
    /// Times of claims for which a Sandbox was made.
    pub cold: Times,
    /// Times of the claims that were sent in each second, one second after the other.
    pub each_second: Vec<Times>,
    /// Number of claims that were Ready, over the time from the first that was sent until the last
    /// was Ready.
    pub ready_per_second: f64,
    /// Number of claims that were not Ready a second after the last was sent.
    pub backlog: usize,
    /// p50, p90, p99 of `agent_sandbox_claim_controller_startup_latency_ms`.
    pub startup_metric: Option<[f64; 3]>,
    pub writes: Writes,
    /// Writes of all clients during the load, by the API server's count.
    pub apiserver: BTreeMap<String, f64>,
    /// Number of processors that each process used while claims came.
    pub processors: BTreeMap<String, f64>,
    /// Resident memory of the controller in MiB, and the most that it was.
    pub memory: (f64, f64),
}

pub(crate) async fn run(setup: &Setup) -> anyhow::Result<Outcome> {
    let load = &setup.load;
    let load_average_before = std::fs::read_to_string("/proc/loadavg")?.trim().to_owned();
    let client = client(setup).await?;
    let bare = match load.arrival {
        Arrival::Never => None,
        arrival => Some(bare::measure(&client, pause(arrival)).await?),
    };
    let controller = Controller::start(setup).await?;
    let namespaces: Vec<String> = (0..load.pools).map(|pool| format!("load-{pool}")).collect();
    let begin = Instant::now();
    for namespace in &namespaces {
        objects::namespace(&client, namespace).await?;
        objects::pool(&client, namespace, load.members).await?;
    }
    objects::pools_full(&client, &namespaces, load.members, FILL).await?;
    let fill_seconds = begin.elapsed().as_secs_f64();
    counters::at_rest(&client, DRAIN).await?;

    let mut processes = processes(&setup.processes)?;
    processes.insert("controller".to_owned(), controller.pid());
    processes.insert("load".to_owned(), std::process::id());
    let written = counters::writes(&client).await?;
    let logged = audit::length(&setup.audit_log)?;
    let board = Board::default();
    let driven = drive(
        &client,
        load,
        setup.seconds,
        &namespaces,
        &board,
        &processes,
    )
    .await?;
    let startup_metric = controller.startup_latency().await?;
    counters::at_rest(&client, DRAIN).await?;
    let apiserver = counters::added(&written, &counters::writes(&client).await?);
    let records = board.records();
    let writes = audit::count(&audit::read(&setup.audit_log, logged)?, &records);
    let memory = controller.memory()?;
    controller.stop().await?;

    let times = |wanted: fn(&str, &Record) -> bool| {
        let of = records.iter().filter(|(name, record)| wanted(name, record));
        Times::of(
            &of.filter_map(|(_, record)| record.ready)
                .collect::<Vec<_>>(),
        )
    };
    let all = times(|_, _| true);
    Ok(Outcome {
        load: load.name.to_owned(),
        load_average_before,
        bare,
        pools: load.pools,
        members: load.members,
        fill_seconds,
        ready_per_second: all.count as f64 / span(&records).as_secs_f64().max(f64::MIN_POSITIVE),
        all,
        each_second: each_second(&records),
        warm: times(|name, record| record.is_warm(name)),
        cold: times(|name, record| !record.is_warm(name)),
        backlog: driven.backlog,
        startup_metric,
        writes,
        apiserver,
        processors: driven.processors,
        memory,
    })
}

/// Returns the pause of the bare client: it comes as often as the load, where that leaves the
/// control plane idle in between.
fn pause(arrival: Arrival) -> Option<Duration> {
    match arrival {
        Arrival::Rate(rate) if rate <= 10.0 => Some(Duration::from_secs_f64(1.0 / rate)),
        _ => None,
    }
}

/// Returns the time from the first claim that was sent to the last that was Ready.
fn span<'a>(records: impl IntoIterator<Item = (&'a String, &'a Record)>) -> Duration {
    let times = records
        .into_iter()
        .filter_map(|(_, record)| Some((record.sent, record.sent + record.ready?)));
    let bounds = times.reduce(|(first, last), (sent, ready)| (first.min(sent), last.max(ready)));
    bounds.map_or(Duration::ZERO, |(first, last)| last.duration_since(first))
}

fn each_second<'a>(records: impl IntoIterator<Item = (&'a String, &'a Record)>) -> Vec<Times> {
    let mut sent: Vec<_> = records
        .into_iter()
        .filter_map(|(_, record)| Some((record.sent, record.ready?)))
        .collect();
    sent.sort_unstable();
    let Some((first, _)) = sent.first().copied() else {
        return Vec::new();
    };
    let seconds = sent.chunk_by(|(a, _), (b, _)| {
        a.duration_since(first).as_secs() == b.duration_since(first).as_secs()
    });
    let times = seconds.map(|second| second.iter().map(|(_, ready)| *ready).collect::<Vec<_>>());
    times.map(|times| Times::of(&times)).collect()
}

struct Driven {
    backlog: usize,
    processors: BTreeMap<String, f64>,
}

/// Sends claims at their times, deletes them after their dwell, and returns when all are Ready.
async fn drive(
    client: &Client,
    load: &Load,
    seconds: u32,
    namespaces: &[String],
    board: &Board,
    processes: &BTreeMap<String, u32>,
) -> anyhow::Result<Driven> {
    let (became_ready, ready) = mpsc::unbounded_channel();
    let watching = board.watch(client.clone(), became_ready).await?;
    let deleting = tokio::spawn(delete_after(client.clone(), load.arrival, ready));
    let used = counters::processor_time(processes)?;
    let begin = tokio::time::Instant::now();
    let sends = load.arrival.times(seconds).into_iter().enumerate();
    let sends = sends.map(|(number, at)| {
        let namespace = &namespaces[number % namespaces.len()];
        let claims: Api<SandboxClaim> = Api::namespaced(client.clone(), namespace);
        async move {
            tokio::time::sleep_until(begin + at).await;
            let name = format!("claim-{number:05}");
            let claim = objects::claim(&name);
            board.send(&name, namespace);
            let sent = claims.create(&PostParams::default(), &claim).await;
            sent.with_context(|| format!("create claim {name}"))
        }
    });
    try_join_all(sends).await?;
    let took = begin.elapsed().as_secs_f64();
    let processors = counters::added(&used, &counters::processor_time(processes)?);
    let processors = processors.into_iter().map(|(name, s)| (name, s / took));
    tokio::time::sleep(SETTLE).await;
    let backlog = board.waiting();
    objects::until("claims that are all Ready", DRAIN, || async {
        Ok(board.waiting() == 0)
    })
    .await?;
    let processors = processors.collect();
    // The last claims are deleted too, so that the cost of deletion is counted.
    watching.abort();
    if let Err(error) = watching.await
        && !error.is_cancelled()
    {
        return Err(error).context("the watch of claims");
    }
    deleting.await??;
    Ok(Driven {
        backlog,
        processors,
    })
}

/// Deletes each claim a while after it became Ready; ends once no more can become Ready.
async fn delete_after(
    client: Client,
    arrival: Arrival,
    mut ready: mpsc::UnboundedReceiver<(String, String)>,
) -> anyhow::Result<()> {
    let mut deletions = JoinSet::new();
    while let Some((namespace, name)) = ready.recv().await {
        let Some(dwell) = arrival.dwell() else {
            continue;
        };
        let claims: Api<SandboxClaim> = Api::namespaced(client.clone(), &namespace);
        deletions.spawn(async move {
            tokio::time::sleep(dwell).await;
            let deleted = claims.delete(&name, &DeleteParams::default()).await;
            deleted
                .map(drop)
                .with_context(|| format!("delete claim {name}"))
        });
    }
    while let Some(deletion) = deletions.join_next().await {
        deletion??;
    }
    Ok(())
}

async fn client(setup: &Setup) -> anyhow::Result<Client> {
    let path = &setup.kubeconfig;
    let kubeconfig = Kubeconfig::read_from(path).with_context(|| path.display().to_string())?;
    let options = KubeConfigOptions::default();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
    // A time with a repetition in it would be meaningless.
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}

/// Parses names and process ids from `NAME=PID,NAME=PID`.
fn processes(text: &str) -> anyhow::Result<BTreeMap<String, u32>> {
    let pair = |pair: &str| {
        let (name, pid) = pair.split_once('=').context("no =")?;
        let pid = pid.parse()?;
        anyhow::ensure!(pid != 0, "{name} does not run");
        Ok((name.to_owned(), pid))
    };
    let all: anyhow::Result<_> = text.split(',').map(pair).collect();
    all.with_context(|| format!("processes {text}"))
}
