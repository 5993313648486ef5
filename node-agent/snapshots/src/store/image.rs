//! Use of an image: open it, check and verify it, open its files, mark it as consumed.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::{AtFlags, OFlags};
use rustix::io::Errno;
use torpor_core::{ImageId, Namespace, PodUid};

use super::error::ImageError;
use super::marker::read_marker;
use super::root::Store;
use crate::digest::Digest;
use crate::dirs::{self, OpenError, PathError, Removed};
use crate::failpoint;
use crate::manifest::{
    CONSUMED, ContainerSpecDigest, DecodeError, FileEntry, Fingerprint, MANIFEST, MAX_BYTES,
    Manifest,
};

/// A committed image with an open directory. A rename of the directory does not change which files
/// are read.
#[derive(Debug)]
pub struct Image {
    id: ImageId,
    dir: OwnedFd,
    path: PathBuf,
    manifest: Manifest,
    digest: Digest,
}

/// Result of marking an image as consumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Consumption {
    /// The image had no marker and now has one with the Pod's UID.
    Marked,
    /// The image's marker named the Pod already: the Pod may have run from the image.
    Already,
}

impl Store {
    /// Opens a committed image, of this node or fetched, and reads its manifest. [`Image::verify`]
    /// reads the other files.
    pub fn image(&self, namespace: &Namespace, image: &ImageId) -> Result<Image, ImageError> {
        match self.own_image(namespace, image) {
            Err(ImageError::Missing { .. }) => self.fetched().own_image(namespace, image),
            found => found,
        }
    }

    fn own_image(&self, namespace: &Namespace, image: &ImageId) -> Result<Image, ImageError> {
        let missing = || ImageError::Missing {
            image: image.clone(),
        };
        let open_failed = |error: OpenError| match error.is_not_found() {
            true => missing(),
            false => error.into(),
        };
        let parent_path = self.namespace_path(namespace);
        let parent = dirs::open_dir(self.images.as_fd(), namespace.as_str(), &parent_path)
            .map_err(open_failed)?;
        let path = self.image_path(namespace, image);
        let dir = dirs::open_dir(parent.as_fd(), &image.to_string(), &path).map_err(open_failed)?;
        let (manifest, digest) = read_manifest(dir.as_fd(), &path, image)?;
        if manifest.image_id != *image || manifest.namespace != *namespace {
            return Err(ImageError::WrongPlace {
                image: image.clone(),
                found: manifest.image_id,
                namespace: manifest.namespace,
            });
        }
        Ok(Image {
            id: image.clone(),
            dir,
            path,
            manifest,
            digest,
        })
    }
}

fn read_manifest(
    dir: BorrowedFd<'_>,
    path: &Path,
    image: &ImageId,
) -> Result<(Manifest, Digest), ImageError> {
    let path = path.join(MANIFEST);
    let file =
        dirs::open_plain(dir, MANIFEST, &path).map_err(|error| match error.is_not_found() {
            true => ImageError::FileMissing {
                image: image.clone(),
                name: MANIFEST.into(),
                expected: 0,
            },
            false => error.into(),
        })?;
    let bad = |source| ImageError::Manifest {
        image: image.clone(),
        source,
    };
    match dirs::read_limited(file.as_fd(), MAX_BYTES, &path)? {
        Ok(bytes) => Manifest::decode(&bytes).map_err(bad),
        Err(found) => Err(bad(DecodeError::TooLarge { found })),
    }
}

impl Image {
    /// Returns the image's id.
    pub fn id(&self) -> &ImageId {
        &self.id
    }

    /// Returns the image's directory, for a runtime that takes a path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn dir(&self) -> &OwnedFd {
        &self.dir
    }

    /// Returns the image's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the digest of the manifest.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Returns an error if the image cannot be restored on this node or for these containers; see
    /// [`Manifest::check`].
    pub fn check(
        &self,
        node: &Fingerprint,
        specs: &[ContainerSpecDigest],
    ) -> Result<(), ImageError> {
        Ok(self.manifest.check(node, specs)?)
    }

    /// Compares names and sizes of all files with the manifest. Takes microseconds.
    pub fn verify_sizes(&self) -> Result<(), ImageError> {
        for name in dirs::names(self.dir.as_fd(), &self.path)? {
            let known = self.manifest.files.iter().any(|file| file.name == name);
            // A name that begins with a dot is an unfinished marker of mark_consumed.
            if !known && name != MANIFEST && name != CONSUMED && !name.starts_with('.') {
                return Err(ImageError::FileUnexpected {
                    image: self.id.clone(),
                    name,
                });
            }
        }
        self.manifest
            .files
            .iter()
            .try_for_each(|file| self.open_entry(file).map(drop))
    }

    /// Compares the whole image with the manifest: first names and sizes, then digests, on all
    /// processors.
    pub fn verify(&self) -> Result<(), ImageError> {
        self.verify_sizes()?;
        let threads = thread::available_parallelism().map_or(1, usize::from);
        for file in &self.manifest.files {
            let fd = self.open_entry(file)?;
            let path = self.path.join(&file.name);
            let found = Digest::of_file(fd.as_fd(), file.size, threads)
                .map_err(|e| PathError::new("read", &path, e))?;
            if found != file.blake3 {
                return Err(ImageError::FileChanged {
                    image: self.id.clone(),
                    name: file.name.clone(),
                    expected: file.blake3,
                    found,
                });
            }
        }
        Ok(())
    }

    /// Opens a file of the manifest for reading and compares its size with the manifest.
    pub fn open_file(&self, name: &str) -> Result<OwnedFd, ImageError> {
        let entry = self.manifest.files.iter().find(|file| file.name == name);
        let entry = entry.ok_or_else(|| ImageError::FileMissing {
            image: self.id.clone(),
            name: name.to_owned(),
            expected: 0,
        })?;
        self.open_entry(entry)
    }

    fn open_entry(&self, entry: &FileEntry) -> Result<OwnedFd, ImageError> {
        let (image, name, expected) = (self.id.clone(), entry.name.clone(), entry.size);
        let path = self.path.join(&name);
        let fd = match dirs::open_plain(self.dir.as_fd(), &name, &path) {
            Err(error) if error.is_not_found() => {
                return Err(ImageError::FileMissing {
                    image,
                    name,
                    expected,
                });
            }
            other => other?,
        };
        let stat = rustix::fs::fstat(&fd).map_err(|e| PathError::new("examine", &path, e))?;
        let found = u64::try_from(stat.st_size).unwrap_or(0);
        match found.cmp(&expected) {
            std::cmp::Ordering::Equal => Ok(fd),
            std::cmp::Ordering::Less => Err(ImageError::FileTruncated {
                image,
                name,
                expected,
                found,
            }),
            std::cmp::Ordering::Greater => Err(ImageError::FileTooLong {
                image,
                name,
                expected,
                found,
            }),
        }
    }

    /// Returns the Pod that was restored from the image; none without a marker.
    pub fn consumed_by(&self) -> Result<Option<PodUid>, ImageError> {
        read_marker(self.dir.as_fd(), &self.path, &self.id)
    }

    /// Marks the image as consumed by `pod`, durably. The caller does this before the restore. If
    /// several Pods try, exactly one succeeds; the others get [`ImageError::Stale`].
    pub fn mark_consumed(&self, pod: &PodUid) -> Result<Consumption, ImageError> {
        let marker = format!(".{CONSUMED}-{pod}");
        let path = self.path.join(&marker);
        if self.consumed_by()?.as_ref() == Some(pod) {
            // After a crash the temporary file may be another link to the marker. A second write
            // would leave the marker empty for a moment, and on a full disk forever.
            match rustix::fs::unlinkat(&self.dir, &marker, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(PathError::new("remove", &path, errno).into()),
            }
            dirs::sync_dir(self.dir.as_fd(), &self.path)?;
            return Ok(Consumption::Already);
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
        let file = dirs::open_checked(self.dir.as_fd(), &marker, &path, flags)?;
        let mut file = File::from(file);
        writeln!(file, "{pod}").map_err(|e| PathError::new("write", &path, e))?;
        file.sync_all()
            .map_err(|e| PathError::new("make durable", &path, e))?;
        failpoint::hit("consume:written");
        // A link, unlike a rename, never replaces the marker of another Pod.
        let linked = rustix::fs::linkat(&self.dir, &marker, &self.dir, CONSUMED, AtFlags::empty());
        failpoint::hit("consume:linked");
        let swept = rustix::fs::unlinkat(&self.dir, &marker, AtFlags::empty());
        dirs::sync_dir(self.dir.as_fd(), &self.path)?;
        match linked {
            Ok(()) => {}
            Err(Errno::EXIST) => return self.check_consumer(pod),
            Err(errno) => return Err(PathError::new("mark", &path, errno).into()),
        }
        swept.map_err(|e| PathError::new("remove", &path, e))?;
        Ok(Consumption::Marked)
    }

    /// Removes the marker, durably, if the marker names `pod`. The caller ensures that no program
    /// of the Pod has run from the image or will run.
    pub fn release(&self, pod: &PodUid) -> Result<Removed, ImageError> {
        if self.consumed_by()?.as_ref() != Some(pod) {
            return Ok(Removed::Already);
        }
        let path = self.path.join(CONSUMED);
        match rustix::fs::unlinkat(&self.dir, CONSUMED, AtFlags::empty()) {
            Ok(()) => {}
            Err(Errno::NOENT) => return Ok(Removed::Already),
            Err(errno) => return Err(PathError::new("remove", &path, errno).into()),
        }
        dirs::sync_dir(self.dir.as_fd(), &self.path)?;
        Ok(Removed::Done)
    }

    fn check_consumer(&self, pod: &PodUid) -> Result<Consumption, ImageError> {
        match self.consumed_by()? {
            Some(other) if other == *pod => Ok(Consumption::Already),
            Some(consumed_by) => Err(ImageError::Stale {
                image: self.id.clone(),
                consumed_by,
            }),
            None => Err(ImageError::MarkerUnreadable {
                image: self.id.clone(),
            }),
        }
    }
}
