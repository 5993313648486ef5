use std::{
    fs,
    io::Write as _,
    os::unix::fs::{PermissionsExt as _, symlink},
};

use rstest::rstest;
use tempfile::TempDir;

use super::*;

mod many;

/// Creates `outside/secret` beside the root `app`, which has links of all kinds.
fn world() -> (TempDir, Root) {
    let world = TempDir::new().unwrap();
    let (outside, app) = (world.path().join("outside"), world.path().join("app"));
    fs::create_dir(&outside).unwrap();
    fs::create_dir_all(app.join("sub/deep")).unwrap();
    fs::write(outside.join("secret"), "secret").unwrap();
    fs::write(app.join("a.txt"), "hello").unwrap();
    fs::write(app.join("sub/b.txt"), "b").unwrap();
    symlink("../outside/secret", app.join("out")).unwrap();
    symlink(outside.join("secret"), app.join("out-absolute")).unwrap();
    symlink("../outside", app.join("out-dir")).unwrap();
    symlink("sub/../../outside/secret", app.join("out-winding")).unwrap();
    symlink("../a.txt", app.join("sub/in")).unwrap();
    symlink(
        app.canonicalize().unwrap().join("sub"),
        app.join("in-absolute"),
    )
    .unwrap();
    symlink("nothing", app.join("dangling")).unwrap();
    symlink("loop", app.join("loop")).unwrap();
    let root = Root::open(&app).unwrap();
    (world, root)
}

#[rstest]
#[case("a.txt", Ok("hello"))]
#[case("/a.txt", Ok("hello"))]
#[case("sub/../a.txt", Ok("hello"))]
#[case("sub/in", Ok("hello"))]
#[case("in-absolute/b.txt", Ok("b"))]
#[case("in-absolute/../a.txt", Ok("hello"))]
#[case("out", Err("access denied"))]
#[case("out-absolute", Err("access denied"))]
#[case("out-dir/secret", Err("access denied"))]
#[case("out-winding", Err("access denied"))]
#[case("in-absolute/../../outside/secret", Err("access denied"))]
#[case("../outside/secret", Err("access denied"))]
#[case("missing/../../outside/secret", Err("access denied"))]
#[case("a.txt\0", Err("access denied"))]
#[case("missing", Err("no such file or directory"))]
#[case("missing/x", Err("no such file or directory"))]
#[case("dangling", Err("no such file or directory"))]
#[case("a.txt/x", Err("not a directory"))]
#[case("sub", Err("not a regular file"))]
#[case("", Err("not a regular file"))]
#[case("loop", Err("Too many levels of symbolic links (os error 40)"))]
fn only_files_below_the_root_are_read(#[case] path: &str, #[case] content: Result<&str, &str>) {
    let (_world, root) = world();
    let read = root.read(path).map(|(file, size)| {
        let content = io::read_to_string(file).unwrap();
        assert_eq!(size, content.len() as u64);
        content
    });
    let read = read.map_err(|error| error.to_string());
    assert_eq!(
        read.as_ref().map(String::as_str).map_err(String::as_str),
        content
    );
}

#[rstest]
#[case("a.txt", Some(true))]
#[case("sub/deep", Some(true))]
#[case("", Some(true))]
#[case("missing", Some(false))]
#[case("missing/x", Some(false))]
#[case("a.txt/x", Some(false))]
#[case("dangling", Some(false))]
#[case("loop", Some(false))]
#[case("out", None)]
#[case("out-dir/nothing", None)]
#[case("../app", None)]
fn existence_is_reported_below_the_root_only(#[case] path: &str, #[case] there: Option<bool>) {
    let (_world, root) = world();
    assert_eq!(root.exists(path).ok(), there);
}

#[test]
fn a_listing_describes_links_without_looking_outside() {
    let (_world, root) = world();
    let entries = root.list("/").unwrap();
    let find = |name: &str| entries.iter().find(|entry| entry.name == name).unwrap();
    assert_eq!((find("a.txt").size, find("a.txt").is_directory), (5, false));
    assert!(find("sub").is_directory && find("in-absolute").is_directory);
    assert!(!find("out-dir").is_directory && !find("dangling").is_directory);
    assert_eq!(find("out").size, "../outside/secret".len() as u64);
    assert!(find("a.txt").mod_time > 1e9);
    assert!(matches!(root.list("a.txt"), Err(Error::NotADirectory)));
    assert!(matches!(root.list("out-dir"), Err(Error::Denied)));
}

#[test]
fn a_file_is_replaced_whole_and_keeps_its_mode() {
    let (world, root) = world();
    let target = world.path().join("app/a.txt");
    fs::set_permissions(&target, fs::Permissions::from_mode(0o4750)).unwrap();
    let upload = root.begin("sub/in").unwrap();
    upload.file().unwrap().write_all(b"new").unwrap();
    assert_eq!(fs::read_to_string(&target).unwrap(), "hello");
    upload.finish().unwrap();
    assert_eq!(fs::read_to_string(&target).unwrap(), "new");
    assert_eq!(
        fs::metadata(&target).unwrap().permissions().mode() & 0o7777,
        0o750
    );
}

#[test]
fn an_incomplete_upload_leaves_nothing() {
    let (world, root) = world();
    let before = fs::read_dir(world.path().join("app")).unwrap().count();
    drop(root.begin("new").unwrap());
    assert_eq!(
        fs::read_dir(world.path().join("app")).unwrap().count(),
        before
    );
}

#[rstest]
#[case("out")]
#[case("out-absolute")]
#[case("out-dir/new")]
#[case("../new")]
fn nothing_is_written_outside(#[case] path: &str) {
    let (world, root) = world();
    assert!(matches!(root.begin(path), Err(Error::Denied)));
    let secret = fs::read_to_string(world.path().join("outside/secret")).unwrap();
    assert_eq!(secret, "secret");
}

#[rstest]
#[case("")]
#[case("sub")]
fn a_directory_is_not_written_over(#[case] path: &str) {
    let (_world, root) = world();
    assert!(matches!(root.begin(path), Err(Error::NotAFile)));
}

#[rstest]
#[case("new", "new")]
#[case("x/y/z", "x/y/z")]
#[case("sub/in", "a.txt")]
#[case("in-absolute/n/m", "sub/n/m")]
#[case("dangling", "nothing")]
fn a_file_is_put_with_the_directories_it_needs(#[case] path: &str, #[case] place: &str) {
    let (world, root) = world();
    let upload = root.put(path, 0o640, Existing::Replace).unwrap();
    upload.file().unwrap().write_all(b"new").unwrap();
    upload.finish().unwrap();
    let place = world.path().join("app").join(place);
    assert_eq!(fs::read(&place).unwrap(), b"new");
    assert_eq!(
        fs::metadata(place).unwrap().permissions().mode() & 0o7777,
        0o640
    );
}

#[rstest]
#[case("sub", "is a directory")]
#[case("", "is a directory")]
#[case("a.txt/x", "not a directory")]
#[case("out", "access denied")]
#[case("out-dir/x/y", "access denied")]
#[case("new/../../x", "access denied")]
#[case("new\0/x", "access denied")]
fn a_file_is_not_put_elsewhere(#[case] path: &str, #[case] error: &str) {
    let (world, root) = world();
    assert_eq!(
        root.put(path, 0o644, Existing::Replace)
            .unwrap_err()
            .to_string(),
        error
    );
    assert!(!world.path().join("outside/x").exists());
    assert!(!world.path().join("app/new").exists());
}

#[rstest]
#[case("a.txt", false, Ok(vec!["a.txt"]))]
#[case("out", false, Ok(vec!["out"]))]
#[case("out-dir", true, Ok(vec!["out-dir"]))]
#[case("sub/in", false, Ok(vec!["sub/in"]))]
#[case("sub/deep", false, Ok(vec!["sub/deep"]))]
#[case("sub/deep/..", true, Ok(vec!["sub"]))]
#[case("sub", true, Ok(vec!["sub"]))]
#[case("", true, Ok(vec!["a.txt", "sub", "out", "loop"]))]
#[case("sub", false, Err("directory not empty"))]
#[case("", false, Err("directory not empty"))]
#[case("missing", true, Err("no such file or directory"))]
#[case("out-dir/secret", true, Err("access denied"))]
#[case("../outside", true, Err("access denied"))]
fn only_the_named_entry_is_removed(
    #[case] path: &str,
    #[case] recursive: bool,
    #[case] removed: Result<Vec<&str>, &str>,
) {
    let (world, root) = world();
    let app = world.path().join("app");
    let result = root.remove(path, recursive).map_err(|e| e.to_string());
    let expected = removed.as_ref().map(drop).map_err(|e| e.to_string());
    assert_eq!(result, expected);
    for gone in removed.unwrap_or_default() {
        fs::symlink_metadata(app.join(gone)).unwrap_err();
    }
    assert!(app.exists());
    assert_eq!(
        fs::read(world.path().join("outside/secret")).unwrap(),
        b"secret"
    );
}

#[test]
fn the_removal_of_a_tree_that_is_too_deep_is_refused() {
    let (world, root) = world();
    let mut here = rustix::fs::open(world.path().join("app"), OFlags::PATH, Mode::empty()).unwrap();
    for _ in 0..=path::MAX_COMPONENTS {
        rustix::fs::mkdirat(&here, "d", Mode::RWXU).unwrap();
        here = rustix::fs::openat(&here, "d", OFlags::PATH, Mode::empty()).unwrap();
    }
    assert!(matches!(root.remove("d", true), Err(Error::TooDeep)));
}

#[test]
fn a_dangling_link_is_marked() {
    let (_world, root) = world();
    let dangling = |entry: Entry| entry.dangling.then_some(entry.name);
    let names: Vec<_> = root
        .list("")
        .unwrap()
        .into_iter()
        .filter_map(dangling)
        .collect();
    assert_eq!(
        names,
        [
            "dangling",
            "loop",
            "out",
            "out-absolute",
            "out-dir",
            "out-winding"
        ]
    );
}

/// Returns the paths of all entries below the root, relative to it, sorted.
fn found(world: &TempDir) -> Vec<String> {
    let app = world.path().join("app");
    let mut names = Vec::new();
    let mut ahead = vec![app.clone()];
    while let Some(directory) = ahead.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let entry = entry.unwrap();
            names.push(
                entry
                    .path()
                    .strip_prefix(&app)
                    .unwrap()
                    .display()
                    .to_string(),
            );
            if entry.file_type().unwrap().is_dir() {
                ahead.push(entry.path());
            }
        }
    }
    names.sort();
    names
}

#[rstest]
#[case("a.txt", "a.txt", 5, false, 0o100_644)]
#[case("/sub/../a.txt", "a.txt", 5, false, 0o100_644)]
#[case("sub/in", "in", 5, false, 0o100_644)]
fn the_entry_at_a_path_is_described(
    #[case] path: &str,
    #[case] name: &str,
    #[case] size: u64,
    #[case] is_directory: bool,
    #[case] mode: u32,
) {
    let (world, root) = world();
    let target = world.path().join("app/a.txt");
    fs::set_permissions(target, fs::Permissions::from_mode(0o4644)).unwrap();
    let entry = root.stat(path).unwrap();
    assert_eq!((entry.name.as_str(), entry.size), (name, size));
    assert_eq!(
        (entry.is_directory, entry.mode),
        (is_directory, mode & 0o777)
    );
    assert!(root.stat("").unwrap().is_directory);
    assert_eq!(root.stat("/").unwrap().name, "/");
    assert!(matches!(root.stat("out"), Err(Error::Denied)));
    assert!(matches!(root.stat("dangling"), Err(Error::Missing)));
}

#[test]
fn a_directory_is_created_with_its_parents() {
    let (world, root) = world();
    root.make_directory("new/er/est", 0o750).unwrap();
    let mode = |path: &str| {
        let path = world.path().join("app").join(path);
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    };
    assert_eq!(mode("new/er/est"), 0o750);
    root.make_directory("new/er/est", 0o700).unwrap();
    assert_eq!(mode("new/er/est"), 0o750);
    root.make_directory("in-absolute/made", 0o4777).unwrap();
    assert_eq!(mode("sub/made"), 0o777);
    root.make_directory("/", 0o755).unwrap();
    for (path, error) in [
        ("a.txt", "a file or link exists at the path"),
        ("a.txt/x", "not a directory"),
        ("out-dir/x", "access denied"),
        ("../x", "access denied"),
        ("out", "access denied"),
    ] {
        let refused = root.make_directory(path, 0o755).unwrap_err();
        assert_eq!(refused.to_string(), error, "{path}");
    }
    assert_eq!(
        fs::read_dir(world.path().join("outside")).unwrap().count(),
        1
    );
}

#[test]
fn a_move_renames_a_link_itself_and_replaces_only_allowed_entries() {
    let (world, root) = world();
    let app = world.path().join("app");
    let rename = |from, to, existing| root.rename(from, to, existing);
    rename("sub/b.txt", "new/place", Existing::Keep).unwrap();
    assert_eq!(fs::read(app.join("new/place")).unwrap(), b"b");
    // The link itself is moved, not its target, which is outside.
    rename("out", "new/out", Existing::Keep).unwrap();
    assert!(app.join("new/out").is_symlink());
    assert_eq!(
        fs::read(world.path().join("outside/secret")).unwrap(),
        b"secret"
    );
    rename("sub", "new/sub", Existing::Keep).unwrap();
    assert!(app.join("new/sub/deep").is_dir() && !app.join("sub").exists());
    let refused = |from, to, existing| rename(from, to, existing).unwrap_err().to_string();
    for (from, to, existing, error) in [
        (
            "a.txt",
            "new/place",
            Existing::Keep,
            "the path exists already",
        ),
        (
            "a.txt",
            "dangling",
            Existing::Keep,
            "the path exists already",
        ),
        (
            "new",
            "new/sub/x",
            Existing::Keep,
            "a directory cannot be put into itself",
        ),
        (
            "new",
            "new/sub/x",
            Existing::Replace,
            "a directory cannot be put into itself",
        ),
        ("a.txt", "new", Existing::Replace, "is a directory"),
        ("new/sub", "a.txt", Existing::Replace, "not a directory"),
        ("missing", "x", Existing::Keep, "no such file or directory"),
        ("a.txt/x", "x", Existing::Keep, "no such file or directory"),
        ("", "x", Existing::Keep, "the path is the root"),
        ("a.txt", "new/..", Existing::Replace, "the path is the root"),
        ("../outside/secret", "x", Existing::Keep, "access denied"),
        ("out-dir/secret", "x", Existing::Keep, "access denied"),
        ("a.txt", "../x", Existing::Keep, "access denied"),
        ("a.txt", "out-dir/x", Existing::Keep, "access denied"),
        ("a.txt", "x\0y", Existing::Keep, "access denied"),
    ] {
        assert_eq!(refused(from, to, existing), error, "{from} {to}");
    }
    rename("a.txt", "new/place", Existing::Replace).unwrap();
    assert_eq!(fs::read(app.join("new/place")).unwrap(), b"hello");
    fs::create_dir(app.join("empty")).unwrap();
    rename("new/sub", "empty", Existing::Replace).unwrap();
    assert!(app.join("empty/deep").is_dir());
    fs::create_dir(app.join("other")).unwrap();
    assert_eq!(
        refused("other", "empty", Existing::Replace),
        "directory not empty"
    );
    assert_eq!(
        fs::read_dir(world.path().join("outside")).unwrap().count(),
        1
    );
}

#[test]
fn a_write_that_must_not_replace_does_not_replace_a_file_that_appeared_meanwhile() {
    let (world, root) = world();
    let refused = root.put("a.txt", 0o644, Existing::Keep).unwrap_err();
    assert!(matches!(refused, Error::Exists));
    let upload = root.put("new", 0o644, Existing::Keep).unwrap();
    fs::write(world.path().join("app/new"), "other").unwrap();
    let refused = upload.finish_as(Existing::Keep).unwrap_err();
    assert!(matches!(refused, Error::Exists));
    assert_eq!(fs::read(world.path().join("app/new")).unwrap(), b"other");
    assert!(
        found(&world)
            .iter()
            .all(|name| !name.contains(".torpor-upload"))
    );
}
