//! Tests of upstream's behaviour: create, adopt, suspend, resume, expire, and writes that are
//! omitted.

use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    apiserver::{Fault, FaultAnswer},
    cluster::is_terminating,
    objects::{NS, condition, foreign_owner, hash, mode, ready_pod, sandbox},
    world::World,
};

const HASH: &str = "agents.x-k8s.io/sandbox-name-hash";

// Creation.

#[tokio::test]
async fn a_new_sandbox_gets_a_pod_and_reports_missing_parts_until_ready() {
    let world = World::new();
    world.api.create("sandboxes", sandbox(json!({})));
    assert_eq!(
        world.writes_of_a_pass().await,
        ["create pods", "patch sandboxes", "patch status sandboxes"]
    );
    world.assert_condition(
        "Ready",
        "False",
        "DependenciesNotReady",
        "Pod exists with phase: Pending",
    );
    world.assert_condition(
        "Suspended",
        "False",
        "NotSuspended",
        "Sandbox is not suspended",
    );
    world.assert_condition(
        "PodScheduled",
        "Unknown",
        "PodSchedulingUnknown",
        "Pod has not reported a PodScheduled condition yet",
    );
    let pod = world.pod().unwrap();
    assert_eq!(pod["metadata"]["labels"][HASH], hash());
    let owner = &pod["metadata"]["ownerReferences"][0];
    assert_eq!(owner["apiVersion"], "agents.x-k8s.io/v1beta1");
    assert_eq!(
        (&owner["controller"], &owner["blockOwnerDeletion"]),
        (&json!(true), &json!(true))
    );
    assert_eq!(
        world.sandbox()["metadata"]["annotations"]["agents.x-k8s.io/pod-name"],
        "s"
    );
    world.pod_becomes_ready();
    world.settle().await;
    world.assert_condition("Ready", "True", "DependenciesReady", "Pod is Ready");
    world.assert_condition("PodScheduled", "True", "PodScheduled", "");
    let status = &world.sandbox()["status"];
    assert_eq!(status["podIPs"], json!(["10.0.0.1"]));
    assert_eq!(status["nodeName"], "n1");
    assert_eq!(status["selector"], format!("{HASH}={}", hash()));
    assert_eq!(
        world.condition_types(),
        ["Suspended", "PodScheduled", "Ready"]
    );
}

#[rstest]
#[case(json!({"phase": "Running"}), "Pod is Running but not Ready")]
#[case(
    json!({"phase": "Running", "conditions": [condition("Ready", "True", "", "")]}),
    "Pod is Ready but has no podIPs yet"
)]
#[case(json!({"phase": "Unknown"}), "Pod exists with phase: Unknown")]
#[tokio::test]
async fn the_condition_ready_names_missing_parts_of_the_pod(
    #[case] status: Value,
    #[case] message: &str,
) {
    let world = World::new();
    world.api.create("sandboxes", sandbox(json!({})));
    world.settle().await;
    world.edit_pod(&json!({"status": status}));
    world.settle().await;
    world.assert_condition("Ready", "False", "DependenciesNotReady", message);
}

#[rstest]
#[case("Succeeded", "PodSucceeded", "Pod completed successfully")]
#[case("Failed", "PodFailed", "Pod failed")]
#[tokio::test]
async fn a_pod_that_ended_is_reported_and_not_replaced(
    #[case] phase: &str,
    #[case] reason: &str,
    #[case] message: &str,
) {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    let uid = world.pod_uid();
    world.edit_pod(&json!({"status": {"phase": phase}}));
    world.settle().await;
    world.assert_condition("Ready", "False", reason, message);
    world.assert_condition("Finished", "True", reason, message);
    assert_eq!(world.pod_uid(), uid);
}

#[tokio::test]
async fn a_pod_that_vanishes_is_made_again_and_suspended_stays_false() {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    let uid = world.pod_uid();
    world.api.remove("pods", NS, "s");
    world.settle().await;
    assert_ne!(world.pod_uid(), uid);
    world.assert_condition(
        "Suspended",
        "False",
        "NotSuspended",
        "Sandbox is not suspended",
    );
}

#[tokio::test]
async fn the_condition_pod_scheduled_is_copied_from_the_pod() {
    let world = World::new();
    world.api.create("sandboxes", sandbox(json!({})));
    world.settle().await;
    world.set_pod_condition(condition(
        "PodScheduled",
        "False",
        "Unschedulable",
        "0/1 nodes",
    ));
    world.settle().await;
    world.assert_condition("PodScheduled", "False", "Unschedulable", "0/1 nodes");
}

#[tokio::test]
async fn an_unknown_field_reaches_the_pod() {
    let world = World::new();
    let spec = json!({"spec": {"podTemplate": {"spec": {
        "fieldOfTomorrow": {"x": 1},
        "containers": [{"name": "c", "image": "img", "lifecycleOfTomorrow": true}],
    }}}});
    world.api.create("sandboxes", sandbox(spec));
    world.settle().await;
    let pod = world.pod().unwrap();
    assert_eq!(pod["spec"]["fieldOfTomorrow"], json!({"x": 1}));
    assert_eq!(pod["spec"]["containers"][0]["lifecycleOfTomorrow"], true);
}

// Omitted writes.

#[tokio::test]
async fn a_pass_that_changes_nothing_writes_nothing() {
    let world = World::new();
    world
        .ready(sandbox(json!({"spec": {"service": true}})))
        .await;
    assert!(world.writes_of_a_pass().await.is_empty());
}

#[tokio::test]
async fn a_node_name_alone_waits_for_the_next_change() {
    let world = World::new();
    world.api.create("sandboxes", sandbox(json!({})));
    world.settle().await;
    world.edit_pod(&json!({"spec": {"nodeName": "n1"}}));
    assert!(world.writes_of_a_pass().await.is_empty());
    assert_eq!(world.sandbox()["status"].get("nodeName"), None);
    world.edit_pod(&ready_pod("n1"));
    assert_eq!(world.writes_of_a_pass().await, ["patch status sandboxes"]);
    assert_eq!(world.sandbox()["status"]["nodeName"], "n1");
}

#[tokio::test]
async fn a_sandbox_that_is_being_deleted_is_left_to_garbage_collection() {
    let world = World::new();
    world
        .ready(sandbox(
            json!({"metadata": {"finalizers": ["somebody/else"]}}),
        ))
        .await;
    world.api.delete("sandboxes", NS, "s");
    world.api.remove("pods", NS, "s");
    assert!(world.writes_of_a_pass().await.is_empty());
}

// Ownership of the Pod.

#[tokio::test]
async fn a_foreign_pod_is_neither_adopted_nor_deleted() {
    let world = World::new();
    world.api.create(
        "pods",
        json!({"metadata": {"name": "s", "namespace": NS, "ownerReferences": foreign_owner()}}),
    );
    world.api.create("sandboxes", sandbox(json!({})));
    assert!(world.settle_with_errors().await.is_some());
    let why = "pod \"s\" is owned by ReplicaSet/r (UID: u-r), not by sandbox \"s\"";
    world.assert_condition(
        "Ready",
        "False",
        "ReconcilerError",
        &format!("Error seen: {why}"),
    );
    let unknown = "Pod state is unknown. Pod scheduling cannot be determined";
    world.assert_condition("PodScheduled", "Unknown", "PodSchedulingUnknown", unknown);
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let refused = "Refused to delete pod because it is not owned by this sandbox";
    world.assert_condition("Suspended", "False", "PodNotOwned", refused);
    world.assert_condition(
        "Ready",
        "False",
        "SandboxSuspended",
        "Sandbox is suspending",
    );
    assert!(!world.pod_is_terminating());
}

#[tokio::test]
async fn an_unowned_pod_is_adopted_only_with_a_label_that_allows_it() {
    let world = World::new();
    world
        .api
        .create("pods", json!({"metadata": {"name": "s", "namespace": NS}}));
    world.api.create("sandboxes", sandbox(json!({})));
    world.settle_with_errors().await;
    let why = "Error seen: cannot adopt unowned pod \"s\": missing required pool authorization label (\"agents.x-k8s.io/adoptable\") or sandbox tracking label (\"agents.x-k8s.io/sandbox-name-hash\")";
    world.assert_condition("Ready", "False", "ReconcilerError", why);
    world.edit_pod(&json!({"metadata": {"labels": {"agents.x-k8s.io/adoptable": "true"}}}));
    world.settle().await;
    let pod = world.pod().unwrap();
    assert_eq!(pod["metadata"]["ownerReferences"][0]["kind"], "Sandbox");
    assert_eq!(pod["metadata"]["labels"][HASH], hash());
}

#[tokio::test]
async fn two_pods_of_one_sandbox_are_reported_once_and_neither_is_touched() {
    let world = World::new();
    world
        .ready(sandbox(json!({"spec": {"service": true}})))
        .await;
    let mut twin = world.pod().unwrap();
    twin["metadata"]["name"] = "twin".into();
    world.api.create("pods", twin);
    assert_eq!(world.writes_of_a_pass().await, ["patch status sandboxes"]);
    let message =
        "multiple Pods (2) are controlled by this Sandbox; refusing to choose or create a Pod";
    world.assert_condition("Ready", "False", "MultiplePods", message);
    world.edit_sandbox(&json!({"spec": {"service": false}}));
    world.settle().await;
    assert!(
        world.api.get("services", NS, "s").is_some(),
        "the Service is left alone"
    );
    assert_eq!(world.events(), ["MultiplePods"]);
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let unknown = "Pod state is unknown. Sandbox suspension cannot be confirmed";
    world.assert_condition("Suspended", "Unknown", "PodStateUnknown", unknown);
    assert_eq!(world.api.list("pods").len(), 2);
}

#[tokio::test]
async fn the_owned_pod_overrides_the_annotation() {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    let wrong = json!({"metadata": {"annotations": {"agents.x-k8s.io/pod-name": "other"}}});
    world.edit_sandbox(&wrong);
    let uid = world.pod_uid();
    world.settle().await;
    assert_eq!(world.pod_uid(), uid);
    assert_eq!(world.api.list("pods").len(), 1);
    assert_eq!(
        world.sandbox()["metadata"]["annotations"]["agents.x-k8s.io/pod-name"],
        "s"
    );
}

#[tokio::test]
async fn a_pod_under_another_name_is_found_by_the_annotation() {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    let mut pod = world.pod().unwrap();
    world.api.remove("pods", NS, "s");
    pod["metadata"]["name"] = "pool-x".into();
    world.api.create("pods", pod);
    world.edit_sandbox(
        &json!({"metadata": {"annotations": {"agents.x-k8s.io/pod-name": "pool-x"}}}),
    );
    world.settle().await;
    assert!(world.pod().is_none(), "none is made beside it");
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let pod = world.api.get("pods", NS, "pool-x").unwrap();
    assert!(is_terminating(&pod));
}

#[tokio::test]
async fn a_pod_that_the_cache_does_not_show_yet_is_not_made_twice() {
    let world = World::new();
    world.api.create("sandboxes", sandbox(json!({})));
    world.sync();
    world.stale_pass().await.unwrap();
    let uid = world.pod_uid();
    // The Pod exists, but the caches do not show it.
    world.stale_pass().await.unwrap();
    assert_eq!(world.pod_uid(), uid);
    assert_eq!(
        world.sandbox()["metadata"]["annotations"]["agents.x-k8s.io/pod-name"],
        "s"
    );
    world.assert_condition(
        "Ready",
        "False",
        "DependenciesNotReady",
        "Pod exists with phase: Pending",
    );
}

// Metadata.

#[tokio::test]
async fn template_metadata_reaches_a_living_pod_and_leaves_it_again() {
    let world = World::new();
    let template = |labels: Value, annotations: Value| {
        json!({"spec": {"podTemplate": {"metadata": {
            "labels": labels, "annotations": annotations,
        }}}})
    };
    world
        .ready(sandbox(template(json!({"a": "1"}), json!({"n": "1"}))))
        .await;
    world.edit_pod(&json!({"metadata": {"labels": {"by-hand": "x"}}}));
    let change = template(
        json!({"a": null, "b": "2", HASH: "evil"}),
        json!({"n": "2"}),
    );
    world.edit_sandbox(&change);
    world.settle().await;
    let metadata = &world.pod().unwrap()["metadata"];
    assert_eq!(
        metadata["labels"],
        json!({"b": "2", "by-hand": "x", HASH: hash()})
    );
    assert_eq!(metadata["annotations"]["n"], "2");
    assert_eq!(
        metadata["annotations"]["agents.x-k8s.io/propagated-labels"],
        "b"
    );
    assert_eq!(
        metadata["annotations"]["agents.x-k8s.io/propagated-annotations"],
        "n"
    );
}

#[tokio::test]
async fn a_template_cannot_set_the_controllers_keys() {
    let world = World::new();
    let template = json!({"spec": {"podTemplate": {"metadata": {
        "labels": {"agents.x-k8s.io/claim-uid": "u", "extensions.agents.x-k8s.io/x": "y"},
        "annotations": {
            "agents.x-k8s.io/pod-name": "x", "opentelemetry.io/trace-context": "{}",
            "torpor.dev/restore-image": "theirs.1", "torpor.dev/freeze": "true",
        },
    }}}});
    world.api.create("sandboxes", sandbox(template));
    world.settle().await;
    let metadata = &world.pod().unwrap()["metadata"];
    assert_eq!(metadata["labels"], json!({HASH: hash()}));
    assert_eq!(metadata["annotations"], json!({}));
}

// Suspend and resume.

#[tokio::test]
async fn suspend_and_resume_twice_as_upstream() {
    let world = World::new();
    world
        .ready(sandbox(json!({"spec": {"service": true}})))
        .await;
    for _ in 0..2 {
        let uid = world.pod_uid();
        world.edit_sandbox(&mode("Suspended"));
        assert_eq!(
            world.writes_of_a_pass().await,
            ["delete pods", "patch status sandboxes"]
        );
        let message = "Pod is terminating. Sandbox is suspending";
        world.assert_condition("Suspended", "False", "PodTerminating", message);
        world.assert_condition(
            "Ready",
            "False",
            "SandboxSuspended",
            "Sandbox is suspending",
        );
        world.settle().await;
        world.pod_ends();
        assert_eq!(
            world.writes_of_a_pass().await,
            ["patch sandboxes", "patch status sandboxes"]
        );
        let message = "Pod has been terminated. Sandbox is suspended";
        world.assert_condition("Suspended", "True", "PodTerminated", message);
        world.assert_condition("Ready", "False", "SandboxSuspended", "Sandbox is suspended");
        let sandbox = world.sandbox();
        assert_eq!(sandbox["metadata"]["annotations"], json!({}));
        let status = &sandbox["status"];
        assert_eq!((status.get("podIPs"), status.get("nodeName")), (None, None));
        assert_eq!(status["serviceFQDN"], "s.ns.svc.cluster.local");
        assert_eq!(status["selector"], format!("{HASH}={}", hash()));
        assert!(world.api.get("services", NS, "s").is_some());
        assert_eq!(
            world.condition_types(),
            ["Suspended", "Ready"],
            "nothing of Torpor's"
        );
        world.edit_sandbox(&mode("Running"));
        world.settle().await;
        assert_ne!(world.pod_uid(), uid);
        world.assert_condition(
            "Suspended",
            "False",
            "NotSuspended",
            "Sandbox is not suspended",
        );
        world.pod_becomes_ready();
        world.settle().await;
        world.assert_condition(
            "Ready",
            "True",
            "DependenciesReady",
            "Pod is Ready; Service Exists",
        );
    }
    assert!(world.snapshots().is_empty());
    assert!(world.events().is_empty());
}

#[tokio::test]
async fn a_pod_that_cannot_be_deleted_is_an_error_in_upstreams_words() {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    let answer = FaultAnswer::Refuse(403);
    world.api.fail(Fault {
        verb: "delete",
        kind: "pods",
        answer,
    });
    world.edit_sandbox(&mode("Suspended"));
    world.pass().await.unwrap_err();
    let why = "Error seen: failed to delete pod: delete pods s: made to fail";
    world.assert_condition("Ready", "False", "ReconcilerError", why);
    let message = "Pod is terminating. Sandbox is suspending";
    world.assert_condition("Suspended", "False", "PodTerminating", message);
}

#[tokio::test]
async fn a_pod_that_cannot_be_created_is_an_error_and_is_retried() {
    let world = World::new();
    world.api.create("sandboxes", sandbox(json!({})));
    world.api.fail(Fault {
        verb: "create",
        kind: "pods",
        answer: FaultAnswer::Refuse(403),
    });
    world.pass().await.unwrap_err();
    world.assert_condition(
        "Ready",
        "False",
        "ReconcilerError",
        "Error seen: create pods s: made to fail",
    );
    assert!(world.sandbox()["metadata"].get("annotations").is_none());
    world.settle().await;
    assert!(world.pod().is_some());
}

#[tokio::test]
async fn a_lost_response_is_not_taken_as_a_failure() {
    let world = World::impatient();
    world.api.create("sandboxes", sandbox(json!({})));
    world.api.fail(Fault {
        verb: "create",
        kind: "pods",
        answer: FaultAnswer::LoseAnswer,
    });
    let error = world.pass().await.unwrap_err();
    assert_eq!(error.reason(), "OutcomeUnknown");
    assert!(
        world.sandbox().get("status").is_none(),
        "nothing is claimed"
    );
    let uid = world.pod_uid();
    world.settle().await;
    assert_eq!(world.pod_uid(), uid);
}

// Expiry.

const PAST: &str = "2020-01-01T00:00:00Z";

#[tokio::test]
async fn an_expired_sandbox_is_marked_first_and_emptied_then() {
    let world = World::new();
    world
        .ready(sandbox(json!({"spec": {"service": true}})))
        .await;
    world.edit_sandbox(&json!({"spec": {"shutdownTime": PAST}}));
    assert_eq!(world.writes_of_a_pass().await, ["patch status sandboxes"]);
    world.assert_condition("Ready", "False", "SandboxExpired", "Sandbox has expired");
    assert_eq!(world.condition("PodScheduled"), None);
    assert!(!world.pod_is_terminating());
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    assert!(world.api.get("services", NS, "s").is_none());
    let sandbox = world.sandbox();
    let fields: Vec<&String> = sandbox["status"].as_object().unwrap().keys().collect();
    assert_eq!(fields, ["conditions"]);
    // A later time brings the Pod back.
    world.edit_sandbox(&json!({"spec": {"shutdownTime": null}}));
    world.settle().await;
    assert!(world.pod().is_some());
}

#[tokio::test]
async fn policy_delete_deletes_the_sandbox() {
    let world = World::new();
    let spec = json!({"spec": {"shutdownTime": PAST, "shutdownPolicy": "Delete"}});
    world.api.create("sandboxes", sandbox(spec));
    world.settle().await;
    assert!(world.api.get("sandboxes", NS, "s").is_none());
    assert!(world.api.list("pods").is_empty());
}

#[tokio::test]
async fn finished_survives_expiry() {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    world.edit_pod(&json!({"status": {"phase": "Succeeded"}}));
    world.settle().await;
    let before = world.generation();
    world.edit_sandbox(&json!({"spec": {"shutdownTime": PAST}}));
    world.settle().await;
    // After the expiry only the condition Ready changes.
    world.assert_condition_of_generation(
        before,
        "Finished",
        "True",
        "PodSucceeded",
        "Pod completed successfully",
    );
    world.assert_condition("Ready", "False", "SandboxExpired", "Sandbox has expired");
}

#[tokio::test]
async fn a_foreign_pod_survives_expiry() {
    let world = World::new();
    world.api.create(
        "sandboxes",
        sandbox(json!({"spec": {"shutdownTime": PAST}})),
    );
    world.api.create(
        "pods",
        json!({"metadata": {"name": "s", "namespace": NS, "ownerReferences": foreign_owner()}}),
    );
    world.settle().await;
    assert!(!world.pod_is_terminating());
}

#[tokio::test]
async fn a_future_expiry_is_waited_for_exactly() {
    let world = World::new();
    let time = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(3600);
    world.api.create(
        "sandboxes",
        sandbox(json!({"spec": {"shutdownTime": time.to_string()}})),
    );
    let action = world.pass().await.unwrap();
    let wait = format!("{action:?}");
    assert!(wait.contains("3599.") || wait.contains("3600"), "{wait}");
}
