//! Sleep that nobody asks for, and what ends it.

use super::*;
use crate::state::{CONTAINER_NOT_RUNNING, NOT_WATCHED};

#[test]
fn an_idle_sandbox_falls_asleep_by_itself_when_its_time_has_come() {
    use StepKind::*;
    let running = |since| idle_since(since, observed(Live::Running, &[], &[]));
    let plan = planned(&sleepy(), &running(900));
    assert_eq!(kinds(&plan), [Pause, Checkpoint, Commit, End]);
    assert_eq!(
        plan.steps[3].before,
        Some(Entry::Asleep {
            image: image(1),
            by_itself: true
        })
    );
    let early = planned(&sleepy(), &running(901));
    assert_eq!((kinds(&early), early.wake_at), (vec![], Some(at(1001))));
    // Nobody asked for it, or it is not known since when it is idle.
    assert_steps(&desired(Power::Awake), &running(0), &[]);
    assert_steps(&sleepy(), &observed(Live::Running, &[], &[]), &[]);
    // Somebody works in it since the last look.
    let mut used = running(0);
    used.sessions = 1;
    assert_steps(&sleepy(), &used, &[]);
    let mut going = sleepy();
    going.pod = PodPresence::Terminating;
    assert_steps(&going, &running(0), &[]);
}

#[test]
fn one_that_was_woken_a_moment_ago_does_not_fall_asleep_by_itself_however_short_its_time_is() {
    let second = Some(std::time::Duration::from_secs(1));
    let sleep = |doze, hibernate| Desired {
        sleep: SleepAfter { doze, hibernate },
        ..desired(Power::Awake)
    };
    let mut woken = idle_since(993, observed(Live::Running, &[], &[]));
    for wish in [sleep(second, None), sleep(None, second)] {
        woken.awake_since = Some(at(992));
        let plan = planned(&wish, &woken);
        assert_eq!((kinds(&plan), plan.wake_at), (vec![], Some(at(1002))));
        woken.awake_since = Some(at(990));
        assert!(!planned(&wish, &woken).steps.is_empty());
    }
}

/// While it sleeps, the kubelet's probes are answered for it.
#[test]
fn one_that_is_not_ready_does_not_fall_asleep_by_itself_and_says_so() {
    use StepKind::*;
    let unready = |desired| Desired {
        ready: false,
        ..desired
    };
    let running = idle_since(0, observed(Live::Running, &[], &[]));
    for wish in [sleepy(), dozy()] {
        assert!(!planned(&wish, &running).steps.is_empty());
        let plan = planned(&unready(wish), &running);
        assert_eq!((kinds(&plan), plan.why), (vec![], vec![Reason::NotReady]));
        let told = plan.status.hibernated.expect("told");
        assert!(told.message.contains("before it is ready"), "{told:?}");
    }
    // Nor for the node's sake: that is only a shorter time. What somebody asks for is done.
    let all = [Pause, Checkpoint, Commit, End];
    assert_steps(&unready(desired(Power::Asleep)), &running, &all);
    let mut kept = unready(sleepy());
    kept.snapshots = vec![snapshot("s", SnapshotReason::Manual)];
    assert_steps(&kept, &running, &[Pause, Checkpoint, Commit, Resume]);
    // What sleeps already was ready when it fell asleep, and sleeps on.
    let dozes = dozing(true, observed(Live::Paused, &committed(), &[1]));
    assert_steps(&unready(dozy()), &dozes, &[]);
    let hibernates = Observed {
        ledger: Ok(LedgerState::fold(&asleep_entries(true))),
        ..hibernated()
    };
    assert_steps(&unready(sleepy()), &hibernates, &[]);
    // Nothing would come of its sleep, had it no time to fall asleep at.
    let settled = planned(&unready(desired(Power::Awake)), &running);
    assert_eq!(settled.why, [Reason::Settled]);
}

#[test]
fn a_sandbox_dozes_in_three_plans_so_that_whoever_needs_it_comes_between() {
    use StepKind::*;
    let idle = |observed| idle_since(990, observed);
    let running = idle(observed(Live::Running, &[], &[]));
    assert_steps(&dozy(), &running, &[Doze]);
    let noted = dozing(false, idle(observed(Live::Paused, &[], &[])));
    assert_steps(&dozy(), &noted, &[Checkpoint, Commit]);
    let saved = dozing(false, idle(observed(Live::Paused, &committed(), &[1])));
    let plan = planned(&dozy(), &saved);
    assert_eq!(
        plan.steps[0].action,
        Action::Reclaim {
            image: Some(image(1))
        }
    );
    let reclaimed = dozing(true, saved);
    let plan = planned(&dozy(), &reclaimed);
    assert_eq!((kinds(&plan), plan.wake_at), (vec![], Some(at(1090))));
    assert_eq!(
        plan.status.phase,
        Phase::Dozing {
            image: Some(image(1))
        }
    );
    assert_eq!(plan.status.hibernated.unwrap().reason, "Dozing");
    // Deeper: the image is there already.
    let deeper = idle_since(900, reclaimed.clone());
    assert_steps(&dozy(), &deeper, &[End]);
    // An agent that was started again does not know since when it is idle, and lets it doze.
    let forgotten = Observed {
        idle_since: None,
        ..reclaimed.clone()
    };
    assert_steps(&dozy(), &forgotten, &[]);
    // It may not doze any more, or shall stand still, or sleep.
    let woken = planned(&desired(Power::Awake), &reclaimed);
    assert_eq!(kinds(&woken), [Resume]);
    assert_eq!(
        woken.steps[0].before,
        Some(Entry::Awake),
        "its image is stale before it runs"
    );
    assert_steps(&desired(Power::Frozen), &reclaimed, &[Pause]);
    assert_steps(&desired(Power::Asleep), &reclaimed, &[End]);
}

#[test]
fn a_doze_that_cannot_be_saved_ends_and_one_without_swap_does_not_begin() {
    use StepKind::*;
    let mut noted = idle_since(0, dozing(false, observed(Live::Paused, &[], &[])));
    save_failure(&mut noted, 999);
    let mut only_doze = dozy();
    only_doze.sleep.hibernate = None;
    assert_steps(&only_doze, &noted, &[Resume]);
    let mut running = idle_since(0, observed(Live::Running, &[], &[]));
    running.can_doze = Err("no swap".into());
    let plan = planned(&only_doze, &running);
    assert_eq!(kinds(&plan), []);
    let told = plan.status.hibernated.unwrap().message;
    assert_eq!(told, "The sandbox is awake and does not doze: no swap");
    // Where it cannot doze it hibernates when its time has come.
    assert_steps(&dozy(), &running, &[Pause, Checkpoint, Commit, End]);
}

#[test]
fn what_fell_asleep_by_itself_sleeps_on_until_it_may_not_and_what_was_asked_to_sleep_is_woken() {
    use StepKind::*;
    let asleep = |by_itself| Observed {
        ledger: Ok(LedgerState::fold(&asleep_entries(by_itself))),
        ..hibernated()
    };
    assert_steps(&sleepy(), &asleep(true), &[]);
    assert_steps(&sleepy(), &asleep(false), &[Wake]);
    assert_steps(&desired(Power::Awake), &asleep(true), &[Wake]);
    let told = planned(&sleepy(), &asleep(true)).status.hibernated.unwrap();
    assert_eq!(
        told.message,
        "The sandbox was idle and sleeps in image pod-a.1 until it is needed."
    );
    // Who asks now for what it did before by itself, and then no longer, wakes it.
    let asked = Desired {
        power: Power::Asleep,
        ..sleepy()
    };
    let plan = planned(&asked, &asleep(true));
    assert_eq!(kinds(&plan), [Record]);
    assert_eq!(plan.steps[0].before, asleep_entries(false).pop());
    assert_steps(&asked, &asleep(false), &[]);
    // A wake that somebody began is brought to its end.
    let mut begun = asleep(true);
    let entries = [
        asleep_entries(true),
        vec![Entry::Waking { image: image(1) }],
    ]
    .concat();
    begun.ledger = Ok(LedgerState::fold(&entries));
    assert_steps(&sleepy(), &begun, &[Wake]);
}

#[test]
fn a_sandbox_is_awake_at_the_time_that_was_set_whatever_made_it_sleep() {
    use StepKind::{Pause, Resume, Wake};
    let wake_at = |second| Some(at(second));
    let asleep_since = |second, observed| Observed {
        asleep_since: Some(at(second)),
        ..observed
    };
    let by_itself = || Observed {
        ledger: Ok(LedgerState::fold(&asleep_entries(true))),
        ..hibernated()
    };
    let dozes = || dozing(true, observed(Live::Paused, &committed(), &[1]));
    for (name, desired, sleeping, step) in [
        ("asked to sleep", desired(Power::Asleep), hibernated(), Wake),
        ("idle", sleepy(), by_itself(), Wake),
        ("dozing", dozy(), dozes(), Resume),
    ] {
        let at = |wake_up: Option<Timestamp>| Desired {
            wake_up: wake_up.into_iter().collect(),
            ..desired.clone()
        };
        let sleeping = asleep_since(900, sleeping);
        assert_steps(&at(wake_at(1000)), &sleeping, &[step]);
        // It was awake then, or it is not yet to be.
        for second in [900, 1001] {
            let plan = planned(&at(wake_at(second)), &sleeping);
            assert_eq!(kinds(&plan), [], "{name}, to be awake at {second}");
        }
        assert_eq!(
            planned(&at(wake_at(1001)), &sleeping).wake_at,
            wake_at(1001),
            "{name}"
        );
    }
    // Then it is in use: asked to sleep, for a moment, and if it falls asleep by itself, for as long as after any use.
    let asked = Desired {
        wake_up: [at(990)].into(),
        ..desired(Power::Asleep)
    };
    let mut woken = observed(Live::Running, &[], &[]);
    woken.woke_at = Some(at(995));
    assert_steps(&asked, &woken, &[]);
    woken.woke_at = Some(at(989));
    assert_eq!(kinds(&planned(&asked, &woken))[0], Pause);
    let idle = Desired {
        wake_up: [at(950)].into(),
        ..sleepy()
    };
    let since = idle_since(100, observed(Live::Running, &[], &[]));
    assert_steps(&idle, &since, &[]);
    assert_eq!(planned(&idle, &since).wake_at, Some(at(1050)));
}

#[test]
fn of_several_times_each_is_kept() {
    let asleep_since = |second| Observed {
        ledger: Ok(LedgerState::fold(&asleep_entries(true))),
        asleep_since: Some(at(second)),
        ..hibernated()
    };
    // One has come, and a later one is set.
    let both = Desired {
        wake_up: [at(1000), at(1500)].into(),
        ..sleepy()
    };
    assert_steps(&both, &asleep_since(900), &[StepKind::Wake]);
    // It was awake at the first and sleeps again: the other is still to come.
    let again = planned(&both, &asleep_since(1000));
    assert_eq!((kinds(&again), again.wake_at), (vec![], Some(at(1500))));
    // Of those that have come the last one counts, wherever it was written.
    let over = Desired {
        wake_up: [at(800), at(990)].into(),
        ..sleepy()
    };
    assert_steps(&over, &asleep_since(900), &[StepKind::Wake]);
    assert_steps(&over, &asleep_since(995), &[]);
}

#[test]
fn the_clock_wakes_nobody_who_is_frozen_or_being_suspended() {
    let late = |desired| Desired {
        wake_up: [at(1000)].into(),
        ..desired
    };
    let sleeping = Observed {
        asleep_since: Some(at(900)),
        ..hibernated()
    };
    assert_steps(&late(desired(Power::Frozen)), &sleeping, &[]);
    let mut suspending = late(desired(Power::Awake));
    suspending.snapshots = vec![snapshot("s", SnapshotReason::Suspend)];
    let plan = planned(&suspending, &sleeping);
    assert!(!kinds(&plan).contains(&StepKind::Wake), "{:?}", plan.why);
}

#[test]
fn a_sandbox_that_cannot_be_saved_is_left_running_and_told_of_and_seldom_tried_again() {
    let mut running = idle_since(0, observed(Live::Running, &[], &[]));
    save_failure(&mut running, 999);
    let plan = planned(&sleepy(), &running);
    assert_eq!((kinds(&plan), plan.wake_at), (vec![], Some(at(1299))));
    let told = plan.status.hibernated.unwrap();
    assert_eq!(told.reason, "SaveFailed");
    assert!(told.message.contains("DiskFull"), "{}", told.message);
    assert!(
        told.message.contains("from 1970-01-01T00:21:39Z"),
        "{}",
        told.message
    );
    // Also while it is not idle: whoever wonders why it never sleeps is told.
    running.idle_since = Some(at(1000));
    let told = planned(&sleepy(), &running).status.hibernated.unwrap();
    assert_eq!(told.reason, "SaveFailed");
}

#[test]
fn a_sandbox_that_nothing_would_wake_stays_awake_and_is_saved_for_who_asks() {
    use StepKind::*;
    let unwatched = |second, observed| {
        let mut observed = idle_since(0, observed);
        save_failure(&mut observed, second);
        let failure = observed.failures.save.as_mut().unwrap();
        failure.reason = NOT_WATCHED.to_owned();
        observed
    };
    let running = || observed(Live::Running, &[], &[]);
    let plan = planned(&sleepy(), &unwatched(990, running()));
    let until = at(1290);
    assert_eq!((kinds(&plan), plan.wake_at), (vec![], Some(until)));
    assert_eq!(plan.why, [Reason::Backoff { until }]);
    let told = plan.status.hibernated.unwrap();
    assert_eq!(told.reason, "SaveFailed");
    assert!(told.message.contains(NOT_WATCHED), "{}", told.message);
    // What the failure left standing runs on, whether there is an image of it already or not.
    let doze = |entries: &[Entry], held: &[u32]| {
        unwatched(990, dozing(false, observed(Live::Paused, entries, held)))
    };
    assert_steps(&dozy(), &doze(&[], &[]), &[Resume]);
    assert_steps(&dozy(), &doze(&committed(), &[1]), &[Resume]);
    // Somebody asks for an image, or for its sleep, and does not wait for as long.
    let mut kept = sleepy();
    kept.snapshots = vec![snapshot("s", SnapshotReason::Manual)];
    let plan = planned(&kept, &unwatched(990, running()));
    assert_eq!(kinds(&plan), [Pause, Checkpoint, Commit, Resume]);
    assert!(!plan.sleeps_by_itself());
    let plan = planned(&desired(Power::Asleep), &unwatched(990, running()));
    assert_eq!(kinds(&plan), [Pause, Checkpoint, Commit, End]);
    assert!(!plan.sleeps_by_itself());
    // When the wait is over it is tried again.
    let plan = planned(&sleepy(), &unwatched(700, running()));
    assert_eq!(kinds(&plan), [Pause, Checkpoint, Commit, End]);
    assert!(plan.sleeps_by_itself());
    let half = idle_since(990, dozing(false, observed(Live::Paused, &[], &[])));
    for observed in [idle_since(990, running()), half] {
        let plan = planned(&dozy(), &observed);
        assert!(plan.sleeps_by_itself(), "to doze, and to be saved then");
    }
}

#[test]
fn one_that_was_asked_to_sleep_and_that_no_packet_wakes_says_so() {
    let asleep = Observed {
        not_watched: Some("no veth pair".into()),
        ..hibernated()
    };
    let told = planned(&desired(Power::Asleep), &asleep).status.hibernated;
    assert_eq!(
        told.unwrap().message,
        "The sandbox sleeps in image pod-a.1. Only the API or an exec wakes the sandbox: no veth pair."
    );
}

#[test]
fn a_save_that_missed_a_container_is_tried_again_in_a_moment_also_of_an_idle_sandbox() {
    let mut running = idle_since(0, observed(Live::Running, &[], &[]));
    save_failure(&mut running, 999);
    if let Some(failure) = &mut running.failures.save {
        failure.reason = CONTAINER_NOT_RUNNING.to_owned();
    }
    let plan = planned(&sleepy(), &running);
    assert_eq!((kinds(&plan), plan.wake_at), (vec![], Some(at(1004))));
}

#[test]
fn whoever_cannot_see_packets_does_not_fall_asleep_and_says_so() {
    let mut running = observed(Live::Running, &[], &[]);
    running.idle_known = Err("no BPF".into());
    let told = planned(&sleepy(), &running).status.hibernated.unwrap();
    assert_eq!(told.reason, "Awake");
    assert!(
        told.message.ends_with("whether it is idle: no BPF"),
        "{}",
        told.message
    );
    running.capable = Err("no runsc".into());
    let told = planned(&sleepy(), &running).status.hibernated.unwrap();
    assert_eq!(told.reason, "RuntimeNotCapable");
}

/// A restore ends what exec has left behind, and a doze does not.
#[test]
fn what_exec_has_left_behind_keeps_a_sandbox_from_hibernating_by_itself_but_not_from_dozing() {
    let left = |mut observed: Observed| {
        observed.left_by_exec = ["server", "a", "b", "c", "d", "e"]
            .map(str::to_owned)
            .to_vec();
        observed
    };
    let idle = left(idle_since(0, observed(Live::Running, &[], &[])));
    let plan = planned(&sleepy(), &idle);
    assert_eq!(kinds(&plan), []);
    let told = plan.status.hibernated.unwrap();
    assert_eq!(told.reason, "Awake");
    assert!(
        told.message
            .ends_with("would end (server, a, b, c, d and 1 more)."),
        "{}",
        told.message
    );
    let mut dozing = sleepy();
    dozing.sleep.doze = dozing.sleep.hibernate;
    assert_ne!(kinds(&planned(&dozing, &idle)), []);
    // One that is asked for says what ends.
    assert_ne!(kinds(&planned(&desired(Power::Asleep), &idle)), []);
    let told = planned(&desired(Power::Asleep), &left(hibernated()))
        .status
        .hibernated
        .unwrap();
    assert_eq!(
        told.message,
        "The sandbox sleeps in image pod-a.1. Hibernation ends the processes that kubectl exec left behind: server, a, b, c, d and 1 more."
    );
}
