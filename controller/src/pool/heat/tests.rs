use super::*;
use crate::merge_patch;

fn pool(replicas: i32, heat: Option<&str>) -> Arc<SandboxWarmPool> {
    let whole = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
        "metadata": {"name": "p", "namespace": "ns", "uid": "u-p", "annotations": {
            "torpor.dev/heat": heat,
        }},
        "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": "t"}},
    });
    let mut pool = json!({});
    merge_patch::apply(&mut pool, &whole);
    Arc::new(serde_json::from_value(pool).unwrap())
}

/// Returns a member: its name, which sorts by age, and whether it sleeps and is Ready.
fn member(name: &str, asleep: bool, ready: bool) -> Arc<Sandbox> {
    let ready = if ready { "True" } else { "False" };
    let mut whole = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": name, "uid": format!("u-{name}"), "resourceVersion": "5"},
        "spec": {"podTemplate": {"spec": {"containers": []}}},
        "status": {"conditions": [{
            "type": "Ready", "status": ready, "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }]},
    });
    if asleep {
        whole["metadata"]["annotations"] = json!({annotations::HIBERNATE: "true"});
    }
    Arc::new(serde_json::from_value(whole).unwrap())
}

fn observed(replicas: i32, heat: Option<&str>, golden: Golden) -> Observed {
    Observed {
        pool: pool(replicas, heat),
        golden,
        ..Observed::default()
    }
}

fn ready_image() -> Golden {
    Golden::Ready("t-golden-1".to_owned())
}

/// Returns the steps: `+` wakes a member, `-` puts it to sleep.
fn steps(observed: &Observed, members: &[Arc<Sandbox>]) -> Vec<String> {
    let mut planned = Plan::default();
    plan(&mut planned, observed, &members.iter().collect::<Vec<_>>());
    let steps = planned.steps.iter().map(|step| match step {
        Action::Heat { name, patch } => {
            assert_eq!(patch["metadata"]["resourceVersion"], "5");
            let value = &patch["metadata"]["annotations"][annotations::HIBERNATE];
            let sign = if value.is_null() { '+' } else { '-' };
            format!("{sign}{name}")
        }
        other => panic!("{other:?}"),
    });
    steps.collect()
}

#[test]
fn without_an_annotation_all_members_run_unless_there_are_golden_images() {
    assert_eq!(hot(&observed(7, None, Golden::Off)), 7);
    assert_eq!(hot(&observed(7, None, ready_image())), 1);
    assert_eq!(hot(&observed(0, None, ready_image())), 0);
    assert_eq!(hot(&observed(7, Some("hot=rest"), ready_image())), 7);
    assert_eq!(hot(&observed(7, Some("hot=2,asleep=rest"), Golden::Off)), 2);
    // A wrong value is reported by an Event, and counts as none.
    assert_eq!(hot(&observed(7, Some("warm"), ready_image())), 1);
}

#[test]
fn as_many_members_are_kept_awake_as_claims_took_a_moment_ago() {
    let mut world = observed(10, Some("hot=1,asleep=rest"), ready_image());
    world.demand = Demand { soon: 4, lately: 6 };
    assert_eq!(hot(&world), 4);
    world.demand.soon = 40;
    assert_eq!(hot(&world), 10);
}

#[test]
fn the_oldest_ready_members_are_woken_and_the_newest_put_to_sleep() {
    let world = observed(5, Some("hot=2,asleep=rest"), ready_image());
    let members = [
        member("a", true, false),
        member("b", true, true),
        member("c", true, true),
        member("d", true, true),
    ];
    assert_eq!(steps(&world, &members), ["+b", "+c"]);
    let members = ["a", "b", "c", "d"].map(|name| member(name, false, name != "d"));
    assert_eq!(steps(&world, &members), ["-c", "-b"]);
    let settled = [
        member("a", false, true),
        member("b", false, false),
        member("c", true, true),
    ];
    assert!(steps(&world, &settled).is_empty());
}

#[test]
fn a_member_that_was_heated_for_claims_sleeps_when_the_last_minute_needs_it_no_more() {
    let mut world = observed(5, Some("hot=0,asleep=rest"), ready_image());
    let members = ["a", "b"].map(|name| member(name, false, true));
    world.demand = Demand { soon: 0, lately: 2 };
    assert!(steps(&world, &members).is_empty());
    // No event says that the minute is over.
    let mut waits = Plan::default();
    plan(&mut waits, &world, &members.iter().collect::<Vec<_>>());
    assert_eq!(waits.requeue, Some(RECHECK));
    world.demand.lately = 1;
    assert_eq!(steps(&world, &members), ["-b"]);
}

#[test]
fn a_pool_wakes_no_other_member_while_one_wakes_for_a_claim() {
    let mut world = observed(4, Some("hot=1,asleep=rest"), ready_image());
    let members = ["a", "b"].map(|name| member(name, true, true));
    assert_eq!(steps(&world, &members), ["+a"]);
    world.remembered.pause = Some(Duration::from_millis(200));
    let mut planned = Plan::default();
    plan(&mut planned, &world, &members.iter().collect::<Vec<_>>());
    assert!(planned.steps.is_empty());
    assert_eq!(planned.requeue, world.remembered.pause);
    world.advance = crate::pace::Advance::Short;
    assert_eq!(steps(&world, &members), ["+a"]);
}

#[test]
fn nothing_is_woken_while_the_watch_has_not_shown_all_members() {
    let mut world = observed(5, Some("hot=2,asleep=rest"), ready_image());
    world.remembered.creating.insert("new".to_owned());
    assert!(steps(&world, &[member("a", true, true)]).is_empty());
}

#[test]
fn new_members_run_until_enough_do() {
    let world = observed(5, Some("hot=2,asleep=rest"), ready_image());
    assert_eq!(begins_asleep(&world, 0, 3), [false, false, true]);
    assert_eq!(begins_asleep(&world, 1, 2), [false, true]);
    assert_eq!(begins_asleep(&world, 4, 1), [true]);
    let all = observed(3, None, Golden::Off);
    assert_eq!(begins_asleep(&all, 0, 3), [false; 3]);
}
