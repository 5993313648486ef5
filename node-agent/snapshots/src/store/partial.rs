//! Makes an image: begin it, write its files, commit it.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::RenameFlags;
use rustix::io::Errno;
use torpor_core::{ImageId, Namespace};

use super::error::SaveError;
use super::remove::to_trash;
use super::root::{Store, TMP_PREFIX};
use crate::digest::Digest;
use crate::dirs::{self, PathError, Removed};
use crate::failpoint;
use crate::manifest::{DecodeError, FileEntry, MANIFEST, Manifest, ManifestDraft, is_file_name};

/// An image that is being written. Its files stay when this value is dropped, as after a crash;
/// [`Store::remove_partial`] removes them.
#[derive(Debug)]
pub struct Partial {
    namespace: Namespace,
    image: ImageId,
    /// The directory of the namespace.
    parent: OwnedFd,
    parent_path: PathBuf,
    dir: OwnedFd,
    path: PathBuf,
}

/// Result of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    pub manifest: Manifest,
    /// Digest of the manifest, for `SandboxSnapshot.status.digest`.
    pub digest: Digest,
    /// Size of all files but the manifest, in bytes.
    pub size: u64,
}

impl Store {
    /// Makes the directory for a new image. Fails if the image exists, committed or partial.
    pub fn begin(&self, namespace: &Namespace, image: &ImageId) -> Result<Partial, SaveError> {
        let parent_path = self.namespace_path(namespace);
        let name = format!("{TMP_PREFIX}{image}");
        let path = parent_path.join(&name);
        // Two attempts: a removal of the namespace's last image may remove the directory meanwhile.
        for attempt in 1..=2 {
            dirs::make_dir(self.images.as_fd(), namespace.as_str(), &parent_path)?;
            let opened = dirs::open_dir(self.images.as_fd(), namespace.as_str(), &parent_path);
            let parent = match opened {
                Err(error) if error.is_not_found() && attempt == 1 => continue,
                other => other?,
            };
            if self.has(&parent, &image.to_string(), &path)? {
                return Err(SaveError::Exists {
                    image: image.clone(),
                });
            }
            let dir = match dirs::make_fresh_dir(parent.as_fd(), &name, &path) {
                Ok(dir) => dir,
                Err(error) if error.is_not_found() && attempt == 1 => continue,
                Err(dirs::OpenError::Path(e))
                    if e.source.kind() == std::io::ErrorKind::AlreadyExists =>
                {
                    return Err(SaveError::Exists {
                        image: image.clone(),
                    });
                }
                Err(error) => return Err(error.into()),
            };
            failpoint::hit("begin:created");
            let (namespace, image) = (namespace.clone(), image.clone());
            return Ok(Partial {
                namespace,
                image,
                parent,
                parent_path,
                dir,
                path,
            });
        }
        let error = std::io::Error::from(std::io::ErrorKind::NotFound);
        Err(PathError::new("create", &path, error).into())
    }

    /// Finishes the commit of an image that was moved into its place before a crash: verifies the
    /// image and makes the move durable.
    pub fn recommit(&self, namespace: &Namespace, image: &ImageId) -> Result<Committed, SaveError> {
        let not_good = |source| SaveError::NotGood {
            image: image.clone(),
            source: Box::new(source),
        };
        let found = self.image(namespace, image).map_err(not_good)?;
        found.verify().map_err(not_good)?;
        let path = self.namespace_path(namespace);
        let parent = dirs::open_dir(self.images.as_fd(), namespace.as_str(), &path)?;
        dirs::sync_dir(parent.as_fd(), &path)?;
        let (manifest, digest) = (found.manifest().clone(), found.digest());
        Ok(Committed {
            size: manifest.size(),
            manifest,
            digest,
        })
    }
}

impl Partial {
    /// Returns the id of the image that is being written.
    pub fn image(&self) -> &ImageId {
        &self.image
    }

    /// Returns the image's directory, for a runtime that takes a path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a file of the image, for a runtime that takes a descriptor. [`FileEntry`] has the rule
    /// for names.
    pub fn open_file(&self, name: &str) -> Result<OwnedFd, SaveError> {
        if !is_file_name(name) {
            return Err(self.not_a_file(name));
        }
        Ok(dirs::create_plain(
            self.dir.as_fd(),
            name,
            &self.path.join(name),
        )?)
    }

    /// Returns the current size of the image's files, in bytes.
    pub fn size(&self) -> Result<u64, SaveError> {
        match self.open_files() {
            Ok(files) => Ok(files.iter().map(|file| file.size).sum()),
            Err(SaveError::Empty { .. }) => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Commits the image: makes every file in the directory durable and hashes it, writes the
    /// manifest, and moves the directory into its place.
    ///
    /// After an error the image may be in its place or not: the last step that can fail makes the
    /// move durable.
    pub fn commit(self, draft: ManifestDraft) -> Result<Committed, SaveError> {
        let files = self.seal_files()?;
        failpoint::hit("commit:synced");
        let manifest = Manifest::new(self.namespace.clone(), self.image.clone(), files, draft);
        let digest = self.commit_as(&manifest)?;
        Ok(Committed {
            size: manifest.size(),
            manifest,
            digest,
        })
    }

    /// Commits the image with this manifest. The files are durable. Returns the manifest's digest.
    pub(super) fn commit_as(&self, manifest: &Manifest) -> Result<Digest, SaveError> {
        let (bytes, digest) = manifest.encode().map_err(|source| SaveError::Manifest {
            image: self.image.clone(),
            source,
        })?;
        self.finish(&bytes)?;
        Ok(digest)
    }

    pub(super) fn dir(&self) -> &OwnedFd {
        &self.dir
    }

    /// Writes the manifest and moves the directory into its place.
    fn finish(&self, manifest: &[u8]) -> Result<(), SaveError> {
        self.write_manifest(manifest)?;
        failpoint::hit("commit:manifest-written");
        dirs::sync_dir(self.dir.as_fd(), &self.path)?;
        failpoint::hit("commit:directory-synced");
        self.move_into_place()?;
        failpoint::hit("commit:renamed");
        dirs::sync_dir(self.parent.as_fd(), &self.parent_path)?;
        failpoint::hit("commit:parent-synced");
        Ok(())
    }

    /// Commits the copy of an image of another node. `manifest`: the content of the image's
    /// `manifest.json`. All files must be those of the manifest.
    pub fn commit_copy(self, manifest: &[u8]) -> Result<Committed, SaveError> {
        let of_manifest = |source| SaveError::Manifest {
            image: self.image.clone(),
            source,
        };
        let (read, digest) = Manifest::decode(manifest).map_err(of_manifest)?;
        if read.image_id != self.image || read.namespace != self.namespace {
            let why = format!("it is of image {} of {}", read.image_id, read.namespace);
            return Err(of_manifest(DecodeError::Rule(why)));
        }
        if self.seal_files()? != read.files {
            let why = "its files are not those of the manifest".to_owned();
            return Err(of_manifest(DecodeError::Rule(why)));
        }
        self.finish(manifest)?;
        Ok(Committed {
            size: read.size(),
            manifest: read,
            digest,
        })
    }

    /// Removes the image's files and its directory.
    pub fn abort(self) -> Result<Removed, SaveError> {
        to_trash(
            &self.parent,
            &self.parent_path,
            &format!("{TMP_PREFIX}{}", self.image),
            &self.image,
        )
    }

    /// Makes the files durable and returns their digests. One thread writes the files back while
    /// others hash them, so that the disk and the processors work at the same time.
    fn seal_files(&self) -> Result<Vec<FileEntry>, SaveError> {
        let files = self.open_files()?;
        let threads = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            let syncing = scope.spawn(|| {
                files.iter().try_for_each(|file| {
                    rustix::fs::fsync(&file.fd)
                        .map_err(|e| PathError::new("make durable", &file.path, e))
                })
            });
            let hashed: Result<Vec<_>, SaveError> =
                files.iter().map(|file| self.hash(file, threads)).collect();
            syncing
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            hashed
        })
    }

    fn open_files(&self) -> Result<Vec<Written>, SaveError> {
        let mut files = Vec::new();
        for name in dirs::names(self.dir.as_fd(), &self.path)? {
            if !is_file_name(&name) {
                return Err(self.not_a_file(&name));
            }
            let path = self.path.join(&name);
            let fd = match dirs::open_plain(self.dir.as_fd(), &name, &path) {
                Err(dirs::OpenError::Unsafe(_)) => return Err(self.not_a_file(&name)),
                other => other?,
            };
            let size = file_size(&fd, &path)?;
            files.push(Written {
                name,
                path,
                fd,
                size,
            });
        }
        match files.is_empty() {
            true => Err(SaveError::Empty {
                image: self.image.clone(),
            }),
            false => Ok(files),
        }
    }

    fn hash(&self, file: &Written, threads: usize) -> Result<FileEntry, SaveError> {
        let changed = || SaveError::Changed {
            image: self.image.clone(),
            name: file.name.clone(),
        };
        let blake3 = match Digest::of_file(file.fd.as_fd(), file.size, threads) {
            Ok(digest) => digest,
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return Err(changed()),
            Err(e) => return Err(PathError::new("read", &file.path, e).into()),
        };
        if file_size(&file.fd, &file.path)? != file.size {
            return Err(changed());
        }
        Ok(FileEntry {
            name: file.name.clone(),
            size: file.size,
            blake3,
        })
    }

    fn write_manifest(&self, bytes: &[u8]) -> Result<(), SaveError> {
        let path = self.path.join(MANIFEST);
        let mut file = File::from(dirs::create_plain(self.dir.as_fd(), MANIFEST, &path)?);
        file.write_all(bytes)
            .map_err(|e| PathError::new("write", &path, e))?;
        file.sync_all()
            .map_err(|e| PathError::new("make durable", &path, e))?;
        Ok(())
    }

    fn move_into_place(&self) -> Result<(), SaveError> {
        let from = format!("{TMP_PREFIX}{}", self.image);
        let to = self.image.to_string();
        let flags = RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(&self.parent, &from, &self.parent, &to, flags) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(SaveError::Exists {
                image: self.image.clone(),
            }),
            Err(errno) => Err(PathError::new("move into place", &self.path, errno).into()),
        }
    }

    fn not_a_file(&self, name: &str) -> SaveError {
        SaveError::NotAFile {
            image: self.image.clone(),
            name: name.to_owned(),
        }
    }
}

/// An open file of a partial image.
struct Written {
    name: String,
    path: PathBuf,
    fd: OwnedFd,
    size: u64,
}

fn file_size(fd: &OwnedFd, path: &Path) -> Result<u64, PathError> {
    let stat = rustix::fs::fstat(fd).map_err(|e| PathError::new("examine", path, e))?;
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}
