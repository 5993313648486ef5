//! Calls that handle many entries: trees, copies and archives.

use super::*;

fn budget() -> budget::Budget {
    let (budget, guard) = budget::Budget::new(1000);
    // Dropping the guard would cancel the call.
    std::mem::forget(guard);
    budget
}

/// Drops capabilities of this thread that bypass file permissions. Each test has its own thread.
fn without_privileges() {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let mut sets = capabilities(None).unwrap();
    sets.effective -= CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
    set_capabilities(None, sets).unwrap();
}

#[test]
fn a_tree_names_all_below_and_follows_no_link() {
    let (_world, root) = world();
    let entries = root.tree("/", &mut budget()).unwrap();
    let seen: Vec<_> = entries.iter().filter(|entry| !entry.dangling).collect();
    let names: Vec<_> = seen.iter().map(|entry| entry.name.as_str()).collect();
    // A link within the root is listed, and the entries below its target only once.
    assert_eq!(
        names,
        [
            "a.txt",
            "in-absolute",
            "sub",
            "sub/b.txt",
            "sub/deep",
            "sub/in"
        ]
    );
    assert!(seen[1].is_directory && seen[4].is_directory);
    assert_eq!(seen[5].size, 5);
    let below = root.tree("sub", &mut budget()).unwrap();
    assert_eq!(below[0].name, "b.txt");
    assert!(matches!(
        root.tree("out-dir", &mut budget()),
        Err(Error::Denied)
    ));
    assert!(matches!(
        root.tree("a.txt", &mut budget()),
        Err(Error::NotADirectory)
    ));
}

#[test]
fn a_tree_that_is_too_deep_is_refused_and_not_cut() {
    let (world, root) = world();
    let mut path = world.path().join("app/sub/deep");
    for _ in 0..path::MAX_COMPONENTS - 1 {
        path.push("d");
        fs::create_dir(&path).unwrap();
    }
    let entries = root.tree("sub/deep", &mut budget()).unwrap();
    assert_eq!(entries.len(), path::MAX_COMPONENTS - 1);
    path.push("d");
    fs::create_dir(&path).unwrap();
    let refused = root.tree("sub/deep", &mut budget());
    assert!(matches!(refused, Err(Error::TooDeep)), "{refused:?}");
    let refused = root.copy("sub", "copy", Existing::Keep, &mut budget());
    assert!(matches!(refused, Err(Error::TooDeep)), "{refused:?}");
    // The incomplete copy is removed.
    let mut top = found(&world);
    top.retain(|name| !name.contains('/'));
    let world = [
        "a.txt",
        "dangling",
        "in-absolute",
        "loop",
        "out",
        "out-absolute",
        "out-dir",
    ];
    assert_eq!(top, [&world[..], &["out-winding", "sub"]].concat());
}

#[test]
fn a_link_with_a_path_that_is_too_long_is_an_error() {
    let (world, root) = world();
    let mut path = world.path().join("app/sub/deep");
    for _ in 0..path::MAX_COMPONENTS - 2 {
        path.push("d");
        fs::create_dir(&path).unwrap();
    }
    root.tree("sub/deep", &mut budget()).unwrap();
    symlink("d", path.join("link")).unwrap();
    let refused = root.tree("sub/deep", &mut budget());
    assert!(matches!(refused, Err(Error::LinkTooDeep)), "{refused:?}");
}

#[test]
fn a_copy_is_complete_and_follows_no_link() {
    let (world, root) = world();
    let app = world.path().join("app");
    let copy = |from, to, existing| root.copy(from, to, existing, &mut budget());
    fs::set_permissions(app.join("a.txt"), fs::Permissions::from_mode(0o4751)).unwrap();
    symlink("../../outside/secret", app.join("sub/out")).unwrap();
    fs::set_permissions(app.join("sub/deep"), fs::Permissions::from_mode(0o500)).unwrap();
    copy("sub/in", "new/a", Existing::Keep).unwrap();
    assert_eq!(fs::read(app.join("new/a")).unwrap(), b"hello");
    let mode = fs::metadata(app.join("new/a"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o7777, 0o751);
    copy("in-absolute", "new/sub", Existing::Keep).unwrap();
    assert_eq!(fs::read(app.join("new/sub/b.txt")).unwrap(), b"b");
    let mode = fs::metadata(app.join("new/sub/deep"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o7777, 0o500);
    // The link itself is copied, and does not lead out.
    assert!(app.join("new/sub/out").is_symlink());
    root.read("new/sub/out").unwrap_err();
    let refused = |from, to, existing| copy(from, to, existing).unwrap_err().to_string();
    for (from, to, existing, error) in [
        ("a.txt", "new/a", Existing::Keep, "the path exists already"),
        ("sub", "new/sub", Existing::Replace, "directory not empty"),
        ("sub", "a.txt", Existing::Replace, "not a directory"),
        ("a.txt", "sub", Existing::Replace, "is a directory"),
        (
            "sub",
            "sub/deep/er",
            Existing::Keep,
            "a directory cannot be put into itself",
        ),
        (
            "",
            "sub/all",
            Existing::Keep,
            "a directory cannot be put into itself",
        ),
        ("a.txt", "", Existing::Replace, "the path is the root"),
        ("missing", "x", Existing::Keep, "no such file or directory"),
        ("out", "x", Existing::Keep, "access denied"),
        ("out-dir", "x", Existing::Keep, "access denied"),
        ("out-dir/secret", "x", Existing::Keep, "access denied"),
        ("a.txt", "out-dir/x", Existing::Keep, "access denied"),
        ("a.txt", "../x", Existing::Keep, "access denied"),
    ] {
        assert_eq!(refused(from, to, existing), error, "{from} {to}");
    }
    copy("a.txt", "new/a", Existing::Replace).unwrap();
    // The link is replaced, not its target.
    copy("a.txt", "out", Existing::Replace).unwrap();
    assert!(app.join("out").is_file() && !app.join("out").is_symlink());
    assert_eq!(
        fs::read(world.path().join("outside/secret")).unwrap(),
        b"secret"
    );
    assert_eq!(
        fs::read_dir(world.path().join("outside")).unwrap().count(),
        1
    );
}

#[test]
fn an_incomplete_copy_leaves_nothing() {
    let (world, root) = world();
    let app = world.path().join("app");
    fs::write(app.join("sub/large"), vec![0; 1001]).unwrap();
    let before = found(&world);
    for from in ["sub", "sub/large"] {
        let refused = root.copy(from, "copy", Existing::Keep, &mut budget());
        assert!(matches!(refused, Err(Error::TooLarge(1000))), "{refused:?}");
    }
    fs::remove_file(app.join("sub/large")).unwrap();
    // The size of a sparse file counts, not its blocks.
    let sparse = fs::File::create(app.join("sub/sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    let refused = root.copy("sub", "copy", Existing::Keep, &mut budget());
    assert!(matches!(refused, Err(Error::TooLarge(1000))), "{refused:?}");
    fs::remove_file(app.join("sub/sparse")).unwrap();
    let pipe = app.join("sub/large");
    let mode = Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, pipe, FileType::Fifo, mode, 0).unwrap();
    for from in ["sub", "sub/large"] {
        let refused = root.copy(from, "copy", Existing::Keep, &mut budget());
        assert!(matches!(refused, Err(Error::Special)), "{refused:?}");
    }
    let (mut cancelled, guard) = budget::Budget::new(1000);
    drop(guard);
    let refused = root.copy("a.txt", "copy", Existing::Keep, &mut cancelled);
    assert!(
        matches!(refused, Err(Error::Io(Errno::CANCELED))),
        "{refused:?}"
    );
    assert_eq!(found(&world), before);
}

#[test]
fn an_incomplete_copy_without_write_permission_leaves_nothing() {
    let (world, root) = world();
    let app = world.path().join("app");
    let shut = ["sub/shut", "sub/shut/within"].map(|name| app.join(name));
    fs::create_dir_all(&shut[1]).unwrap();
    fs::write(shut[0].join("file"), "1").unwrap();
    fs::write(shut[1].join("file"), "1").unwrap();
    let set_all = |mode| {
        // Inner directories lose permissions first, outer directories get them back first.
        let mut names = shut.to_vec();
        if mode == 0o555 {
            names.reverse();
        }
        for name in names {
            fs::set_permissions(name, fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    set_all(0o555);
    without_privileges();
    fs::write(shut[0].join("new"), "").unwrap_err();
    let before = found(&world);
    // This copy fails at its last step.
    let refused = root.copy("sub", "a.txt", Existing::Replace, &mut budget());
    assert!(matches!(refused, Err(Error::NotADirectory)), "{refused:?}");
    assert_eq!(found(&world), before);
    // This copy fails after complete directories, in any order of the entries.
    for name in ["one", "two", "three"] {
        let name = app.join(name);
        fs::create_dir_all(name.join("shut")).unwrap();
        fs::write(name.join("shut/file"), [0; 400]).unwrap();
        let mode = fs::Permissions::from_mode(0o555);
        fs::set_permissions(name.join("shut"), mode).unwrap();
        fs::rename(&name, app.join("sub").join(name.file_name().unwrap())).unwrap();
    }
    let before = found(&world);
    let refused = root.copy("sub", "copy", Existing::Keep, &mut budget());
    assert!(matches!(refused, Err(Error::TooLarge(1000))), "{refused:?}");
    assert_eq!(found(&world), before);
    root.copy("sub/shut", "copy", Existing::Keep, &mut budget())
        .unwrap();
    let copy = fs::metadata(app.join("copy/within")).unwrap();
    assert_eq!(copy.permissions().mode() & 0o777, 0o555);
    // The removal of the test's directory needs write permissions.
    set_all(0o755);
    for name in ["one", "two", "three"] {
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(app.join("sub").join(name).join("shut"), mode).unwrap();
    }
    for name in ["copy", "copy/within"] {
        fs::set_permissions(app.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
}

fn names(path: &str) -> Vec<CString> {
    let names = path.split('/').map(|name| CString::new(name).unwrap());
    names.collect()
}

#[test]
fn parents_of_an_entry_count_as_entries() {
    let (world, root) = world();
    let mut budget = budget();
    for _ in 2..MAX_ENTRIES {
        budget.entry().unwrap();
    }
    let mut into = root.unpack("into", budget).unwrap();
    let refused = into.file(&names("a/b/c/file"), 0o644, 1, &mut &b"x"[..]);
    assert!(matches!(refused, Err(Error::TooMany)), "{refused:?}");
    let into = world.path().join("app/into");
    assert!(into.join("a/b").is_dir() && !into.join("a/b/c").exists());
}

#[test]
fn an_archives_directory_has_the_permissions_of_its_entry() {
    let (world, root) = world();
    let mut into = root.unpack("into", budget()).unwrap();
    into.directory(&names("open"), 0o777).unwrap();
    let open = fs::metadata(world.path().join("app/into/open")).unwrap();
    assert_eq!(open.permissions().mode() & 0o7777, 0o777);
}
