//! Files of a container by which Torpor tells its programs something. A file is written in its
//! place, so that a program that watches it (inotify) gets an event.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::ensure;
use rustix::fs::OFlags;

/// Folder of the files in the container.
pub const FOLDER: &str = "/run/torpor";
/// Most bytes of a file that are read.
const MOST: u64 = 64;

/// A file of a container.
#[derive(Debug, Clone, Copy)]
pub struct Note {
    pub file: &'static str,
    /// The old content is removed before the new one is written.
    truncates: bool,
}

/// The generation of the container. All generations have one length. The file is not emptied first:
/// a program that reads it sees the old generation or the new one.
pub const GENERATION: Note = Note {
    file: "generation",
    truncates: false,
};

/// The claim that has arrived.
pub const CLAIM: Note = Note {
    file: "claim",
    truncates: true,
};

impl Note {
    /// Writes the file of the container in which the caller runs.
    pub fn set(self, text: &str) -> anyhow::Result<()> {
        self.set_in(Path::new(FOLDER), text)
    }

    /// Checks that the container in which the caller runs has a file with this text.
    pub fn has(self, text: &str) -> anyhow::Result<()> {
        self.has_in(Path::new(FOLDER), text)
    }

    fn set_in(self, folder: &Path, text: &str) -> anyhow::Result<()> {
        std::fs::create_dir_all(folder)?;
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(self.truncates);
        let mut file = open(options.mode(0o644), folder.join(self.file))?;
        Ok(writeln!(file, "{text}")?)
    }

    fn has_in(self, folder: &Path, text: &str) -> anyhow::Result<()> {
        let file = open(OpenOptions::new().read(true), folder.join(self.file))?;
        let mut found = String::new();
        file.take(MOST).read_to_string(&mut found)?;
        ensure!(found.trim_end() == text, "it has another text");
        Ok(())
    }
}

/// Opens a file where a program may have put something else: follows no link, and waits for no
/// pipe.
fn open(options: &mut OpenOptions, path: PathBuf) -> std::io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let flags = i32::try_from(flags.bits()).unwrap_or_default();
    options.custom_flags(flags).open(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    #[test]
    fn a_note_is_written_in_its_place_and_read_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let folder = dir.path().join("run/torpor");
        for note in [GENERATION, CLAIM] {
            note.has_in(&folder, "one").expect_err("there is none");
            note.set_in(&folder, "one").expect("written");
            let path = folder.join(note.file);
            let inode = std::fs::metadata(&path).expect("there").ino();
            note.set_in(&folder, "two").expect("written");
            assert_eq!(std::fs::metadata(&path).expect("there").ino(), inode);
            note.has_in(&folder, "two").expect("it has");
            note.has_in(&folder, "one").expect_err("not any more");
        }
    }

    #[test]
    fn a_link_in_a_notes_place_leads_nowhere() {
        let dir = tempfile::tempdir().expect("a directory");
        let elsewhere = dir.path().join("elsewhere");
        std::fs::write(&elsewhere, "mine").expect("written");
        symlink(&elsewhere, dir.path().join(CLAIM.file)).expect("linked");
        CLAIM.set_in(dir.path(), "one").expect_err("a link");
        CLAIM.has_in(dir.path(), "mine").expect_err("a link");
        assert_eq!(std::fs::read(&elsewhere).expect("read"), b"mine");
    }
}
