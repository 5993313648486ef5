//! No client required. Plans the golden Sandbox of a template and its snapshots: pure, total,
//! deterministic.

use std::{cmp::Reverse, collections::BTreeSet, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::Value;
use torpor_api::{
    PodRecord, Sandbox, SandboxNode, SandboxSnapshot, SandboxTemplate, annotations, conditions,
};

use super::{images, sandbox};
use crate::time_left::time_left;

/// Time that a golden sandbox has until it is saved. Another one is then started.
pub const LIMIT: Duration = Duration::from_secs(600);
/// Time for which the next node waits for the upload of an image before it starts a golden sandbox
/// cold.
const UPLOAD: Duration = Duration::from_secs(120);

/// Input of the plan for one template.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    pub template: Arc<SandboxTemplate>,
    /// Name of the golden Sandbox of this version of the template.
    pub name: String,
    /// Sandboxes that the template controls: golden ones of all versions.
    pub sandboxes: Vec<Arc<Sandbox>>,
    /// SandboxSnapshots of golden Sandboxes of the template, of all versions.
    pub snapshots: Vec<Arc<SandboxSnapshot>>,
    /// Pod of the golden Sandbox of this version.
    pub pod: Option<Arc<Pod>>,
    /// Nodes with members of this version.
    pub member_nodes: BTreeSet<String>,
    pub nodes: Vec<Arc<SandboxNode>>,
    /// True if the template's NetworkPolicy is in place.
    pub isolated: bool,
    /// True if the SnapshotClass that the template names has a repository.
    pub uploads: bool,
}

/// Step of a plan: one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// `node`: the only node on which it may run; `None`: any. `copied`: golden SandboxSnapshot of
    /// another node from which it continues; `None`: it starts cold.
    CreateSandbox {
        node: Option<String>,
        copied: Option<String>,
    },
    /// `uploads`: the image goes to the repository of the class that the template names.
    CreateSnapshot {
        pod: PodRecord,
        uploads: bool,
    },
    DeleteSandbox {
        name: String,
        uid: String,
    },
    DeleteSnapshot {
        name: String,
        uid: String,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<Action>,
    pub requeue: Option<Duration>,
    /// Why there is no image, for an Event about the template.
    pub problem: Option<String>,
}

/// Reports whether the template asks for golden images.
pub fn is_wanted(template: &SandboxTemplate) -> bool {
    annotations::is_golden(template.annotations()) && template.metadata.deletion_timestamp.is_none()
}

/// Reports whether the golden sandboxes of further nodes continue from the first node's image.
fn is_shared(template: &SandboxTemplate) -> bool {
    let value = template.annotations().get(annotations::GOLDEN);
    value.is_some_and(|value| value == annotations::GOLDEN_SHARED)
}

/// Returns why a template that asks for golden images cannot have them.
pub fn unfit(template: &SandboxTemplate) -> Option<String> {
    let spec = template.spec.pod_template.spec.json();
    let listed = |key: &str| {
        let list = spec.get(key).and_then(Value::as_array);
        list.into_iter().flatten()
    };
    let has_claim = |volume: &Value| {
        let kinds = ["persistentVolumeClaim", "ephemeral", "csi"];
        kinds.iter().any(|kind| volume.get(*kind).is_some())
    };
    let has_hook = |container: &Value| !container["lifecycle"]["postStart"].is_null();
    let why = if spec.get("runtimeClassName").is_none_or(Value::is_null) {
        "it names no RuntimeClass that keeps memory"
    } else if !template.spec.volume_claim_templates.is_empty() || listed("volumes").any(has_claim) {
        "its sandboxes have PersistentVolumeClaims or CSI volumes, whose files would not be those of the image"
    } else if listed("containers")
        .chain(listed("initContainers"))
        .any(has_hook)
    {
        "a container has a postStart hook, which cannot run in a sandbox that sleeps"
    } else if listed("initContainers").any(|container| !container["startupProbe"].is_null()) {
        "a sidecar has a startup probe, for which the containers after it would wait"
    } else if spec.get("restartPolicy").and_then(Value::as_str) == Some("Never") {
        "its containers are never restarted, as a member is that cannot continue from the image"
    } else if let Some(Err(invalid)) = sandbox::ready_exec(template) {
        return Some(format!("No golden image is made: {invalid}"));
    } else {
        return None;
    };
    Some(format!(
        "No golden image is made of SandboxTemplate {:?}, because {why}; its members start cold",
        template.name_any()
    ))
}

/// Plans the steps for one template.
pub fn plan(observed: &Observed, now: Timestamp) -> Plan {
    let template = &observed.template;
    let mut plan = Plan::default();
    if template.metadata.deletion_timestamp.is_some() {
        return plan;
    }
    let problem = is_wanted(template).then(|| unfit(template)).flatten();
    let current = is_wanted(template) && problem.is_none();
    plan.problem = problem;
    let is_current = |name: &str| current && name == observed.name;
    for old in observed
        .sandboxes
        .iter()
        .filter(|one| !is_current(&one.name_any()))
    {
        delete_sandbox(&mut plan, old);
    }
    for old in &observed.snapshots {
        let stale = !is_current(&old.spec.sandbox_name)
            || !fits(observed, old)
            || is_left_over(observed, old);
        if stale && old.metadata.deletion_timestamp.is_none() {
            let (name, uid) = (old.name_any(), old.uid().unwrap_or_default());
            plan.steps.push(Action::DeleteSnapshot { name, uid });
        }
    }
    if current {
        let own = observed.sandboxes.iter();
        match own.into_iter().find(|one| one.name_any() == observed.name) {
            Some(golden) => plan_golden(&mut plan, observed, golden, now),
            None => plan_next(&mut plan, observed, now),
        }
    }
    plan
}

fn delete_sandbox(plan: &mut Plan, sandbox: &Sandbox) {
    if sandbox.metadata.deletion_timestamp.is_none() {
        let (name, uid) = (sandbox.name_any(), sandbox.uid().unwrap_or_default());
        plan.steps.push(Action::DeleteSandbox { name, uid });
    }
}

/// Reports whether a snapshot was not committed before its Pod went.
fn is_left_over(observed: &Observed, snapshot: &SandboxSnapshot) -> bool {
    let pod = observed.pod.as_ref().and_then(|pod| pod.uid());
    !snapshot.is_committed() && snapshot.spec.pod_uid != pod
}

/// Reports whether the node of a snapshot can still restore its image. A node that does not report
/// may come back.
fn fits(observed: &Observed, snapshot: &SandboxSnapshot) -> bool {
    images::image(snapshot).is_none_or(|(record, _)| fits_on(observed, snapshot, &record.node_name))
}

/// Reports whether a node starts its sandboxes with the build of runsc that made the image, and can
/// restore the image, as far as is known. The members of a pool get a new build with the node.
fn fits_on(observed: &Observed, snapshot: &SandboxSnapshot, node: &str) -> bool {
    let mut nodes = observed.nodes.iter();
    let node = nodes.find(|one| one.name_any() == node);
    node.is_none_or(|node| node.starts_with_build_of(snapshot) && node.lacks(snapshot).is_empty())
}

/// Plans for a golden Sandbox that exists: saves it once it is Ready, and deletes it once it is
/// saved.
fn plan_golden(plan: &mut Plan, observed: &Observed, golden: &Sandbox, now: Timestamp) {
    if golden.metadata.deletion_timestamp.is_some() {
        return;
    }
    let ready = golden
        .status
        .as_ref()
        .and_then(|status| conditions::find(&status.conditions, conditions::READY).cloned());
    let record = observed.pod.as_deref().and_then(PodRecord::of);
    let saved = record.as_ref().and_then(|record| {
        let name = sandbox::snapshot_name(&observed.name, record);
        observed.snapshots.iter().find(|one| one.name_any() == name)
    });
    match (saved, &record, &ready) {
        (Some(saved), ..) if saved.is_committed() => return delete_sandbox(plan, golden),
        (None, Some(record), Some(ready)) if ready.status == "True" => {
            let pod = record.clone();
            // One image in the repository suffices for all nodes of a kind.
            let mut uploaded = current(observed).filter(|(image, _)| image.is_uploaded());
            let uploads = !uploaded.any(|(image, _)| fits_on(observed, image, &pod.node_name));
            plan.steps.push(Action::CreateSnapshot { pod, uploads });
        }
        _ => {}
    }
    let created = golden.metadata.creation_timestamp.as_ref().map(|at| at.0);
    let age = created.and_then(|at| Duration::try_from(now.duration_since(at)).ok());
    let left = LIMIT.checked_sub(age.unwrap_or_default());
    if let Some(left) = left.filter(|left| !left.is_zero()) {
        plan.requeue = Some(left);
        return;
    }
    delete_sandbox(plan, golden);
    let committed =
        saved.and_then(|saved| conditions::find(saved.conditions(), conditions::COMMITTED));
    let why = committed
        .or(ready.as_ref())
        .map(|condition| condition.message.clone());
    plan.problem = Some(format!(
        "Golden Sandbox {:?} was not saved within {} minutes, and another one is started; its condition says: {}",
        observed.name,
        LIMIT.as_secs() / 60,
        why.unwrap_or_default()
    ));
}

/// Plans the next golden Sandbox: the first one anywhere, then one on each node that has members
/// and no image. A node on which it cannot start holds the others up for [`LIMIT`] at most. It
/// continues from an image that it can fetch, if there is one.
fn plan_next(plan: &mut Plan, observed: &Observed, now: Timestamp) {
    let template = &observed.template;
    if !observed.isolated {
        return;
    }
    let mut made: Vec<_> = current(observed).collect();
    made.sort_by_key(|(image, _)| Reverse(image.metadata.creation_timestamp.clone()));
    let nodes: BTreeSet<String> = made.iter().map(|(_, node)| node.clone()).collect();
    let without: Vec<&String> = observed.member_nodes.difference(&nodes).collect();
    let turn = now.as_second().unsigned_abs() / LIMIT.as_secs();
    let node = without.get(usize::try_from(turn).unwrap_or_default() % without.len().max(1));
    if nodes.is_empty() {
        let (node, copied) = (None, None);
        plan.steps.push(Action::CreateSandbox { node, copied });
    } else if let Some(node) = node {
        let images = made.iter().map(|(image, _)| *image);
        let fitting: Vec<_> = images.filter(|one| fits_on(observed, one, node)).collect();
        let is_served = |image: &&&SandboxSnapshot| {
            is_shared(template)
                && serves(observed, node, now)
                && images::image(image).is_some_and(|(of, _)| serves(observed, &of.node_name, now))
        };
        let uploaded = fitting.iter().find(|image| image.is_uploaded());
        let copied = uploaded.or_else(|| fitting.iter().find(is_served));
        if copied.is_none()
            && observed.uploads
            && let Some(left) = fitting.iter().filter_map(|image| upload(image, now)).max()
        {
            plan.requeue = Some(left);
            return;
        }
        plan.steps.push(Action::CreateSandbox {
            node: Some((*node).clone()),
            copied: copied.map(|image| image.name_any()),
        });
    }
}

fn serves(observed: &Observed, node: &str, now: Timestamp) -> bool {
    let found = observed.nodes.iter().find(|one| one.name_any() == node);
    found.is_some_and(|node| !node.is_silent(now) && node.serves_images())
}

/// Returns the committed images of this version that their nodes can restore, each with its node.
fn current(observed: &Observed) -> impl Iterator<Item = (&SandboxSnapshot, String)> {
    let made = observed.snapshots.iter().filter(|one| {
        one.spec.sandbox_name == observed.name
            && one.metadata.deletion_timestamp.is_none()
            && fits(observed, one)
    });
    made.filter_map(|one| Some((&**one, images::image(one)?.0.node_name)))
}

/// Returns how long another node still waits for the upload of an image.
fn upload(image: &SandboxSnapshot, now: Timestamp) -> Option<Duration> {
    image.spec.snapshot_class_name.as_ref()?;
    time_left(UPLOAD, Some(image.committed_at()?), now)
}

#[cfg(test)]
mod tests;
