//! Turns to save, sleep for the node's sake, and last images.

use std::time::Duration;

use super::*;
use crate::pressure::{Ask, Limits, Readings, Resource, Watch, candidate};
use crate::queue::Urgency;
use crate::state::{Restore, RolledBack};

fn waiting(observed: Observed) -> Observed {
    Observed {
        save_turn: false,
        ..observed
    }
}

#[test]
fn a_save_waits_for_its_turn_and_pauses_no_sandbox_meanwhile() {
    use StepKind::*;
    let running = || waiting(observed(Live::Running, &[], &[]));
    let idle = idle_since(0, running());
    let asked = Some(Urgency::Asked);
    let manual = Desired {
        snapshots: vec![snapshot("s", SnapshotReason::Manual)],
        ..desired(Power::Awake)
    };
    for (desired, observed, steps, urgency) in [
        (desired(Power::Asleep), running(), &[][..], asked),
        (manual, running(), &[], asked),
        (
            idle_hibernates(),
            idle.clone(),
            &[],
            Some(Urgency::ByItself),
        ),
        (idle_dozes(), idle, &[], Some(Urgency::ByItself)),
        // An agent that died began a save: the sandbox runs until it has its turn again.
        (
            desired(Power::Asleep),
            waiting(observed(Live::Paused, &[], &[])),
            &[Resume],
            asked,
        ),
        // A dozing sandbox waits: a caller that needs it resumes it.
        (
            idle_dozes(),
            waiting(dozing(false, observed(Live::Paused, &[], &[]))),
            &[],
            Some(Urgency::ByItself),
        ),
        // The remaining step needs no turn.
        (
            desired(Power::Asleep),
            waiting(observed(Live::Paused, &committed(), &[1])),
            &[End],
            None,
        ),
        (desired(Power::Awake), waiting(hibernated()), &[Wake], None),
    ] {
        let plan = planned(&desired, &observed);
        assert_eq!(kinds(&plan), steps, "why: {:?}", plan.why);
        assert_eq!(plan.awaits_turn(), urgency, "why: {:?}", plan.why);
    }
}

#[test]
fn the_step_that_a_sandbox_would_stop_for_is_known_before_it_stops() {
    use StepKind::*;
    let idle = |observed| idle_since(990, observed);
    let running = || idle(observed(Live::Running, &[], &[]));
    let manual = Desired {
        snapshots: vec![snapshot("s", SnapshotReason::Manual)],
        ..desired(Power::Awake)
    };
    let unsaved = Observed {
        capable: Err("no images".into()),
        dozes_unsaved: true,
        ..running()
    };
    for (desired, observed, step) in [
        (desired(Power::Asleep), running(), Some(Checkpoint)),
        (manual, running(), Some(Checkpoint)),
        // Its image is made while it dozes.
        (idle_dozes(), running(), Some(Doze)),
        (idle_dozes(), unsaved, None),
        (desired(Power::Frozen), running(), None),
        (desired(Power::Awake), running(), None),
        // The sandbox is paused already, or has its image.
        (
            desired(Power::Asleep),
            observed(Live::Paused, &[], &[]),
            None,
        ),
        (
            idle_dozes(),
            idle(observed(Live::Paused, &committed(), &[1])),
            None,
        ),
    ] {
        let plan = planned(&desired, &observed);
        let stops_for = plan.stops_for(&observed);
        let stops_for = stops_for.map(|index| plan.steps[index].action.kind());
        assert_eq!(stops_for, step, "{:?}: {:?}", plan.why, plan.steps);
    }
}

#[test]
fn a_sandbox_without_room_for_its_image_runs_on_and_is_reported() {
    let running = idle_since(990, observed(Live::Running, &[], &[]));
    for wish in [desired(Power::Asleep), idle_dozes()] {
        let plan = planned(&wish, &running);
        let index = plan.stops_for(&running).expect("it would stop");
        let step = &plan.steps[index];
        let full = Outcome::Failed {
            reason: "DiskFull".into(),
            message: "no room".into(),
        };
        let mut refused = running.clone();
        refused.failures.note(&step.action, &full, at(1000));
        let plan = planned(&wish, &refused);
        assert_eq!(kinds(&plan), [], "it is not even paused");
        let backoff = |reason: &Reason| matches!(reason, Reason::Backoff { .. });
        assert!(plan.why.iter().any(backoff), "{:?}", plan.why);
        let condition = plan.status.hibernated.expect("told");
        assert_eq!(condition.reason, "SaveFailed");
        assert!(
            condition.message.contains("DiskFull"),
            "{}",
            condition.message
        );
    }
}

#[test]
fn only_a_save_by_a_timer_is_reported_as_waiting_for_bandwidth() {
    let held_back = |observed| Observed {
        held_back: true,
        ..waiting(observed)
    };
    let idle = held_back(idle_since(900, observed(Live::Running, &[], &[])));
    let plan = planned(&idle_hibernates(), &idle);
    assert!(plan.why.contains(&Reason::AwaitingBandwidth), "{plan:?}");
    assert_eq!(plan.awaits_turn(), Some(Urgency::ByItself));
    let pressed = asked(&pressable(), &idle).unwrap();
    let pressed = pressed.shorten(pressable(), LIMITS.idle);
    for (desired, urgency) in [
        (desired(Power::Asleep), Urgency::Asked),
        (pressed, Urgency::Pressed),
    ] {
        let plan = planned(&desired, &idle);
        assert!(plan.why.contains(&Reason::AwaitingTurn { urgency }));
        assert_eq!(kinds(&plan), []);
    }
}

const LIMITS: Limits = Limits {
    available: Some(10),
    stalled: None,
    swap_free: Some(10),
    idle: Duration::from_secs(30),
    settle: Duration::ZERO,
    answer: Duration::from_secs(20),
};

/// A sandbox that may sleep for the node's sake, and by itself only after a day.
fn pressable() -> Desired {
    Desired {
        sleep: SleepAfter {
            doze: None,
            hibernate: Some(Duration::from_secs(86_400)),
        },
        pressure: Pressure {
            may: true,
            ..Pressure::default()
        },
        ..desired(Power::Awake)
    }
}

fn asked(desired: &Desired, observed: &Observed) -> Option<Ask> {
    let mut watch = Watch::default();
    let short = Readings {
        memory_total: 100,
        memory_available: 1,
        ..Readings::default()
    };
    watch.read(&short, &LIMITS);
    let candidates: Vec<_> = candidate(desired, observed).into_iter().collect();
    watch.choose(&candidates, &LIMITS, at(1000));
    watch.asked().cloned()
}

#[test]
fn a_sandbox_under_pressure_sleeps_as_if_its_idle_time_were_over_and_reports_why() {
    let idle = idle_since(900, observed(Live::Running, &[], &[]));
    assert_steps(&pressable(), &idle, &[]);
    let unready = Desired {
        ready: false,
        ..pressable()
    };
    assert_eq!(asked(&unready, &idle), None);
    let ask = asked(&pressable(), &idle).unwrap();
    assert_steps(&ask.shorten(unready, LIMITS.idle), &idle, &[]);
    let pressed = ask.shorten(pressable(), LIMITS.idle);
    let plan = planned(&pressed, &idle);
    assert_eq!(kinds(&plan).last(), Some(&StepKind::End));
    let short_of = Resource::Memory;
    assert!(plan.why.contains(&Reason::Pressure { short_of }));
    // An inquiry has found a later packet.
    let used = idle_since(990, observed(Live::Running, &[], &[]));
    assert_steps(&pressed, &used, &[]);
}

#[test]
fn pressure_spares_sandboxes_in_use_and_those_that_must_not_sleep() {
    let idle = || idle_since(900, observed(Live::Running, &[], &[]));
    assert!(asked(&pressable(), &idle()).is_some());
    let never = Desired {
        pressure: Pressure::default(),
        ..pressable()
    };
    assert_eq!(asked(&never, &idle()), None);
    for power in [Power::Asleep, Power::Frozen] {
        let wanted = Desired {
            power,
            ..pressable()
        };
        assert_eq!(asked(&wanted, &idle()), None, "{power:?}");
    }
    let mut in_use = idle();
    in_use.sessions = 1;
    assert_eq!(asked(&pressable(), &in_use), None);
    let unknown = observed(Live::Running, &[], &[]);
    assert_eq!(asked(&pressable(), &unknown), None);
}

/// A sandbox that may doze for the node's sake and whose annotation switches hibernation off.
fn never_hibernates() -> Desired {
    let mut dozes = Desired {
        pressure: Pressure {
            never_hibernates: true,
            ..pressable().pressure
        },
        ..idle_dozes()
    };
    dozes.sleep.hibernate = None;
    dozes
}

#[test]
fn a_sandbox_that_must_not_hibernate_only_dozes_under_pressure() {
    let awake = idle_since(900, observed(Live::Running, &[], &[]));
    let ask = asked(&never_hibernates(), &awake).unwrap();
    assert!(ask.doze);
    let mut cannot = awake;
    cannot.can_doze = Err("no swap".into());
    assert_eq!(asked(&never_hibernates(), &cannot), None);
    let mut dozes = idle_since(900, observed(Live::Paused, &committed(), &[1]));
    dozes.doze = Some(Doze { reclaimed: true });
    assert_eq!(asked(&never_hibernates(), &dozes), None);
    let mut may = never_hibernates();
    may.pressure.never_hibernates = false;
    let ask = asked(&may, &dozes).unwrap();
    assert!(!ask.doze);
    // The annotation was set after the request.
    let pressed = ask.shorten(never_hibernates(), LIMITS.idle);
    assert_eq!(pressed.sleep, never_hibernates().sleep);
    assert_steps(&pressed, &dozes, &[]);
    // A sandbox that hibernates since before the annotation is woken.
    let mut asleep = observed(Live::None, &asleep_entries(true), &[1]);
    asleep.record = Some(Record { image: image(1) });
    assert_steps(&never_hibernates(), &asleep, &[StepKind::Wake]);
}

#[test]
fn a_sandbox_that_must_not_doze_only_hibernates_under_pressure() {
    let mut hibernates = pressable();
    hibernates.pressure.never_dozes = true;
    let mut unsaved = idle_since(900, observed(Live::Running, &[], &[]));
    (unsaved.capable, unsaved.dozes_unsaved) = (Err("no images".into()), true);
    for idle in [idle_since(900, observed(Live::Running, &[], &[])), unsaved] {
        let ask = asked(&hibernates, &idle).unwrap();
        assert!(!ask.doze);
        let may_doze = Desired {
            pressure: pressable().pressure,
            ..hibernates.clone()
        };
        let ask_to_doze = asked(&may_doze, &idle).unwrap();
        assert_eq!(ask_to_doze.doze, idle.dozes_unsaved);
        let pressed = ask_to_doze.shorten(hibernates.clone(), LIMITS.idle);
        assert_eq!(pressed.sleep.doze, None);
    }
}

#[test]
fn a_sandbox_that_pressure_put_to_sleep_sleeps_on_after_the_pressure() {
    let mut asleep = observed(Live::None, &asleep_entries(true), &[1]);
    asleep.record = Some(Record { image: image(1) });
    let dozes_only = Desired {
        pressure: pressable().pressure,
        ..idle_dozes()
    };
    let unannotated = Desired {
        sleep: SleepAfter::default(),
        ..pressable()
    };
    for desired in [pressable(), dozes_only, unannotated] {
        assert_steps(&desired, &asleep, &[]);
    }
    assert_steps(&desired(Power::Awake), &asleep, &[StepKind::Wake]);
}

#[test]
fn the_last_image_stays_while_it_is_wanted_for_a_crash_and_older_ones_go() {
    use StepKind::*;
    let awake = [committed(), vec![Entry::Awake]].concat();
    let running = observed(Live::Running, &awake, &[1, 2]);
    let keeps = Desired {
        keep_last_image: true,
        ..desired(Power::Awake)
    };
    assert_steps(&keeps, &running, &[DiscardImage]);
    assert_steps(
        &desired(Power::Awake),
        &running,
        &[DiscardImage, DiscardImage],
    );
    let plan = planned(&keeps, &running);
    assert_eq!(
        plan.steps[0].action,
        Action::DiscardImage { image: image(1) }
    );
    let gone = Desired {
        keep_last_image: true,
        ..gone()
    };
    assert_steps(&gone, &left(&awake, &[2]), &[DiscardImage, DiscardLedger]);
}

#[test]
fn a_deleted_snapshot_goes_and_its_image_stays_where_it_is_wanted_for_a_crash() {
    let mut deleted = snapshot("s", SnapshotReason::Manual);
    deleted.image = Some(image(1));
    deleted.wish = SnapshotWish::Delete;
    let keeps = Desired {
        keep_last_image: true,
        snapshots: vec![deleted],
        ..desired(Power::Awake)
    };
    let awake = [committed(), vec![Entry::Awake]].concat();
    let plan = planned(&keeps, &observed(Live::Running, &awake, &[1]));
    assert_eq!(kinds(&plan), []);
    assert_eq!(plan.status.snapshots[0].state, SnapshotState::Released);
}

#[test]
fn a_sleeping_pod_that_is_evicted_leaves_its_image_to_a_snapshot() {
    let evicted = |pod, live: Observed| {
        let desired = Desired {
            pod,
            snapshots: vec![snapshot("s", SnapshotReason::Suspend)],
            ..desired(Power::Awake)
        };
        planned(&desired, &live)
    };
    // Once while its keepers are there, and once after the kubelet has ended them.
    for left in [hibernated(), observed(Live::None, &asleep(), &[1])] {
        let plan = evicted(PodPresence::Terminating, left);
        assert_eq!(kinds(&plan), [StepKind::Record], "why: {:?}", plan.why);
        assert_eq!(plan.status.snapshots[0].state, SnapshotState::Saving);
    }
    let adopted = Entry::Adopted {
        image: image(1),
        snapshots: [SnapshotUid::new("s").unwrap()].into(),
    };
    let adopted = observed(Live::None, &[asleep(), vec![adopted]].concat(), &[1]);
    for pod in [PodPresence::Terminating, PodPresence::Gone] {
        let plan = evicted(pod, adopted.clone());
        assert_eq!(kinds(&plan), [], "why: {:?}", plan.why);
        let state = &plan.status.snapshots[0].state;
        assert!(
            matches!(state, SnapshotState::Committed { stale: false, .. }),
            "{state:?}"
        );
    }
}

/// The kubelet writes that it has ended a Pod (its node shuts down, or is short of memory) after
/// the keepers have gone. The controller then reads the Pod's condition about its sleep.
#[test]
fn a_sandbox_whose_keepers_were_ended_in_its_sleep_sleeps_on() {
    let left = observed(Live::None, &asleep(), &[1]);
    let deleting = Observed {
        busy: true,
        ..left.clone()
    };
    for pod in [PodPresence::Present, PodPresence::Terminating] {
        for seen in [&left, &deleting] {
            let desired = Desired {
                pod,
                ..desired(Power::Awake)
            };
            let plan = planned(&desired, seen);
            assert_eq!(kinds(&plan), []);
            let condition = plan.status.hibernated.expect("told");
            assert_eq!(condition.status, Truth::True, "{condition:?}");
        }
    }
    for awake in [
        observed(Live::None, &[asleep(), vec![Entry::Awake]].concat(), &[1]),
        observed(Live::None, &asleep(), &[]),
    ] {
        let condition = planned(&desired(Power::Awake), &awake).status.hibernated;
        assert_eq!(condition.expect("told").status, Truth::False);
    }
}

/// A reader of that status gives the memory up.
#[test]
fn an_ended_pod_is_reported_without_memory_only_when_this_is_certain() {
    let reports_no_memory = |seen: &Observed| {
        let desired = Desired {
            pod: PodPresence::Terminating,
            snapshots: vec![snapshot("s", SnapshotReason::Suspend)],
            ..desired(Power::Awake)
        };
        let snapshot = planned(&desired, seen).status.snapshots.remove(0);
        matches!(snapshot.state, SnapshotState::Failed { reason, .. } if reason == "SandboxNotFound")
    };
    let none = |entries: &[Entry], held: &[u32]| observed(Live::None, entries, held);
    let woken = [asleep(), vec![Entry::Awake]].concat();
    assert!(reports_no_memory(&none(&[], &[])));
    assert!(reports_no_memory(&none(&woken, &[1])));
    assert!(reports_no_memory(&none(&[saving(1)], &[])), "cut off");
    let busy = Observed {
        busy: true,
        ..none(&asleep(), &[1])
    };
    let unknown = observed(Live::Unknown, &[], &[]);
    let not_found = none(&asleep(), &[]);
    let mut not_now = none(&asleep(), &[1]);
    let failed = Outcome::Failed {
        reason: "Io".into(),
        message: "the ledger cannot be written".into(),
    };
    not_now.failures.note(&Action::Record, &failed, at(1000));
    for seen in [busy, unknown, not_found, not_now] {
        assert!(!reports_no_memory(&seen), "{seen:?}");
    }
}

#[test]
fn a_roll_back_to_the_last_image_is_reported() {
    let mut back = observed(
        Live::Running,
        &[Entry::Waking { image: image(1) }, Entry::Awake],
        &[],
    );
    back.restore = Restore::Done {
        image: image(1),
        rolled_back: Some(RolledBack {
            made: at(100),
            age: Duration::from_secs(60),
        }),
    };
    let condition = planned(&desired(Power::Awake), &back)
        .status
        .restored
        .unwrap();
    assert_eq!(
        (condition.status, condition.reason.as_str()),
        (Truth::True, "RolledBack")
    );
    assert_eq!(
        condition.message,
        "The sandbox ended while it was awake and was rolled back to its last image pod-a.1, made 1970-01-01T00:01:40Z, 60 s before: \
         its work since then is lost."
    );
}
