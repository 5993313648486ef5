use std::collections::BTreeSet;

use super::*;
use crate::ids::{ContainerName, PodUid, SandboxId, SnapshotUid};
use crate::ledger::LedgerState;
use crate::pressure::Pressure;
use crate::state::{
    Answer, Departure, Doze, Failures, ImageObserved, ImageState, Record, SleepAfter,
    SnapshotIntent, SnapshotReason, SnapshotWish,
};
use crate::status::{Phase, SnapshotState, Truth};
use crate::steps::{Outcome, StepKind};

mod bind;
mod capacity;
mod failures;
mod gone;
mod impossible;
mod sleep;
mod snapshots;
mod unsaved;

fn uid() -> PodUid {
    PodUid::new("pod-a").unwrap()
}

fn image(number: u32) -> ImageId {
    ImageId::new(uid(), number).unwrap()
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn desired(power: Power) -> Desired {
    Desired {
        pod_uid: uid(),
        pod: PodPresence::Present,
        departure: None,
        answer: None,
        power,
        sleep: SleepAfter::default(),
        pressure: Pressure::default(),
        evicted: false,
        keep_last_image: false,
        wake_up: BTreeSet::new(),
        snapshots: Vec::new(),
        claim: None,
        has_sleep_condition: false,
        containers: BTreeSet::new(),
        ready: true,
    }
}

/// A Pod that was evicted long ago and that the apiserver does not have any more.
fn gone() -> Desired {
    let departure = Departure {
        since: at(0),
        by_user: false,
        disk_short: false,
    };
    Desired {
        answer: Some(Answer::default()),
        pod: PodPresence::Gone,
        departure: Some(departure),
        ..desired(Power::Awake)
    }
}

/// A node that has the images and the ledger of a Pod, and its sandbox no more.
fn left(entries: &[Entry], held: &[u32]) -> Observed {
    Observed {
        sandbox: None,
        ..observed(Live::None, entries, held)
    }
}

#[test]
fn the_sleep_condition_of_a_former_agent_is_kept_up_to_date() {
    let awake = desired(Power::Awake);
    let never = planned(&awake, &observed(Live::Running, &[], &[]));
    assert_eq!(
        never.status.hibernated, None,
        "nobody asked about its sleep"
    );
    let with_condition = Desired {
        has_sleep_condition: true,
        ..awake
    };
    let plan = planned(&with_condition, &observed(Live::Running, &[], &[]));
    assert_eq!(plan.status.hibernated.unwrap().reason, "Awake");
}

#[test]
fn a_save_waits_for_containers_that_the_kubelet_restarts() {
    let name = |name: &str| ContainerName::new(name).expect("a name");
    let asked = Desired {
        containers: [name("a"), name("b")].into(),
        ..desired(Power::Asleep)
    };
    for (there, saves) in [
        (vec![], false),
        (vec!["a"], false),
        (vec!["b", "a", "c"], true),
    ] {
        let observed = Observed {
            containers: there.iter().map(|one| name(one)).collect(),
            ..observed(Live::Running, &[], &[])
        };
        let plan = planned(&asked, &observed);
        assert_eq!(!plan.steps.is_empty(), saves, "{there:?}");
        assert_eq!(plan.why.contains(&Reason::AwaitingContainers), !saves);
        assert!(saves || plan.wake_at.is_some(), "it looks again");
    }

    let mut suspended = asked;
    suspended.snapshots = vec![snapshot("s", SnapshotReason::Suspend)];
    let observed = Observed {
        containers: [name("a")].into(),
        ..observed(Live::Running, &[], &[])
    };
    let state = &planned(&suspended, &observed).status.snapshots[0].state;
    let SnapshotState::Pending { message } = state else {
        panic!("{state:?}");
    };
    assert!(message.contains("container \"b\""), "{message}");
}

#[test]
fn a_sandbox_is_not_saved_while_a_debug_container_runs() {
    let debugged = Observed {
        added: Some(ContainerName::new("debugger").expect("a name")),
        ..observed(Live::Running, &[], &[])
    };
    let mut suspended = desired(Power::Asleep);
    suspended.snapshots = vec![snapshot("s", SnapshotReason::Suspend)];
    for asked in [desired(Power::Asleep), suspended] {
        let plan = planned(&asked, &debugged);
        assert_eq!(plan.steps, [], "it is not even paused");
        assert!(plan.wake_at.is_some(), "it looks again");
        let message = plan.status.hibernated.expect("told").message;
        assert!(
            message.contains("\"debugger\"") && message.contains("kubectl debug"),
            "{message}"
        );
        for snapshot in plan.status.snapshots {
            let SnapshotState::Pending { message } = snapshot.state else {
                panic!("{snapshot:?}");
            };
            assert!(message.contains("\"debugger\""), "{message}");
        }
        let ended = Observed {
            added: None,
            ..debugged.clone()
        };
        assert!(!planned(&asked, &ended).steps.is_empty());
    }
}

/// A sandbox that is to run, and to hibernate once it has been idle for 100 seconds.
fn idle_hibernates() -> Desired {
    let sleep = SleepAfter {
        doze: None,
        hibernate: Some(std::time::Duration::from_secs(100)),
    };
    Desired {
        sleep,
        ..desired(Power::Awake)
    }
}

fn idle_since(second: i64, observed: Observed) -> Observed {
    Observed {
        idle_since: Some(at(second)),
        ..observed
    }
}

fn snapshot(name: &str, reason: SnapshotReason) -> SnapshotIntent {
    SnapshotIntent {
        uid: SnapshotUid::new(name).unwrap(),
        name: format!("default/{name}"),
        pod_uid: uid(),
        reason,
        image: None,
        wish: SnapshotWish::Keep,
    }
}

/// A sandbox in state `live`, with these ledger entries and these images whole in the store.
fn observed(live: Live, entries: &[Entry], held: &[u32]) -> Observed {
    let whole = |number: &u32| ImageObserved {
        id: image(*number),
        state: ImageState::Committed,
        consumed_by: None,
        being_restored: false,
    };
    Observed {
        sandbox: Some(SandboxId::new("5".repeat(64)).unwrap()),
        live,
        ledger: Ok(LedgerState::fold(entries)),
        images: held.iter().map(whole).collect(),
        ..Observed::nothing()
    }
}

fn saving(number: u32) -> Entry {
    Entry::Saving {
        image: image(number),
        snapshots: BTreeSet::new(),
    }
}

fn committed() -> Vec<Entry> {
    vec![saving(1), Entry::Committed { image: image(1) }]
}

fn asleep() -> Vec<Entry> {
    asleep_entries(false)
}

fn asleep_entries(by_itself: bool) -> Vec<Entry> {
    let image = image(1);
    [committed(), vec![Entry::Asleep { image, by_itself }]].concat()
}

fn hibernated() -> Observed {
    let mut observed = observed(Live::None, &asleep(), &[1]);
    observed.record = Some(Record { image: image(1) });
    observed
}

fn planned(desired: &Desired, observed: &Observed) -> Plan {
    plan(desired, observed, &Policy::default(), at(1000))
}

fn kinds(plan: &Plan) -> Vec<StepKind> {
    plan.steps.iter().map(|step| step.action.kind()).collect()
}

#[track_caller]
fn assert_steps(desired: &Desired, observed: &Observed, expected: &[StepKind]) {
    let plan = planned(desired, observed);
    assert_eq!(kinds(&plan), expected, "why: {:?}", plan.why);
}

fn save_failure(observed: &mut Observed, second: i64) {
    let failed = Outcome::Failed {
        reason: "DiskFull".into(),
        message: "no room".into(),
    };
    let mut failures = Failures::default();
    failures.note(&Action::Checkpoint { image: image(1) }, &failed, at(second));
    observed.failures = failures;
}

#[test]
fn a_sandbox_is_saved_before_its_end_and_each_step_is_fenced() {
    let plan = planned(&desired(Power::Asleep), &observed(Live::Running, &[], &[]));
    let steps: Vec<_> = (plan.steps.iter())
        .map(|s| {
            (
                s.action.kind(),
                s.fence.ledger_seq,
                s.before.clone(),
                s.after.clone(),
            )
        })
        .collect();
    let done = Entry::Committed { image: image(1) };
    let sleep = Entry::Asleep {
        image: image(1),
        by_itself: false,
    };
    assert_eq!(
        steps,
        [
            (StepKind::Pause, 0, None, None),
            (StepKind::Checkpoint, 0, Some(saving(1)), None),
            (StepKind::Commit, 1, None, Some(done)),
            (StepKind::End, 2, Some(sleep), None),
        ]
    );
    assert!(
        plan.steps
            .iter()
            .all(|s| s.fence.sandbox_id.is_some() && s.fence.pod_uid == uid())
    );
    assert_eq!(plan.status.phase, Phase::Saving);
}

#[test]
fn each_state_has_its_next_steps() {
    use StepKind::*;
    let (awake, sleep, freeze) = (
        desired(Power::Awake),
        desired(Power::Asleep),
        desired(Power::Frozen),
    );
    let running = observed(Live::Running, &[], &[]);
    let paused = observed(Live::Paused, &[], &[]);
    let saved = observed(Live::Paused, &committed(), &[1]);
    let unrecorded = observed(Live::Paused, &[saving(1)], &[1]);
    let ending = observed(Live::Paused, &asleep(), &[1]);
    let rebooted = observed(Live::None, &asleep(), &[1]);
    let nothing = observed(Live::None, &[], &[]);
    for (desired, observed, steps) in [
        (&awake, &running, &[][..]),
        (&freeze, &running, &[Freeze]),
        (&awake, &paused, &[Resume]),
        (&freeze, &paused, &[]),
        (&sleep, &paused, &[Checkpoint, Commit, End]),
        (&awake, &saved, &[Resume]),
        (&freeze, &saved, &[]),
        (&sleep, &saved, &[End]),
        (&awake, &unrecorded, &[Commit, Resume]),
        (&sleep, &unrecorded, &[Commit, End]),
        (&sleep, &ending, &[End]),
        (&awake, &ending, &[Resume]),
        (&awake, &hibernated(), &[Wake]),
        (&sleep, &hibernated(), &[]),
        (&freeze, &hibernated(), &[]),
        (&awake, &rebooted, &[]),
        (&sleep, &rebooted, &[]),
        (&sleep, &nothing, &[]),
    ] {
        assert_steps(desired, observed, steps);
    }
}

#[test]
fn no_step_is_planned_while_another_process_acts_or_the_state_is_unknown() {
    for (reason, change) in [
        (Reason::Busy, (|o| o.busy = true) as fn(&mut Observed)),
        (Reason::LiveUnknown, |o| o.live = Live::Unknown),
        (Reason::Restoring, |o| o.restore = Restore::InProgress),
    ] {
        let mut observed = observed(Live::Running, &[], &[]);
        change(&mut observed);
        let plan = planned(&desired(Power::Asleep), &observed);
        assert_eq!((plan.steps, plan.why), (Vec::new(), vec![reason]));
        assert!(plan.wake_at.is_some());
    }
}

#[test]
fn a_sandbox_is_never_left_standing_while_a_save_waits_after_a_failure() {
    let mut paused = observed(Live::Paused, &[saving(1)], &[]);
    paused.images.push(ImageObserved {
        id: image(1),
        state: ImageState::Partial,
        consumed_by: None,
        being_restored: false,
    });
    save_failure(&mut paused, 999);
    let plan = planned(&desired(Power::Asleep), &paused);
    assert_eq!(kinds(&plan), [StepKind::Resume, StepKind::DiscardPartial]);
    assert_eq!(plan.steps[0].before, None, "must work on a full disk");
    assert_eq!(plan.wake_at, Some(at(1004)));
    let condition = plan.status.hibernated.unwrap();
    assert_eq!(
        (condition.status, condition.reason.as_str()),
        (Truth::False, "SaveFailed")
    );
    assert_eq!(
        condition.message,
        "Checkpoint failed (DiskFull, attempt 1): no room. Nothing was lost; next attempt from 1970-01-01T00:16:44Z."
    );
    // The wait is over: the sandbox is saved again, under a new image name.
    save_failure(&mut paused, 900);
    let plan = planned(&desired(Power::Asleep), &paused);
    assert_eq!(plan.steps[1].action, Action::Checkpoint { image: image(2) });
}

/// A sandbox that is to doze after 10 idle seconds and to hibernate after 100.
fn idle_dozes() -> Desired {
    let mut desired = idle_hibernates();
    desired.sleep.doze = Some(std::time::Duration::from_secs(10));
    desired
}

fn dozing(reclaimed: bool, observed: Observed) -> Observed {
    Observed {
        doze: Some(Doze { reclaimed }),
        ..observed
    }
}

#[test]
fn a_dozing_sandbox_hibernates_when_it_is_evicted_and_wakes_when_its_pod_is_deleted() {
    let dozes = |reclaimed| dozing(reclaimed, observed(Live::Paused, &committed(), &[1]));
    for pod in [PodPresence::Present, PodPresence::Terminating] {
        let evicted = Desired {
            pod,
            evicted: true,
            ..idle_dozes()
        };
        assert_steps(&evicted, &dozes(false), &[StepKind::End]);
        assert_steps(&evicted, &dozes(true), &[StepKind::End]);
    }
    let deleted = Desired {
        pod: PodPresence::Terminating,
        ..idle_dozes()
    };
    assert_steps(&deleted, &dozes(true), &[StepKind::Resume]);
    // An evicted sandbox sleeps on, even if it may only doze.
    let mut dozer = idle_dozes();
    dozer.sleep.hibernate = None;
    let mut asleep = observed(Live::None, &asleep_entries(true), &[1]);
    asleep.record = Some(Record { image: image(1) });
    assert_steps(&dozer, &asleep, &[StepKind::Wake]);
    dozer.evicted = true;
    assert_steps(&dozer, &asleep, &[]);
}

#[test]
fn waiting_times_double_up_to_a_limit() {
    let mut failures = Failures::default();
    let action = Action::Checkpoint { image: image(1) };
    let waits: Vec<_> = (0..9)
        .map(|_| {
            let failed = Outcome::Unknown {
                message: "timeout".into(),
            };
            failures.note(&action, &failed, at(0));
            let policy = Policy::default();
            let failure = failures.save.clone().unwrap();
            failure
                .retry_at(policy.save_backoff_min, policy.save_backoff_max)
                .as_second()
        })
        .collect();
    assert_eq!(waits, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
    failures.note(&action, &Outcome::Stale, at(0));
    assert_eq!(
        failures.save.as_ref().unwrap().count,
        9,
        "a stale plan is nobody's failure"
    );
    failures.note(&Action::Commit { image: image(1) }, &Outcome::Done, at(0));
    assert_eq!(failures, Failures::default());
}

#[test]
fn a_running_sandbox_makes_its_image_stale_before_anything_else() {
    let unfinished = [asleep(), vec![Entry::Waking { image: image(1) }]].concat();
    for entries in [vec![saving(1)], committed(), asleep(), unfinished] {
        let plan = planned(
            &desired(Power::Asleep),
            &observed(Live::Running, &entries, &[1]),
        );
        assert_eq!(kinds(&plan), [StepKind::Record]);
        assert_eq!(plan.steps[0].before, Some(Entry::Awake));
    }
}

#[test]
fn a_sandbox_whose_end_was_begun_is_ended_and_never_resumed() {
    let unfinished = [asleep(), vec![Entry::Waking { image: image(1) }]].concat();
    for entries in [committed(), asleep(), unfinished] {
        for power in [Power::Awake, Power::Frozen, Power::Asleep] {
            let mut observed = observed(Live::Paused, &entries, &[1]);
            observed.record = Some(Record { image: image(1) });
            let plan = planned(&desired(power), &observed);
            assert_eq!(kinds(&plan), [StepKind::End], "{power:?}, {entries:?}");
        }
    }
}

#[test]
fn a_note_in_run_that_the_ledger_contradicts_is_dropped_and_nothing_is_woken() {
    let awake = [asleep(), vec![Entry::Awake]].concat();
    for live in [Live::None, Live::Running] {
        let mut observed = observed(live, &awake, &[1]);
        observed.record = Some(Record { image: image(1) });
        let plan = planned(&desired(Power::Awake), &observed);
        assert_eq!(
            kinds(&plan),
            [StepKind::ForgetSleep, StepKind::DiscardImage]
        );
    }
}

#[test]
fn a_failed_wake_is_tried_again_after_a_wait_and_reported_meanwhile() {
    let mut observed = hibernated();
    let failed = Outcome::Failed {
        reason: "FingerprintMismatch".into(),
        message: "other runsc".into(),
    };
    observed
        .failures
        .note(&Action::Wake { image: image(1) }, &failed, at(1000));
    let plan = planned(&desired(Power::Awake), &observed);
    assert_eq!((kinds(&plan), plan.wake_at), (vec![], Some(at(1001))));
    let restored = plan.status.restored.unwrap();
    assert_eq!(restored.reason, "FingerprintMismatch");
    assert_eq!(plan.status.phase, Phase::Hibernated { image: image(1) });
    assert_eq!(plan.status.hibernated.unwrap().status, Truth::True);
}

#[test]
fn a_wake_that_a_revoked_build_forbids_is_reported_and_its_image_stays() {
    let mut observed = hibernated();
    let failed = Outcome::Failed {
        reason: "RunscRevoked".into(),
        message: "the build is revoked".into(),
    };
    observed
        .failures
        .note(&Action::Wake { image: image(1) }, &failed, at(1000));
    let plan = planned(&desired(Power::Awake), &observed);
    let restored = plan.status.restored.unwrap();
    assert_eq!(restored.reason, "RunscRevoked");
    assert_eq!(plan.status.phase, Phase::Hibernated { image: image(1) });
}

#[test]
fn a_missing_image_is_reported_and_no_wake_begins() {
    let mut observed = hibernated();
    observed.images.clear();
    let plan = planned(&desired(Power::Awake), &observed);
    assert_eq!(kinds(&plan), []);
    assert_eq!(plan.status.restored.unwrap().reason, "ImageMissing");
    assert!(matches!(plan.status.phase, Phase::Failed { .. }));
}

#[test]
fn sessions_and_a_recent_wake_hold_off_hibernation_but_not_suspend() {
    let mut busy = observed(Live::Running, &[], &[]);
    busy.sessions = 1;
    assert_steps(&desired(Power::Asleep), &busy, &[]);
    let mut woken = observed(Live::Running, &[], &[]);
    woken.awake_since = Some(at(995));
    let plan = planned(&desired(Power::Asleep), &woken);
    assert_eq!((kinds(&plan), plan.wake_at), (vec![], Some(at(1005))));
    let mut suspend = desired(Power::Awake);
    suspend
        .snapshots
        .push(snapshot("s-1", SnapshotReason::Suspend));
    busy.awake_since = Some(at(995));
    let steps = [
        StepKind::Pause,
        StepKind::Checkpoint,
        StepKind::Commit,
        StepKind::End,
    ];
    assert_steps(&suspend, &busy, &steps);
}

#[test]
fn a_pod_being_deleted_begins_no_sleep_or_wake_but_completes_a_begun_sleep() {
    let mut suspend = desired(Power::Awake);
    suspend.pod = PodPresence::Terminating;
    assert_steps(&suspend, &hibernated(), &[]);
    suspend
        .snapshots
        .push(snapshot("s-1", SnapshotReason::Suspend));
    assert_steps(&suspend, &observed(Live::Running, &[], &[]), &[]);
    let plan = planned(&suspend, &observed(Live::Paused, &committed(), &[1]));
    assert_eq!(kinds(&plan), [StepKind::Record, StepKind::End]);
}

#[test]
fn a_runtime_that_cannot_save_is_reported_and_its_sandbox_is_left_alone() {
    let mut observed = observed(Live::Running, &[], &[]);
    observed.capable = Err("runsc has no checkpoint".into());
    let mut suspend = desired(Power::Awake);
    suspend
        .snapshots
        .push(snapshot("s-1", SnapshotReason::Suspend));
    let plan = planned(&suspend, &observed);
    assert_eq!(kinds(&plan), []);
    assert_eq!(plan.status.hibernated.unwrap().reason, "RuntimeNotCapable");
    let state = &plan.status.snapshots[0].state;
    assert!(matches!(state, SnapshotState::Failed { reason, .. } if reason == "RuntimeNotCapable"));
}

#[test]
fn a_pod_without_a_sleep_request_has_no_conditions() {
    let plan = planned(&desired(Power::Awake), &observed(Live::Running, &[], &[]));
    assert_eq!((plan.status.hibernated, plan.status.restored), (None, None));
}

#[test]
fn on_a_corrupt_ledger_nothing_is_saved_woken_or_removed_but_a_paused_sandbox_goes_on() {
    for (live, steps) in [
        (Live::None, &[][..]),
        (Live::Running, &[]),
        (Live::Paused, &[StepKind::Resume]),
    ] {
        let mut observed = observed(live, &[], &[1]);
        observed.ledger = Err("checksum".into());
        observed.record = Some(Record { image: image(1) });
        assert_steps(&desired(Power::Asleep), &observed, steps);
        let plan = planned(&desired(Power::Asleep), &observed);
        assert!(matches!(plan.status.phase, Phase::Failed { .. }));
    }
}

#[test]
fn when_the_image_numbers_are_used_up_nothing_is_saved() {
    let plan = planned(&desired(Power::Asleep), &observed(Live::Running, &[], &[]));
    assert!(!plan.steps.is_empty());
    let last = [saving(u32::MAX), Entry::Awake];
    let plan = planned(
        &desired(Power::Asleep),
        &observed(Live::Running, &last, &[]),
    );
    assert_eq!(
        (kinds(&plan), plan.why),
        (vec![], vec![Reason::NumbersExhausted])
    );
}

#[test]
fn an_image_is_not_removed_while_a_pod_is_restored_from_it() {
    let mut left = left(&asleep(), &[1]);
    left.images[0].being_restored = true;
    let desired = gone();
    let waiting = planned(&desired, &left);
    assert_eq!(kinds(&waiting), [], "{:?}", waiting.why);
    assert!(waiting.wake_at.is_some(), "it has to look again");
    left.images[0].being_restored = false;
    assert_steps(
        &desired,
        &left,
        &[StepKind::DiscardImage, StepKind::DiscardLedger],
    );
}
