//! The marker of a consumed image.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use torpor_core::{ImageId, PodUid};

use super::error::ImageError;
use crate::dirs;
use crate::manifest::CONSUMED;

/// Longest marker, in bytes: a UID and a newline.
const MAX_MARKER: usize = 64;

/// Reads the Pod in the marker of an image's directory; none without a marker.
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
