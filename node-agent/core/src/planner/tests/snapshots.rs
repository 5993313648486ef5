//! Snapshots: taken, committed, deleted.

use super::*;

#[test]
fn a_manual_snapshot_leaves_the_sandbox_as_it_was() {
    use StepKind::*;
    let with = |power| {
        let mut desired = desired(power);
        desired
            .snapshots
            .push(snapshot("s-1", SnapshotReason::Manual));
        desired
    };
    let running = observed(Live::Running, &[], &[]);
    assert_steps(
        &with(Power::Awake),
        &running,
        &[Pause, Checkpoint, Commit, Resume],
    );
    let frozen = observed(Live::Paused, &[], &[]);
    assert_steps(&with(Power::Frozen), &frozen, &[Checkpoint, Commit]);
    // No packet that arrives from now on may reach the sandbox: its image would not contain it.
    assert_steps(&with(Power::Frozen), &running, &[Pause, Checkpoint, Commit]);
    let plan = planned(&with(Power::Asleep), &hibernated());
    let adopted = Entry::Adopted {
        image: image(1),
        snapshots: [SnapshotUid::new("s-1").unwrap()].into(),
    };
    assert_eq!(kinds(&plan), [Record]);
    assert_eq!(plan.steps[0].before, Some(adopted));
}

#[test]
fn a_suspend_snapshot_is_committed_only_once_the_sandbox_sleeps_in_it() {
    let mut suspend = desired(Power::Awake);
    suspend
        .snapshots
        .push(snapshot("s-1", SnapshotReason::Suspend));
    let uid = suspend.snapshots[0].uid.clone();
    let mut entries = vec![Entry::Saving {
        image: image(1),
        snapshots: [uid].into(),
    }];
    entries.push(Entry::Committed { image: image(1) });
    let paused = observed(Live::Paused, &entries, &[1]);
    let plan = planned(&suspend, &paused);
    assert_eq!(
        (kinds(&plan), &plan.status.snapshots[0].state),
        (vec![StepKind::End], &SnapshotState::Saving)
    );
    entries.push(Entry::Asleep {
        image: image(1),
        by_itself: false,
    });
    let asleep = observed(Live::None, &entries, &[1]);
    let expected = SnapshotState::Committed {
        image: image(1),
        consumed_by: None,
        stale: false,
    };
    assert_eq!(
        planned(&suspend, &asleep).status.snapshots[0].state,
        expected
    );
    // The process that holds the lock may be restoring the sandbox. The Pod must not be deleted
    // then because of the image.
    let busy = Observed {
        busy: true,
        ..asleep
    };
    let state = &planned(&suspend, &busy).status.snapshots[0].state;
    assert!(
        !matches!(state, SnapshotState::Committed { .. }),
        "{state:?}"
    );
    // A caller woke the sandbox before the Pod was deleted: the image is stale, and a new one is
    // needed.
    entries.extend([Entry::Waking { image: image(1) }, Entry::Awake]);
    suspend.snapshots[0].image = Some(image(1));
    let plan = planned(&suspend, &observed(Live::Running, &entries, &[1]));
    assert_eq!(plan.steps[1].action, Action::Checkpoint { image: image(2) });
    assert_eq!(plan.status.snapshots[0].state, SnapshotState::Saving);
}

#[test]
fn a_deleted_snapshot_wakes_its_sandbox_before_its_image_goes() {
    let mut desired = desired(Power::Awake);
    desired
        .snapshots
        .push(snapshot("s-1", SnapshotReason::Suspend));
    desired.snapshots[0].wish = SnapshotWish::Delete;
    desired.snapshots[0].image = Some(image(1));
    desired.answer = answered(true);
    let plan = planned(&desired, &hibernated());
    assert_eq!(kinds(&plan), [StepKind::Wake]);
    assert_eq!(plan.status.snapshots[0].state, SnapshotState::Releasing);
    let awake = [
        asleep(),
        vec![Entry::Waking { image: image(1) }, Entry::Awake],
    ]
    .concat();
    assert_steps(
        &desired,
        &observed(Live::Running, &awake, &[1]),
        &[StepKind::DiscardImage],
    );
    let gone = planned(&desired, &observed(Live::Running, &awake, &[]));
    assert_eq!(gone.status.snapshots[0].state, SnapshotState::Released);
    // While sleep is wanted, the bytes stay as the sandbox's own; the snapshot may go.
    desired.power = Power::Asleep;
    let plan = planned(&desired, &hibernated());
    assert_eq!(
        (kinds(&plan), &plan.status.snapshots[0].state),
        (vec![], &SnapshotState::Released)
    );
}

fn answered(has_pod: bool) -> Option<Answer> {
    Some(Answer {
        has_pod,
        ..Answer::default()
    })
}

/// A node that was cut off sees the end of a snapshot first, and then that of its Pod.
#[test]
fn a_sandbox_that_may_have_continued_elsewhere_is_not_woken_before_the_apiserver_has_its_pod() {
    let saved = Entry::Saving {
        image: image(1),
        snapshots: [SnapshotUid::new("s-1").unwrap()].into(),
    };
    let served = [vec![saved], asleep()[1..].to_vec()].concat();
    let mut hibernated = hibernated();
    hibernated.ledger = observed(Live::None, &served, &[1]).ledger;
    let mut deleted = desired(Power::Awake);
    deleted.snapshots = vec![snapshot("s-1", SnapshotReason::Suspend)];
    deleted.snapshots[0].wish = SnapshotWish::Delete;
    for seen in [deleted, desired(Power::Awake)] {
        let with = |answer| {
            let desired = Desired {
                answer,
                ..seen.clone()
            };
            planned(&desired, &hibernated)
        };
        let unasked = with(None);
        assert!(
            unasked.asks && kinds(&unasked).is_empty(),
            "{:?}",
            unasked.why
        );
        let behind = with(answered(false));
        assert!(
            !behind.asks && kinds(&behind).is_empty(),
            "{:?}",
            behind.why
        );
        assert!(behind.wake_at.is_some(), "it has to look again");
        assert_eq!(kinds(&with(answered(true))), [StepKind::Wake]);
    }
}

#[test]
fn an_image_that_was_missing_for_a_while_still_belongs_to_its_snapshot() {
    for reason in [SnapshotReason::Suspend, SnapshotReason::Manual] {
        let mut desired = gone();
        desired.snapshots.push(snapshot("s-1", reason));
        desired.snapshots[0].image = Some(image(1));
        let hidden = left(&asleep(), &[]);
        let plan = planned(&desired, &hidden);
        assert_eq!(kinds(&plan), [], "the ledger knows whose image it is");
        let state = &plan.status.snapshots[0].state;
        assert!(
            matches!(state, SnapshotState::Failed { reason, .. } if reason == "ImageMissing"),
            "{state:?}"
        );
        let found = observed(Live::None, &asleep(), &[1]);
        let plan = planned(&desired, &found);
        assert_eq!(kinds(&plan), []);
        let state = &plan.status.snapshots[0].state;
        assert!(
            matches!(state, SnapshotState::Committed { .. }),
            "{state:?}"
        );
    }
}

#[test]
fn a_snapshot_whose_pod_went_during_the_save_reports_sandbox_not_found() {
    let mut suspended = gone();
    suspended
        .snapshots
        .push(snapshot("s-1", SnapshotReason::Suspend));
    let cut_off = left(&[saving(1)], &[]);
    let state = &planned(&suspended, &cut_off).status.snapshots[0].state;
    assert!(
        matches!(state, SnapshotState::Failed { reason, .. } if reason == "SandboxNotFound"),
        "{state:?}"
    );
}

#[test]
fn a_snapshot_whose_image_is_missing_is_not_made_anew_from_the_running_sandbox() {
    let mut desired = desired(Power::Awake);
    desired
        .snapshots
        .push(snapshot("s-1", SnapshotReason::Manual));
    desired.snapshots[0].image = Some(image(1));
    let running = observed(Live::Running, &[], &[]);
    assert_steps(&desired, &running, &[]);
}

#[test]
fn an_image_that_a_pod_took_and_never_ran_is_given_back_when_that_pod_is_gone() {
    let theirs = ImageId::new(PodUid::new("pod-of-before").unwrap(), 3).unwrap();
    let desired = gone();
    let left = |entries: &[Entry]| left(entries, &[]);
    let waking = Entry::Waking {
        image: theirs.clone(),
    };
    let failed = Entry::WakeFailed {
        image: theirs.clone(),
        reason: "RestoreFailed".to_owned(),
    };
    for entries in [vec![waking.clone()], vec![waking.clone(), failed]] {
        let plan = planned(&desired, &left(&entries));
        let kinds = kinds(&plan);
        assert_eq!(kinds, [StepKind::ReleaseImage, StepKind::DiscardLedger]);
        let image = theirs.clone();
        assert_eq!(plan.steps[0].action, Action::ReleaseImage { image });
    }
    // The Pod has run: no other Pod may be restored from the image.
    let ran = [waking.clone(), Entry::Awake];
    assert_steps(&desired, &left(&ran), &[StepKind::DiscardLedger]);
    // A sandbox that is being removed may still be restoring.
    let there = observed(Live::None, &[waking], &[]);
    let plan = planned(&desired, &there);
    assert_eq!(kinds(&plan), []);
    assert!(plan.wake_at.is_some(), "it has to look again");
}

#[test]
fn after_a_pod_is_gone_only_images_that_snapshots_name_stay() {
    use StepKind::*;
    let mut desired = gone();
    let two = left(&asleep(), &[1, 2]);
    assert_steps(&desired, &two, &[DiscardImage, DiscardImage, DiscardLedger]);
    desired
        .snapshots
        .push(snapshot("s-1", SnapshotReason::Manual));
    desired.snapshots[0].image = Some(image(2));
    assert_steps(&desired, &two, &[DiscardImage]);
    // Nothing is removed while the sandbox is still being ended.
    assert_steps(&desired, &observed(Live::Running, &asleep(), &[1]), &[]);
}

/// The only snapshot of a frozen sandbox is deleted.
fn frozen_with_deleted_snapshot() -> Desired {
    let mut deleted = snapshot("s-1", SnapshotReason::Manual);
    deleted.wish = SnapshotWish::Delete;
    deleted.image = Some(image(1));
    Desired {
        snapshots: vec![deleted],
        ..desired(Power::Frozen)
    }
}

#[test]
fn the_ledger_leaves_a_frozen_sandboxs_image_before_the_image_goes() {
    let frozen = observed(Live::Paused, &committed(), &[1]);
    let plan = planned(&frozen_with_deleted_snapshot(), &frozen);
    assert_eq!(kinds(&plan), [StepKind::DiscardImage]);
    assert_eq!(plan.steps[0].before, Some(Entry::Awake));
}

/// The image stays for the next snapshot, which adopts it in the same plan.
#[test]
fn an_image_that_a_snapshot_adopts_is_not_removed_for_the_deletion_of_another() {
    let next = snapshot("s-2", SnapshotReason::Manual);
    let mut desired = frozen_with_deleted_snapshot();
    desired.snapshots.push(next);
    let frozen = observed(Live::Paused, &committed(), &[1]);
    assert_steps(&desired, &frozen, &[StepKind::Record]);
    desired.power = Power::Awake;
    let hibernated = Observed {
        record: Some(Record { image: image(1) }),
        ..observed(Live::None, &asleep(), &[1])
    };
    assert_steps(&desired, &hibernated, &[StepKind::Record, StepKind::Wake]);
    let woken_for = planned(&desired, &hibernated).why;
    assert!(woken_for.contains(&Reason::AwakeWanted), "{woken_for:?}");
}

#[test]
fn the_image_of_a_sandbox_whose_end_has_begun_stays() {
    let ending = Observed {
        record: Some(Record { image: image(1) }),
        ..observed(Live::Paused, &asleep(), &[1])
    };
    let plan = planned(&frozen_with_deleted_snapshot(), &ending);
    assert_eq!(kinds(&plan), [StepKind::End]);
}
