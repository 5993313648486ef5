//! Download of an image.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use futures::stream::FuturesUnordered;
use futures::{StreamExt, TryStreamExt};
use object_store::ObjectStoreExt;
use object_store::path::Path;

use crate::chunk::{self, Piece};
use crate::index::Index;
use crate::names::ImageName;
use crate::object::{self, Unreadable};
use crate::progress::Progress;
use crate::seal::Sealer;
use crate::upload::blocking;
use crate::{Error, PARALLEL, Repository};

/// Overhead of a packed chunk, in bytes: frame of zstd, nonce and tag.
const OVERHEAD: u64 = 64 << 10;

/// An image in a repository, and its manifest.
#[derive(Debug)]
pub struct StoredImage {
    name: ImageName,
    index: Index,
    sealer: Option<Sealer>,
}

/// A file of an image in a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredFile<'a> {
    pub name: &'a str,
    /// Size in bytes.
    pub size: u64,
}

impl StoredImage {
    /// Returns the content of the image's `manifest.json`, as the repository has it. Nothing has
    /// been checked in it.
    pub fn manifest(&self) -> &[u8] {
        &self.index.manifest
    }

    /// Returns the image's files, as the repository has them. A name may be any text.
    pub fn files(&self) -> impl Iterator<Item = StoredFile<'_>> {
        self.index.files.iter().map(|(name, pieces)| StoredFile {
            name,
            size: pieces.iter().map(|piece| u64::from(piece.len)).sum(),
        })
    }
}

impl Repository {
    /// Reads the index of an image.
    pub async fn image(&self, name: &ImageName) -> Result<StoredImage, Error> {
        let path = self.names.image(name);
        let missing = || Error::Missing {
            image: name.image().to_owned(),
            repository: self.shown.clone(),
        };
        let bytes = self
            .read(&path, object::IMAGE.largest)
            .await?
            .ok_or_else(missing)?;
        let decoded = Index::decode(&bytes, self.names.cluster(), name, &self.keys);
        let (index, sealer) = decoded.map_err(|why| self.unreadable(&path, why))?;
        Ok(StoredImage {
            name: name.clone(),
            index,
            sealer,
        })
    }

    /// Downloads all files of an image into `files`, in the order of [`StoredImage::files`]. Each
    /// chunk is checked before it is written.
    pub async fn fetch(
        &self,
        image: &StoredImage,
        files: Vec<File>,
        progress: &Progress,
    ) -> Result<(), Error> {
        progress.begin(image.index.size());
        let mut rest = Vec::new();
        for (file, (name, pieces)) in files.into_iter().zip(&image.index.files) {
            let file = Arc::new(file);
            rest.extend(pieces.iter().map(|piece| (Arc::clone(&file), name, piece)));
        }
        let mut rest = rest.into_iter();
        let mut under_way = FuturesUnordered::new();
        loop {
            while under_way.len() < 2 * PARALLEL
                && let Some((file, name, piece)) = rest.next()
            {
                under_way.push(self.piece(image, file, name, piece, progress));
            }
            match under_way.next().await {
                Some(fetched) => fetched?,
                None => return Ok(()),
            }
        }
    }

    /// Downloads one piece.
    async fn piece(
        &self,
        image: &StoredImage,
        file: Arc<File>,
        name: &str,
        piece: &Piece,
        progress: &Progress,
    ) -> Result<(), Error> {
        let path = self.names.chunk(image.name.namespace(), &piece.name);
        let missing = || self.damaged(&path, "it does not exist".to_owned());
        let limit = u64::from(piece.len) + OVERHEAD;
        let object = self.read(&path, limit).await?.ok_or_else(missing)?;
        let sent = object.len() as u64;
        let (of, sealer) = (piece.clone(), image.sealer.clone());
        let written = blocking(move || {
            let content = chunk::unpack(object, &of, sealer.as_ref())?;
            Ok(file.write_all_at(&content, of.offset))
        });
        let written: Result<io::Result<()>, String> = written.await;
        written
            .map_err(|why| self.damaged(&path, why))?
            .map_err(|source| Error::Local {
                doing: "write",
                name: name.to_owned(),
                image: image.name.image().to_owned(),
                source,
            })?;
        progress.add(u64::from(piece.len), sent);
        Ok(())
    }

    pub(crate) fn unreadable(&self, path: &Path, why: Unreadable) -> Error {
        match why {
            Unreadable::Damaged(why) => self.damaged(path, why),
            Unreadable::KeyMissing(key) => Error::KeyMissing {
                object: path.to_string(),
                repository: self.shown.clone(),
                key,
            },
        }
    }

    /// Reads an object of at most `limit` bytes; none if it does not exist.
    pub(crate) async fn read(&self, path: &Path, limit: u64) -> Result<Option<Vec<u8>>, Error> {
        let failed = |error| self.failed("read", path, error);
        let found = match self.objects.get(path).await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let mut bytes = Vec::new();
        let mut parts = found.into_stream();
        while let Some(part) = parts.try_next().await.map_err(failed)? {
            if (bytes.len() + part.len()) as u64 > limit {
                return Err(self.damaged(path, format!("it has more than {limit} bytes")));
            }
            bytes.extend_from_slice(&part);
        }
        Ok(Some(bytes))
    }
}
