//! Using an image: open, check, verify, hand its files out, mark it as consumed.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::{AtFlags, OFlags};
use rustix::io::Errno;
use torpor_core::{ImageId, Namespace, PodUid};

use super::dirs::{self, OpenError, PathError};
use super::{CONSUMED, ImageError, MANIFEST, Removed, Store};
use crate::digest::Digest;
use crate::failpoint;
use crate::manifest::{
    ContainerSpecDigest, DecodeError, FileEntry, Fingerprint, MAX_BYTES, Manifest,
};

/// Longest marker: a UID and a newline.
const MAX_MARKER: usize = 64;

/// A committed image, held open: what happens to its name from now on does not change what is read.
#[derive(Debug)]
pub struct Image {
    id: ImageId,
    dir: OwnedFd,
    path: PathBuf,
    manifest: Manifest,
    digest: Digest,
}

/// What marking an image as consumed found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Consumption {
    /// It was free and is now the Pod's.
    Marked,
    /// It was the Pod's before: the Pod may have run from it.
    Already,
}

impl Store {
    /// Opens a committed image and reads its manifest. The other files are not looked at: see [`Image::verify`].
    pub fn image(&self, namespace: &Namespace, image: &ImageId) -> Result<Image, ImageError> {
        let missing = || ImageError::Missing {
            image: image.clone(),
        };
        let found = |error: OpenError| match error.is_not_found() {
            true => missing(),
            false => error.into(),
        };
        let parent_path = self.namespace_path(namespace);
        let parent =
            dirs::open_dir(self.images.as_fd(), namespace.as_str(), &parent_path).map_err(found)?;
        let path = self.image_path(namespace, image);
        let dir = dirs::open_dir(parent.as_fd(), &image.to_string(), &path).map_err(found)?;
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

/// The Pod in the marker of an image directory, if there is a marker.
pub(super) fn read_marker(
    dir: BorrowedFd<'_>,
    path: &Path,
    image: &ImageId,
) -> Result<Option<PodUid>, ImageError> {
    let path = path.join(CONSUMED);
    let file = match dirs::open_plain(dir, CONSUMED, &path) {
        Err(error) if error.is_not_found() => return Ok(None),
        other => other?,
    };
    let unreadable = || ImageError::MarkerUnreadable {
        image: image.clone(),
    };
    let bytes = dirs::read_limited(file.as_fd(), MAX_MARKER, &path)?.map_err(|_| unreadable())?;
    let text = std::str::from_utf8(&bytes)
        .ok()
        .and_then(|text| text.strip_suffix('\n'));
    let pod = text.and_then(|text| PodUid::new(text).ok());
    pod.map(Some).ok_or_else(unreadable)
}

impl Image {
    /// Its name.
    pub fn id(&self) -> &ImageId {
        &self.id
    }

    /// Its directory, for a runtime that is told a path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The digest of its manifest.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Whether it fits this node and these containers; see [`Manifest::check`].
    pub fn check(
        &self,
        node: &Fingerprint,
        specs: &[ContainerSpecDigest],
    ) -> Result<(), ImageError> {
        Ok(self.manifest.check(node, specs)?)
    }

    /// Compares names and sizes of all files with the manifest, in microseconds.
    pub fn verify_sizes(&self) -> Result<(), ImageError> {
        for name in dirs::names(self.dir.as_fd(), &self.path)? {
            let known = self.manifest.files.iter().any(|file| file.name == name);
            // Names with a dot in front are ours: a marker that was never finished.
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

    /// Compares every byte with the manifest: names and sizes first, then digests, on all processors.
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

    /// Opens one of the files in the manifest for reading; its size is compared.
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

    /// The Pod that was restored from it, if any.
    pub fn consumed_by(&self) -> Result<Option<PodUid>, ImageError> {
        read_marker(self.dir.as_fd(), &self.path, &self.id)
    }

    /// Takes the image for `pod`, durably, before the restore begins. Of several Pods exactly one gets it; the others get
    /// [`ImageError::Stale`].
    pub fn mark_consumed(&self, pod: &PodUid) -> Result<Consumption, ImageError> {
        let marker = format!(".{CONSUMED}-{pod}");
        let path = self.path.join(&marker);
        if self.consumed_by()?.as_ref() == Some(pod) {
            // Of a crash, this may be the marker itself under its first name. Written again it would be empty for a moment, and on a full disk for good.
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
        // A link, not a rename: it never replaces the marker of another Pod.
        let linked = rustix::fs::linkat(&self.dir, &marker, &self.dir, CONSUMED, AtFlags::empty());
        failpoint::hit("consume:linked");
        let swept = rustix::fs::unlinkat(&self.dir, &marker, AtFlags::empty());
        dirs::sync_dir(self.dir.as_fd(), &self.path)?;
        match linked {
            Ok(()) => {}
            Err(Errno::EXIST) => return self.taken_by(pod),
            Err(errno) => return Err(PathError::new("mark", &path, errno).into()),
        }
        swept.map_err(|e| PathError::new("remove", &path, e))?;
        Ok(Consumption::Marked)
    }

    /// Gives the image back, durably, if `pod` has it: nothing of that Pod has run. Whoever calls knows that nothing of it will.
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

    fn taken_by(&self, pod: &PodUid) -> Result<Consumption, ImageError> {
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
