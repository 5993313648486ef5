//! `agents.x-k8s.io/next-wakeup`: a time at which a Sandbox is awake. `torpor.dev/wake-at`: another, of whoever wakes it now.

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
async fn a_suspended_sandbox_is_resumed_when_its_time_has_come() {
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
async fn who_suspends_it_meanwhile_or_sets_another_time_is_obeyed() {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    world.edit_sandbox(&mode("Suspended"));
    world.edit_sandbox(&at(now() - 1.second()));
    world.sync();
    // The caches show a time that is over; by now it is another.
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
async fn the_time_reaches_the_pod_and_is_taken_off_once_it_is_awake() {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    let time = now() - 1.minute();
    let says = |status, reason| condition("torpor.dev/Hibernated", status, reason, "m");
    for (status, reason) in [
        ("True", "Hibernated"),
        ("False", "Dozing"),
        ("False", "Waking"),
    ] {
        world.pod_says(says(status, reason));
        world.edit_sandbox(&at(time));
        world.settle().await;
        assert_eq!(
            annotation(&world.pod().unwrap()),
            Some(time.to_string().as_str())
        );
        assert!(annotation(&world.sandbox()).is_some(), "{reason}");
    }
    world.pod_says(says("False", "Awake"));
    world.settle().await;
    assert_eq!(annotation(&world.sandbox()), None);
    assert_eq!(annotation(&world.pod().unwrap()), None);
    // So it resumes nobody who is suspended later.
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    assert_eq!(world.sandbox()["spec"]["operatingMode"], "Suspended");
}

#[tokio::test]
async fn who_wakes_it_now_takes_nobodys_time_and_resumes_nobody() {
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
async fn a_time_that_is_none_is_said() {
    let world = World::new();
    let wrong = json!({"metadata": {"annotations": {KEY: "tomorrow"}}});
    world.ready(torpor_sandbox(wrong)).await;
    let message = "annotation agents.x-k8s.io/next-wakeup: value \"tomorrow\" is not allowed; allowed: a time as RFC 3339 has it, such as 2026-06-06T11:58:00Z";
    world.assert_says("Hibernated", "False", "InvalidAnnotation", message);
}
