//! Errors of saving, removing and using an image.

use std::io;
use std::path::PathBuf;

use torpor_core::{ImageId, Namespace, PodUid};

use crate::digest::Digest;
use crate::dirs::{OpenError, PathError, Unsafe};
use crate::manifest::{CONSUMED, DecodeError, Mismatch};

const MIB: u64 = 1 << 20;

/// Error of saving or removing an image.
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
        /// Most bytes of the image; `free` and `kept` are bytes of the disk.
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
    /// Returns the reason for conditions: DiskFull or SaveFailed.
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

/// Error of using an image.
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
        expected: Digest,
        found: Digest,
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
    /// Returns the reason for conditions: ImageMissing, ImageCorrupt, ImageStale,
    /// FingerprintMismatch, SpecMismatch or RestoreFailed.
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

    /// Reports whether the image may become usable without an intervention.
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

impl From<OpenError> for SaveError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Path(error) => error.into(),
            OpenError::Unsafe(error) => error.into(),
        }
    }
}

impl From<OpenError> for ImageError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Path(error) => error.into(),
            OpenError::Unsafe(error) => error.into(),
        }
    }
}
