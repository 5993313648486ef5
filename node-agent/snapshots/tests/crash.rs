//! The process dies at every failpoint, once on its way through a save, a consumption and a removal.
//! Afterwards the store holds either nothing or a whole image, and what is left can be removed.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use common::*;
use torpor_core::{Entry, ImageState, LedgerState, Memory, PodUid, ledger};
use torpor_snapshots::{Store, failpoint};

const ROOT: &str = "TORPOR_TEST_ROOT";
/// Entries that make a ledger so long that the next one has it rewritten.
const LONG: usize = 900;

fn pod() -> PodUid {
    PodUid::new(POD).unwrap()
}

/// The life of an image, as the agent leads it. Runs in the child only.
#[test]
fn child() {
    let Some(root) = std::env::var_os(ROOT) else {
        return;
    };
    let store = Store::open(root).unwrap();
    let ledger = store.ledger(&pod()).unwrap();
    ledger
        .append(&Entry::Saving {
            image: image(1),
            snapshots: [].into(),
        })
        .unwrap();
    save(&store, 1).unwrap();
    ledger
        .append(&Entry::Committed { image: image(1) })
        .unwrap();
    ledger
        .append(&Entry::Asleep {
            image: image(1),
            by_itself: false,
        })
        .unwrap();
    append_to_a_long_ledger(&store);
    let found = store.image(&namespace(), &image(1)).unwrap();
    found.mark_consumed(&PodUid::new("pod-b").unwrap()).unwrap();
    ledger.append(&Entry::Awake).unwrap();
    store.remove_image(&namespace(), &image(1)).unwrap();
    ledger
        .append(&Entry::Discarded { image: image(1) })
        .unwrap();
}

fn old_pod() -> PodUid {
    PodUid::new("old-pod").unwrap()
}

/// Another Pod's ledger, written at once: hundreds of appends would take their time.
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

/// Whether the child died at the point.
fn live(root: &Path, point: Option<&str>) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "child"])
        .env(ROOT, root)
        .env_remove(failpoint::VARIABLE);
    if let Some(point) = point {
        command.env(failpoint::VARIABLE, point);
    }
    let output = command.output().unwrap();
    let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
    assert!(
        output.status.success() || signal == Some(6),
        "{point:?}: {output:?}"
    );
    !output.status.success()
}

#[test]
fn a_death_at_any_point_leaves_nothing_or_a_whole_image() {
    for point in failpoint::ALL {
        let dir = tempfile::tempdir().unwrap();
        assert!(live(dir.path(), Some(point)), "{point} was not passed");
        let store = Store::open(dir.path()).unwrap();
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
    }
}

/// Rewritten or not, a ledger says the same: nothing yet, all that was there, or one more.
fn assert_not_shortened(point: &str, state: &LedgerState) {
    let before = LONG as u64;
    assert!(
        [0, before, before + 1].contains(&state.seq),
        "{point}: {state:?}"
    );
    assert!(
        point != "ledger:folded" || state.seq == before + 1,
        "the entry was durable already"
    );
}

/// The ledger never promises an image that is not there, and never forgets one that is needed.
fn assert_agrees(point: &str, state: &LedgerState, whole: bool) {
    let needs = !matches!(state.memory, Memory::Live | Memory::Saving { .. });
    assert!(whole || !needs, "{point}: {state:?} without the image");
    let early = [
        "begin:created",
        "commit:synced",
        "commit:manifest-written",
        "commit:directory-synced",
    ];
    let late = [
        "ledger:created",
        "ledger:appended",
        "ledger:synced",
        "remove:renamed",
        "remove:emptied",
    ];
    let expected = !early.contains(&point) && !late.contains(&point);
    assert_eq!(whole, expected, "{point}");
}

#[test]
fn after_a_death_at_any_point_the_same_life_can_be_led_to_its_end() {
    for point in failpoint::ALL {
        let dir = tempfile::tempdir().unwrap();
        assert!(live(dir.path(), Some(point)));
        let store = Store::open(dir.path()).unwrap();
        store.remove_partial(&namespace(), &image(1)).unwrap();
        store.remove_image(&namespace(), &image(1)).unwrap();
        assert!(!live(dir.path(), None), "{point}");
        assert_eq!(store.list().unwrap(), [], "{point}");
        assert_eq!(
            store.ledger(&pod()).unwrap().read().unwrap().memory,
            Memory::Live
        );
    }
}
