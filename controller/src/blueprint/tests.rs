use rstest::rstest;

use super::*;
use crate::merge_patch;

fn template(change: Value) -> SandboxTemplate {
    let mut whole = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "metadata": {"name": "t", "namespace": "ns"},
        "spec": {
            "podTemplate": {"spec": {"containers": [{"name": "c", "image": "img", "resources": {"limits": {"cpu": "1"}}}]}},
            "volumeClaimTemplates": [{"metadata": {"name": "v"}, "spec": {"accessModes": ["ReadWriteOnce"]}}],
        },
    });
    merge_patch::apply(&mut whole, &change);
    serde_json::from_value(whole).unwrap()
}

/// Returns the Sandbox that a pool makes of the template, with a hash of another version.
fn made_from(template: &SandboxTemplate) -> Sandbox {
    serde_json::from_value(json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": "s", "labels": {
            labels::SANDBOX_TEMPLATE_REF_HASH: name_hash("t"), labels::SANDBOX_TEMPLATE_HASH: "another",
        }},
        "spec": {
            "podTemplate": {"spec": secured_pod_spec(template)},
            "volumeClaimTemplates": template.spec.volume_claim_templates,
            "service": template.spec.service,
        },
    }))
    .unwrap()
}

fn containers(container: Value) -> Value {
    json!({"spec": {"podTemplate": {"spec": {"containers": [container]}}}})
}

#[rstest]
#[case::as_it_is(json!({}), false)]
#[case::another_image(containers(json!({"name": "c", "image": "other", "resources": {"limits": {"cpu": "1"}}})), true)]
#[case::another_spelling_of_a_quantity(containers(json!({"name": "c", "image": "img", "resources": {"limits": {"cpu": "1000m"}}})), false)]
#[case::another_quantity(containers(json!({"name": "c", "image": "img", "resources": {"limits": {"cpu": "1001m"}}})), true)]
#[case::an_empty_list(containers(json!({"name": "c", "image": "img", "resources": {"limits": {"cpu": "1"}}, "env": []})), false)]
#[case::an_empty_map(json!({"spec": {"podTemplate": {"spec": {"nodeSelector": {}}}}}), false)]
#[case::metadata_only(json!({"spec": {"podTemplate": {"metadata": {"labels": {"a": "b"}}}}}), false)]
#[case::policies_only(json!({"spec": {"envVarsInjectionPolicy": "Allowed"}}), false)]
#[case::rules_that_lift_the_strict_dns(json!({"spec": {"networkPolicy": {"ingress": []}}}), true)]
#[case::a_service(json!({"spec": {"service": true}}), true)]
#[case::another_volume(json!({"spec": {"volumeClaimTemplates": [{"metadata": {"name": "w"}, "spec": {"accessModes": ["ReadWriteOnce"]}}]}}), true)]
#[case::labels_of_a_volume(json!({"spec": {"volumeClaimTemplates": [{"metadata": {"name": "v", "labels": {"a": "b"}}, "spec": {"accessModes": ["ReadWriteOnce"]}}]}}), false)]
#[case::another_template(json!({"metadata": {"name": "u"}}), true)]
#[case::zero_values_that_go_writes(containers(json!({"name": "c", "image": "img", "resources": {"limits": {"cpu": "1"}, "requests": {}}, "tty": false})), false)]
#[case::zero_values_that_go_writes_in_a_volume(json!({"spec": {"volumeClaimTemplates": [{"metadata": {"name": "v"}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {}, "volumeName": ""}}]}}), false)]
#[case::no_class_for_a_volume(json!({"spec": {"volumeClaimTemplates": [{"metadata": {"name": "v"}, "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}}]}}), true)]
fn a_sandbox_is_stale_if_it_differs_in_more_than_metadata_and_spelling(
    #[case] change: Value,
    #[case] stale: bool,
) {
    let sandbox = made_from(&template(json!({})));
    assert_eq!(Blueprint::of(&template(change)).is_stale(&sandbox), stale);
}

#[test]
fn an_equal_hash_needs_no_comparison() {
    let template = template(json!({}));
    let mut sandbox = made_from(&template);
    sandbox.spec.service = Some(true);
    assert!(Blueprint::of(&template).is_stale(&sandbox));
    sandbox.labels_mut().insert(
        labels::SANDBOX_TEMPLATE_HASH.to_owned(),
        blueprint_hash(&template),
    );
    assert!(!Blueprint::of(&template).is_stale(&sandbox));
    assert!(
        Blueprint::of(&template).is_stale_orphan(&sandbox),
        "the hash may be a copy"
    );
}

#[rstest]
#[case::by_default(json!({}), Some(false), Some("None"))]
#[case::token_wanted(json!({"automountServiceAccountToken": true}), Some(true), Some("None"))]
#[case::dns_of_ones_own(json!({"dnsPolicy": "ClusterFirst"}), Some(false), Some("ClusterFirst"))]
fn sandboxes_get_no_token_and_public_name_servers(
    #[case] spec: Value,
    #[case] token: Option<bool>,
    #[case] dns: Option<&str>,
) {
    let template = template(json!({"spec": {"podTemplate": {"spec": spec}}}));
    let spec = secured_pod_spec(&template);
    assert_eq!(spec["automountServiceAccountToken"].as_bool(), token);
    assert_eq!(spec.get("dnsPolicy").and_then(Value::as_str), dns);
    let servers = json!({"nameservers": ["8.8.8.8", "1.1.1.1"]});
    let expected = (dns == Some("None")).then_some(&servers);
    assert_eq!(spec.get("dnsConfig"), expected);
}

#[rstest]
#[case(json!({"spec": {"networkPolicyManagement": "Unmanaged"}}))]
#[case(json!({"spec": {"networkPolicy": {}}}))]
fn dns_is_unchanged_where_the_strict_policy_does_not_apply(#[case] change: Value) {
    assert!(!secured_pod_spec(&template(change)).contains_key("dnsPolicy"));
}

#[rstest]
#[case::nothing(json!({}), json!({}), json!({}))]
#[case::on_the_template(
    json!({"torpor.dev/doze-after": "30s", "agents.x-k8s.io/max-idle-time": "1h", "torpor.dev/wake-on": "tcp", "torpor.dev/on-crash": "LastImage"}),
    json!({}),
    json!({"torpor.dev/doze-after": "30s", "agents.x-k8s.io/max-idle-time": "1h", "torpor.dev/wake-on": "tcp", "torpor.dev/on-crash": "LastImage"}),
)]
#[case::the_pod_template_wins_by_any_name(
    json!({"torpor.dev/doze-after": "30s", "torpor.dev/hibernate-after": "1h"}),
    json!({"torpor.dev/idle-timeout": "2h"}),
    json!({"torpor.dev/doze-after": "30s"}),
)]
#[case::a_wrong_value_is_kept_and_reported_on_the_sandbox(
    json!({"torpor.dev/doze-after": "soon"}),
    json!({}),
    json!({"torpor.dev/doze-after": "soon"}),
)]
#[case::annotations_of_one_sandbox(json!({"torpor.dev/hibernate": "true", "torpor.dev/wake-at": "x"}), json!({}), json!({}))]
fn a_templates_own_annotations_set_how_its_sandboxes_sleep(
    #[case] own: Value,
    #[case] pod_template: Value,
    #[case] expected: Value,
) {
    let template = template(json!({
        "metadata": {"annotations": own},
        "spec": {"podTemplate": {"metadata": {"annotations": pod_template}}},
    }));
    let mut made = sandbox_annotations(&template);
    let all = made.as_object_mut().unwrap();
    assert_eq!(
        all.remove(annotations::SANDBOX_TEMPLATE_REF),
        Some("t".into())
    );
    assert_eq!(made, expected);
}

#[test]
fn unset_fields_are_left_out_of_a_new_sandbox() {
    let bare = template(json!({"spec": {"volumeClaimTemplates": null}}));
    let made = sandbox_spec(&bare, None, Map::new(), &[]);
    assert_eq!(
        made,
        json!({"operatingMode": "Running", "podTemplate": {"spec": {}}})
    );
    let whole = template(json!({"spec": {"service": true}}));
    let volumes = &whole.spec.volume_claim_templates;
    let made = sandbox_spec(&whole, None, secured_pod_spec(&whole), volumes);
    assert_eq!(made["service"], true);
    assert_eq!(made["volumeClaimTemplates"][0]["metadata"]["name"], "v");
}
