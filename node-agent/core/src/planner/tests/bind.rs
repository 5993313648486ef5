//! A claim's way into its sandbox.

use super::*;
use crate::ids::ClaimUid;

fn claimed(power: Power) -> Desired {
    Desired {
        claim: Some(ClaimUid::new("claim-1").unwrap()),
        ..desired(power)
    }
}

fn bound(observed: Observed, claim: &str) -> Observed {
    Observed {
        bound: Some(ClaimUid::new(claim).unwrap()),
        ..observed
    }
}

#[test]
fn a_claim_is_bound_once_its_sandbox_runs() {
    let running = observed(Live::Running, &[], &[]);
    assert_steps(&claimed(Power::Awake), &running, &[StepKind::Bind]);
    assert_steps(&desired(Power::Awake), &running, &[]);
    let bound_to = |claim| bound(running.clone(), claim);
    assert_steps(&claimed(Power::Awake), &bound_to("claim-1"), &[]);
    // A sandbox serves one claim in its life. Another one's mark is no proof for this one.
    assert_steps(
        &claimed(Power::Awake),
        &bound_to("claim-2"),
        &[StepKind::Bind],
    );
}

#[test]
fn a_sleeping_member_wakes_first_and_a_pod_that_ends_binds_nothing() {
    assert_steps(&claimed(Power::Awake), &hibernated(), &[StepKind::Wake]);
    assert_steps(&claimed(Power::Asleep), &hibernated(), &[]);
    let asleep = planned(&claimed(Power::Asleep), &hibernated());
    assert_eq!(asleep.status.bound, None, "the Pod's condition stays");
    let running = observed(Live::Running, &[], &[]);
    for pod in [PodPresence::Terminating, PodPresence::Gone] {
        let ending = Desired {
            pod,
            ..claimed(Power::Awake)
        };
        let plan = planned(&ending, &running);
        assert!(!kinds(&plan).contains(&StepKind::Bind), "{pod:?}");
    }
    let suspended = Desired {
        snapshots: vec![snapshot("s", SnapshotReason::Suspend)],
        ..claimed(Power::Awake)
    };
    let saved_first = planned(&suspended, &running);
    assert_eq!(kinds(&saved_first).first(), Some(&StepKind::Pause));
}

#[test]
fn a_claim_waits_until_the_containers_run_and_are_ready() {
    let running = observed(Live::Running, &[], &[]);
    let unready = Desired {
        ready: false,
        ..claimed(Power::Awake)
    };
    assert_steps(&unready, &running, &[]);
    let starting = Desired {
        containers: [ContainerName::new("a").unwrap()].into(),
        ..claimed(Power::Awake)
    };
    assert_steps(&starting, &running, &[]);
    let started = Observed {
        containers: starting.containers.clone(),
        ..running
    };
    assert_steps(&starting, &started, &[StepKind::Bind]);
}

#[test]
fn an_idle_sandbox_stays_awake_until_its_claim_has_arrived() {
    let idle = Observed {
        idle_since: Some(at(0)),
        ..observed(Live::Running, &[], &[])
    };
    let claimed = Desired {
        claim: claimed(Power::Awake).claim,
        ..idle_hibernates()
    };
    assert_steps(&claimed, &idle, &[StepKind::Bind]);
    let kinds = kinds(&planned(&claimed, &bound(idle, "claim-1")));
    assert!(kinds.contains(&StepKind::Checkpoint), "{kinds:?}");
}

#[test]
fn a_failed_bind_waits_and_shows_why() {
    let mut running = observed(Live::Running, &[], &[]);
    let claim = ClaimUid::new("claim-1").unwrap();
    let failed = Outcome::Failed {
        reason: "OnClaimExecFailed".into(),
        message: "the command ended with exit code 3".into(),
    };
    let bind = Action::Bind { claim };
    running.failures.note(&bind, &failed, at(1000));
    let plan = planned(&claimed(Power::Awake), &running);
    assert_eq!(kinds(&plan), []);
    assert_eq!(plan.wake_at, Some(at(1001)));
    let shown = plan.status.bound.unwrap();
    assert_eq!(shown.reason, "OnClaimExecFailed");
    assert_eq!(
        shown.message,
        "the command ended with exit code 3 (attempt 1)."
    );
    running.failures.note(&bind, &Outcome::Done, at(1002));
    let plan = planned(&claimed(Power::Awake), &running);
    assert_eq!(plan.status.bound.unwrap().reason, "Binding");
}

#[test]
fn a_request_to_sleep_or_for_an_image_waits_for_the_claim_but_not_for_its_failures() {
    let mut running = observed(Live::Running, &[], &[]);
    let mut imaged = claimed(Power::Awake);
    imaged.snapshots = vec![snapshot("s", SnapshotReason::Manual)];
    for wanted in [claimed(Power::Asleep), imaged] {
        running.failures = Failures::default();
        assert_steps(&wanted, &running, &[StepKind::Bind]);
        let bind = Action::Bind {
            claim: ClaimUid::new("claim-1").unwrap(),
        };
        let failed = Outcome::Unknown {
            message: "no answer".into(),
        };
        running.failures.note(&bind, &failed, at(1000));
        let kinds = kinds(&planned(&wanted, &running));
        assert!(kinds.contains(&StepKind::Checkpoint), "{kinds:?}");
    }
    assert!(!kinds(&planned(&claimed(Power::Frozen), &running)).contains(&StepKind::Bind));
}

#[test]
fn a_bound_claim_is_shown_while_its_sandbox_sleeps() {
    let plan = planned(&claimed(Power::Asleep), &bound(hibernated(), "claim-1"));
    let shown = plan.status.bound.unwrap();
    assert_eq!((shown.status, &*shown.reason), (Truth::True, "Bound"));
    let plan = planned(&desired(Power::Awake), &bound(hibernated(), "claim-1"));
    assert_eq!(plan.status.bound, None);
}
