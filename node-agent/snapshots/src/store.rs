//! Where images lie. See the crate's documentation for the layout.
//!
//! An image becomes one by a rename, after its files, its manifest and its directory are durable; it ceases to be one by a
//! rename, before its first byte goes. So whatever a crash leaves behind is either whole or named as something to be removed.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode};
use torpor_core::{ImageId, ImageState, Namespace, PodUid};

use crate::manifest::{DecodeError, Mismatch};
use dirs::{PathError, Unsafe};

mod dirs;
mod image;
mod partial;
mod remove;

pub(crate) use dirs::{OpenError, open_checked, read_limited};
pub use dirs::{PathError as StorePathError, Unsafe as UnsafePath};
pub use image::{Consumption, Image};
pub use partial::{Committed, Partial};
pub use remove::Removed;

/// The manifest's file name.
pub const MANIFEST: &str = "manifest.json";
/// The file that names the Pod that was restored from the image.
pub const CONSUMED: &str = "consumed";
const IMAGES: &str = "images";
const LEDGER: &str = "ledger";
const TMP_PREFIX: &str = ".tmp-";
const TRASH_PREFIX: &str = ".trash-";
/// Stands for the consumer in a listing when the marker cannot be read: the image is taken then, by whomever.
const UNREADABLE_CONSUMER: &str = "unreadable";
const MIB: u64 = 1 << 20;

/// Why an image could not be saved or removed.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    #[error("image {image} is already in the store")]
    Exists { image: ImageId },
    #[error("no room on the disk that holds the images: {doing} {}. Delete SandboxSnapshots, or enlarge the disk", path.display())]
    DiskFull {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error(
        "no room on the disk that holds the images: the new image may take {} MiB, and of the {} MiB that are free at {}, {} MiB must stay free (--store-reserve). Delete SandboxSnapshots, or enlarge the disk",
        wanted.div_ceil(MIB), free / MIB, path.display(), kept.div_ceil(MIB)
    )]
    NoRoom {
        path: PathBuf,
        /// Bytes.
        wanted: u64,
        free: u64,
        kept: u64,
    },
    #[error("image {image} has no files")]
    Empty { image: ImageId },
    #[error("{name:?} in image {image} is not a plain file that an image may have")]
    NotAFile { image: ImageId, name: String },
    #[error("the file {name} of image {image} changed while it was hashed")]
    Changed { image: ImageId, name: String },
    #[error("cannot write the manifest of image {image}")]
    Manifest { image: ImageId, source: DecodeError },
    #[error("image {image}, committed before, is not valid")]
    NotGood {
        image: ImageId,
        source: Box<ImageError>,
    },
    #[error(transparent)]
    Unsafe(#[from] Unsafe),
    #[error("cannot {doing} {}", path.display())]
    Io {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl SaveError {
    /// DiskFull or SaveFailed.
    pub fn reason(&self) -> &'static str {
        match self {
            SaveError::DiskFull { .. } | SaveError::NoRoom { .. } => "DiskFull",
            SaveError::Exists { .. }
            | SaveError::Empty { .. }
            | SaveError::NotAFile { .. }
            | SaveError::Changed { .. }
            | SaveError::Manifest { .. }
            | SaveError::NotGood { .. }
            | SaveError::Unsafe(_)
            | SaveError::Io { .. } => "SaveFailed",
        }
    }
}

impl From<PathError> for SaveError {
    fn from(error: PathError) -> Self {
        let PathError {
            doing,
            path,
            source,
        } = error;
        match source.kind() {
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => SaveError::DiskFull {
                doing,
                path,
                source,
            },
            _ => SaveError::Io {
                doing,
                path,
                source,
            },
        }
    }
}

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("image {image} is not in this node's store; start cold, or restore another snapshot")]
    Missing { image: ImageId },
    #[error(
        "image {image}: the file {name} is missing (it should have {expected} bytes); restore another snapshot, or start cold"
    )]
    FileMissing {
        image: ImageId,
        name: String,
        expected: u64,
    },
    #[error(
        "image {image}: the file {name} is cut short ({found} of {expected} bytes); restore another snapshot, or start cold"
    )]
    FileTruncated {
        image: ImageId,
        name: String,
        expected: u64,
        found: u64,
    },
    #[error(
        "image {image}: the file {name} is too long ({found} bytes, {expected} were written); restore another snapshot, or start cold"
    )]
    FileTooLong {
        image: ImageId,
        name: String,
        expected: u64,
        found: u64,
    },
    #[error(
        "image {image}: the bytes of {name} are not those that were written (expected {expected}, found {found}); check the disk, restore another snapshot, or start cold"
    )]
    FileChanged {
        image: ImageId,
        name: String,
        expected: crate::Digest,
        found: crate::Digest,
    },
    #[error("image {image}: {name:?} does not belong there; remove it, or start cold")]
    FileUnexpected { image: ImageId, name: String },
    #[error("image {image} has no usable manifest; restore another snapshot, or start cold")]
    Manifest { image: ImageId, source: DecodeError },
    #[error(
        "the directory of image {image} holds image {found} of namespace {namespace}; move it back, or start cold"
    )]
    WrongPlace {
        image: ImageId,
        found: ImageId,
        namespace: Namespace,
    },
    #[error(
        "image {image} was restored by Pod {consumed_by} already and may not run twice; to start a copy of it ask for it by name (torpor.dev/restore-from)"
    )]
    Stale { image: ImageId, consumed_by: PodUid },
    #[error(
        "the marker {CONSUMED} of image {image} cannot be read as a Pod UID; to start a copy of it ask for it by name (torpor.dev/restore-from)"
    )]
    MarkerUnreadable { image: ImageId },
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    #[error(transparent)]
    Unsafe(#[from] Unsafe),
    #[error("cannot {doing} {}", path.display())]
    Io {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl ImageError {
    /// ImageMissing, ImageCorrupt, ImageStale, FingerprintMismatch, SpecMismatch or RestoreFailed.
    pub fn reason(&self) -> &'static str {
        match self {
            ImageError::Missing { .. } => "ImageMissing",
            ImageError::FileMissing { .. }
            | ImageError::FileTruncated { .. }
            | ImageError::FileTooLong { .. }
            | ImageError::FileChanged { .. }
            | ImageError::FileUnexpected { .. }
            | ImageError::Manifest { .. }
            | ImageError::WrongPlace { .. }
            | ImageError::Unsafe(_) => "ImageCorrupt",
            ImageError::Stale { .. } | ImageError::MarkerUnreadable { .. } => "ImageStale",
            ImageError::Mismatch(mismatch) => mismatch.reason(),
            ImageError::Io { .. } => "RestoreFailed",
        }
    }

    /// Whether the same image may be usable later without anybody doing anything about it.
    pub fn retry(&self) -> bool {
        matches!(self, ImageError::Io { .. })
    }
}

impl From<PathError> for ImageError {
    fn from(error: PathError) -> Self {
        let PathError {
            doing,
            path,
            source,
        } = error;
        ImageError::Io {
            doing,
            path,
            source,
        }
    }
}

/// One entry of a listing. Nothing in it was verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub namespace: Namespace,
    pub id: ImageId,
    /// What is being removed counts as partial.
    pub state: ImageState,
    /// Bytes of all files.
    pub size: u64,
    pub consumed_by: Option<PodUid>,
}

/// Size of the file system that holds the store, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    pub total: u64,
    pub available: u64,
}

impl Capacity {
    /// What is to stay free when that is `reserve` percent of the disk.
    pub fn kept(&self, reserve: u8) -> u64 {
        self.total / 100 * u64::from(reserve)
    }

    /// Whether so many bytes more leave free what is to stay free. Without a reserve it is tried (less may be written than was thought), and
    /// a file system that does not say how large it is forbids nothing.
    pub fn has_room(&self, bytes: u64, reserve: u8) -> bool {
        reserve == 0
            || self.total == 0
            || bytes.saturating_add(self.kept(reserve)) <= self.available
    }
}

/// The store of one node.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    images: OwnedFd,
    ledger: OwnedFd,
}

/// The image that a directory of this name is, if it is one.
fn image_of(name: &str) -> Option<(ImageId, ImageState)> {
    let left = name
        .strip_prefix(TMP_PREFIX)
        .or_else(|| name.strip_prefix(TRASH_PREFIX));
    let state = match left {
        Some(_) => ImageState::Partial,
        None => ImageState::Committed,
    };
    Some((ImageId::parse(left.unwrap_or(name)).ok()?, state))
}

impl Store {
    /// Opens the store below `root` and makes what is missing of it. Only `root` itself may be reached through links.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, SaveError> {
        let root = root.into();
        std::fs::create_dir_all(&root).map_err(|e| PathError::new("create", &root, e))?;
        let top = rustix::fs::open(&root, dirs::DIRECTORY, Mode::empty())
            .map_err(|e| PathError::new("open", &root, e))?;
        dirs::check_private(top.as_fd(), &root)?;
        let make = |name: &str| -> Result<OwnedFd, SaveError> {
            let path = root.join(name);
            dirs::make_dir(top.as_fd(), name, &path)?;
            Ok(dirs::open_dir(top.as_fd(), name, &path)?)
        };
        let (images, ledger) = (make(IMAGES)?, make(LEDGER)?);
        Ok(Self {
            root,
            images,
            ledger,
        })
    }

    /// The path given to [`Store::open`].
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The ledger of a Pod; the file is made by the first append.
    pub fn ledger(&self, pod: &PodUid) -> Result<crate::LedgerFile, crate::ledger_file::Error> {
        let path = self.root.join(LEDGER);
        crate::LedgerFile::new(self.ledger.as_fd(), &path, pod)
    }

    /// Pods that have a ledger, sorted. Ledgers without a single whole record are removed.
    pub fn ledgers(&self) -> Result<Vec<PodUid>, crate::ledger_file::Error> {
        let names = dirs::names(self.ledger.as_fd(), &self.root.join(LEDGER))?;
        let mut pods = Vec::new();
        for pod in names.into_iter().filter_map(|name| PodUid::new(name).ok()) {
            if self.ledger(&pod)?.sweep()? {
                pods.push(pod);
            }
        }
        Ok(pods)
    }

    /// All images, whole and partial, sorted by namespace and id.
    pub fn list(&self) -> Result<Vec<Listed>, ImageError> {
        self.list_where(|_| true)
    }

    /// The images of one Pod, whole and partial, sorted by id. Others are not looked at.
    pub fn list_pod(&self, pod: &PodUid) -> Result<Vec<Listed>, ImageError> {
        self.list_where(|image| image.pod() == pod)
    }

    /// The Pods that have images here, whole or partial: by the images' names, which are all that is read.
    pub fn pods(&self) -> Result<BTreeSet<PodUid>, ImageError> {
        let mut pods = BTreeSet::new();
        for namespace in self.namespaces()? {
            let path = self.namespace_path(&namespace);
            let dir = dirs::open_dir_if_any(self.images.as_fd(), namespace.as_str(), &path)?;
            let names = dir.map(|dir| dirs::names(dir.as_fd(), &path)).transpose()?;
            let images = names.iter().flatten().filter_map(|name| image_of(name));
            pods.extend(images.map(|(id, _)| id.pod().clone()));
        }
        Ok(pods)
    }

    fn list_where(&self, wanted: impl Fn(&ImageId) -> bool) -> Result<Vec<Listed>, ImageError> {
        let mut all = Vec::new();
        for namespace in self.namespaces()? {
            all.extend(self.list_namespace(&namespace, &wanted)?);
        }
        Ok(all)
    }

    /// Bytes of the images of one namespace, whole and partial.
    pub fn namespace_bytes(&self, namespace: &Namespace) -> Result<u64, ImageError> {
        let listed = self.list_namespace(namespace, |_| true)?;
        Ok(listed
            .iter()
            .fold(0, |sum, image| sum.saturating_add(image.size)))
    }

    /// Those that have a directory for images.
    fn namespaces(&self) -> Result<Vec<Namespace>, ImageError> {
        let names = dirs::names(self.images.as_fd(), &self.root.join(IMAGES))?.into_iter();
        Ok(names.filter_map(|name| Namespace::new(name).ok()).collect())
    }

    fn list_namespace(
        &self,
        namespace: &Namespace,
        wanted: impl Fn(&ImageId) -> bool,
    ) -> Result<Vec<Listed>, ImageError> {
        let path = self.namespace_path(namespace);
        let Some(dir) = dirs::open_dir_if_any(self.images.as_fd(), namespace.as_str(), &path)?
        else {
            return Ok(Vec::new());
        };
        let mut listed = Vec::new();
        for name in dirs::names(dir.as_fd(), &path)? {
            let Some((id, state)) = image_of(&name).filter(|(id, _)| wanted(id)) else {
                continue;
            };
            let at = path.join(&name);
            let Some(image) = dirs::open_dir_if_any(dir.as_fd(), &name, &at)? else {
                continue;
            };
            let size = dirs::size(image.as_fd(), &at)?;
            let consumed_by = match image::read_marker(image.as_fd(), &at, &id) {
                Ok(pod) => pod,
                Err(_) => PodUid::new(UNREADABLE_CONSUMER).ok(),
            };
            listed.push(Listed {
                namespace: namespace.clone(),
                id,
                state,
                size,
                consumed_by,
            });
        }
        listed.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(listed)
    }

    /// Room on the disk.
    pub fn capacity(&self) -> Result<Capacity, ImageError> {
        let stat = rustix::fs::fstatvfs(&self.images)
            .map_err(|e| PathError::new("measure", &self.root, e))?;
        Ok(Capacity {
            total: stat.f_blocks.saturating_mul(stat.f_frsize),
            available: stat.f_bavail.saturating_mul(stat.f_frsize),
        })
    }

    /// Refuses an image of up to so many bytes that would take what is to stay free, before any of it is written: a disk that is full
    /// is a misfortune for everybody on the node.
    pub fn check_room(&self, wanted: u64, reserve: u8) -> Result<(), SaveError> {
        // A disk that cannot be measured shows it when it is written to.
        let capacity = self.capacity().ok();
        match capacity.filter(|capacity| !capacity.has_room(wanted, reserve)) {
            None => Ok(()),
            Some(capacity) => Err(SaveError::NoRoom {
                path: self.root.clone(),
                wanted,
                free: capacity.available,
                kept: capacity.kept(reserve),
            }),
        }
    }

    fn namespace_path(&self, namespace: &Namespace) -> PathBuf {
        self.root.join(IMAGES).join(namespace.as_str())
    }

    /// Path of a committed image, for messages and for runsc commands that take paths.
    pub fn image_path(&self, namespace: &Namespace, image: &ImageId) -> PathBuf {
        self.namespace_path(namespace).join(image.to_string())
    }

    fn has(&self, dir: &OwnedFd, name: &str, path: &Path) -> Result<bool, PathError> {
        match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::NOENT) => Ok(false),
            Err(errno) => Err(PathError::new("look for", path, errno)),
        }
    }
}
