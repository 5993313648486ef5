//! A disk that becomes full at any stage of a save: a small tmpfs in a mount namespace of its own.

mod common;

use std::fs;
use std::process::Command;

use common::*;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use torpor_core::{Entry, ImageState, Memory, PodUid};
use torpor_snapshots::Store;

const ROOT: &str = "TORPOR_TEST_DISK";

#[test]
fn a_full_disk_is_reported_and_nothing_is_lost() {
    if let Some(root) = std::env::var_os(ROOT) {
        return in_namespace(root.as_ref());
    }
    let dir = tempfile::tempdir().unwrap();
    let name = "a_full_disk_is_reported_and_nothing_is_lost";
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(ROOT, dir.path())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Runs in a process of its own. No other process sees the mount, and it ends with the process.
fn in_namespace(root: &std::path::Path) {
    unshare(CloneFlags::CLONE_NEWNS).expect("this test needs root");
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    let size = Some("size=1m,mode=700");
    mount(Some("tmpfs"), root, Some("tmpfs"), MsFlags::empty(), size).unwrap();
    let store = Store::open(root).unwrap();
    let ledger = store.ledger(&PodUid::new(POD).unwrap()).unwrap();
    ledger.append(&Entry::Awake).unwrap();
    save(&store, 1).expect("one image fits");

    // An image that is certainly too large is refused before the save begins.
    let error = store.check_room(2 << 20, 5).unwrap_err();
    assert_eq!(error.reason(), "DiskFull", "{error:?}");
    let (words, path) = (error.to_string(), root.display().to_string());
    for part in [path.as_str(), "may take 2 MiB", "enlarge the disk"] {
        assert!(words.contains(part), "{words}");
    }
    store.check_room(4096, 5).unwrap();

    // The disk is filled but for a growing number of pages, so that each stage of a save fails
    // once.
    let mut failed_at = std::collections::BTreeSet::new();
    for spare in 0..130 {
        let filler = root.join("filler");
        fill(&filler, spare * 4096);
        match try_save(&store) {
            Ok(()) => failed_at.insert("nothing"),
            Err(stage) => failed_at.insert(stage),
        };
        store
            .image(&namespace(), &image(1))
            .unwrap()
            .verify()
            .expect("the first image is whole");
        for listed in store
            .list()
            .unwrap()
            .into_iter()
            .filter(|l| l.id == image(2))
        {
            assert_eq!(listed.state, ImageState::Partial);
            store
                .remove_partial(&namespace(), &image(2))
                .expect("removing needs no room");
        }
        fs::remove_file(filler).unwrap();
    }
    // A directory needs no space on a tmpfs, so that the beginning always succeeds.
    let all = ["commit", "nothing", "write"];
    assert_eq!(failed_at.into_iter().collect::<Vec<_>>(), all);

    // The ledger has allocated space for the records without which a sandbox could not run on.
    let filler = root.join("filler");
    fill(&filler, 0);
    for _ in 0..200 {
        ledger
            .append(&Entry::Awake)
            .expect("there is room set aside for the ledger");
    }
    assert_eq!(ledger.read().unwrap().memory, Memory::Live);
    let other = store.ledger(&PodUid::new("pod-new").unwrap()).unwrap();
    let error = other.append(&Entry::Awake).unwrap_err();
    assert_eq!(error.reason(), "DiskFull", "{error:?}");
    assert_eq!(other.read().unwrap().seq, 0);
    fs::remove_file(filler).unwrap();
    assert_eq!(other.append(&Entry::Awake).unwrap().seq, 1);
}

/// Fills the disk and then frees `spare` bytes.
fn fill(path: &std::path::Path, spare: u64) {
    let file = fs::File::create(path).unwrap();
    let mut len = 0;
    let page = [7; 4096];
    while std::os::unix::fs::FileExt::write_at(&file, &page, len).is_ok_and(|n| n == page.len()) {
        len += page.len() as u64;
    }
    file.set_len(len.saturating_sub(spare)).unwrap();
}

fn try_save(store: &Store) -> Result<(), &'static str> {
    let partial = match store.begin(&namespace(), &image(2)) {
        Ok(partial) => partial,
        Err(error) => {
            assert_eq!(error.reason(), "DiskFull", "{error:?}");
            return Err("begin");
        }
    };
    for (name, size) in FILES {
        if let Err(error) = write(&partial, name, size) {
            let full = error.kind() == std::io::ErrorKind::StorageFull;
            assert!(full || error.to_string().contains("no room"), "{error:?}");
            return Err("write");
        }
    }
    match partial.commit(draft()) {
        Ok(_) => {
            store.remove_image(&namespace(), &image(2)).unwrap();
            Ok(())
        }
        Err(error) => {
            assert_eq!(error.reason(), "DiskFull", "{error:?}");
            Err("commit")
        }
    }
}
