//! Tests of `agents.x-k8s.io/next-wakeup`, a time at which a Sandbox must be awake, and of
//! `torpor.dev/wake-at`, which wakes it at once.

use jiff::{Timestamp, ToSpan};
use serde_json::{Value, json};

use crate::{
    objects::{condition, mode, torpor_sandbox},
    world::World,
};

const KEY: &str = "agents.x-k8s.io/next-wakeup";
const WAKE_AT: &str = "torpor.dev/wake-at";

fn at(time: Timestamp) -> Value {
    json!({"metadata": {"annotations": {KEY: time.to_string()}}})
}

fn now() -> Timestamp {
    Timestamp::now()
}

fn annotation(object: &Value) -> Option<&str> {
    object["metadata"]["annotations"].get(KEY)?.as_str()
}

#[tokio::test]
async fn a_suspended_sandbox_is_resumed_at_its_next_wakeup() {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    world.edit_sandbox(&mode("Suspended"));
    let time = now() + 1.hour();
    world.edit_sandbox(&at(time));
    world.settle().await;
    assert_eq!(world.sandbox()["spec"]["operatingMode"], "Suspended");
    let again = world.pass().await.unwrap().expect("it looks again");
    assert!(
        again.as_secs() > 3500 && again.as_secs() <= 3600,
        "{again:?}"
    );

    world.edit_sandbox(&at(now() - 1.second()));
    world.settle().await;
    assert_eq!(world.sandbox()["spec"]["operatingMode"], "Running");
    assert_eq!(annotation(&world.sandbox()), None);
}

#[tokio::test]
async fn a_concurrent_change_of_the_wakeup_time_is_respected() {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    world.edit_sandbox(&mode("Suspended"));
    world.edit_sandbox(&at(now() - 1.second()));
    world.sync();
    // The cached time has passed; at the apiserver it is another one.
    let seen: torpor_api::Sandbox = serde_json::from_value(world.sandbox()).unwrap();
    let time = now() + 1.hour();
    world.edit_sandbox(&at(time));
    let pass = torpor_controller::sandbox::reconcile(seen.into(), world.context.clone());
    pass.await.unwrap_err();
    assert_eq!(world.sandbox()["spec"]["operatingMode"], "Suspended");
    assert_eq!(
        annotation(&world.sandbox()),
        Some(time.to_string().as_str())
    );
}

#[tokio::test]
async fn the_wakeup_time_reaches_the_pod_and_is_removed_once_the_sandbox_is_awake() {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    let time = now() - 1.minute();
    let hibernated = |status, reason| condition("torpor.dev/Hibernated", status, reason, "m");
    for (status, reason) in [
        ("True", "Hibernated"),
        ("False", "Dozing"),
        ("False", "Waking"),
    ] {
        world.set_pod_condition(hibernated(status, reason));
        world.edit_sandbox(&at(time));
        world.settle().await;
        assert_eq!(
            annotation(&world.pod().unwrap()),
            Some(time.to_string().as_str())
        );
        assert!(annotation(&world.sandbox()).is_some(), "{reason}");
    }
    world.set_pod_condition(hibernated("False", "Awake"));
    world.settle().await;
    assert_eq!(annotation(&world.sandbox()), None);
    assert_eq!(annotation(&world.pod().unwrap()), None);
    // Thus a later suspension is not ended.
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    assert_eq!(world.sandbox()["spec"]["operatingMode"], "Suspended");
}

#[tokio::test]
async fn wake_at_keeps_the_users_wakeup_time_and_resumes_no_suspended_sandbox() {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    let (time, asked) = (now() + 1.hour(), now() - 1.minute());
    world.edit_sandbox(&at(time));
    world.edit_sandbox(&json!({"metadata": {"annotations": {WAKE_AT: asked.to_string()}}}));
    world.settle().await;
    for object in [world.sandbox(), world.pod().unwrap()] {
        let annotations = &object["metadata"]["annotations"];
        assert_eq!(annotations[KEY], time.to_string());
        assert_eq!(annotations[WAKE_AT], asked.to_string());
    }
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    assert_eq!(world.sandbox()["spec"]["operatingMode"], "Suspended");
}

#[tokio::test]
async fn an_invalid_wakeup_time_is_reported() {
    let world = World::new();
    let wrong = json!({"metadata": {"annotations": {KEY: "tomorrow"}}});
    world.ready(torpor_sandbox(wrong)).await;
    let message = "annotation agents.x-k8s.io/next-wakeup: value \"tomorrow\" is not allowed; allowed: a time as RFC 3339 has it, such as 2026-06-06T11:58:00Z";
    world.assert_condition("Hibernated", "False", "InvalidAnnotation", message);
}
