//! Images of sandboxes on the node's disk: format, store, ledger files. Synchronous, with standard
//! I/O only.
//!
//! ```text
//! <root>/images/<namespace>/<image id>/        one committed image
//!            manifest.json                     its contents and needs: manifest.rs
//!            checkpoint.img pages.img ...      the runtime's files, as named in the manifest
//!            consumed                          UID of the Pod that was restored from the image;
//!                                              exists from that restore on
//! <root>/images/<namespace>/.tmp-<image id>/   image that is being written; a rename commits it
//! <root>/images/<namespace>/.trash-<image id>/ image that is being removed
//! <root>/ledger/<pod UID>                      ledger of a Pod: torpor_core::ledger
//! ```
//!
//! Directories have mode 0700, files 0600; the agent's user owns them.
//!
//! Names come from API objects, and contents may be damaged. A process that can write below the
//! root can make the agent read any file. Therefore:
//! - names are checked types,
//! - paths are resolved below an open directory, and no link is followed,
//! - an entry is refused if it is not a plain file or directory, if another user owns it, or if
//!   group or others may write to it.

pub mod digest;
mod dirs;
pub mod failpoint;
pub mod ledger_file;
pub mod manifest;
pub mod store;

pub use digest::Digest;
pub use ledger_file::LedgerFile;
pub use manifest::{
    CompletedContainer, ContainerSpecDigest, FileEntry, Fingerprint, Manifest, ManifestDraft,
    Mismatch, SaveReason, SavedContainer, SavedName,
};
pub use store::{
    Capacity, Committed, Consumption, Image, ImageError, Listed, Partial, Removed, SaveError, Store,
};
