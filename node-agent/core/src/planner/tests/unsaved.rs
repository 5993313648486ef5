//! A runtime that makes no images: its sandboxes doze without an image, and the status is clear
//! about that.

use proptest::prelude::*;

use super::*;

const WHY: &str = "no snapshot of a running sandbox";

fn unable(observed: Observed) -> Observed {
    Observed {
        capable: Err(WHY.into()),
        dozes_unsaved: true,
        ..observed
    }
}

fn running() -> Observed {
    unable(observed(Live::Running, &[], &[]))
}

fn paused(doze: Option<Doze>) -> Observed {
    Observed {
        doze,
        ..unable(observed(Live::Paused, &[], &[]))
    }
}

fn begun(reclaimed: bool) -> Option<Doze> {
    Some(Doze { reclaimed })
}

fn condition(plan: &Plan) -> (String, String) {
    let hibernated = plan.status.hibernated.clone().expect("a condition");
    assert_eq!(hibernated.status, Truth::False);
    (hibernated.reason, hibernated.message)
}

#[test]
fn a_sandbox_without_images_dozes_in_two_plans_and_never_saves() {
    use StepKind::*;
    let idle = |observed| idle_since(900, observed);
    let mut only_doze = idle_dozes();
    only_doze.sleep.hibernate = None;
    for wish in [
        only_doze,
        idle_dozes(),
        idle_hibernates(),
        desired(Power::Asleep),
    ] {
        assert_steps(&wish, &idle(running()), &[Doze]);
        let plan = planned(&wish, &idle(paused(begun(false))));
        assert_eq!(kinds(&plan), [Reclaim], "{wish:?}");
        assert_eq!(plan.steps[0].action, Action::Reclaim { image: None });
        let plan = planned(&wish, &idle(paused(begun(true))));
        assert_eq!(kinds(&plan), []);
        assert_eq!(plan.status.phase, Phase::Dozing { image: None });
        assert!(condition(&plan).1.contains("no image"), "{:?}", plan.status);
    }
}

#[test]
fn a_request_to_hibernate_reports_that_the_runtime_cannot() {
    let asked = desired(Power::Asleep);
    for observed in [running(), paused(begun(false)), paused(begun(true))] {
        let plan = planned(&asked, &observed);
        let (reason, message) = condition(&plan);
        assert_eq!(reason, "RuntimeNotCapable", "{message}");
        assert!(message.contains(WHY), "{message}");
        assert!(plan.why.contains(&Reason::NotCapable));
    }
    // A sandbox that is only to doze has no warning about hibernation.
    let mut only_doze = idle_dozes();
    only_doze.sleep.hibernate = None;
    let awake = planned(&only_doze, &idle_since(999, running()));
    assert_eq!(condition(&awake).0, "Awake");
    let dozes = planned(&only_doze, &idle_since(0, paused(begun(true))));
    assert_eq!(condition(&dozes).0, "Dozing");
    assert!(!dozes.why.contains(&Reason::NotCapable));
}

#[test]
fn without_swap_a_sandbox_stays_awake_and_reports_why() {
    let mut observed = idle_since(0, running());
    observed.can_doze = Err("no swap".into());
    for wish in [idle_dozes(), desired(Power::Asleep)] {
        let plan = planned(&wish, &observed);
        assert_eq!(kinds(&plan), []);
        assert_eq!(plan.why, [Reason::NotCapable]);
        assert!(condition(&plan).1.contains("no swap"), "{:?}", plan.status);
    }
}

#[test]
fn a_sandbox_that_dozes_under_pressure_dozes_on_after_the_pressure() {
    let mut pressed = desired(Power::Awake);
    pressed.pressure.may = true;
    let mut sleeps_later = idle_hibernates();
    sleeps_later.pressure.may = true;
    sleeps_later.sleep.hibernate = Some(std::time::Duration::from_secs(86_400));
    for wish in [pressed, sleeps_later] {
        let plan = planned(&wish, &idle_since(900, paused(begun(true))));
        assert_eq!(
            (kinds(&plan), plan.wake_at.is_some()),
            (vec![], wish.sleep.hibernate.is_some())
        );
        assert_eq!(plan.status.phase, Phase::Dozing { image: None });
        assert_eq!(
            crate::pressure::candidate(&wish, &idle_since(900, paused(begun(true)))),
            None
        );
        // A sandbox that is awake, or was paused by an agent that died, has not begun to doze.
        assert_steps(&wish, &idle_since(900, running()), &[]);
        assert_steps(&wish, &idle_since(900, paused(None)), &[StepKind::Resume]);
        let never = Desired {
            pressure: Pressure::default(),
            ..wish
        };
        assert_steps(
            &never,
            &idle_since(900, paused(begun(true))),
            &[StepKind::Resume],
        );
    }
}

#[test]
fn a_paused_sandbox_is_resumed_once_it_is_needed() {
    use StepKind::*;
    for doze in [None, begun(false), begun(true)] {
        assert_steps(&desired(Power::Awake), &paused(doze), &[Resume]);
        // An agent that was restarted receives no packets of the sandboxes that dozed before, and
        // wakes these.
        assert_steps(&idle_dozes(), &paused(None), &[Resume]);
        // A paused program does not receive SIGTERM.
        for wish in [idle_dozes(), desired(Power::Asleep)] {
            let going = Desired {
                pod: PodPresence::Terminating,
                ..wish
            };
            assert_steps(&going, &idle_since(0, paused(doze)), &[Resume]);
            assert_steps(&going, &idle_since(0, running()), &[]);
        }
    }
    // A time of `wake_up` has come.
    let mut wake_due = desired(Power::Asleep);
    wake_due.wake_up = [at(990)].into();
    let mut dozes = paused(begun(true));
    dozes.asleep_since = Some(at(900));
    assert_steps(&wake_due, &dozes, &[Resume]);
    // A sandbox that was woken a moment ago stays awake for its caller.
    let mut woken = running();
    woken.awake_since = Some(at(995));
    let plan = planned(&desired(Power::Asleep), &woken);
    assert_eq!((kinds(&plan), plan.wake_at), (vec![], Some(at(1005))));
}

#[test]
fn a_doze_that_was_cut_off_is_continued_and_a_failed_doze_is_resumed() {
    use StepKind::*;
    let half = || idle_since(900, paused(None));
    assert_steps(&idle_dozes(), &half(), &[Doze]);
    let failed = |observed: Observed, action: &Action| {
        let mut observed = observed;
        let outcome = Outcome::Unknown {
            message: "timeout".into(),
        };
        observed.failures.note(action, &outcome, at(999));
        observed
    };
    assert_steps(&idle_dozes(), &failed(half(), &Action::Doze), &[Resume]);
    // Memory that could not be pushed out: the sandbox stays paused, and the next attempt is later.
    let refused = idle_since(900, paused(begun(false)));
    let refused = failed(refused, &Action::Reclaim { image: None });
    let plan = planned(&idle_dozes(), &refused);
    assert_eq!(kinds(&plan), []);
    assert_eq!(condition(&plan).0, "SaveFailed");
}

#[test]
fn a_sandbox_without_images_is_frozen_and_resumed() {
    use StepKind::*;
    let frozen = desired(Power::Frozen);
    assert_steps(&frozen, &running(), &[Freeze]);
    assert_steps(&frozen, &paused(None), &[]);
    assert_steps(&frozen, &paused(begun(true)), &[Pause]);
    assert_steps(&desired(Power::Awake), &paused(None), &[Resume]);
}

#[test]
fn a_snapshot_fails_without_images_and_does_not_prevent_a_doze() {
    let mut wish = idle_dozes();
    wish.snapshots = vec![snapshot("m", SnapshotReason::Manual)];
    let plan = planned(&wish, &idle_since(900, running()));
    assert_eq!(kinds(&plan), [StepKind::Doze]);
    assert!(matches!(
        &plan.status.snapshots[0].state,
        SnapshotState::Failed { reason, .. } if reason == "RuntimeNotCapable"
    ));
    // A Suspend needs the image, and the Pod is going to be deleted: the sandbox is not put to
    // sleep for it.
    wish.snapshots = vec![snapshot("s", SnapshotReason::Suspend)];
    assert_steps(&wish, &running(), &[]);
}

#[test]
fn pressure_picks_a_running_sandbox_and_not_a_dozing_one() {
    let mut wish = idle_dozes();
    wish.pressure.may = true;
    let candidate = |observed| crate::pressure::candidate(&wish, &idle_since(0, observed));
    assert!(candidate(running()).is_some_and(|candidate| candidate.may_doze));
    assert_eq!(candidate(paused(begun(true))), None);
}

proptest! {
    /// For any request and observation, no step is planned that needs an image, and a sandbox that
    /// is paused without a reason is resumed.
    #[test]
    fn only_steps_that_the_runtime_can_do_are_planned(
        power in prop_oneof![Just(Power::Awake), Just(Power::Asleep), Just(Power::Frozen)],
        pod in prop_oneof![Just(PodPresence::Present), Just(PodPresence::Terminating), Just(PodPresence::Gone)],
        live in prop_oneof![Just(Live::None), Just(Live::Running), Just(Live::Paused), Just(Live::Unknown)],
        doze in proptest::option::of(any::<bool>()),
        idle in proptest::option::of(0_i64..1000),
        timers in any::<(bool, bool)>(),
        swap in any::<bool>(),
        save_turn in any::<bool>(),
        snapshot_wanted in proptest::option::of(any::<bool>()),
    ) {
        let mut wish = desired(power);
        wish.pod = pod;
        let after = |wanted: bool| wanted.then_some(std::time::Duration::from_secs(100));
        wish.sleep = SleepAfter { doze: after(timers.0), hibernate: after(timers.1) };
        wish.snapshots = snapshot_wanted
            .map(|suspend| snapshot("x", if suspend { SnapshotReason::Suspend } else { SnapshotReason::Manual }))
            .into_iter()
            .collect();
        let mut seen = unable(observed(live, &[], &[]));
        seen.doze = doze.map(|reclaimed| Doze { reclaimed });
        seen.idle_since = idle.map(at);
        seen.save_turn = save_turn;
        seen.can_doze = if swap { Ok(()) } else { Err("no swap".into()) };
        let plan = planned(&wish, &seen);
        for step in &plan.steps {
            prop_assert!(matches!(
                step.action,
                Action::Pause | Action::Freeze | Action::Doze | Action::Resume | Action::Reclaim { image: None }
            ), "{:?}", step.action);
            prop_assert!(step.before.is_none() && step.after.is_none());
        }
        let nobody_asks = power == Power::Awake && wish.sleep.first().is_none();
        if live == Live::Paused && (pod == PodPresence::Terminating && power != Power::Frozen || pod == PodPresence::Present && nobody_asks) {
            prop_assert_eq!(kinds(&plan), [StepKind::Resume]);
        }
    }
}
