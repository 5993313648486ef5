//! Conditions of a pool.

use super::*;

/// Returns type, status and reason of each condition of the pool.
fn conditions_of(view: &Observed) -> Vec<String> {
    let plan = plan(view, now());
    let status = status::next(view, &plan, now());
    let shown = |c: &Condition| format!("{}={} {}", c.type_, c.status, c.reason);
    status.conditions.iter().map(shown).collect()
}

#[rstest]
#[case::all_are_ready(&["a", "b", "c"], json!({}), "True MinimumReplicasAvailable", "True WarmPoolProgressing")]
#[case::one_is_created(&["a", "b"], json!({}), "False MinimumReplicasUnavailable", "True WarmPoolProgressing")]
#[case::one_starts(&["a", "b"], on_a_node(), "False MinimumReplicasUnavailable", "True WarmPoolProgressing")]
#[case::one_is_unschedulable(&["a", "b"], old(unschedulable()), "False MinimumReplicasUnavailable", "False WarmPoolNotProgressing")]
#[case::one_in_excess_is_unschedulable(&["a", "b", "c"], old(unschedulable()), "True MinimumReplicasAvailable", "True WarmPoolProgressing")]
fn the_conditions_show_availability_and_progress(
    #[case] names: &[&str],
    #[case] last: Value,
    #[case] available: &str,
    #[case] progressing: &str,
) {
    let mut members = ready(names);
    if last != json!({}) {
        members.push(member("z", last));
    }
    let shown = [
        format!("Available={available}"),
        format!("Progressing={progressing}"),
    ];
    assert_eq!(conditions_of(&observed(&members)), shown);
}

fn stalled(why: &str) -> Plan {
    Plan {
        stalled: Some(why.to_owned()),
        ..Plan::default()
    }
}

/// Returns the condition Progressing after each of the plans.
fn progress_after(template: bool, plans: &[Plan]) -> Vec<String> {
    let mut view = observed(&[]);
    view.template = view.template.filter(|_| template);
    let says = |plan: &Plan| {
        let status = status::next(&view, plan, now());
        let shown = status.conditions[1].clone();
        let mut pool = (*view.pool).clone();
        pool.status = Some(status);
        view.pool = Arc::new(pool);
        format!("{}: {}", shown.reason, shown.message)
    };
    plans.iter().map(says).collect()
}

#[test]
fn a_stall_stays_in_the_conditions_until_no_member_waits() {
    let placed = Plan {
        placed: true,
        ..Plan::default()
    };
    let plans = [stalled("full"), Plan::default(), placed, Plan::default()];
    let stalls = "WarmPoolNotProgressing: full";
    let goes_on = "WarmPoolProgressing: Nothing prevents the pool from creating its members";
    assert_eq!(
        progress_after(true, &plans),
        [stalls, stalls, goes_on, goes_on]
    );
    let missing = "SandboxTemplateError: full";
    assert_eq!(progress_after(false, &plans[..2]), [missing, goes_on]);
}

#[test]
fn a_message_that_differs_only_in_numbers_is_kept() {
    let plans = ["0/3 nodes", "0/4 nodes", "no nodes"].map(stalled);
    let words =
        ["0/3 nodes", "0/3 nodes", "no nodes"].map(|w| format!("WarmPoolNotProgressing: {w}"));
    assert_eq!(progress_after(true, &plans), words);
}

#[test]
fn unchanged_conditions_keep_their_transition_time() {
    let mut view = observed(&ready(&["a", "b", "c"]));
    let first = status::next(&view, &Plan::default(), now());
    let mut same = (*view.pool).clone();
    same.status = Some(first.clone());
    view.pool = Arc::new(same);
    let later = now() + jiff::SignedDuration::from_secs(60);
    assert_eq!(status::next(&view, &Plan::default(), later), first);
    let other = status::next(&view, &stalled("full"), later);
    let times =
        |c: &[Condition]| -> Vec<_> { c.iter().map(|c| c.last_transition_time.0).collect() };
    assert_eq!(times(&other.conditions), [now(), later]);
}

#[rstest]
#[case::some_are_missing(&["a"], 3)]
#[case::none_is_missing(&["a", "b", "c"], 3)]
fn a_missing_template_is_reported_at_once(#[case] there: &[&str], #[case] replicas: u32) {
    let mut view = observed(&ready(there));
    view.pool = pool(json!({"spec": {"replicas": replicas}}));
    view.template = None;
    let planned = plan(&view, now());
    assert!(planned.steps.is_empty() && planned.create.is_empty());
    assert_eq!(planned.requeue, Some(TEMPLATE_RETRY));
    let why = planned.stalled.unwrap();
    assert!(why.starts_with("SandboxTemplate \"t\" not found"), "{why}");
    assert!(conditions_of(&view).contains(&"Progressing=False SandboxTemplateError".to_owned()));
}

#[test]
fn a_pool_with_no_replicas_needs_no_template() {
    let mut view = observed(&[]);
    view.pool = pool(json!({"spec": {"replicas": 0}}));
    view.template = None;
    let planned = plan(&view, now());
    assert_eq!((planned.stalled, planned.requeue), (None, None));
}

#[test]
fn a_missing_template_is_reported_before_waiting_members() {
    let mut view = observed(&[member("a", old(unschedulable()))]);
    view.template = None;
    let why = plan(&view, now()).stalled.unwrap();
    let (first, second) = why.split_once('\n').unwrap();
    assert!(
        first.contains("not found") && second.contains("not scheduled"),
        "{why}"
    );
}
