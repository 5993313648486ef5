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

/// A member that was made just now and is Ready.
fn member(name: &str, change: Value) -> Arc<Sandbox> {
    let mut whole = member::sandbox(&pool(json!({})), &template(json!({})), name, true);
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
#[case::nobody_waits(false, 3600.0, false)]
#[case::a_short_pass(true, 0.9, false)]
#[case::a_long_one(true, 1.0, true)]
fn a_pass_gives_way_once_it_has_had_its_turn(
    #[case] others_wait: bool,
    #[case] worked: f64,
    #[case] expected: bool,
) {
    let worked = Duration::from_secs_f64(worked);
    let settings = PoolSettings::default();
    assert_eq!(gives_way(others_wait, worked, &settings), expected);
}

fn steps(plan: &Plan) -> Vec<String> {
    plan.steps
        .iter()
        .map(|step| match step {
            Action::Adopt { name, .. } => format!("adopt {name}"),
            Action::Delete {
                name,
                resource_version,
                ..
            } => {
                assert_eq!(
                    resource_version.as_deref(),
                    Some("5"),
                    "every delete is fenced"
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

// --- how many -----------------------------------------------------------------------------------------------------------------------------

#[rstest]
#[case::empty(&[], &[], 3)]
#[case::some(&["a"], &[], 2)]
#[case::full(&["a", "b", "c"], &[], 0)]
#[case::asked_for(&["a"], &["x", "y"], 0)]
#[case::asked_for_and_seen(&["a"], &["a"], 2)]
fn what_is_missing_is_made(#[case] there: &[&str], #[case] coming: &[&str], #[case] made: usize) {
    let mut observed = observed(&ready(there));
    observed.remembered = asked_for(coming);
    let plan = plan(&observed, now());
    assert_eq!(plan.create.len(), made);
    assert!(plan.steps.is_empty());
}

#[test]
fn what_is_going_counts_until_it_is_gone() {
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
fn of_too_many_the_unready_go_first_and_then_the_newest() {
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
    assert_eq!(plan(&view, now()).create, ["y"]);
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

// --- when ---------------------------------------------------------------------------------------------------------------------------------

#[rstest]
#[case::no_template(|o: &mut Observed| o.template = None, 0, Some(60_000))]
#[case::pressed(|o: &mut Observed| o.pressed = true, 0, Some(1000))]
#[case::held_up(|o: &mut Observed| o.remembered.hold = Some(Duration::from_secs(9)), 0, Some(9000))]
#[case::batch(|o: &mut Observed| o.settings.max_batch = 2, 2, Some(1))]
#[case::rate(|o: &mut Observed| { o.remembered.allowance = Some(1); o.remembered.next_token = Some(Duration::from_millis(300)); }, 1, Some(300))]
#[case::no_token(|o: &mut Observed| { o.remembered.allowance = Some(0); o.remembered.next_token = Some(Duration::from_millis(300)); }, 0, Some(300))]
fn refills_wait_where_they_have_to(
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

// --- staleness ----------------------------------------------------------------------------------------------------------------------------

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
fn stale_members_go_at_once_only_under_recreate(
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
    // Those that go still count.
    assert_eq!(plan.create.len(), 1);
}

#[test]
fn without_its_template_a_pool_keeps_what_it_has() {
    let mut view = observed(&ready(&["a"]));
    view.pool = pool(strategy("Recreate"));
    view.template = None;
    assert!(plan(&view, now()).steps.is_empty());
}

// --- orphans ------------------------------------------------------------------------------------------------------------------------------

#[test]
fn orphans_that_are_as_the_template_says_come_back_and_others_go() {
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
    // Its labels, the hash among them, are those of a member.
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
        unreachable!("it is the first")
    };
    assert_eq!(patch["metadata"]["ownerReferences"][0]["uid"], "u-p");
    assert_eq!(patch["metadata"]["resourceVersion"], "5");
}

#[test]
fn an_orphan_that_finds_no_room_goes() {
    let mut view = observed(&ready(&["a", "b", "c"]));
    view.orphans = vec![member("o", json!({"metadata": {"ownerReferences": null}}))];
    assert_eq!(steps(&plan(&view, now())), ["delete o"]);
}

// --- members that do not become ready -----------------------------------------------------------------------------------------------------

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
    // Four minutes are left, and two seconds, and up to half as long again.
    assert!((242..=363).contains(&wait), "{wait}");
}

/// The young one is a minute old.
#[test]
fn a_pool_may_say_by_itself_how_long_its_members_may_take() {
    let mut view = observed(&[member("young", unready())]);
    view.pool = pool(json!({"spec": {"readinessGracePeriodSeconds": 30}}));
    assert_eq!(steps(&plan(&view, now())), [] as [&str; 0]);
    view.settings = view.settings.of(&view.pool);
    assert_eq!(steps(&plan(&view, now())), ["delete young"]);
}

#[test]
fn a_member_that_was_ready_has_its_time_anew() {
    let mut change = old(unready());
    change["status"]["conditions"][0]["lastTransitionTime"] = "2026-01-01T00:58:00Z".into();
    assert!(
        plan(&observed(&[member("a", change)]), now())
            .steps
            .is_empty()
    );
}

#[test]
fn a_member_that_no_node_has_room_for_is_kept_and_told_of() {
    let held = observed(&[member("a", old(unschedulable()))]);
    let told = plan(&held, now());
    assert!(told.steps.is_empty());
    assert_eq!(told.requeue, Some(Duration::from_secs(60)));
    assert_eq!(
        told.stalled.as_deref(),
        Some(
            "Members are not scheduled after 300s and are kept waiting. Add nodes that have room for them, or lower spec.replicas. The scheduler says: 0/3 nodes"
        )
    );
    let young = observed(&[member("a", unschedulable())]);
    assert_eq!(plan(&young, now()).stalled, None);
}

/// Somebody's scheduling gates are on its Pod.
fn gated() -> Value {
    let scheduled = condition("PodScheduled", "False", "SchedulingGated");
    let ready = condition("Ready", "False", "DependenciesNotReady");
    json!({"status": {"conditions": [ready, scheduled]}})
}

#[test]
fn a_member_that_is_held_by_scheduling_gates_is_kept_and_told_of() {
    let held = observed(&[member("a", old(gated()))]);
    let told = plan(&held, now());
    assert!(
        told.steps.is_empty(),
        "another would wait at the end of the line"
    );
    assert_eq!(told.held, ["u-a".to_owned()].into());
    assert_eq!(told.requeue, Some(Duration::from_secs(60)));
    let why = told.stalled.unwrap();
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

/// The Sandbox controller cannot make the Pod.
fn refused(why: &str) -> Value {
    let mut ready = condition("Ready", "False", "ReconcilerError");
    ready["message"] = format!("Error seen: {why}").into();
    let scheduled = condition("PodScheduled", "Unknown", "PodSchedulingUnknown");
    json!({"status": {"conditions": [ready, scheduled]}})
}

const QUOTA: &str =
    "pods \"a\" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2";

#[test]
fn a_member_whose_pod_is_refused_is_kept_and_told_of() {
    let held = observed(&[
        member("a", old(refused(QUOTA))),
        member("b", old(unschedulable())),
    ]);
    let told = plan(&held, now());
    assert!(told.steps.is_empty(), "another would be refused as well");
    assert_eq!(told.requeue, Some(Duration::from_secs(60)));
    assert_eq!(told.held.len(), 2);
    let why = told.stalled.unwrap();
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
fn a_member_that_was_held_has_its_time_anew(#[case] ago: u64, #[case] expected: &[&str]) {
    let mut view = observed(&[member("a", old(unready()))]);
    let ago = Duration::from_secs(ago);
    view.remembered.held.insert("u-a".to_owned(), ago);
    let plan = plan(&view, now());
    assert_eq!(steps(&plan), expected);
    assert_eq!(plan.stalled, None, "it comes on");
    if expected.is_empty() {
        let wait = plan.requeue.unwrap().as_secs();
        assert!((242..=363).contains(&wait), "{wait}");
    }
}

/// A member that found its node two minutes ago, or has waited for one since then by what its status says.
fn since_two_minutes(scheduled: &str, reason: &str) -> Observed {
    let mut change = old(unschedulable());
    change["status"]["conditions"][1] = condition("PodScheduled", scheduled, reason);
    change["status"]["conditions"][1]["lastTransitionTime"] = "2026-01-01T00:58:00Z".into();
    observed(&[member("a", change)])
}

/// Nothing is remembered of its wait, as after a change of the controller that leads.
#[test]
fn a_member_that_found_its_node_late_has_its_time_from_then_whoever_leads() {
    let plan = plan(&since_two_minutes("True", "PodScheduled"), now());
    assert!(plan.steps.is_empty(), "its image is being pulled");
    assert_eq!(plan.stalled, None);
    let wait = plan.requeue.unwrap().as_secs();
    // Three minutes are left, and two seconds, and up to half as long again.
    assert!((182..=273).contains(&wait), "{wait}");
}

#[test]
fn that_a_member_waits_for_another_reason_is_no_new_beginning() {
    let told = plan(&since_two_minutes("False", "Unschedulable"), now());
    assert!(told.stalled.is_some() && told.steps.is_empty());
    let stuck = plan(&since_two_minutes("Unknown", "PodSchedulingUnknown"), now());
    assert_eq!(steps(&stuck), ["delete a"]);
}

#[rstest]
#[case::all_are_ready(Some(json!({})), true)]
#[case::one_is_just_starting(Some(on_a_node()), true)]
#[case::one_finds_no_node_so_far(Some(unschedulable()), false)]
#[case::the_pod_of_one_is_refused_so_far(Some(refused(QUOTA)), false)]
#[case::one_is_held_by_gates_so_far(Some(gated()), false)]
#[case::nothing_is_known_of_one(Some(json!({"status": null})), false)]
#[case::one_is_going(Some(going()), false)]
#[case::one_is_missing(None, false)]
fn a_pool_comes_on_once_none_of_its_members_waits(
    #[case] third: Option<Value>,
    #[case] expected: bool,
) {
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
#[case::a_pod_is_there(condition("PodScheduled", "True", "PodScheduled"), QUOTA)]
#[case::the_name_is_taken(
    Value::Null,
    "cannot adopt unowned pod \"a\": missing required pool authorization label"
)]
fn a_member_that_another_may_do_better_than_is_replaced(
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
fn a_member_whose_pod_is_refused_goes_when_its_template_has_changed(#[case] change: Value) {
    let mut view = observed(&[member("a", old(refused(QUOTA))), member("b", json!({}))]);
    view.template = Some(template(change));
    assert_eq!(steps(&plan(&view, now())), ["delete a"]);
}

/// What the template itself asks is on the member, and not in what tells its versions apart.
#[test]
fn a_member_whose_pod_is_refused_goes_when_its_template_asks_for_something_else() {
    let mut asked = old(refused(QUOTA));
    asked["metadata"]["annotations"] = json!({"torpor.dev/inject-runtime": "true"});
    let view = observed(&[member("a", asked), member("b", json!({}))]);
    assert_eq!(steps(&plan(&view, now())), ["delete a"]);
}

// --- status -------------------------------------------------------------------------------------------------------------------------------

#[test]
fn the_status_counts_what_stays() {
    let mut view = observed(&[
        member("a", json!({})),
        member("b", unready()),
        member("c", going()),
    ]);
    view.remembered = asked_for(&["d"]);
    let next = |view: &Observed| status::next(view, &Plan::default(), now());
    let mut said = json!(next(&view));
    said.as_object_mut().unwrap().remove("conditions");
    assert_eq!(
        said,
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
fn a_pool_that_goes_leaves_its_members_to_garbage_collection() {
    let mut view = observed(&[]);
    view.pool = pool(going());
    assert_eq!(plan(&view, now()), Plan::default());
}

#[test]
fn no_member_is_made_before_the_templates_network_policy_is_in_place() {
    let mut observed = observed(&[]);
    observed.remembered.uncertain.insert("p-x".to_owned());
    observed.template_policy = None;
    let waits = plan(&observed, now());
    assert_eq!((waits.create.len(), waits.missing), (0, 3));
    assert!(
        waits.unisolated && waits.stalled.is_none(),
        "it is about to come"
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
fn a_pool_tells_at_once_that_somebody_else_has_the_name_of_the_network_policy() {
    let mut foreign = (*policy()).clone();
    foreign.metadata.owner_references = None;
    let mut observed = observed(&[]);
    observed.template_policy = Some(Arc::new(foreign));
    let plan = plan(&observed, now());
    assert_eq!(plan.create, [] as [String; 0]);
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
