//! Repository of images outside the nodes: chunks and indexes in an object store.
//!
//! ```text
//! <prefix>/torpor-v2/<cluster>/
//!   clock                                written to learn the time of the object store
//!   <namespace>/images/<image id>        index of a whole image: index.rs
//!   <namespace>/pending/<image id>       the same, of an image that is being uploaded
//!   <namespace>/archives/<image id>      record of an archived Sandbox: archive.rs
//!   <namespace>/sweeps/<random>          mark of a sweep that may be deleting chunks
//!   <namespace>/chunks/<2 hex>/<64 hex>  one chunk, compressed, sealed where there is a key
//! ```
//!
//! An image is in the repository once its object in `images/` exists. That object is written after
//! all chunks. Chunks are shared by the images of one namespace and never by two namespaces.
//!
//! The content of an object store is not trusted. Every name, size and digest is checked before its
//! use, and every read has a limit.

mod archive;
mod chunk;
mod clock;
mod error;
mod fetch;
mod file;
mod index;
mod keys;
mod kms;
mod names;
mod object;
mod pace;
mod progress;
mod rewrap;
mod seal;
mod settings;
mod sweep;
mod timer;
mod upload;
mod write_back;

use std::path::Path;
use std::sync::Arc;

use object_store::ObjectStore;

pub use error::Error;
pub use fetch::{StoredFile, StoredImage};
pub use keys::{InvalidKeys, KeyFile, Keys, KeysError, seal_keys};
pub use kms::{Kms, KmsError};
pub use names::ImageName;
pub use pace::Pace;
pub use progress::Progress;
pub use rewrap::Rewrapped;
pub use settings::{InvalidSettings, Settings};
pub use sweep::{Health, ImageLeft, Part, Swept};
pub use timer::Timer;
pub use upload::{LocalFile, Stored};
pub use write_back::WriteBack;

/// Requests to the object store at the same time, for one image.
const PARALLEL: usize = 8;

/// A repository of one cluster.
#[derive(Debug, Clone)]
pub struct Repository {
    objects: Arc<dyn ObjectStore>,
    names: names::Names,
    keys: Keys,
    max_size: Option<u64>,
    timer: Arc<dyn Timer>,
    /// Text for messages: the URL without credentials.
    shown: String,
}

impl Repository {
    /// Opens a repository. Makes no request.
    ///
    /// `cluster` is the UID of the cluster's namespace `kube-system`, so that clusters that share a
    /// prefix never share an object. `credentials` is a directory with one file for each option of
    /// the object store's client, for example `aws_access_key_id`. Without parameter
    /// `encryption: none` there must be a key.
    pub fn open(
        settings: &Settings,
        credentials: &Path,
        keys: Keys,
        cluster: &str,
    ) -> Result<Self, InvalidSettings> {
        if settings.encrypted && keys.is_empty() {
            return Err(InvalidSettings::NoKeys);
        }
        Self::open_for_sweeps(settings, credentials, keys, cluster)
    }

    /// Opens a repository for sweeps, which need no keys. Without its key an image is neither read
    /// nor written.
    pub fn open_for_sweeps(
        settings: &Settings,
        credentials: &Path,
        keys: Keys,
        cluster: &str,
    ) -> Result<Self, InvalidSettings> {
        let (objects, prefix) = settings.client(credentials)?;
        Ok(Self {
            objects,
            names: names::Names::new(&prefix, cluster),
            keys,
            max_size: settings.max_size,
            timer: Arc::new(timer::System::new()),
            shown: settings.url.to_string(),
        })
    }

    /// Returns the repository in an object store. For tests.
    pub fn in_store(objects: Arc<dyn ObjectStore>, cluster: &str, keys: Keys) -> Self {
        Self {
            objects,
            names: names::Names::new(&object_store::path::Path::default(), cluster),
            keys,
            max_size: None,
            timer: Arc::new(timer::System::new()),
            shown: "memory".to_owned(),
        }
    }

    /// Returns the repository with another clock. For tests.
    #[must_use]
    pub fn with_timer(self, timer: Arc<dyn Timer>) -> Self {
        Self { timer, ..self }
    }

    /// Returns the most bytes that images of one namespace may have; none without a limit.
    pub fn max_size(&self) -> Option<u64> {
        self.max_size
    }

    /// Returns the repository's URL, for messages.
    pub fn url(&self) -> &str {
        &self.shown
    }
}
