use rstest::rstest;

use super::*;

fn sandbox(value: Value) -> Sandbox {
    let mut whole = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": "s", "namespace": "ns", "uid": "u"},
        "spec": {"podTemplate": {"spec": {"containers": []}}},
    });
    merge_patch::apply(&mut whole, &value);
    serde_json::from_value(whole).unwrap()
}

fn template(labels: Value, annotations: Value) -> Value {
    json!({"spec": {"podTemplate": {"metadata": {"labels": labels, "annotations": annotations}}}})
}

fn pod(labels: Value, annotations: Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"labels": labels, "annotations": annotations}}))
        .unwrap()
}

fn owned_by(kind: &str, api_version: &str, labels: Value) -> Sandbox {
    sandbox(json!({"metadata": {"labels": labels, "ownerReferences": [{
        "apiVersion": api_version, "kind": kind, "name": "o", "uid": "ou", "controller": true,
    }]}}))
}

const HASH: &str = "agents.x-k8s.io/sandbox-name-hash";
const POOL: &str = "agents.x-k8s.io/warm-pool-sandbox";
const TEMPLATE: &str = "agents.x-k8s.io/sandbox-template-ref-hash";
const EXTENSIONS: &str = "extensions.agents.x-k8s.io/v1beta1";

#[test]
fn a_new_pod_has_the_metadata_of_the_template_and_a_list_of_its_keys() {
    let sandbox = sandbox(template(
        json!({"b": "2", "a": "1", HASH: "evil"}),
        json!({"z": "1", "opentelemetry.io/trace-context": "{}", "torpor.dev/hibernate": "true"}),
    ));
    let (labels, annotations) = for_new_pod(&sandbox);
    assert_eq!(
        json!(labels),
        json!({"a": "1", "b": "2", HASH: name_hash("s")})
    );
    assert_eq!(
        json!(annotations),
        json!({
            "z": "1",
            "agents.x-k8s.io/propagated-labels": "a,b",
            "agents.x-k8s.io/propagated-annotations": "z",
        })
    );
}

#[rstest]
#[case::of_a_pool(owned_by("SandboxWarmPool", EXTENSIONS, json!({POOL: "p", TEMPLATE: "t"})), json!({POOL: "p", TEMPLATE: "t"}))]
#[case::of_a_pool_of_another_version(owned_by("SandboxWarmPool", "extensions.agents.x-k8s.io/v1alpha1", json!({POOL: "p"})), json!({POOL: "p"}))]
#[case::of_a_claim(owned_by("SandboxClaim", EXTENSIONS, json!({POOL: "p", TEMPLATE: "t"})), json!({TEMPLATE: "t"}))]
#[case::of_another_controller(owned_by("SandboxWarmPool", "example.com/v1", json!({POOL: "p", TEMPLATE: "t"})), json!({}))]
#[case::without_a_controller(sandbox(json!({"metadata": {"labels": {POOL: "p", TEMPLATE: "t"}}})), json!({}))]
#[case::the_creator_is_normalised(sandbox(json!({"metadata": {"labels": {"agents.x-k8s.io/created-by": "curl"}}})), json!({"agents.x-k8s.io/created-by": "unknown"}))]
fn extension_labels_follow_the_owner(#[case] sandbox: Sandbox, #[case] mut expected: Value) {
    expected[HASH] = name_hash("s").into();
    assert_eq!(json!(for_new_pod(&sandbox).0), expected);
}

#[test]
fn a_new_pod_needs_no_patch() {
    let sandbox = sandbox(template(json!({"a": "1"}), json!({"n": "1"})));
    let (labels, annotations) = for_new_pod(&sandbox);
    assert_eq!(
        patch_for(&pod(json!(labels), json!(annotations)), &sandbox, &[]),
        None
    );
}

#[test]
fn leaving_the_pool_takes_the_pools_label_off_the_pod() {
    let claimed = owned_by("SandboxClaim", EXTENSIONS, json!({TEMPLATE: "t"}));
    let pod = pod(
        json!({HASH: name_hash("s"), POOL: "p", TEMPLATE: "t"}),
        json!({}),
    );
    assert_eq!(
        patch_for(&pod, &claimed, &[]),
        Some(json!({"metadata": {"labels": {POOL: null}}}))
    );
}

#[test]
fn system_keys_that_an_older_controller_listed_are_scrubbed() {
    let pod = pod(
        json!({HASH: name_hash("s"), "agents.x-k8s.io/claim-uid": "x"}),
        json!({
            "agents.x-k8s.io/propagated-labels": "agents.x-k8s.io/claim-uid,agents.x-k8s.io/sandbox-name-hash",
            "agents.x-k8s.io/propagated-annotations": "agents.x-k8s.io/pod-name",
            "agents.x-k8s.io/pod-name": "x",
        }),
    );
    let patch = patch_for(&pod, &sandbox(json!({})), &[]).unwrap();
    assert_eq!(
        patch,
        json!({"metadata": {
            "labels": {"agents.x-k8s.io/claim-uid": null},
            "annotations": {
                "agents.x-k8s.io/pod-name": null,
                "agents.x-k8s.io/propagated-labels": "",
                "agents.x-k8s.io/propagated-annotations": "",
            },
        }})
    );
}

#[test]
fn metadata_of_other_writers_stays_on_the_pod() {
    let pod = pod(
        json!({HASH: name_hash("s"), "team": "x"}),
        json!({"cni.example.com/ip": "10.0.0.1", "torpor.dev/restore-image": "i.1"}),
    );
    assert_eq!(patch_for(&pod, &sandbox(json!({})), &[]), None);
}

#[test]
fn torpors_annotations_are_set_and_removed() {
    let pod = pod(
        json!({HASH: name_hash("s")}),
        json!({"torpor.dev/freeze": "true"}),
    );
    let wishes = [
        (annotations::HIBERNATE, Some("true".to_owned())),
        (annotations::FREEZE, None),
    ];
    let expected = json!({"metadata": {"annotations": {
        "torpor.dev/freeze": null, "torpor.dev/hibernate": "true",
    }}});
    assert_eq!(
        patch_for(&pod, &sandbox(json!({})), &wishes),
        Some(expected.clone())
    );
    assert_eq!(torpor_patch_for(&pod, &wishes), Some(expected));
}

#[test]
fn a_member_of_a_pool_may_be_evicted_until_it_is_claimed() {
    let evictable = |kind: &str, template: Value| {
        let mut sandbox = owned_by(kind, EXTENSIONS, json!({}));
        let key = "cluster-autoscaler.kubernetes.io/safe-to-evict";
        sandbox
            .annotations_mut()
            .insert(key.to_owned(), "true".to_owned());
        let metadata = json!({"annotations": template});
        sandbox.spec.pod_template.metadata = serde_json::from_value(metadata).unwrap();
        for_new_pod(&sandbox).1.get(key).cloned()
    };
    let none = json!({});
    assert_eq!(
        evictable("SandboxWarmPool", none.clone()).as_deref(),
        Some("true")
    );
    assert_eq!(evictable("SandboxClaim", none), None);
    let decided = json!({"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"});
    assert_eq!(
        evictable("SandboxWarmPool", decided).as_deref(),
        Some("false")
    );
}

#[test]
fn a_claim_takes_the_permission_to_evict_off_the_pod() {
    let mut member = owned_by(
        "SandboxWarmPool",
        EXTENSIONS,
        json!({POOL: "p", TEMPLATE: "t"}),
    );
    let key = "cluster-autoscaler.kubernetes.io/safe-to-evict";
    member
        .annotations_mut()
        .insert(key.to_owned(), "true".to_owned());
    let (labels, annotations) = for_new_pod(&member);
    let claimed = owned_by("SandboxClaim", EXTENSIONS, json!({TEMPLATE: "t"}));
    let patch = patch_for(&pod(json!(labels), json!(annotations)), &claimed, &[]).unwrap();
    assert_eq!(
        patch["metadata"],
        json!({"labels": {POOL: null}, "annotations": {key: null, "agents.x-k8s.io/propagated-annotations": ""}})
    );
}
