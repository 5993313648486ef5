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
//! Directories have mode 0770 and the agent's group ([`AGENT_ID`]), so that the shims, which run as
//! root, and the agent use each other's. Where neither root nor the agent makes them, they have
//! mode 0700.
//!
//! Names come from API objects, and contents may be damaged. The agent may be taken over, and must
//! not make a shim use any file outside the store. Therefore:
//! - names are checked types,
//! - paths are resolved below an open directory, and no link is followed,
//! - an entry is refused if it is not a plain file or directory, or if another user than root and
//!   the agent owns it or may write to it.

pub mod digest;
mod dirs;
pub mod failpoint;
pub mod ledger_file;
pub mod manifest;
pub mod steps;
pub mod store;

pub use digest::Digest;
pub use dirs::AGENT_ID;
pub use ledger_file::LedgerFile;
pub use manifest::{
    CompletedContainer, ContainerSpecDigest, FileEntry, Fingerprint, Manifest, ManifestDraft,
    Mismatch, SaveReason, SavedContainer, SavedName,
};
pub use store::{
    Capacity, Committed, Consumption, Image, ImageError, Listed, Partial, Removed, SaveError, Store,
};
