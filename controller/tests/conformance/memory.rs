//! Tests of memory over a suspension: strategies, waits, and actions that must never happen.

use kube::runtime::watcher::Event;
use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    apiserver::{Fault, FaultAnswer},
    cluster::is_terminating,
    objects::{NS, committed, condition, manual_snapshot, mode, sandbox, torpor_sandbox},
    world::World,
};

fn strategy(strategy: &str) -> Value {
    json!({"metadata": {"annotations": {"torpor.dev/suspension-strategy": strategy}}})
}

/// Returns a world whose Sandbox is being suspended, and the name of its snapshot.
async fn saving() -> (World, String) {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let name = world.snapshot();
    (world, name)
}

// Hibernate.

#[tokio::test]
async fn the_pod_stays_until_its_memory_is_committed() {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    world.edit_sandbox(&mode("Suspended"));
    assert_eq!(
        world.writes_of_a_pass().await,
        ["create sandboxsnapshots", "patch status sandboxes"]
    );
    let name = world.snapshot();
    assert_eq!(name, format!("s-{}", &world.pod_uid()[..8]));
    let snapshot = &world.snapshots()[0];
    assert_eq!(
        snapshot["spec"],
        json!({"sandboxName": "s", "podUID": world.pod_uid(), "nodeName": "n1", "reason": "Suspend"})
    );
    let owner = &snapshot["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["kind"], &owner["controller"]),
        (&json!("Sandbox"), &json!(true))
    );
    let terminating = "Pod is terminating. Sandbox is suspending";
    world.assert_condition("Suspended", "False", "PodTerminating", terminating);
    world.assert_condition(
        "Ready",
        "False",
        "SandboxSuspended",
        "Sandbox is suspending",
    );
    world.settle().await;
    let saving = format!("Memory is being saved to SandboxSnapshot {name:?}");
    world.assert_condition("Hibernated", "False", "Saving", &saving);
    assert!(!world.pod_is_terminating());

    world.edit_snapshot(&name, &committed("i.1", "n1"));
    assert_eq!(
        world.writes_of_a_pass().await,
        [
            "patch sandboxsnapshots",
            "delete pods",
            "patch status sandboxes"
        ]
    );
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    let gone = "Pod has been terminated. Sandbox is suspended";
    world.assert_condition("Suspended", "True", "PodTerminated", gone);
    world.assert_condition("Ready", "False", "SandboxSuspended", "Sandbox is suspended");
    let kept = format!("Memory is kept in SandboxSnapshot {name:?} on node \"n1\"");
    world.assert_condition("Hibernated", "True", "Hibernated", &kept);
    assert_eq!(world.events(), ["SnapshotCommitted"]);
    assert_eq!(world.snapshot(), name, "the image stays");
}

#[tokio::test]
async fn a_failed_save_keeps_the_pod_and_reports_the_reason() {
    let (world, name) = saving().await;
    let failed = condition(
        "Committed",
        "False",
        "SaveFailed",
        "disk full: 3 GiB missing",
    );
    world.edit_snapshot(&name, &json!({"status": {"conditions": [failed]}}));
    world.settle().await;
    world.assert_condition(
        "Hibernated",
        "False",
        "SaveFailed",
        "disk full: 3 GiB missing",
    );
    world.assert_condition(
        "Ready",
        "False",
        "SandboxSuspended",
        "Sandbox is suspending",
    );
    assert!(!world.pod_is_terminating());
    assert_eq!(world.events(), ["SnapshotFailed"]);
    // The agent retries and succeeds.
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.settle().await;
    assert!(world.pod_is_terminating());
}

#[tokio::test]
async fn a_committed_image_of_another_pod_deletes_nothing() {
    let (world, name) = saving().await;
    let mut other = world.snapshots()[0].clone();
    other["metadata"]["name"] = "s-other".into();
    other["spec"]["podUID"] = "another-uid".into();
    world.api.create("sandboxsnapshots", other);
    world.edit_snapshot("s-other", &committed("o.1", "n1"));
    world.settle().await;
    assert!(!world.pod_is_terminating());
    assert_ne!(name, "s-other");
}

#[tokio::test]
async fn the_apiserver_is_asked_before_the_pod_is_deleted_for_its_image() {
    let (world, name) = saving().await;
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.sync();
    // The caches show a committed image; at the apiserver it is being deleted, and its Pod
    // continues.
    world.api.delete("sandboxsnapshots", NS, &name);
    world.stale_pass().await.unwrap();
    assert!(!world.pod_is_terminating());
    world.sync();
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    let used = json!({"status": {"conditions": [
        condition("Committed", "True", "Committed", ""), condition("Consumed", "True", "Resumed", ""),
    ]}});
    world.edit_snapshot(&name, &used);
    world.stale_pass().await.unwrap();
    assert!(!world.pod_is_terminating());
}

#[tokio::test]
async fn a_pod_that_ends_during_its_save_is_reported_as_stopped_without_memory() {
    let (world, _) = saving().await;
    world.edit_pod(&json!({"status": {"phase": "Failed"}}));
    world.settle().await;
    let message = "The Pod ended before its memory was saved; memory was not kept";
    world.assert_condition("Hibernated", "False", "SaveFailed", message);
    world.pod_ends();
    world.settle().await;
    world.assert_condition("Hibernated", "False", "SaveFailed", message);
    let gone = "Pod has been terminated. Sandbox is suspended";
    world.assert_condition("Suspended", "True", "PodTerminated", gone);
    assert_eq!(world.events(), ["MemoryNotKept"]);
    // The next start is cold, and the partial image is deleted before it.
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert!(world.snapshots().is_empty());
    assert!(
        world.pod().unwrap()["metadata"]["annotations"]
            .get("torpor.dev/restore-image")
            .is_none()
    );
}

#[tokio::test]
async fn a_pod_that_vanishes_after_the_commit_loses_nothing() {
    let (world, name) = saving().await;
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.api.remove("pods", NS, "s");
    world.settle().await;
    assert_eq!(world.condition("Hibernated").unwrap().0, "True");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(
        world.pod().unwrap()["metadata"]["annotations"]["torpor.dev/restore-image"],
        "i.1"
    );
}

#[tokio::test]
async fn an_image_that_is_committed_at_the_last_moment_is_used_not_deleted() {
    let (world, name) = saving().await;
    world.api.remove("pods", NS, "s");
    world.edit_sandbox(&mode("Running"));
    world.sync();
    // The caches show an uncommitted image and no Pod; the agent commits now.
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.stale_pass().await.unwrap();
    assert_eq!(world.snapshot(), name);
    assert_eq!(
        world.pod().unwrap()["metadata"]["annotations"]["torpor.dev/restore-image"],
        "i.1"
    );
}

#[tokio::test]
async fn a_sandbox_that_the_agent_cannot_save_is_stopped() {
    let (world, name) = saving().await;
    let cannot = condition(
        "Committed",
        "False",
        "RuntimeNotCapable",
        "no checkpoint here",
    );
    world.edit_snapshot(&name, &json!({"status": {"conditions": [cannot]}}));
    world.settle().await;
    assert!(world.pod_is_terminating());
    let message = "no checkpoint here; memory was not kept";
    world.assert_condition("Hibernated", "False", "RuntimeNotCapable", message);
}

#[tokio::test]
async fn a_lost_response_to_the_snapshots_creation_creates_no_second_snapshot() {
    let world = World::impatient();
    world.ready(torpor_sandbox(json!({}))).await;
    let answer = FaultAnswer::LoseAnswer;
    world.api.fail(Fault {
        verb: "create",
        kind: "sandboxsnapshots",
        answer,
    });
    world.edit_sandbox(&mode("Suspended"));
    assert_eq!(world.pass().await.unwrap_err().reason(), "OutcomeUnknown");
    // The caches do not show the snapshot either.
    let shown = world.snapshots().len();
    world.settle().await;
    assert_eq!((shown, world.snapshots().len()), (1, 1));
    assert!(!world.pod_is_terminating());
}

#[tokio::test]
async fn a_foreign_snapshot_with_the_needed_name_is_reported_and_the_pod_stays() {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    let name = format!("s-{}", &world.pod_uid()[..8]);
    let taken = manual_snapshot(&name);
    world.api.create("sandboxsnapshots", taken);
    world.edit_sandbox(&mode("Suspended"));
    world.settle_with_errors().await;
    let message = format!(
        "SandboxSnapshot {name:?} exists and does not belong to this Sandbox's Pod; delete it to continue"
    );
    world.assert_condition("Hibernated", "False", "SaveFailed", &message);
    assert!(!world.pod_is_terminating());
    world.api.delete("sandboxsnapshots", NS, &name);
    world.settle().await;
    assert_eq!(world.snapshots()[0]["spec"]["reason"], "Suspend");
}

// Resume before the Pod is gone.

#[tokio::test]
async fn running_again_before_the_pod_is_deleted_deletes_the_snapshot() {
    let (world, name) = saving().await;
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert!(is_terminating(&world.snapshots()[0]));
    assert!(!world.pod_is_terminating());
    world.assert_condition(
        "Suspended",
        "False",
        "NotSuspended",
        "Sandbox is not suspended",
    );
    // The Sandbox is suspended again at once: the new image waits until the old one's name is free.
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let waiting = format!("Waiting for the earlier SandboxSnapshot {name:?} to be removed");
    world.assert_condition("Hibernated", "False", "Saving", &waiting);
    assert!(!world.pod_is_terminating());
    world.image_is_gone(&name);
    world.settle().await;
    assert_eq!(world.snapshot(), name);
    assert!(world.snapshots()[0].get("status").is_none(), "a new one");
}

#[tokio::test]
async fn the_image_of_a_terminating_pod_stays_although_the_cache_shows_the_pod_running() {
    let (world, name) = saving().await;
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.sync();
    // The Pod is deleted in favour of its image, the caches lack that, and the user resumes the
    // Sandbox.
    world.api.delete("pods", NS, "s");
    world.edit_sandbox(&mode("Running"));
    world.stale_pass().await.unwrap();
    assert!(!is_terminating(&world.snapshots()[0]));
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    assert_eq!(
        world.pod().unwrap()["metadata"]["annotations"]["torpor.dev/restore-image"],
        "i.1"
    );
}

// Suspensions without memory.

#[rstest]
#[case::asked_to_stop(torpor_sandbox(strategy("Stop")), None)]
#[case::nothing_asked_for(sandbox(json!({})), None)]
#[case::asked_of_a_runtime_that_cannot(
    sandbox(strategy("Hibernate")),
    Some("The default runtime on node \"n1\" cannot hibernate; memory was not kept")
)]
#[tokio::test]
async fn a_suspension_without_memory_is_as_upstreams(
    #[case] object: Value,
    #[case] expected: Option<&str>,
) {
    let world = World::new();
    world.ready(object).await;
    world.edit_sandbox(&mode("Suspended"));
    let recorded = world.sandbox()["metadata"]["annotations"]
        .get("torpor.dev/last-pod")
        .is_some();
    let writes = world.writes_of_a_pass().await;
    assert_eq!(writes[..2], ["delete pods", "patch status sandboxes"]);
    // The record is removed, since that Pod left no memory.
    let forgets: &[&str] = if recorded { &["patch sandboxes"] } else { &[] };
    assert_eq!(writes[2..], *forgets);
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    match expected {
        None => assert_eq!(world.condition("Hibernated"), None),
        // The condition stays when the Pod is gone.
        Some(message) => {
            world.assert_condition("Hibernated", "False", "RuntimeNotCapable", message)
        }
    }
    assert!(world.snapshots().is_empty());
    let events: &[&str] = if expected.is_some() {
        &["MemoryNotKept"]
    } else {
        &[]
    };
    assert_eq!(world.events(), events);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(world.condition("Hibernated"), None);
    assert_eq!(world.condition("Restored"), None);
}

#[tokio::test]
async fn a_node_without_an_agent_cannot_hibernate_and_this_is_reported() {
    let world = World::new();
    world.api.remove("sandboxnodes", "", "n1");
    world.ready(torpor_sandbox(json!({}))).await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    assert!(world.pod_is_terminating());
    let message = "Runtime torpor on node \"n1\" cannot hibernate; memory was not kept";
    world.assert_condition("Hibernated", "False", "RuntimeNotCapable", message);
}

#[tokio::test]
async fn a_pod_that_does_not_run_yet_has_no_memory_to_keep() {
    let world = World::new();
    world.api.create("sandboxes", torpor_sandbox(json!({})));
    world.settle().await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    assert!(world.pod_is_terminating());
    assert!(world.snapshots().is_empty());
    assert_eq!(world.condition("Hibernated"), None);
}

#[tokio::test]
async fn a_sandbox_resumed_while_the_snapshot_cache_is_stale_keeps_its_memory() {
    let (world, name) = saving().await;
    world.edit_snapshot(&name, &committed("i.1", "n1"));
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    world.edit_sandbox(&mode("Running"));
    world.sync();
    for event in [Event::Init, Event::InitDone] {
        world.context.caches.snapshots.apply(event);
    }
    world.stale_pass().await.unwrap();
    let image = world.pod_annotation("torpor.dev/restore-image");
    assert_eq!(image.as_deref(), Some("i.1"));
}

// Freeze.

#[tokio::test]
async fn freeze_keeps_the_pod_and_reports_when_it_is_frozen() {
    let world = World::new();
    world.ready(torpor_sandbox(strategy("Freeze"))).await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let annotations = |world: &World| world.pod().unwrap()["metadata"]["annotations"].clone();
    assert_eq!(annotations(&world)["torpor.dev/freeze"], "true");
    let freezing = "Pod is being frozen. Sandbox is suspending";
    world.assert_condition("Suspended", "False", "PodFreezing", freezing);
    world.set_pod_condition(condition(
        "torpor.dev/Hibernated",
        "False",
        "Frozen",
        "paused",
    ));
    world.settle().await;
    world.assert_condition(
        "Suspended",
        "True",
        "PodFrozen",
        "Pod is frozen. Sandbox is suspended",
    );
    world.assert_condition("Ready", "False", "SandboxSuspended", "Sandbox is suspended");
    world.assert_condition("Hibernated", "False", "Frozen", "paused");
    assert!(!world.pod_is_terminating());
    assert_eq!(world.sandbox()["status"]["nodeName"], "n1");
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(annotations(&world).get("torpor.dev/freeze"), None);
    world.assert_condition(
        "Suspended",
        "False",
        "NotSuspended",
        "Sandbox is not suspended",
    );
}

#[tokio::test]
async fn freeze_where_the_runtime_cannot_is_a_stop() {
    let world = World::new();
    world.ready(sandbox(strategy("Freeze"))).await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    assert!(world.pod_is_terminating());
    assert_eq!(
        world.condition("Hibernated").unwrap().1,
        "RuntimeNotCapable"
    );
}

// Hibernation in place.

#[tokio::test]
async fn hibernation_in_place_is_requested_on_the_pod_and_reported_from_it() {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    world.edit_sandbox(&json!({"metadata": {"annotations": {"torpor.dev/hibernate": "true"}}}));
    world.settle().await;
    let annotations = |world: &World| world.pod().unwrap()["metadata"]["annotations"].clone();
    assert_eq!(annotations(&world)["torpor.dev/hibernate"], "true");
    world.set_pod_condition(condition(
        "torpor.dev/Hibernated",
        "True",
        "Hibernated",
        "asleep",
    ));
    world.settle().await;
    world.assert_condition("Hibernated", "True", "Hibernated", "asleep");
    world.assert_condition("Ready", "True", "DependenciesReady", "Pod is Ready");
    world.edit_sandbox(&json!({"metadata": {"annotations": {"torpor.dev/hibernate": "false"}}}));
    world.settle().await;
    assert_eq!(annotations(&world).get("torpor.dev/hibernate"), None);
    assert!(world.events().is_empty(), "the agent reports it on the Pod");
}

#[tokio::test]
async fn idle_times_reach_the_pod_in_canonical_form_and_invalid_ones_are_reported() {
    let world = World::new();
    let annotated = |pairs| json!({"metadata": {"annotations": pairs}});
    let template =
        json!({"spec": {"podTemplate": annotated(json!({"torpor.dev/doze-after": "1m"}))}});
    world.ready(torpor_sandbox(template)).await;
    let (doze, hibernate) = ("torpor.dev/doze-after", "torpor.dev/hibernate-after");
    assert_eq!(world.pod_annotation(doze).as_deref(), Some("60s"));
    assert_eq!(world.pod_annotation(hibernate), None);

    world.edit_sandbox(&annotated(
        json!({"agents.x-k8s.io/max-idle-time": "1h30m", "torpor.dev/doze-after": "off"}),
    ));
    world.settle().await;
    assert_eq!(world.pod_annotation(hibernate).as_deref(), Some("5400s"));
    assert_eq!(world.pod_annotation(doze).as_deref(), Some("off"));

    world.edit_sandbox(&annotated(json!({"agents.x-k8s.io/max-idle-time": "soon"})));
    world.settle().await;
    let message = "annotation agents.x-k8s.io/max-idle-time: value \"soon\" is not allowed; allowed: off, or a duration from 1s to 8760h, such as 30m or 1h30m";
    world.assert_condition("Hibernated", "False", "InvalidAnnotation", message);
    assert_eq!(world.pod_annotation(hibernate), None);
    assert_eq!(world.events(), ["InvalidAnnotation"]);
}

#[tokio::test]
async fn the_on_crash_setting_reaches_the_pod() {
    let world = World::new();
    let annotated =
        |value: &str| json!({"metadata": {"annotations": {"torpor.dev/on-crash": value}}});
    world.ready(torpor_sandbox(annotated("LastImage"))).await;
    let on_crash = "torpor.dev/on-crash";
    assert_eq!(world.pod_annotation(on_crash).as_deref(), Some("LastImage"));
    world.edit_sandbox(&annotated("lastImage"));
    world.settle().await;
    let message = "annotation torpor.dev/on-crash: value \"lastImage\" is not allowed; allowed: ColdStart, LastImage";
    world.assert_condition("Hibernated", "False", "InvalidAnnotation", message);
    assert_eq!(world.pod_annotation(on_crash), None);
}

#[tokio::test]
async fn a_sandbox_rolled_back_to_its_last_image_is_reported() {
    let world = World::new();
    world.ready(torpor_sandbox(json!({}))).await;
    let message = "went back to its last image";
    world.set_pod_condition(condition(
        "torpor.dev/Restored",
        "True",
        "RolledBack",
        message,
    ));
    world.settle().await;
    world.assert_condition("Restored", "True", "RolledBack", message);
    assert_eq!(world.events(), ["Resumed"]);
}

#[tokio::test]
async fn the_wake_on_setting_reaches_the_pod_and_an_invalid_value_is_reported() {
    let world = World::new();
    let wakes_on =
        |value: &str| json!({"metadata": {"annotations": {"torpor.dev/wake-on": value}}});
    let template = json!({"spec": {"podTemplate": wakes_on("ports=443 80, tcp")}});
    world.ready(torpor_sandbox(template)).await;
    let wake_on = "torpor.dev/wake-on";
    assert_eq!(
        world.pod_annotation(wake_on).as_deref(),
        Some("tcp,ports=80,443")
    );
    world.edit_sandbox(&wakes_on("any"));
    world.settle().await;
    assert_eq!(world.pod_annotation(wake_on).as_deref(), Some("any"));

    world.edit_sandbox(&wakes_on("http"));
    world.settle().await;
    let message = "annotation torpor.dev/wake-on: value \"http\" is not allowed; allowed: any, none, or some of tcp, udp, icmp, ports=PORTS, such as tcp,ports=80,8000-8099";
    world.assert_condition("Hibernated", "False", "InvalidAnnotation", message);
    assert_eq!(world.pod_annotation(wake_on), None);
}

#[tokio::test]
async fn hibernation_in_place_without_a_capable_runtime_is_reported() {
    let world = World::new();
    let ask = json!({"metadata": {"annotations": {"torpor.dev/hibernate": "true"}}});
    world.ready(sandbox(ask)).await;
    let message = "The default runtime on node \"n1\" cannot hibernate";
    world.assert_condition("Hibernated", "False", "RuntimeNotCapable", message);
}

// Invalid annotations.

#[tokio::test]
async fn a_wrong_annotation_is_shown_and_the_default_applies() {
    let world = World::new();
    world.ready(torpor_sandbox(strategy("hibernate"))).await;
    let message = "annotation torpor.dev/suspension-strategy: value \"hibernate\" is not allowed; allowed: Hibernate, Freeze, Stop";
    world.assert_condition("Hibernated", "False", "InvalidAnnotation", message);
    world.settle().await;
    assert_eq!(world.events(), ["InvalidAnnotation"]);
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    assert!(!world.pod_is_terminating());
    assert_eq!(world.snapshots().len(), 1, "Hibernate is the default");
}

#[rstest]
#[case::unknown(
    None,
    "SnapshotClass \"c\" does not exist; images are kept on the node that makes them"
)]
#[case::foreign(
    Some("example.com/x"),
    "SnapshotClass \"c\" has provisioner \"example.com/x\", which is not supported (known: node.torpor.dev, repository.torpor.dev); images are kept on the node that makes them"
)]
#[tokio::test]
async fn an_unavailable_snapshot_class_is_reported(
    #[case] provisioner: Option<&str>,
    #[case] message: &str,
) {
    let world = World::new();
    if let Some(provisioner) = provisioner {
        let spec = json!({"provisioner": provisioner});
        world.api.create(
            "snapshotclasses",
            json!({"metadata": {"name": "c"}, "spec": spec}),
        );
    }
    let named = json!({"metadata": {"annotations": {"torpor.dev/snapshot-class": "c"}}});
    world.ready(torpor_sandbox(named)).await;
    world.assert_condition("Hibernated", "False", "SnapshotClassNotSupported", message);
}
