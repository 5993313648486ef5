//! The store's directories: opening, listing, capacity.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode};
use torpor_core::{ImageId, ImageState, Namespace, PodUid};

use super::error::{ImageError, SaveError};
use super::marker::read_marker;
use crate::dirs::{self, PathError};
use crate::ledger_file::{self, LedgerFile};

const IMAGES: &str = "images";
const LEDGER: &str = "ledger";
const FETCHED: &str = "fetched";
/// Levels of directories below the root: fetched, images, a namespace, an image.
const LEVELS: u32 = 4;
pub(super) const TMP_PREFIX: &str = ".tmp-";
pub(super) const TRASH_PREFIX: &str = ".trash-";
/// Consumer in a listing if the marker cannot be read: the image is consumed by an unknown Pod.
const UNREADABLE_CONSUMER: &str = "unreadable";

/// An entry of a listing. The image's contents are not verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub namespace: Namespace,
    pub id: ImageId,
    /// An image that is being removed is partial.
    pub state: ImageState,
    /// Size of all files, in bytes.
    pub size: u64,
    pub consumed_by: Option<PodUid>,
}

/// Size of the store's file system, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    pub total: u64,
    pub available: u64,
}

impl Capacity {
    /// Returns the bytes that must stay free: `reserve` percent of the disk.
    pub fn kept(&self, reserve: u8) -> u64 {
        self.total / 100 * u64::from(reserve)
    }

    /// Reports whether the reserve stays free if `bytes` more bytes are written. The answer is true
    /// without a reserve, because a save may write less than estimated, and true for a file system
    /// that does not report its size.
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
    pub(super) images: OwnedFd,
    ledger: OwnedFd,
    /// None in the store of fetched images.
    fetched: Option<Box<Store>>,
}

/// Returns the id and the state of the image in a directory with this name; none for other names.
fn image_of(name: &str) -> Option<(ImageId, ImageState)> {
    let id = name
        .strip_prefix(TMP_PREFIX)
        .or_else(|| name.strip_prefix(TRASH_PREFIX));
    let state = match id {
        Some(_) => ImageState::Partial,
        None => ImageState::Committed,
    };
    Some((ImageId::parse(id.unwrap_or(name)).ok()?, state))
}

/// Opens a directory of a store, and checks its owner and mode.
fn open_root(root: &Path) -> Result<OwnedFd, SaveError> {
    let top = rustix::fs::open(root, dirs::DIRECTORY, Mode::empty());
    let top = top.map_err(|e| PathError::new("open", root, e))?;
    dirs::check_private(top.as_fd(), root)?;
    Ok(top)
}

impl Store {
    /// Opens the store below `root` and makes its missing directories. The path of `root` may
    /// contain links; the paths below it may not.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, SaveError> {
        let root = root.into();
        std::fs::create_dir_all(&root).map_err(|e| PathError::new("create", &root, e))?;
        let fetched = root.join(FETCHED);
        dirs::make_dir(open_root(&root)?.as_fd(), FETCHED, &fetched)?;
        let mut store = Self::open_one(root)?;
        store.fetched = Some(Box::new(Self::open_one(fetched)?));
        Ok(store)
    }

    fn open_one(root: PathBuf) -> Result<Self, SaveError> {
        let top = open_root(&root)?;
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
            fetched: None,
        })
    }

    /// Opens the store as [`Self::open`] does, for root alone, and lets the agent use all of it.
    pub fn open_for_agent(root: impl Into<PathBuf>) -> Result<Self, SaveError> {
        let root = root.into();
        let store = Self::open(root.clone())?;
        dirs::hand_over(open_root(&root)?.as_fd(), &root, LEVELS)?;
        Ok(store)
    }

    /// Returns the store of images that Pods of this node have fetched from a repository.
    /// [`Store::image`] finds these images too. Lists and removals do not, because their Pods were
    /// never on this node.
    pub fn fetched(&self) -> &Self {
        self.fetched.as_deref().unwrap_or(self)
    }

    /// Returns the path given to [`Store::open`].
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the ledger of a Pod. The first append makes the file.
    pub fn ledger(&self, pod: &PodUid) -> Result<LedgerFile, ledger_file::Error> {
        let path = self.root.join(LEDGER);
        LedgerFile::new(self.ledger.as_fd(), &path, pod)
    }

    /// Returns the Pods that have a ledger, sorted. Removes ledgers without a whole record.
    pub fn ledgers(&self) -> Result<Vec<PodUid>, ledger_file::Error> {
        let names = dirs::names(self.ledger.as_fd(), &self.root.join(LEDGER))?;
        let mut pods = Vec::new();
        for pod in names.into_iter().filter_map(|name| PodUid::new(name).ok()) {
            if self.ledger(&pod)?.sweep()? {
                pods.push(pod);
            }
        }
        Ok(pods)
    }

    /// Returns all images, committed and partial, sorted by namespace and id.
    pub fn list(&self) -> Result<Vec<Listed>, ImageError> {
        self.list_where(|_| true)
    }

    /// Returns the images of one Pod, committed and partial, sorted by id. Reads only directories
    /// of this Pod's images.
    pub fn list_pod(&self, pod: &PodUid) -> Result<Vec<Listed>, ImageError> {
        self.list_where(|image| image.pod() == pod)
    }

    /// Returns the Pods with images in the store, committed or partial. Reads only the images'
    /// names.
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

    /// Returns the size of one namespace's images, committed and partial, in bytes.
    pub fn namespace_bytes(&self, namespace: &Namespace) -> Result<u64, ImageError> {
        let listed = self.list_namespace(namespace, |_| true)?;
        Ok(listed
            .iter()
            .fold(0, |sum, image| sum.saturating_add(image.size)))
    }

    /// Returns the namespaces that have a directory for images.
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
            let consumed_by = match read_marker(image.as_fd(), &at, &id) {
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

    /// Returns the size of the store's file system.
    pub fn capacity(&self) -> Result<Capacity, ImageError> {
        let stat = rustix::fs::fstatvfs(&self.images)
            .map_err(|e| PathError::new("measure", &self.root, e))?;
        Ok(Capacity {
            total: stat.f_blocks.saturating_mul(stat.f_frsize),
            available: stat.f_bavail.saturating_mul(stat.f_frsize),
        })
    }

    /// Returns an error if an image of up to `wanted` bytes would use the disk's reserve. The
    /// caller checks this before it writes the image, because a full disk harms every Pod of the
    /// node.
    pub fn check_room(&self, wanted: u64, reserve: u8) -> Result<(), SaveError> {
        // If the disk cannot be measured, the writes return its error.
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

    pub(super) fn namespace_path(&self, namespace: &Namespace) -> PathBuf {
        self.root.join(IMAGES).join(namespace.as_str())
    }

    /// Returns the path of a committed image, for messages and for runsc commands that take paths.
    pub fn image_path(&self, namespace: &Namespace, image: &ImageId) -> PathBuf {
        self.namespace_path(namespace).join(image.to_string())
    }

    pub(super) fn has(&self, dir: &OwnedFd, name: &str, path: &Path) -> Result<bool, PathError> {
        match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::NOENT) => Ok(false),
            Err(errno) => Err(PathError::new("look for", path, errno)),
        }
    }
}
