//! What the conditions of a pool say.

use super::*;

/// Type, status and reason of each condition of the pool.
fn conditions_of(view: &Observed) -> Vec<String> {
    let plan = plan(view, now());
    let status = status::next(view, plan.stalled.as_deref(), now());
    let said = |c: &Condition| format!("{}={} {}", c.type_, c.status, c.reason);
    status.conditions.iter().map(said).collect()
}

#[rstest]
#[case::all_are_ready(&["a", "b", "c"], json!({}), "True MinimumReplicasAvailable", "True WarmPoolProgressing")]
#[case::one_is_made(&["a", "b"], json!({}), "False MinimumReplicasUnavailable", "True WarmPoolProgressing")]
#[case::one_starts(&["a", "b"], on_a_node(), "False MinimumReplicasUnavailable", "True WarmPoolProgressing")]
#[case::one_finds_no_node(&["a", "b"], old(unschedulable()), "False MinimumReplicasUnavailable", "False WarmPoolNotProgressing")]
#[case::one_is_too_many_and_finds_no_node(&["a", "b", "c"], old(unschedulable()), "True MinimumReplicasAvailable", "True WarmPoolProgressing")]
fn the_conditions_say_whether_all_are_ready_and_whether_the_pool_comes_on(
    #[case] names: &[&str],
    #[case] last: Value,
    #[case] available: &str,
    #[case] progressing: &str,
) {
    let mut members = ready(names);
    if last != json!({}) {
        members.push(member("z", last));
    }
    let said = [
        format!("Available={available}"),
        format!("Progressing={progressing}"),
    ];
    assert_eq!(conditions_of(&observed(&members)), said);
}

#[test]
fn the_conditions_of_a_pool_keep_their_time_while_they_say_the_same() {
    let mut view = observed(&ready(&["a", "b", "c"]));
    let first = status::next(&view, None, now());
    let mut same = (*view.pool).clone();
    same.status = Some(first.clone());
    view.pool = Arc::new(same);
    let later = now() + jiff::SignedDuration::from_secs(60);
    assert_eq!(status::next(&view, None, later), first);
    let other = status::next(&view, Some("full"), later);
    let times =
        |c: &[Condition]| -> Vec<_> { c.iter().map(|c| c.last_transition_time.0).collect() };
    assert_eq!(times(&other.conditions), [now(), later]);
}

#[rstest]
#[case::some_are_missing(&["a"], 3)]
#[case::none_is_missing(&["a", "b", "c"], 3)]
fn a_pool_says_at_once_that_its_template_is_missing(#[case] there: &[&str], #[case] replicas: u32) {
    let mut view = observed(&ready(there));
    view.pool = pool(json!({"spec": {"replicas": replicas}}));
    view.template = None;
    let told = plan(&view, now());
    assert!(told.steps.is_empty() && told.create.is_empty());
    assert_eq!(told.requeue, Some(TEMPLATE_RETRY));
    let why = told.stalled.unwrap();
    assert!(why.starts_with("SandboxTemplate \"t\" not found"), "{why}");
    assert!(conditions_of(&view).contains(&"Progressing=False SandboxTemplateError".to_owned()));
}

#[test]
fn a_pool_of_none_misses_no_template() {
    let mut view = observed(&[]);
    view.pool = pool(json!({"spec": {"replicas": 0}}));
    view.template = None;
    let told = plan(&view, now());
    assert_eq!((told.stalled, told.requeue), (None, None));
}

#[test]
fn why_nothing_is_made_is_told_before_why_a_member_waits() {
    let mut view = observed(&[member("a", old(unschedulable()))]);
    view.template = None;
    let why = plan(&view, now()).stalled.unwrap();
    let (first, second) = why.split_once('\n').unwrap();
    assert!(
        first.contains("not found") && second.contains("not scheduled"),
        "{why}"
    );
}
