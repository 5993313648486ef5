//! Tests that the rules of a SnapshotClass delete manual snapshots, and only those.

use std::sync::Arc;

use serde_json::{Value, json};
use torpor_controller::retention;

use crate::{
    claims::waiting,
    objects::{NS, committed, torpor_sandbox},
    world::World,
};

/// Returns a world whose Sandbox names a class with these parameters and has two old snapshots.
fn with_class(parameters: Value) -> World {
    let world = World::new();
    let class = json!({
        "metadata": {"name": "daily"},
        "spec": {"provisioner": "node.torpor.dev", "parameters": parameters},
    });
    world.api.create("snapshotclasses", class);
    let named = json!({"metadata": {"annotations": {"torpor.dev/snapshot-class": "daily"}}});
    world.api.create("sandboxes", torpor_sandbox(named));
    for (name, day) in [("old", 1), ("older", 0)] {
        let mut snapshot = json!({
            "metadata": {"name": name, "namespace": NS},
            "spec": {"sandboxName": "s", "reason": "Manual"},
            "status": committed(&format!("{name}.1"), "n1")["status"],
        });
        snapshot["status"]["committedAt"] = format!("2026-01-0{}T00:00:00Z", day + 1).into();
        world.api.create("sandboxsnapshots", snapshot);
        // Backdates the snapshot.
        let created = json!({"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}});
        world.edit_snapshot(name, &created);
    }
    world
}

async fn pass(world: &World) -> Vec<String> {
    world.sync();
    let sandbox = serde_json::from_value(world.sandbox()).unwrap();
    let look = retention::reconcile(Arc::new(sandbox), Arc::clone(&world.context)).await;
    assert_eq!(look.unwrap(), None);
    let left = world.snapshots();
    let names = left.iter().map(|one| one["metadata"]["name"].as_str());
    names.map(|name| name.unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_snapshot_beyond_keep_last_is_deleted_and_an_event_names_the_rule() {
    let world = with_class(json!({"keepLast": "1"}));
    assert_eq!(pass(&world).await, ["old"]);
    let events = world.api.list("events");
    assert_eq!(events.len(), 1, "{events:#?}");
    assert_eq!(events[0]["reason"], "SnapshotExpired");
    assert_eq!(events[0]["regarding"]["kind"], "Sandbox");
    let note =
        "Deleted SandboxSnapshot \"older\" by the rule keepLast 1 of SnapshotClass \"daily\"";
    assert_eq!(events[0]["note"], note);
    assert_eq!(pass(&world).await, ["old"]);
    assert_eq!(world.api.list("events").len(), 1);
}

#[tokio::test]
async fn a_snapshot_older_than_its_ttl_is_deleted() {
    let world = with_class(json!({"ttl": "24h"}));
    assert_eq!(pass(&world).await, [] as [&str; 0]);
}

#[tokio::test]
async fn a_snapshot_named_by_a_copy_stays_until_the_copy_is_deleted() {
    let world = with_class(json!({"ttl": "24h"}));
    let copy = torpor_sandbox(json!({"metadata": {
        "name": "copy", "annotations": {"torpor.dev/restore-from": "older"},
    }}));
    world.api.create("sandboxes", copy);
    assert_eq!(pass(&world).await, ["older"]);
    waiting(&world.context.queues.retention).await;
    world.api.remove("sandboxes", NS, "copy");
    world.sync();
    let woken = waiting(&world.context.queues.retention).await;
    assert!(woken.contains(&"s".to_owned()), "{woken:?}");
    assert_eq!(pass(&world).await, [] as [&str; 0]);
}

#[tokio::test]
async fn an_invalid_parameter_deletes_nothing_and_the_allowed_values_are_reported() {
    let world = with_class(json!({"ttl": "soon"}));
    assert_eq!(pass(&world).await, ["old", "older"]);
    world.settle().await;
    world.assert_condition(
        "Hibernated",
        "False",
        "SnapshotClassNotSupported",
        "SnapshotClass \"daily\": parameter ttl: value \"soon\" is not allowed; allowed: a duration from 1m to 8760h, such as 72h or 1h30m",
    );
}
