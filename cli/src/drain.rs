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
use torpor_api::{OperatingMode, Sandbox, SandboxNode, SandboxWarmPool};

use crate::change::{Changed, change};
use crate::connect::{Cluster, call};
use crate::error::Error;
use crate::goal::Goal;
use crate::view::{pod_of, pods_by_owner};
use crate::world::{Scope, World, list};

/// Sandboxes that are asked at the same time; their node saves as many at once as it may.
const AT_ONCE: usize = 16;

/// One Sandbox whose Pod is on the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub namespace: String,
    pub name: String,
    /// Why its memory cannot be kept; none: it is suspended.
    pub left: Option<String>,
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
#[derive(Debug)]
pub enum Kept {
    /// Suspended with its memory, after so long, and asked to run again.
    Yes(Duration),
    /// Suspended and asked to run again; its memory is lost, and why.
    No(String),
}

/// What there is on the node, and what is to be done with each. Who is suspended already needs nothing, and nobody misses what a member of a pool has in
/// memory that was not claimed yet: its pool makes another elsewhere.
pub fn parts(world: &World, classes: &[RuntimeClass], node: &str) -> Vec<Part> {
    let pods = pods_by_owner(&world.pods);
    let on_node = |sandbox: &&Sandbox| {
        let pod = pod_of(&pods, sandbox);
        pod.is_some_and(|pod| is_on(pod, node)) && wants_to_run(sandbox)
    };
    let told = world.nodes.iter().find(|told| told.name_any() == node);
    let part = |sandbox: &Sandbox| Part {
        namespace: sandbox.namespace().unwrap_or_default(),
        name: sandbox.name_any(),
        left: cannot_keep(sandbox, pod_of(&pods, sandbox), classes, told),
    };
    world.sandboxes.iter().filter(on_node).map(part).collect()
}

fn is_on(pod: &Pod, node: &str) -> bool {
    let placed = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    let phase = pod.status.as_ref().and_then(|now| now.phase.as_deref());
    let ended = matches!(phase, Some("Succeeded" | "Failed"));
    placed == Some(node) && !ended && pod.metadata.deletion_timestamp.is_none()
}

fn wants_to_run(sandbox: &Sandbox) -> bool {
    sandbox.metadata.deletion_timestamp.is_none()
        && sandbox.spec.operating_mode != OperatingMode::Suspended
        && !is_unclaimed(sandbox)
}

fn is_unclaimed(sandbox: &Sandbox) -> bool {
    let mut owners = sandbox.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.controller == Some(true) && owner.kind == SandboxWarmPool::kind(&()))
}

/// Why a suspension would not keep its memory.
fn cannot_keep(
    sandbox: &Sandbox,
    pod: Option<&Pod>,
    classes: &[RuntimeClass],
    node: Option<&SandboxNode>,
) -> Option<String> {
    let annotations = sandbox.metadata.annotations.as_ref();
    let strategy = Settings::read(annotations, sandbox.spec.pod_template.annotations()).strategy();
    if strategy != SuspensionStrategy::Hibernate {
        return Some(format!("its suspension-strategy is {strategy:?}"));
    }
    let class = pod.and_then(|pod| pod.spec.as_ref()?.runtime_class_name.as_deref());
    let Some(class) = class else {
        return Some("the default runtime keeps no memory".to_owned());
    };
    let known = classes.iter().find(|known| known.name_any() == class);
    let handler = known.map_or(class, |known| known.handler.as_str());
    let can = node.is_some_and(|node| node.capabilities(handler).hibernate);
    (!can).then(|| format!("RuntimeClass {class} keeps no memory on this node"))
}

/// Nothing new comes to the node.
pub async fn cordon(cluster: &Cluster, node: &str) -> Result<(), Error> {
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let patch = Patch::Merge(json!({"spec": {"unschedulable": true}}));
    let (doing, parameters) = (format!("cordon node {node}"), PatchParams::default());
    let cordoned = call(&doing, nodes.patch_metadata(node, &parameters, &patch)).await;
    match cordoned {
        Err(error) if error.is_missing() => Err(Error::NoNode {
            name: node.to_owned(),
        }),
        other => other.map(drop),
    }
}

/// Looks what is on the node.
pub async fn look(cluster: &Cluster, node: &str) -> Result<(Vec<Part>, Vec<String>), Error> {
    let classes: Api<DeserializeGuard<RuntimeClass>> = Api::all(cluster.client.clone());
    let (world, classes) = tokio::join!(
        World::look(cluster, Scope::Everywhere),
        list("RuntimeClasses", &classes)
    );
    let (mut world, classes) = (world?, classes?);
    let unseen = std::mem::take(&mut world.unseen);
    Ok((parts(&world, &classes.items, node), unseen))
}

/// Suspends these, and asks each to run again once it is; `ended` hears of each what became of it, as soon as it is known.
pub async fn keep(
    cluster: &Cluster,
    parts: &[Part],
    limit: Duration,
    say: &(dyn Fn(&str) + Sync),
    mut ended: impl FnMut(&Part, Result<Kept, Error>),
) {
    let to_do = parts.iter().filter(|part| part.left.is_none());
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
) -> Result<Kept, Error> {
    let cluster = &Cluster {
        client: cluster.client.clone(),
        namespace: part.namespace.clone(),
    };
    let name = part.name.as_str();
    let Changed { took, note, .. } =
        Box::pin(change(cluster, Goal::Suspend, name, limit, say)).await?;
    // Its Pod is gone. The next one waits for the node: that is not waited for.
    Box::pin(change(cluster, Goal::Resume, name, Duration::ZERO, say)).await?;
    Ok(match note {
        None => Kept::Yes(took.unwrap_or_default()),
        Some(lost) => Kept::No(lost),
    })
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

    fn left(sandbox: Value, pod: Value) -> Option<Option<String>> {
        let parts = parts(&world(sandbox, pod), &classes(), "n");
        parts.into_iter().next().map(|part| part.left)
    }

    #[test]
    fn what_runs_on_the_node_and_can_be_saved_is_suspended() {
        let parts = parts(&world(json!({}), json!({})), &classes(), "n");
        let words: Vec<_> = parts.iter().map(Part::words).collect();
        assert_eq!(words, ["sandbox.agents.x-k8s.io/s -n x"]);
        assert_eq!(parts[0].left, None);
    }

    #[rstest]
    #[case::suspended(json!({"spec": {"operatingMode": "Suspended"}}), json!({}))]
    #[case::a_pools(
        json!({"metadata": {"ownerReferences": [
            {"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool", "name": "w", "uid": "w", "controller": true},
        ]}}),
        json!({})
    )]
    #[case::goes(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), json!({}))]
    #[case::elsewhere(json!({}), json!({"spec": {"nodeName": "m"}}))]
    #[case::waits_for_a_node(json!({}), json!({"spec": {"nodeName": null}}))]
    #[case::has_ended(json!({}), json!({"status": {"phase": "Failed"}}))]
    #[case::is_evicted(json!({}), json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))]
    #[case::anothers(json!({}), json!({"metadata": {"ownerReferences": null}}))]
    fn nothing_is_done_with_what_does_not_run_there(#[case] sandbox: Value, #[case] pod: Value) {
        assert_eq!(left(sandbox, pod), None);
    }

    #[rstest]
    #[case::stops(
        json!({"metadata": {"annotations": {"torpor.dev/suspension-strategy": "Stop"}}}),
        json!({}),
        "its suspension-strategy is Stop"
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
        assert_eq!(left(sandbox, pod), Some(Some(why.to_owned())));
    }
}
