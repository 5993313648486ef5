//! Ledgers on disk.

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use common::*;
use torpor_core::{Entry, LedgerState, Memory, PodUid};
use torpor_snapshots::{LedgerFile, Removed, Store};

fn ledger(store: &Store) -> LedgerFile {
    store.ledger(&PodUid::new(POD).unwrap()).unwrap()
}

fn asleep() -> Vec<Entry> {
    vec![
        Entry::Saving {
            image: image(1),
            snapshots: [].into(),
        },
        Entry::Committed { image: image(1) },
        Entry::Asleep {
            image: image(1),
            by_itself: false,
        },
    ]
}

#[test]
fn an_appended_entry_is_read_by_every_reader() {
    let (dir, store) = store();
    assert_eq!(ledger(&store).read().unwrap(), LedgerState::default());
    for entry in asleep() {
        ledger(&store).append(&entry).unwrap();
    }
    let again = Store::open(dir.path()).unwrap();
    let state = ledger(&again).read().unwrap();
    assert_eq!(state, LedgerState::fold(&asleep()));
    assert_eq!(
        state.memory,
        Memory::Asleep {
            image: image(1),
            by_itself: false
        }
    );
    assert_eq!(again.ledgers().unwrap(), [PodUid::new(POD).unwrap()]);
    let path = dir.path().join("ledger").join(POD);
    // Root shares it with the agent.
    let root = rustix::process::geteuid().is_root();
    let mode = fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, if root { 0o660 } else { 0o600 });
}

#[test]
fn an_entry_that_was_planned_for_another_ledger_is_refused() {
    let (_dir, store) = store();
    let ledger = ledger(&store);
    ledger.append_at(0, &Entry::Awake).unwrap();
    let error = ledger.append_at(0, &Entry::Awake).unwrap_err();
    assert_eq!(error.reason(), "LedgerFenced");
    assert_eq!(ledger.append_at(1, &Entry::Awake).unwrap().seq, 2);
}

#[test]
fn a_torn_tail_is_left_out_and_cut_by_the_next_append() {
    let (dir, store) = store();
    let ledger = ledger(&store);
    let path = dir.path().join("ledger").join(POD);
    for entry in asleep() {
        ledger.append(&entry).unwrap();
    }
    let whole = fs::read(&path).unwrap();
    let before = fs::read(&path).unwrap().len() - 20;
    for len in [before, whole.len() - 1] {
        fs::write(&path, &whole[..len]).unwrap();
        assert_eq!(ledger.read().unwrap().seq, 2, "cut at {len}");
        assert_eq!(ledger.append(&Entry::Awake).unwrap().seq, 3);
        assert_eq!(ledger.read().unwrap().memory, Memory::Live);
    }
    for len in [0, 5, 11, 12, 15] {
        fs::write(&path, &whole[..len]).unwrap();
        assert_eq!(ledger.read().unwrap().seq, 0, "cut at {len}");
        assert_eq!(ledger.append(&Entry::Awake).unwrap().seq, 1);
        assert_eq!(ledger.read().unwrap().seq, 1);
    }
}

#[test]
fn a_corrupt_ledger_is_neither_read_nor_written() {
    let (dir, store) = store();
    let ledger = ledger(&store);
    for entry in asleep() {
        ledger.append(&entry).unwrap();
    }
    let path = dir.path().join("ledger").join(POD);
    let mut bytes = fs::read(&path).unwrap();
    bytes[30] ^= 1;
    fs::write(&path, &bytes).unwrap();
    assert_eq!(ledger.read().unwrap_err().reason(), "LedgerCorrupt");
    assert_eq!(
        ledger.append(&Entry::Awake).unwrap_err().reason(),
        "LedgerCorrupt"
    );
    assert_eq!(
        fs::read(&path).unwrap(),
        bytes,
        "kept for whoever looks into it"
    );
    assert_eq!(store.ledgers().unwrap().len(), 1);
}

#[test]
fn links_and_files_that_other_users_may_write_are_no_ledgers() {
    let (dir, store) = store();
    let path = dir.path().join("ledger").join(POD);
    let target = dir.path().join("target");
    fs::write(&target, "").unwrap();
    symlink(&target, &path).unwrap();
    assert_eq!(
        ledger(&store).append(&Entry::Awake).unwrap_err().reason(),
        "LedgerCorrupt"
    );
    assert_eq!(fs::read(&target).unwrap(), b"");
    fs::remove_file(&path).unwrap();
    ledger(&store).append(&Entry::Awake).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o606)).unwrap();
    assert_eq!(ledger(&store).read().unwrap_err().reason(), "LedgerCorrupt");
}

#[test]
fn a_ledger_that_grows_long_is_rewritten_with_the_same_state() {
    let (dir, store) = store();
    let ledger = ledger(&store);
    let mut expected = LedgerState::default();
    let mut longest = 0;
    for round in 0..700 {
        let entries = [
            Entry::Waking { image: image(1) },
            Entry::Awake,
            Entry::Asleep {
                image: image(1),
                by_itself: false,
            },
        ];
        let entry = if round == 0 {
            asleep()[0].clone()
        } else {
            entries[round % 3].clone()
        };
        expected.apply(&entry);
        assert_eq!(ledger.append(&entry).unwrap(), expected);
        let path = dir.path().join("ledger").join(POD);
        longest = longest.max(fs::metadata(path).unwrap().len());
    }
    assert_eq!(ledger.read().unwrap(), expected);
    // Half of the allocated bytes is left for a ledger that cannot be rewritten.
    assert!(longest < 32 * 1024 + 200, "{longest}");
}

#[test]
fn many_appenders_lose_no_entry_and_mix_none() {
    let (dir, store) = store();
    // The ledger becomes so long that it is rewritten while other threads wait for the lock.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let root = dir.path();
            scope.spawn(move || {
                let store = Store::open(root).unwrap();
                for _ in 0..400 {
                    ledger(&store)
                        .append(&Entry::Asleep {
                            image: image(1),
                            by_itself: false,
                        })
                        .unwrap();
                }
            });
        }
    });
    assert_eq!(ledger(&store).read().unwrap().seq, 1600);
}

#[test]
fn removal_may_be_repeated() {
    let (_dir, store) = store();
    assert_eq!(ledger(&store).remove().unwrap(), Removed::Already);
    ledger(&store).append(&Entry::Awake).unwrap();
    assert_eq!(ledger(&store).remove().unwrap(), Removed::Done);
    assert_eq!(ledger(&store).remove().unwrap(), Removed::Already);
    assert_eq!(ledger(&store).read().unwrap().seq, 0);
}

#[test]
fn a_ledger_without_a_whole_record_is_swept_up() {
    let (dir, store) = store();
    ledger(&store).append(&Entry::Awake).unwrap();
    let path = dir.path().join("ledger").join(POD);
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..14]).unwrap();
    assert_eq!(store.ledgers().unwrap(), []);
    assert!(!path.exists());
}
