//! Images of sandboxes on the node's disk: format, store, ledger files. Synchronous, standard I/O only.
//!
//! ```text
//! <root>/images/<namespace>/<image id>/        one committed image (directories 0700, files 0600, owner = us)
//!            manifest.json                     what the image is and what it needs: manifest.rs
//!            checkpoint.img pages.img ...      the runtime's files, as named in the manifest
//!            consumed                          UID of the Pod that was restored from it, once there is one
//! <root>/images/<namespace>/.tmp-<image id>/   being written; a rename makes it an image
//! <root>/images/<namespace>/.trash-<image id>/ being removed
//! <root>/ledger/<pod UID>                      torpor_core::ledger
//! ```
//! Names come from API objects, contents may have been damaged, and whoever can write below the root can make the agent read
//! what they like: so names are checked types, paths are resolved below an open directory without following any link, and what
//! is not a plain file or directory of ours, closed to others, is refused.

pub mod digest;
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
