//! Objects that the tests create.

use serde_json::{Value, json};
use torpor_api::PodRecord;
use torpor_test_apiserver::merge_patch;

pub(crate) const NS: &str = "ns";

/// Returns a Sandbox "s" with one container, changed by a merge patch.
pub(crate) fn sandbox(change: Value) -> Value {
    let mut sandbox = json!({
        "metadata": {"name": "s", "namespace": NS},
        "spec": {
            "operatingMode": "Running",
            "podTemplate": {"spec": {"containers": [{"name": "c", "image": "img"}]}},
        },
    });
    merge_patch::apply(&mut sandbox, &change);
    sandbox
}

/// Returns the same Sandbox with the RuntimeClass that can hibernate.
pub(crate) fn torpor_sandbox(change: Value) -> Value {
    let mut sandbox = sandbox(json!({"spec": {"podTemplate": {"spec": {
        "runtimeClassName": "torpor",
    }}}}));
    merge_patch::apply(&mut sandbox, &change);
    sandbox
}

pub(crate) fn mode(mode: &str) -> Value {
    json!({"spec": {"operatingMode": mode}})
}

pub(crate) fn fingerprint() -> Value {
    json!({
        "runscDigest": "sha256:1", "runscVersion": "1", "platform": "systrap",
        "flags": [], "cpuFeaturesDigest": "c", "kernel": "6.1",
    })
}

/// Returns a node report with all capabilities of the handler torpor.
pub(crate) fn sandbox_node(name: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {},
        "status": {
            "runtimes": [{"handler": "torpor", "kind": "gVisor", "capabilities": {
                "hibernate": true, "restore": true, "freeze": true, "backgroundRestore": false,
            }}],
            "fingerprint": fingerprint(),
        },
    })
}

pub(crate) fn runtime_class() -> Value {
    json!({"metadata": {"name": "torpor"}, "handler": "torpor"})
}

/// Returns a kubelet's report about a Pod that runs and is ready.
pub(crate) fn ready_pod(node: &str) -> Value {
    json!({
        "spec": {"nodeName": node},
        "status": {
            "phase": "Running",
            "podIPs": [{"ip": "10.0.0.1"}],
            "containerStatuses": [running("c")],
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True"},
            ],
        },
    })
}

/// Reference of each container's image, as its kubelet reports it.
pub(crate) const IMAGE: &str = "registry.example/img@sha256:abc";

/// Returns a kubelet's status of a running container.
pub(crate) fn running(container: &str) -> Value {
    json!({
        "name": container, "image": "img", "imageID": IMAGE, "ready": true, "restartCount": 0,
        "state": {"running": {}},
    })
}

/// Returns the controller's record of a Pod "s" of this Sandbox on a node.
pub(crate) fn pod_record(sandbox: &Value, uid: &str, node: &str) -> String {
    let record = PodRecord {
        images: [("c".to_owned(), IMAGE.to_owned())].into(),
        name: "s".to_owned(),
        node_name: node.to_owned(),
        sandbox_uid: sandbox["metadata"]["uid"]
            .as_str()
            .unwrap_or_default()
            .to_owned(),
        uid: uid.to_owned(),
    };
    record.to_annotation()
}

/// Returns a condition of any object.
pub(crate) fn condition(type_: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({
        "type": type_, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    })
}

/// Returns an agent's patch of a snapshot whose image is complete.
pub(crate) fn committed(image: &str, node: &str) -> Value {
    json!({
        "metadata": {"finalizers": ["torpor.dev/image"]},
        "status": {
            "imageID": image,
            "nodeName": node,
            "podName": "s",
            "fingerprint": fingerprint(),
            "containers": [{"name": "c", "imageID": IMAGE}],
            "committedAt": "2026-01-01T00:00:00Z",
            "conditions": [condition("Committed", "True", "Committed", "")],
        },
    })
}

/// Returns a manual snapshot of this name.
pub(crate) fn manual_snapshot(name: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": NS},
        "spec": {"sandboxName": "other", "reason": "Manual"},
    })
}

/// Returns a committed snapshot "golden" of another Sandbox.
pub(crate) fn golden() -> Value {
    let mut snapshot = manual_snapshot("golden");
    snapshot["status"] = committed("g.1", "n1")["status"].take();
    snapshot["metadata"]["annotations"] =
        json!({"torpor.dev/saved-pod": pod_record(&Value::Null, "g", "n1")});
    snapshot
}

/// Returns the name hash of the Sandbox.
pub(crate) fn hash() -> String {
    torpor_api::name_hash("s")
}

/// Returns the owner references of an object that another controller owns.
pub(crate) fn foreign_owner() -> Value {
    json!([{
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "u-r", "controller": true,
    }])
}
