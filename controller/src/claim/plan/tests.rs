use rstest::rstest;
use serde_json::json;
use torpor_api::annotations;

use super::*;
use crate::merge_patch;

fn now() -> Timestamp {
    "2026-01-01T00:00:00Z".parse().unwrap()
}

fn claim(change: Value) -> Arc<SandboxClaim> {
    let mut whole = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
        "metadata": {
            "name": "c", "namespace": "ns", "uid": "u-c", "resourceVersion": "1",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"warmPoolRef": {"name": "p"}},
    });
    merge_patch::apply(&mut whole, &change);
    Arc::new(serde_json::from_value(whole).unwrap())
}

/// Returns a claim with the name of its Sandbox noted.
fn noted(sandbox: &str, mut change: Value) -> Arc<SandboxClaim> {
    change["metadata"] = json!({"annotations": {annotations::SANDBOX_NAME: sandbox}});
    claim(change)
}

fn sandbox(name: &str, change: Value) -> Arc<Sandbox> {
    let mut whole = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": name, "namespace": "ns", "uid": format!("u-{name}"), "resourceVersion": "5"},
        "spec": {"podTemplate": {"spec": {"containers": []}}},
    });
    merge_patch::apply(&mut whole, &change);
    Arc::new(serde_json::from_value(whole).unwrap())
}

fn observed(claim: Arc<SandboxClaim>) -> Observed {
    let pool = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
        "metadata": {"name": "p", "namespace": "ns", "uid": "u-p"},
        "spec": {"sandboxTemplateRef": {"name": "t"}},
    });
    let template = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "metadata": {"name": "t", "namespace": "ns", "uid": "u-t"},
        "spec": {"podTemplate": {
            "metadata": {"labels": {"sandbox.users.io/tier": "a"}},
            "spec": {"containers": [{"name": "c", "image": "img"}]},
        }},
    });
    let template: SandboxTemplate = serde_json::from_value(template).unwrap();
    let policy = crate::template::plan::policy(&template, &[]);
    Observed {
        claim,
        pool: Some(Arc::new(serde_json::from_value(pool).unwrap())),
        template: Some(Arc::new(template)),
        template_policy: Some(Arc::new(serde_json::from_value(policy).unwrap())),
        label_domains: vec!["sandbox.users.io".to_owned()],
        candidate_grace: Duration::from_secs(2),
        ..Observed::default()
    }
}

fn owning(mut observed: Observed, sandboxes: &[Arc<Sandbox>]) -> Observed {
    for sandbox in sandboxes {
        let owned = &mut observed.sandboxes.owned;
        owned.insert(sandbox.name_any(), Arc::clone(sandbox));
    }
    observed
}

fn offering(mut observed: Observed, offer: Offered) -> Observed {
    observed.offer = offer;
    observed
}

/// Returns the steps as short texts.
fn steps(plan: &Plan) -> Vec<String> {
    plan.steps
        .iter()
        .map(|step| match step {
            Action::Lookup(name) => format!("ask {name}"),
            Action::Refresh => "refresh".to_owned(),
            Action::Note(name) => format!("note {name}"),
            Action::Assign { name, .. } => format!("assign {name}"),
            Action::PatchSandbox { name, .. } => format!("patch {name}"),
            Action::WriteFiles { sandbox, .. } => format!("files {}", sandbox.name_any()),
            Action::CreateSandbox(sandbox) => {
                format!("create {}", sandbox["metadata"]["name"].as_str().unwrap())
            }
            Action::KeepFiles(sandbox) => format!("keep files of {}", sandbox.name_any()),
            Action::DeleteSandbox {
                name,
                resource_version,
                ..
            } => format!("delete {name} at {resource_version:?}"),
            Action::DeleteClaim { policy } => format!("delete claim, {}", policy.as_str()),
            Action::DeletePolicy { name, .. } => format!("delete policy {name}"),
        })
        .collect()
}

fn reason(plan: &Plan) -> &'static str {
    match &plan.outlook {
        Outlook::Refused { why, .. } => why.reason(),
        other => panic!("{other:?}"),
    }
}

// --- how a claim gets its Sandbox ---

#[test]
fn the_pool_is_asked_first() {
    let plan = plan(&observed(claim(json!({}))), now());
    assert!(plan.wants_member && plan.steps.is_empty());
}

#[rstest]
#[case::a_member(Offered::Sandbox(sandbox("m", json!({}))), &["assign m"], None)]
#[case::none(Offered::Nothing, &["create c"], None)]
#[case::some_are_pending(Offered::Pending, &[], Some(Duration::from_millis(500)))]
fn the_pools_offer_decides(
    #[case] offer: Offered,
    #[case] expected: &[&str],
    #[case] requeue: Option<Duration>,
) {
    let plan = plan(&offering(observed(claim(json!({}))), offer), now());
    assert_eq!(steps(&plan), expected);
    assert_eq!(plan.requeue, requeue);
}

#[test]
fn a_claim_waits_two_seconds_for_pending_members() {
    let old = json!({"metadata": {"creationTimestamp": "2025-12-31T23:59:58Z"}});
    let plan = plan(&offering(observed(claim(old)), Offered::Pending), now());
    assert_eq!(steps(&plan), ["create c"]);
}

#[rstest]
#[case::variables(json!({"env": [{"name": "A", "value": "1"}]}), "EnvVarsInjectionRejected")]
#[case::volumes(json!({"volumeClaimTemplates": [{"metadata": {"name": "v"}, "spec": {}}]}), "VolumeClaimTemplatesError")]
fn a_claim_with_variables_or_volumes_starts_cold(#[case] spec: Value, #[case] refused: &str) {
    let mut observed = offering(
        observed(claim(json!({"spec": spec}))),
        Offered::Sandbox(sandbox("m", json!({}))),
    );
    assert_eq!(steps(&plan(&observed, now())), ["refresh"]);
    observed.fresh = true;
    let disallowed = plan(&observed, now());
    assert_eq!((reason(&disallowed), disallowed.requeue), (refused, None));
    let mut template = (**observed.template.as_ref().unwrap()).clone();
    template.spec.env_vars_injection_policy = torpor_api::extensions::InjectionPolicy::Allowed;
    template.spec.volume_claim_templates_policy = torpor_api::extensions::InjectionPolicy::Allowed;
    observed.template = Some(Arc::new(template));
    assert_eq!(steps(&plan(&observed, now())), ["create c"]);
}

#[rstest]
#[case::no_pool(json!({}), |o: &mut Observed| o.pool = None, "WarmPoolNotFound", "SandboxWarmPool \"p\" not found", Some(60_000))]
#[case::no_template(json!({}), |o: &mut Observed| o.template = None, "TemplateNotFound", "SandboxTemplate \"t\" not found", Some(60_000))]
#[case::bad_label(json!({"spec": {"additionalPodMetadata": {"labels": {"team": "x"}}}}), |_: &mut Observed| {}, "InvalidMetadata", "label \"team\" is not allowed: its domain is not one of sandbox.users.io", None)]
#[case::conflict(json!({"spec": {"additionalPodMetadata": {"labels": {"sandbox.users.io/tier": "b"}}}}), |_: &mut Observed| {}, "InvalidMetadata", "label \"sandbox.users.io/tier\" conflicts with the template: it has the value \"a\", the claim wants \"b\"", None)]
#[case::name_taken(json!({}), |o: &mut Observed| o.namesake = Some(sandbox("c", json!({}))), "ReconcilerError", "Sandbox \"c\" exists and is not controlled by this claim. Please use a different claim name or delete the sandbox manually", Some(60_000))]
#[case::all_taken(json!({}), |o: &mut Observed| o.lost = 3, "AdoptionConflict", "3 pool members were taken by others; the next pass retries from a converged view", Some(200))]
fn a_claim_without_a_sandbox_has_a_reason(
    #[case] change: Value,
    #[case] edit: fn(&mut Observed),
    #[case] expected: &str,
    #[case] message: &str,
    #[case] retry: Option<u64>,
) {
    let mut observed = observed(claim(change));
    observed.fresh = true;
    edit(&mut observed);
    let plan = plan(&observed, now());
    assert_eq!(reason(&plan), expected);
    let Outlook::Refused { why, .. } = &plan.outlook else {
        unreachable!("reason() has looked")
    };
    assert_eq!(why.to_string(), message);
    assert_eq!(plan.requeue, retry.map(Duration::from_millis));
    assert!(plan.steps.is_empty());
}

#[rstest]
#[case::no_pool(json!({}), |o: &mut Observed| o.pool = None)]
#[case::no_template(json!({}), |o: &mut Observed| o.template = None)]
#[case::conflict(json!({"spec": {"additionalPodMetadata": {"labels": {"sandbox.users.io/tier": "b"}}}}), |_: &mut Observed| {})]
fn a_final_reason_is_checked_against_the_apiserver_first(
    #[case] change: Value,
    #[case] edit: fn(&mut Observed),
) {
    let mut observed = observed(claim(change));
    edit(&mut observed);
    assert_eq!(steps(&plan(&observed, now())), ["refresh"]);
}

#[rstest]
#[case::on_replenish("OnReplenish", true)]
#[case::recreate("Recreate", false)]
fn a_stale_member_is_handed_out_only_under_on_replenish(
    #[case] strategy: &str,
    #[case] expected: bool,
) {
    let observed = observed(claim(json!({})));
    let mut pool = (**observed.pool.as_ref().unwrap()).clone();
    pool.spec.update_strategy = Some(serde_json::from_value(json!({"type": strategy})).unwrap());
    let member = sandbox("m", json!({}));
    let blueprint = Blueprint::of(observed.template.as_ref().unwrap());
    assert_eq!(is_acceptable(&member, &pool, &blueprint), expected);
}

// --- a claim that has a Sandbox ---

#[test]
fn a_claim_that_has_a_sandbox_needs_neither_pool_nor_template() {
    let mut observed = owning(observed(noted("x", json!({}))), &[sandbox("x", json!({}))]);
    (observed.pool, observed.template) = (None, None);
    let plan = plan(&observed, now());
    assert_eq!(plan.outlook, Outlook::Sandbox(sandbox("x", json!({}))));
    assert!(plan.steps.is_empty());
}

#[test]
fn a_sandbox_that_looks_as_before_the_claim_is_not_shown_yet() {
    let ready = |bound: &str| {
        let condition = |type_: &str, status: &str| {
            json!({
                "type": type_, "status": status, "reason": "R", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            })
        };
        json!({
            "metadata": {"annotations": {annotations::LATE_BIND: "env"}},
            "status": {"conditions": [condition("Ready", "True"), condition("Bound", bound)]},
        })
    };
    for (held, bound, keeps) in [
        (noted("x", json!({})), "False", true),
        (noted("x", json!({})), "True", false),
        // Its clients know the Sandbox already.
        (
            noted("x", json!({"status": {"sandbox": {"name": "x"}}})),
            "False",
            false,
        ),
    ] {
        let plan = plan(
            &owning(observed(held), &[sandbox("x", ready(bound))]),
            now(),
        );
        assert_eq!(plan.keeps_status, keeps, "Bound={bound}");
    }
}

/// Returns a member with these conditions, which it has had since this second of the year.
fn member(name: &str, conditions: &[(&str, &str, &str, u8)]) -> Arc<Sandbox> {
    let conditions: Vec<Value> = conditions
        .iter()
        .map(|(type_, status, reason, second)| {
            json!({
                "type": type_, "status": status, "reason": reason, "message": "",
                "lastTransitionTime": format!("2026-01-01T00:00:{second:02}Z"),
            })
        })
        .collect();
    sandbox(name, json!({"status": {"conditions": conditions}}))
}

const READY: (&str, &str, &str, u8) = ("Ready", "True", "DependenciesReady", 0);
const ASLEEP: (&str, &str, &str, u8) = ("Hibernated", "True", "Hibernated", 0);
const COLD: (&str, &str, &str, u8) = ("Restored", "False", "ColdStarted", 1);

#[test]
fn a_claim_shows_a_member_that_slept_once_it_runs() {
    let mut claims = owning(
        observed(noted("x", json!({}))),
        &[member("x", &[READY, ASLEEP])],
    );
    claims.waits_since = Some(now());
    let waits = plan(&claims, now());
    assert!(waits.keeps_status && waits.steps.is_empty());
    assert_eq!(waits.requeue, Some(Duration::from_secs(10)));
    let later = now() + Duration::from_secs(10);
    assert!(!plan(&claims, later).keeps_status, "a packet wakes it");
    let awake = owning(claims, &[member("x", &[READY])]);
    assert!(!plan(&awake, now()).keeps_status);
}

#[rstest]
#[case::the_pool_is_asked(Offered::NotAsked, &[], true)]
#[case::another_takes_its_place(Offered::Sandbox(member("m", &[READY])), &["assign m"], false)]
#[case::one_that_is_not_ready_does_not(Offered::Sandbox(member("m", &[])), &[], false)]
#[case::there_is_none(Offered::Nothing, &[], false)]
#[case::there_will_be_some(Offered::Pending, &[], false)]
fn a_member_that_could_not_wake_is_replaced_unless_a_client_has_seen_it(
    #[case] offer: Offered,
    #[case] expected: &[&str],
    #[case] asks: bool,
) {
    let failed = member("x", &[READY, COLD]);
    let seen = owning(
        observed(noted("x", json!({}))),
        std::slice::from_ref(&failed),
    );
    let plan_of = |seen: Observed| plan(&offering(seen, offer.clone()), now());
    let replaced = plan_of(seen.clone());
    assert_eq!(
        (steps(&replaced), replaced.wants_member),
        (expected.iter().map(|&step| step.to_owned()).collect(), asks)
    );
    let committed = json!({"status": {"sandbox": {"name": "x"}}});
    let committed = Observed {
        claim: noted("x", committed),
        ..seen.clone()
    };
    let third = owning(
        seen,
        &[member("y", &[READY, COLD]), member("z", &[READY, COLD])],
    );
    for stays in [plan_of(committed), plan_of(third)] {
        assert!(stays.steps.is_empty() && !stays.wants_member, "{stays:?}");
    }
}

#[test]
fn a_surplus_is_deleted_only_in_the_version_that_was_read() {
    let held = noted("y", json!({"status": {"sandbox": {"name": "y"}}}));
    let observed = owning(
        observed(held),
        &[sandbox("x", json!({})), sandbox("y", json!({}))],
    );
    let plan = plan(&observed, now());
    assert_eq!(steps(&plan), ["delete x at Some(\"5\")"]);
    assert_eq!(plan.outlook, Outlook::Sandbox(sandbox("y", json!({}))));
}

#[test]
fn a_replacement_carries_the_name_of_the_lost_sandbox() {
    let held = claim(json!({"status": {"sandbox": {"name": "x"}}}));
    let mut observed = offering(observed(held), Offered::Sandbox(sandbox("m", json!({}))));
    assert_eq!(steps(&plan(&observed, now())), ["ask x"]);
    observed.sandboxes.not_owned.insert("x".to_owned());
    let warm = plan(&observed, now());
    let [Action::Assign { patch, .. }] = &warm.steps[..] else {
        panic!("{warm:?}")
    };
    assert_eq!(patch["metadata"]["annotations"][annotations::REPLACES], "x");
    observed.offer = Offered::Nothing;
    let cold = plan(&observed, now());
    let [Action::CreateSandbox(made)] = &cold.steps[..] else {
        panic!("{cold:?}")
    };
    assert_eq!(made["metadata"]["annotations"][annotations::REPLACES], "x");
}

#[test]
fn a_sandbox_with_the_claims_own_name_is_replaced_by_one_of_that_name() {
    let held = claim(json!({"status": {"sandbox": {"name": "c"}}}));
    let mut observed = offering(observed(held), Offered::Sandbox(sandbox("m", json!({}))));
    observed.sandboxes.not_owned.insert("c".to_owned());
    assert_eq!(steps(&plan(&observed, now())), ["create c"]);
}

#[test]
fn a_forbidden_edit_is_reported_and_the_sandbox_stays() {
    let bad = noted(
        "x",
        json!({"spec": {"additionalPodMetadata": {"labels": {"team": "x"}}}}),
    );
    let plan = plan(&owning(observed(bad), &[sandbox("x", json!({}))]), now());
    assert_eq!(reason(&plan), "InvalidMetadata");
    assert!(matches!(
        &plan.outlook,
        Outlook::Refused {
            sandbox: Some(_),
            ..
        }
    ));
}

#[test]
fn the_network_policy_of_an_old_upstream_is_deleted() {
    let mut observed = owning(observed(noted("x", json!({}))), &[sandbox("x", json!({}))]);
    observed.legacy_policy = Some(("c-network-policy".to_owned(), "u".to_owned()));
    assert_eq!(
        steps(&plan(&observed, now())),
        ["delete policy c-network-policy"]
    );
}

// --- expiry ---

fn finished(second: u8) -> Value {
    json!({"conditions": [{
        "type": "Finished", "status": "True", "reason": "PodSucceeded", "message": "",
        "lastTransitionTime": format!("2025-12-31T23:59:{second:02}Z"),
    }]})
}

#[rstest]
#[case::no_lifecycle(json!({}), None)]
#[case::shutdown_time(json!({"spec": {"lifecycle": {"shutdownTime": "2026-02-01T00:00:00Z"}}}), Some("2026-02-01T00:00:00Z"))]
#[case::ttl_and_not_finished(json!({"spec": {"lifecycle": {"ttlSecondsAfterFinished": 10}}}), None)]
#[case::ttl(json!({"spec": {"lifecycle": {"ttlSecondsAfterFinished": 10}}, "status": finished(50)}), Some("2026-01-01T00:00:00Z"))]
#[case::ttl_of_nothing(json!({"spec": {"lifecycle": {"ttlSecondsAfterFinished": 0}}, "status": finished(50)}), Some("2025-12-31T23:59:50Z"))]
#[case::the_earlier_one(json!({"spec": {"lifecycle": {"ttlSecondsAfterFinished": 100, "shutdownTime": "2026-01-01T00:00:05Z"}}, "status": finished(50)}), Some("2026-01-01T00:00:05Z"))]
#[case::finished_without_ttl(json!({"spec": {"lifecycle": {}}, "status": finished(50)}), None)]
fn a_claim_expires_at_the_earlier_of_two_times(
    #[case] change: Value,
    #[case] expected: Option<&str>,
) {
    let expected: Option<Timestamp> = expected.map(|time| time.parse().unwrap());
    assert_eq!(expires_at(&claim(change)), expected);
}

fn expired(policy: Value, marked: bool) -> Arc<SandboxClaim> {
    let mut change = json!({
        "spec": {"lifecycle": {"shutdownTime": "2026-01-01T00:00:00Z", "shutdownPolicy": policy}},
        "status": {"sandbox": {"name": "x"}},
    });
    if marked {
        change["status"]["conditions"] = json!([{
            "type": "Ready", "status": "False", "reason": "ClaimExpired", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }]);
    }
    claim(change)
}

#[rstest]
#[case::by_default(Value::Null, &["delete x at None"])]
#[case::retain(json!("Retain"), &["delete x at None"])]
#[case::delete(json!("Delete"), &["delete claim, Delete"])]
#[case::foreground(json!("DeleteForeground"), &["delete claim, DeleteForeground"])]
fn an_expired_claim_is_marked_before_any_deletion(
    #[case] policy: Value,
    #[case] expected: &[&str],
) {
    let of = |marked| {
        let claim = expired(policy.clone(), marked);
        plan(&owning(observed(claim), &[sandbox("x", json!({}))]), now())
    };
    let (first, second) = (of(false), of(true));
    assert!(first.steps.is_empty());
    assert_eq!(first.requeue, Some(AT_ONCE));
    assert_eq!(steps(&second), expected);
}

#[test]
fn a_claim_is_reconciled_again_when_it_expires() {
    let later = json!({"spec": {"lifecycle": {"shutdownTime": "2026-01-01T01:00:00Z"}}});
    let plan = plan(
        &owning(observed(claim(later)), &[sandbox("x", json!({}))]),
        now(),
    );
    assert_eq!(plan.requeue, Some(Duration::from_secs(3600)));
}

#[test]
fn an_expired_claim_takes_no_member_and_deletes_no_foreign_sandbox() {
    let mut observed = observed(expired(Value::Null, true));
    assert_eq!(steps(&plan(&observed, now())), ["ask x"]);
    observed.sandboxes.not_owned.insert("x".to_owned());
    observed.foreign = Some("x".to_owned());
    let plan = plan(&observed, now());
    assert!(plan.steps.is_empty());
    assert!(matches!(
        plan.outlook,
        Outlook::Expired {
            sandbox: None,
            foreign: Some(_)
        }
    ));
}

#[test]
fn the_same_view_gives_the_same_plan() {
    let view = offering(
        observed(claim(json!({}))),
        Offered::Sandbox(sandbox("m", json!({}))),
    );
    assert_eq!(plan(&view, now()), plan(&view, now()));
}

fn refusal(plan: Plan) -> (Refusal, Option<Duration>) {
    match plan.outlook {
        Outlook::Refused { why, .. } => (why, plan.requeue),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_cold_start_waits_for_the_templates_network_policy_and_reports_it() {
    let mut observed = offering(observed(claim(json!({}))), Offered::Nothing);
    assert!(matches!(
        plan(&observed, now()).steps[..],
        [Action::CreateSandbox(_)]
    ));
    let policy = observed.template_policy.take();
    let waiting = plan(&observed, now());
    assert_eq!(waiting.steps, []);
    let (why, again) = refusal(waiting);
    assert_eq!(
        (why.reason(), again),
        ("NetworkPolicyPending", Some(MISSING_RETRY))
    );
    assert!(why.to_string().contains("\"t-network-policy\""), "{why}");
    let mut foreign = (*policy.unwrap()).clone();
    foreign.metadata.owner_references = None;
    observed.template_policy = Some(Arc::new(foreign));
    let (why, _) = refusal(plan(&observed, now()));
    assert_eq!(why.reason(), "NetworkPolicyNotOwned");
    assert!(
        why.to_string().contains("Delete that NetworkPolicy"),
        "{why}"
    );
}

/// The policy may have been deleted since the member was made.
#[test]
fn a_member_of_a_pool_is_handed_out_only_while_its_templates_network_policy_is_there() {
    let member = sandbox("m", json!({}));
    let mut observed = offering(observed(claim(json!({}))), Offered::Sandbox(member));
    assert_eq!(steps(&plan(&observed, now())), ["assign m"]);
    observed.template_policy = None;
    let (why, _) = refusal(plan(&observed, now()));
    assert_eq!(why.reason(), "NetworkPolicyPending");
}

/// Clients read the annotation when the claim becomes Ready.
#[test]
fn a_claim_is_annotated_with_its_sandbox_before_it_is_ready() {
    let of = |claim| {
        steps(&plan(
            &owning(observed(claim), &[sandbox("x", json!({}))]),
            now(),
        ))
    };
    assert_eq!(of(claim(json!({}))), ["note x"]);
    assert_eq!(of(noted("y", json!({}))), ["note x"]);
    assert!(of(noted("x", json!({}))).is_empty());
    let ready = json!({"status": {"conditions": [{
        "type": "Ready", "status": "True", "reason": "r", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]}});
    assert!(
        of(claim(ready)).is_empty(),
        "the annotation of a Ready claim is no step"
    );
}
