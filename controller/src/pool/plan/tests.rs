use rstest::rstest;

use torpor_api::name_hash;

use super::*;
use crate::{merge_patch, pool::status};

mod conditions_of_pools;

fn now() -> Timestamp {
    "2026-01-01T01:00:00Z".parse().unwrap()
}

fn pool(change: Value) -> Arc<SandboxWarmPool> {
    let mut whole = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
        "metadata": {"name": "p", "namespace": "ns", "uid": "u-p", "generation": 4},
        "spec": {"replicas": 3, "sandboxTemplateRef": {"name": "t"}},
    });
    merge_patch::apply(&mut whole, &change);
    Arc::new(serde_json::from_value(whole).unwrap())
}

fn template(change: Value) -> Arc<SandboxTemplate> {
    let mut whole = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "metadata": {"name": "t", "namespace": "ns", "uid": "u-t"},
        "spec": {"podTemplate": {"spec": {"containers": [{"name": "c", "image": "img"}]}}},
    });
    merge_patch::apply(&mut whole, &change);
    Arc::new(serde_json::from_value(whole).unwrap())
}

/// Returns a Ready member that was created just now.
fn member(name: &str, change: Value) -> Arc<Sandbox> {
    let mut whole = member::sandbox(
        &pool(json!({})),
        &template(json!({})),
        name,
        member::Start::default(),
    );
    let rest = json!({
        "metadata": {
            "uid": format!("u-{name}"), "resourceVersion": "5",
            "creationTimestamp": "2026-01-01T00:59:00Z",
        },
        "status": {"conditions": [condition("Ready", "True", "DependenciesReady")]},
    });
    merge_patch::apply(&mut whole, &rest);
    merge_patch::apply(&mut whole, &change);
    Arc::new(serde_json::from_value(whole).unwrap())
}

fn condition(type_: &str, status: &str, reason: &str) -> Value {
    json!({
        "type": type_, "status": status, "reason": reason, "message": "0/3 nodes",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    })
}

fn unready() -> Value {
    json!({"status": {"conditions": [condition("Ready", "False", "DependenciesNotReady")]}})
}

fn old(mut change: Value) -> Value {
    change["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z".into();
    change
}

fn going() -> Value {
    json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
}

fn policy() -> Arc<NetworkPolicy> {
    policy_of(&template(json!({})))
}

fn policy_of(template: &SandboxTemplate) -> Arc<NetworkPolicy> {
    let policy = crate::template::plan::policy(template, &[]);
    Arc::new(serde_json::from_value(policy).unwrap())
}

fn observed(members: &[Arc<Sandbox>]) -> Observed {
    Observed {
        pool: pool(json!({})),
        template: Some(template(json!({}))),
        template_policy: Some(policy()),
        members: members.to_vec(),
        ..Observed::default()
    }
}

#[rstest]
#[case::no_other_pool_waits(false, 3600.0, false)]
#[case::a_short_pass(true, 0.9, false)]
#[case::a_long_one(true, 1.0, true)]
fn a_pass_yields_after_its_longest_time(
    #[case] others_wait: bool,
    #[case] worked: f64,
    #[case] expected: bool,
) {
    let worked = Duration::from_secs_f64(worked);
    let settings = PoolSettings::default();
    assert_eq!(yields(others_wait, worked, &settings), expected);
}

fn steps(plan: &Plan) -> Vec<String> {
    plan.steps
        .iter()
        .map(|step| match step {
            Action::Adopt { name, .. } => format!("adopt {name}"),
            Action::Heat { name, .. } => format!("heat {name}"),
            Action::Delete {
                name,
                resource_version,
                ..
            } => {
                assert_eq!(
                    resource_version.as_deref(),
                    Some("5"),
                    "every delete has a precondition"
                );
                format!("delete {name}")
            }
        })
        .collect()
}

fn ready(names: &[&str]) -> Vec<Arc<Sandbox>> {
    names.iter().map(|name| member(name, json!({}))).collect()
}

fn asked_for(names: &[&str]) -> Remembered {
    Remembered {
        creating: names.iter().map(|name| (*name).to_owned()).collect(),
        ..Remembered::default()
    }
}

// --- number of members ---

#[rstest]
#[case::empty(&[], &[], 3)]
#[case::some(&["a"], &[], 2)]
#[case::full(&["a", "b", "c"], &[], 0)]
#[case::requested(&["a"], &["x", "y"], 0)]
#[case::requested_and_seen(&["a"], &["a"], 2)]
fn missing_members_are_created(
    #[case] there: &[&str],
    #[case] coming: &[&str],
    #[case] made: usize,
) {
    let mut observed = observed(&ready(there));
    observed.remembered = asked_for(coming);
    let plan = plan(&observed, now());
    assert_eq!(plan.create.len(), made);
    assert!(plan.steps.is_empty());
}

#[test]
fn a_deleted_member_counts_until_it_is_gone() {
    let mut view = observed(&[member("a", going()), member("b", json!({}))]);
    assert_eq!(plan(&view, now()).create.len(), 1);
    view.remembered.deleting.insert("u-b".to_owned());
    assert_eq!(plan(&view, now()).create.len(), 1);
    assert_eq!(
        status::next(&view, &Plan::default(), now()).replicas,
        Some(0)
    );
}

#[test]
fn excess_members_are_deleted_unready_first_then_newest() {
    let members = [
        member("a", old(json!({}))),
        member("b", json!({})),
        member("c", old(json!({}))),
        member("d", unready()),
        member(
            "e",
            json!({"metadata": {"creationTimestamp": "2026-01-01T00:59:30Z"}}),
        ),
    ];
    let mut view = observed(&members);
    assert_eq!(steps(&plan(&view, now())), ["delete d", "delete e"]);
    view.pool = pool(json!({"spec": {"replicas": 0}}));
    assert_eq!(plan(&view, now()).steps.len(), 5);
    view.settings.max_batch = 2;
    assert_eq!(plan(&view, now()).steps.len(), 2);
}

#[test]
fn a_pool_without_a_number_has_one_member() {
    let mut view = observed(&[]);
    view.pool = pool(json!({"spec": {"replicas": null}}));
    assert_eq!(plan(&view, now()).create.len(), 1);
}

#[test]
fn a_create_without_an_answer_is_repeated_under_its_name() {
    let mut view = observed(&ready(&["a"]));
    view.remembered = asked_for(&["x", "y"]);
    view.remembered.uncertain.insert("y".to_owned());
    let create = plan(&view, now()).create;
    assert_eq!(create.len(), 1);
    assert_eq!(create[0].name, "y");
}

#[test]
fn names_differ_from_pass_to_pass() {
    let mut view = observed(&[]);
    let first = plan(&view, now()).create;
    assert_eq!(plan(&view, now()).create, first);
    view.remembered.salt = 1;
    let second = plan(&view, now()).create;
    assert!(first.iter().all(|name| !second.contains(name)));
}

// --- timing ---

#[rstest]
#[case::no_template(|o: &mut Observed| o.template = None, 0, Some(60_000))]
#[case::pressed(|o: &mut Observed| o.pressed = true, 0, Some(1000))]
#[case::held_up(|o: &mut Observed| o.remembered.hold = Some(Duration::from_secs(9)), 0, Some(9000))]
#[case::a_claims_member_wakes(|o: &mut Observed| o.remembered.pause = Some(Duration::from_millis(200)), 0, Some(200))]
#[case::one_wakes_and_the_pool_is_low(|o: &mut Observed| { o.remembered.pause = Some(Duration::from_millis(200)); o.advance = Advance::Low; }, 3, None)]
#[case::batch(|o: &mut Observed| o.settings.max_batch = 2, 2, Some(1))]
#[case::rate(|o: &mut Observed| { o.remembered.allowance = Some(1); o.remembered.next_token = Some(Duration::from_millis(300)); }, 1, Some(300))]
#[case::no_token(|o: &mut Observed| { o.remembered.allowance = Some(0); o.remembered.next_token = Some(Duration::from_millis(300)); }, 0, Some(300))]
fn refills_wait_for_template_load_delay_batch_and_rate(
    #[case] edit: fn(&mut Observed),
    #[case] made: usize,
    #[case] requeue: Option<u64>,
) {
    let mut view = observed(&[]);
    edit(&mut view);
    let plan = plan(&view, now());
    assert_eq!((plan.create.len(), plan.missing), (made, 3));
    assert_eq!(plan.requeue, requeue.map(Duration::from_millis));
}

// --- staleness ---

fn strategy(type_: &str) -> Value {
    json!({"spec": {"updateStrategy": {"type": type_}}})
}

fn image(name: &str) -> Value {
    json!({"spec": {"podTemplate": {"spec": {"containers": [{"name": "c", "image": name}]}}}})
}

#[rstest]
#[case::by_default(json!({}), image("new"), &[])]
#[case::on_replenish(strategy("OnReplenish"), image("new"), &[])]
#[case::recreate(strategy("Recreate"), image("new"), &["delete a", "delete b"])]
#[case::recreate_and_metadata_only(strategy("Recreate"), json!({"spec": {"podTemplate": {"metadata": {"labels": {"a": "b"}}}}}), &[])]
#[case::recreate_and_another_template(strategy("Recreate"), json!({"metadata": {"name": "u"}}), &["delete a", "delete b"])]
fn stale_members_are_deleted_at_once_only_under_recreate(
    #[case] of_pool: Value,
    #[case] of_template: Value,
    #[case] expected: &[&str],
) {
    let mut view = observed(&ready(&["a", "b"]));
    view.pool = pool(of_pool);
    let template = template(of_template);
    view.template_policy = Some(policy_of(&template));
    view.template = Some(template);
    let plan = plan(&view, now());
    assert_eq!(steps(&plan), expected);
    // Members being deleted still count.
    assert_eq!(plan.create.len(), 1);
}

#[test]
fn a_pool_without_its_template_keeps_its_members() {
    let mut view = observed(&ready(&["a"]));
    view.pool = pool(strategy("Recreate"));
    view.template = None;
    assert!(plan(&view, now()).steps.is_empty());
}

// --- orphans ---

#[test]
fn orphans_that_match_the_template_return_and_others_are_deleted() {
    let nobodys = |name: &str, change: Value| {
        let mut change = change;
        change["metadata"]["ownerReferences"] = Value::Null;
        member(name, change)
    };
    let mut view = observed(&ready(&["a"]));
    let other = json!({
        "metadata": {"labels": {"agents.x-k8s.io/sandbox-template-hash": "old"}},
        "spec": {"service": true},
    });
    // The labels, the hash among them, are those of a member.
    let copied = image("another");
    view.orphans = vec![
        nobodys("good", json!({})),
        nobodys("stale", other),
        nobodys("copied", copied),
        nobodys("going", going()),
    ];
    let plan = plan(&view, now());
    assert_eq!(
        steps(&plan),
        ["adopt good", "delete stale", "delete copied"]
    );
    assert_eq!(plan.create.len(), 1);
    let Action::Adopt { patch, .. } = &plan.steps[0] else {
        unreachable!("the first step adopts")
    };
    assert_eq!(patch["metadata"]["ownerReferences"][0]["uid"], "u-p");
    assert_eq!(patch["metadata"]["resourceVersion"], "5");
}

#[test]
fn an_orphan_without_room_is_deleted() {
    let mut view = observed(&ready(&["a", "b", "c"]));
    view.orphans = vec![member("o", json!({"metadata": {"ownerReferences": null}}))];
    assert_eq!(steps(&plan(&view, now())), ["delete o"]);
}

// --- members that do not become ready ---

fn unschedulable() -> Value {
    json!({"status": {"conditions": [
        condition("Ready", "False", "DependenciesNotReady"),
        condition("PodScheduled", "False", "Unschedulable"),
    ]}})
}

#[test]
fn a_member_that_does_not_become_ready_in_time_is_replaced() {
    let view = observed(&[member("young", unready()), member("stuck", old(unready()))]);
    let plan = plan(&view, now());
    assert_eq!(steps(&plan), ["delete stuck"]);
    let wait = plan.requeue.unwrap().as_secs();
    // Four minutes are left, plus two seconds, plus up to half of that.
    assert!((242..=363).contains(&wait), "{wait}");
}

/// The member is one minute old.
#[test]
fn a_pool_may_set_the_grace_period_of_its_members() {
    let mut view = observed(&[member("young", unready())]);
    view.pool = pool(json!({"spec": {"readinessGracePeriodSeconds": 30}}));
    assert_eq!(steps(&plan(&view, now())), [] as [&str; 0]);
    view.settings = view.settings.of(&view.pool);
    assert_eq!(steps(&plan(&view, now())), ["delete young"]);
}

#[test]
fn a_member_that_was_ready_gets_a_new_grace_period() {
    let mut change = old(unready());
    change["status"]["conditions"][0]["lastTransitionTime"] = "2026-01-01T00:58:00Z".into();
    assert!(
        plan(&observed(&[member("a", change)]), now())
            .steps
            .is_empty()
    );
}

#[test]
fn an_unschedulable_member_is_kept_and_reported() {
    let held = observed(&[member("a", old(unschedulable()))]);
    let planned = plan(&held, now());
    assert!(planned.steps.is_empty());
    assert_eq!(planned.requeue, Some(Duration::from_secs(60)));
    assert_eq!(
        planned.stalled.as_deref(),
        Some(
            "Members are not scheduled after 300s and are kept waiting. Add nodes that have room for them, or lower spec.replicas. The scheduler says: 0/3 nodes"
        )
    );
    let young = observed(&[member("a", unschedulable())]);
    assert_eq!(plan(&young, now()).stalled, None);
}

/// Returns a member whose Pod has scheduling gates.
fn gated() -> Value {
    let scheduled = condition("PodScheduled", "False", "SchedulingGated");
    let ready = condition("Ready", "False", "DependenciesNotReady");
    json!({"status": {"conditions": [ready, scheduled]}})
}

#[test]
fn a_member_with_scheduling_gates_is_kept_and_reported() {
    let held = observed(&[member("a", old(gated()))]);
    let planned = plan(&held, now());
    assert!(
        planned.steps.is_empty(),
        "a replacement would wait at the end of the queue"
    );
    assert_eq!(planned.held, ["u-a".to_owned()].into());
    assert_eq!(planned.requeue, Some(Duration::from_secs(60)));
    let why = planned.stalled.unwrap();
    for words in [
        "Members are held by scheduling gates",
        "spec.replicas",
        "0/3 nodes",
    ] {
        assert!(why.contains(words), "{why}");
    }
    let young = observed(&[member("a", gated())]);
    assert_eq!(plan(&young, now()).stalled, None);
}

/// Returns a member whose Pod the Sandbox controller cannot create.
fn refused(why: &str) -> Value {
    let mut ready = condition("Ready", "False", "ReconcilerError");
    ready["message"] = format!("Error seen: {why}").into();
    let scheduled = condition("PodScheduled", "Unknown", "PodSchedulingUnknown");
    json!({"status": {"conditions": [ready, scheduled]}})
}

const QUOTA: &str =
    "pods \"a\" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2";

#[test]
fn a_member_with_a_refused_pod_is_kept_and_reported() {
    let held = observed(&[
        member("a", old(refused(QUOTA))),
        member("b", old(unschedulable())),
    ]);
    let planned = plan(&held, now());
    assert!(
        planned.steps.is_empty(),
        "a replacement would be refused as well"
    );
    assert_eq!(planned.requeue, Some(Duration::from_secs(60)));
    assert_eq!(planned.held.len(), 2);
    let why = planned.stalled.unwrap();
    let (no_pod, no_node) = why.split_once('\n').unwrap();
    for words in ["Members have no Pod", "lower spec.replicas", QUOTA] {
        assert!(no_pod.contains(words), "{no_pod}");
    }
    assert!(no_node.contains("not scheduled"), "{no_node}");
    let young = observed(&[member("a", refused(QUOTA))]);
    assert_eq!(plan(&young, now()).stalled, None);
}

#[rstest]
#[case::just_now(60, &[])]
#[case::long_ago(301, &["delete a"])]
fn a_member_that_was_held_gets_a_new_grace_period(#[case] ago: u64, #[case] expected: &[&str]) {
    let mut view = observed(&[member("a", old(unready()))]);
    let ago = Duration::from_secs(ago);
    view.remembered.held.insert("u-a".to_owned(), ago);
    let plan = plan(&view, now());
    assert_eq!(steps(&plan), expected);
    assert_eq!(plan.stalled, None, "the pool makes progress");
    if expected.is_empty() {
        let wait = plan.requeue.unwrap().as_secs();
        assert!((242..=363).contains(&wait), "{wait}");
    }
}

/// Returns a pool whose member found its node two minutes ago, or has had this condition since
/// then.
fn since_two_minutes(scheduled: &str, reason: &str) -> Observed {
    let mut change = old(unschedulable());
    change["status"]["conditions"][1] = condition("PodScheduled", scheduled, reason);
    change["status"]["conditions"][1]["lastTransitionTime"] = "2026-01-01T00:58:00Z".into();
    observed(&[member("a", change)])
}

/// The wait is not remembered, as after a change of the leading controller.
#[test]
fn the_grace_period_starts_with_the_node_for_any_leading_controller() {
    let plan = plan(&since_two_minutes("True", "PodScheduled"), now());
    assert!(plan.steps.is_empty(), "the image is being pulled");
    assert_eq!(plan.stalled, None);
    let wait = plan.requeue.unwrap().as_secs();
    // Three minutes are left, plus two seconds, plus up to half of that.
    assert!((182..=273).contains(&wait), "{wait}");
}

#[test]
fn another_reason_for_the_wait_starts_no_new_grace_period() {
    let planned = plan(&since_two_minutes("False", "Unschedulable"), now());
    assert!(planned.stalled.is_some() && planned.steps.is_empty());
    let stuck = plan(&since_two_minutes("Unknown", "PodSchedulingUnknown"), now());
    assert_eq!(steps(&stuck), ["delete a"]);
}

#[rstest]
#[case::all_are_ready(Some(json!({})), true)]
#[case::one_is_just_starting(Some(on_a_node()), true)]
#[case::one_unschedulable_so_far(Some(unschedulable()), false)]
#[case::one_pod_refused_so_far(Some(refused(QUOTA)), false)]
#[case::one_gated_so_far(Some(gated()), false)]
#[case::one_without_a_status(Some(json!({"status": null})), false)]
#[case::one_being_deleted(Some(going()), false)]
#[case::one_is_missing(None, false)]
fn a_pool_is_placed_once_no_member_waits(#[case] third: Option<Value>, #[case] expected: bool) {
    let mut members = ready(&["a", "b"]);
    members.extend(third.map(|change| member("c", change)));
    let plan = plan(&observed(&members), now());
    assert_eq!((plan.placed, plan.stalled), (expected, None));
}

fn on_a_node() -> Value {
    json!({"status": {"conditions": [
        condition("Ready", "False", "DependenciesNotReady"),
        condition("PodScheduled", "True", "PodScheduled"),
    ]}})
}

#[rstest]
#[case::the_pod_exists(condition("PodScheduled", "True", "PodScheduled"), QUOTA)]
#[case::the_name_is_taken(
    Value::Null,
    "cannot adopt unowned pod \"a\": missing required pool authorization label"
)]
fn a_member_that_a_replacement_may_improve_on_is_replaced(
    #[case] scheduled: Value,
    #[case] why: &str,
) {
    let mut change = old(refused(why));
    let all = change["status"]["conditions"].as_array_mut().unwrap();
    all.truncate(1);
    all.extend((!scheduled.is_null()).then_some(scheduled));
    let plan = plan(&observed(&[member("a", change)]), now());
    assert_eq!(steps(&plan), ["delete a"]);
    assert_eq!(plan.stalled, None);
}

#[rstest]
#[case::of_its_spec(image("new"))]
#[case::of_its_metadata(json!({"spec": {"podTemplate": {"metadata": {"labels": {"team": "a"}}}}}))]
fn a_member_with_a_refused_pod_is_deleted_when_its_template_changes(#[case] change: Value) {
    let mut view = observed(&[member("a", old(refused(QUOTA))), member("b", json!({}))]);
    view.template = Some(template(change));
    assert_eq!(steps(&plan(&view, now())), ["delete a"]);
}

/// The template's own annotations are on the member and not part of the template's hash.
#[test]
fn a_member_with_a_refused_pod_is_deleted_when_its_templates_annotations_change() {
    let mut asked = old(refused(QUOTA));
    asked["metadata"]["annotations"] = json!({"torpor.dev/inject-runtime": "true"});
    let view = observed(&[member("a", asked), member("b", json!({}))]);
    assert_eq!(steps(&plan(&view, now())), ["delete a"]);
}

// --- status ---

#[test]
fn the_status_counts_members_that_are_kept() {
    let mut view = observed(&[
        member("a", json!({})),
        member("b", unready()),
        member("c", going()),
    ]);
    view.remembered = asked_for(&["d"]);
    let next = |view: &Observed| status::next(view, &Plan::default(), now());
    let mut actual = json!(next(&view));
    actual.as_object_mut().unwrap().remove("conditions");
    assert_eq!(
        actual,
        json!({
            "observedGeneration": 4, "replicas": 3, "readyReplicas": 1,
            "selector": format!("agents.x-k8s.io/warm-pool-sandbox={}", name_hash("p")),
        })
    );
    assert!(!status::is_settled(&next(&view), &view));
    let all = observed(&ready(&["a", "b", "c"]));
    assert!(status::is_settled(&next(&all), &all));
}

#[test]
fn a_deleted_pool_leaves_its_members_to_garbage_collection() {
    let mut view = observed(&[]);
    view.pool = pool(going());
    assert_eq!(plan(&view, now()), Plan::default());
}

#[test]
fn no_member_is_created_before_the_templates_network_policy_is_in_place() {
    let mut observed = observed(&[]);
    observed.remembered.uncertain.insert("p-x".to_owned());
    observed.template_policy = None;
    let waits = plan(&observed, now());
    assert_eq!((waits.create.len(), waits.missing), (0, 3));
    assert!(
        waits.unisolated && waits.stalled.is_none(),
        "the policy is about to be written"
    );
    assert_eq!(waits.requeue, Some(POLICY_GRACE));
    observed.remembered.unisolated = POLICY_GRACE;
    let stalled = plan(&observed, now()).stalled.unwrap();
    assert!(stalled.contains("\"t-network-policy\""), "{stalled}");
    observed.template_policy = Some(policy());
    let goes_on = plan(&observed, now());
    assert!(!goes_on.unisolated && goes_on.stalled.is_none());
    assert_eq!(goes_on.create.len(), 4);
}

#[test]
fn a_foreign_network_policy_with_the_templates_name_is_reported_at_once() {
    let mut foreign = (*policy()).clone();
    foreign.metadata.owner_references = None;
    let mut observed = observed(&[]);
    observed.template_policy = Some(Arc::new(foreign));
    let plan = plan(&observed, now());
    assert!(plan.create.is_empty());
    let stalled = plan.stalled.unwrap();
    for words in ["\"t-network-policy\"", "networkPolicyManagement: Unmanaged"] {
        assert!(stalled.contains(words), "{stalled}");
    }
}

#[test]
fn a_full_pool_does_not_wait_for_a_network_policy() {
    let members = ["a", "b", "c"].map(|name| member(name, json!({})));
    let mut observed = observed(&members);
    observed.template_policy = None;
    let plan = plan(&observed, now());
    assert!(!plan.unisolated && plan.stalled.is_none() && plan.placed);
}

#[test]
fn a_pool_without_a_golden_image_yet_makes_only_the_members_that_are_to_run() {
    let mut observed = observed(&[]);
    observed.golden = Golden::Preparing("t-golden-1".to_owned());
    let waits = plan(&observed, now());
    assert_eq!((waits.create.len(), waits.missing), (1, 1));
    assert!(waits.awaits_golden && waits.stalled.is_none() && !waits.create[0].asleep);
    assert_eq!(waits.requeue, Some(GOLDEN_LIMIT));
    observed.golden = Golden::Ready("t-golden-1".to_owned());
    let asleep: Vec<bool> = plan(&observed, now())
        .create
        .iter()
        .map(|new| new.asleep)
        .collect();
    assert_eq!(asleep, [false, true, true]);
    // An image that does not come is not waited for.
    observed.golden = Golden::Preparing("t-golden-1".to_owned());
    observed.remembered.awaits_golden = GOLDEN_LIMIT;
    let cold = plan(&observed, now());
    assert_eq!(cold.create.len(), 3);
    assert!(cold.stalled.unwrap().contains("t-golden-1"));
}
