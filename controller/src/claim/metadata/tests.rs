use rstest::rstest;
use serde_json::{Value, json};

use super::*;

fn claim(labels: Value, annotations: Value) -> SandboxClaim {
    serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
        "metadata": {"name": "c"},
        "spec": {
            "warmPoolRef": {"name": "p"},
            "additionalPodMetadata": {"labels": labels, "annotations": annotations},
        },
    }))
    .unwrap()
}

fn domains() -> Vec<String> {
    vec!["sandbox.users.io".to_owned(), "example.com".to_owned()]
}

#[rstest]
#[case::allowed_domain(json!({"sandbox.users.io/team": "a"}), None)]
#[case::below_an_allowed_domain(json!({"x.example.com/team": "a"}), None)]
#[case::empty_value(json!({"example.com/team": ""}), None)]
#[case::only_looks_below(json!({"evilexample.com/team": "a"}), Some("label \"evilexample.com/team\" is not allowed: its domain is not one of sandbox.users.io, example.com"))]
#[case::no_domain(json!({"team": "a"}), Some("label \"team\" is not allowed: its domain is not one of sandbox.users.io, example.com"))]
#[case::the_routers_label(json!({"app": "sandbox-router"}), Some("label app=sandbox-router is reserved for the router"))]
#[case::a_system_label(json!({"agents.x-k8s.io/sandbox-name-hash": "x"}), Some("label \"agents.x-k8s.io/sandbox-name-hash\" is not allowed: its domain is not one of sandbox.users.io, example.com"))]
#[case::malformed_name(json!({"example.com/-a": "a"}), Some("label \"example.com/-a\" is not well-formed: a name has 1 to 63 letters, digits, '-', '_' or '.', and begins and ends with a letter or digit"))]
#[case::malformed_domain(json!({"Example.com/a": "a"}), Some("label \"Example.com/a\" is not well-formed: the part before the slash is not a domain"))]
#[case::malformed_value(json!({"example.com/a": "a b"}), Some("value of label \"example.com/a\" is not well-formed: a value has at most 63 letters, digits, '-', '_' or '.', and begins and ends with a letter or digit"))]
fn labels_need_an_allowed_domain(#[case] labels: Value, #[case] error: Option<&str>) {
    let checked = check(&claim(labels, Value::Null), &domains());
    assert_eq!(checked.err().map(|e| e.to_string()).as_deref(), error);
}

#[rstest]
#[case("team", true)]
#[case("anything.example.org/x", true)]
#[case("cluster-autoscaler.kubernetes.io/safe-to-evict", true)]
#[case("kubernetes.io/x", false)]
#[case("pod-security.kubernetes.io/enforce", false)]
#[case("x.k8s.io/y", false)]
#[case("agents.x-k8s.io/pod-name", false)]
#[case("notkubernetes.io/x", true)]
#[case("a b", false)]
fn annotations_must_not_be_of_a_reserved_domain(#[case] key: &str, #[case] allowed: bool) {
    let claim = claim(Value::Null, json!({key: "v"}));
    assert_eq!(check(&claim, &domains()).is_ok(), allowed);
}

#[rstest]
#[case::suspension_strategy("torpor.dev/suspension-strategy", "Freeze", None)]
#[case::hibernation("torpor.dev/hibernate", "true", None)]
#[case::restore_failure("torpor.dev/on-restore-failure", "ColdStart", None)]
#[case::resume_on_request("torpor.dev/resume-on-request", "true", None)]
#[case::a_wrong_value(
    "torpor.dev/hibernate",
    "yes",
    Some("annotation torpor.dev/hibernate: value \"yes\" is not allowed; allowed: true, false")
)]
#[case::memory_of_another_sandbox("torpor.dev/restore-from", "theirs", Some(""))]
#[case::snapshot_class("torpor.dev/snapshot-class", "c", Some(""))]
#[case::set_by_the_controller("torpor.dev/restore-image", "i", Some(""))]
#[case::for_sandboxes_only("torpor.dev/claim-annotations", "a", Some(""))]
#[case::unknown("torpor.dev/new", "", Some(""))]
#[case::below_the_domain("x.torpor.dev/hibernate", "true", Some(""))]
#[case::another_domain("nottorpor.dev/restore-from", "x", None)]
fn a_claim_sets_only_torpors_annotations_for_its_own_lifecycle(
    #[case] key: &str,
    #[case] value: &str,
    #[case] error: Option<&str>,
) {
    let checked = check(&claim(Value::Null, json!({key: value})), &domains());
    let refusal = format!(
        "annotation {key:?} is not allowed on a SandboxClaim: only the SandboxTemplate can set it; allowed annotations of torpor.dev: \
         torpor.dev/suspension-strategy, torpor.dev/hibernate, torpor.dev/on-restore-failure, torpor.dev/resume-on-request"
    );
    let error = error.map(|words| if words.is_empty() { &refusal } else { words });
    assert_eq!(checked.err().map(|e| e.to_string()).as_deref(), error);
}

#[test]
fn every_setting_belongs_to_claims_or_to_templates() {
    for key in annotations::user_settings() {
        let refused = check(&claim(Value::Null, json!({key: "x"})), &domains()).unwrap_err();
        let claims = annotations::CLAIM_SETTINGS.contains(&key);
        assert_eq!(matches!(refused, Invalid::Setting(_)), claims, "{key}");
        assert_eq!(
            matches!(refused, Invalid::NotForClaims(_)),
            !claims,
            "{key}"
        );
    }
}

fn metadata(labels: Value, annotations: Value) -> PodMetadata {
    serde_json::from_value(json!({"labels": labels, "annotations": annotations})).unwrap()
}

#[test]
fn the_claim_adds_to_the_template_and_replaces_nothing() {
    let template = metadata(json!({"a": "1"}), Value::Null);
    let both = merged(
        Some(&template),
        &claim(json!({"a": "1", "b": "2"}), json!({"n": "3"})),
    );
    assert_eq!(
        both.unwrap(),
        metadata(json!({"a": "1", "b": "2"}), json!({"n": "3"}))
    );
    let conflict = merged(Some(&template), &claim(json!({"a": "2"}), Value::Null));
    assert_eq!(
        conflict.unwrap_err().to_string(),
        "label \"a\" conflicts with the template: it has the value \"1\", the claim wants \"2\""
    );
    assert_eq!(
        merged(None, &claim(Value::Null, Value::Null)).unwrap(),
        PodMetadata::default()
    );
}

#[test]
fn metadata_of_the_claim_can_be_separated_again() {
    let template = metadata(json!({"a": "1"}), json!({"m": "1"}));
    let claim = claim(json!({"b": "2", "c": "3"}), json!({"n": "3"}));
    let mut sandbox = Sandbox::default();
    sandbox.spec.pod_template.metadata = Some(merged(Some(&template), &claim).unwrap());
    for (key, list) in lists(&claim) {
        sandbox
            .annotations_mut()
            .insert(key.to_owned(), list.unwrap());
    }
    assert_eq!(sandbox.annotations()[annotations::CLAIM_LABELS], "b,c");
    assert_eq!(without_claims(&sandbox), template);
}
