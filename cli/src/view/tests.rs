use rstest::rstest;
use serde_json::{Value, json};

use super::*;

pub(crate) fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

/// Returns conditions in the form `Type=Status:Reason`. `about`: the type or the reason, for the
/// message.
pub(crate) fn written(
    conditions: &[&str],
    about: for<'a> fn(&'a str, &'a str) -> &'a str,
) -> Vec<Value> {
    let written = conditions.iter().map(|text| {
        let (type_, rest) = text.split_once('=').unwrap();
        let (status, reason) = rest.split_once(':').unwrap();
        json!({
            "type": type_, "status": status, "reason": reason,
            "message": format!("Words about {}.", about(type_, reason)),
            "lastTransitionTime": "2026-11-21T11:40:00Z",
        })
    });
    written.collect()
}

/// Returns a Sandbox with conditions in the form of [`written`].
fn sandbox(name: &str, mode: &str, conditions: &[&str]) -> Sandbox {
    let conditions = written(conditions, |type_, _| type_);
    serde_json::from_value(json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": name, "namespace": "x", "uid": format!("uid-of-{name}")},
        "spec": {"operatingMode": mode, "podTemplate": {"spec": {"containers": []}}},
        "status": {"conditions": conditions},
    }))
    .unwrap()
}

fn pod(name: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {
            "name": name, "namespace": "x", "uid": format!("pod-uid-of-{name}"),
            "ownerReferences": [{
                "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "controller": true,
                "name": name, "uid": format!("uid-of-{name}"),
            }],
        },
        "spec": {"nodeName": "node-0", "containers": []},
    }))
    .unwrap()
}

fn node() -> SandboxNode {
    serde_json::from_value(json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxNode",
        "metadata": {"name": "node-0"}, "spec": {},
        "status": {"sandboxes": [{
            "podUID": "pod-uid-of-sleeper", "namespace": "x", "podName": "sleeper",
            "imageBytes": 117_298_307, "memoryAwakeBytes": 154_140_672, "memoryAsleepBytes": 5_242_880,
            "lastWake": {"at": "2026-11-21T11:30:00Z", "cause": "Packet", "durationMicros": 412_300, "from": "Hibernated"},
            "reasons": [{"reason": "Sleeping"}],
        }]},
    }))
    .unwrap()
}

fn snapshot(
    name: &str,
    of: &str,
    conditions: &[(&str, &str)],
    bytes: i64,
    at: &str,
) -> SandboxSnapshot {
    let conditions: Vec<Value> = conditions
        .iter()
        .map(|(type_, status)| {
            json!({
                "type": type_, "status": status, "reason": "R", "message": "",
                "lastTransitionTime": "2026-11-21T11:00:00Z",
            })
        })
        .collect();
    serde_json::from_value(json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
        "metadata": {"name": name, "namespace": "x"},
        "spec": {"sandboxName": of, "reason": "Suspend"},
        "status": {"conditions": conditions, "sizeBytes": bytes, "nodeName": "node-1", "committedAt": at},
    }))
    .unwrap()
}

pub(crate) fn objects() -> Objects {
    Objects {
        sandboxes: vec![
            sandbox(
                "sleeper",
                "Running",
                &["Hibernated=True:Hibernated", "Ready=True:DependenciesReady"],
            ),
            sandbox("new", "Running", &["Ready=False:DependenciesNotReady"]),
            sandbox(
                "runner",
                "Running",
                &["Hibernated=False:Awake", "Ready=True:DependenciesReady"],
            ),
            sandbox(
                "away",
                "Suspended",
                &["Hibernated=True:Hibernated", "Suspended=True:PodTerminated"],
            ),
        ],
        pods: vec![pod("sleeper"), pod("runner")],
        snapshots: vec![
            snapshot(
                "away-1",
                "away",
                &[("Committed", "True"), ("Consumed", "True")],
                1,
                "2026-11-21T11:59:00Z",
            ),
            snapshot(
                "away-2",
                "away",
                &[("Committed", "True")],
                90_000_000,
                "2026-11-21T11:40:00Z",
            ),
            snapshot(
                "other",
                "runner",
                &[("Committed", "True")],
                7,
                "2026-11-21T11:40:00Z",
            ),
        ],
        nodes: vec![node()],
        unseen: Vec::new(),
    }
}

pub(crate) fn some_views() -> Vec<View> {
    views(&objects())
}

#[rstest]
#[case("Running", &[], State::Starting)]
#[case("Running", &["Ready=False:DependenciesNotReady"], State::Starting)]
#[case("Running", &["Ready=True:DependenciesReady"], State::Awake)]
#[case("Running", &["Ready=True:R", "Hibernated=False:Awake"], State::Awake)]
#[case("Running", &["Ready=True:R", "Hibernated=False:SaveFailed"], State::Awake)]
#[case("Running", &["Ready=True:R", "Restored=False:ColdStarted"], State::Awake)]
#[case("Running", &["Ready=True:R", "Hibernated=False:Saving"], State::Saving)]
#[case("Running", &["Ready=True:R", "Hibernated=False:Waking"], State::Waking)]
#[case("Running", &["Ready=True:R", "Hibernated=False:Dozing"], State::Dozing)]
#[case("Running", &["Ready=False:R", "Hibernated=False:Dozing"], State::Starting)]
#[case("Running", &["Ready=True:R", "Hibernated=True:Hibernated"], State::Hibernated)]
#[case("Running", &["Ready=True:R", "Hibernated=True:Hibernated", "Restored=False:RestoreFailed"], State::Hibernated)]
#[case("Running", &["Ready=False:R", "Hibernated=True:Hibernated"], State::Waking)]
#[case("Running", &["Ready=False:R", "Hibernated=True:Hibernated", "Restored=False:NodeUnavailable"], State::Blocked)]
#[case("Running", &["Ready=False:R", "Finished=True:PodSucceeded"], State::Finished)]
#[case("Suspended", &["Suspended=False:PodTerminating", "Hibernated=False:Saving"], State::Suspending)]
#[case("Suspended", &[], State::Suspending)]
#[case("Suspended", &["Suspended=True:PodTerminated"], State::Suspended)]
#[case("Suspended", &["Suspended=True:PodFrozen"], State::Frozen)]
fn the_state_is_taken_from_mode_and_conditions(
    #[case] mode: &str,
    #[case] conditions: &[&str],
    #[case] expected: State,
) {
    assert_eq!(state(&sandbox("demo", mode, conditions)).0, expected);
}

#[test]
fn a_sandbox_that_is_being_deleted_has_that_state_whatever_its_conditions() {
    let mut going = sandbox("demo", "Running", &["Ready=True:R"]);
    going.metadata.deletion_timestamp =
        serde_json::from_value(json!("2026-11-21T11:00:00Z")).unwrap();
    assert_eq!(state(&going).0, State::Deleting);
}

#[test]
fn a_sandbox_is_joined_with_its_own_pod_image_and_report() {
    let views = some_views();
    let of = |name: &str| views.iter().find(|view| view.name == name).unwrap();
    let sleeper = of("sleeper");
    assert_eq!(sleeper.asleep_since, Some(at("2026-11-21T11:40:00Z")));
    assert_eq!(sleeper.memory_awake_bytes, Some(154_140_672));
    assert_eq!(sleeper.image_bytes, Some(117_298_307));
    assert_eq!(sleeper.last_wake.as_ref().unwrap().duration_micros, 412_300);
    let runner = of("runner");
    assert_eq!((runner.asleep_since, runner.image_bytes), (None, None));
    assert_eq!(runner.node.as_deref(), Some("node-0"));
    // Image and node of the snapshot that is not consumed.
    let away = of("away");
    assert_eq!(
        (away.image_bytes, away.memory_asleep_bytes),
        (Some(90_000_000), Some(0))
    );
    assert_eq!(away.node.as_deref(), Some("node-1"));
    assert_eq!(of("new").pod, None);
}

#[test]
fn an_image_that_is_missing_on_its_node_has_no_size() {
    let mut objects = objects();
    let status = objects.snapshots[1].status.as_mut().unwrap();
    status.image_id = Some("pod.1".to_owned());
    let committed = &mut status.conditions[0];
    (committed.status, committed.reason) = ("False".to_owned(), "ImageMissing".to_owned());
    // Before the controller sets the condition, the snapshot names the node of the image.
    let early = &views(&objects)[3];
    assert!(early.image_missing);
    assert_eq!((early.state, early.image_bytes), (State::Suspended, None));
    assert_eq!(early.node.as_deref(), Some("node-1"));
    let hibernated = &mut objects.sandboxes[3].status.as_mut().unwrap().conditions[0];
    (hibernated.status, hibernated.reason) = ("False".to_owned(), "ImageMissing".to_owned());
    let away = &views(&objects)[3];
    assert_eq!(away.state, State::Suspended);
    assert_eq!(away.asleep_since, Some(at("2026-11-21T11:40:00Z")));
    assert_eq!(
        (away.reason.as_str(), away.message.as_str()),
        ("ImageMissing", "Words about Hibernated.")
    );
}

#[test]
fn a_missing_image_of_a_sandbox_that_sleeps_in_place_is_reported() {
    let mut objects = objects();
    let restored = sandbox("sleeper", "Running", &["Restored=False:ImageMissing"]);
    let restored = restored.status.unwrap().conditions;
    let status = objects.sandboxes[0].status.as_mut().unwrap();
    status.conditions.extend(restored);
    let sleeper = &views(&objects)[0];
    assert_eq!(
        (sleeper.state, sleeper.reason.as_str()),
        (State::Hibernated, "ImageMissing")
    );
    assert!(sleeper.image_missing);
}

#[test]
fn a_pod_of_the_same_name_with_another_controller_is_ignored() {
    let mut objects = objects();
    let owners = objects.pods[0].metadata.owner_references.as_mut().unwrap();
    owners[0].uid = "of-an-older-sandbox".to_owned();
    assert_eq!(views(&objects)[0].pod, None);
}
