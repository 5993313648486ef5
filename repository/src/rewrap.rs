//! Rotation of encryption keys: the keys of objects are wrapped with the newest key.
//!
//! Only the headers of indexes and records change. Chunks keep their names and their bytes, because
//! the index has their keys.

use std::collections::BTreeMap;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{PutMode, PutPayload, UpdateVersion};

use crate::names::ImageName;
use crate::object::{ARCHIVE, IMAGE, Kind, Rewrap};
use crate::{Error, PARALLEL, Repository};

/// Result of a rotation in one namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rewrapped {
    /// Objects whose key was wrapped anew.
    pub objects: u64,
    /// Objects that still need an older key, by the key's id: those of uploads under way, those
    /// that changed meanwhile, and those whose key is missing or shut.
    pub left: BTreeMap<String, u64>,
}

/// State of one object.
enum Found {
    /// It is in clear, needs the newest key only, or is gone.
    Settled,
    Rewrapped,
    /// It needs the older key with this id.
    Left(String),
}

impl Repository {
    /// Returns the ids of the keys that only older objects need.
    pub fn older_keys(&self) -> impl Iterator<Item = &str> {
        self.keys.ids().skip(1)
    }

    /// Wraps the keys of a namespace's indexes and records with the newest key. An object that
    /// cannot be read is left as it is: sweeps and fetches report it.
    ///
    /// An index that is written at the same time stays as that writer left it. So nothing is
    /// written in a directory (`file://`), whose client has no conditional writes.
    pub async fn rewrap(&self, namespace: &str) -> Result<Rewrapped, Error> {
        let places = [
            (self.names.all_pending(namespace), IMAGE, false),
            (self.names.images(namespace), IMAGE, true),
            (self.names.archives(namespace), ARCHIVE, true),
        ];
        let mut rewrapped = Rewrapped::default();
        for (place, kind, is_whole) in places {
            let listed = self.objects.list(Some(&place));
            let listed = listed.map_err(|error| self.failed("list", &place, error));
            let settled = listed
                .map_ok(|meta| async move {
                    let path = meta.location;
                    let image = path.filename().unwrap_or_default();
                    match ImageName::new(namespace, image) {
                        Some(name) => self.rewrap_one(kind, is_whole, &path, &name).await,
                        // Objects of other programs are left alone.
                        None => Ok(Found::Settled),
                    }
                })
                .try_buffer_unordered(2 * PARALLEL);
            let found: Vec<Found> = settled.try_collect().await?;
            for one in found {
                match one {
                    Found::Settled => {}
                    Found::Rewrapped => rewrapped.objects += 1,
                    Found::Left(key) => *rewrapped.left.entry(key).or_default() += 1,
                }
            }
        }
        Ok(rewrapped)
    }

    async fn rewrap_one(
        &self,
        kind: Kind,
        is_whole: bool,
        path: &Path,
        name: &ImageName,
    ) -> Result<Found, Error> {
        let read = match self.read_versioned(path, kind.largest).await {
            Ok(read) => read,
            Err(Error::Damaged { .. }) => None,
            Err(error) => return Err(error),
        };
        let Some((bytes, version)) = read else {
            return Ok(Found::Settled);
        };
        let rewrap = kind.rewrap(&bytes, self.names.cluster(), name, &self.keys);
        let (older, bytes) = match rewrap {
            Rewrap::Settled => return Ok(Found::Settled),
            Rewrap::Impossible { older } => return Ok(Found::Left(older)),
            Rewrap::Done { older, bytes } => (older, bytes),
        };
        if is_whole && self.replace(path, bytes.into(), version).await? {
            return Ok(Found::Rewrapped);
        }
        Ok(Found::Left(older))
    }

    /// Writes an object that has not changed since its version was read. Reports whether it was
    /// written.
    async fn replace(
        &self,
        path: &Path,
        bytes: Bytes,
        version: UpdateVersion,
    ) -> Result<bool, Error> {
        let payload = PutPayload::from_bytes(bytes);
        let mode = PutMode::Update(version).into();
        match self.objects.put_opts(path, payload, mode).await {
            Ok(_) => Ok(true),
            Err(
                object_store::Error::Precondition { .. }
                | object_store::Error::NotFound { .. }
                | object_store::Error::NotImplemented { .. }
                | object_store::Error::NotSupported { .. },
            ) => Ok(false),
            Err(error) => Err(self.failed("write", path, error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;

    use super::*;
    use crate::Keys;

    #[tokio::test]
    async fn an_object_that_was_written_meanwhile_stays() {
        let objects = Arc::new(InMemory::new());
        let repository = Repository::in_store(objects, "c", Keys::default());
        let path = Path::from("an/index");
        let put = async |content: &'static [u8]| {
            let put = repository.put(&path, Bytes::from_static(content)).await;
            put.expect("written");
        };
        let version = async || {
            let read = repository.read_versioned(&path, 100).await.expect("read");
            read.expect("an object").1
        };
        let replace = async |version| {
            let replaced = repository.replace(&path, Bytes::from_static(b"3"), version);
            replaced.await.expect("an answer")
        };
        put(b"1").await;
        let read = version().await;
        put(b"2").await;
        assert!(!replace(read).await);
        let content = repository.read(&path, 100).await.expect("read");
        assert_eq!(content.as_deref(), Some(&b"2"[..]));
        let read = version().await;
        repository.delete(&path).await.expect("deleted");
        assert!(!replace(read).await, "it does not come back");
        assert_eq!(repository.read(&path, 100).await.expect("read"), None);
        put(b"1").await;
        assert!(replace(version().await).await);
    }
}
