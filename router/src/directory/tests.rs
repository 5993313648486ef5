use std::time::Duration;

use serde_json::{Value, json};

use super::*;

fn sandbox(name: &str, uid: &str, change: Value) -> WatchedSandbox {
    let mut whole = json!({
        "metadata": {"namespace": "ns", "name": name, "uid": uid, "resourceVersion": "7"},
        "spec": {"operatingMode": "Running"},
    });
    torpor_test_apiserver::merge_patch::apply(&mut whole, &change);
    serde_json::from_value(whole).unwrap()
}

fn pod(sandbox: &str, owner: &str, uid: &str, address: &str, change: Value) -> WatchedPod {
    let mut whole = json!({
        "metadata": {"namespace": "ns", "name": format!("{sandbox}-pod"), "uid": uid, "ownerReferences": [{
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": sandbox, "uid": owner, "controller": true,
        }]},
        "status": {"podIPs": [{"ip": address}], "conditions": [{"type": "Ready", "status": "True"}]},
    });
    torpor_test_apiserver::merge_patch::apply(&mut whole, &change);
    serde_json::from_value(whole).unwrap()
}

fn address(directory: &Directory, name: &str) -> Option<String> {
    let pod = directory.look_up("ns", name)?.pod?;
    Some(pod.address.to_string())
}

fn with_a_sandbox() -> Directory {
    let directory = Directory::new(AddressPolicy::default());
    directory.apply_sandbox(Event::Apply(sandbox("s", "u1", json!({}))));
    directory
}

#[test]
fn a_sandbox_has_the_address_of_its_ready_pod() {
    let directory = with_a_sandbox();
    assert_eq!(address(&directory, "s"), None);
    directory.apply_pod(Event::Apply(pod("s", "u1", "p1", "10.0.0.1", json!({}))));
    assert_eq!(address(&directory, "s").as_deref(), Some("10.0.0.1"));
    assert!(directory.is_at("p1", "10.0.0.1".parse().unwrap()));
    let not_ready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    directory.apply_pod(Event::Apply(pod("s", "u1", "p1", "10.0.0.1", not_ready)));
    assert_eq!(address(&directory, "s"), None);
    assert!(!directory.is_at("p1", "10.0.0.1".parse().unwrap()));
}

#[test]
fn a_pod_that_is_being_deleted_takes_no_requests() {
    let directory = with_a_sandbox();
    let dying = json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}});
    directory.apply_pod(Event::Apply(pod("s", "u1", "p1", "10.0.0.1", dying)));
    assert_eq!(address(&directory, "s"), None);
}

#[test]
fn the_pod_of_an_earlier_sandbox_of_that_name_is_not_its_pod() {
    let directory = with_a_sandbox();
    directory.apply_pod(Event::Apply(pod("s", "u0", "p0", "10.0.0.9", json!({}))));
    assert_eq!(address(&directory, "s"), None);
    directory.apply_pod(Event::Apply(pod("s", "u1", "p1", "10.0.0.1", json!({}))));
    assert_eq!(address(&directory, "s").as_deref(), Some("10.0.0.1"));
}

#[test]
fn the_late_deletion_of_an_old_pod_leaves_the_new_one() {
    let directory = with_a_sandbox();
    directory.apply_pod(Event::Apply(pod("s", "u1", "p1", "10.0.0.1", json!({}))));
    directory.apply_pod(Event::Apply(pod("s", "u1", "p2", "10.0.0.2", json!({}))));
    directory.apply_pod(Event::Delete(pod("s", "u1", "p1", "10.0.0.1", json!({}))));
    assert_eq!(address(&directory, "s").as_deref(), Some("10.0.0.2"));
}

#[test]
fn pods_at_forbidden_addresses_are_ignored() {
    let directory = with_a_sandbox();
    for forged in [
        "127.0.0.1",
        "169.254.169.254",
        "::1",
        "0.0.0.0",
        "224.0.0.1",
    ] {
        directory.apply_pod(Event::Apply(pod("s", "u1", "p1", forged, json!({}))));
        assert_eq!(address(&directory, "s"), None, "{forged}");
    }
}

#[test]
fn members_of_a_pool_do_not_exist_until_claimed() {
    let directory = Directory::new(AddressPolicy::default());
    let pooled = json!({"metadata": {"labels": {"agents.x-k8s.io/warm-pool-sandbox": "h"}}});
    directory.apply_sandbox(Event::Apply(sandbox("s", "u1", pooled)));
    assert!(!directory.exists("ns", "s"));
    assert!(directory.look_up("ns", "s").unwrap().unclaimed);
    directory.apply_sandbox(Event::Apply(sandbox("s", "u1", json!({}))));
    assert!(directory.exists("ns", "s"));
}

#[test]
fn a_new_list_removes_objects_that_are_not_in_it() {
    let directory = with_a_sandbox();
    directory.apply_sandbox(Event::Apply(sandbox("t", "u2", json!({}))));
    directory.apply_pod(Event::Apply(pod("t", "u2", "p2", "10.0.0.2", json!({}))));
    directory.apply_pod(Event::Apply(pod("s", "u1", "p1", "10.0.0.1", json!({}))));
    assert!(!directory.is_ready());
    directory.apply_sandbox(Event::Init);
    directory.apply_sandbox(Event::InitApply(sandbox("t", "u2", json!({}))));
    directory.apply_sandbox(Event::InitDone);
    assert!(!directory.exists("ns", "s"));
    directory.apply_pod(Event::Init);
    directory.apply_pod(Event::InitDone);
    assert!(directory.is_ready());
    assert_eq!(address(&directory, "t"), None);
    assert!(!directory.is_at("p2", "10.0.0.2".parse().unwrap()));
    directory.apply_sandbox(Event::Delete(sandbox("t", "u2", json!({}))));
    assert!(!directory.has_namespace("ns"), "no entry is left");
}

#[tokio::test]
async fn a_waiting_request_is_woken_by_changes_of_its_sandbox_only() {
    let directory = with_a_sandbox();
    let mut changes = directory.changes("ns", "s");
    directory.apply_sandbox(Event::Apply(sandbox("t", "u2", json!({}))));
    assert!(futures::FutureExt::now_or_never(changes.next()).is_none());
    directory.apply_pod(Event::Apply(pod("s", "u1", "p1", "10.0.0.1", json!({}))));
    tokio::time::timeout(Duration::from_secs(20), changes.next())
        .await
        .unwrap();
    drop(changes);
    assert!(directory.waiting().is_empty());
}
