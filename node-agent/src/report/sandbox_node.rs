//! The SandboxNode object: the abilities and the content of this node.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use torpor_api::conditions::{self, Draft};
use torpor_api::node::{
    ImageServer, ImageStorage, NamespaceStorage, NodeRuntime, RuntimeCapabilities, RuntimeKind,
    SandboxCounts, SandboxNode, SandboxNodeSpec, SandboxNodeStatus,
};
use torpor_core::pressure::Resource;
use torpor_core::state::ImageState;
use torpor_core::store_limit;
use torpor_records::SandboxState;
use torpor_records::config::Config;
use torpor_snapshots::Listed;

use crate::kata::Kata;
use crate::policy::pressure::NodePressure;
use crate::reconcile::node::Node;
use crate::reconcile::shim::Shim;
use crate::report::metrics::Metrics;
use crate::report::publish::{API_LIMIT, fingerprint};
use crate::report::sandboxes::{Sandboxes, signed};

mod owner;
mod revoked;

/// Period at which an unchanged SandboxNode is written. A node whose heartbeat is older than three
/// periods has no agent.
const HEARTBEAT: Duration = Duration::from_secs(30);
/// Minimum pause between two reports.
const MIN_PAUSE: Duration = Duration::from_secs(5);
/// Time for which changes of left images are collected, so that one write reports them together.
const COLLECT: Duration = Duration::from_millis(500);
/// Ratio of the pause after a report to the time that the report took. With hundreds of sandboxes a
/// report takes about 50 ms.
const PAUSE_RATIO: u32 = 200;

/// The subject of the reports: the node, its handler and the sources of its state.
pub(crate) struct Subject {
    pub(crate) node: Arc<Node>,
    /// Name of Torpor's runtime handler in containerd's configuration.
    pub(crate) handler: String,
    /// Path of the node's configuration, which the installer may write while this agent runs.
    pub(crate) config: PathBuf,
    pub(crate) pressure: Arc<NodePressure>,
    pub(crate) kata: Option<Arc<Kata>>,
    /// Server of this node's images.
    pub(crate) image_server: Option<ImageServer>,
}

/// Writes the node's SandboxNode after changes and at each heartbeat, until `stop` is cancelled.
pub(crate) async fn report(
    client: Client,
    node_name: String,
    subject: Subject,
    sandboxes: Sandboxes,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) {
    let Subject {
        node,
        handler,
        config,
        pressure,
        kata,
        image_server,
    } = subject;
    let board = sandboxes.board();
    let sandboxes = Arc::new(Mutex::new(sandboxes));
    let mut has_owner = false;
    let mut written: Option<(SandboxNodeStatus, std::time::Instant)> = None;
    loop {
        let began = std::time::Instant::now();
        let counted = {
            let (node, handler, sandboxes) = (node.clone(), handler.clone(), sandboxes.clone());
            let short = pressure.short();
            let kata = kata.clone();
            let image_server = image_server.clone();
            let config = config.clone();
            let previous = written.as_ref().map(|(old, _)| old.conditions.clone());
            let builds = written.as_ref().map(|(old, _)| old.runsc_builds.clone());
            tokio::task::spawn_blocking(move || {
                let mut sandboxes = sandboxes.lock().unwrap_or_else(PoisonError::into_inner);
                let can_doze = node.can_doze();
                let mut status = status(&node, &handler, &mut sandboxes, &can_doze);
                status.image_server = image_server;
                let ability = node.ability.as_ref().map(|_| ()).map_err(String::as_str);
                let previous = previous.unwrap_or_default();
                let now = Timestamp::now();
                let config = Config::read(&config).ok();
                // A directory that cannot be read at this moment does not make builds go.
                let found = config.as_ref().and_then(Config::runsc_builds);
                status.runsc_builds = found.or(builds).unwrap_or_default();
                let revoked = config.and_then(|config| revoked::draft(&config, &previous));
                status.conditions = conditions_after(previous, ability, &short, now);
                if let Some(revoked) = revoked {
                    conditions::set(&mut status.conditions, revoked, None, now);
                }
                if let Some(kata) = kata {
                    kata.tell(&mut status, &sandboxes, &can_doze);
                }
                status
            })
            .await
        };
        let pause = pause_after(began.elapsed());
        if let Ok(status) = counted {
            record(&metrics, &status);
            let due = written
                .as_ref()
                .is_none_or(|(old, at)| at.elapsed() >= HEARTBEAT || changed(old, &status));
            if due {
                match tokio::time::timeout(API_LIMIT, write(&client, &node_name, &status)).await {
                    Ok(Ok(found)) => {
                        metrics.reported(Timestamp::now());
                        has_owner = has_owner || correct_owner(&client, &found).await;
                        written = Some((status, std::time::Instant::now()));
                    }
                    Ok(Err(error)) => tracing::warn!(%error, "cannot write the SandboxNode"),
                    Err(_) => tracing::warn!(
                        "the apiserver did not answer the write of the SandboxNode in time"
                    ),
                }
            }
        }
        // Cancel-safe: all arms only wait.
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // The condition about pressure is written before sandboxes sleep for it.
            () = pressure.news() => {}
            // The controller waits for the entries of Pods that are gone. Pods that go together are
            // reported together.
            () = async { board.left_changed().await; tokio::time::sleep(COLLECT).await } => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Returns the pause after a report that took `took`.
fn pause_after(took: Duration) -> Duration {
    took.saturating_mul(PAUSE_RATIO).clamp(MIN_PAUSE, HEARTBEAT)
}

/// Reports whether a status has a change that must be written before the next heartbeat. Time and
/// disk space change always; alone they are no such change.
fn changed(old: &SandboxNodeStatus, new: &SandboxNodeStatus) -> bool {
    let compared = |status: &SandboxNodeStatus| {
        let SandboxNodeStatus {
            agent_version,
            conditions,
            counts,
            // Another task writes it.
            fetched: _,
            fingerprint,
            heartbeat_time: _,
            image_server,
            runsc_builds,
            runtimes,
            sandboxes,
            sandboxes_complete,
            storage,
        } = status.clone();
        let conditions: Vec<(String, String)> = conditions
            .into_iter()
            .map(|c| (c.status, c.message))
            .collect();
        let images = storage.map(|storage| {
            let limited = storage.namespaces.into_iter().filter(|n| n.limited);
            let limited: BTreeSet<String> = limited.map(|namespace| namespace.name).collect();
            (storage.images, limited)
        });
        (
            agent_version,
            conditions,
            counts,
            (fingerprint, image_server),
            runsc_builds,
            runtimes,
            sandboxes,
            sandboxes_complete,
            images,
        )
    };
    compared(old) != compared(new)
}

/// Corrects the owner of the SandboxNode. Returns whether the owner needs no further correction.
async fn correct_owner(client: &Client, found: &SandboxNode) -> bool {
    match tokio::time::timeout(API_LIMIT, owner::correct(client, found)).await {
        Ok(Ok(())) => return true,
        Ok(Err(error)) => tracing::warn!(%error, "cannot set the owner of the SandboxNode"),
        Err(_) => tracing::warn!(
            "the apiserver did not answer the change of the SandboxNode's owner in time"
        ),
    }
    false
}

async fn write(
    client: &Client,
    name: &str,
    status: &SandboxNodeStatus,
) -> Result<SandboxNode, kube::Error> {
    let api: Api<SandboxNode> = Api::all(client.clone());
    let patch = Patch::Merge(json!({ "status": status }));
    match api
        .patch_status(name, &PatchParams::default(), &patch)
        .await
    {
        Err(kube::Error::Api(answer)) if answer.is_not_found() => {}
        other => return other,
    }
    let mut fresh = SandboxNode::new(name, SandboxNodeSpec::default());
    // An error is ignored here: the later correction of the owner meets it again and logs it.
    let owner = owner::find(client, name).await.unwrap_or_default();
    fresh.metadata.owner_references = owner.map(|node| vec![node]);
    match api.create(&PostParams::default(), &fresh).await {
        Err(kube::Error::Api(answer)) if answer.is_already_exists() => {}
        Err(error) => return Err(error),
        Ok(created) => tracing::info!(name = created.name_any(), "SandboxNode created"),
    }
    api.patch_status(name, &PatchParams::default(), &patch)
        .await
}

fn record(metrics: &Metrics, status: &SandboxNodeStatus) {
    if let Some(counts) = &status.counts {
        metrics.running.set(counts.running.into());
        metrics.hibernated.set(counts.hibernated.into());
        metrics.paused.set(counts.paused.into());
        metrics.dozing.set(counts.dozing.into());
    }
    if let Some(storage) = &status.storage {
        metrics.image_bytes.set(storage.bytes);
        metrics.store_available.set(storage.available_bytes);
        metrics.store_capacity.set(storage.capacity_bytes);
        metrics.namespaces(&storage.namespaces);
    }
}

fn status(
    node: &Node,
    handler: &str,
    sandboxes: &mut Sandboxes,
    can_doze: &Result<(), String>,
) -> SandboxNodeStatus {
    let images = node.store.list();
    if let Err(error) = &images {
        let error: &dyn std::error::Error = error;
        tracing::error!(error, "cannot read the store of images");
    }
    let images = images.ok();
    let reports = sandboxes.report(node, images.as_deref().unwrap_or_default());
    let complete = images.as_deref();
    let complete = complete.is_some_and(|images| sandboxes.is_complete(node, images));
    SandboxNodeStatus {
        agent_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        conditions: Vec::new(),
        counts: Some(counts(node)),
        fetched: Vec::new(),
        fingerprint: node
            .ability
            .as_ref()
            .ok()
            .map(|ability| fingerprint(&ability.fingerprint)),
        heartbeat_time: Some(Time(Timestamp::now())),
        image_server: None,
        runsc_builds: Vec::new(),
        runtimes: vec![runtime(node, handler, can_doze)],
        sandboxes: reports,
        sandboxes_complete: Some(complete),
        storage: images.and_then(|images| storage(node, &images)),
    }
}

/// Returns the current conditions. A condition of `previous` whose status is unchanged keeps its
/// transition time.
fn conditions_after(
    previous: Vec<Condition>,
    ability: Result<(), &str>,
    short: &[(Resource, String)],
    now: Timestamp,
) -> Vec<Condition> {
    let mut conditions = previous;
    let (truth, reason, message) = match ability {
        Ok(()) => (conditions::Status::True, "AgentRunning", String::new()),
        Err(why) => (conditions::Status::False, "ProbeFailed", why.to_owned()),
    };
    let ready = Draft::new(conditions::READY, truth, reason, message);
    conditions::set(&mut conditions, ready, None, now);
    conditions::set(&mut conditions, pressure_condition(short), None, now);
    conditions
}

/// Makes the condition that shows whether sandboxes sleep before their time, and why. `short` has
/// the resources that the node is short of, each with a message.
fn pressure_condition(short: &[(Resource, String)]) -> Draft {
    let messages: Vec<&str> = short.iter().map(|(_, message)| message.as_str()).collect();
    let (truth, reason) = match short.first() {
        None => (conditions::Status::False, "Enough"),
        Some((Resource::Memory, _)) => (conditions::Status::True, "MemoryShort"),
        Some((Resource::Swap, _)) => (conditions::Status::True, "SwapShort"),
    };
    Draft::new(conditions::PRESSURE, truth, reason, messages.join("; "))
}

fn runtime(node: &Node, handler: &str, can_doze: &Result<(), String>) -> NodeRuntime {
    let capabilities = node.ability.as_ref().map_or_else(
        |_| RuntimeCapabilities::default(),
        |ability| RuntimeCapabilities {
            doze: ability.capabilities.hibernate && can_doze.is_ok(),
            background_restore: ability.capabilities.background_restore,
            freeze: ability.capabilities.freeze,
            hibernate: ability.capabilities.hibernate,
            restore: ability.capabilities.restore,
        },
    );
    NodeRuntime {
        capabilities,
        handler: handler.to_owned(),
        kind: RuntimeKind::GVisor,
        message: match (&node.ability, can_doze) {
            (Err(why), _) => why.clone(),
            (Ok(_), Err(why)) => format!("cannot doze: {why}"),
            (Ok(_), Ok(())) => String::new(),
        },
    }
}

fn counts(node: &Node) -> SandboxCounts {
    let mut counts = SandboxCounts::default();
    for pod in node.records.pods().unwrap_or_default() {
        match node.records.state(&pod.sandbox) {
            Ok(SandboxState::Hibernated { .. }) => counts.hibernated += 1,
            Ok(SandboxState::Running) => {
                let lives = Shim::of(&node.records, &pod.sandbox).serves();
                let paused = node.records.is_noted_paused(&pod.sandbox);
                let dozes = paused && matches!(node.records.doze(&pod.sandbox), Ok(Some(_)));
                counts.dozing += i32::from(lives && dozes);
                counts.paused += i32::from(lives && paused && !dozes);
                counts.running += i32::from(lives && !paused);
            }
            Ok(SandboxState::Restoring { .. }) | Err(_) => {}
        }
    }
    counts
}

fn storage(node: &Node, images: &[Listed]) -> Option<ImageStorage> {
    let committed: Vec<_> = images
        .iter()
        .filter(|image| image.state == ImageState::Committed)
        .collect();
    let capacity = node.store.capacity().ok()?;
    Some(ImageStorage {
        available_bytes: signed(capacity.available),
        bytes: signed(committed.iter().map(|image| image.size).sum()),
        capacity_bytes: signed(capacity.total),
        images: i32::try_from(committed.len()).unwrap_or(i32::MAX),
        namespaces: namespaces(images, node.namespace_limit()),
    })
}

/// Returns the storage of the namespaces with the most bytes. Partial images count, too, because
/// they take room as committed images do.
fn namespaces(images: &[Listed], limit: Option<u64>) -> Vec<NamespaceStorage> {
    let sizes = images.iter().map(|image| (&image.namespace, image.size));
    let shares = store_limit::largest(sizes, limit).into_iter();
    let storage = shares.map(|share| NamespaceStorage {
        bytes: signed(share.bytes),
        limited: share.limited,
        name: share.namespace.to_string(),
    });
    storage.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn since(conditions: &[Condition], type_: &str) -> Option<Timestamp> {
        Some(conditions::find(conditions, type_)?.last_transition_time.0)
    }

    #[test]
    fn measuring_the_store_takes_half_a_percent_of_a_processor_whatever_its_size() {
        let after = |milliseconds| pause_after(Duration::from_millis(milliseconds)).as_millis();
        assert_eq!([after(1), after(25), after(60)], [5_000, 5_000, 12_000]);
        assert_eq!(after(5_000), HEARTBEAT.as_millis());
    }

    #[test]
    fn a_namespace_that_reaches_its_limit_is_news_and_one_that_grows_is_not() {
        let status = |bytes, limited| SandboxNodeStatus {
            storage: Some(ImageStorage {
                namespaces: vec![NamespaceStorage {
                    bytes,
                    limited,
                    name: "a".to_owned(),
                }],
                ..ImageStorage::default()
            }),
            ..SandboxNodeStatus::default()
        };
        assert!(!changed(&status(1, false), &status(2, false)));
        assert!(changed(&status(2, false), &status(3, true)));
    }

    #[test]
    fn the_transition_time_of_a_condition_changes_only_with_its_status() {
        let first = conditions_after(Vec::new(), Ok(()), &[], at(10));
        let again = conditions_after(first.clone(), Ok(()), &[], at(20));
        assert_eq!(again, first);
        let short = [(Resource::Memory, "words".to_owned())];
        let pressed = conditions_after(again, Ok(()), &short, at(30));
        assert_eq!(since(&pressed, conditions::READY), Some(at(10)));
        assert_eq!(since(&pressed, conditions::PRESSURE), Some(at(30)));
    }
}
