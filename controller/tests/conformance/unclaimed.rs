//! Tests of memory of a Pod that ended while no controller ran: it is looked for, claimed, waited
//! for, or given up with a report.

use jiff::{SignedDuration, Timestamp};
use rstest::rstest;
use serde_json::{Value, json};

use crate::{
    objects::{
        IMAGE, NS, committed, condition, mode, pod_record, sandbox, sandbox_node, torpor_sandbox,
    },
    world::World,
};

const COLD: &str = "torpor.dev/on-restore-failure";

/// Returns a world with a Sandbox that sleeps in place, and the UID of its Pod.
async fn asleep_as(change: Value, status: &str, reason: &str) -> (World, String) {
    let world = World::new();
    world.ready(torpor_sandbox(change)).await;
    world.set_pod_condition(condition("torpor.dev/Hibernated", status, reason, ""));
    world.settle().await;
    let uid = world.pod_uid();
    (world, uid)
}

async fn asleep() -> (World, String) {
    asleep_as(json!({}), "True", "Hibernated").await
}

/// Reports these Pods' images, as the agent of a node, with a heartbeat `seconds` from now.
fn reports(world: &World, node: &str, seconds: i64, pods: &[&str]) {
    let at = Timestamp::now() + SignedDuration::from_secs(seconds);
    let list: Vec<Value> = pods
        .iter()
        .map(|uid| json!({"podUID": uid, "imageID": format!("{uid}.1"), "podGoneSince": at.to_string()}))
        .collect();
    let report = json!({"status": {"heartbeatTime": at.to_string(), "sandboxes": list}});
    world.api.edit("sandboxnodes", "", node, &report);
}

/// Evicts and removes the Pod while no controller runs, and returns the world with a new
/// controller.
fn drain_without_controller(world: World) -> World {
    world.set_pod_condition(condition(
        "DisruptionTarget",
        "True",
        "EvictionByEvictionAPI",
        "",
    ));
    world.api.remove("pods", NS, "s");
    world.restarted()
}

fn restored_image(world: &World) -> Option<String> {
    world.pod_annotation("torpor.dev/restore-image")
}

fn last_pod(world: &World) -> Value {
    world.sandbox()["metadata"]["annotations"]["torpor.dev/last-pod"].clone()
}

fn restored(world: &World) -> (String, String) {
    let (status, reason, _) = world.condition("Restored").expect("Restored is set");
    (status, reason)
}

// Record of the Pod.

#[tokio::test]
async fn a_running_pod_is_recorded_once_after_the_status_is_written() {
    let world = World::new();
    world.api.create("sandboxes", torpor_sandbox(json!({})));
    world.settle().await;
    assert_eq!(last_pod(&world), Value::Null, "it does not run yet");
    world.pod_becomes_ready();
    let writes = world.writes_of_a_pass().await;
    assert_eq!(writes, ["patch status sandboxes", "patch sandboxes"]);
    assert_eq!(
        last_pod(&world),
        pod_record(&world.sandbox(), &world.pod_uid(), "n1")
    );
    assert!(world.writes_of_a_pass().await.is_empty());
    // The record of the next Pod replaces it.
    world.api.remove("pods", NS, "s");
    world.settle().await;
    world.pod_becomes_ready();
    world.settle().await;
    assert_eq!(
        last_pod(&world),
        pod_record(&world.sandbox(), &world.pod_uid(), "n1")
    );
}

#[tokio::test]
async fn a_sandbox_whose_node_keeps_no_memory_has_no_record() {
    let world = World::new();
    world.ready(sandbox(json!({}))).await;
    assert_eq!(last_pod(&world), Value::Null);
}

#[tokio::test]
async fn a_stale_controller_does_not_replace_the_record_of_a_later_pod() {
    let world = World::new();
    world.api.create("sandboxes", torpor_sandbox(json!({})));
    world.settle().await;
    world.pod_becomes_ready();
    world.sync();
    let seen = world.api.get("sandboxes", NS, "s").unwrap();
    let other = pod_record(&world.sandbox(), "later", "n1");
    let wrote = json!({"metadata": {"annotations": {"torpor.dev/last-pod": other}}});
    world.api.edit("sandboxes", NS, "s", &wrote);
    let late =
        torpor_controller::saved_pod::last_pod_patch(&serde_json::from_value(seen).unwrap(), None);
    let api = torpor_controller::calls::Apiserver::new(
        world.api.client(),
        std::time::Duration::from_secs(20),
    );
    let refused = api.patch::<torpor_api::Sandbox>(NS, "s", &late).await;
    let answer = refused.unwrap_err().answer();
    assert_eq!(answer, torpor_controller::calls::Answer::Conflict);
    assert_eq!(last_pod(&world), other);
}

// Claimed memory.

#[rstest]
#[case::hibernated("True", "Hibernated")]
#[case::dozing("False", "Dozing")]
#[case::awake_when_it_was_last_heard_of("False", "Awake")]
#[tokio::test]
async fn a_controller_absent_while_a_sleeping_pod_was_evicted_finds_its_memory(
    #[case] status: &str,
    #[case] reason: &str,
) {
    let (world, uid) = asleep_as(json!({}), status, reason).await;
    reports(&world, "n1", -10, &[&uid]);
    let world = drain_without_controller(world);
    world.settle().await;
    assert!(world.pod().is_none(), "its memory is claimed first");
    let name = world.snapshot();
    let snapshot = &world.snapshots()[0];
    assert_eq!(
        snapshot["spec"],
        json!({"sandboxName": "s", "podUID": uid, "nodeName": "n1", "reason": "Suspend"})
    );
    let record = &snapshot["metadata"]["annotations"]["torpor.dev/saved-pod"];
    assert_eq!(*record, pod_record(&world.sandbox(), &uid, "n1"));
    let message = format!(
        "Pod \"s\" (UID {uid}) is gone; its image on node \"n1\" is being kept in SandboxSnapshot {name:?}"
    );
    world.assert_condition("Hibernated", "False", "Saving", &message);

    world.edit_snapshot(&name, &committed(&format!("{uid}.1"), "n1"));
    world.settle().await;
    assert_eq!(restored_image(&world), Some(format!("{uid}.1")));
    let pod = world.pod().unwrap();
    assert_eq!(pod["spec"]["containers"][0]["image"], IMAGE);
    assert_eq!(world.condition("Restored"), None, "not known yet");
    assert!(!world.events().contains(&"ColdStarted".to_owned()));
}

#[tokio::test]
async fn a_late_report_is_waited_for() {
    let (world, uid) = asleep().await;
    reports(&world, "n1", -10, &[]);
    let world = drain_without_controller(world);
    world.settle().await;
    assert!(world.pod().is_none());
    let (_, reason, message) = world.condition("Restored").unwrap();
    assert_eq!(reason, "AskingNode");
    assert!(
        message.contains("\"n1\"") && message.contains(&uid),
        "{message}"
    );
    assert!(world.pass().await.unwrap().is_some(), "it looks again");
    reports(&world, "n1", 10, &[&uid]);
    world.settle().await;
    assert_eq!(world.snapshots()[0]["spec"]["podUID"], uid.as_str());
    assert!(world.pod().is_none());
    assert!(
        world.events().is_empty(),
        "nothing is lost: {:?}",
        world.events()
    );
}

#[tokio::test]
async fn a_sandbox_suspended_meanwhile_keeps_its_memory_too() {
    let (world, uid) = asleep().await;
    reports(&world, "n1", -10, &[&uid]);
    let world = drain_without_controller(world);
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let name = world.snapshot();
    world.edit_snapshot(&name, &committed(&format!("{uid}.1"), "n1"));
    world.settle().await;
    let kept = format!("Memory is kept in SandboxSnapshot {name:?} on node \"n1\"");
    world.assert_condition("Hibernated", "True", "Hibernated", &kept);
    assert_eq!(world.condition("Restored"), None);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert_eq!(restored_image(&world), Some(format!("{uid}.1")));
}

#[tokio::test]
async fn a_snapshot_whose_pod_ended_before_its_agent_saw_it_is_waited_for() {
    let (world, uid) = asleep().await;
    reports(&world, "n1", -10, &[&uid]);
    world.set_pod_condition(condition(
        "DisruptionTarget",
        "True",
        "EvictionByEvictionAPI",
        "",
    ));
    world.edit_pod(&json!({"metadata": {"deletionTimestamp": "2026-11-21T12:00:00Z"}}));
    world.settle().await;
    let name = world.snapshot();
    world.pod_ends();
    world.settle().await;
    assert_eq!(world.snapshot(), name, "it is not taken back");
    assert!(world.pod().is_none());
    world.edit_snapshot(&name, &committed(&format!("{uid}.1"), "n1"));
    world.settle().await;
    assert_eq!(restored_image(&world), Some(format!("{uid}.1")));
}

// Memory that is given up.

#[tokio::test]
async fn memory_that_its_node_no_longer_has_is_given_up_with_one_report() {
    let (world, uid) = asleep().await;
    reports(&world, "n1", -10, &[]);
    let world = drain_without_controller(world);
    world.settle().await;
    reports(&world, "n1", 10, &[]);
    world.settle().await;
    assert_eq!(restored_image(&world), None);
    let message = format!(
        "Started without the saved memory. The memory of Pod \"s\" (UID {uid}) is given up: node \"n1\" has no image of it"
    );
    world.assert_condition("Restored", "False", "ColdStarted", &message);
    assert_eq!(world.events(), ["ColdStarted"]);
    assert_eq!(last_pod(&world), Value::Null);
    // The image reappears, but the Sandbox has continued without it.
    reports(&world, "n1", 20, &[&uid]);
    world.api.remove("pods", NS, "s");
    world.settle().await;
    assert!(world.snapshots().is_empty());
    assert_eq!(restored_image(&world), None);
    world.assert_condition("Restored", "False", "ColdStarted", &message);
}

#[tokio::test]
async fn an_incomplete_report_of_a_starting_agent_is_not_an_answer() {
    let (world, uid) = asleep().await;
    let world = drain_without_controller(world);
    world.settle().await;
    let begun = json!({"status": {"sandboxesComplete": false}});
    world.api.edit("sandboxnodes", "", "n1", &begun);
    reports(&world, "n1", 20, &[]);
    world.settle().await;
    assert!(world.pod().is_none(), "its list is not whole yet");
    assert_eq!(restored(&world).1, "AskingNode");
    let whole = json!({"status": {"sandboxesComplete": true}});
    world.api.edit("sandboxnodes", "", "n1", &whole);
    reports(&world, "n1", 30, &[&uid]);
    world.settle().await;
    assert_eq!(world.snapshots().len(), 1, "its memory is claimed");
}

#[tokio::test]
async fn a_report_of_another_node_about_the_pod_is_ignored() {
    let (world, uid) = asleep().await;
    world.api.create("sandboxnodes", sandbox_node("n2"));
    reports(&world, "n1", -10, &[]);
    reports(&world, "n2", 10, &[&uid]);
    let world = drain_without_controller(world);
    world.settle().await;
    assert!(world.snapshots().is_empty());
    assert!(world.pod().is_none(), "its own node has not answered");
    reports(&world, "n1", 10, &[]);
    world.settle().await;
    assert!(world.snapshots().is_empty());
    assert_eq!(restored(&world).1, "ColdStarted");
}

#[tokio::test]
async fn memory_that_the_agent_cannot_find_for_its_snapshot_is_given_up() {
    let (world, uid) = asleep().await;
    reports(&world, "n1", -10, &[&uid]);
    let world = drain_without_controller(world);
    world.settle().await;
    let name = world.snapshot();
    let denied = json!({
        "metadata": {"finalizers": ["torpor.dev/image"]},
        "status": {
            "nodeName": "n1",
            "conditions": [condition("Committed", "False", "SandboxNotFound", "no image")],
        },
    });
    world.edit_snapshot(&name, &denied);
    // The report is older than the condition.
    world.settle().await;
    assert_eq!(restored_image(&world), None);
    let (_, reason, message) = world.condition("Restored").unwrap();
    assert_eq!(reason, "ColdStarted");
    assert!(
        message.ends_with("reports SandboxNotFound: no image"),
        "{message}"
    );
    assert!(crate::cluster::is_terminating(&world.snapshots()[0]));
}

#[tokio::test]
async fn another_node_cannot_deny_the_memory_of_the_pods_node() {
    let (world, uid) = asleep().await;
    reports(&world, "n1", -10, &[&uid]);
    let world = drain_without_controller(world);
    world.settle().await;
    let denied = json!({
        "metadata": {"finalizers": ["torpor.dev/image"]},
        "status": {
            "nodeName": "n2",
            "conditions": [condition("Committed", "False", "SandboxNotFound", "no image")],
        },
    });
    world.edit_snapshot(&world.snapshot(), &denied);
    world.settle().await;
    assert!(world.pod().is_none());
    assert!(!crate::cluster::is_terminating(&world.snapshots()[0]));
}

// Absent nodes.

fn agent_is_gone(world: &World) {
    world.api.remove("sandboxnodes", "", "n1");
}

fn agent_is_silent(world: &World) {
    let long_ago = json!({"status": {"heartbeatTime": "2019-01-01T00:00:00Z"}});
    world.api.edit("sandboxnodes", "", "n1", &long_ago);
}

fn node_is_gone(world: &World) {
    agent_is_silent(world);
    world.api.remove("nodes", "", "n1");
}

fn comes_back(world: &World, uid: &str) {
    agent_is_gone(world);
    world.api.create("sandboxnodes", sandbox_node("n1"));
    if world.api.get("nodes", "", "n1").is_none() {
        world
            .api
            .create("nodes", json!({"metadata": {"name": "n1"}}));
    }
    reports(world, "n1", 10, &[uid]);
}

#[rstest]
#[case::agent_is_gone(agent_is_gone, "from which no agent of Torpor reports")]
#[case::agent_is_silent(agent_is_silent, "from which no agent of Torpor reports")]
#[case::node_is_gone(node_is_gone, "which is gone from the cluster")]
#[tokio::test]
async fn memory_on_an_absent_node_is_waited_for(#[case] goes: fn(&World), #[case] why: &str) {
    let (world, uid) = asleep().await;
    goes(&world);
    let world = drain_without_controller(world);
    world.settle().await;
    assert!(world.pod().is_none());
    let (status, reason, message) = world.condition("Restored").unwrap();
    assert_eq!([&*status, &*reason], ["False", "NodeUnavailable"]);
    assert!(message.contains(why) && message.contains(COLD), "{message}");
    assert_eq!(world.condition("Hibernated").unwrap().1, "Hibernated");
    world.let_time_pass();
    world.settle().await;
    assert!(world.pod().is_none(), "however long that takes");
    comes_back(&world, &uid);
    world.settle().await;
    assert_eq!(world.snapshots()[0]["spec"]["podUID"], uid.as_str());
}

#[rstest]
#[case::agent_is_gone(agent_is_gone)]
#[case::node_is_gone(node_is_gone)]
#[tokio::test]
async fn policy_cold_start_waits_for_memory_on_an_absent_node_and_then_gives_it_up(
    #[case] goes: fn(&World),
    #[values(true, false)] returns: bool,
) {
    let policy = json!({"metadata": {"annotations": {COLD: "ColdStart"}}});
    let (world, uid) = asleep_as(policy, "True", "Hibernated").await;
    goes(&world);
    let world = drain_without_controller(world);
    world.settle().await;
    assert!(world.pod().is_none());
    assert_eq!(restored(&world).1, "NodeUnavailable");
    if returns {
        comes_back(&world, &uid);
        world.settle().await;
        assert_eq!(world.snapshots()[0]["spec"]["podUID"], uid.as_str());
        return;
    }
    world.let_time_pass();
    world.settle().await;
    assert_eq!(restored_image(&world), None);
    assert_eq!(restored(&world).1, "ColdStarted");
    assert!(world.events().contains(&"ColdStarted".to_owned()));
}

// Pods without memory.

#[tokio::test]
async fn a_sandbox_whose_pod_vanished_awake_starts_without_memory_at_once() {
    let (world, _) = asleep_as(json!({}), "False", "Awake").await;
    reports(&world, "n1", -10, &[]);
    world.api.remove("pods", NS, "s");
    let writes = world.writes_of_a_pass().await;
    assert_eq!(writes[0], "create pods");
    assert_eq!(world.condition("Restored"), None);
}

#[tokio::test]
async fn the_memory_of_a_sleeping_pod_that_its_user_deleted_is_not_looked_for() {
    let (world, uid) = asleep().await;
    world.edit_pod(&json!({"metadata": {"deletionTimestamp": "2026-11-21T12:00:00Z"}}));
    world.settle().await;
    assert_eq!(last_pod(&world), Value::Null);
    // The agent has not removed the image yet.
    reports(&world, "n1", 10, &[&uid]);
    world.pod_ends();
    let writes = world.writes_of_a_pass().await;
    assert_eq!(writes[0], "create pods");
    assert!(world.snapshots().is_empty());
    assert_eq!(world.condition("Restored"), None);
}

#[tokio::test]
async fn a_sandbox_stopped_without_its_memory_claims_none() {
    let stop = json!({"metadata": {"annotations": {"torpor.dev/suspension-strategy": "Stop"}}});
    let (world, uid) = asleep_as(stop, "True", "Hibernated").await;
    reports(&world, "n1", -10, &[&uid]);
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    world.pod_ends();
    let keep = json!({"metadata": {"annotations": {"torpor.dev/suspension-strategy": null}}});
    world.edit_sandbox(&keep);
    world.edit_sandbox(&mode("Running"));
    world.settle().await;
    assert!(world.snapshots().is_empty());
    assert_eq!(restored_image(&world), None);
}
