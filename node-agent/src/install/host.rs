//! Files of the host, reached through the mount point of the host's root directory.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use super::error::Error;

/// Maximum number of symbolic links in a path, as in the kernel.
const MAX_LINKS: usize = 40;

/// The mount point of the host's root directory.
#[derive(Debug, Clone)]
pub(super) struct HostRoot(PathBuf);

impl HostRoot {
    pub(super) fn new(root: &Path) -> Self {
        Self(root.to_owned())
    }

    /// Translates a path of the host into a path of this container. Resolves symbolic links within
    /// the host's root: the kernel would resolve an absolute link within this container's root.
    /// Components that do not exist yet stay as they are.
    pub(super) fn path(&self, host: &Path) -> Result<PathBuf, Error> {
        let mut left: VecDeque<OsString> = parts(host).collect();
        let mut found = PathBuf::from("/");
        let mut links = 0;
        while let Some(part) = left.pop_front() {
            if part == ".." {
                found.pop();
                continue;
            }
            let Ok(target) = fs::read_link(self.below(&found).join(&part)) else {
                found.push(part);
                continue;
            };
            links += 1;
            if links > MAX_LINKS {
                return Err(Error::SymlinkLoop {
                    path: self.below(host),
                });
            }
            if target.is_absolute() {
                found = PathBuf::from("/");
            }
            for part in parts(&target).collect::<Vec<_>>().into_iter().rev() {
                left.push_front(part);
            }
        }
        Ok(self.below(&found))
    }

    fn below(&self, host: &Path) -> PathBuf {
        self.0.join(host.strip_prefix("/").unwrap_or(host))
    }
}

fn parts(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    })
}

/// Mode and owner of a file to write.
#[derive(Debug, Clone, Copy)]
pub(super) enum Mode {
    /// This mode, and the user of this process as owner.
    New(u32),
    /// Mode and owner of the replaced file. A file that replaces none gets this mode.
    Kept(u32),
}

/// Reads a file; None if the file does not exist.
pub(super) fn read(path: &Path) -> Result<Option<Vec<u8>>, Error> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(source) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read {
            path: path.into(),
            source,
        }),
    }
}

/// Reads a text file; None if the file does not exist.
pub(super) fn read_text(path: &Path) -> Result<Option<String>, Error> {
    let Some(bytes) = read(path)? else {
        return Ok(None);
    };
    String::from_utf8(bytes).map(Some).map_err(|error| {
        let valid = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = valid.iter().filter(|byte| **byte == b'\n').count() + 1;
        Error::Syntax {
            path: path.into(),
            line,
            message: "not UTF-8".to_owned(),
        }
    })
}

/// Replaces a file atomically. Readers at any time, also after a crash, find the old content or the
/// whole new content.
pub(super) fn replace(path: &Path, mode: Mode, content: &mut impl io::Read) -> Result<(), Error> {
    let new = temporary(path);
    let written = write_new(&new, path, mode, content)
        .and_then(|()| fs::rename(&new, path))
        .and_then(|()| sync_dir(path));
    written.map_err(|source| {
        // A failure to remove the new file is ignored: the next attempt overwrites it.
        let _ = fs::remove_file(&new);
        Error::Write {
            path: path.into(),
            source,
        }
    })
}

fn write_new(new: &Path, old: &Path, mode: Mode, content: &mut impl io::Read) -> io::Result<()> {
    match fs::remove_file(new) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(new)?;
    io::copy(content, &mut file)?;
    file.flush()?;
    let bits = match (mode, fs::metadata(old)) {
        (Mode::Kept(_), Ok(old)) => {
            std::os::unix::fs::fchown(&file, Some(old.uid()), Some(old.gid()))?;
            old.mode() & 0o7777
        }
        (Mode::New(bits) | Mode::Kept(bits), _) => bits,
    };
    file.set_permissions(fs::Permissions::from_mode(bits))?;
    file.sync_all()
}

/// Returns the path of the new file, beside the old one. The name is fixed, so that the next
/// attempt overwrites a file that a crash has left.
fn temporary(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".torpor-new");
    path.with_file_name(name)
}

fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or_else(|| Path::new("/")))?.sync_all()
}

/// Removes a file, and the temporary file beside it that a crash may have left. Succeeds if they do
/// not exist.
pub(super) fn remove_file(path: &Path) -> Result<(), Error> {
    for path in [temporary(path), path.to_owned()] {
        match fs::remove_file(&path) {
            Ok(()) => sync_dir(&path).map_err(|source| Error::Write { path, source })?,
            Err(source) if source.kind() == ErrorKind::NotFound => {}
            Err(source) => return Err(Error::Remove { path, source }),
        }
    }
    Ok(())
}

/// Returns the missing directories of `path`, itself included, the outermost first.
pub(super) fn missing(path: &Path) -> Vec<PathBuf> {
    let mut missing: Vec<PathBuf> = path
        .ancestors()
        .take_while(|dir| !dir.exists())
        .map(Path::to_owned)
        .collect();
    missing.reverse();
    missing
}

/// Makes a directory and its missing parents. Sets this mode on the directory, even if the
/// directory existed before.
pub(super) fn make_dir(path: &Path, mode: u32) -> Result<(), Error> {
    fs::create_dir_all(path)
        .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)))
        .and_then(|()| sync_dir(path))
        .map_err(|source| Error::Write {
            path: path.into(),
            source,
        })
}

/// Sets the mode of a file, unless the file has this mode.
pub(super) fn set_mode(path: &Path, mode: u32) -> Result<(), Error> {
    fs::metadata(path)
        .and_then(|found| match found.mode() & 0o7777 == mode {
            true => Ok(()),
            false => fs::set_permissions(path, fs::Permissions::from_mode(mode)),
        })
        .map_err(|source| Error::Write {
            path: path.into(),
            source,
        })
}

/// Removes a directory if the directory exists and is empty.
pub(super) fn remove_empty_dir(path: &Path) -> Result<(), Error> {
    match fs::remove_dir(path) {
        Ok(()) => Ok(()),
        Err(source) => match source.kind() {
            ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty | ErrorKind::ResourceBusy => Ok(()),
            _ => Err(Error::Remove {
                path: path.into(),
                source,
            }),
        },
    }
}

/// Removes a directory and its content. A mount point is emptied and stays.
pub(super) fn remove_tree(path: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(source) => match source.kind() {
            ErrorKind::NotFound | ErrorKind::ResourceBusy => Ok(()),
            _ => Err(Error::Remove {
                path: path.into(),
                source,
            }),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn absolute_links_of_the_host_stay_within_its_root() {
        let root = tempfile::tempdir().expect("directory");
        let host = HostRoot::new(root.path());
        fs::create_dir_all(root.path().join("data/etc")).expect("directory");
        symlink("/data/etc", root.path().join("etc")).expect("link");
        symlink(
            "../../../main.toml",
            root.path().join("data/etc/config.toml"),
        )
        .expect("link");
        assert_eq!(
            host.path(Path::new("/etc/new/x")).expect("path"),
            root.path().join("data/etc/new/x")
        );
        assert_eq!(
            host.path(Path::new("/etc/config.toml")).expect("path"),
            root.path().join("main.toml")
        );
    }

    #[test]
    fn links_in_a_circle_are_refused() {
        let root = tempfile::tempdir().expect("directory");
        symlink("/b", root.path().join("a")).expect("link");
        symlink("/a", root.path().join("b")).expect("link");
        let error = HostRoot::new(root.path())
            .path(Path::new("/a"))
            .expect_err("a circle");
        assert_eq!(error.reason(), "SymlinkLoop");
    }

    #[test]
    fn a_replaced_file_keeps_its_mode_and_leaves_nothing_beside_it() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("config.toml");
        fs::write(&path, "old").expect("write");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("mode");
        fs::write(temporary(&path), "left by a crash").expect("write");
        replace(&path, Mode::Kept(0o644), &mut "new".as_bytes()).expect("replaced");
        assert_eq!(fs::read_to_string(&path).expect("read"), "new");
        assert_eq!(
            fs::metadata(&path).expect("metadata").mode() & 0o7777,
            0o640
        );
        assert_eq!(fs::read_dir(dir.path()).expect("list").count(), 1);
    }
}
