//! Removes images. Each call may be repeated, and finishes the removal of an interrupted call.

use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::AtFlags;
use rustix::io::Errno;
use torpor_core::{ImageId, Namespace};

use super::error::SaveError;
use super::root::{Store, TMP_PREFIX, TRASH_PREFIX};
use crate::dirs::{self, PathError, Removed};
use crate::failpoint;

impl Store {
    /// Removes a committed image.
    pub fn remove_image(
        &self,
        namespace: &Namespace,
        image: &ImageId,
    ) -> Result<Removed, SaveError> {
        self.remove(namespace, image, &image.to_string())
    }

    /// Removes a partial image: the files of an interrupted save or an interrupted removal.
    pub fn remove_partial(
        &self,
        namespace: &Namespace,
        image: &ImageId,
    ) -> Result<Removed, SaveError> {
        self.remove(namespace, image, &format!("{TMP_PREFIX}{image}"))
    }

    fn remove(
        &self,
        namespace: &Namespace,
        image: &ImageId,
        name: &str,
    ) -> Result<Removed, SaveError> {
        let path = self.namespace_path(namespace);
        let parent = match dirs::open_dir(self.images.as_fd(), namespace.as_str(), &path) {
            Err(error) if error.is_not_found() => return Ok(Removed::Already),
            other => other?,
        };
        let removed = to_trash(&parent, &path, name, image)?;
        // The call removes only an empty directory; the kernel refuses one with other images.
        match rustix::fs::unlinkat(&self.images, namespace.as_str(), AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOTEMPTY | Errno::NOENT) => Ok(removed),
            Err(errno) => Err(PathError::new("remove", &path, errno).into()),
        }
    }
}

/// Removes the image in `name`. First renames it, so that it is no image any more; then removes it
/// with the leftover of an earlier removal.
pub(super) fn to_trash(
    parent: &OwnedFd,
    path: &Path,
    name: &str,
    image: &ImageId,
) -> Result<Removed, SaveError> {
    let trash = format!("{TRASH_PREFIX}{image}");
    let trash_path = path.join(&trash);
    let c_trash = CString::new(trash.as_str()).expect("an image id holds no zero byte");
    let stat = rustix::fs::statat(parent, trash.as_str(), AtFlags::SYMLINK_NOFOLLOW);
    let leftover = stat.is_ok();
    if leftover {
        dirs::remove_all(parent.as_fd(), &c_trash, &trash_path)?;
    }
    match rustix::fs::renameat(parent, name, parent, trash.as_str()) {
        Ok(()) => {}
        Err(Errno::NOENT) if leftover => {
            dirs::sync_dir(parent.as_fd(), path)?;
            return Ok(Removed::Done);
        }
        Err(Errno::NOENT) => return Ok(Removed::Already),
        Err(errno) => return Err(PathError::new("remove", &path.join(name), errno).into()),
    }
    dirs::sync_dir(parent.as_fd(), path)?;
    failpoint::hit("remove:renamed");
    dirs::remove_all(parent.as_fd(), &c_trash, &trash_path)?;
    dirs::sync_dir(parent.as_fd(), path)?;
    Ok(Removed::Done)
}
