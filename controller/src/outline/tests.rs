use super::*;
use crate::blueprint::Blueprint;

fn large() -> String {
    "x".repeat(LARGEST)
}

fn containers(env: &str) -> Value {
    json!([{"name": "c", "image": "img", "env": [{"name": "A", "value": env}]}])
}

fn template(env: &str) -> SandboxTemplate {
    serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "metadata": {"name": "t", "namespace": "ns", "uid": "u-t"},
        "spec": {"podTemplate": {
            "metadata": {"annotations": {"torpor.dev/restore-from": "golden", "note": env}},
            "spec": {"runtimeClassName": "torpor", "containers": containers(env)},
        }},
    }))
    .unwrap()
}

/// Member of a pool of the template. Its labels do not name the template's version.
fn member(env: &str) -> Sandbox {
    let template = template(env);
    let made =
        crate::pool::member::sandbox(&Default::default(), &template, "m", Default::default());
    let mut member: Sandbox = serde_json::from_value(made).unwrap();
    let hash = labels::SANDBOX_TEMPLATE_HASH;
    member
        .labels_mut()
        .insert(hash.to_owned(), "old".to_owned());
    member.metadata.uid = Some("u-m".to_owned());
    member.labels_mut().insert("a".to_owned(), "b".to_owned());
    member
}

#[test]
fn a_small_object_is_kept_whole() {
    let (mut kept, whole) = (member("1"), member("1"));
    of_sandbox(&mut kept);
    assert_eq!(kept, whole);
    assert!(!is_outline(&kept));
}

#[test]
fn an_outline_has_the_fields_that_caches_need_and_is_small() {
    let mut kept = member(&large());
    of_sandbox(&mut kept);
    assert!(is_outline(&kept));
    assert!(json!(kept).to_string().len() < 4096, "{kept:?}");
    let whole = member("1");
    assert_eq!(kept.owner_references(), whole.owner_references());
    assert_eq!(kept.annotations(), whole.annotations());
    assert_eq!(kept.labels().get("a"), None);
    assert!(kept.labels().contains_key(labels::WARM_POOL_SANDBOX));
    let template = &kept.spec.pod_template;
    assert_eq!(template.restore_from(), Some("golden"));
    let class = template.spec.runtime_class_name();
    assert_eq!(class, Some("torpor"));
}

#[test]
fn an_outline_of_a_member_is_stale_when_its_full_spec_is() {
    for (env, stale) in [(large(), false), (large() + "y", true)] {
        let template = template(&large());
        let blueprint = Blueprint::of(&template);
        let (whole, mut kept) = (member(&env), member(&env));
        of_sandbox(&mut kept);
        assert!(is_outline(&kept));
        assert_eq!(blueprint.is_stale(&whole), stale);
        assert_eq!(blueprint.is_stale(&kept), stale);
    }
}

#[test]
fn no_object_from_the_apiserver_passes_for_an_outline() {
    // Operations of the apiserver.
    for operation in ["Apply", "Update", ""] {
        let entries = json!([{"manager": OUTLINE, "operation": operation}]);
        let mut written = member("1");
        written.metadata.managed_fields = serde_json::from_value(entries).unwrap();
        assert!(!is_outline(&written), "{operation}");
    }
}

#[test]
fn the_outline_of_a_large_policy_still_shows_whether_its_rules_are_the_templates() {
    let rule = |at: usize| json!({"ports": [{"port": at, "protocol": "TCP"}]});
    let rules: Vec<Value> = (1..2000).map(rule).collect();
    let mut template = template("1");
    template.spec.network_policy = serde_json::from_value(json!({"egress": rules})).ok();
    let made = crate::template::plan::policy(&template, &[]);
    let mut policy: NetworkPolicy = serde_json::from_value(made).unwrap();
    of_policy(&mut policy);
    assert!(is_outline(&policy) && policy.spec.is_none());
    let state =
        |template: &SandboxTemplate| crate::template::plan::isolation(template, Some(&policy), &[]);
    assert_eq!(state(&template), Ok(()));
    template.spec.network_policy = serde_json::from_value(json!({"egress": rules[1..]})).ok();
    assert!(state(&template).is_err());
}

#[test]
fn outlines_of_templates_and_claims_are_small() {
    let mut kept = template(&large());
    of_template(&mut kept);
    assert!(is_outline(&kept) && json!(kept).to_string().len() < 4096);
    let mut claim: SandboxClaim = serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
        "metadata": {"name": "c", "namespace": "ns"},
        "spec": {"warmPoolRef": {"name": "p"}, "env": [{"name": "A", "value": large()}]},
    }))
    .unwrap();
    of_claim(&mut claim);
    assert!(is_outline(&claim) && json!(claim).to_string().len() < 4096);
    assert_eq!(claim.spec.warm_pool_ref.name, "p");
}
