//! `torpor-agent run`: starts the agent's tasks and ends them in order.
//!
//! | task | reads | writes |
//! |---|---|---|
//! | 4 watches | Pods of this node, snapshots, RuntimeClasses, SnapshotClasses | caches; driver |
//! | driver, one task per Pod | caches, node | node, Pod conditions, snapshot statuses |
//! | node report | node | SandboxNode |
//! | pressure | the node's memory and swap | sandboxes that must sleep; pokes the driver |
//! | uploads | caches, images | repositories; conditions of snapshots |
//! | fetches | caches, repositories, other nodes | images; SandboxNode `status.fetched` |
//! | image server | images | – |
//! | servers | metrics, readiness | – |
//!
//! The end of the agent ends no sandbox and no step: the shims go on with what they were asked for.
//! At its next start the agent continues with the result.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::runtime::reflector::Store;
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch as channel;
use tokio_util::sync::CancellationToken;
use torpor_api::snapshot::SandboxSnapshot;
use torpor_core::ids::PodUid;
use torpor_core::state::Policy;
use torpor_daemon::spans::Exporter;
use torpor_records::config::FILE_NAME;

use crate::args::RunArgs;
use crate::installed::{Change, Installed};
use crate::kata::Kata;
use crate::peers::client::Peers;
use crate::peers::{self, Identity};
use crate::policy::pressure::{self, NodePressure};
use crate::policy::saves::Saves;
use crate::policy::sleep;
use crate::policy::swap::SwapRoom;
use crate::reconcile::driver::{Asked, Driver, Shared, pod_about};
use crate::reconcile::node::{Node, StoreLimits};
use crate::reconcile::snapshot_index::SnapshotIndex;
use crate::report::metrics::Metrics;
use crate::report::publish::Publisher;
use crate::report::sandboxes::{Board, Sandboxes};
use crate::report::server::Readiness;
use crate::report::spans::{self, Spans};
use crate::report::{sandbox_node, server};
use crate::repository;
use crate::watches::{index, pump, reflect, trim_class, trim_pod};

/// Interval at which the agent searches the node's disk for Pods that have no task. A change of the
/// disk comes with no event.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);

/// Interval at which the agent checks whether the installation has changed. A check reads one small
/// file.
const INSTALLATION_CHECK: Duration = Duration::from_secs(2);

/// Longest wait for the tasks of the Pods to end. A task may wait for a shim that saves a sandbox.
const STOP_LIMIT: Duration = Duration::from_secs(3);

/// Runs until SIGTERM or SIGINT.
pub(crate) async fn run(args: RunArgs) -> anyhow::Result<()> {
    let mut ends = Ends::new()?;
    let stop = CancellationToken::new();
    let ready = Readiness::default();
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(server::health(
        args.health_bind_address,
        ready.clone(),
        stop.clone(),
    ));
    let installed = tokio::select! {
        installed = Installed::found(&args.paths, &ready) => installed,
        ended = ends.reached(&mut tasks) => return ended,
    };
    let config = installed.config().clone();
    let config_file = args.paths.bin_dir().join(FILE_NAME);
    let cgroups = args.cgroup_root.clone();
    let swap = Arc::new(SwapRoom::new(&args.swap));
    let limits = StoreLimits {
        reserve: args.reserve(config.eviction_percent),
        per_namespace: args.store_per_namespace,
    };
    let node = tokio::task::spawn_blocking(move || Node::new(config, limits, &cgroups, swap));
    let node = node.await??;
    let node = Arc::new(node);
    if let Err(why) = &node.ability {
        tracing::error!(
            why,
            "cannot probe runsc: the agent hibernates no sandbox on this node"
        );
    }
    let exporter = args
        .enable_tracing
        .then(|| Exporter::start(spans::SERVICE))
        .transpose()?;
    let spans = Arc::new(Spans::new(exporter.as_ref().map(Exporter::tracer)));
    let client = Client::try_default()
        .await
        .context("cannot reach the apiserver")?;
    let metrics = Arc::new(Metrics::new());
    ready.not_yet("the watch caches are not filled yet".to_owned());
    tasks.spawn(server::metrics(
        args.metrics_bind_address,
        metrics.clone(),
        stop.clone(),
    ));
    let board = Arc::new(Board::default());
    let at_once = args.saves_at_once.unwrap_or_else(default_saves);
    let saves = Saves::new(
        at_once,
        args.save_bandwidth.bytes(),
        &args.paths.state_dir,
        metrics.clone(),
    );
    let node_pressure = Arc::new(NodePressure::new(&args.pressure));
    let kata = Kata::new(
        &args.kata,
        node.swap.clone(),
        &args.cgroup_root,
        node.kubelet_port,
        metrics.clone(),
    );
    let kata = kata.context("cannot set up the Kata driver")?;
    let identity = Arc::new(Identity::new()?);
    let images = &args.images;
    let image_server = images.images_address.map(|address| {
        let port = images.images_bind_address.port();
        let server = peers::Server::new(
            identity.clone(),
            node.clone(),
            client.clone(),
            args.node_name.clone(),
            metrics.clone(),
        );
        tasks.spawn(peers::serve(
            server,
            images.images_bind_address,
            stop.clone(),
        ));
        peers::described(&identity, address, port)
    });
    let peers = Peers {
        identity,
        client: client.clone(),
        node: args.node_name.clone(),
    };
    let report = sandbox_node::report(
        client.clone(),
        args.node_name.clone(),
        sandbox_node::Subject {
            node: node.clone(),
            handler: args.runtime_handler.clone(),
            config: config_file,
            pressure: node_pressure.clone(),
            kata: kata.as_ref().map(|(kata, _)| kata.clone()),
            image_server,
        },
        Sandboxes::new(metrics.clone(), board.clone(), spans.clone()),
        metrics.clone(),
        stop.clone(),
    );
    tasks.spawn(async move {
        report.await;
        Ok(())
    });
    let publisher = Publisher::new(client.clone(), args.node_name.clone());
    let (kata, woken) = kata.unzip();
    let for_end = kata.clone();
    let (for_watch, for_metrics) = (node_pressure.clone(), metrics.clone());
    let shared = |pods, snapshots, classes| Shared {
        node,
        pods,
        snapshots,
        classes,
        publisher,
        metrics,
        policy: Policy {
            unclaimed_grace: args.unclaimed_image_grace,
            ..Policy::default()
        },
        board,
        saves,
        pressure: node_pressure,
        spans,
        kata,
        asked: Asked::default(),
    };
    let watching = watch(client, &args.node_name, shared, &stop, &mut tasks);
    let Watched {
        driver,
        shared,
        pod_events,
    } = tokio::select! {
        watched = watching => watched?,
        // The driver has begun no step yet.
        () = ends.signalled() => return Ok(()),
    };
    if let Some(mut woken) = woken {
        let driver = driver.clone();
        // The task ends with the driver: the driver's `Kata` holds the sender of the channel.
        tokio::spawn(async move {
            while let Some(pod) = woken.recv().await {
                driver.wake_task(&pod);
            }
        });
    }
    let pressed = pressure::watch(for_watch, driver.clone(), for_metrics, stop.clone());
    tasks.spawn(async move {
        pressed.await;
        Ok(())
    });
    tasks.spawn(sweep(driver.clone(), stop.clone()));
    repository::start(
        &shared,
        pod_events,
        &args.repository,
        peers,
        &stop,
        &mut tasks,
    );
    ready.reached();
    tracing::info!(node = args.node_name, "watching");

    let ended = wait_for_end(&mut ends, &installed, &mut tasks).await;
    stop.cancel();
    match &for_end {
        // The agent itself takes the steps for Kata's sandboxes.
        Some(_) => driver.stopped().await,
        None => {
            let stopped = tokio::time::timeout(STOP_LIMIT, driver.stopped());
            if stopped.await.is_err() {
                tracing::info!("steps are under way: the Pods' shims complete them");
            }
        }
    }
    if let Some(kata) = &for_end {
        kata.end().await;
    }
    while let Some(task) = tasks.join_next().await {
        task??;
    }
    if let Some(exporter) = exporter {
        // `end` blocks until the exporter's own thread has ended.
        tokio::task::spawn_blocking(move || exporter.end()).await?;
    }
    ended
}

/// Returns half of the node's processors. A save keeps about one processor busy; the other half
/// remains for the sandboxes in use.
fn default_saves() -> usize {
    // The machine's processors, regardless of the limits of the agent's container.
    let online = nix::unistd::sysconf(nix::unistd::SysconfVar::_NPROCESSORS_ONLN);
    let online = usize::try_from(online.ok().flatten().unwrap_or(1)).unwrap_or(1);
    (online / 2).max(1)
}

/// The signals that end the agent. Their handlers exist from the start: without a handler the
/// kernel discards these signals to the first process of a PID namespace (pid_namespaces(7)).
struct Ends {
    terminate: Signal,
    interrupt: Signal,
}

impl Ends {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn signalled(&mut self) {
        // Cancel-safe: both arms only wait.
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Waits until a signal comes. Fails when a task has ended too early.
    async fn reached(
        &mut self,
        tasks: &mut tokio::task::JoinSet<anyhow::Result<()>>,
    ) -> anyhow::Result<()> {
        tokio::select! {
            () = self.signalled() => Ok(()),
            Some(task) = tasks.join_next() => {
                task??;
                anyhow::bail!("a task of the agent ended unexpectedly")
            }
        }
    }
}

/// Reports whether the agent must start again because the installation has changed since the agent
/// read it.
fn must_restart(installed: &Installed) -> bool {
    match installed.change() {
        Change::None => false,
        Change::Unreadable(why) => {
            tracing::warn!(
                why,
                "cannot read the configuration of the installed runtime"
            );
            false
        }
        Change::Restart(why) => {
            tracing::info!(why, "the agent exits to start again");
            true
        }
    }
}

/// Waits until a signal comes or the installation changes. Fails when a task has ended too early.
async fn wait_for_end(
    ends: &mut Ends,
    installed: &Installed,
    tasks: &mut tokio::task::JoinSet<anyhow::Result<()>>,
) -> anyhow::Result<()> {
    let mut check = tokio::time::interval(INSTALLATION_CHECK);
    loop {
        // Cancel-safe: both arms only wait.
        tokio::select! {
            _ = check.tick() => if must_restart(installed) {
                return Ok(());
            },
            ended = ends.reached(tasks) => return ended,
        }
    }
}

/// Starts tasks for Pods that have none, at intervals, until `stop` is cancelled.
async fn sweep(driver: Driver, stop: CancellationToken) -> anyhow::Result<()> {
    let mut sweep = tokio::time::interval(SWEEP_INTERVAL);
    loop {
        // Cancel-safe: both arms only wait.
        tokio::select! {
            _ = sweep.tick() => {}
            () = stop.cancelled() => return Ok(()),
        }
        let driver = driver.clone();
        tokio::task::spawn_blocking(move || driver.take_up()).await?;
    }
}

/// The caches, which are full, and the driver.
struct Watched {
    driver: Driver,
    shared: Arc<Shared>,
    /// Changes with every event about a Pod of this node.
    pod_events: channel::Receiver<u64>,
}

/// Fills the caches. From then on every change of a cache pokes the driver.
async fn watch(
    client: Client,
    node_name: &str,
    shared: impl FnOnce(Store<Pod>, Arc<SnapshotIndex>, Store<RuntimeClass>) -> Shared,
    stop: &CancellationToken,
    tasks: &mut tokio::task::JoinSet<anyhow::Result<()>>,
) -> anyhow::Result<Watched> {
    let (pods, pod_events) = reflect(
        Api::<Pod>::all(client.clone()),
        watcher::Config::default().fields(&format!("spec.nodeName={node_name}")),
        trim_pod,
    );
    let snapshots = Arc::new(SnapshotIndex::new(node_name.to_owned()));
    let all = Api::<SandboxSnapshot>::all(client.clone());
    let snapshot_events = index(all, snapshots.clone());
    let (classes, class_events) = reflect(
        Api::<RuntimeClass>::all(client),
        watcher::Config::default(),
        trim_class,
    );
    let shared = shared(pods.clone(), snapshots.clone(), classes.clone());
    let shared = Arc::new(shared);
    let driver = Driver::new(shared.clone(), stop.clone());
    let for_pods = driver.clone();
    let seen = channel::Sender::new(0);
    let seen_pods = seen.subscribe();
    tasks.spawn(pump(pod_events, stop.clone(), move |pod: &Pod| {
        for_pods.changed(pod);
        seen.send_modify(|events| *events += 1);
    }));
    let (for_snapshots, for_index) = (driver.clone(), shared.clone());
    tasks.spawn(pump(
        snapshot_events,
        stop.clone(),
        move |changed: &Vec<Arc<SandboxSnapshot>>| {
            for snapshot in changed {
                if let Some(uid) = pod_about(&for_index, snapshot) {
                    for_snapshots.wake_task(&uid);
                }
            }
        },
    ));
    let (for_classes, cached_pods) = (driver.clone(), pods.clone());
    tasks.spawn(pump(
        class_events,
        stop.clone(),
        move |class: &RuntimeClass| {
            log_problems(class);
            for uid in pods_of_class(&cached_pods.state(), &class.name_any()) {
                for_classes.wake_task(&uid);
            }
        },
    ));
    // The driver begins when the caches are full. Otherwise a Pod that the cache does not have yet
    // would look like a Pod that is gone.
    pods.wait_until_ready()
        .await
        .context("the watch of Pods ended")?;
    snapshots.wait_until_whole().await;
    classes
        .wait_until_ready()
        .await
        .context("the watch of RuntimeClasses ended")?;
    driver.begin();
    Ok(Watched {
        driver,
        shared,
        pod_events: seen_pods,
    })
}

/// Logs the faults of a RuntimeClass's sleep settings. The log is the only place for them: a
/// RuntimeClass has no status.
fn log_problems(class: &RuntimeClass) {
    for problem in sleep::problems(class) {
        let class = class.name_any();
        tracing::warn!(class, %problem, "a sleep setting of the RuntimeClass does not apply");
    }
}

fn pods_of_class(pods: &[Arc<Pod>], class: &str) -> Vec<PodUid> {
    let of_class = pods
        .iter()
        .filter(|pod| sleep::class_name(pod) == Some(class));
    of_class
        .filter_map(|pod| PodUid::new(pod.uid()?).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_change_of_a_runtime_class_is_about_the_pods_that_name_it() {
        let pod = |uid: &str, spec: serde_json::Value| -> Arc<Pod> {
            let pod = json!({ "metadata": { "uid": uid }, "spec": spec });
            Arc::new(serde_json::from_value(pod).expect("a Pod"))
        };
        let pods = [
            pod(
                "a",
                json!({ "containers": [], "runtimeClassName": "torpor" }),
            ),
            pod("b", json!({ "containers": [], "runtimeClassName": "kata" })),
            pod("c", json!({ "containers": [] })),
        ];
        let about = pods_of_class(&pods, "torpor");
        assert_eq!(about, [PodUid::new("a").expect("a UID")]);
    }
}
