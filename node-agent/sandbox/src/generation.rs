//! The generation of a container: a file in the container whose content changes whenever a new
//! sandbox continues from memory. A program recognizes by the file that other copies of it may
//! exist. A virtual machine has its Generation ID for that, and gVisor has none. See
//! docs/clones.md.

use std::io::Write;
use std::path::Path;

use anyhow::Context;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, mkdirat, openat2};
use rustix::io::Errno;
use torpor_inside::notes::{FOLDER, GENERATION};

/// Each part of [`FOLDER`]: its parent folder and its name.
const FOLDERS: [(&str, &str); 2] = [("/", "run"), ("/run", "torpor")];

/// Returns a random UUID (RFC 9562, version 4) that the kernel makes.
pub fn new() -> anyhow::Result<String> {
    let path = "/proc/sys/kernel/random/uuid";
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    Ok(text.trim().to_owned())
}

/// Creates the file in a container's root file system, before the container's programs run. `root`:
/// path of the root file system on the host. Symbolic links of the container image resolve within
/// the root. An existing file stays unchanged.
pub fn place(root: &Path) -> anyhow::Result<()> {
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
    match openat2(
        &folder,
        GENERATION.file,
        new_file,
        Mode::from_raw_mode(0o644),
        found,
    ) {
        Ok(file) => Ok(writeln!(std::fs::File::from(file), "{}", new()?)?),
        Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_container_has_a_generation_of_its_own_that_stays_while_it_is_there() {
        let roots = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let read = |root: &Path| std::fs::read_to_string(root.join("run/torpor/generation"));
        let mut generations = Vec::new();
        for root in &roots {
            place(root.path()).expect("placed");
            let text = read(root.path()).expect("read");
            place(root.path()).expect("again");
            assert_eq!(read(root.path()).expect("read"), text);
            assert_eq!(text.len(), 37, "{text:?}");
            generations.push(text);
        }
        assert_ne!(generations[0], generations[1]);
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
