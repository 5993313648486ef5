//! Sleep by idleness, and its end.

use super::*;
use crate::state::{CONTAINER_NOT_RUNNING, NOT_WATCHED};

#[test]
fn an_idle_sandbox_falls_asleep_by_itself_when_its_time_has_come() {
    use StepKind::*;
    let running = |since| idle_since(since, observed(Live::Running, &[], &[]));
    let plan = planned(&idle_hibernates(), &running(900));
    assert_eq!(kinds(&plan), [Pause, Checkpoint, Commit, End]);
    assert_eq!(
        plan.steps[3].before,
        Some(Entry::Asleep {
            image: image(1),
            by_itself: true
        })
    );
    let early = planned(&idle_hibernates(), &running(901));
    assert_eq!((kinds(&early), early.wake_at), (vec![], Some(at(1001))));
    // Sleep by idleness is off, or the begin of the idle time is not known.
    assert_steps(&desired(Power::Awake), &running(0), &[]);
    assert_steps(&idle_hibernates(), &observed(Live::Running, &[], &[]), &[]);
    // A session has begun since the last look.
    let mut used = running(0);
    used.sessions = 1;
    assert_steps(&idle_hibernates(), &used, &[]);
    let mut going = idle_hibernates();
    going.pod = PodPresence::Terminating;
    assert_steps(&going, &running(0), &[]);
}

#[test]
fn a_sandbox_woken_a_moment_ago_stays_awake_however_short_its_idle_time_is() {
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

/// While a sandbox sleeps, the kubelet's probes are answered for it.
#[test]
fn a_sandbox_that_is_not_ready_does_not_fall_asleep_by_itself_and_reports_this() {
    use StepKind::*;
    let unready = |desired| Desired {
        ready: false,
        ..desired
    };
    let running = idle_since(0, observed(Live::Running, &[], &[]));
    for wish in [idle_hibernates(), idle_dozes()] {
        assert!(!planned(&wish, &running).steps.is_empty());
        let plan = planned(&unready(wish), &running);
        assert_eq!((kinds(&plan), plan.why), (vec![], vec![Reason::NotReady]));
        let condition = plan.status.hibernated.expect("told");
        assert!(
            condition.message.contains("before it is ready"),
            "{condition:?}"
        );
    }
    // Neither does it sleep for the node's sake: such a request only shortens its time. A request
    // of the API is executed.
    let all = [Pause, Checkpoint, Commit, End];
    assert_steps(&unready(desired(Power::Asleep)), &running, &all);
    let mut kept = unready(idle_hibernates());
    kept.snapshots = vec![snapshot("s", SnapshotReason::Manual)];
    assert_steps(&kept, &running, &[Pause, Checkpoint, Commit, Resume]);
    // A sandbox that sleeps already was ready when it fell asleep, and sleeps on.
    let dozes = dozing(true, observed(Live::Paused, &committed(), &[1]));
    assert_steps(&unready(idle_dozes()), &dozes, &[]);
    let hibernates = Observed {
        ledger: Ok(LedgerState::fold(&asleep_entries(true))),
        ..hibernated()
    };
    assert_steps(&unready(idle_hibernates()), &hibernates, &[]);
    // Without an idle time the reason is another one: the sandbox would not fall asleep anyway.
    let settled = planned(&unready(desired(Power::Awake)), &running);
    assert_eq!(settled.why, [Reason::Settled]);
}

#[test]
fn a_sandbox_dozes_in_three_plans_so_that_a_caller_can_resume_it_between_them() {
    use StepKind::*;
    let idle = |observed| idle_since(990, observed);
    let running = idle(observed(Live::Running, &[], &[]));
    assert_steps(&idle_dozes(), &running, &[Doze]);
    let noted = dozing(false, idle(observed(Live::Paused, &[], &[])));
    assert_steps(&idle_dozes(), &noted, &[Checkpoint, Commit]);
    let saved = dozing(false, idle(observed(Live::Paused, &committed(), &[1])));
    let plan = planned(&idle_dozes(), &saved);
    assert_eq!(
        plan.steps[0].action,
        Action::Reclaim {
            image: Some(image(1))
        }
    );
    let reclaimed = dozing(true, saved);
    let plan = planned(&idle_dozes(), &reclaimed);
    assert_eq!((kinds(&plan), plan.wake_at), (vec![], Some(at(1090))));
    assert_eq!(
        plan.status.phase,
        Phase::Dozing {
            image: Some(image(1))
        }
    );
    assert_eq!(plan.status.hibernated.unwrap().reason, "Dozing");
    // The deeper sleep needs no new image.
    let deeper = idle_since(900, reclaimed.clone());
    assert_steps(&idle_dozes(), &deeper, &[End]);
    // An agent that was restarted has no begin of the idle time, and leaves the sandbox dozing.
    let forgotten = Observed {
        idle_since: None,
        ..reclaimed.clone()
    };
    assert_steps(&idle_dozes(), &forgotten, &[]);
    // Dozing is not allowed any more, or a freeze or sleep is requested.
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
fn a_doze_that_cannot_be_saved_ends_and_without_swap_no_doze_begins() {
    use StepKind::*;
    let mut noted = idle_since(0, dozing(false, observed(Live::Paused, &[], &[])));
    save_failure(&mut noted, 999);
    let mut only_doze = idle_dozes();
    only_doze.sleep.hibernate = None;
    assert_steps(&only_doze, &noted, &[Resume]);
    let mut running = idle_since(0, observed(Live::Running, &[], &[]));
    running.can_doze = Err("no swap".into());
    let plan = planned(&only_doze, &running);
    assert_eq!(kinds(&plan), []);
    let message = plan.status.hibernated.unwrap().message;
    assert_eq!(message, "The sandbox is awake and does not doze: no swap");
    // A sandbox that cannot doze hibernates when that time has come.
    assert_steps(&idle_dozes(), &running, &[Pause, Checkpoint, Commit, End]);
}

#[test]
fn a_sandbox_sleeps_on_without_a_request_only_if_it_fell_asleep_by_itself() {
    use StepKind::*;
    let asleep = |by_itself| Observed {
        ledger: Ok(LedgerState::fold(&asleep_entries(by_itself))),
        ..hibernated()
    };
    assert_steps(&idle_hibernates(), &asleep(true), &[]);
    assert_steps(&idle_hibernates(), &asleep(false), &[Wake]);
    assert_steps(&desired(Power::Awake), &asleep(true), &[Wake]);
    let condition = planned(&idle_hibernates(), &asleep(true))
        .status
        .hibernated
        .unwrap();
    assert_eq!(
        condition.message,
        "The sandbox was idle and sleeps in image pod-a.1 until it is needed."
    );
    // The API requests the sleep that the sandbox began by itself. The end of that request then
    // wakes the sandbox.
    let asked = Desired {
        power: Power::Asleep,
        ..idle_hibernates()
    };
    let plan = planned(&asked, &asleep(true));
    assert_eq!(kinds(&plan), [Record]);
    assert_eq!(plan.steps[0].before, asleep_entries(false).pop());
    assert_steps(&asked, &asleep(false), &[]);
    // A wake that another process began is completed.
    let mut begun = asleep(true);
    let entries = [
        asleep_entries(true),
        vec![Entry::Waking { image: image(1) }],
    ]
    .concat();
    begun.ledger = Ok(LedgerState::fold(&entries));
    assert_steps(&idle_hibernates(), &begun, &[Wake]);
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
        ("idle", idle_hibernates(), by_itself(), Wake),
        ("dozing", idle_dozes(), dozes(), Resume),
    ] {
        let at = |wake_up: Option<Timestamp>| Desired {
            wake_up: wake_up.into_iter().collect(),
            ..desired.clone()
        };
        let sleeping = asleep_since(900, sleeping);
        assert_steps(&at(wake_at(1000)), &sleeping, &[step]);
        // The sandbox was awake at that time, or the time has not come yet.
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
    // The sandbox then counts as in use: for a moment if sleep is requested, and for as long as
    // after any use if it falls asleep by itself.
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
        ..idle_hibernates()
    };
    let since = idle_since(100, observed(Live::Running, &[], &[]));
    assert_steps(&idle, &since, &[]);
    assert_eq!(planned(&idle, &since).wake_at, Some(at(1050)));
}

#[test]
fn each_of_several_wake_times_is_kept() {
    let asleep_since = |second| Observed {
        ledger: Ok(LedgerState::fold(&asleep_entries(true))),
        asleep_since: Some(at(second)),
        ..hibernated()
    };
    // One time has come, and a later one is set.
    let both = Desired {
        wake_up: [at(1000), at(1500)].into(),
        ..idle_hibernates()
    };
    assert_steps(&both, &asleep_since(900), &[StepKind::Wake]);
    // The sandbox was awake at the first time and sleeps again; the other time is still to come.
    let again = planned(&both, &asleep_since(1000));
    assert_eq!((kinds(&again), again.wake_at), (vec![], Some(at(1500))));
    // The last of the times that have come counts, wherever it was written.
    let over = Desired {
        wake_up: [at(800), at(990)].into(),
        ..idle_hibernates()
    };
    assert_steps(&over, &asleep_since(900), &[StepKind::Wake]);
    assert_steps(&over, &asleep_since(995), &[]);
}

#[test]
fn the_clock_wakes_no_sandbox_that_is_frozen_or_being_suspended() {
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
fn a_sandbox_that_cannot_be_saved_runs_on_and_is_reported_and_seldom_tried_again() {
    let mut running = idle_since(0, observed(Live::Running, &[], &[]));
    save_failure(&mut running, 999);
    let plan = planned(&idle_hibernates(), &running);
    assert_eq!((kinds(&plan), plan.wake_at), (vec![], Some(at(1299))));
    let condition = plan.status.hibernated.unwrap();
    assert_eq!(condition.reason, "SaveFailed");
    assert!(
        condition.message.contains("DiskFull"),
        "{}",
        condition.message
    );
    assert!(
        condition.message.contains("from 1970-01-01T00:21:39Z"),
        "{}",
        condition.message
    );
    // The failure stays in the status while the sandbox is not idle.
    running.idle_since = Some(at(1000));
    let condition = planned(&idle_hibernates(), &running)
        .status
        .hibernated
        .unwrap();
    assert_eq!(condition.reason, "SaveFailed");
}

#[test]
fn a_sandbox_that_no_packet_would_wake_stays_awake_but_is_saved_on_request() {
    use StepKind::*;
    let unwatched = |second, observed| {
        let mut observed = idle_since(0, observed);
        save_failure(&mut observed, second);
        let failure = observed.failures.save.as_mut().unwrap();
        failure.reason = NOT_WATCHED.to_owned();
        observed
    };
    let running = || observed(Live::Running, &[], &[]);
    let plan = planned(&idle_hibernates(), &unwatched(990, running()));
    let until = at(1290);
    assert_eq!((kinds(&plan), plan.wake_at), (vec![], Some(until)));
    assert_eq!(plan.why, [Reason::Backoff { until }]);
    let condition = plan.status.hibernated.unwrap();
    assert_eq!(condition.reason, "SaveFailed");
    assert!(
        condition.message.contains(NOT_WATCHED),
        "{}",
        condition.message
    );
    // A sandbox that the failure left paused is resumed, whether it has an image already or not.
    let doze = |entries: &[Entry], held: &[u32]| {
        unwatched(990, dozing(false, observed(Live::Paused, entries, held)))
    };
    assert_steps(&idle_dozes(), &doze(&[], &[]), &[Resume]);
    assert_steps(&idle_dozes(), &doze(&committed(), &[1]), &[Resume]);
    // A request for an image, or for sleep, does not wait for as long.
    let mut kept = idle_hibernates();
    kept.snapshots = vec![snapshot("s", SnapshotReason::Manual)];
    let plan = planned(&kept, &unwatched(990, running()));
    assert_eq!(kinds(&plan), [Pause, Checkpoint, Commit, Resume]);
    assert!(!plan.sleeps_by_itself());
    let plan = planned(&desired(Power::Asleep), &unwatched(990, running()));
    assert_eq!(kinds(&plan), [Pause, Checkpoint, Commit, End]);
    assert!(!plan.sleeps_by_itself());
    // After the wait the sleep is tried again.
    let plan = planned(&idle_hibernates(), &unwatched(700, running()));
    assert_eq!(kinds(&plan), [Pause, Checkpoint, Commit, End]);
    assert!(plan.sleeps_by_itself());
    let half = idle_since(990, dozing(false, observed(Live::Paused, &[], &[])));
    for observed in [idle_since(990, running()), half] {
        let plan = planned(&idle_dozes(), &observed);
        assert!(plan.sleeps_by_itself(), "to doze, and to be saved then");
    }
}

#[test]
fn a_sandbox_asleep_on_request_that_no_packet_wakes_reports_this() {
    let asleep = Observed {
        not_watched: Some("no veth pair".into()),
        ..hibernated()
    };
    let condition = planned(&desired(Power::Asleep), &asleep).status.hibernated;
    assert_eq!(
        condition.unwrap().message,
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
    let plan = planned(&idle_hibernates(), &running);
    assert_eq!((kinds(&plan), plan.wake_at), (vec![], Some(at(1004))));
}

#[test]
fn a_sandbox_without_a_known_idle_time_stays_awake_and_reports_why() {
    let mut running = observed(Live::Running, &[], &[]);
    running.idle_known = Err("no BPF".into());
    let condition = planned(&idle_hibernates(), &running)
        .status
        .hibernated
        .unwrap();
    assert_eq!(condition.reason, "Awake");
    assert!(
        condition.message.ends_with("whether it is idle: no BPF"),
        "{}",
        condition.message
    );
    running.capable = Err("no runsc".into());
    let condition = planned(&idle_hibernates(), &running)
        .status
        .hibernated
        .unwrap();
    assert_eq!(condition.reason, "RuntimeNotCapable");
}

/// A restore ends the processes that exec left behind, a doze does not.
#[test]
fn processes_left_by_exec_keep_a_sandbox_from_hibernating_by_itself_but_not_from_dozing() {
    let left = |mut observed: Observed| {
        observed.left_by_exec = ["server", "a", "b", "c", "d", "e"]
            .map(str::to_owned)
            .to_vec();
        observed
    };
    let idle = left(idle_since(0, observed(Live::Running, &[], &[])));
    let plan = planned(&idle_hibernates(), &idle);
    assert_eq!(kinds(&plan), []);
    let condition = plan.status.hibernated.unwrap();
    assert_eq!(condition.reason, "Awake");
    assert!(
        condition
            .message
            .ends_with("would end (server, a, b, c, d and 1 more)."),
        "{}",
        condition.message
    );
    let mut dozing = idle_hibernates();
    dozing.sleep.doze = dozing.sleep.hibernate;
    assert_ne!(kinds(&planned(&dozing, &idle)), []);
    // The status of a requested hibernation names the processes that end.
    assert_ne!(kinds(&planned(&desired(Power::Asleep), &idle)), []);
    let condition = planned(&desired(Power::Asleep), &left(hibernated()))
        .status
        .hibernated
        .unwrap();
    assert_eq!(
        condition.message,
        "The sandbox sleeps in image pod-a.1. Hibernation ends the processes that kubectl exec left behind: server, a, b, c, d and 1 more."
    );
}
