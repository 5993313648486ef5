use proptest::prelude::*;

use super::*;

fn image(number: u32) -> ImageId {
    ImageId::parse(&format!("pod-a.{number}")).unwrap()
}

fn snapshot(name: &str) -> SnapshotUid {
    SnapshotUid::new(name).unwrap()
}

fn file(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = encode_header().to_vec();
    for entry in entries {
        bytes.extend(encode(entry).unwrap());
    }
    bytes
}

fn a_life() -> Vec<Entry> {
    vec![
        Entry::Saving {
            image: image(1),
            snapshots: [snapshot("s-1")].into(),
        },
        Entry::Committed { image: image(1) },
        Entry::Adopted {
            image: image(1),
            snapshots: [snapshot("s-2")].into(),
        },
        Entry::Asleep {
            image: image(1),
            by_itself: false,
        },
        Entry::Waking { image: image(1) },
        Entry::WakeFailed {
            image: image(1),
            reason: "ImageCorrupt".into(),
        },
        Entry::Waking { image: image(1) },
        Entry::Awake,
        Entry::Saving {
            image: image(2),
            snapshots: BTreeSet::new(),
        },
        Entry::Discarded { image: image(1) },
    ]
}

#[test]
fn a_folded_entry_without_the_field_ran_stands_for_a_sandbox_that_ran() {
    let written = serde_json::json!({"entry": "Folded", "state": {
        "seq": 2, "last_number": 1, "memory": {"in": "Live"}, "images": {},
    }});
    let entry: Entry = serde_json::from_value(written).unwrap();
    assert!(LedgerState::fold([&entry]).ran);
    let state = LedgerState {
        ran: true,
        ..LedgerState::default()
    };
    // An older version would refuse a field that it does not know.
    assert!(!serde_json::to_string(&state).unwrap().contains("ran"));
}

/// Fixes the bytes of version 1. If this test fails, ledgers on disk cannot be read any more: make
/// a new version instead.
#[test]
fn the_bytes_of_version_1_stay_as_they_are() {
    let golden = concat!(
        r#"{"entry":"Saving","image":"pod-a.1","snapshots":["s-1"]}"#,
        "\n",
        r#"{"entry":"Committed","image":"pod-a.1"}"#,
        "\n",
        r#"{"entry":"Adopted","image":"pod-a.1","snapshots":["s-2"]}"#,
        "\n",
        r#"{"entry":"Asleep","image":"pod-a.1"}"#,
        "\n",
        r#"{"entry":"Waking","image":"pod-a.1"}"#,
        "\n",
        r#"{"entry":"WakeFailed","image":"pod-a.1","reason":"ImageCorrupt"}"#,
        "\n",
        r#"{"entry":"Waking","image":"pod-a.1"}"#,
        "\n",
        r#"{"entry":"Awake"}"#,
        "\n",
        r#"{"entry":"Saving","image":"pod-a.2"}"#,
        "\n",
        r#"{"entry":"Discarded","image":"pod-a.1"}"#,
        "\n",
    );
    let mut expected = b"TORPORL1\x01\0\0\0".to_vec();
    for json in golden.lines() {
        expected.extend(u32::try_from(json.len()).unwrap().to_le_bytes());
        expected.extend(crc32fast::hash(json.as_bytes()).to_le_bytes());
        expected.extend(json.as_bytes());
    }
    assert_eq!(file(&a_life()), expected);
    assert_eq!(decode(&expected).unwrap(), (a_life(), Tail::Clean));
    // A whole record, its checksum included, as an independent program computes it.
    let awake = encode(&Entry::Awake).unwrap();
    assert_eq!(awake[..4], [17, 0, 0, 0]);
    assert_eq!(awake[4..8], 0xb932_e2af_u32.to_le_bytes());
}

#[test]
fn a_record_cut_anywhere_is_a_torn_tail_and_the_rest_is_read() {
    let whole = file(&a_life());
    let before = file(&a_life()[..9]).len();
    for len in before..whole.len() {
        let (entries, tail) = decode(&whole[..len]).unwrap();
        assert_eq!(entries, a_life()[..9], "cut at {len}");
        let expected = match len - before {
            0 => Tail::Clean,
            torn => Tail::Torn {
                offset: before as u64,
                len: torn as u64,
            },
        };
        assert_eq!(tail, expected);
    }
}

#[test]
fn a_header_cut_anywhere_and_a_tail_of_zeros_are_torn() {
    let header = encode_header();
    for len in 1..header.len() {
        let tail = Tail::Torn {
            offset: 0,
            len: len as u64,
        };
        assert_eq!(decode(&header[..len]).unwrap(), (Vec::new(), tail));
    }
    let mut bytes = file(&a_life());
    let good = bytes.len() as u64;
    bytes.extend([0; 100]);
    assert_eq!(
        decode(&bytes).unwrap().1,
        Tail::Torn {
            offset: good,
            len: 100
        }
    );
}

#[test]
fn every_flipped_bit_before_the_last_record_is_found() {
    let whole = file(&a_life());
    let last = file(&a_life()[..9]).len();
    for bit in 0..last * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let found = decode(&bytes);
        assert!(found.is_err(), "bit {bit}: {found:?}");
    }
}

#[test]
fn a_flipped_bit_in_the_last_record_never_reads_as_something_else() {
    let whole = file(&a_life());
    let last = file(&a_life()[..9]).len();
    for bit in last * 8..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(decode(&bytes).is_err(), "bit {bit}");
    }
}

#[test]
fn other_magic_and_other_versions_are_refused_by_name() {
    assert_eq!(decode(b"TORPORX1\x01\0\0\0"), Err(Error::Magic));
    assert_eq!(decode(b"short"), Err(Error::Magic));
    assert_eq!(
        decode(b"TORPORL1\x02\0\0\0"),
        Err(Error::Version { found: 2 })
    );
}

#[test]
fn entries_with_hostile_ids_are_corrupt() {
    let json = br#"{"entry":"Committed","image":"../../etc.1"}"#;
    let mut bytes = encode_header().to_vec();
    bytes.extend(u32::try_from(json.len()).unwrap().to_le_bytes());
    bytes.extend(crc32fast::hash(json).to_le_bytes());
    bytes.extend(json);
    assert_eq!(
        decode(&bytes),
        Err(Error::Corrupt {
            offset: 12,
            fault: Fault::Entry
        })
    );
}

#[track_caller]
fn restorable(entries: &[Entry], held: &[u32]) -> Option<u32> {
    let state = LedgerState::fold(entries);
    state
        .restorable(|image| held.contains(&image.number()))
        .map(ImageId::number)
}

#[test]
fn an_image_is_restorable_from_commit_until_awake() {
    let life = a_life();
    assert_eq!(restorable(&life[..0], &[1]), None);
    assert_eq!(
        restorable(&life[..1], &[]),
        None,
        "saving, not in the store"
    );
    for upto in 1..=7 {
        assert_eq!(
            restorable(&life[..upto], &[1]),
            Some(1),
            "after {:?}",
            life[upto - 1]
        );
    }
    assert_eq!(restorable(&life[..8], &[1]), None, "awake");
    assert_eq!(restorable(&life, &[1]), None, "stale for ever");
}

#[test]
fn a_sandbox_that_ended_before_it_was_resumed_never_left_its_image() {
    let resumed = [a_life(), vec![Entry::Awake]].concat();
    let saved = |number| {
        let snapshots = BTreeSet::new();
        let image = image(number);
        vec![
            Entry::Saving {
                image: image.clone(),
                snapshots,
            },
            Entry::Committed { image },
            Entry::Awake,
        ]
    };
    let left = LedgerState::fold(&[resumed.clone(), saved(9)].concat());
    assert!(left.is_stale(&image(9)) && left.was_left(&image(9)));
    let not_resumed = vec![Entry::Committed { image: image(9) }];
    let state = LedgerState::fold(&[resumed, saved(9), not_resumed].concat());
    assert!(!state.is_stale(&image(9)) && !state.was_left(&image(9)));
}

#[test]
fn a_sandbox_that_crashed_on_its_way_back_has_an_image_from_before_the_crash() {
    let crashed = [a_life(), vec![Entry::Awake]].concat();
    let last = image(2);
    let state = LedgerState::fold(&crashed);
    assert!(state.was_left(&last) && !state.has_gone_back_to(&last));
    let begun = Entry::Waking {
        image: last.clone(),
    };
    let failed = Entry::WakeFailed {
        image: last.clone(),
        reason: "NoRoom".to_owned(),
    };
    let state = LedgerState::fold(&[crashed, vec![begun, failed]].concat());
    assert!(state.has_gone_back_to(&last));
    assert!(!LedgerState::fold(&a_life()).has_gone_back_to(&last));
}

#[test]
fn image_numbers_never_go_back() {
    let state = LedgerState::fold(&a_life());
    assert_eq!(state.last_number, 2);
    let mut state = state;
    state.apply(&Entry::Discarded { image: image(2) });
    assert_eq!((state.last_number, &state.memory), (2, &Memory::Live));
}

#[test]
fn a_folded_ledger_has_the_same_state_as_the_long_one() {
    let state = LedgerState::fold(&a_life());
    let folded = file(&[
        Entry::Folded {
            state: state.clone(),
        },
        Entry::Awake,
    ]);
    let (entries, _) = decode(&folded).unwrap();
    let mut expected = state;
    expected.apply(&Entry::Awake);
    assert_eq!(LedgerState::fold(&entries), expected);
    assert_eq!(expected.seq, 11);
}

#[test]
fn a_snapshot_has_the_newest_committed_image() {
    let mut life = a_life()[..2].to_vec();
    life.push(Entry::Saving {
        image: image(2),
        snapshots: [snapshot("s-1")].into(),
    });
    assert_eq!(
        LedgerState::fold(&life).image_of(&snapshot("s-1")),
        Some(&image(1))
    );
    life.push(Entry::Committed { image: image(2) });
    assert_eq!(
        LedgerState::fold(&life).image_of(&snapshot("s-1")),
        Some(&image(2))
    );
}

/// A save was cut off between the move of its image to its place and the entry that says so.
#[test]
fn an_image_that_a_sandbox_sleeps_in_or_wakes_from_is_whole_also_without_its_own_entry() {
    for entry in [
        Entry::Asleep {
            image: image(1),
            by_itself: true,
        },
        Entry::Waking { image: image(1) },
        Entry::Adopted {
            image: image(1),
            snapshots: [snapshot("s-2")].into(),
        },
    ] {
        let saving = Entry::Saving {
            image: image(1),
            snapshots: [snapshot("s-1")].into(),
        };
        let state = LedgerState::fold(&[saving, entry]);
        assert_eq!(state.image_of(&snapshot("s-1")), Some(&image(1)));
    }
}

proptest! {
    #[test]
    fn decoding_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode(&bytes);
        let mut with_header = encode_header().to_vec();
        with_header.extend(bytes);
        let _ = decode(&with_header);
    }
}
