//! Memory of a Pod that is gone: kept for a snapshot that claims it, or given up.

use super::*;

fn departed(change: impl FnOnce(&mut Departure)) -> Desired {
    let mut desired = gone();
    change(desired.departure.as_mut().unwrap());
    desired
}

fn discards(plan: &Plan) -> bool {
    kinds(plan).contains(&StepKind::DiscardImage)
}

/// Returns whether the image is given up before its grace time ends; `None`: the image is kept.
fn given_up(plan: &Plan) -> Option<bool> {
    plan.why.iter().find_map(|reason| match reason {
        Reason::GivenUp { disk_short, .. } => Some(*disk_short),
        _ => None,
    })
}

fn answered(has_pod: bool, snapshots: &[&str]) -> Option<Answer> {
    let snapshots = snapshots.iter().map(|uid| SnapshotUid::new(*uid).unwrap());
    Some(Answer {
        has_pod,
        snapshots: snapshots.collect(),
        deleting: BTreeSet::new(),
    })
}

#[test]
fn the_memory_of_an_evicted_pod_waits_for_a_snapshot_until_its_grace_time_is_over() {
    let since = |second| departed(|departure| departure.since = at(second));
    let asleep = left(&asleep(), &[1]);
    let waits = planned(&since(900), &asleep);
    assert_eq!(kinds(&waits), [], "{:?}", waits.why);
    assert!(!waits.asks, "nobody has to know yet");
    assert_eq!(waits.wake_at, Some(at(1500)));
    assert_eq!(waits.status.left, Some(image(1)));
    let over = planned(&since(400), &asleep);
    assert_eq!(
        kinds(&over),
        [StepKind::DiscardImage, StepKind::DiscardLedger]
    );
    assert_eq!(given_up(&over), Some(false));
}

#[test]
fn a_sandbox_that_never_ran_has_no_memory_to_wait_for() {
    let since = departed(|departure| departure.since = at(999));
    let golden = asleep()[1..].to_vec();
    let plan = planned(&since, &left(&golden, &[1]));
    assert_eq!(
        kinds(&plan),
        [StepKind::DiscardImage, StepKind::DiscardLedger]
    );
    assert_eq!((given_up(&plan), plan.status.left), (None, None));
    // The apiserver confirms that no snapshot has the image.
    let unasked = departed_with(&since, None);
    let plan = planned(&unasked, &left(&golden, &[1]));
    assert!(plan.asks && kinds(&plan).is_empty(), "{:?}", plan.why);
    // It woke, and slept again in the same image.
    let waking = Entry::Waking { image: image(1) };
    let woken = [golden.clone(), vec![waking], golden].concat();
    assert!(!discards(&planned(&since, &left(&woken, &[1]))));
}

#[test]
fn memory_has_no_grace_time_if_a_user_deleted_it_or_the_disk_is_short() {
    let now = |change: fn(&mut Departure)| {
        let desired = departed(|departure| {
            departure.since = at(999);
            change(departure);
        });
        planned(&desired, &left(&asleep(), &[1]))
    };
    let by_user = now(|departure| departure.by_user = true);
    assert!(discards(&by_user));
    assert_eq!(given_up(&by_user), None, "nobody has lost anything");
    let short = now(|departure| departure.disk_short = true);
    assert!(discards(&short));
    assert_eq!(given_up(&short), Some(true));
    assert!(!discards(&now(|_| {})));
    // A snapshot that had the image is deleted, so its bytes go, too.
    let mut deleted = departed(|departure| departure.since = at(999));
    deleted.snapshots = vec![snapshot("s", SnapshotReason::Suspend)];
    deleted.snapshots[0].image = Some(image(1));
    deleted.snapshots[0].wish = SnapshotWish::Delete;
    let with = |answer| planned(&departed_with(&deleted, answer), &left(&asleep(), &[1]));
    assert!(with(None).asks, "the watch may be behind");
    let mut answer = Answer::default();
    let let_go_before = with(Some(answer.clone()));
    assert!(!discards(&let_go_before), "{:?}", let_go_before.why);
    answer.deleting = [SnapshotUid::new("s").unwrap()].into();
    let plan = with(Some(answer));
    assert!(discards(&plan), "{:?}", plan.why);
    assert_eq!(given_up(&plan), None);
}

#[test]
fn the_apiserver_is_asked_before_an_image_of_a_gone_pod_is_removed() {
    let with = |answer| departed_with(&gone(), answer);
    let awake = [
        asleep(),
        vec![Entry::Waking { image: image(1) }, Entry::Awake],
    ]
    .concat();
    for there in [left(&asleep(), &[1]), left(&awake, &[1])] {
        let unasked = planned(&with(None), &there);
        assert!(unasked.asks && !discards(&unasked), "{:?}", unasked.why);
        for (has_pod, snapshots) in [(true, &[][..]), (false, &["s"])] {
            let behind = planned(&with(answered(has_pod, snapshots)), &there);
            assert!(!behind.asks && !discards(&behind), "{:?}", behind.why);
            assert_eq!(kinds(&behind), [], "the ledger stays too");
            assert_eq!(behind.wake_at, Some(at(1005)));
        }
        assert!(discards(&planned(&with(answered(false, &[])), &there)));
    }
    // The watch shows the snapshot now, and its image is another one.
    let mut shown = with(answered(false, &["s"]));
    shown.snapshots = vec![snapshot("s", SnapshotReason::Manual)];
    shown.snapshots[0].image = Some(image(2));
    assert!(discards(&planned(&shown, &left(&awake, &[1, 2]))));
    // Without a departure nothing goes.
    let mut unknown = gone();
    unknown.departure = None;
    let plan = planned(&unknown, &left(&asleep(), &[1]));
    assert_eq!((kinds(&plan), plan.asks), (vec![], false));
}

#[test]
fn a_whole_image_is_not_removed_before_the_nodes_records_of_its_sandbox() {
    let by_user = departed(|departure| departure.by_user = true);
    for there in [hibernated(), observed(Live::None, &asleep(), &[1, 2])] {
        let plan = planned(&by_user, &there);
        assert_eq!((kinds(&plan), plan.asks), (vec![], false));
    }
}

#[test]
fn a_snapshot_that_comes_after_its_pod_has_gone_claims_the_memory() {
    let mut late = departed_with(&gone(), None);
    late.snapshots = vec![snapshot("s", SnapshotReason::Suspend)];
    for there in [left(&asleep(), &[1]), hibernated()] {
        let plan = planned(&late, &there);
        assert_eq!(kinds(&plan), [StepKind::Record], "{:?}", plan.why);
        assert_eq!(plan.status.snapshots[0].state, SnapshotState::Saving);
    }
    let adopted = Entry::Adopted {
        image: image(1),
        snapshots: [SnapshotUid::new("s").unwrap()].into(),
    };
    let claimed = left(&[asleep(), vec![adopted]].concat(), &[1]);
    let plan = planned(&late, &claimed);
    assert_eq!((kinds(&plan), plan.asks), (vec![], false));
    assert_eq!(plan.status.left, None, "the controller has it");
    let state = &plan.status.snapshots[0].state;
    assert!(
        matches!(state, SnapshotState::Committed { stale: false, .. }),
        "{state:?}"
    );
    // A claim that cannot be recorded yet is waited for, whatever the time.
    let mut full = left(&asleep(), &[1]);
    let mut failures = Failures::default();
    let failed = Outcome::Failed {
        reason: "DiskFull".into(),
        message: "no room".into(),
    };
    failures.note(&Action::Record, &failed, at(1000));
    full.failures = failures;
    let plan = planned(&departed_with(&late, answered(false, &["s"])), &full);
    assert_eq!(kinds(&plan), [], "{:?}", plan.why);
    let state = &plan.status.snapshots[0].state;
    assert!(matches!(state, SnapshotState::Pending { .. }), "{state:?}");
    // A sandbox that ran on has left no memory to claim.
    let awake = [
        asleep(),
        vec![Entry::Waking { image: image(1) }, Entry::Awake],
    ]
    .concat();
    let state = &planned(&late, &left(&awake, &[1])).status.snapshots[0].state;
    assert!(
        matches!(state, SnapshotState::Failed { reason, .. } if reason == "SandboxNotFound"),
        "{state:?}"
    );
}

fn departed_with(desired: &Desired, answer: Option<Answer>) -> Desired {
    let mut desired = desired.clone();
    desired.answer = answer;
    desired
}

#[test]
fn memory_that_another_pod_went_on_with_is_not_waited_for() {
    let mut taken = left(&asleep(), &[1]);
    taken.images[0].consumed_by = Some(PodUid::new("pod-b").unwrap());
    let plan = planned(&departed(|departure| departure.since = at(999)), &taken);
    assert!(discards(&plan), "{:?}", plan.why);
    assert_eq!((given_up(&plan), plan.status.left), (None, None));
}

#[test]
fn a_ledger_whose_image_cannot_be_found_at_the_moment_stays_as_long_as_its_image_would() {
    let since = |second| departed(|departure| departure.since = at(second));
    let hidden = left(&asleep(), &[]);
    assert_eq!(kinds(&planned(&since(900), &hidden)), []);
    assert_steps(&since(400), &hidden, &[StepKind::DiscardLedger]);
}

/// The Pod's Suspend snapshot has an older image, and the save of the newest memory was cut off
/// before the ledger recorded that it was whole.
#[test]
fn a_suspend_snapshot_of_an_older_image_gets_the_memory_of_a_pod_that_is_gone() {
    let mut claimed = departed(|departure| departure.since = at(1));
    let mut suspend = snapshot("s-1", SnapshotReason::Suspend);
    suspend.image = Some(image(1));
    claimed.snapshots = vec![suspend];
    let entries = [
        vec![Entry::Saving {
            image: image(1),
            snapshots: [SnapshotUid::new("s-1").unwrap()].into(),
        }],
        vec![Entry::Committed { image: image(1) }, Entry::Awake],
        vec![saving(2)],
    ]
    .concat();
    let plan = planned(&claimed, &left(&entries, &[1, 2]));
    assert_eq!(kinds(&plan), [StepKind::Commit, StepKind::Record]);
    let adopted = Entry::Adopted {
        image: image(2),
        snapshots: [SnapshotUid::new("s-1").unwrap()].into(),
    };
    assert_eq!(plan.steps[1].before, Some(adopted));

    let mut failed = left(&entries, &[1, 2]);
    save_failure(&mut failed, 999);
    let waits = planned(&claimed, &failed);
    assert_eq!(kinds(&waits), [], "{:?}", waits.why);
    assert!(waits.wake_at.is_some_and(|then| then > at(1000)));
}
