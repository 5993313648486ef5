use std::sync::Arc;

use rstest::rstest;

use super::*;

fn sandbox(change: Value) -> Sandbox {
    let mut whole = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": "s", "namespace": "ns", "uid": "u-s"},
        "spec": {"podTemplate": {"spec": {"containers": []}}},
    });
    merge_patch::apply(&mut whole, &change);
    serde_json::from_value(whole).unwrap()
}

fn annotated(value: &str) -> Value {
    json!({"metadata": {"annotations": {"torpor.dev/network-policy": value}}})
}

fn owned_by(api_version: &str, kind: &str) -> Value {
    json!({"metadata": {"ownerReferences": [{
        "apiVersion": api_version, "kind": kind, "name": "o", "uid": "u-o", "controller": true,
    }]}})
}

fn of_claim() -> Value {
    owned_by("extensions.agents.x-k8s.io/v1beta1", "SandboxClaim")
}

#[rstest]
#[case::plain(json!({}), Isolation::Strict)]
#[case::asks_for_the_default(annotated("default"), Isolation::Strict)]
#[case::a_wrong_value_opens_nothing(annotated("None"), Isolation::Strict)]
#[case::asks_to_be_left_out(annotated("none"), Isolation::LeftOut)]
#[case::in_its_pod_template(json!({"spec": {"podTemplate": {"metadata": annotated("none")["metadata"].clone()}}}), Isolation::LeftOut)]
#[case::of_a_claim(of_claim(), Isolation::OfTemplate)]
#[case::of_a_pool(
    owned_by("extensions.agents.x-k8s.io/v1beta1", "SandboxWarmPool"),
    Isolation::OfTemplate
)]
#[case::of_another_controller(owned_by("apps/v1", "ReplicaSet"), Isolation::Strict)]
// The label of a template opens nothing: only Sandboxes of a claim or a pool pass it to their Pods.
#[case::labelled_as_if_it_had_a_template(
    json!({"metadata": {"labels": {"agents.x-k8s.io/sandbox-template-ref-hash": "0"}}}),
    Isolation::Strict
)]
fn a_sandbox_without_a_template_is_isolated_unless_it_opts_out(
    #[case] change: Value,
    #[case] expected: Isolation,
) {
    let sandbox = sandbox(change);
    assert_eq!(Isolation::of(&sandbox, true), expected);
    let off = Isolation::of(&sandbox, false);
    let nothing = [Isolation::Off, Isolation::OfTemplate];
    assert!(nothing.contains(&off), "{off:?}");
}

fn making(spec: Value) -> Plan {
    let pod = json!({"metadata": {"name": "s", "labels": {"a": "b"}}, "spec": spec});
    let step = |area, action| Step { area, action };
    Plan {
        steps: vec![
            step(Area::Claims, Action::CreateClaim(json!({}))),
            step(Area::Pod, Action::ForgetPodName),
            step(Area::Pod, Action::CreatePod { pod, image: None }),
            step(Area::Pod, Action::RecordPodName("s".to_owned())),
            step(Area::Service, Action::CreateService(json!({}))),
        ],
        ..Plan::default()
    }
}

fn made(plan: &Plan) -> Option<&Value> {
    plan.steps.iter().find_map(|step| match &step.action {
        Action::CreatePod { pod, .. } => Some(pod),
        _ => None,
    })
}

#[rstest]
#[case::strict(Isolation::Strict, Some("default"), true)]
#[case::left_out(Isolation::LeftOut, Some("none"), false)]
#[case::off(Isolation::Off, None, false)]
#[case::of_a_template(Isolation::OfTemplate, None, false)]
fn a_new_pod_has_the_label_that_the_policy_selects(
    #[case] isolation: Isolation,
    #[case] label: Option<&str>,
    #[case] own_dns: bool,
) {
    let mut plan = making(json!({}));
    assert_eq!(is_needed(&plan, isolation), isolation == Isolation::Strict);
    amend(&mut plan, &sandbox(json!({})), isolation, Ok(()));
    let pod = made(&plan).unwrap();
    assert_eq!(pod["metadata"]["labels"].get("a"), Some(&json!("b")));
    let found = pod["metadata"]["labels"].get("torpor.dev/network-policy");
    assert_eq!(found.and_then(Value::as_str), label);
    let dns = pod["spec"].get("dnsPolicy");
    assert_eq!(dns.and_then(Value::as_str), own_dns.then_some("None"));
    assert_eq!(plan.steps.len(), 5);
}

#[rstest]
#[case::a_choice_of_its_own(json!({"dnsPolicy": "ClusterFirst"}))]
#[case::in_the_hosts_network(json!({"hostNetwork": true}))]
fn public_dns_servers_are_set_only_where_the_cluster_dns_is_blocked(#[case] spec: Value) {
    let mut plan = making(spec.clone());
    amend(&mut plan, &sandbox(json!({})), Isolation::Strict, Ok(()));
    assert_eq!(made(&plan).unwrap()["spec"], spec);
}

#[test]
fn no_pod_is_made_without_the_policy() {
    let mut plan = making(json!({}));
    let why = || "why".to_owned();
    amend(
        &mut plan,
        &sandbox(json!({})),
        Isolation::Strict,
        Err(why()),
    );
    let left: Vec<Area> = plan.steps.iter().map(|step| step.area).collect();
    assert_eq!(left, [Area::Claims, Area::Pod, Area::Service]);
    assert_eq!(plan.steps[1].action, Action::ForgetPodName);
    assert_eq!(plan.refusals, [(Area::Pod, why())]);
}

fn running(label: Option<&str>, owner: &str) -> Plan {
    let pod = json!({"metadata": {
        "name": "s", "uid": "u-p", "labels": {"torpor.dev/network-policy": label},
        "ownerReferences": [{
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "s", "uid": owner, "controller": true,
        }],
    }});
    let mut pod = pod;
    if label.is_none() {
        pod["metadata"]["labels"] = json!({});
    }
    Plan {
        pod: Some(Arc::new(serde_json::from_value(pod).unwrap())),
        ..Plan::default()
    }
}

#[rstest]
#[case::made_before_the_flag(None, Isolation::Strict, None)]
#[case::as_it_is(Some("default"), Isolation::Strict, None)]
#[case::opened(Some("default"), Isolation::LeftOut, Some(json!("none")))]
#[case::closed_again(Some("none"), Isolation::Strict, Some(json!("default")))]
#[case::the_flag_was_taken_away(Some("default"), Isolation::Off, Some(json!("none")))]
#[case::a_pool_has_taken_it_in(Some("default"), Isolation::OfTemplate, Some(json!(null)))]
fn the_label_of_a_running_pod_follows_its_sandbox(
    #[case] label: Option<&str>,
    #[case] isolation: Isolation,
    #[case] expected: Option<Value>,
) {
    let mut plan = running(label, "u-s");
    amend(&mut plan, &sandbox(json!({})), isolation, Ok(()));
    let set = plan.steps.first().map(|step| match &step.action {
        Action::PatchPod { name, patch } => {
            assert_eq!((&**name, &patch["metadata"]["uid"]), ("s", &json!("u-p")));
            patch["metadata"]["labels"]["torpor.dev/network-policy"].clone()
        }
        other => panic!("{other:?}"),
    });
    assert_eq!(set, expected);
}

#[test]
fn the_label_joins_a_planned_patch_and_never_goes_on_a_foreign_pod() {
    let mut plan = running(Some("default"), "u-s");
    let patch = json!({"metadata": {"uid": "u-p", "labels": {"a": "b"}}});
    plan.steps.push(Step {
        area: Area::Pod,
        action: Action::PatchPod {
            name: "s".to_owned(),
            patch,
        },
    });
    amend(&mut plan, &sandbox(json!({})), Isolation::LeftOut, Ok(()));
    let [
        Step {
            action: Action::PatchPod { patch, .. },
            ..
        },
    ] = &plan.steps[..]
    else {
        panic!("{plan:?}")
    };
    let both = json!({"a": "b", "torpor.dev/network-policy": "none"});
    assert_eq!(patch["metadata"]["labels"], both);
    let mut foreign = running(Some("default"), "u-x");
    amend(
        &mut foreign,
        &sandbox(json!({})),
        Isolation::LeftOut,
        Ok(()),
    );
    assert_eq!(foreign.steps, []);
}

#[test]
fn a_running_pod_stays_as_it_is_when_the_policy_cannot_be_brought_back() {
    let mut plan = running(Some("default"), "u-s");
    assert!(is_needed(&plan, Isolation::Strict));
    let policy = Err("why".to_owned());
    amend(&mut plan, &sandbox(json!({})), Isolation::Strict, policy);
    assert_eq!((&plan.steps[..], &plan.refusals[..]), (&[][..], &[][..]));
    assert_eq!(plan.requeue, Some(RETRY));
}

fn existing() -> NetworkPolicy {
    let Ok(NextWrite::Create(policy)) = decide("ns", None, &[]) else {
        panic!("nothing is there")
    };
    serde_json::from_value(policy).unwrap()
}

#[test]
fn the_policy_selects_by_the_label_and_has_the_strict_rules() {
    let policy = json!(existing());
    assert_eq!(policy["metadata"]["name"], NAME);
    let selector = json!({"matchLabels": {"torpor.dev/network-policy": "default"}});
    assert_eq!(policy["spec"]["podSelector"], selector);
    assert_eq!(policy["spec"]["ingress"], rules::ingress());
    assert_eq!(policy["spec"]["egress"], rules::egress(&[]));
    assert_eq!(policy["spec"]["policyTypes"], json!(["Ingress", "Egress"]));
    assert_eq!(decide("ns", Some(&existing()), &[]), Ok(NextWrite::Nothing));
}

#[test]
fn a_policy_that_was_loosened_is_brought_back_and_a_foreign_one_is_named() {
    let mut loosened = existing();
    loosened.spec.as_mut().unwrap().egress = None;
    let Ok(NextWrite::Patch(patch)) = decide("ns", Some(&loosened), &[]) else {
        panic!("it was loosened")
    };
    assert_eq!(patch["spec"], json!({"egress": rules::egress(&[])}));
    let mut foreign = existing();
    foreign.metadata.labels = None;
    let why = decide("ns", Some(&foreign), &[]).unwrap_err();
    for words in [NAME, "Delete", "torpor.dev/network-policy: \"none\""] {
        assert!(why.contains(words), "{why}");
    }
}
