use kube::runtime::watcher::Event;
use serde_json::{Value, json};
use torpor_api::PodRecord;
use torpor_api::node::{ImageServer, SandboxReport};

use super::*;

fn node(sandboxes: &Value, heard: &str) -> Arc<SandboxNode> {
    let mut node = serde_json::from_value(json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxNode",
        "metadata": {"name": "n1"}, "spec": {},
        "status": {"heartbeatTime": heard, "sandboxes": sandboxes},
    }))
    .unwrap();
    trim_node(&mut node);
    Arc::new(node)
}

fn asking(name: &str, reason: &str, node: &str) -> Sandbox {
    let record = PodRecord {
        node_name: node.to_owned(),
        sandbox_uid: "o".to_owned(),
        uid: "u".to_owned(),
        ..PodRecord::default()
    };
    serde_json::from_value(json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {
            "name": name, "namespace": "ns", "uid": "o",
            "annotations": {annotations::LAST_POD: record.to_annotation()},
        },
        "spec": {"podTemplate": {"spec": {"containers": []}}},
        "status": {"conditions": [{
            "type": "Restored", "status": "False", "reason": reason, "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }]},
    }))
    .unwrap()
}

#[test]
fn a_new_image_on_a_node_queues_the_sandboxes_that_wait_for_it_and_a_heartbeat_queues_none() {
    let caches = Caches::default();
    caches.sandboxes.apply(Event::Init);
    for (name, reason, node) in [
        ("asks", "AskingNode", "n1"),
        ("asks-another", "AskingNode", "n2"),
        ("started-cold", "ColdStarted", "n1"),
    ] {
        let sandbox = asking(name, reason, node);
        caches.sandboxes.apply(Event::InitApply(sandbox));
    }
    caches.sandboxes.apply(Event::InitDone);
    let none = node(&json!([]), "2026-01-01T00:00:00Z");
    let waiting = |after: Arc<SandboxNode>| {
        let change = Change {
            before: Some(Arc::clone(&none)),
            after: Some(after),
        };
        let keys = waiting_for_node(&change, &caches);
        keys.into_iter().map(|key| key.1).collect::<Vec<_>>()
    };
    let image = json!([{"podUID": "u", "imageID": "u.1", "namespace": "ns", "podName": "s"}]);
    assert_eq!(waiting(node(&image, "2026-01-01T00:00:05Z")), ["asks"]);
    let awake = json!([{"podUID": "u", "namespace": "ns", "podName": "s"}]);
    for nothing_new in [json!([]), awake] {
        let heartbeat = node(&nothing_new, "2026-01-01T00:00:30Z");
        assert!(waiting(heartbeat).is_empty());
    }
}

#[test]
fn a_build_that_the_operator_brings_to_a_node_queues_the_sandboxes_that_wait_for_it() {
    let caches = Caches::default();
    let waits = asking("waits", "FingerprintMismatch", "n1");
    caches.sandboxes.apply(Event::Init);
    caches.sandboxes.apply(Event::InitApply(waits));
    caches.sandboxes.apply(Event::InitDone);
    let before = node(&json!([]), "2026-01-01T00:00:00Z");
    let mut brought = SandboxNode::clone(&before);
    let status = brought.status.as_mut().unwrap();
    status.runsc_builds = vec!["blake3:0123456789ab".to_owned()];
    let change = Change {
        before: Some(before),
        after: Some(Arc::new(brought)),
    };
    let keys = waiting_for_node(&change, &caches);
    let names: Vec<_> = keys.into_iter().map(|key| key.1).collect();
    assert_eq!(names, ["waits"]);
}

#[test]
fn a_node_that_begins_to_serve_images_queues_the_sandboxes_that_wait_for_a_node() {
    let caches = Caches::default();
    let with = |name: &str, node: &str, mode: OperatingMode| {
        let mut sandbox = asking(name, "Restored", node);
        sandbox.spec.operating_mode = mode;
        let status = sandbox.status.as_mut().unwrap();
        status.conditions.clear();
        status.node_name = node.to_owned();
        sandbox
    };
    caches.sandboxes.apply(Event::Init);
    for sandbox in [
        with("pending", "", OperatingMode::Running),
        with("elsewhere", "n2", OperatingMode::Running),
        with("suspended", "", OperatingMode::Suspended),
    ] {
        caches.sandboxes.apply(Event::InitApply(sandbox));
    }
    caches.sandboxes.apply(Event::InitDone);
    let before = node(&json!([]), "2026-01-01T00:00:00Z");
    let mut serving = SandboxNode::clone(&before);
    serving.status.as_mut().unwrap().image_server = Some(ImageServer::default());
    let change = Change {
        before: Some(before),
        after: Some(Arc::new(serving)),
    };
    let keys = waiting_for_node(&change, &caches);
    let names: Vec<_> = keys.into_iter().map(|key| key.1).collect();
    assert_eq!(names, ["pending"]);
}

#[test]
fn a_trimmed_node_keeps_the_pods_that_have_an_image() {
    let all = json!([
        {"podUID": "u", "imageID": "u.1", "namespace": "ns", "podName": "s", "imageBytes": 7},
        {"podUID": "v", "namespace": "ns", "podName": "t"},
    ]);
    let node = node(&all, "2026-01-01T00:00:00Z");
    let kept = SandboxReport {
        image_id: Some("u.1".to_owned()),
        pod_uid: "u".to_owned(),
        ..SandboxReport::default()
    };
    assert_eq!(node.status.as_ref().unwrap().sandboxes, [kept]);
}

#[test]
fn a_trimmed_pod_can_still_be_recorded() {
    let status = |name: &str, image: &str| {
        json!({
            "name": name, "image": "i", "imageID": image, "ready": true, "restartCount": 3,
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        })
    };
    let whole: Pod = serde_json::from_value(json!({
        "metadata": {"name": "s", "uid": "u"},
        "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}, {"name": "d"}]},
        "status": {
            "containerStatuses": [status("c", "r@sha256:1"), status("d", "r@sha256:2")],
            "initContainerStatuses": [status("runtime", "r@sha256:3")],
        },
    }))
    .unwrap();
    let mut trimmed = whole.clone();
    trim_pod(&mut trimmed);
    assert!(PodRecord::of(&whole).is_some());
    assert_eq!(PodRecord::of(&trimmed), PodRecord::of(&whole));
    // The image of one container is not known yet.
    let mut partial = whole;
    partial.status.as_mut().unwrap().container_statuses = Some(Vec::new());
    trim_pod(&mut partial);
    assert_eq!(PodRecord::of(&partial), None);
}
