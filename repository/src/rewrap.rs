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
use crate::{Error, Repository};

/// Objects that are in memory at once. An index has 64 MiB at most.
const AT_ONCE: usize = 4;

/// Result of a rotation in one namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rewrapped {
    /// Objects whose key was wrapped anew.
    pub objects: u64,
    /// Objects that still need an older key, by the key's id. They belong to uploads under way,
    /// have changed meanwhile, cannot be written conditionally, or need a key that cannot be used.
    pub left: BTreeMap<String, u64>,
}

/// State of one object.
enum Found {
    /// It is in clear, needs the newest key only, cannot be read, or is gone.
    Settled,
    Rewrapped,
    /// It needs the older key with this id.
    Left(String),
}

impl Repository {
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
                .try_buffer_unordered(AT_ONCE);
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
        let is_known = version.e_tag.is_some() || version.version.is_some();
        if !is_whole || !is_known {
            return Ok(Found::Left(older));
        }
        match self.replace(path, bytes.into(), version).await {
            Ok(true) => Ok(Found::Rewrapped),
            Ok(false) => Ok(Found::Left(older)),
            // The other objects are rotated nevertheless.
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "cannot rotate the key of an object");
                Ok(Found::Left(older))
            }
        }
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
                | object_store::Error::AlreadyExists { .. }
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

    const OLD: &str = "old:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    const NEW: &str = "new:AQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
    /// Another key with the id of the old one.
    const WRONG: &str = "old:AgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";

    #[tokio::test]
    async fn what_cannot_be_wrapped_anew_is_left_as_it_is() {
        let keys = Keys::parse(&format!("{NEW}\n{OLD}")).expect("keys");
        let repository = Repository::in_store(Arc::new(InMemory::new()), "c", keys);
        let name = |id| ImageName::new("n", id).expect("a name");
        let sealed = |id, key: Option<&str>| {
            let keys = Keys::parse(key.unwrap_or_default()).expect("keys");
            let sealer = keys.newest("c", "n").expect("open");
            let bytes = IMAGE.encode("c", &name(id), &[], b"{}", sealer.as_ref());
            Bytes::from(bytes.expect("encoded"))
        };
        let names = &repository.names;
        let objects = [
            (names.pending(&name("p.1")), sealed("p.1", Some(OLD))),
            (names.image(&name("p.2")), sealed("p.2", Some(WRONG))),
            (names.image(&name("p.3")), sealed("p.3", None)),
            (names.image(&name("p.4")), sealed("p.4", Some(NEW))),
            (names.image(&name("p.5")), Bytes::from_static(b"nonsense")),
        ];
        for (path, bytes) in &objects {
            repository.put(path, bytes.clone()).await.expect("written");
        }
        let rewrapped = repository.rewrap("n").await.expect("looked");
        let left = [("old".to_owned(), 2)].into();
        assert_eq!(rewrapped, Rewrapped { objects: 0, left });
        for (path, bytes) in &objects {
            let read = repository.read(path, 1 << 20).await.expect("read");
            assert_eq!(read.as_deref(), Some(&**bytes), "{path}");
        }
    }

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
