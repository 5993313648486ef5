use torpor_api::name_hash;

use super::*;

fn claim(added: Value) -> SandboxClaim {
    serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
        "metadata": {
            "name": "c", "namespace": "ns", "uid": "u-c",
            "labels": {"agents.x-k8s.io/created-by": "python-client"},
        },
        "spec": {"warmPoolRef": {"name": "p"}, "additionalPodMetadata": added},
    }))
    .unwrap()
}

/// Returns a Ready member as a pool makes it.
fn member(change: Value) -> Sandbox {
    let mut whole = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {
            "name": "p-x", "namespace": "ns", "uid": "u-x", "resourceVersion": "7",
            "labels": {
                "agents.x-k8s.io/warm-pool-sandbox": name_hash("p"),
                "agents.x-k8s.io/sandbox-template-ref-hash": name_hash("t"),
                "agents.x-k8s.io/sandbox-template-hash": "h",
                "agents.x-k8s.io/sandbox-pod-template-hash": "h",
                "agents.x-k8s.io/launch-type": "warm",
                "agents.x-k8s.io/created-by": "controller",
            },
            "annotations": {
                "agents.x-k8s.io/pod-name": "p-x",
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "true",
            },
            "ownerReferences": [{
                "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
                "name": "p", "uid": "u-p", "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "spec": {"podTemplate": {"metadata": {"labels": {"a": "1"}}, "spec": {"containers": []}}},
    });
    merge_patch::apply(&mut whole, &change);
    serde_json::from_value(whole).unwrap()
}

fn template() -> PodMetadata {
    serde_json::from_value(json!({"labels": {"a": "1"}})).unwrap()
}

#[test]
fn a_member_is_assigned_in_one_write_that_leaves_the_spec_unchanged() {
    let patch = assignment(
        &claim(json!({})),
        &member(json!({})),
        &template(),
        &Additions::default(),
        None,
    );
    insta::assert_json_snapshot!(patch, @r#"
    {
      "metadata": {
        "annotations": {
          "cluster-autoscaler.kubernetes.io/safe-to-evict": null
        },
        "labels": {
          "agents.x-k8s.io/claim-uid": "u-c",
          "agents.x-k8s.io/created-by": "python-client",
          "agents.x-k8s.io/launch-type": "warm",
          "agents.x-k8s.io/sandbox-pod-template-hash": null,
          "agents.x-k8s.io/sandbox-template-hash": null,
          "agents.x-k8s.io/warm-pool-sandbox": null
        },
        "managedFields": [
          {}
        ],
        "ownerReferences": [
          {
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
            "blockOwnerDeletion": true,
            "controller": true,
            "kind": "SandboxClaim",
            "name": "c",
            "uid": "u-c"
          }
        ],
        "resourceVersion": "7",
        "uid": "u-x"
      }
    }
    "#);
}

#[test]
fn the_record_of_server_side_apply_is_kept() {
    for (operation, forgotten) in [("Apply", false), ("Update", true)] {
        let written = member(json!({"metadata": {"managedFields": [
            {"manager": "somebody", "operation": operation, "apiVersion": "agents.x-k8s.io/v1beta1"},
        ]}}));
        let patch = assignment(
            &claim(json!({})),
            &written,
            &template(),
            &Additions::default(),
            None,
        );
        let managed = patch["metadata"].get("managedFields");
        assert_eq!(managed, forgotten.then_some(&json!([{}])), "{operation}");
    }
}

#[test]
fn a_member_without_the_name_of_its_pod_gets_it_with_the_claim() {
    let nameless = member(json!({"metadata": {"annotations": {"agents.x-k8s.io/pod-name": null}}}));
    let patch = assignment(
        &claim(json!({})),
        &nameless,
        &template(),
        &Additions::default(),
        None,
    );
    assert_eq!(
        patch["metadata"]["annotations"]["agents.x-k8s.io/pod-name"],
        "p-x"
    );
}

#[test]
fn a_member_made_by_upstream_loses_the_metadata_that_upstream_put_into_its_pod_template() {
    let theirs = member(json!({"spec": {"podTemplate": {"metadata": {
        "labels": {"agents.x-k8s.io/warm-pool-sandbox": "h"},
        "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"},
    }}}}));
    let patch = assignment(
        &claim(json!({})),
        &theirs,
        &template(),
        &Additions::default(),
        None,
    );
    assert_eq!(
        patch["spec"],
        json!({"podTemplate": {"metadata": {
            "annotations": null, "labels": {"agents.x-k8s.io/warm-pool-sandbox": null},
        }}})
    );
}

#[test]
fn the_trace_goes_on_in_the_sandbox() {
    let mut traced = claim(json!({}));
    let carrier = r#"{"traceparent":"00-1-2-01"}"#;
    traced
        .annotations_mut()
        .insert(annotations::TRACE_CONTEXT.to_owned(), carrier.to_owned());
    let patch = assignment(
        &traced,
        &member(json!({})),
        &template(),
        &Additions::default(),
        None,
    );
    assert_eq!(
        patch["metadata"]["annotations"]["opentelemetry.io/trace-context"],
        carrier
    );
}

#[test]
fn owners_that_are_no_controllers_stay() {
    let other = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "o", "uid": "u-o"});
    let mut shared = member(json!({}));
    shared
        .metadata
        .owner_references
        .get_or_insert_default()
        .insert(0, serde_json::from_value(other).unwrap());
    let patch = assignment(
        &claim(json!({})),
        &shared,
        &template(),
        &Additions::default(),
        None,
    );
    let owners = patch["metadata"]["ownerReferences"].as_array().unwrap();
    let names: Vec<&str> = owners.iter().map(|o| o["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["o", "c"]);
}

/// Returns the Sandbox after a merge patch, as the apiserver makes it.
fn patched(sandbox: &Sandbox, patch: &Value) -> Sandbox {
    let mut whole = json!(sandbox);
    merge_patch::apply(&mut whole, patch);
    serde_json::from_value(whole).unwrap()
}

#[test]
fn edits_of_a_claim_are_added_changed_and_taken_away() {
    let added = |label: Value| json!({"labels": label});
    let first = claim(added(json!({"u.io/x": "1", "u.io/y": "1"})));
    let wanted = metadata::merged(Some(&template()), &first).unwrap();
    let held = patched(
        &member(json!({})),
        &assignment(
            &first,
            &member(json!({})),
            &wanted,
            &Additions::default(),
            None,
        ),
    );
    assert_eq!(propagation(&first, &held).unwrap(), None, "no change");
    let edited = claim(added(json!({"u.io/y": "2"})));
    let patch = propagation(&edited, &held).unwrap().unwrap();
    let held = patched(&held, &patch);
    assert_eq!(
        json!(held.spec.pod_template.labels()),
        json!({"a": "1", "u.io/y": "2"})
    );
    assert_eq!(held.annotations()[annotations::CLAIM_LABELS], "u.io/y");
    let emptied = claim(json!(null));
    let held = patched(&held, &propagation(&emptied, &held).unwrap().unwrap());
    assert_eq!(json!(held.spec.pod_template.labels()), json!({"a": "1"}));
    assert!(!held.annotations().contains_key(annotations::CLAIM_LABELS));
    propagation(&claim(added(json!({"a": "2"}))), &held).unwrap_err();
}

#[test]
fn a_claimed_member_is_woken_and_starts_from_no_golden_image_any_more() {
    let asleep = json!({"metadata": {"annotations": {
        "torpor.dev/hibernate": "true", "torpor.dev/golden-sandbox": "t-golden-1",
    }}});
    let patch = assignment(
        &claim(json!({})),
        &member(asleep),
        &template(),
        &Additions::default(),
        None,
    );
    let mut taken = json!(member(json!({})));
    merge_patch::apply(&mut taken, &patch);
    let left = &taken["metadata"]["annotations"];
    assert_eq!(*left, json!({"agents.x-k8s.io/pod-name": "p-x"}));
}

#[rstest::rstest]
#[case::awake("False", "Awake", json!({}), false)]
#[case::asleep_by_itself("True", "Hibernated", json!({}), true)]
#[case::dozing("False", "Dozing", json!({}), true)]
#[case::put_to_sleep_by_its_pool("True", "Hibernated", json!({"torpor.dev/hibernate": "true"}), true)]
fn a_member_that_sleeps_wakes_for_its_claim(
    #[case] status: &str,
    #[case] reason: &str,
    #[case] on_member: Value,
    #[case] expected: bool,
) {
    let condition = json!({
        "type": "Hibernated", "status": status, "reason": reason, "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    let member = member(json!({
        "metadata": {"annotations": on_member}, "status": {"conditions": [condition]},
    }));
    let mut patch = json!({});
    let now = "2026-01-01T12:00:00.5Z";
    wake(&mut patch, &member, now.parse().unwrap());
    let at = &patch["metadata"]["annotations"][annotations::WAKE_AT];
    assert_eq!(at.as_str(), expected.then_some(now));
}
