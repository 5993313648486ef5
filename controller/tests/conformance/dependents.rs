//! Tests of the objects beside the Pod, as upstream: PersistentVolumeClaims and the Service, and
//! their ownership.

use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    objects::{NS, foreign_owner, hash, mode, sandbox},
    world::World,
};

const HASH: &str = "agents.x-k8s.io/sandbox-name-hash";

// PersistentVolumeClaims.

fn with_claim() -> Value {
    sandbox(json!({"spec": {"volumeClaimTemplates": [{
        "metadata": {"name": "data", "labels": {"l": "1"}, "annotations": {"a": "1"}},
        "spec": {"accessModes": ["ReadWriteOnce"]},
    }]}}))
}

#[tokio::test]
async fn claims_are_made_before_the_pod_and_stay_through_a_suspension() {
    let world = World::new();
    world.api.create("sandboxes", with_claim());
    assert_eq!(
        world.writes_of_a_pass().await[..2],
        ["create persistentvolumeclaims", "create pods"]
    );
    let claim = world
        .api
        .get("persistentvolumeclaims", NS, "data-s")
        .unwrap();
    assert_eq!(claim["metadata"]["labels"], json!({"l": "1", HASH: hash()}));
    assert_eq!(claim["metadata"]["annotations"], json!({"a": "1"}));
    assert_eq!(claim["metadata"]["ownerReferences"][0]["kind"], "Sandbox");
    let volume = &world.pod().unwrap()["spec"]["volumes"][0];
    assert_eq!(volume["persistentVolumeClaim"]["claimName"], "data-s");
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    assert!(
        world
            .api
            .get("persistentvolumeclaims", NS, "data-s")
            .is_some()
    );
}

#[rstest]
#[case::foreign(json!({"ownerReferences": foreign_owner()}),
    Some("PVC \"data-s\" is owned by ReplicaSet/r (UID: u-r), not by sandbox \"s\""))]
#[case::unowned(json!({}),
    Some("cannot adopt unowned PVC \"data-s\": missing required pool authorization label (\"agents.x-k8s.io/adoptable\") or sandbox tracking label (\"agents.x-k8s.io/sandbox-name-hash\")"))]
#[case::released(json!({"labels": {"agents.x-k8s.io/adoptable": "true"}}), None)]
#[tokio::test]
async fn an_existing_volume_claim_is_used_only_if_it_may_be_adopted(
    #[case] metadata: Value,
    #[case] error: Option<&str>,
) {
    let world = World::new();
    let mut claim = json!({"metadata": {"name": "data-s", "namespace": NS}});
    torpor_test_apiserver::merge_patch::apply(&mut claim["metadata"], &metadata);
    world.api.create("persistentvolumeclaims", claim);
    world.api.create("sandboxes", with_claim());
    world.settle_with_errors().await;
    match error {
        Some(error) => {
            let message = format!("Error seen: {error}");
            world.assert_condition("Ready", "False", "ReconcilerError", &message);
            assert!(world.pod().is_some(), "the Pod is made all the same");
        }
        None => {
            let claim = world
                .api
                .get("persistentvolumeclaims", NS, "data-s")
                .unwrap();
            assert_eq!(claim["metadata"]["ownerReferences"][0]["name"], "s");
        }
    }
}

// Service.

fn service(change: Value) -> Value {
    let mut service = json!({
        "metadata": {"name": "s", "namespace": NS}, "spec": {"clusterIP": "None"},
    });
    torpor_test_apiserver::merge_patch::apply(&mut service, &change);
    service
}

#[tokio::test]
async fn the_service_is_headless_and_selects_the_pod_of_this_sandbox() {
    let world = World::new();
    let ports = json!([{"containerPort": 80, "name": "web"}]);
    let containers = json!([{"name": "c", "image": "i", "ports": ports}]);
    world
        .ready(sandbox(json!({"spec": {
            "service": true, "podTemplate": {"spec": {"containers": containers}},
        }})))
        .await;
    world.assert_condition(
        "Ready",
        "True",
        "DependenciesReady",
        "Pod is Ready; Service Exists",
    );
    let service = world.api.get("services", NS, "s").unwrap();
    assert_eq!(service["spec"]["clusterIP"], "None");
    assert_eq!(service["spec"]["selector"], json!({HASH: hash()}));
    assert_eq!(
        service["spec"]["ports"],
        json!([{"name": "web", "port": 80, "protocol": "TCP", "targetPort": 80}])
    );
    assert_eq!(world.sandbox()["status"]["service"], "s");
    // A selector that a user changed is restored.
    let bent = json!({"spec": {"selector": {HASH: "00000000", "x": "y"}}});
    world.api.edit("services", NS, "s", &bent);
    world.settle().await;
    let service = world.api.get("services", NS, "s").unwrap();
    assert_eq!(service["spec"]["selector"], json!({HASH: hash()}));
}

#[tokio::test]
async fn service_false_deletes_the_service_and_unset_keeps_it() {
    let world = World::new();
    world
        .ready(sandbox(json!({"spec": {"service": true}})))
        .await;
    world.edit_sandbox(&json!({"spec": {"service": null}}));
    world.settle().await;
    assert!(world.api.get("services", NS, "s").is_some());
    world.assert_condition(
        "Ready",
        "True",
        "DependenciesReady",
        "Pod is Ready; Service Exists",
    );
    world.edit_sandbox(&json!({"spec": {"service": false}}));
    world.settle().await;
    assert!(world.api.get("services", NS, "s").is_none());
    world.assert_condition("Ready", "True", "DependenciesReady", "Pod is Ready");
    assert_eq!(world.sandbox()["status"].get("service"), None);
}

#[rstest]
#[case::foreign(
    json!({"metadata": {"ownerReferences": foreign_owner()}}),
    "service \"s\" is owned by ReplicaSet/r (UID: u-r), not by sandbox \"s\""
)]
#[case::unowned(
    json!({}),
    "cannot adopt unowned service \"s\": missing required pool authorization label (\"agents.x-k8s.io/adoptable\") or sandbox tracking label (\"agents.x-k8s.io/sandbox-name-hash\")"
)]
#[case::not_headless(
    json!({"metadata": {"labels": {"agents.x-k8s.io/adoptable": "true"}}, "spec": {"clusterIP": "10.1.1.1"}}),
    "cannot adopt service \"s\": ClusterIP is \"10.1.1.1\" (expected \"None\", field is immutable)"
)]
#[tokio::test]
async fn an_existing_service_that_may_not_be_adopted_is_an_error(
    #[case] change: Value,
    #[case] error: &str,
) {
    let world = World::new();
    world.api.create("services", service(change));
    world
        .api
        .create("sandboxes", sandbox(json!({"spec": {"service": true}})));
    world.settle_with_errors().await;
    world.assert_condition(
        "Ready",
        "False",
        "ReconcilerError",
        &format!("Error seen: {error}"),
    );
    assert_eq!(world.sandbox()["status"].get("service"), None);
}

#[tokio::test]
async fn a_released_service_is_adopted_whole() {
    let world = World::new();
    let released = json!({"metadata": {"labels": {"agents.x-k8s.io/adoptable": "true"}},
        "spec": {"selector": {"x": "y"}}});
    world.api.create("services", service(released));
    world
        .ready(sandbox(json!({"spec": {"service": true}})))
        .await;
    let service = world.api.get("services", NS, "s").unwrap();
    assert_eq!(service["metadata"]["ownerReferences"][0]["kind"], "Sandbox");
    assert_eq!(service["spec"]["selector"], json!({HASH: hash()}));
    assert_eq!(service["metadata"]["labels"][HASH], hash());
}

#[tokio::test]
async fn an_unowned_service_is_ignored_unless_requested() {
    let world = World::new();
    world.api.create("services", service(json!({})));
    world.ready(sandbox(json!({}))).await;
    world.assert_condition("Ready", "True", "DependenciesReady", "Pod is Ready");
}

#[tokio::test]
async fn several_errors_are_shown_together() {
    let world = World::new();
    world.api.create(
        "services",
        service(json!({"metadata": {"ownerReferences": foreign_owner()}})),
    );
    world.api.create(
        "pods",
        json!({"metadata": {"name": "s", "namespace": NS, "ownerReferences": foreign_owner()}}),
    );
    world
        .api
        .create("sandboxes", sandbox(json!({"spec": {"service": true}})));
    world.settle_with_errors().await;
    let message = "Error seen: pod \"s\" is owned by ReplicaSet/r (UID: u-r), not by sandbox \"s\"\nservice \"s\" is owned by ReplicaSet/r (UID: u-r), not by sandbox \"s\"";
    world.assert_condition("Ready", "False", "ReconcilerError", message);
}
