use super::*;

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
    let fresh = source(&ledger_of(&[]), |_| true, given.clone(), false);
    assert_eq!(
        fresh,
        Source::Image {
            image: other(),
            copy: false
        }
    );
    let resumed = ledger_of(&[Entry::Waking { image: other() }, Entry::Awake]);
    assert_eq!(source(&resumed, |_| true, given, false), Source::Cold);
}

#[test]
fn a_pod_whose_sandbox_was_taken_away_while_it_slept_goes_on_from_its_image() {
    let expected = Source::Image {
        image: image(1),
        copy: false,
    };
    assert_eq!(
        source(&ledger_of(&asleep()), |_| true, None, false),
        expected
    );
    // Also when it once came from another image.
    assert_eq!(
        source(&ledger_of(&asleep()), |_| true, Some(other()), true),
        expected
    );
}

#[test]
fn a_pod_that_crashed_awake_does_not_go_back_in_time() {
    let mut entries = asleep();
    entries.extend([Entry::Waking { image: image(1) }, Entry::Awake]);
    assert_eq!(
        source(&ledger_of(&entries), |_| true, None, false),
        Source::Cold
    );
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
        source(&ledger_of(&entries), |_| true, None, false),
        expected
    );
    entries.push(Entry::WakeFailed {
        image: image(1),
        reason: "RestoreFailed".into(),
    });
    assert_eq!(
        source(&ledger_of(&entries), |_| true, None, false),
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
        source(&ledger_of(&asleep()), |_| false, None, false),
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
        source(&ledger_of(&saving), |_| false, None, false),
        Source::Cold
    );
    let whole = Source::Image {
        image: image(1),
        copy: false,
    };
    assert_eq!(source(&ledger_of(&saving), |_| true, None, false), whole);
}
