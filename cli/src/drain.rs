//! `drain`: what a node's sandboxes have in memory is kept before the node is taken away. `kubectl drain` evicts Pods, and of one that is awake the
//! memory is lost.
//!
//! Each is suspended and asked to run again at once. Its next Pod waits for the node, where its image is, and continues from it when the node is
//! uncordoned: nothing of the drain has to be remembered by anybody. Who is left is decided purely ([`parts`]).

use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::api::{Api, Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::{Resource, ResourceExt};
use serde_json::json;
use torpor_api::annotations::{Settings, SuspensionStrategy};
use torpor_api::conditions::{self, HIBERNATED};
use torpor_api::reasons::hibernated;
use torpor_api::{OperatingMode, Sandbox, SandboxNode, SandboxWarmPool};

use crate::change::{Changed, change};
use crate::connect::{Cluster, call};
use crate::error::{Error, words};
use crate::goal::{Goal, RESUMED};
use crate::view::{conditions_of, pod_of, pods_by_owner};
use crate::world::{Scope, World, list};

/// Sandboxes that are asked at the same time; their node saves as many at once as it may.
const AT_ONCE: usize = 16;
/// How often one is asked to suspend whom somebody resumes meanwhile (a request, its own time).
const TRIES: u32 = 3;
/// Between two of these, and between two tries to have it run again.
const PAUSE: Duration = Duration::from_secs(1);

/// One Sandbox whose Pod is on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub namespace: String,
    pub name: String,
    /// Another one may take its name meanwhile.
    pub uid: Option<String>,
    pub plan: Plan,
}

/// What is to be done with one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// It is suspended, and asked to run again.
    Keep,
    /// Somebody else suspends it: that is waited for.
    Await,
    /// Its memory cannot be kept: why.
    Leave(String),
}

impl Part {
    /// As kubectl takes it.
    pub fn words(&self) -> String {
        let Self {
            namespace, name, ..
        } = self;
        format!("sandbox.agents.x-k8s.io/{name} -n {namespace}")
    }
}

/// What became of one.
#[derive(Debug, PartialEq, Eq)]
pub enum Kept {
    /// Suspended with its memory, after so long.
    Yes(Duration),
    /// Its memory is lost, and why.
    No(String),
    /// It is not there any more, or was suspended by somebody else: nothing was to be done.
    Gone,
}

/// Why it was not kept.
#[derive(Debug, thiserror::Error)]
pub enum NotKept {
    /// It runs on where it is.
    #[error(transparent)]
    Runs(Error),
    /// It is suspended, or will be, and was not asked to run again.
    #[error("{error}; then it could not be asked to run again ({again})")]
    StaysSuspended { error: String, again: Error },
}

/// What there is on the node, and what is to be done with each. Nobody misses what a member of a pool has in memory that was not claimed yet: its pool
/// makes another elsewhere.
pub fn parts(world: &World, classes: &[RuntimeClass], node: &str) -> Vec<Part> {
    let pods = pods_by_owner(&world.pods);
    let told = world.nodes.iter().find(|told| told.name_any() == node);
    let part = |sandbox: &Sandbox| {
        let pod = pod_of(&pods, sandbox).filter(|pod| is_on(pod, node))?;
        let may_go = sandbox.metadata.deletion_timestamp.is_none() && !is_unclaimed(sandbox);
        may_go.then(|| Part {
            namespace: sandbox.namespace().unwrap_or_default(),
            name: sandbox.name_any(),
            uid: sandbox.uid(),
            plan: plan(sandbox, pod, classes, told),
        })
    };
    world.sandboxes.iter().filter_map(part).collect()
}

/// Its containers have started and have not ended.
fn is_on(pod: &Pod, node: &str) -> bool {
    let placed = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    let phase = pod.status.as_ref().and_then(|now| now.phase.as_deref());
    placed == Some(node) && phase == Some("Running") && pod.metadata.deletion_timestamp.is_none()
}

fn is_unclaimed(sandbox: &Sandbox) -> bool {
    let mut owners = sandbox.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.controller == Some(true) && owner.kind == SandboxWarmPool::kind(&()))
}

fn plan(
    sandbox: &Sandbox,
    pod: &Pod,
    classes: &[RuntimeClass],
    node: Option<&SandboxNode>,
) -> Plan {
    match cannot_keep(sandbox, pod, classes, node) {
        Some(why) => Plan::Leave(why),
        None if sandbox.spec.operating_mode == OperatingMode::Suspended => Plan::Await,
        None => Plan::Keep,
    }
}

/// Why a suspension would not keep its memory, or not until the drain.
fn cannot_keep(
    sandbox: &Sandbox,
    pod: &Pod,
    classes: &[RuntimeClass],
    node: Option<&SandboxNode>,
) -> Option<String> {
    let annotations = sandbox.metadata.annotations.as_ref();
    let settings = Settings::read(annotations, sandbox.spec.pod_template.annotations());
    let strategy = settings.strategy();
    if strategy != SuspensionStrategy::Hibernate {
        return Some(format!("its suspension-strategy is {strategy:?}"));
    }
    let told = conditions::find(conditions_of(sandbox), HIBERNATED);
    let hides = [
        hibernated::INVALID_ANNOTATION,
        hibernated::SNAPSHOT_CLASS_NOT_SUPPORTED,
    ];
    if let Some(told) = told.filter(|told| hides.contains(&told.reason.as_str())) {
        return Some(format!(
            "its condition would not tell what became of its memory ({}: {})",
            told.reason, told.message
        ));
    }
    if comes_back_at_once(sandbox, pod) {
        return Some(
            "its Pod tolerates a cordoned node, and would come back to it before the drain"
                .to_owned(),
        );
    }
    let class = pod.spec.as_ref()?.runtime_class_name.as_deref();
    let Some(class) = class else {
        return Some("the default runtime keeps no memory".to_owned());
    };
    let known = classes.iter().find(|known| known.name_any() == class);
    let handler = known.map_or(class, |known| known.handler.as_str());
    let can = node.is_some_and(|node| node.capabilities(handler).hibernate);
    (!can).then(|| format!("RuntimeClass {class} keeps no memory on this node"))
}

/// Whether cordoning does not keep its next Pod away: it is not scheduled at all, or tolerates the taint that the scheduler takes a cordon for (Kubernetes,
/// `pkg/scheduler/framework/plugins/nodeunschedulable`).
fn comes_back_at_once(sandbox: &Sandbox, pod: &Pod) -> bool {
    const TAINT: &str = "node.kubernetes.io/unschedulable";
    let template = &sandbox.spec.pod_template.spec;
    let is_placed = template
        .json()
        .get("nodeName")
        .is_some_and(|name| !name.is_null());
    let mut tolerations = pod
        .spec
        .iter()
        .flat_map(|spec| spec.tolerations.iter().flatten());
    let tolerates = tolerations.any(|toleration| {
        let key = toleration.key.as_deref().unwrap_or_default();
        let effect = toleration.effect.as_deref().unwrap_or_default();
        let value = toleration.value.as_deref().unwrap_or_default();
        let exists = toleration.operator.as_deref() == Some("Exists");
        matches!(effect, "" | "NoSchedule")
            && (key.is_empty() && exists || key == TAINT && (exists || value.is_empty()))
    });
    is_placed || tolerates
}

/// The node is there, and nothing new comes to it, unless it is only looked at.
pub async fn cordon(cluster: &Cluster, node: &str, dry_run: bool) -> Result<(), Error> {
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let patch = Patch::Merge(json!({"spec": {"unschedulable": true}}));
    let done = match dry_run {
        true => call(&format!("get node {node}"), nodes.get_metadata(node)).await,
        false => {
            let (doing, parameters) = (format!("cordon node {node}"), PatchParams::default());
            call(&doing, nodes.patch_metadata(node, &parameters, &patch)).await
        }
    };
    match done {
        Err(error) if error.is_missing() => Err(Error::NoNode {
            name: node.to_owned(),
        }),
        other => other.map(drop),
    }
}

/// What is on the node, and what could not be seen.
pub async fn look(cluster: &Cluster, node: &str) -> Result<(Vec<Part>, Vec<String>), Error> {
    let classes: Api<DeserializeGuard<RuntimeClass>> = Api::all(cluster.client.clone());
    let (world, classes) = tokio::join!(
        World::look(cluster, Scope::Everywhere),
        list("RuntimeClasses", &classes)
    );
    let (mut world, classes) = (world?, classes?);
    let mut unseen = std::mem::take(&mut world.unseen);
    unseen.extend(classes.unread);
    Ok((parts(&world, &classes.items, node), unseen))
}

/// Suspends these, and asks each to run again once it is; `ended` hears of each what became of it, as soon as it is known.
pub async fn keep(
    cluster: &Cluster,
    parts: &[Part],
    limit: Duration,
    say: &(dyn Fn(&str) + Sync),
    mut ended: impl FnMut(&Part, Result<Kept, NotKept>),
) {
    let to_do = parts
        .iter()
        .filter(|part| !matches!(part.plan, Plan::Leave(_)));
    let each = to_do.map(async |part| (part, keep_one(cluster, part, limit, say).await));
    let mut each = std::pin::pin!(futures::stream::iter(each).buffer_unordered(AT_ONCE));
    while let Some((part, result)) = each.next().await {
        ended(part, result);
    }
}

async fn keep_one(
    cluster: &Cluster,
    part: &Part,
    limit: Duration,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Kept, NotKept> {
    let cluster = &Cluster {
        client: cluster.client.clone(),
        namespace: part.namespace.clone(),
    };
    let say: &(dyn Fn(&str) + Sync) = &|text: &str| say(&format!("{}/{text}", part.namespace));
    let mut left = TRIES;
    loop {
        left -= 1;
        // It may have been its turn long after it was seen.
        let Some(now) = Box::pin(still_there(cluster, part))
            .await
            .map_err(NotKept::Runs)?
        else {
            return Ok(Kept::Gone);
        };
        let by_others = now.spec.operating_mode == OperatingMode::Suspended;
        if by_others && part.plan == Plan::Keep && left + 1 == TRIES {
            return Ok(Kept::Gone);
        }
        let suspended = Box::pin(change(cluster, Goal::Suspend, &part.name, limit, say)).await;
        if part.plan == Plan::Await {
            return match suspended {
                Ok(done) => Ok(kept(done)),
                Err(error) => Err(NotKept::Runs(error)),
            };
        }
        match suspended {
            Err(Error::Refused { message, .. }) if message == RESUMED && left > 0 => {
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return not_suspended(cluster, part, error).await,
            Ok(done) => return to_run_again(cluster, part, done).await,
        }
    }
}

fn kept(done: Changed) -> Kept {
    match done.note {
        None => Kept::Yes(done.took.unwrap_or_default()),
        Some(lost) => Kept::No(lost),
    }
}

/// The Sandbox, unless it has gone, or is another.
async fn still_there(cluster: &Cluster, part: &Part) -> Result<Option<Sandbox>, Error> {
    let sandboxes: Api<Sandbox> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let doing = format!("get Sandbox {}", part.name);
    match call(&doing, sandboxes.get(&part.name)).await {
        Ok(now) => {
            let same = now.metadata.uid == part.uid && now.metadata.deletion_timestamp.is_none();
            Ok(same.then_some(now))
        }
        Err(error) if error.is_missing() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Its Pod is gone. The next one waits for the node: that is not waited for.
async fn to_run_again(cluster: &Cluster, part: &Part, done: Changed) -> Result<Kept, NotKept> {
    match Box::pin(resume(cluster, part)).await {
        Ok(()) => Ok(kept(done)),
        Err(again) => Err(NotKept::StaysSuspended {
            error: "it is suspended".to_owned(),
            again,
        }),
    }
}

/// Whatever was in the way, nobody is left suspended by a command that has ended: a suspension that is under way is called off, and it runs on.
async fn not_suspended(cluster: &Cluster, part: &Part, error: Error) -> Result<Kept, NotKept> {
    match Box::pin(resume(cluster, part)).await {
        Ok(()) => match Box::pin(still_there(cluster, part)).await {
            Ok(None) => Ok(Kept::Gone),
            _ => Err(NotKept::Runs(error)),
        },
        Err(again) => Err(NotKept::StaysSuspended {
            error: words(&error),
            again,
        }),
    }
}

async fn resume(cluster: &Cluster, part: &Part) -> Result<(), Error> {
    let mut left = TRIES;
    loop {
        left -= 1;
        let asked = async {
            if Box::pin(still_there(cluster, part)).await?.is_some() {
                let quietly = &|_: &str| {};
                let none = Duration::ZERO;
                Box::pin(change(cluster, Goal::Resume, &part.name, none, quietly)).await?;
            }
            Ok(())
        };
        match asked.await {
            Err(_) if left > 0 => tokio::time::sleep(PAUSE).await,
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::Value;

    use super::*;

    /// A Sandbox with its Pod on node `n`, by RuntimeClass `class`, whose handler `h` can hibernate there.
    fn world(sandbox: Value, pod: Value) -> World {
        let mut all = json!({
            "sandbox": {
                "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
                "metadata": {"name": "s", "namespace": "x", "uid": "u"},
                "spec": {"podTemplate": {"spec": {"containers": []}}},
            },
            "pod": {
                "metadata": {"name": "s", "namespace": "x", "uid": "p", "ownerReferences": [
                    {"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "s", "uid": "u", "controller": true},
                ]},
                "spec": {"nodeName": "n", "runtimeClassName": "class", "containers": []},
                "status": {"phase": "Running"},
            },
        });
        json_patch(&mut all["sandbox"], sandbox);
        json_patch(&mut all["pod"], pod);
        let node = json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxNode", "metadata": {"name": "n"}, "spec": {},
            "status": {"runtimes": [{"handler": "h", "kind": "gVisor", "capabilities": {"hibernate": true}}]},
        });
        World {
            sandboxes: vec![serde_json::from_value(all["sandbox"].take()).unwrap()],
            pods: vec![serde_json::from_value(all["pod"].take()).unwrap()],
            nodes: vec![serde_json::from_value(node).unwrap()],
            ..World::default()
        }
    }

    /// A merge patch (RFC 7396).
    fn json_patch(target: &mut Value, patch: Value) {
        let Value::Object(patch) = patch else {
            *target = patch;
            return;
        };
        for (key, value) in patch {
            match value {
                Value::Null => drop(target.as_object_mut().unwrap().remove(&key)),
                value => json_patch(&mut target[key], value),
            }
        }
    }

    fn classes() -> Vec<RuntimeClass> {
        vec![RuntimeClass {
            metadata: serde_json::from_value(json!({"name": "class"})).unwrap(),
            handler: "h".to_owned(),
            ..RuntimeClass::default()
        }]
    }

    fn planned(sandbox: Value, pod: Value) -> Option<Plan> {
        let parts = parts(&world(sandbox, pod), &classes(), "n");
        parts.into_iter().next().map(|part| part.plan)
    }

    #[test]
    fn what_runs_on_the_node_and_can_be_saved_is_suspended() {
        let parts = parts(&world(json!({}), json!({})), &classes(), "n");
        let words: Vec<_> = parts.iter().map(Part::words).collect();
        assert_eq!(words, ["sandbox.agents.x-k8s.io/s -n x"]);
        assert_eq!(parts[0].plan, Plan::Keep);
    }

    #[test]
    fn who_is_being_suspended_by_somebody_else_is_waited_for() {
        let suspended = json!({"spec": {"operatingMode": "Suspended"}});
        assert_eq!(planned(suspended, json!({})), Some(Plan::Await));
    }

    #[rstest]
    #[case::a_pools(
        json!({"metadata": {"ownerReferences": [
            {"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool", "name": "w", "uid": "w", "controller": true},
        ]}}),
        json!({})
    )]
    #[case::goes(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), json!({}))]
    #[case::elsewhere(json!({}), json!({"spec": {"nodeName": "m"}}))]
    #[case::waits_for_a_node(json!({}), json!({"spec": {"nodeName": null}}))]
    #[case::has_not_started(json!({}), json!({"status": {"phase": "Pending"}}))]
    #[case::has_ended(json!({}), json!({"status": {"phase": "Failed"}}))]
    #[case::is_evicted(json!({}), json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))]
    #[case::anothers(json!({}), json!({"metadata": {"ownerReferences": null}}))]
    fn nothing_is_done_with_what_does_not_run_there(#[case] sandbox: Value, #[case] pod: Value) {
        assert_eq!(planned(sandbox, pod), None);
    }

    #[test]
    fn what_every_pod_tolerates_is_no_cordon() {
        let not_ready = json!({"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300});
        let all_but_scheduling = json!({"operator": "Exists", "effect": "NoExecute"});
        let pod = json!({"spec": {"tolerations": [not_ready, all_but_scheduling]}});
        assert_eq!(planned(json!({}), pod), Some(Plan::Keep));
    }

    #[rstest]
    #[case::stops(
        json!({"metadata": {"annotations": {"torpor.dev/suspension-strategy": "Stop"}}}),
        json!({}),
        "its suspension-strategy is Stop"
    )]
    #[case::stays_frozen(
        json!({
            "metadata": {"annotations": {"torpor.dev/suspension-strategy": "Freeze"}},
            "spec": {"operatingMode": "Suspended"},
        }),
        json!({}),
        "its suspension-strategy is Freeze"
    )]
    #[case::says_something_else(
        json!({"status": {"conditions": [{
            "type": "Hibernated", "status": "False", "reason": "InvalidAnnotation", "message": "which one",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }]}}),
        json!({}),
        "its condition would not tell what became of its memory (InvalidAnnotation: which one)"
    )]
    #[case::tolerates_all(
        json!({}),
        json!({"spec": {"tolerations": [{"operator": "Exists"}]}}),
        "its Pod tolerates a cordoned node"
    )]
    #[case::tolerates_cordons(
        json!({}),
        json!({"spec": {"tolerations": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]}}),
        "its Pod tolerates a cordoned node"
    )]
    #[case::is_not_scheduled(
        json!({"spec": {"podTemplate": {"spec": {"nodeName": "n"}}}}),
        json!({}),
        "its Pod tolerates a cordoned node"
    )]
    #[case::default_runtime(
        json!({}),
        json!({"spec": {"runtimeClassName": null}}),
        "the default runtime keeps no memory"
    )]
    #[case::other_runtime(
        json!({}),
        json!({"spec": {"runtimeClassName": "runc"}}),
        "RuntimeClass runc keeps no memory on this node"
    )]
    fn what_would_lose_its_memory_is_left_and_the_reason_is_said(
        #[case] sandbox: Value,
        #[case] pod: Value,
        #[case] why: &str,
    ) {
        let Some(Plan::Leave(said)) = planned(sandbox, pod) else {
            panic!("it is not left");
        };
        assert!(said.starts_with(why), "{said}");
    }
}
