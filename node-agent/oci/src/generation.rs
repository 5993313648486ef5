//! The generation of a container: a file in it that has another content whenever a new sandbox goes
//! on from memory, so that a program can tell that it may be one of several (as a virtual machine's
//! Generation ID does, which gVisor has none of). See docs/clones.md.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::Context;
use nix::libc;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, mkdirat, openat2};
use rustix::io::Errno;

/// Where programs find it: the folder and the file.
const FOLDER: &str = "/run/torpor";
const FILE: &str = "generation";
/// Each part of [`FOLDER`] with the folder that it is in.
const FOLDERS: [(&str, &str); 2] = [("/", "run"), ("/run", "torpor")];

/// A random UUID (RFC 9562, version 4), as the kernel makes one.
pub(crate) fn new() -> anyhow::Result<String> {
    let path = "/proc/sys/kernel/random/uuid";
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    Ok(text.trim().to_owned())
}

/// Puts the file into a container's root file system, before its programs run. `root`: the path of
/// that on the host. The image may have links in it, which lead nowhere but into the root; a file
/// that is there stays as it is.
pub(crate) fn place(root: &Path) -> anyhow::Result<()> {
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let root = openat2(CWD, root, directory, Mode::empty(), ResolveFlags::empty())?;
    let open = |folder: &str| openat2(&root, folder, directory, Mode::empty(), inside);
    for (parent, name) in FOLDERS {
        match mkdirat(open(parent)?, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            made => made?,
        }
    }
    let folder = open(FOLDER)?;
    let new_file = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let found = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    match openat2(&folder, FILE, new_file, Mode::from_raw_mode(0o644), found) {
        Ok(file) => Ok(writeln!(std::fs::File::from(file), "{}", new()?)?),
        Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Writes the file, in the container: over what is there, so that whoever watches the file
/// (inotify) sees it change.
pub(crate) fn set(generation: &str) -> anyhow::Result<()> {
    std::fs::create_dir_all(FOLDER)?;
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o644)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(Path::new(FOLDER).join(FILE))?;
    Ok(writeln!(file, "{generation}")?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_container_has_a_generation_of_its_own_that_stays_while_it_is_there() {
        let roots = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let read = |root: &Path| std::fs::read_to_string(root.join("run/torpor/generation"));
        let mut said = Vec::new();
        for root in &roots {
            place(root.path()).expect("placed");
            let text = read(root.path()).expect("read");
            place(root.path()).expect("again");
            assert_eq!(read(root.path()).expect("read"), text);
            assert_eq!(text.len(), 37, "{text:?}");
            said.push(text);
        }
        assert_ne!(said[0], said[1]);
    }

    #[test]
    fn links_of_an_image_lead_nowhere_but_into_its_root() {
        let outside = tempfile::tempdir().expect("a directory");
        let root = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(root.path().join("var")).expect("made");
        symlink("/var", root.path().join("run")).expect("made");
        place(root.path()).expect("placed");
        assert!(root.path().join("var/torpor/generation").is_file());

        let hostile = tempfile::tempdir().expect("a directory");
        symlink(outside.path(), hostile.path().join("run")).expect("made");
        place(hostile.path()).expect_err("there is no such folder in it");
        std::fs::remove_file(hostile.path().join("run")).expect("removed");
        std::fs::create_dir_all(hostile.path().join("run/torpor")).expect("made");
        symlink(
            outside.path().join("x"),
            hostile.path().join("run/torpor/generation"),
        )
        .expect("made");
        place(hostile.path()).expect("what is there stays");
        assert_eq!(std::fs::read_dir(outside.path()).expect("read").count(), 0);
    }
}
