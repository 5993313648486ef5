//! The store with healthy and with damaged images.

mod common;

use std::fs;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};

use common::*;
use torpor_core::{ImageId, ImageState, PodUid};
use torpor_snapshots::{
    Capacity, Consumption, ContainerSpecDigest, ImageError, Removed, SaveError, SavedName, Store,
};

fn pod(name: &str) -> PodUid {
    PodUid::new(name).unwrap()
}

#[test]
fn a_committed_image_is_found_again_whole() {
    let (dir, store) = store();
    let committed = save(&store, 1).unwrap();
    let again = Store::open(dir.path()).unwrap();
    let found = again.image(&namespace(), &image(1)).unwrap();
    found.verify().unwrap();
    assert_eq!(
        (found.manifest(), found.digest()),
        (&committed.manifest, committed.digest)
    );
    let names: Vec<_> = found
        .manifest()
        .files
        .iter()
        .map(|f| (f.name.as_str(), f.size))
        .collect();
    assert_eq!(names, FILES.map(|(name, size)| (name, size as u64)));
    for (name, size) in FILES {
        let mut bytes = Vec::new();
        fs::File::from(found.open_file(name).unwrap())
            .read_to_end(&mut bytes)
            .unwrap();
        assert_eq!(bytes, content(name, size));
    }
    let listed = again.list().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(
        (&listed[0].id, listed[0].state),
        (&image(1), ImageState::Committed)
    );
    assert!(listed[0].size > committed.size, "the manifest counts, too");
    assert_eq!(again.list_pod(&pod(POD)).unwrap(), listed);
    assert_eq!(again.list_pod(&pod("other")).unwrap(), []);
    assert_eq!(again.pods().unwrap(), [pod(POD)].into());
}

#[test]
fn a_copy_shares_the_bytes_of_its_image_and_stays_when_that_is_removed() {
    let (_dir, store) = store();
    let size = save(&store, 1).unwrap().size;
    let copies: Vec<_> = (0..3)
        .map(|n| ImageId::parse(&format!("pod-{n}.1")).unwrap())
        .collect();
    for copy in &copies {
        store
            .copy_image(&namespace(), &image(1), copy, "b")
            .unwrap();
    }
    let all = store.list().unwrap();
    let sum: u64 = all.iter().map(|listed| listed.size).sum();
    assert_eq!(all.len(), 4);
    assert!(sum < size + 4 * 4096, "{sum} bytes for {size}");
    assert!(all.iter().all(|listed| listed.size < size / 3));
    store.remove_image(&namespace(), &image(1)).unwrap();
    for copy in &copies {
        let found = store.image(&namespace(), copy).unwrap();
        found.verify().unwrap();
        assert_eq!(found.manifest().parent, Some(image(1)));
        assert_eq!(found.manifest().pod_uid, *copy.pod());
    }
}

#[test]
fn a_copy_is_made_of_a_whole_image_and_replaces_no_other() {
    let (dir, store) = store();
    let copy = ImageId::parse("pod-b.1").unwrap();
    let copy_of = |number| store.copy_image(&namespace(), &image(number), &copy, "b");
    assert!(matches!(copy_of(1), Err(SaveError::NotGood { .. })));
    save(&store, 1).unwrap();
    save(&store, 2).unwrap();
    copy_of(1).unwrap();
    assert!(matches!(copy_of(2), Err(SaveError::Exists { .. })));
    store.remove_image(&namespace(), &copy).unwrap();
    fs::remove_file(image_dir(dir.path(), 2).join(FILES[0].0)).unwrap();
    assert!(matches!(copy_of(2), Err(SaveError::NotGood { .. })));
    assert_eq!(store.list_pod(copy.pod()).unwrap(), []);
}

#[test]
fn a_disk_has_room_while_its_reserve_stays_free() {
    let disk = |total, available| Capacity { total, available };
    for (disk, bytes, reserve, room) in [
        (disk(1000, 500), 450, 5, true),
        (disk(1000, 500), 451, 5, false),
        // Without a reserve the save is tried.
        (disk(1000, 500), 501, 0, true),
        // An image of unknown size (0 bytes) is refused if less than the reserve is free.
        (disk(1000, 49), 0, 5, false),
        (disk(1000, 500), u64::MAX, 5, false),
        // A file system that does not report its size.
        (disk(0, 0), 500, 5, true),
    ] {
        assert_eq!(disk.has_room(bytes, reserve), room, "{disk:?} {bytes}");
    }
}

#[test]
fn directories_and_files_are_closed_to_other_users() {
    let (dir, store) = store();
    save(&store, 1).unwrap();
    let mode = |path: &std::path::Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    // Root shares them with the agent.
    let (of_dir, of_file) = match rustix::process::geteuid().is_root() {
        true => (0o770, 0o640),
        false => (0o700, 0o600),
    };
    assert_eq!(mode(&image_dir(dir.path(), 1)), of_dir);
    for name in ["manifest.json", "pages.img"] {
        assert_eq!(mode(&image_dir(dir.path(), 1).join(name)), of_file);
    }
}

#[test]
fn an_image_is_made_once() {
    let (_dir, store) = store();
    save(&store, 1).unwrap();
    assert!(matches!(save(&store, 1), Err(SaveError::Exists { .. })));
    let _partial = store.begin(&namespace(), &image(2)).unwrap();
    assert!(matches!(
        store.begin(&namespace(), &image(2)),
        Err(SaveError::Exists { .. })
    ));
}

#[test]
fn an_image_that_is_being_written_reports_its_size() {
    let (_dir, store) = store();
    let partial = store.begin(&namespace(), &image(1)).unwrap();
    assert_eq!(partial.size().ok(), Some(0));
    for (name, size) in FILES {
        write(&partial, name, size).unwrap();
    }
    let expected: usize = FILES.iter().map(|(_, size)| size).sum();
    assert_eq!(partial.size().ok(), u64::try_from(expected).ok());
    symlink("/etc/passwd", partial.path().join("more.img")).unwrap();
    assert!(matches!(partial.size(), Err(SaveError::NotAFile { .. })));
}

#[test]
fn an_image_without_files_or_with_strange_ones_is_not_committed() {
    let (_dir, store) = store();
    let begin = |number| store.begin(&namespace(), &image(number)).unwrap();
    assert!(matches!(
        begin(1).commit(draft()),
        Err(SaveError::Empty { .. })
    ));
    let partial = begin(2);
    symlink("/etc/passwd", partial.path().join("pages.img")).unwrap();
    assert!(matches!(
        partial.commit(draft()),
        Err(SaveError::NotAFile { .. })
    ));
    let partial = begin(3);
    nix::unistd::mkfifo(
        &partial.path().join("pages.img"),
        nix::sys::stat::Mode::S_IRWXU,
    )
    .unwrap();
    assert!(matches!(
        partial.commit(draft()),
        Err(SaveError::NotAFile { .. })
    ));
    let partial = begin(4);
    for name in [
        "../x",
        "a/b",
        ".hidden",
        "manifest.json",
        "consumed",
        "",
        "A",
    ] {
        let refused = partial.open_file(name);
        assert!(matches!(refused, Err(SaveError::NotAFile { .. })), "{name}");
    }
}

#[test]
fn a_fetched_image_is_committed_only_with_the_files_of_its_manifest() {
    let (dir, store) = store();
    save(&store, 1).unwrap();
    let found = store.image(&namespace(), &image(1)).unwrap();
    let manifest = fs::read(found.path().join("manifest.json")).unwrap();
    store.remove_image(&namespace(), &image(1)).unwrap();
    let fetch = |change: &dyn Fn(&std::path::Path)| {
        let partial = store.begin(&namespace(), &image(1)).unwrap();
        for (name, size) in FILES {
            fs::write(partial.path().join(name), content(name, size)).unwrap();
        }
        change(partial.path());
        partial.commit_copy(&manifest)
    };
    let pages = FILES[2].0;
    let changes: [&dyn Fn(&std::path::Path); 4] = [
        &|path| {
            let mut bytes = fs::read(path.join(pages)).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(path.join(pages), bytes).unwrap();
        },
        &|path| fs::write(path.join(pages), "short").unwrap(),
        &|path| fs::remove_file(path.join(pages)).unwrap(),
        &|path| fs::write(path.join("more.img"), "more").unwrap(),
    ];
    for change in changes {
        assert!(matches!(fetch(change), Err(SaveError::Manifest { .. })));
        store.image(&namespace(), &image(1)).expect_err("committed");
        store.remove_partial(&namespace(), &image(1)).unwrap();
    }
    fetch(&|_| ()).unwrap();
    let again = Store::open(dir.path()).unwrap();
    again
        .image(&namespace(), &image(1))
        .unwrap()
        .verify()
        .unwrap();
}

#[test]
fn every_flipped_byte_is_found_and_its_file_named() {
    let (dir, store) = store();
    save(&store, 1).unwrap();
    for (name, size) in FILES {
        let path = image_dir(dir.path(), 1).join(name);
        for at in [0, size / 2, size - 1] {
            let mut bytes = fs::read(&path).unwrap();
            bytes[at] ^= 0x10;
            fs::write(&path, &bytes).unwrap();
            let error = store
                .image(&namespace(), &image(1))
                .unwrap()
                .verify()
                .unwrap_err();
            assert_eq!(error.reason(), "ImageCorrupt");
            assert!(
                matches!(&error, ImageError::FileChanged { name: found, .. } if found == name),
                "{error}"
            );
            bytes[at] ^= 0x10;
            fs::write(&path, &bytes).unwrap();
        }
    }
    store
        .image(&namespace(), &image(1))
        .unwrap()
        .verify()
        .unwrap();
}

#[test]
fn every_flipped_byte_of_the_manifest_is_found() {
    let (dir, store) = store();
    save(&store, 1).unwrap();
    let path = image_dir(dir.path(), 1).join("manifest.json");
    let whole = fs::read(&path).unwrap();
    for at in 0..whole.len() {
        for bit in [0x01, 0x20] {
            let mut bytes = whole.clone();
            bytes[at] ^= bit;
            fs::write(&path, &bytes).unwrap();
            let error = store.image(&namespace(), &image(1)).unwrap_err();
            assert_eq!(error.reason(), "ImageCorrupt", "byte {at}");
        }
    }
}

#[test]
fn damaged_files_are_told_apart_before_a_byte_is_hashed() {
    type Damage = fn(&std::path::Path);
    type Expected = fn(&ImageError) -> bool;
    let cases: [(&str, Damage, Expected); 8] = [
        (
            "truncated",
            |p| cut(&p.join("pages.img"), 300_000),
            |e| {
                matches!(
                    e,
                    ImageError::FileTruncated {
                        expected: 300_001,
                        found: 300_000,
                        ..
                    }
                )
            },
        ),
        (
            "too long",
            |p| cut(&p.join("pages.img"), 300_002),
            |e| {
                matches!(
                    e,
                    ImageError::FileTooLong {
                        expected: 300_001,
                        found: 300_002,
                        ..
                    }
                )
            },
        ),
        (
            "missing",
            |p| fs::remove_file(p.join("pages.img")).unwrap(),
            |e| {
                matches!(
                    e,
                    ImageError::FileMissing {
                        expected: 300_001,
                        ..
                    }
                )
            },
        ),
        (
            "extra",
            |p| fs::write(p.join("extra.img"), "x").unwrap(),
            |e| matches!(e, ImageError::FileUnexpected { name, .. } if name == "extra.img"),
        ),
        (
            "symlink",
            |p| swap(p, |at, moved| symlink(moved, at)),
            |e| matches!(e, ImageError::Unsafe(_)),
        ),
        (
            "directory",
            |p| swap(p, |at, _| fs::create_dir(at)),
            |e| matches!(e, ImageError::Unsafe(_)),
        ),
        (
            "writable",
            |p| chmod(&p.join("pages.img"), 0o602),
            |e| matches!(e, ImageError::Unsafe(_)),
        ),
        (
            "fifo",
            |p| {
                swap(p, |at, _| {
                    Ok(nix::unistd::mkfifo(at, nix::sys::stat::Mode::S_IRWXU)?)
                })
            },
            |e| matches!(e, ImageError::Unsafe(_)),
        ),
    ];
    for (what, damage, expected) in cases {
        let (dir, store) = store();
        save(&store, 1).unwrap();
        damage(&image_dir(dir.path(), 1));
        let found = store.image(&namespace(), &image(1)).unwrap();
        for error in [
            found.verify_sizes().unwrap_err(),
            found.verify().unwrap_err(),
        ] {
            assert!(expected(&error), "{what}: {error}");
            assert_eq!(error.reason(), "ImageCorrupt", "{what}");
        }
    }
}

fn cut(path: &std::path::Path, len: u64) {
    fs::File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(len)
        .unwrap();
}

fn chmod(path: &std::path::Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Moves pages.img out of the image and calls `put` to replace it.
fn swap(dir: &std::path::Path, put: fn(&std::path::Path, &std::path::Path) -> std::io::Result<()>) {
    let moved = dir.parent().unwrap().join("moved-away");
    fs::rename(dir.join("pages.img"), &moved).unwrap();
    put(&dir.join("pages.img"), &moved).unwrap();
}

#[test]
fn directories_that_are_not_ours_alone_are_refused() {
    type Damage = fn(&std::path::Path);
    let cases: [(&str, Damage); 4] = [
        ("image is a link", |root| relocate(&image_dir(root, 1))),
        ("namespace is a link", |root| {
            relocate(&root.join("images/team-a"))
        }),
        ("image is writable for others", |root| {
            chmod(&image_dir(root, 1), 0o702)
        }),
        ("image belongs to somebody else", |root| {
            std::os::unix::fs::chown(image_dir(root, 1), Some(4242), None).unwrap();
        }),
    ];
    for (what, damage) in cases {
        let (dir, store) = store();
        save(&store, 1).unwrap();
        damage(dir.path());
        let error = store.image(&namespace(), &image(1)).unwrap_err();
        assert!(matches!(error, ImageError::Unsafe(_)), "{what}: {error}");
        assert_eq!(store.list().unwrap(), [], "{what}");
    }
}

fn relocate(path: &std::path::Path) {
    let elsewhere = path.parent().unwrap().parent().unwrap().join("elsewhere");
    fs::rename(path, &elsewhere).unwrap();
    symlink(&elsewhere, path).unwrap();
}

#[test]
fn an_image_in_another_ones_place_is_refused() {
    let (dir, store) = store();
    save(&store, 1).unwrap();
    fs::rename(image_dir(dir.path(), 1), image_dir(dir.path(), 2)).unwrap();
    let error = store.image(&namespace(), &image(2)).unwrap_err();
    assert!(matches!(error, ImageError::WrongPlace { .. }), "{error}");
}

#[test]
fn a_huge_manifest_is_refused_unread() {
    let (dir, store) = store();
    save(&store, 1).unwrap();
    cut(&image_dir(dir.path(), 1).join("manifest.json"), 1 << 40);
    let error = store.image(&namespace(), &image(1)).unwrap_err();
    assert_eq!(error.reason(), "ImageCorrupt");
    assert!(format!("{:?}", error).contains("TooLarge"), "{error:?}");
}

#[test]
fn an_image_that_is_not_there_is_missing() {
    let (_dir, store) = store();
    let absent = store.image(&namespace(), &image(1)).unwrap_err();
    assert_eq!(absent.reason(), "ImageMissing");
    let _partial = store.begin(&namespace(), &image(1)).unwrap();
    assert_eq!(
        store.image(&namespace(), &image(1)).unwrap_err().reason(),
        "ImageMissing"
    );
}

#[test]
fn an_image_names_the_spec_or_fingerprint_that_does_not_fit() {
    let (_dir, store) = store();
    save(&store, 1).unwrap();
    let found = store.image(&namespace(), &image(1)).unwrap();
    let spec = |name: &str, of: &str| ContainerSpecDigest {
        name: SavedName::try_from(name.to_owned()).unwrap(),
        digest: spec_of(of),
    };
    let good = [spec("app", "app"), spec("", "")];
    found.check(&fingerprint(), &good).unwrap();
    let error = found
        .check(&fingerprint(), &[spec("app", "changed"), spec("", "")])
        .unwrap_err();
    assert_eq!(error.reason(), "SpecMismatch");
    assert!(
        error
            .to_string()
            .starts_with("container app has another spec"),
        "{error}"
    );
    let mut node = fingerprint();
    node.runsc_digest = "sha256:bb".into();
    let error = found.check(&node, &good).unwrap_err();
    assert_eq!(error.reason(), "FingerprintMismatch");
}

#[test]
fn one_pod_gets_an_image_and_keeps_it() {
    let (_dir, store) = store();
    save(&store, 1).unwrap();
    let found = store.image(&namespace(), &image(1)).unwrap();
    assert_eq!(found.consumed_by().unwrap(), None);
    assert_eq!(
        found.mark_consumed(&pod("pod-b")).unwrap(),
        Consumption::Marked
    );
    assert_eq!(
        found.mark_consumed(&pod("pod-b")).unwrap(),
        Consumption::Already
    );
    let error = found.mark_consumed(&pod("pod-c")).unwrap_err();
    assert_eq!(error.reason(), "ImageStale");
    assert!(error.to_string().contains("pod-b"), "{error}");
    assert_eq!(found.consumed_by().unwrap(), Some(pod("pod-b")));
    assert_eq!(store.list().unwrap()[0].consumed_by, Some(pod("pod-b")));
    found.verify().unwrap();
}

#[test]
fn a_marker_that_is_there_is_not_written_again() {
    let (dir, store) = store();
    save(&store, 1).unwrap();
    let found = store.image(&namespace(), &image(1)).unwrap();
    found.mark_consumed(&pod("pod-b")).unwrap();
    // State after a crash: the marker is in its place and also under its temporary name.
    let at = |name: &str| image_dir(dir.path(), 1).join(name);
    fs::hard_link(at("consumed"), at(".consumed-pod-b")).unwrap();
    let written = std::time::UNIX_EPOCH;
    let marker = fs::File::open(at("consumed")).unwrap();
    marker.set_modified(written).unwrap();
    assert_eq!(
        found.mark_consumed(&pod("pod-b")).unwrap(),
        Consumption::Already
    );
    assert_eq!(marker.metadata().unwrap().modified().unwrap(), written);
    assert!(!at(".consumed-pod-b").exists());
}

#[test]
fn an_image_is_given_back_only_by_the_pod_that_has_it() {
    let (_dir, store) = store();
    save(&store, 1).unwrap();
    let found = store.image(&namespace(), &image(1)).unwrap();
    found.mark_consumed(&pod("pod-b")).unwrap();
    assert_eq!(found.release(&pod("pod-c")).unwrap(), Removed::Already);
    assert_eq!(found.consumed_by().unwrap(), Some(pod("pod-b")));
    assert_eq!(found.release(&pod("pod-b")).unwrap(), Removed::Done);
    assert_eq!(found.release(&pod("pod-b")).unwrap(), Removed::Already);
    assert_eq!(
        found.mark_consumed(&pod("pod-c")).unwrap(),
        Consumption::Marked
    );
}

#[test]
fn exactly_one_of_many_pods_gets_an_image() {
    let (_dir, store) = store();
    save(&store, 1).unwrap();
    let marked = std::thread::scope(|scope| {
        let pods: Vec<_> = (0..16)
            .map(|n| {
                let store = &store;
                scope.spawn(move || {
                    let found = store.image(&namespace(), &image(1)).unwrap();
                    found.mark_consumed(&pod(&format!("pod-{n}"))).is_ok()
                })
            })
            .collect();
        pods.into_iter()
            .filter(|_| true)
            .map(|pod| pod.join().unwrap())
            .filter(|won| *won)
            .count()
    });
    assert_eq!(marked, 1);
}

#[test]
fn a_marker_that_cannot_be_read_counts_as_consumed() {
    let (dir, store) = store();
    save(&store, 1).unwrap();
    fs::write(image_dir(dir.path(), 1).join("consumed"), "../../x\n").unwrap();
    let found = store.image(&namespace(), &image(1)).unwrap();
    assert_eq!(
        found.mark_consumed(&pod("pod-b")).unwrap_err().reason(),
        "ImageStale"
    );
    assert!(store.list().unwrap()[0].consumed_by.is_some());
}

#[test]
fn removal_may_be_repeated_and_follows_no_links() {
    let (dir, store) = store();
    save(&store, 1).unwrap();
    let outside = dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("keep"), "x").unwrap();
    symlink(&outside, image_dir(dir.path(), 1).join("link")).unwrap();
    assert_eq!(
        store.remove_image(&namespace(), &image(1)).unwrap(),
        Removed::Done
    );
    assert_eq!(
        store.remove_image(&namespace(), &image(1)).unwrap(),
        Removed::Already
    );
    assert!(outside.join("keep").exists());
    assert!(
        !dir.path().join("images/team-a").exists(),
        "the empty namespace goes too"
    );
    let partial = store.begin(&namespace(), &image(2)).unwrap();
    write(&partial, "pages.img", 10).unwrap();
    assert_eq!(store.list().unwrap()[0].state, ImageState::Partial);
    assert_eq!(
        store.remove_partial(&namespace(), &image(2)).unwrap(),
        Removed::Done
    );
    assert_eq!(
        store.remove_partial(&namespace(), &image(2)).unwrap(),
        Removed::Already
    );
    assert_eq!(store.list().unwrap(), []);
}

#[test]
fn an_open_image_can_be_read_to_its_end_while_it_is_removed() {
    let (_dir, store) = store();
    save(&store, 1).unwrap();
    let found = store.image(&namespace(), &image(1)).unwrap();
    let mut file = fs::File::from(found.open_file("pages.img").unwrap());
    store.remove_image(&namespace(), &image(1)).unwrap();
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes.len(), 300_001);
}

#[test]
fn an_aborted_save_leaves_nothing() {
    let (_dir, store) = store();
    let partial = store.begin(&namespace(), &image(1)).unwrap();
    write(&partial, "pages.img", 10).unwrap();
    assert_eq!(partial.abort().unwrap(), Removed::Done);
    assert_eq!(store.list().unwrap(), []);
}

#[test]
fn the_disk_is_measured() {
    let (_dir, store) = store();
    let capacity = store.capacity().unwrap();
    assert!(0 < capacity.available && capacity.available <= capacity.total);
}
