use torpor_core::LedgerState;

use super::*;
use crate::node::tests::one_pod;

fn image(number: u32) -> ImageId {
    ImageId::parse(&format!("uid.{number}")).expect("an id")
}

fn ledger_of(entries: &[Entry]) -> LedgerState {
    LedgerState::fold(entries)
}

fn asleep() -> Vec<Entry> {
    vec![
        Entry::Saving {
            image: image(1),
            snapshots: Default::default(),
        },
        Entry::Committed { image: image(1) },
        Entry::Asleep {
            image: image(1),
            by_itself: false,
        },
    ]
}

fn other() -> ImageId {
    ImageId::parse("other.7").expect("an id")
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
    // Also when it once came from another image.
    assert_eq!(
        source(&ledger_of(&asleep()), |_| true, Some(other()), true, None),
        expected
    );
}

#[test]
fn a_pod_that_crashed_awake_does_not_go_back_in_time() {
    let mut entries = asleep();
    entries.extend([Entry::Waking { image: image(1) }, Entry::Awake]);
    assert_eq!(
        source(&ledger_of(&entries), |_| true, None, false, None),
        Source::Cold
    );
}

#[test]
fn a_pod_that_crashed_goes_back_to_its_last_image_only_if_its_user_wishes_that() {
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
    // It crashed while it was being saved once more.
    entries.push(Entry::Saving {
        image: image(2),
        snapshots: Default::default(),
    });
    assert_eq!(back(&entries, false), expected);
    // That the image was left behind is known until it is gone, so that the way back can be told when it is tried twice.
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

#[test]
fn a_sandbox_that_is_being_suspended_is_woken_by_nobody() {
    let (_dir, node, pod) = one_pod();
    let ledger = store(&node).and_then(|store| Ok(store.ledger(&pod.pod_uid)?));
    let ledger = ledger.expect("a ledger");
    for entry in asleep() {
        ledger.append(&entry).expect("written");
    }
    let hibernated = SandboxState::Hibernated { image: image(1) };
    let state = node.records.write_state(&pod.sandbox, &hibernated);
    state.expect("written");
    for suspends in [false, true, false] {
        let noted = node.records.note_suspends(&pod.pod_uid, suspends);
        noted.expect("noted");
        // It has no keepers here, and is not woken in any case.
        let refused = wake_locked(&node, &pod.sandbox, WakeCause::Exec).expect_err("refused");
        let words = format!("{refused:#}");
        assert_eq!(words.contains("is being suspended"), suspends, "{words}");
        let memory = ledger.read().expect("read").memory;
        assert!(matches!(memory, Memory::Asleep { .. }), "{memory:?}");
    }
}

/// Somebody may wait for the word on how the restore of such a Pod went.
#[test]
fn a_pod_that_was_restored_says_that_it_starts_anew_also_where_its_report_is_gone() {
    let restored = || RestoreReport::Restored {
        image: other(),
        rolled_back: None,
    };
    let failed = || RestoreReport::Failed {
        image: other(),
        reason: "RestoreFailed".to_owned(),
        message: "no room".to_owned(),
    };
    for (was_restored, last, is_told) in [
        (true, None, true),
        (true, Some(failed()), true),
        (true, Some(restored()), true),
        (false, Some(restored()), true),
        (false, None, false),
    ] {
        let (_dir, node, pod) = one_pod();
        let ledger = store(&node).and_then(|store| Ok(store.ledger(&pod.pod_uid)?));
        let ledger = ledger.expect("a ledger");
        for entry in [Entry::Waking { image: other() }, Entry::Awake] {
            ledger.append(&entry).expect("written");
        }
        if let Some(last) = &last {
            let written = node.records.write_report(&pod.pod_uid, last);
            written.expect("written");
        }
        let annotations = match was_restored {
            true => serde_json::json!({ RESTORE_IMAGE: other().to_string() }),
            false => serde_json::json!({}),
        };
        let spec = Spec(serde_json::json!({ "annotations": annotations }));
        let state = begin(&node, &pod, &spec).expect("it begins");
        assert_eq!(state, SandboxState::Running);
        let report = node.records.report(&pod.pod_uid).expect("read");
        let told = matches!(report, Some(RestoreReport::ColdStarted { .. }));
        assert_eq!(told, is_told, "{was_restored}, {last:?}");
    }
}
