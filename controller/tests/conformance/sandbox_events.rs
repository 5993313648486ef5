//! Tests of upstream's Events about the life cycle of a Sandbox (since 1.0.4), and of invalid
//! configurations.

use std::time::Duration;

use serde_json::json;
use torpor_controller::settings::Settings;

use crate::{
    apiserver::{Fault, FaultAnswer},
    objects::{NS, mode, sandbox},
    world::{self, World},
};

const PAST: &str = "2020-01-01T00:00:00Z";

/// Returns types, reasons and notes of all Events.
fn event_lines(world: &World) -> Vec<String> {
    let all = world::events(&world.api).into_iter();
    all.map(|(type_, reason, note)| format!("{type_} {reason}: {note}"))
        .collect()
}

/// Runs passes without any change.
async fn some_passes(world: &World) {
    for _ in 0..3 {
        let _ = world.pass().await;
    }
}

fn fail(world: &World, verb: &'static str, kind: &'static str, answer: FaultAnswer) {
    world.api.fail(Fault { verb, kind, answer });
}

#[tokio::test]
async fn each_lifecycle_step_of_a_sandbox_has_one_event() {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    some_passes(&world).await;
    let begin = [
        "Normal SandboxPodCreated: Created Pod \"s\"",
        "Normal SandboxReady: Pod is Ready",
    ];
    assert_eq!(event_lines(&world), begin);
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    some_passes(&world).await;
    assert_eq!(
        event_lines(&world)[2..],
        ["Normal SandboxSuspended: Sandbox is suspending"]
    );
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    world.pod_becomes_ready();
    world.settle().await;
    assert_eq!(event_lines(&world)[3..], begin);
    world.edit_pod(&json!({"status": {"phase": "Failed"}}));
    world.settle().await;
    some_passes(&world).await;
    assert_eq!(event_lines(&world)[5..], ["Warning PodFailed: Pod failed"]);
    world.edit_sandbox(&json!({"spec": {"shutdownTime": PAST}}));
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    some_passes(&world).await;
    assert_eq!(
        event_lines(&world)[6..],
        ["Normal SandboxExpired: Sandbox has expired"]
    );
    let actions = world.api.list("events").into_iter();
    let actions: Vec<_> = actions
        .filter(|event| event["reason"] == "SandboxPodCreated")
        .map(|event| event["action"].clone())
        .collect();
    assert_eq!(actions, ["PodCreation", "PodCreation"]);
}

#[tokio::test]
async fn a_completed_pod_has_an_event() {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    world.edit_pod(&json!({"status": {"phase": "Succeeded"}}));
    world.settle().await;
    let expected = ["Normal PodSucceeded: Pod completed successfully"];
    assert_eq!(event_lines(&world)[2..], expected);
}

#[tokio::test]
async fn a_sandbox_deleted_at_its_expiry_has_no_expiry_event() {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    let over = json!({"spec": {"shutdownTime": PAST, "shutdownPolicy": "Delete"}});
    world.edit_sandbox(&over);
    world.settle().await;
    assert!(world.api.get("sandboxes", NS, "s").is_none());
    assert!(
        !event_lines(&world)
            .iter()
            .any(|event| event.contains("SandboxExpired"))
    );
}

#[tokio::test]
async fn a_refused_pod_has_one_event_over_all_retries() {
    let world = World::new();
    world.api.create("sandboxes", sandbox(json!({})));
    for _ in 0..3 {
        fail(&world, "create", "pods", FaultAnswer::Refuse(403));
        world.pass().await.unwrap_err();
    }
    let refused = "Warning SandboxPodCreateFailed: create pods s: made to fail";
    assert_eq!(event_lines(&world), [refused]);
    world.settle().await;
    let made = "Normal SandboxPodCreated: Created Pod \"s\"";
    assert_eq!(event_lines(&world), [refused, made]);
}

#[tokio::test]
async fn a_created_pod_has_an_event_even_if_the_service_or_status_write_fails() {
    for (verb, kind) in [("create", "services"), ("patch status", "sandboxes")] {
        let world = World::new();
        fail(&world, verb, kind, FaultAnswer::Refuse(403));
        let spec = json!({"spec": {"service": true}});
        world.api.create("sandboxes", sandbox(spec));
        world.pass().await.unwrap_err();
        world.settle().await;
        let made = "Normal SandboxPodCreated: Created Pod \"s\"";
        assert_eq!(event_lines(&world), [made], "{verb} {kind}");
    }
}

#[tokio::test]
async fn no_event_is_written_when_events_are_disabled() {
    let settings = Settings {
        sandbox_events: false,
        ..Settings::default()
    };
    let world = World::with_settings(settings);
    world.ready(sandbox(json!({}))).await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    assert_eq!(event_lines(&world), [""; 0]);
}

// Invalid configurations.

const TEN_MINUTES: Option<Duration> = Some(Duration::from_secs(600));

#[tokio::test]
async fn an_invalid_pod_is_retried_when_the_sandbox_changes() {
    let world = World::new();
    world.api.create("sandboxes", sandbox(json!({})));
    let invalid = FaultAnswer::Invalid("spec.evictionResponders");
    fail(&world, "create", "pods", invalid);
    assert_eq!(world.pass().await.unwrap(), TEN_MINUTES);
    let why = "Error seen: pods \"s\" is invalid: spec.evictionResponders: made to fail";
    world.assert_condition("Ready", "False", "InvalidConfiguration", why);
    assert_eq!(event_lines(&world).len(), 1);
    assert!(event_lines(&world)[0].starts_with("Warning SandboxPodCreateFailed: "));
    world.edit_sandbox(&json!({"spec": {"podTemplate": {"spec": {"hostname": "h"}}}}));
    world.settle().await;
    assert!(world.pod().is_some());
    world.assert_condition(
        "Ready",
        "False",
        "DependenciesNotReady",
        "Pod exists with phase: Pending",
    );
}

#[tokio::test]
async fn an_invalid_pod_is_retried_without_a_change_of_the_sandbox() {
    let world = World::new();
    world.api.create("sandboxes", sandbox(json!({})));
    let invalid = FaultAnswer::Invalid("spec.containers[0].resources.requests");
    let mut written = 0;
    for _ in 0..3 {
        fail(&world, "create", "pods", invalid);
        assert_eq!(world.pass().await.unwrap(), TEN_MINUTES);
        let writes = world.api.take_writes().into_iter();
        written += writes.filter(|write| write.verb == "patch status").count();
    }
    assert_eq!(
        (written, event_lines(&world).len()),
        (1, 1),
        "in the same words"
    );
    world.settle().await;
    assert!(world.pod().is_some());
}

#[tokio::test]
async fn a_resume_whose_pod_is_invalid_counts_as_failed() {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    world.edit_sandbox(&mode("Running"));
    fail(&world, "create", "pods", FaultAnswer::Invalid("spec.x"));
    assert_eq!(world.pass().await.unwrap(), TEN_MINUTES);
    let text = world.context.metrics.text().unwrap();
    let mut lines = text.lines();
    let failed = |line: &str| {
        line.starts_with("agent_sandbox_resume_total{") && line.contains("result=\"error\"} 1")
    };
    assert!(lines.any(failed), "{text}");
}

#[tokio::test]
async fn an_invalid_service_leaves_the_pod() {
    let world = World::new();
    let spec = json!({"spec": {"service": true}});
    world.api.create("sandboxes", sandbox(spec));
    fail(
        &world,
        "create",
        "services",
        FaultAnswer::Invalid("metadata.name"),
    );
    assert_eq!(world.pass().await.unwrap(), TEN_MINUTES);
    assert!(world.pod().is_some());
    let why = "Error seen: services \"s\" is invalid: metadata.name: made to fail";
    world.assert_condition("Ready", "False", "InvalidConfiguration", why);
}

#[tokio::test]
async fn an_invalid_field_beside_a_temporary_error_is_retried_soon() {
    let world = World::new();
    let spec = json!({"spec": {"service": true}});
    world.api.create("sandboxes", sandbox(spec));
    fail(&world, "create", "pods", FaultAnswer::Invalid("spec.x"));
    fail(&world, "create", "services", FaultAnswer::Refuse(403));
    let error = world.pass().await.unwrap_err();
    assert_eq!(error.reason(), "Refused");
    assert_eq!(world.condition("Ready").unwrap().1, "ReconcilerError");
    world.settle().await;
    assert!(world.pod().is_some());
}
