//! A process dies at each hit of each failpoint during a save, a consumption and a removal.
//! Afterwards the store contains nothing or a whole image, and the agent's plans come to an end.

mod agent;
mod common;

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use agent::{Agent, pod, snapshot};
use common::*;
use torpor_core::{Entry, ImageId, ImageState, LedgerState, Memory, PodUid, ledger};
use torpor_snapshots::{Store, failpoint};

const ROOT: &str = "TORPOR_TEST_ROOT";
/// Entries of a ledger that the next entry causes to be rewritten.
const LONG: usize = 900;
/// Entries of one image's life.
const ENTRIES: usize = 9;

/// Runs in the child process only.
#[test]
fn child() {
    if let Some(root) = std::env::var_os(ROOT) {
        lead(&Store::open(root).unwrap());
    }
}

/// Runs in the child process only.
#[test]
fn copying_child() {
    if let Some(root) = std::env::var_os(ROOT) {
        copy(&Store::open(root).unwrap());
    }
}

fn copied() -> ImageId {
    ImageId::parse("pod-b.1").unwrap()
}

/// Copies the image to another Pod.
fn copy(store: &Store) {
    let copied = store.copy_image(&namespace(), &image(1), &copied(), "b");
    copied.unwrap();
}

#[test]
fn a_copy_that_was_cut_off_is_made_again_and_the_original_is_whole() {
    let points = failpoint::ALL.iter();
    let of_copy = |point: &&&str| point.starts_with("begin:") || point.starts_with("commit:");
    let mut deaths = 0;
    for point in points.filter(of_copy) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        save(&store, 1).unwrap();
        deaths += u32::from(child_dies_at(
            "copying_child",
            &format!("{point}#1"),
            dir.path(),
        ));
        for _ in 0..2 {
            copy(&store);
        }
        for id in [image(1), copied()] {
            store.image(&namespace(), &id).unwrap().verify().unwrap();
        }
        assert_eq!(store.list().unwrap().len(), 2, "{point}");
    }
    assert!(deaths >= 4, "{deaths} deaths");
}

/// Does all that the agent does with an image, from its save to its removal.
fn lead(store: &Store) {
    let ledger = store.ledger(&pod()).unwrap();
    let append = |entry: &Entry| {
        ledger.append(entry).unwrap();
    };
    let [
        saving,
        committed,
        adopted,
        asleep,
        waking,
        failed,
        again,
        awake,
        discarded,
    ] = entries();
    append(&saving);
    save(store, 1).unwrap();
    append(&committed);
    append(&adopted);
    append(&asleep);
    append(&waking);
    append(&failed);
    append(&again);
    append_to_a_long_ledger(store);
    let found = store.image(&namespace(), &image(1)).unwrap();
    found.mark_consumed(&PodUid::new("pod-b").unwrap()).unwrap();
    append(&awake);
    store.remove_image(&namespace(), &image(1)).unwrap();
    append(&discarded);
}

/// Returns one entry of each kind, with a second attempt of the wake.
fn entries() -> [Entry; ENTRIES] {
    let waking = Entry::Waking { image: image(1) };
    [
        Entry::Saving {
            image: image(1),
            snapshots: [].into(),
        },
        Entry::Committed { image: image(1) },
        Entry::Adopted {
            image: image(1),
            snapshots: [snapshot()].into(),
        },
        Entry::Asleep {
            image: image(1),
            by_itself: false,
        },
        waking.clone(),
        Entry::WakeFailed {
            image: image(1),
            reason: "RestoreFailed".to_owned(),
        },
        waking,
        Entry::Awake,
        Entry::Discarded { image: image(1) },
    ]
}

fn old_pod() -> PodUid {
    PodUid::new("old-pod").unwrap()
}

/// Appends to another Pod's long ledger. The long ledger is written with one call, because hundreds
/// of appends would be slow.
fn append_to_a_long_ledger(store: &Store) {
    let mut bytes = ledger::encode_header().to_vec();
    for _ in 0..LONG {
        bytes.extend(
            ledger::encode(&Entry::Asleep {
                image: image(1),
                by_itself: false,
            })
            .unwrap(),
        );
    }
    let path = store.root().join("ledger").join(old_pod().as_str());
    std::fs::write(&path, bytes).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    store
        .ledger(&old_pod())
        .unwrap()
        .append(&Entry::Awake)
        .unwrap();
}

/// Runs a child that dies, once for each hit of each failpoint, and calls `check` with the
/// failpoint (name and number) and the store's root.
fn at_each_death(mut check: impl FnMut(&str, &Path)) {
    for name in failpoint::ALL {
        for number in 1.. {
            let dir = tempfile::tempdir().unwrap();
            let point = format!("{name}#{number}");
            if !dies_at(&point, dir.path()) {
                assert!(number > 1, "{name} was not passed");
                break;
            }
            check(&point, dir.path());
        }
    }
}

/// Reports whether the child died at the failpoint.
fn dies_at(point: &str, root: &Path) -> bool {
    child_dies_at("child", point, root)
}

/// Runs this test in a child; reports whether the child died at the failpoint.
fn child_dies_at(test: &str, point: &str, root: &Path) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test])
        .env(ROOT, root)
        .env(failpoint::VARIABLE, point);
    let output = command.output().unwrap();
    let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
    assert!(
        output.status.success() || signal == Some(6),
        "{point}: {output:?}"
    );
    !output.status.success()
}

fn name_of(point: &str) -> &str {
    point.split_once('#').map_or(point, |(name, _)| name)
}

#[test]
fn a_death_at_any_point_leaves_nothing_or_a_whole_image() {
    let mut last_entries = BTreeSet::new();
    at_each_death(|point, root| {
        let store = Store::open(root).unwrap();
        let state = store.ledger(&pod()).unwrap().read().unwrap();
        assert_not_shortened(point, &store.ledger(&old_pod()).unwrap().read().unwrap());
        let mut whole = Vec::new();
        for listed in store.list().unwrap() {
            match listed.state {
                ImageState::Committed => {
                    store
                        .image(&namespace(), &listed.id)
                        .unwrap()
                        .verify()
                        .unwrap();
                    whole.push(listed.id);
                }
                ImageState::Partial => {
                    store.remove_partial(&namespace(), &listed.id).unwrap();
                }
            }
        }
        assert_agrees(point, &state, !whole.is_empty());
        assert!(
            store
                .list()
                .unwrap()
                .iter()
                .all(|l| l.state == ImageState::Committed),
            "{point}"
        );
        if let Some(image) = whole.first() {
            store.recommit(&namespace(), image).unwrap();
            store.remove_image(&namespace(), image).unwrap();
        }
        assert_eq!(store.list().unwrap(), [], "{point}");
        if name_of(point) == "ledger:synced" {
            last_entries.insert(usize::try_from(state.seq).unwrap());
        }
    });
    let each = (1..=ENTRIES).collect();
    assert_eq!(last_entries, each, "each entry was the last one");
}

/// Asserts that the long ledger, rewritten or not, has no entry yet, all its entries, or one more.
fn assert_not_shortened(point: &str, state: &LedgerState) {
    let before = LONG as u64;
    assert!(
        [0, before, before + 1].contains(&state.seq),
        "{point}: {state:?}"
    );
    assert!(
        name_of(point) != "ledger:folded" || state.seq == before + 1,
        "the entry was durable already"
    );
}

/// Asserts that the ledger's state is that of the entries so far. Also asserts that an image exists
/// if the ledger requires it, and exactly at the failpoints at which it must.
fn assert_agrees(point: &str, state: &LedgerState, whole: bool) {
    let count = usize::try_from(state.seq).unwrap();
    assert_eq!(*state, LedgerState::fold(&entries()[..count]), "{point}");
    let needs = !matches!(state.memory, Memory::Live | Memory::Saving { .. });
    assert!(whole || !needs, "{point}: {state:?} without the image");
    let image = state.images.get(&image(1));
    let expected = match name_of(point) {
        "begin:created"
        | "commit:synced"
        | "commit:manifest-written"
        | "commit:directory-synced"
        | "ledger:created"
        | "remove:renamed"
        | "remove:emptied" => false,
        // The image exists between the commit's entry and the removal's entry.
        "ledger:appended" | "ledger:synced" => image.is_some_and(|image| image.committed),
        _ => true,
    };
    assert_eq!(whole, expected, "{point}");
}

#[test]
fn after_a_death_at_any_point_the_same_steps_can_be_completed() {
    at_each_death(|point, root| {
        let store = Store::open(root).unwrap();
        Agent::rebooted(&store).assert_keeps_what_is_needed(point);
        let mut agent = Agent::new(&store);
        agent.assert_keeps_what_is_needed(point);
        agent.settle(point);
        assert_eq!(store.list().unwrap(), [], "{point}");
        lead(&store);
        assert_eq!(store.list().unwrap(), [], "{point}");
        assert_eq!(
            store.ledger(&pod()).unwrap().read().unwrap().memory,
            Memory::Live
        );
    });
}
