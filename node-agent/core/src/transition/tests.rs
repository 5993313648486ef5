use std::collections::BTreeSet;

use rstest::rstest;

use super::*;

mod fake;
use fake::{Fake, Fault};

fn image(number: u32) -> ImageId {
    ImageId::parse(&format!("uid.{number}")).expect("an id")
}

fn other() -> ImageId {
    ImageId::parse("other.7").expect("an id")
}

fn ledger_of(entries: &[Entry]) -> LedgerState {
    LedgerState::fold(entries)
}

fn saved() -> Vec<Entry> {
    vec![
        Entry::Saving {
            image: image(1),
            snapshots: BTreeSet::new(),
        },
        Entry::Committed { image: image(1) },
    ]
}

fn asleep() -> Vec<Entry> {
    let mut entries = saved();
    entries.push(Entry::Asleep {
        image: image(1),
        by_itself: false,
    });
    entries
}

#[rstest]
#[case::all_live(vec![], Ok(Found::Dozing), &["resumed"])]
#[case::one_has_ended(vec![Ok(false)], Ok(Found::Dozing), &["ended"])]
#[case::one_ends_before_the_resume(vec![Ok(true), Ok(false)], Ok(Found::Dozing), &["ended"])]
#[case::unknown(vec![Ok(true), Err(Fault::Unknown)], Err(Fault::Unknown), &[])]
fn a_sandbox_with_an_image_is_resumed_only_with_its_gofers(
    #[case] gofers: Vec<Result<bool, Fault>>,
    #[case] expected: Result<Found, Fault>,
    #[case] acts: &[&str],
) {
    let sandbox = Fake {
        gofers: gofers.into(),
        ..Fake::dozing()
    };
    assert_eq!(wake_up(&sandbox), expected);
    assert_eq!(sandbox.acts(), acts);
    let resumed = acts == ["resumed"];
    assert_eq!(sandbox.memory() == Memory::Live, resumed);
}

#[test]
fn a_sandbox_without_an_image_is_resumed_whether_its_gofers_live_or_not() {
    let sandbox = Fake {
        gofers: vec![Ok(false)].into(),
        ..Fake::new(Recorded::Running, Vec::new(), Some(Pause::Other))
    };
    assert_eq!(run_on(&sandbox), Ok(Ran::Resumed));
    assert_eq!(sandbox.acts(), ["resumed"]);
    assert!(sandbox.entries.borrow().is_empty());
}

#[rstest]
#[case::not_received(Fault::NotReceived, true)]
#[case::may_have_been_received(Fault::Unknown, false)]
fn the_image_stays_the_memory_only_where_the_sandbox_received_no_call(
    #[case] fault: Fault,
    #[case] keeps: bool,
) {
    let sandbox = Fake {
        resumes: Err(fault.clone()),
        ..Fake::dozing()
    };
    assert_eq!(wake_up(&sandbox), Err(fault));
    assert_eq!(sandbox.memory().image() == Some(&image(1)), keeps);
}

#[test]
fn a_sandbox_that_the_kubelet_recreates_is_not_woken_and_its_image_is_kept() {
    for sandbox in [Fake::dozing(), Fake::hibernated()] {
        let sandbox = Fake {
            held_open: false,
            ..sandbox
        };
        let refused = Err(Fault::Refused(Refusal::NotHeldOpen));
        assert_eq!(wake_up(&sandbox), refused);
        assert_eq!(sandbox.memory().image(), Some(&image(1)));
        assert!(sandbox.acts().is_empty());
    }
    // Without an image that could be restored the sandbox is resumed: it may be ended as well.
    let sandbox = Fake {
        held_open: false,
        holding: Holding::Unreadable,
        ..Fake::dozing()
    };
    assert_eq!(wake_up(&sandbox), Ok(Found::Dozing));
    assert_eq!(sandbox.memory(), Memory::Live);
}

#[test]
fn an_image_that_was_committed_is_left_behind_also_while_it_cannot_be_found() {
    let saving = Memory::Saving { image: image(1) };
    let committed = Memory::Committed { image: image(1) };
    let left = image(1);
    for (memory, holding, expected) in [
        (&Memory::Live, Holding::Missing, None),
        (&saving, Holding::Missing, None),
        (&saving, Holding::Unreadable, Some(&left)),
        (&saving, Holding::Held, Some(&left)),
        (&committed, Holding::Missing, Some(&left)),
        (&committed, Holding::Held, Some(&left)),
    ] {
        assert_eq!(
            outlived(memory, |_| holding),
            expected,
            "{memory:?} {holding:?}"
        );
    }
}

#[test]
fn a_frozen_sandbox_is_not_woken_by_a_caller_and_is_resumed_by_request() {
    let frozen = || Fake::new(Recorded::Running, Vec::new(), Some(Pause::Other));
    assert_eq!(wake_up(&frozen()), Err(Fault::Refused(Refusal::Frozen)));
    assert_eq!(rouse(&frozen()), Ok(Ran::Already));
    assert_eq!(resume_dozing(&frozen()), Ok(Resumed::RanAlready));
    assert_eq!(run_on(&frozen()), Ok(Ran::Resumed));
}

#[test]
fn a_wake_records_that_it_begins_and_that_the_sandbox_runs() {
    let sandbox = Fake::hibernated();
    assert_eq!(wake_up(&sandbox), Ok(Found::Hibernated));
    let entries = sandbox.entries.borrow();
    let waking = Entry::Waking { image: image(1) };
    assert_eq!(entries[asleep().len()..], [waking, Entry::Awake]);
    assert_eq!(sandbox.acts(), ["restored"]);
}

#[test]
fn a_wake_that_was_cut_off_after_its_last_entry_is_only_recorded() {
    let sandbox = Fake::hibernated();
    sandbox.append(&Entry::Awake).expect("appended");
    assert_eq!(wake(&sandbox), Ok(false));
    assert_eq!(sandbox.acts(), ["caught up"]);
}

#[test]
fn a_wake_that_fails_leaves_the_image_as_the_memory() {
    let sandbox = Fake {
        restores: Err(Fault::RestoreFailed),
        ..Fake::hibernated()
    };
    assert_eq!(wake(&sandbox), Err(Fault::RestoreFailed));
    assert_eq!(sandbox.memory().image(), Some(&image(1)));
    let last = sandbox.entries.borrow().last().cloned();
    assert!(matches!(last, Some(Entry::WakeFailed { .. })), "{last:?}");
}

#[test]
fn a_sandbox_that_is_being_suspended_stays_in_its_image() {
    let sandbox = Fake {
        suspended: true,
        ..Fake::hibernated()
    };
    assert_eq!(wake(&sandbox), Err(Fault::Refused(Refusal::Suspending)));
    for ends in [false, true] {
        assert_eq!(
            before_signal(&sandbox, ends, || false),
            Ok(Delivery::Remains)
        );
    }
    assert!(sandbox.acts().is_empty());
}

const TAKES: Place = Place::Anew {
    takes: true,
    tries_again: true,
    never_ran: false,
};

#[test]
fn another_pods_image_is_taken_before_anything_runs_and_the_report_is_there_before_the_entry() {
    let sandbox = Fake::new(Recorded::Restoring, Vec::new(), None);
    restore(&sandbox, &other(), TAKES).expect("restored");
    let order = [
        "taken", "restored", "renewed", "released", "taken", "reported",
    ];
    assert_eq!(sandbox.acts(), order);
    assert_eq!(sandbox.memory(), Memory::Live);
}

#[rstest]
#[case::tries_again(TAKES, false, true)]
#[case::starts_cold(Place::Anew { takes: true, tries_again: false, never_ran: false }, false, false)]
#[case::copy(Place::Anew { takes: false, tries_again: true, never_ran: false }, false, false)]
#[case::overtaken(TAKES, true, false)]
fn a_restore_that_fails_gives_a_taken_image_back_unless_the_ledger_has_gone_on(
    #[case] place: Place,
    #[case] overtaken: bool,
    #[case] gives_back: bool,
) {
    let sandbox = Fake {
        restores: Err(Fault::RestoreFailed),
        overtaken,
        ..Fake::new(Recorded::Restoring, Vec::new(), None)
    };
    restore(&sandbox, &other(), place).expect_err("failed");
    let given_back = sandbox.acts().iter().any(|act| act == "given back");
    assert_eq!(given_back, gives_back);
}

#[test]
fn a_planned_restore_appends_only_that_the_sandbox_runs_and_nothing_if_it_fails() {
    for (restores, added) in [
        (Ok(()), vec![Entry::Awake]),
        (Err(Fault::RestoreFailed), vec![]),
    ] {
        let sandbox = Fake {
            restores: restores.clone(),
            ..Fake::hibernated()
        };
        sandbox
            .append(&Entry::Waking { image: image(1) })
            .expect("appended by the plan");
        assert_eq!(restore_planned(&sandbox, &image(1)), restores);
        assert_eq!(sandbox.entries.borrow()[asleep().len() + 1..], added);
    }
}

#[test]
fn a_signal_that_ends_a_saved_sandbox_wakes_nothing() {
    let saved_and_paused = || Fake::new(Recorded::Running, saved(), Some(Pause::Other));
    let before = |sandbox: &Fake, ends| before_signal(sandbox, ends, || false);
    assert_eq!(before(&saved_and_paused(), true), Ok(Delivery::Keeper));
    assert_eq!(before(&saved_and_paused(), false), Ok(Delivery::Program));
    // A sandbox that dozes handles its end.
    let dozing = Fake::dozing();
    assert_eq!(before(&dozing, true), Ok(Delivery::Program));
    assert_eq!(dozing.acts(), ["resumed"]);
    // One that may not be woken stays in its image.
    let recreated = Fake {
        held_open: false,
        ..Fake::dozing()
    };
    assert_eq!(before(&recreated, true), Ok(Delivery::Keeper));
    assert_eq!(recreated.acts(), ["ended"]);
    assert_eq!(before(&Fake::hibernated(), true), Ok(Delivery::Remains));
    assert_eq!(before(&Fake::hibernated(), false), Ok(Delivery::Program));
    let awake = Fake::new(Recorded::Running, Vec::new(), None);
    assert_eq!(before(&awake, true), Ok(Delivery::Program));
    assert!(awake.acts().is_empty());
    assert_eq!(before_signal(&awake, true, || true), Ok(Delivery::Orphan));
    let restoring = Fake::new(Recorded::Restoring, Vec::new(), None);
    assert_eq!(before(&restoring, true), Ok(Delivery::Remains));
    assert_eq!(
        before(&restoring, false),
        Err(Fault::Refused(Refusal::Restoring))
    );
}

#[test]
fn a_pod_that_was_given_an_image_starts_from_it_once() {
    let given = Some(other());
    let fresh = source(&ledger_of(&[]), |_| true, given.clone(), false, None);
    assert_eq!(
        fresh,
        Source::Image {
            image: other(),
            copy: false
        }
    );
    let resumed = ledger_of(&[Entry::Waking { image: other() }, Entry::Awake]);
    assert_eq!(source(&resumed, |_| true, given, false, None), Source::Cold);
}

#[test]
fn a_pod_whose_sandbox_was_taken_away_while_it_slept_goes_on_from_its_image() {
    let expected = Source::Image {
        image: image(1),
        copy: false,
    };
    assert_eq!(
        source(&ledger_of(&asleep()), |_| true, None, false, None),
        expected
    );
    // Also when the Pod once came from another image.
    assert_eq!(
        source(&ledger_of(&asleep()), |_| true, Some(other()), true, None),
        expected
    );
}

#[test]
fn a_pod_that_crashed_awake_starts_cold_and_not_from_an_old_image() {
    let mut entries = asleep();
    entries.extend([Entry::Waking { image: image(1) }, Entry::Awake]);
    assert_eq!(
        source(&ledger_of(&entries), |_| true, None, false, None),
        Source::Cold
    );
}

#[test]
fn a_crashed_pod_is_rolled_back_to_its_last_image_only_on_request() {
    let back = |entries: &[Entry], held| {
        let last = Some(image(1));
        source(&ledger_of(entries), |_| held, None, false, last)
    };
    let mut entries = asleep();
    let asleep_in_it = Source::Image {
        image: image(1),
        copy: false,
    };
    assert_eq!(back(&entries, true), asleep_in_it);
    entries.extend([Entry::Waking { image: image(1) }, Entry::Awake]);
    let expected = Source::Image {
        image: image(1),
        copy: true,
    };
    assert_eq!(back(&entries, true), expected);
    // The sandbox crashed during another save.
    entries.push(Entry::Saving {
        image: image(2),
        snapshots: Default::default(),
    });
    assert_eq!(back(&entries, false), expected);
    // The ledger knows that the image was left behind until the image is gone: also a second try
    // reports that the sandbox went back.
    assert!(ledger_of(&entries).was_left(&image(1)));
    entries.push(Entry::Waking { image: image(1) });
    assert!(ledger_of(&entries).was_left(&image(1)));
    assert!(!ledger_of(&asleep()).was_left(&image(1)));
}

#[test]
fn a_wake_that_was_cut_off_is_tried_again() {
    let mut entries = asleep();
    entries.push(Entry::Waking { image: image(1) });
    let expected = Source::Image {
        image: image(1),
        copy: false,
    };
    assert_eq!(
        source(&ledger_of(&entries), |_| true, None, false, None),
        expected
    );
    entries.push(Entry::WakeFailed {
        image: image(1),
        reason: "RestoreFailed".into(),
    });
    assert_eq!(
        source(&ledger_of(&entries), |_| true, None, false, None),
        expected
    );
}

#[test]
fn an_image_that_is_missing_is_not_taken_for_a_cold_start() {
    let expected = Source::Image {
        image: image(1),
        copy: false,
    };
    assert_eq!(
        source(&ledger_of(&asleep()), |_| false, None, false, None),
        expected
    );
}

#[test]
fn a_save_that_was_cut_off_leaves_a_cold_start_unless_it_was_whole() {
    let saving = [Entry::Saving {
        image: image(1),
        snapshots: Default::default(),
    }];
    assert_eq!(
        source(&ledger_of(&saving), |_| false, None, false, None),
        Source::Cold
    );
    let whole = Source::Image {
        image: image(1),
        copy: false,
    };
    assert_eq!(
        source(&ledger_of(&saving), |_| true, None, false, None),
        whole
    );
}

fn unstarted(origin: Origin) -> Fake {
    Fake {
        recorded: Recorded::Hibernated {
            image: image(1),
            unstarted: Some(origin),
        },
        ..Fake::hibernated()
    }
}

#[test]
fn a_new_sandbox_that_is_to_sleep_sleeps_in_its_image_without_running() {
    let golden = Fake::new(Recorded::Restoring, Vec::new(), None);
    // The first attempt may have been cut off anywhere.
    for _ in 0..2 {
        rest(&golden, &other(), Origin::Golden, false).unwrap();
    }
    let acts = ["copied", "reported", "sleeps, Golden"];
    assert_eq!(golden.acts(), [acts, acts].concat());
    assert_eq!(golden.memory().image(), Some(&image(1)));
    let own = Fake::new(Recorded::Restoring, asleep(), None);
    rest(&own, &image(1), Origin::Own, true).unwrap();
    assert_eq!(own.acts(), ["reported", "sleeps, Own"]);
    assert_eq!(own.memory().image(), Some(&image(1)));
}

#[test]
fn a_sandbox_sleeps_only_in_an_image_that_is_its_memory_or_golden() {
    let none = LedgerState::default();
    let slept = ledger_of(&asleep());
    let ran = ledger_of(&[asleep(), vec![Entry::Awake]].concat());
    for (ledger, image, own, golden, asleep, expected) in [
        (&none, other(), false, true, true, Some(Origin::Golden)),
        (&none, other(), false, true, false, None),
        (&none, other(), false, false, true, None),
        (&slept, image(1), true, false, true, Some(Origin::Own)),
        // It has slept since it was made, and its node has gone down since.
        (&slept, image(1), true, true, true, Some(Origin::Golden)),
        (&slept, image(1), true, false, false, None),
        // The user wants the last image of a sandbox that crashed.
        (&ran, image(1), true, false, true, None),
    ] {
        let found = rests(ledger, &image, own, golden, asleep);
        assert_eq!(found, expected, "{image} {own} {golden} {asleep}");
    }
}

#[rstest]
#[case(Origin::Golden)]
#[case(Origin::Own)]
fn the_first_wake_of_a_sandbox_prepares_it_as_a_new_one(#[case] origin: Origin) {
    let sandbox = unstarted(origin);
    assert_eq!(wake(&sandbox), Ok(true));
    let acts = ["restored", "renewed", "released", "reported"];
    assert_eq!(sandbox.acts(), acts);
    let planned = unstarted(origin);
    planned.append(&Entry::Waking { image: image(1) }).unwrap();
    restore_planned(&planned, &image(1)).unwrap();
    assert_eq!(planned.acts(), ["restored", "renewed", "released"]);
    assert_eq!(planned.memory(), Memory::Live);
}

#[rstest]
#[case(Origin::Golden, Fault::RestoreFailed, false, true)]
#[case::has_run(Origin::Own, Fault::RestoreFailed, false, false)]
#[case::may_pass(Origin::Golden, Fault::Unknown, false, false)]
#[case::another_sandbox_goes_on(Origin::Golden, Fault::RestoreFailed, true, false)]
fn only_a_sandbox_that_never_ran_starts_cold_where_its_image_cannot_be_restored(
    #[case] origin: Origin,
    #[case] fault: Fault,
    #[case] overtaken: bool,
    #[case] cold: bool,
) {
    type Wake = fn(&Fake) -> Result<(), Fault>;
    let wakes: [Wake; 2] = [
        |sandbox| wake(sandbox).map(drop),
        |sandbox| restore_planned(sandbox, &image(1)),
    ];
    for wake in wakes {
        let sandbox = Fake {
            restores: Err(fault.clone()),
            overtaken,
            ..unstarted(origin)
        };
        assert_eq!(wake(&sandbox), Err(fault.clone()));
        let expected: &[&str] = match cold {
            true => &["restored", "starts cold"],
            false => &["restored"],
        };
        assert_eq!(sandbox.acts(), expected);
        assert_eq!(sandbox.memory() == Memory::Live, cold);
    }
}
