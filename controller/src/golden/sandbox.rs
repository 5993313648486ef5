//! No client required. Builds the golden Sandbox of a template and the SandboxSnapshot of it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource, ResourceExt};
use serde_json::{Map, Value, json};
use torpor_api::{PodRecord, SandboxSnapshot, SandboxTemplate, annotations, labels, name_hash};

use crate::{blueprint, owners::owner_reference, sandbox::pod_spec, saved_pod};

/// Most failures of the command that says when a golden sandbox is ready: ten minutes, once a
/// second. The controller then starts another golden sandbox.
const MOST_FAILURES: u32 = 600;

/// Returns the golden Sandbox. `node`: the only node on which it may run; `None`: any. `copied`:
/// SandboxSnapshot from which it continues.
pub(super) fn sandbox(
    template: &SandboxTemplate,
    name: &str,
    node: Option<&str>,
    copied: Option<&str>,
) -> Value {
    let mut pod = blueprint::secured_pod_spec(template);
    forget_other_pods(&mut pod);
    if let Some(node) = node {
        pod_spec::require_nodes(&mut pod, &[node.to_owned()]);
    }
    if let Some(Ok(command)) = ready_exec(template) {
        let first = pod.get_mut("containers").and_then(|all| all.get_mut(0));
        if let Some(container) = first.and_then(Value::as_object_mut) {
            let probe = json!({
                "exec": {"command": command},
                "periodSeconds": 1,
                "timeoutSeconds": 10,
                "failureThreshold": MOST_FAILURES,
            });
            container.insert("startupProbe".to_owned(), probe);
        }
    }
    let metadata = template.spec.pod_template.metadata.as_ref();
    let mut spec = blueprint::sandbox_spec(template, metadata, pod, &[]);
    spec["service"] = false.into();
    let mut on_sandbox = blueprint::sandbox_annotations(template);
    on_sandbox[annotations::POD_NAME] = json!(name);
    // It is saved as soon as it is Ready.
    for key in [annotations::DOZE_AFTER, annotations::HIBERNATE_AFTER] {
        on_sandbox[key] = "off".into();
    }
    if let Some(snapshot) = copied {
        on_sandbox[annotations::RESTORE_FROM] = snapshot.into();
        let cold = annotations::OnRestoreFailure::ColdStart;
        on_sandbox[annotations::ON_RESTORE_FAILURE] = cold.as_str().into();
    }
    let template_hash = name_hash(&template.name_any());
    json!({
        "apiVersion": torpor_api::Sandbox::api_version(&()),
        "kind": torpor_api::Sandbox::kind(&()),
        "metadata": {
            "name": name,
            "namespace": template.namespace(),
            "labels": {
                labels::GOLDEN: template_hash,
                labels::SANDBOX_TEMPLATE_REF_HASH: template_hash,
                labels::CREATED_BY: "controller",
            },
            "annotations": on_sandbox,
            "ownerReferences": [owner_reference(template)],
        },
        "spec": spec,
    })
}

/// Removes the rules of placement beside other Pods, for a Pod that goes to one node and ends soon.
pub fn forget_other_pods(pod: &mut Map<String, Value>) {
    pod.remove("topologySpreadConstraints");
    if let Some(affinity) = pod.get_mut("affinity").and_then(Value::as_object_mut) {
        affinity.remove("podAffinity");
        affinity.remove("podAntiAffinity");
    }
}

/// Returns the command that must succeed before a golden sandbox is saved, if there is one.
pub(super) fn ready_exec(
    template: &SandboxTemplate,
) -> Option<Result<Vec<String>, annotations::InvalidAnnotation>> {
    let key = annotations::GOLDEN_READY_EXEC;
    let value = template.annotations().get(key)?;
    Some(annotations::parse_command(key, value))
}

/// Returns the name of the snapshot of a golden Pod.
pub(super) fn snapshot_name(sandbox: &str, pod: &PodRecord) -> String {
    let suffix = format!("-{}", pod.uid.get(..8).unwrap_or(&pod.uid));
    // Unlike a Sandbox's, the name is no hostname.
    sandbox.to_owned() + &suffix
}

/// Returns the SandboxSnapshot of the golden Sandbox' Pod. It has the record of that Pod from the
/// beginning: the golden Sandbox does not outlive it.
///
/// `uploads`: it has the SnapshotClass that the template names.
pub(super) fn snapshot(
    template: &SandboxTemplate,
    sandbox: &str,
    pod: &PodRecord,
    uploads: bool,
) -> Value {
    let mut on_snapshot = saved_pod::annotation(pod);
    on_snapshot[annotations::SANDBOX_TEMPLATE_REF] = json!(template.name_any());
    // The controller of a snapshot would be its Sandbox.
    let owner = OwnerReference {
        controller: Some(false),
        block_owner_deletion: Some(false),
        ..owner_reference(template)
    };
    let mut snapshot = json!({
        "apiVersion": SandboxSnapshot::api_version(&()),
        "kind": SandboxSnapshot::kind(&()),
        "metadata": {
            "name": snapshot_name(sandbox, pod),
            "namespace": template.namespace(),
            "labels": {labels::GOLDEN: name_hash(&template.name_any())},
            "annotations": on_snapshot,
            "ownerReferences": [owner],
        },
        "spec": {
            "sandboxName": sandbox,
            "podUID": pod.uid,
            "nodeName": pod.node_name,
            "reason": "Manual",
        },
    });
    let class = template.annotations().get(annotations::SNAPSHOT_CLASS);
    if let Some(class) = class.filter(|_| uploads) {
        snapshot["spec"]["snapshotClassName"] = class.clone().into();
    }
    snapshot
}
