//! `drain`: saves the memory of a node's sandboxes before `kubectl drain`, which evicts their Pods.
//! The memory of an awake sandbox is lost by an eviction.
//!
//! Each sandbox is suspended and resumed at once. Its next Pod continues from the image on another
//! node that fits, or on this one when it is uncordoned. The drain therefore needs no state of its
//! own. [`targets`] decides what to do with each sandbox, and is pure.

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
use crate::error::{Error, full_message};
use crate::goal::{Goal, RESUMED};
use crate::objects::{Objects, Scope, list};
use crate::view::{conditions_of, pod_of, pods_by_owner};

/// Number of sandboxes that are suspended at the same time; the node limits the concurrent saves.
const AT_ONCE: usize = 16;
/// Maximum number of suspensions of a sandbox that a request or its `next-wakeup` resumes
/// meanwhile, and of attempts to resume it.
const TRIES: u32 = 3;
/// Delay between two tries.
const PAUSE: Duration = Duration::from_secs(1);

/// Sandbox whose Pod is on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub namespace: String,
    pub name: String,
    /// UID, because another Sandbox may get the same name meanwhile.
    pub uid: Option<String>,
    pub plan: Plan,
}

/// Action for one sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// Suspend it, then resume it.
    Suspend,
    /// Wait for the suspension that another client requested.
    Await,
    /// Leave it as it is, because its memory cannot be kept for this reason.
    Skip(String),
}

impl Target {
    /// Returns the name and namespace in kubectl's form.
    pub fn kubectl_name(&self) -> String {
        let Self {
            namespace, name, ..
        } = self;
        format!("sandbox.agents.x-k8s.io/{name} -n {namespace}")
    }
}

/// Outcome of the suspension of one sandbox.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The sandbox is suspended with its memory, after this time.
    MemoryKept(Duration),
    /// The sandbox is suspended without its memory, for this reason.
    MemoryLost(String),
    /// The Sandbox does not exist any more, or another client suspended it: nothing was done.
    Gone,
}

/// Failure to suspend one sandbox.
#[derive(Debug, thiserror::Error)]
pub enum SuspendError {
    /// The sandbox keeps running on the node.
    #[error(transparent)]
    StillRuns(Error),
    /// The sandbox is suspended, or will be, and could not be resumed.
    #[error("{error}; the sandbox could not be resumed ({resume})")]
    StaysSuspended { error: String, resume: Error },
}

/// Returns the sandboxes on the node, each with its plan.
///
/// Unclaimed members of a pool are left out: they have no memory to keep, and their pool creates
/// others elsewhere.
pub fn targets(objects: &Objects, classes: &[RuntimeClass], node: &str) -> Vec<Target> {
    let pods = pods_by_owner(&objects.pods);
    let report = objects
        .nodes
        .iter()
        .find(|report| report.name_any() == node);
    let target = |sandbox: &Sandbox| {
        let pod = pod_of(&pods, sandbox).filter(|pod| runs_on(pod, node))?;
        let counts = sandbox.metadata.deletion_timestamp.is_none() && !is_unclaimed(sandbox);
        counts.then(|| Target {
            namespace: sandbox.namespace().unwrap_or_default(),
            name: sandbox.name_any(),
            uid: sandbox.uid(),
            plan: plan(sandbox, pod, classes, report),
        })
    };
    objects.sandboxes.iter().filter_map(target).collect()
}

fn runs_on(pod: &Pod, node: &str) -> bool {
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
    match reason_to_skip(sandbox, pod, classes, node) {
        Some(why) => Plan::Skip(why),
        None if sandbox.spec.operating_mode == OperatingMode::Suspended => Plan::Await,
        None => Plan::Suspend,
    }
}

/// Returns why a suspension would not keep the memory, or not until the drain.
fn reason_to_skip(
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
    let condition = conditions::find(conditions_of(sandbox), HIBERNATED);
    let hides_outcome = [
        hibernated::INVALID_ANNOTATION,
        hibernated::SNAPSHOT_CLASS_NOT_SUPPORTED,
    ];
    let hiding = condition.filter(|found| hides_outcome.contains(&found.reason.as_str()));
    if let Some(hiding) = hiding {
        return Some(format!(
            "its condition Hibernated would not report whether the memory was saved ({}: {})",
            hiding.reason, hiding.message
        ));
    }
    if ignores_cordon(sandbox, pod) {
        return Some(
            "its Pod tolerates a cordoned node, and would return to the node before the drain"
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

/// Reports whether a cordon does not keep the next Pod away.
///
/// A template that names the node bypasses the scheduler. For a cordoned node the scheduler checks
/// tolerations of a taint (Kubernetes, `pkg/scheduler/framework/plugins/nodeunschedulable`).
fn ignores_cordon(sandbox: &Sandbox, pod: &Pod) -> bool {
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

/// Cordons the node; with `dry_run` only checks that the node exists.
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

/// Returns the sandboxes on the node, and the reasons why objects could not be read.
pub async fn look(cluster: &Cluster, node: &str) -> Result<(Vec<Target>, Vec<String>), Error> {
    let classes: Api<DeserializeGuard<RuntimeClass>> = Api::all(cluster.client.clone());
    let (objects, classes) = tokio::join!(
        Objects::list(cluster, Scope::Everywhere),
        list("RuntimeClasses", &classes)
    );
    let (mut objects, classes) = (objects?, classes?);
    let mut unseen = std::mem::take(&mut objects.unseen);
    unseen.extend(classes.unread);
    Ok((targets(&objects, &classes.items, node), unseen))
}

/// Suspends and resumes the targets that are not skipped.
///
/// `ended` receives the result of each target as soon as it is known.
pub async fn suspend_all(
    cluster: &Cluster,
    targets: &[Target],
    limit: Duration,
    say: &(dyn Fn(&str) + Sync),
    mut ended: impl FnMut(&Target, Result<Outcome, SuspendError>),
) {
    let to_do = targets
        .iter()
        .filter(|target| !matches!(target.plan, Plan::Skip(_)));
    let each = to_do.map(async |target| (target, suspend_one(cluster, target, limit, say).await));
    let mut each = std::pin::pin!(futures::stream::iter(each).buffer_unordered(AT_ONCE));
    while let Some((target, result)) = each.next().await {
        ended(target, result);
    }
}

async fn suspend_one(
    cluster: &Cluster,
    target: &Target,
    limit: Duration,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Outcome, SuspendError> {
    let cluster = &Cluster {
        client: cluster.client.clone(),
        namespace: target.namespace.clone(),
    };
    let say: &(dyn Fn(&str) + Sync) = &|text: &str| say(&format!("{}/{text}", target.namespace));
    let mut left = TRIES;
    loop {
        left -= 1;
        // The target may have waited for long since it was listed.
        let Some(now) = Box::pin(current(cluster, target))
            .await
            .map_err(SuspendError::StillRuns)?
        else {
            return Ok(Outcome::Gone);
        };
        let by_others = now.spec.operating_mode == OperatingMode::Suspended;
        if by_others && target.plan == Plan::Suspend && left + 1 == TRIES {
            return Ok(Outcome::Gone);
        }
        let suspended = Box::pin(change(cluster, Goal::Suspend, &target.name, limit, say)).await;
        if target.plan == Plan::Await {
            return match suspended {
                Ok(done) => Ok(outcome(done)),
                Err(error) => Err(SuspendError::StillRuns(error)),
            };
        }
        match suspended {
            Err(Error::Refused { message, .. }) if message == RESUMED && left > 0 => {
                tokio::time::sleep(PAUSE).await;
            }
            Err(error) => return call_off(cluster, target, error).await,
            Ok(done) => return resume_suspended(cluster, target, done).await,
        }
    }
}

fn outcome(done: Changed) -> Outcome {
    match done.note {
        None => Outcome::MemoryKept(done.took.unwrap_or_default()),
        Some(lost) => Outcome::MemoryLost(lost),
    }
}

/// Returns the Sandbox as it is now; `None` if it is deleted or another one has its name.
async fn current(cluster: &Cluster, target: &Target) -> Result<Option<Sandbox>, Error> {
    let sandboxes = cluster.api::<Sandbox>();
    let doing = format!("get Sandbox {}", target.name);
    match call(&doing, sandboxes.get(&target.name)).await {
        Ok(now) => {
            let same = now.metadata.uid == target.uid && now.metadata.deletion_timestamp.is_none();
            Ok(same.then_some(now))
        }
        Err(error) if error.is_missing() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Resumes a suspended Sandbox, without a wait: its next Pod may have to wait for a node.
async fn resume_suspended(
    cluster: &Cluster,
    target: &Target,
    done: Changed,
) -> Result<Outcome, SuspendError> {
    match Box::pin(resume(cluster, target)).await {
        Ok(()) => Ok(outcome(done)),
        Err(resume) => Err(SuspendError::StaysSuspended {
            error: "suspended".to_owned(),
            resume,
        }),
    }
}

/// Calls off a suspension that failed, so that the command leaves no Sandbox suspended.
async fn call_off(
    cluster: &Cluster,
    target: &Target,
    error: Error,
) -> Result<Outcome, SuspendError> {
    match Box::pin(resume(cluster, target)).await {
        Ok(()) => match Box::pin(current(cluster, target)).await {
            Ok(None) => Ok(Outcome::Gone),
            _ => Err(SuspendError::StillRuns(error)),
        },
        Err(resume) => Err(SuspendError::StaysSuspended {
            error: full_message(&error),
            resume,
        }),
    }
}

async fn resume(cluster: &Cluster, target: &Target) -> Result<(), Error> {
    let mut left = TRIES;
    loop {
        left -= 1;
        let patched = async {
            if Box::pin(current(cluster, target)).await?.is_some() {
                let quietly = &|_: &str| {};
                let no_wait = Duration::ZERO;
                Box::pin(change(
                    cluster,
                    Goal::Resume,
                    &target.name,
                    no_wait,
                    quietly,
                ))
                .await?;
            }
            Ok(())
        };
        match patched.await {
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

    /// Returns a Sandbox with its Pod on node `n` and RuntimeClass `class`, whose handler `h` can
    /// hibernate on `n`.
    fn objects(sandbox: Value, pod: Value) -> Objects {
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
        Objects {
            sandboxes: vec![serde_json::from_value(all["sandbox"].take()).unwrap()],
            pods: vec![serde_json::from_value(all["pod"].take()).unwrap()],
            nodes: vec![serde_json::from_value(node).unwrap()],
            ..Objects::default()
        }
    }

    /// Applies a merge patch (RFC 7396).
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
        let targets = targets(&objects(sandbox, pod), &classes(), "n");
        targets.into_iter().next().map(|target| target.plan)
    }

    #[test]
    fn a_sandbox_on_the_node_that_can_be_saved_is_suspended() {
        let targets = targets(&objects(json!({}), json!({})), &classes(), "n");
        let names: Vec<_> = targets.iter().map(Target::kubectl_name).collect();
        assert_eq!(names, ["sandbox.agents.x-k8s.io/s -n x"]);
        assert_eq!(targets[0].plan, Plan::Suspend);
    }

    #[test]
    fn a_suspension_by_another_client_is_waited_for() {
        let suspended = json!({"spec": {"operatingMode": "Suspended"}});
        assert_eq!(planned(suspended, json!({})), Some(Plan::Await));
    }

    #[rstest]
    #[case::pool_member(
        json!({"metadata": {"ownerReferences": [
            {"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool", "name": "w", "uid": "w", "controller": true},
        ]}}),
        json!({})
    )]
    #[case::is_deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), json!({}))]
    #[case::elsewhere(json!({}), json!({"spec": {"nodeName": "m"}}))]
    #[case::waits_for_a_node(json!({}), json!({"spec": {"nodeName": null}}))]
    #[case::has_not_started(json!({}), json!({"status": {"phase": "Pending"}}))]
    #[case::has_ended(json!({}), json!({"status": {"phase": "Failed"}}))]
    #[case::is_evicted(json!({}), json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))]
    #[case::pod_of_another_owner(json!({}), json!({"metadata": {"ownerReferences": null}}))]
    fn a_sandbox_that_does_not_run_on_the_node_is_left_out(
        #[case] sandbox: Value,
        #[case] pod: Value,
    ) {
        assert_eq!(planned(sandbox, pod), None);
    }

    #[test]
    fn a_pod_with_the_default_tolerations_does_not_ignore_a_cordon() {
        let not_ready = json!({"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300});
        let all_but_scheduling = json!({"operator": "Exists", "effect": "NoExecute"});
        let pod = json!({"spec": {"tolerations": [not_ready, all_but_scheduling]}});
        assert_eq!(planned(json!({}), pod), Some(Plan::Suspend));
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
    #[case::has_an_invalid_annotation(
        json!({"status": {"conditions": [{
            "type": "Hibernated", "status": "False", "reason": "InvalidAnnotation", "message": "which one",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }]}}),
        json!({}),
        "its condition Hibernated would not report whether the memory was saved (InvalidAnnotation: which one)"
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
    fn a_sandbox_that_would_lose_its_memory_is_skipped_with_the_reason(
        #[case] sandbox: Value,
        #[case] pod: Value,
        #[case] why: &str,
    ) {
        let Some(Plan::Skip(reason)) = planned(sandbox, pod) else {
            panic!("not skipped");
        };
        assert!(reason.starts_with(why), "{reason}");
    }
}
