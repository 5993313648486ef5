use std::collections::BTreeSet;

use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::merge_patch;

fn claim(change: Value) -> SandboxClaim {
    let mut whole = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
        "metadata": {
            "name": "c", "namespace": "ns", "uid": "u-c",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"warmPoolRef": {"name": "p"}},
    });
    merge_patch::apply(&mut whole, &change);
    serde_json::from_value(whole).unwrap()
}

fn holding(name: &str) -> SandboxClaim {
    claim(json!({"status": {"sandbox": {"name": name}}}))
}

fn sandbox(name: &str, change: Value) -> Arc<Sandbox> {
    let mut whole = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": name, "namespace": "ns", "uid": format!("u-{name}"), "resourceVersion": "1"},
        "spec": {"podTemplate": {"spec": {"containers": []}}},
    });
    merge_patch::apply(&mut whole, &change);
    Arc::new(serde_json::from_value(whole).unwrap())
}

fn going() -> Value {
    json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
}

fn replacing(gone: &str) -> Value {
    json!({"metadata": {"annotations": {"torpor.dev/replaces": gone}}})
}

fn cold() -> Value {
    let condition = json!({
        "type": "Restored", "status": "False", "reason": "ColdStarted", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:01Z",
    });
    json!({"status": {"conditions": [condition]}})
}

fn owned(sandboxes: &[(&str, Value)]) -> ClaimSandboxes {
    ClaimSandboxes {
        owned: sandboxes
            .iter()
            .map(|(name, change)| ((*name).to_owned(), sandbox(name, change.clone())))
            .collect(),
        ..ClaimSandboxes::default()
    }
}

fn looked_up(mut sandboxes: ClaimSandboxes, name: &str) -> ClaimSandboxes {
    sandboxes.not_owned.insert(name.to_owned());
    sandboxes
}

/// Returns a binding as short text.
fn summary(binding: &Binding) -> String {
    let names = |all: &[Arc<Sandbox>]| {
        let names: Vec<String> = all.iter().map(|sandbox| sandbox.name_any()).collect();
        names.join(",")
    };
    match binding {
        Binding::Bound { sandbox, surplus } if surplus.is_empty() => {
            format!("bound {}", sandbox.name_any())
        }
        Binding::Bound { sandbox, surplus } => {
            format!("bound {}, surplus {}", sandbox.name_any(), names(surplus))
        }
        Binding::Mark { sandbox, replaces } => {
            format!("mark {} for {replaces}", sandbox.name_any())
        }
        Binding::Lookup(name) => format!("ask {name}"),
        Binding::Unbound { replaces: None } => "unbound".to_owned(),
        Binding::Unbound {
            replaces: Some(gone),
        } => format!("unbound for {gone}"),
    }
}

#[rstest]
#[case::nothing_yet(claim(json!({})), owned(&[]), "unbound")]
#[case::assigned_and_not_committed(claim(json!({})), owned(&[("x", json!({}))]), "bound x")]
#[case::two_assigned_none_committed(claim(json!({})), owned(&[("x", json!({})), ("y", json!({}))]), "bound x")]
#[case::the_noted_one_first(claim(json!({"metadata": {"annotations": {"agents.x-k8s.io/sandbox-name": "y"}}})), owned(&[("x", json!({})), ("y", json!({}))]), "bound y")]
#[case::the_legacy_note_counts(claim(json!({"metadata": {"labels": {"agents.x-k8s.io/sandbox-name": "y"}}})), owned(&[("x", json!({})), ("y", json!({}))]), "bound y")]
#[case::its_own_name_next(claim(json!({})), owned(&[("a", json!({})), ("c", json!({}))]), "bound c")]
#[case::a_deleted_one_last(claim(json!({})), owned(&[("a", going()), ("x", json!({}))]), "bound x")]
#[case::one_that_could_not_wake_after_others(claim(json!({"metadata": {"annotations": {"agents.x-k8s.io/sandbox-name": "a"}}})), owned(&[("a", cold()), ("x", json!({}))]), "bound x")]
#[case::one_that_could_not_wake_alone(claim(json!({})), owned(&[("a", cold())]), "bound a")]
#[case::committed(holding("x"), owned(&[("x", json!({}))]), "bound x")]
#[case::committed_beside_a_surplus(holding("y"), owned(&[("x", json!({})), ("y", json!({})), ("z", json!({}))]), "bound y, surplus x,z")]
#[case::a_surplus_being_deleted_is_left(holding("y"), owned(&[("x", going()), ("y", json!({}))]), "bound y")]
#[case::a_replacement_is_no_surplus(holding("y"), owned(&[("x", replacing("y")), ("y", json!({}))]), "bound y")]
#[case::a_mark_for_another_is_none(holding("y"), owned(&[("x", replacing("w")), ("y", json!({}))]), "bound y, surplus x")]
#[case::committed_and_not_seen(holding("x"), owned(&[]), "ask x")]
#[case::committed_not_seen_another_assigned(holding("x"), owned(&[("y", json!({}))]), "ask x")]
#[case::committed_and_gone(holding("x"), looked_up(owned(&[]), "x"), "unbound for x")]
#[case::gone_and_another_assigned(holding("x"), looked_up(owned(&[("y", json!({}))]), "x"), "mark y for x")]
#[case::gone_and_replaced(holding("x"), looked_up(owned(&[("a", json!({})), ("y", replacing("x"))]), "x"), "bound y")]
#[case::its_own_name_gone_and_another_assigned(holding("c"), looked_up(owned(&[("y", json!({}))]), "c"), "unbound for c")]
#[case::its_own_name_back_and_another_assigned(holding("c"), owned(&[("c", replacing("c")), ("y", json!({}))]), "bound c, surplus y")]
#[case::gone_and_the_other_being_deleted(holding("x"), looked_up(owned(&[("y", going())]), "x"), "unbound for x")]
fn a_claim_is_bound_to_one_sandbox(
    #[case] claim: SandboxClaim,
    #[case] sandboxes: ClaimSandboxes,
    #[case] expected: &str,
) {
    assert_eq!(summary(&bind(&claim, &sandboxes)), expected);
}

#[test]
fn a_write_with_an_unknown_outcome_is_looked_up_first() {
    let mut sandboxes = owned(&[]);
    sandboxes.unsettled = Some("x".to_owned());
    assert_eq!(summary(&bind(&claim(json!({})), &sandboxes)), "ask x");
    let sandboxes = looked_up(sandboxes, "x");
    assert_eq!(summary(&bind(&claim(json!({})), &sandboxes)), "unbound");
    let mut sandboxes = owned(&[("x", json!({}))]);
    sandboxes.unsettled = Some("x".to_owned());
    assert_eq!(summary(&bind(&claim(json!({})), &sandboxes)), "bound x");
}

#[test]
fn a_claim_of_the_same_name_is_another_claim() {
    let other = json!({"metadata": {"ownerReferences": [{
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
        "name": "c", "uid": "u-old", "controller": true,
    }]}});
    assert!(!owns(&claim(json!({})), &sandbox("x", other)));
    assert_eq!(
        bind(
            &claim(json!({})),
            &ClaimSandboxes {
                not_owned: BTreeSet::new(),
                ..ClaimSandboxes::default()
            }
        ),
        Binding::Unbound { replaces: None }
    );
}
