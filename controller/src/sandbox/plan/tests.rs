use std::collections::BTreeMap;

use rstest::rstest;
use serde::Serialize;
use serde::de::DeserializeOwned;
use torpor_api::{SandboxNode, SandboxSnapshot};

use super::*;
use crate::merge_patch;

fn now() -> Timestamp {
    "2026-01-01T00:00:00Z".parse().unwrap()
}

fn sandbox(change: Value) -> Sandbox {
    let mut whole = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": "s", "namespace": "ns", "uid": "u-s", "generation": 1},
        "spec": {"podTemplate": {"spec": {
            "runtimeClassName": "torpor", "containers": [{"name": "c", "image": "i"}],
        }}},
    });
    merge_patch::apply(&mut whole, &change);
    serde_json::from_value(whole).unwrap()
}

fn owner() -> Value {
    json!([{
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "s", "uid": "u-s",
        "controller": true,
    }])
}

fn pod(change: Value) -> Arc<Pod> {
    let mut whole = json!({
        "metadata": {
            "name": "s", "namespace": "ns", "uid": "u-p", "ownerReferences": owner(),
            "labels": {"agents.x-k8s.io/sandbox-name-hash": torpor_api::name_hash("s")},
        },
        "spec": {"nodeName": "n1", "runtimeClassName": "torpor"},
        "status": {"phase": "Running"},
    });
    merge_patch::apply(&mut whole, &change);
    Arc::new(serde_json::from_value(whole).unwrap())
}

/// Snapshot of the Pod above.
fn snapshot(committed: &str, change: Value) -> Arc<SandboxSnapshot> {
    let mut whole = json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
        "metadata": {"name": "m", "uid": "u-m", "resourceVersion": "7", "ownerReferences": owner()},
        "spec": {"sandboxName": "s", "podUID": "u-p", "nodeName": "n1", "reason": "Suspend"},
        "status": {"imageID": "u-p.1", "nodeName": "n1", "podName": "s", "conditions": [{
            "type": "Committed", "status": committed, "reason": "Saving", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }]},
    });
    merge_patch::apply(&mut whole, &change);
    Arc::new(serde_json::from_value(whole).unwrap())
}

fn node() -> Arc<SandboxNode> {
    Arc::new(
        serde_json::from_value(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxNode",
            "metadata": {"name": "n1"}, "spec": {},
            "status": {"runtimes": [{"handler": "torpor", "capabilities": {
                "hibernate": true, "restore": true, "freeze": true,
            }}]},
        }))
        .unwrap(),
    )
}

/// Complete observation, on a node that can hibernate.
fn observed(
    sandbox: Sandbox,
    pod: Option<Arc<Pod>>,
    snapshot: Option<Arc<SandboxSnapshot>>,
) -> Observed {
    let named = |name: &str| name.to_owned();
    Observed {
        sandbox: Arc::new(sandbox),
        pods: pod.into_iter().map(|pod| (pod.name_any(), pod)).collect(),
        snapshots: snapshot.into_iter().map(|s| (s.name_any(), s)).collect(),
        nodes: BTreeMap::from([(named("n1"), node())]),
        handlers: BTreeMap::from([(named("torpor"), named("torpor"))]),
        ..Observed::default()
    }
}

const RECORDED: &str = "agents.x-k8s.io/pod-name";

fn suspended(change: Value) -> Sandbox {
    let mut all = json!({
        "metadata": {"annotations": {RECORDED: "s"}}, "spec": {"operatingMode": "Suspended"},
    });
    merge_patch::apply(&mut all, &change);
    sandbox(all)
}

fn running() -> Sandbox {
    sandbox(json!({"metadata": {"annotations": {RECORDED: "s"}}}))
}

/// Returns the names of the actions, with the fence where there is one.
fn actions(plan: &Plan) -> Vec<String> {
    plan.steps
        .iter()
        .map(|step| match &step.action {
            Action::DeletePod { image, .. } | Action::CreatePod { image, .. } => {
                let verb = match &step.action {
                    Action::DeletePod { .. } => "delete pod",
                    _ => "create pod",
                };
                match image {
                    Some(image) => format!("{verb}, {:?} {}", image.use_of, image.name),
                    None => verb.to_owned(),
                }
            }
            Action::DeleteSnapshot { fence, .. } => format!("delete snapshot, {fence:?}"),
            other => {
                let text = format!("{other:?}");
                text.split([' ', '(']).next().unwrap_or_default().to_owned()
            }
        })
        .collect()
}

fn strategy(value: &str) -> Value {
    json!({"metadata": {"annotations": {"torpor.dev/suspension-strategy": value}}})
}

#[rstest]
#[case::save_first(suspended(json!({})), pod(json!({})), None, &["CreateSnapshot"])]
#[case::wait(suspended(json!({})), pod(json!({})), Some(snapshot("False", json!({}))), &[])]
#[case::saved(
    suspended(json!({})), pod(json!({})), Some(snapshot("True", json!({}))),
    &["delete pod, OnlyCopy m"]
)]
#[case::saved_and_going(
    suspended(json!({})), pod(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})),
    Some(snapshot("True", json!({}))), &[]
)]
#[case::the_image_is_of_another_pod(
    suspended(json!({})), pod(json!({"metadata": {"uid": "u-2"}})),
    Some(snapshot("True", json!({}))), &["CreateSnapshot"]
)]
#[case::the_image_is_of_another_sandbox(
    suspended(json!({})), pod(json!({})),
    Some(snapshot("True", json!({"metadata": {"ownerReferences": null}}))), &["CreateSnapshot"]
)]
#[case::a_snapshot_of_the_users_own_does_not_count(
    suspended(json!({})), pod(json!({})),
    Some(snapshot("True", json!({"spec": {"reason": "Manual"}}))), &["CreateSnapshot"]
)]
#[case::nothing_to_save_yet(
    suspended(json!({})), pod(json!({"status": {"phase": "Pending"}})), None, &["delete pod"]
)]
#[case::no_node_yet(
    suspended(json!({})), pod(json!({"spec": {"nodeName": null}})), None, &["delete pod"]
)]
#[case::another_runtime(
    suspended(json!({})), pod(json!({"spec": {"runtimeClassName": "runc"}})), None, &["delete pod"]
)]
#[case::stop(suspended(strategy("Stop")), pod(json!({})), None, &["delete pod"])]
#[case::freeze(suspended(strategy("Freeze")), pod(json!({})), None, &["PatchPod"])]
fn suspend_with_a_pod(
    #[case] sandbox: Sandbox,
    #[case] pod: Arc<Pod>,
    #[case] snapshot: Option<Arc<SandboxSnapshot>>,
    #[case] expected: &[&str],
) {
    let plan = plan(&observed(sandbox, Some(pod), snapshot), now());
    assert_eq!(actions(&plan), expected);
}

#[rstest]
#[case::cold(None, &["create pod"])]
#[case::from_the_image(Some(snapshot("True", json!({}))), &["create pod, Resume m"])]
#[case::half_an_image_goes_first(
    Some(snapshot("False", json!({}))),
    &["delete snapshot, Unchanged { resource_version: \"7\" }", "create pod"]
)]
#[case::an_image_that_is_going_is_not_used(
    Some(snapshot("True", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))),
    &["create pod"]
)]
fn start_without_a_pod(#[case] snapshot: Option<Arc<SandboxSnapshot>>, #[case] expected: &[&str]) {
    let plan = plan(&observed(running(), None, snapshot), now());
    assert_eq!(actions(&plan), expected);
}

#[rstest]
#[case::a_moment_ago(Some("2025-12-31T23:59:00Z"), &[])]
#[case::long_ago(Some("2025-12-31T23:58:00Z"), &["n1"])]
#[case::never(None, &["n1"])]
fn a_silent_node_of_an_image_is_looked_up(
    #[case] heartbeat: Option<&str>,
    #[case] expected: &[&str],
) {
    let mut view = observed(running(), None, Some(snapshot("True", json!({}))));
    view.nodes.clear();
    if let Some(heartbeat) = heartbeat {
        let mut node = SandboxNode::clone(&node());
        let status = node.status.get_or_insert_default();
        status.heartbeat_time = serde_json::from_value(json!(heartbeat)).unwrap();
        view.nodes.insert("n1".to_owned(), Arc::new(node));
    }
    assert_eq!(nodes_to_confirm(&view, now()), expected);
    // A foreign Pod with the Sandbox's label runs on another node.
    let others = pod(json!({"metadata": {"name": "x", "ownerReferences": null}}));
    view.pods.insert("x".to_owned(), others);
    assert_eq!(nodes_to_confirm(&view, now()), expected);
    let mut asked = view.clone();
    asked.gone_nodes.insert("n1".to_owned());
    assert!(nodes_to_confirm(&asked, now()).is_empty());
    view.pods.insert("s".to_owned(), pod(json!({})));
    assert!(nodes_to_confirm(&view, now()).is_empty());
}

#[test]
fn the_snapshot_of_a_resumed_pod_is_deleted_only_while_the_pod_lives() {
    let alive = plan(
        &observed(
            running(),
            Some(pod(json!({}))),
            Some(snapshot("True", json!({}))),
        ),
        now(),
    );
    assert_eq!(
        actions(&alive),
        ["delete snapshot, PodAlive { name: \"s\", uid: \"u-p\", resource_version: \"7\" }"]
    );
    let going = pod(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    let going = plan(
        &observed(running(), Some(going), Some(snapshot("True", json!({})))),
        now(),
    );
    assert!(actions(&going).is_empty());
}

/// Pod that its kubelet ended, with its agent's condition Hibernated.
fn ended(status: &str, reason: &str) -> Arc<Pod> {
    pod(
        json!({"status": {"phase": "Failed", "reason": "Terminated", "conditions": [
            {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"},
            {"type": "torpor.dev/Hibernated", "status": status, "reason": reason},
        ]}}),
    )
}

fn ended_asleep() -> Arc<Pod> {
    ended("True", "Hibernated")
}

/// Snapshot with Committed=False, reason SandboxNotFound; from the agent if it has the finalizer.
fn denied(finalizers: &[&str]) -> Arc<SandboxSnapshot> {
    let conditions = json!([{
        "type": "Committed", "status": "False", "reason": "SandboxNotFound", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]);
    let change =
        json!({"metadata": {"finalizers": finalizers}, "status": {"conditions": conditions}});
    snapshot("False", change)
}

fn finished() -> Sandbox {
    let conditions = json!([{
        "type": "Finished", "status": "True", "reason": "PodFailed", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]);
    sandbox(json!({
        "metadata": {"annotations": {RECORDED: "s"}}, "status": {"conditions": conditions},
    }))
}

fn stops() -> Sandbox {
    sandbox(json!({"metadata": {"annotations": {
        RECORDED: "s", "torpor.dev/suspension-strategy": "Stop",
    }}}))
}

const ADOPTED: &str = "torpor.dev/image";

#[rstest]
#[case::asleep(running(), ended_asleep(), None, &["CreateSnapshot"], true)]
#[case::it_may_have_slept(running(), ended("False", "Waking"), None, &["CreateSnapshot"], true)]
#[case::awake(running(), ended("False", "Awake"), None, &[], false)]
#[case::being_kept(running(), ended_asleep(), Some(snapshot("False", json!({}))), &[], true)]
#[case::kept(
    running(), ended_asleep(), Some(snapshot("True", json!({}))), &["delete pod, OnlyCopy m"], true
)]
#[case::the_agent_has_nothing_to_keep(
    running(), ended_asleep(), Some(denied(&[ADOPTED])), &[], false
)]
#[case::the_agent_has_not_reported_yet(running(), ended_asleep(), Some(denied(&[])), &[], true)]
#[case::the_snapshot_is_going(
    running(), ended_asleep(),
    Some(snapshot("True", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))),
    &[], true
)]
#[case::it_has_finished_before(finished(), ended_asleep(), None, &[], false)]
#[case::it_is_to_stop(stops(), ended_asleep(), None, &[], false)]
#[case::suspended(suspended(json!({})), ended_asleep(), None, &["CreateSnapshot"], false)]
#[case::suspended_while_it_is_kept(
    suspended(json!({})), ended_asleep(), Some(snapshot("False", json!({}))), &[], false
)]
#[case::suspended_with_nothing_to_keep(
    suspended(json!({})), ended_asleep(), Some(denied(&[ADOPTED])), &["delete pod"], false
)]
#[case::suspended_awake(
    suspended(json!({})), ended("False", "Awake"), None, &["delete pod"], false
)]
fn a_pod_that_its_kubelet_ended_stays_until_its_image_is_kept(
    #[case] sandbox: Sandbox,
    #[case] pod: Arc<Pod>,
    #[case] snapshot: Option<Arc<SandboxSnapshot>>,
    #[case] expected: &[&str],
    #[case] keeps_ended: bool,
) {
    let plan = plan(&observed(sandbox, Some(pod), snapshot), now());
    assert_eq!(actions(&plan), expected);
    assert_eq!(plan.memory.keeps_ended, keeps_ended);
}

#[rstest]
#[case::never(json!({}), Expiry::Never)]
#[case::past(json!({"spec": {"shutdownTime": "2025-12-31T23:59:59Z"}}), Expiry::Past)]
#[case::this_moment(json!({"spec": {"shutdownTime": "2026-01-01T00:00:00Z"}}), Expiry::Past)]
#[case::the_floor(json!({"spec": {"shutdownTime": "2026-01-01T00:00:01Z"}}), Expiry::In(Duration::from_secs(2)))]
#[case::exactly(json!({"spec": {"shutdownTime": "2026-01-01T01:00:00Z"}}), Expiry::In(Duration::from_secs(3600)))]
#[case::in_a_year(json!({"spec": {"shutdownTime": "2027-01-01T00:00:00Z"}}), Expiry::In(Duration::from_secs(31_536_000)))]
fn expiry_is_exact(#[case] change: Value, #[case] expected: Expiry) {
    assert_eq!(expiry(&sandbox(change), now()), expected);
}

#[test]
fn expiry_is_marked_before_anything_is_deleted() {
    let expired = json!({"spec": {"shutdownTime": "2025-01-01T00:00:00Z"}});
    let first = plan(
        &observed(sandbox(expired.clone()), Some(pod(json!({}))), None),
        now(),
    );
    assert_eq!(
        (first.phase, first.requeue),
        (Phase::Expiring, Some(AT_ONCE))
    );
    assert!(first.steps.is_empty());
    let mut marked = expired;
    marked["status"] = json!({"conditions": [{
        "type": "Ready", "status": "False", "reason": "SandboxExpired", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]});
    let second = plan(
        &observed(sandbox(marked), Some(pod(json!({}))), None),
        now(),
    );
    assert_eq!(second.phase, Phase::Expired);
    assert_eq!(actions(&second), ["delete pod"]);
}

#[test]
fn the_same_view_gives_the_same_plan() {
    let view = observed(
        suspended(json!({})),
        Some(pod(json!({}))),
        Some(snapshot("True", json!({}))),
    );
    assert_eq!(plan(&view, now()), plan(&view, now()));
}

/// Snapshot of a Pod in which these containers had ended.
fn with_completed(names: &[&str]) -> Arc<SandboxSnapshot> {
    let completed: Vec<Value> = names
        .iter()
        .map(|name| json!({"name": name, "exitCode": 0}))
        .collect();
    snapshot(
        "True",
        json!({"status": {"completedContainers": completed}}),
    )
}

const RUNTIME: &str = "torpor-runtime";

/// The saved Pod decides rather than the annotation, because the image could not be restored
/// otherwise.
#[rstest]
#[case::asked_for(Some("true"), None, true)]
#[case::not_asked_for(None, None, false)]
#[case::a_wrong_value_counts_as_none(Some("yes"), None, false)]
#[case::it_was_saved(Some("true"), Some(with_completed(&[RUNTIME])), true)]
#[case::it_was_saved_and_is_no_longer_asked_for(None, Some(with_completed(&["a", RUNTIME])), true)]
#[case::it_is_asked_for_since(Some("true"), Some(with_completed(&["a"])), false)]
fn the_runtime_is_in_a_new_pod(
    #[case] asked: Option<&str>,
    #[case] snapshot: Option<Arc<SandboxSnapshot>>,
    #[case] expected: bool,
) {
    let sandbox = sandbox(json!({"metadata": {"annotations": {
        RECORDED: "s", "torpor.dev/inject-runtime": asked,
    }}}));
    let mut view = observed(sandbox, None, snapshot);
    view.runtime_image = Some("runtime:1".into());
    let plan = plan(&view, now());
    let pods: Vec<&Value> = plan
        .steps
        .iter()
        .filter_map(|step| match &step.action {
            Action::CreatePod { pod, .. } => Some(pod),
            _ => None,
        })
        .collect();
    let [pod] = pods[..] else { panic!("{plan:?}") };
    let installer = &pod["spec"]["initContainers"][0];
    assert_eq!(installer["name"] == RUNTIME, expected, "{pod}");
    assert_eq!(installer["image"] == "runtime:1", expected, "{pod}");
}

#[test]
fn without_an_image_of_the_runtime_no_pod_is_created() {
    let asked = json!({"metadata": {"annotations": {"torpor.dev/inject-runtime": "true"}}});
    let plan = plan(&observed(sandbox(asked), None, None), now());
    assert!(actions(&plan).is_empty(), "{plan:?}");
    let (area, why) = &plan.refusals[0];
    assert_eq!(*area, Area::Pod);
    assert!(why.contains("--runtime-image"), "{why}");
}

/// Pod that is to continue from an image, created so many seconds ago, not yet reported as running.
fn coming_back(seconds: i64, change: Value) -> Arc<Pod> {
    let made = now().as_second() - seconds;
    let all = json!({
        "metadata": {
            "creationTimestamp": Timestamp::from_second(made).unwrap().to_string(),
            "annotations": {"torpor.dev/restore-image": "u-o.1"},
        },
        "status": {"phase": "Pending"},
    });
    Arc::new(changed(&*pod(all), &change))
}

/// Applies a change, which may remove fields.
fn changed<K: Serialize + DeserializeOwned>(object: &K, change: &Value) -> K {
    let mut whole = serde_json::to_value(object).unwrap();
    merge_patch::apply(&mut whole, change);
    serde_json::from_value(whole).unwrap()
}

fn with_condition(type_: &str, status: &str, reason: &str) -> Value {
    json!({"status": {"conditions": [{"type": type_, "status": status, "reason": reason}]}})
}

fn restored(status: &str, reason: &str) -> Value {
    with_condition("torpor.dev/Restored", status, reason)
}

/// Change of a refused Pod. For the kubelet a Pod runs once it has tried to start its containers.
fn refused(container: Value) -> Value {
    let mut all = restored("False", "SpecMismatch");
    let tried = json!({"status": {
        "phase": "Running",
        "containerStatuses": [{
            "name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 1, "state": container,
        }],
    }});
    merge_patch::apply(&mut all, &tried);
    all
}

/// Only this Pod may have the memory, so a suspend just after a resume must not lose it.
#[rstest]
#[case::a_moment_ago(coming_back(10, json!({})), None, &["CreateSnapshot"], Some(50))]
#[case::being_saved(
    coming_back(10, json!({})), Some(snapshot("False", json!({}))), &[], Some(50)
)]
#[case::by_a_clock_that_is_behind(coming_back(-5, json!({})), None, &["CreateSnapshot"], Some(60))]
#[case::long_ago(coming_back(60, json!({})), None, &["delete pod"], None)]
#[case::waited_for_in_vain(
    coming_back(60, json!({})), Some(snapshot("False", json!({}))), &["delete pod"], None
)]
#[case::it_takes_long(
    coming_back(540, with_condition("torpor.dev/Hibernated", "False", "Waking")), None,
    &["CreateSnapshot"], Some(60)
)]
#[case::it_takes_too_long(
    coming_back(600, with_condition("torpor.dev/Hibernated", "False", "Waking")), None,
    &["delete pod"], None
)]
#[case::it_is_back(
    coming_back(600, restored("True", "Restored")), None, &["CreateSnapshot"], None
)]
#[case::it_could_not_be_restored(
    coming_back(10, restored("False", "RestoreFailed")), None, &["delete pod"], None
)]
#[case::it_is_refused_again_and_again(
    coming_back(10, refused(json!({"waiting": {"reason": "RunContainerError"}}))), None,
    &["delete pod"], None
)]
#[case::it_was_refused_a_moment_ago_and_runs(
    coming_back(10, refused(json!({"running": {}}))), None, &["CreateSnapshot"], None
)]
#[case::it_waits_in_vain_for_one_that_was_refused(
    coming_back(10, refused(json!({"waiting": {"reason": "RunContainerError"}}))),
    Some(snapshot("False", json!({}))), &["delete pod"], None
)]
#[case::a_copy(
    coming_back(10, json!({"metadata": {"annotations": {"torpor.dev/restore-copy": "true"}}})),
    None, &["delete pod"], None
)]
#[case::it_has_no_node_yet(
    coming_back(10, json!({"spec": {"nodeName": null}})), None, &["delete pod"], None
)]
fn a_sandbox_that_is_suspended_during_its_restore_is_saved(
    #[case] pod: Arc<Pod>,
    #[case] snapshot: Option<Arc<SandboxSnapshot>>,
    #[case] expected: &[&str],
    #[case] again: Option<u64>,
) {
    let plan = plan(&observed(suspended(json!({})), Some(pod), snapshot), now());
    assert_eq!(actions(&plan), expected);
    assert_eq!(plan.requeue, again.map(Duration::from_secs));
}

#[test]
fn a_sandbox_that_is_frozen_during_its_restore_is_not_stopped() {
    let freezes = || suspended(strategy("Freeze"));
    let of = |pod| plan(&observed(freezes(), Some(pod), None), now());
    assert_eq!(actions(&of(coming_back(10, json!({})))), ["PatchPod"]);
    assert_eq!(actions(&of(coming_back(60, json!({})))), ["delete pod"]);
}

/// A sleeping or frozen sandbox shows that its node has the capability, whatever the node reports
/// now.
#[rstest]
#[case::frozen("Freeze", "False", "Frozen", &["PatchPod"])]
#[case::asleep("Hibernate", "True", "Hibernated", &["CreateSnapshot"])]
#[case::on_its_way_out_of_that("Hibernate", "False", "Waking", &["CreateSnapshot"])]
#[case::awake_and_to_be_frozen("Freeze", "False", "Awake", &["delete pod"])]
#[case::awake("Hibernate", "False", "Awake", &["delete pod"])]
fn a_node_without_reported_capabilities_does_not_cost_saved_memory(
    #[case] how: &str,
    #[case] status: &str,
    #[case] reason: &str,
    #[case] expected: &[&str],
) {
    let pod = pod(with_condition("torpor.dev/Hibernated", status, reason));
    let mut view = observed(suspended(strategy(how)), Some(pod), None);
    view.nodes.clear();
    assert_eq!(actions(&plan(&view, now())), expected);
}

#[test]
fn an_eviction_does_not_cost_saved_memory_on_a_node_without_reported_capabilities() {
    let evicted = pod(json!({
        "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"},
        "status": {"conditions": [
            {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"},
            {"type": "torpor.dev/Hibernated", "status": "True", "reason": "Hibernated"},
        ]},
    }));
    let mut view = observed(running(), Some(evicted), None);
    view.nodes.clear();
    assert_eq!(actions(&plan(&view, now())), ["CreateSnapshot"]);
}

/// The policy applies to new Pods. This Pod has its memory in its own image, and the agent retries
/// the wake.
#[rstest]
#[case::it_could_not("True", "Hibernated", "RestoreFailed")]
#[case::it_is_tried_again("False", "Waking", "RestoreFailed")]
#[case::the_use_of_the_image_cannot_be_read("True", "Hibernated", "ImageStale")]
fn a_failed_wake_in_place_costs_no_memory_under_any_policy(
    #[case] status: &str,
    #[case] sleep: &str,
    #[case] why: &str,
    #[values(None, Some("u-o.1"))] resumed_from: Option<&str>,
) {
    let pod = pod(json!({
        "metadata": {"annotations": {"torpor.dev/restore-image": resumed_from}},
        "status": {"conditions": [
            {"type": "torpor.dev/Hibernated", "status": status, "reason": sleep},
            {"type": "torpor.dev/Restored", "status": "False", "reason": why},
        ]},
    }));
    let cold = sandbox(json!({"metadata": {"annotations": {
        RECORDED: "s", "torpor.dev/on-restore-failure": "ColdStart",
    }}}));
    let plan = plan(&observed(cold, Some(pod), None), now());
    let deletes = |step: &Step| matches!(step.action, Action::DeletePod { .. });
    assert!(!plan.steps.iter().any(deletes), "{plan:?}");
}

#[rstest]
#[case::it_was_suspended("Suspended", "True", json!({}), true)]
#[case::it_has_slept_in_place("Hibernated", "False", json!({}), true)]
#[case::it_was_never_suspended("Suspended", "False", json!({}), false)]
#[case::it_is_suspended("Suspended", "True", json!({"spec": {"operatingMode": "Suspended"}}), false)]
#[case::its_runtime_keeps_nothing(
    "Suspended", "True", json!({"spec": {"podTemplate": {"spec": {"runtimeClassName": null}}}}), false
)]
fn the_absence_of_an_image_is_confirmed_before_a_cold_start(
    #[case] type_: &str,
    #[case] status: &str,
    #[case] change: Value,
    #[case] asks: bool,
) {
    let slept = sandbox(json!({"status": {"conditions": [{
        "type": type_, "status": status, "reason": "R", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]}}));
    let slept = changed(&slept, &change);
    let view = |pod, snapshot| observed(slept.clone(), pod, snapshot);
    assert_eq!(must_confirm_snapshots(&view(None, None)), asks);
    let mut asked = view(None, None);
    asked.snapshots_are_certain = true;
    let image = view(None, Some(snapshot("True", json!({}))));
    for enough in [asked, image, view(Some(pod(json!({}))), None)] {
        assert!(!must_confirm_snapshots(&enough));
    }
}
