//! `torpor-agent run`: starts the tasks and ends them in order.
//!
//! | task | reads | writes |
//! |---|---|---|
//! | three watches | Pods of this node, SandboxSnapshots, RuntimeClasses | caches; pokes the driver |
//! | driver, one task per Pod | caches, node | node, Pod conditions, snapshot statuses |
//! | node report | node | SandboxNode |
//! | pressure | the node's memory and swap | who is to sleep for it; pokes the driver |
//! | servers | metrics, readiness | – |
//!
//! Ending the agent ends no sandbox: a step that runs is waited for, and what it left is taken up at the next start.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use futures::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use torpor_api::snapshot::SandboxSnapshot;
use torpor_core::ids::PodUid;
use torpor_core::state::Policy;
use torpor_daemon::spans::Exporter;
use torpor_records::config::FILE_NAME;
use torpor_runsc::process;

use crate::args::RunArgs;
use crate::installed::{self, Installed, News};
use crate::kata::Kata;
use crate::policy::pressure::{self, NodePressure};
use crate::policy::saves::Saves;
use crate::policy::sleep;
use crate::policy::swap::SwapRoom;
use crate::reconcile::driver::{Asked, Driver, Shared, pod_about};
use crate::reconcile::node::{Node, StoreLimits};
use crate::reconcile::shown::ShownSnapshots;
use crate::report::metrics::Metrics;
use crate::report::publish::Publisher;
use crate::report::sandboxes::{Board, Sandboxes};
use crate::report::server::Readiness;
use crate::report::spans::{self, Spans};
use crate::report::{sandbox_node, server};

/// How often the node's disk is searched for Pods that nobody looks after: what it says comes with no event.
const SWEEP: Duration = Duration::from_secs(10);

/// How often it is looked whether another version was installed: a small file is read.
const LOOK: Duration = Duration::from_secs(2);

/// How many objects are read at once. Tenants make them, each may have more than a megabyte, and what is read takes several times that.
const PAGE: u32 = 10;

/// Runs until SIGTERM or SIGINT.
pub(crate) async fn run(args: RunArgs) -> anyhow::Result<()> {
    process::read_below(args.proc_root.clone());
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
        ended = ends.told(&mut tasks) => return ended,
    };
    let config = installed.config().clone();
    installed::close(&config.state_dir);
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
    let report = sandbox_node::report(
        client.clone(),
        args.node_name.clone(),
        sandbox_node::Subject {
            node: node.clone(),
            handler: args.runtime_handler.clone(),
            config: config_file,
            pressure: node_pressure.clone(),
            kata: kata.as_ref().map(|(kata, _)| kata.clone()),
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
    let driver = tokio::select! {
        driver = watching => driver?,
        // Nothing was begun yet.
        () = ends.signalled() => return Ok(()),
    };
    if let Some(mut woken) = woken {
        let driver = driver.clone();
        // It ends with the driver, whose Kata holds the other end.
        tokio::spawn(async move {
            while let Some(pod) = woken.recv().await {
                driver.poke_if_kept(&pod);
            }
        });
    }
    let pressed = pressure::watch(for_watch, driver.clone(), for_metrics, stop.clone());
    tasks.spawn(async move {
        pressed.await;
        Ok(())
    });
    tasks.spawn(sweep(driver.clone(), stop.clone()));
    ready.reached();
    tracing::info!(node = args.node_name, "watching");

    let ended = until_told(&mut ends, &installed, &mut tasks).await;
    stop.cancel();
    driver.stopped().await;
    if let Some(kata) = &for_end {
        kata.end().await;
    }
    while let Some(task) = tasks.join_next().await {
        task??;
    }
    if let Some(exporter) = exporter {
        // It waits for its own thread.
        tokio::task::spawn_blocking(move || exporter.end()).await?;
    }
    ended
}

/// A save keeps about one processor busy; the other half is for those who use their sandboxes.
fn default_saves() -> usize {
    // Of the machine, not of the agent's own limits.
    let online = nix::unistd::sysconf(nix::unistd::SysconfVar::_NPROCESSORS_ONLN);
    let online = usize::try_from(online.ok().flatten().unwrap_or(1)).unwrap_or(1);
    (online / 2).max(1)
}

/// What ends the agent. The signals are heard from the start: the first process of a PID namespace
/// has no other way to end by them.
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
        // Both arms only wait.
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// A signal has come, or a task has ended that should not.
    async fn told(
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

/// Whether the agent has to start again, since something else is installed now than what it goes
/// by.
fn is_replaced(installed: &Installed) -> bool {
    match installed.news() {
        News::None => false,
        News::Unread(why) => {
            tracing::warn!(
                why,
                "cannot read the configuration of the installed runtime"
            );
            false
        }
        News::Other(why) => {
            tracing::info!(why, "the agent exits to start again");
            true
        }
    }
}

/// Waits until a signal comes, until another version is installed, or until a task ends that
/// should not.
async fn until_told(
    ends: &mut Ends,
    installed: &Installed,
    tasks: &mut tokio::task::JoinSet<anyhow::Result<()>>,
) -> anyhow::Result<()> {
    let mut look = tokio::time::interval(LOOK);
    loop {
        // Both arms only wait.
        tokio::select! {
            _ = look.tick() => if is_replaced(installed) {
                return Ok(());
            },
            ended = ends.told(tasks) => return ended,
        }
    }
}

/// Looks for Pods without a task until told to stop.
async fn sweep(driver: Driver, stop: CancellationToken) -> anyhow::Result<()> {
    let mut sweep = tokio::time::interval(SWEEP);
    loop {
        // Both arms only wait.
        tokio::select! {
            _ = sweep.tick() => {}
            () = stop.cancelled() => return Ok(()),
        }
        let driver = driver.clone();
        tokio::task::spawn_blocking(move || driver.take_up()).await?;
    }
}

/// Fills the caches and lets every change of them poke the driver.
async fn watch(
    client: Client,
    node_name: &str,
    shared: impl FnOnce(Store<Pod>, Arc<ShownSnapshots>, Store<RuntimeClass>) -> Shared,
    stop: &CancellationToken,
    tasks: &mut tokio::task::JoinSet<anyhow::Result<()>>,
) -> anyhow::Result<Driver> {
    let (pods, pod_events) = reflect(
        Api::<Pod>::all(client.clone()),
        watcher::Config::default().fields(&format!("spec.nodeName={node_name}")),
        trim_pod,
    );
    let snapshots = Arc::new(ShownSnapshots::new(node_name.to_owned()));
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
    tasks.spawn(pump(pod_events, stop.clone(), move |pod: &Pod| {
        for_pods.changed(pod);
    }));
    let for_snapshots = driver.clone();
    tasks.spawn(pump(
        snapshot_events,
        stop.clone(),
        move |changed: &Vec<Arc<SandboxSnapshot>>| {
            for snapshot in changed {
                if let Some(uid) = pod_about(&shared, snapshot) {
                    for_snapshots.poke_if_kept(&uid);
                }
            }
        },
    ));
    let (for_classes, known) = (driver.clone(), pods.clone());
    tasks.spawn(pump(
        class_events,
        stop.clone(),
        move |class: &RuntimeClass| {
            tell_of_problems(class);
            for uid in pods_of_class(&known.state(), &class.name_any()) {
                for_classes.poke_if_kept(&uid);
            }
        },
    ));
    // Before the caches are full, a Pod that is merely not there yet would look gone.
    pods.wait_until_ready()
        .await
        .context("the watch of Pods ended")?;
    snapshots.wait_until_whole().await;
    classes
        .wait_until_ready()
        .await
        .context("the watch of RuntimeClasses ended")?;
    driver.begin();
    Ok(driver)
}

/// The agent has no other place for it: a RuntimeClass has no status.
fn tell_of_problems(class: &RuntimeClass) {
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

type Events<K> = std::pin::Pin<Box<dyn Stream<Item = Result<K, watcher::Error>> + Send>>;

fn reflect<K>(api: Api<K>, config: watcher::Config, trim: fn(&mut K)) -> (Store<K>, Events<K>)
where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + Sync
        + 'static,
{
    let (store, writer) = reflector::store();
    let events = watcher(api, config.page_size(PAGE))
        .modify(trim)
        .default_backoff()
        .reflect(writer)
        .touched_objects();
    (store, events.boxed())
}

/// What the watch of snapshots shows goes into the index, which answers what has changed.
fn index(
    api: Api<SandboxSnapshot>,
    into: Arc<ShownSnapshots>,
) -> Events<Vec<Arc<SandboxSnapshot>>> {
    watcher(api, watcher::Config::default().page_size(PAGE))
        .modify(trim_snapshot)
        .default_backoff()
        .map_ok(move |event| into.take(event))
        .boxed()
}

/// A Pod without what nobody here reads and its user may make large.
fn trim_pod(pod: &mut Pod) {
    pod.metadata.managed_fields = None;
    pod.metadata.labels = None;
}

/// The same of a snapshot. Every agent holds all of the cluster.
fn trim_snapshot(snapshot: &mut SandboxSnapshot) {
    let metadata = &mut snapshot.metadata;
    metadata.managed_fields = None;
    metadata.labels = None;
    metadata.annotations = None;
    metadata.owner_references = None;
}

fn trim_class(class: &mut RuntimeClass) {
    class.metadata.managed_fields = None;
    class.metadata.labels = None;
}

async fn pump<K>(
    mut events: Events<K>,
    stop: CancellationToken,
    mut changed: impl FnMut(&K),
) -> anyhow::Result<()> {
    loop {
        // Both arms only wait: an event that was not taken stays in the stream.
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(object)) => changed(&object),
                Some(Err(error)) => tracing::warn!(%error, "a watch was interrupted"),
                None => anyhow::bail!("a watch ended"),
            },
            () = stop.cancelled() => return Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use torpor_test_apiserver::Apiserver;

    use super::*;

    fn large_snapshot(name: &str) -> serde_json::Value {
        json!({
            "metadata": {
                "name": name, "namespace": "ns", "finalizers": ["a.b/c"],
                "labels": {"a": "b"}, "annotations": {"a": "b"},
                "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}],
                "managedFields": [{"manager": "m", "operation": "Apply"}],
            },
            "spec": {"sandboxName": "s"},
        })
    }

    #[tokio::test]
    async fn snapshots_are_listed_in_pages_and_kept_without_what_nobody_reads() {
        let server = Apiserver::new();
        for n in 0..PAGE + 1 {
            server.create("sandboxsnapshots", large_snapshot(&format!("s{n}")));
        }
        let api = Api::<SandboxSnapshot>::all(server.client());
        let shown = Arc::new(ShownSnapshots::new("node".to_owned()));
        let mut events = index(api, shown.clone());
        let listed = async {
            let mut all = Vec::new();
            while all.is_empty() {
                let changed = events.next().await.expect("the watch goes on");
                all = changed.expect("it is not interrupted");
            }
            all
        };
        let listed = tokio::time::timeout(Duration::from_secs(20), listed)
            .await
            .expect("all is listed");
        shown.wait_until_whole().await;
        let sizes = server.take_lists().into_iter().map(|(_, size)| size);
        assert_eq!(sizes.collect::<Vec<_>>(), [10, 1]);
        assert_eq!(listed.len(), 11);
        for snapshot in listed {
            let metadata = &snapshot.metadata;
            assert_eq!(
                metadata.finalizers.as_deref(),
                Some(&["a.b/c".to_owned()][..])
            );
            assert_eq!(metadata.labels, None);
            assert_eq!(metadata.annotations, None);
            assert_eq!(metadata.owner_references, None);
            assert_eq!(metadata.managed_fields, None);
        }
    }

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

    #[tokio::test]
    async fn runtime_classes_are_kept_with_what_they_say() {
        let server = Apiserver::new();
        let class = json!({
            "metadata": { "name": "torpor", "labels": {"a": "b"}, "annotations": { "torpor.dev/doze-after": "30s" } },
            "handler": "torpor",
        });
        server.create("runtimeclasses", class);
        let api = Api::<RuntimeClass>::all(server.client());
        let (store, mut events) = reflect(api, watcher::Config::default(), trim_class);
        let reading = async { while events.next().await.is_some() {} };
        tokio::select! {
            ready = store.wait_until_ready() => ready.expect("the watch goes on"),
            () = reading => panic!("the watch ended"),
        }
        let kept = store.get(&reflector::ObjectRef::new("torpor"));
        let kept = kept.expect("it is there");
        assert_eq!(kept.metadata.labels, None);
        assert_eq!(kept.annotations()["torpor.dev/doze-after"], "30s");
    }

    #[test]
    fn a_pod_is_kept_without_its_labels_and_with_what_it_says_and_whose_it_is() {
        let mut pod: Pod = serde_json::from_value(json!({
            "metadata": {
                "name": "p", "labels": {"a": "b"}, "annotations": {"a": "b"},
                "ownerReferences": [{"apiVersion": "v1", "kind": "Sandbox", "name": "s", "uid": "u"}],
                "managedFields": [{"manager": "m", "operation": "Apply"}],
            },
        }))
        .expect("a Pod");
        trim_pod(&mut pod);
        assert_eq!(
            (pod.metadata.labels, pod.metadata.managed_fields),
            (None, None)
        );
        assert!(pod.metadata.annotations.is_some());
        assert!(pod.metadata.owner_references.is_some());
    }
}
