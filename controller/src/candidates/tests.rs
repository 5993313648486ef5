use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::{merge_patch, staging::nodes::NodeFacts};

fn member(name: &str, change: Value) -> Sandbox {
    let mut whole = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {
            "name": name, "namespace": "ns", "uid": format!("u-{name}"),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {
                "agents.x-k8s.io/warm-pool-sandbox": "h",
                "agents.x-k8s.io/sandbox-template-ref-hash": "t",
            },
            "ownerReferences": [{
                "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
                "name": "pool", "uid": "u-pool", "controller": true,
            }],
        },
        "spec": {"podTemplate": {"spec": {"containers": []}}},
        "status": {
            "podIPs": ["10.0.0.1"], "nodeName": "n1",
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "R", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        },
    });
    merge_patch::apply(&mut whole, &change);
    serde_json::from_value(whole).unwrap()
}

fn on(node: &str, created: &str) -> Value {
    json!({"metadata": {"creationTimestamp": created}, "status": {"nodeName": node}})
}

fn pool(members: &[(&str, Value)]) -> Candidates {
    let candidates = Candidates::default();
    for (name, change) in members {
        candidates.update(&appeared(member(name, change.clone())));
    }
    candidates
}

fn appeared(sandbox: Sandbox) -> Change<Sandbox> {
    Change {
        before: None,
        after: Some(Arc::new(sandbox)),
    }
}

fn take(candidates: &Candidates) -> Taken {
    match candidates.take("u-pool", &Nodes::default()) {
        Offer::Sandbox(taken) => taken,
        other => panic!("{other:?}"),
    }
}

fn name(taken: &Taken) -> String {
    taken.sandbox.name_any()
}

const EARLY: &str = "2026-01-01T00:00:00Z";
const LATE: &str = "2026-01-01T00:00:09Z";

#[test]
fn ready_members_come_first_then_the_fullest_node_then_the_oldest() {
    let candidates = pool(&[
        ("a", on("n1", EARLY)),
        ("b", on("n2", LATE)),
        ("c", on("n2", EARLY)),
        ("d", json!({"status": {"conditions": [], "nodeName": "n3"}})),
        ("e", json!({"status": {"nodeName": null}})),
    ]);
    let taken: Vec<Taken> = (0..5).map(|_| take(&candidates)).collect();
    let order: Vec<String> = taken.iter().map(name).collect();
    assert_eq!(order, ["c", "a", "b", "e", "d"]);
    assert!(matches!(
        candidates.take("u-pool", &Nodes::default()),
        Offer::Nothing
    ));
}

fn node(name: &str, pressure: &str, heartbeat: &str) -> Arc<torpor_api::SandboxNode> {
    let node = json!({
        "metadata": {"name": name},
        "spec": {},
        "status": {
            "heartbeatTime": heartbeat,
            "conditions": [{
                "type": "Pressure", "status": pressure, "reason": "R", "message": "",
                "lastTransitionTime": EARLY,
            }],
        },
    });
    Arc::new(serde_json::from_value(node).unwrap())
}

/// Returns the state of four nodes: n2 is short of memory, n3 does not report, and the claim
/// prefers n4.
fn nodes() -> Nodes {
    let now: Timestamp = "2026-01-01T00:10:00Z".parse().unwrap();
    let claim = json!({
        "metadata": {"name": "c", "annotations": {"torpor.dev/node-preference": "n9, n4"}},
        "spec": {"warmPoolRef": {"name": "p"}},
    });
    let reports = [
        node("n1", "False", "2026-01-01T00:09:59Z"),
        node("n2", "True", "2026-01-01T00:09:59Z"),
        node("n3", "False", EARLY),
        node("n4", "False", "2026-01-01T00:09:59Z"),
    ];
    Nodes::of(&reports, &[], &serde_json::from_value(claim).unwrap(), now)
}

fn order(candidates: &Candidates, nodes: &Nodes) -> Vec<String> {
    let mut taken = Vec::new();
    while let Offer::Sandbox(next) = candidates.take("u-pool", nodes) {
        taken.push(next);
    }
    taken.iter().map(name).collect()
}

fn sleeping_on(node: &str) -> Value {
    let mut member = asleep(Some("true"), "True");
    member["status"]["nodeName"] = node.into();
    member
}

#[test]
fn members_that_sleep_wake_on_fit_nodes_first_and_silent_nodes_come_last() {
    let candidates = pool(&[
        ("a", sleeping_on("n1")),
        ("b", sleeping_on("n2")),
        ("c", sleeping_on("n3")),
        ("d", sleeping_on("n4")),
        // A member that runs takes no more memory: pressure does not matter.
        ("e", on("n2", EARLY)),
        ("f", on("n3", EARLY)),
        ("g", on("n4", EARLY)),
    ]);
    assert_eq!(
        order(&candidates, &nodes()),
        ["g", "e", "d", "a", "b", "f", "c"]
    );
}

#[test]
fn a_claim_prefers_nodes_by_name_and_by_label() {
    let fact = |name: &str, zone: &str| NodeFacts {
        name: name.to_owned(),
        labels: [("topology.kubernetes.io/zone".to_owned(), zone.to_owned())].into(),
        ..NodeFacts::default()
    };
    let facts = [
        fact("n1", "a"),
        fact("n2", "b"),
        fact("n3", "b"),
        fact("n4", "c"),
    ];
    let preferring = |preference: &str| {
        let claim = json!({
            "metadata": {"name": "c", "annotations": {"torpor.dev/node-preference": preference}},
            "spec": {"warmPoolRef": {"name": "p"}},
        });
        let claim: torpor_api::SandboxClaim = serde_json::from_value(claim).unwrap();
        let nodes = Nodes::of(&[], &facts, &claim, Timestamp::UNIX_EPOCH);
        (prefers_labels(&claim), nodes)
    };
    for (preference, labels, ranks) in [
        ("n4, topology.kubernetes.io/zone=b", true, [16, 1, 1, 0]),
        ("topology.kubernetes.io/zone=c,n3,n4", true, [16, 16, 1, 0]),
        (
            "topology.kubernetes.io/zone=d,=,other=a,n2",
            true,
            [16, 3, 16, 16],
        ),
        ("n3,n1", false, [1, 16, 0, 16]),
    ] {
        let (asks, nodes) = preferring(preference);
        assert_eq!(asks, labels, "{preference}");
        let rank = |node| nodes.rank(node, Stage::Ready).1;
        let ranked = ["n1", "n2", "n3", "n4"].map(rank);
        assert_eq!(ranked, ranks, "{preference}");
    }
}

#[test]
fn a_node_on_which_a_member_started_cold_is_avoided_for_a_while() {
    let candidates = pool(&[("a", sleeping_on("n1")), ("b", sleeping_on("n4"))]);
    let before = Arc::new(member("other", on("n4", EARLY)));
    let cold = json!({
        "metadata": {"labels": {"agents.x-k8s.io/launch-type": "warm"}},
        "status": {"nodeName": "n4", "conditions": [{
            "type": "Restored", "status": "False", "reason": "ColdStarted", "message": "",
            "lastTransitionTime": EARLY,
        }]},
    });
    let after = Arc::new(member("other", cold));
    assert_eq!(
        rank::failed_on(None, Some(&after)),
        None,
        "it may be long ago"
    );
    assert_eq!(rank::failed_on(Some(&after), Some(&after)), None);
    candidates.update(&Change {
        before: Some(before),
        after: Some(Arc::clone(&after)),
    });
    candidates.update(&Change {
        before: Some(after),
        after: None,
    });
    assert_eq!(order(&candidates, &nodes()), ["a", "b"]);
    let now = Instant::now();
    let mut failures = HashMap::from([("n4".to_owned(), now)]);
    let later = now + Duration::from_secs(61);
    assert_eq!(nodes().with_failures(&mut failures, later), nodes());
    assert!(failures.is_empty());
}

fn asleep(hibernate: Option<&str>, hibernated: &str) -> Value {
    let condition = |type_: &str, status: &str| {
        json!({
            "type": type_, "status": status, "reason": "R", "message": "",
            "lastTransitionTime": EARLY,
        })
    };
    json!({
        "metadata": {"annotations": {"torpor.dev/hibernate": hibernate}},
        "status": {"conditions": [condition("Ready", "True"), condition("Hibernated", hibernated)]},
    })
}

#[test]
fn members_that_run_come_before_those_that_sleep_or_have_not_woken_yet() {
    let candidates = pool(&[
        ("a", asleep(Some("true"), "True")),
        ("b", asleep(None, "True")),
        ("c", asleep(Some("true"), "False")),
        ("d", asleep(None, "False")),
        ("e", json!({"status": {"conditions": []}})),
    ]);
    let taken: Vec<Taken> = (0..5).map(|_| take(&candidates)).collect();
    let order: Vec<String> = taken.iter().map(name).collect();
    assert_eq!(order, ["d", "a", "b", "c", "e"]);
}

#[test]
fn the_demand_of_a_pool_is_what_claims_took_lately() {
    let now = Instant::now() + Duration::from_secs(120);
    let mut pool = Pool::default();
    for ago in [70, 50, 20, 2, 1] {
        pool.taken_at.push_back(now - Duration::from_secs(ago));
    }
    pool.forget(now);
    let within = |window| pool.taken_within(window, now);
    assert_eq!((within(SOON), within(LATELY)), (2, 4));
}

#[test]
fn a_member_is_offered_once_and_is_free_again_when_it_was_not_used() {
    let candidates = pool(&[("a", json!({}))]);
    let taken = take(&candidates);
    assert!(matches!(
        candidates.take("u-pool", &Nodes::default()),
        Offer::Nothing
    ));
    // An update does not free the member.
    candidates.update(&appeared(member("a", on("n2", EARLY))));
    assert!(candidates.take_named("u-pool", "a").is_none());
    drop(taken);
    assert_eq!(name(&take(&candidates)), "a");
}

#[test]
fn a_member_claimed_or_deleted_meanwhile_is_not_offered_again() {
    for after in [
        None,
        Some(json!({"metadata": {"deletionTimestamp": EARLY}})),
        Some(json!({"metadata": {"ownerReferences": [{
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
            "name": "c", "uid": "u-c", "controller": true,
        }]}})),
    ] {
        let candidates = pool(&[("a", json!({}))]);
        let taken = take(&candidates);
        candidates.update(&Change {
            before: Some(Arc::clone(&taken.sandbox)),
            after: after.map(|change| Arc::new(member("a", change))),
        });
        drop(taken);
        assert!(matches!(
            candidates.take("u-pool", &Nodes::default()),
            Offer::Nothing
        ));
    }
}

#[test]
fn members_without_an_address_are_pending() {
    let candidates = pool(&[("a", json!({"status": null}))]);
    assert!(matches!(
        candidates.take("u-pool", &Nodes::default()),
        Offer::Pending
    ));
    assert!(matches!(
        candidates.take("u-other", &Nodes::default()),
        Offer::Nothing
    ));
}

/// Ready members `free`, and pairs of how many members were taken how many milliseconds ago.
#[rstest]
#[case::no_demand(400, 1000, &[], Advance::Calm)]
#[case::a_large_pool_lasts(301, 1050, &[(300, 3900)], Advance::Calm)]
#[case::a_large_pool_runs_low(299, 1050, &[(300, 3900)], Advance::Low)]
#[case::more_than_half_is_left(51, 100, &[(90, 3000)], Advance::Calm)]
#[case::less_than_half(49, 100, &[(90, 3000)], Advance::Low)]
#[case::less_than_went_in_two_seconds(19, 100, &[(20, 3900), (20, 1900)], Advance::Short)]
#[case::a_quarter_is_enough_for_a_moment(26, 100, &[(60, 1000)], Advance::Low)]
#[case::old_demand_does_not_count(10, 100, &[(90, 4100)], Advance::Calm)]
#[case::empty(0, 100, &[], Advance::Short)]
#[case::nothing_is_wanted(0, 0, &[], Advance::Calm)]
fn a_pools_need_follows_recent_demand(
    #[case] free: usize,
    #[case] wanted: usize,
    #[case] taken_at: &[(usize, u64)],
    #[case] expected: Advance,
) {
    let now = Instant::now() + Duration::from_secs(60);
    let mut pool = Pool::default();
    for n in 0..free {
        pool.free(&Entry {
            stage: Stage::Ready,
            node: "n1".to_owned(),
            age: (Timestamp::UNIX_EPOCH, n.to_string()),
        });
    }
    for (number, ago) in taken_at {
        let at = now - Duration::from_millis(*ago);
        pool.taken_at.extend(std::iter::repeat_n(at, *number));
    }
    assert_eq!(pool.advance(wanted, now), expected);
}

#[rstest]
#[case::no_pool_label(json!({"metadata": {"labels": {"agents.x-k8s.io/warm-pool-sandbox": null}}}), false)]
#[case::no_template_label(json!({"metadata": {"labels": {"agents.x-k8s.io/sandbox-template-ref-hash": null}}}), false)]
#[case::going(json!({"metadata": {"deletionTimestamp": EARLY}}), false)]
#[case::no_controller(json!({"metadata": {"ownerReferences": null}}), false)]
#[case::of_another_group(json!({"metadata": {"ownerReferences": [{"apiVersion": "x.io/v1", "kind": "SandboxWarmPool", "name": "p", "uid": "u", "controller": true}]}}), false)]
#[case::of_an_older_version(json!({"metadata": {"ownerReferences": [{"apiVersion": "extensions.agents.x-k8s.io/v1alpha1", "kind": "SandboxWarmPool", "name": "p", "uid": "u", "controller": true}]}}), true)]
#[case::as_it_is(json!({}), true)]
fn a_member_has_both_labels_and_a_pool_as_controller(
    #[case] change: Value,
    #[case] expected: bool,
) {
    assert_eq!(is_member(&member("a", change)), expected);
}
