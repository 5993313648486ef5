//! Download of an image.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use futures::stream::FuturesUnordered;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{ObjectStoreExt, UpdateVersion};

use crate::chunk::{self, Piece};
use crate::error::lacks_bucket;
use crate::index::Index;
use crate::names::ImageName;
use crate::object::{self, Unreadable};
use crate::progress::Progress;
use crate::upload::blocking;
use crate::write_back::WriteBack;
use crate::{Error, PARALLEL, Repository};

/// Overhead of a packed chunk, in bytes: frame of zstd, nonce and tag.
const OVERHEAD: u64 = 64 << 10;

/// Returns the error of a file that cannot be written.
fn not_written(image: &StoredImage, name: &str, source: io::Error) -> Error {
    Error::Local {
        doing: "write",
        name: name.to_owned(),
        image: image.name.image().to_owned(),
        source,
    }
}

/// An image in a repository, and its manifest.
#[derive(Debug)]
pub struct StoredImage {
    name: ImageName,
    index: Index,
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
        let index = decoded.map_err(|why| self.unreadable(&path, why))?;
        Ok(StoredImage {
            name: name.clone(),
            index,
        })
    }

    /// Downloads all files of an image into `files`, in the order of [`StoredImage::files`]. A
    /// chunk is written once its seal, or its hash if it is not sealed, fits its name. The caller
    /// compares the files with the digests of the manifest.
    ///
    /// A write-back may keep the files open for a moment after the future was dropped.
    pub async fn fetch(
        &self,
        image: &StoredImage,
        files: Vec<File>,
        progress: &Progress,
    ) -> Result<(), Error> {
        progress.begin(image.index.size());
        let files: Vec<Arc<File>> = files.into_iter().map(Arc::new).collect();
        let mut rest = Vec::new();
        for (file, (name, pieces)) in files.iter().zip(&image.index.files) {
            rest.extend(pieces.iter().map(|piece| (Arc::clone(file), name, piece)));
        }
        let mut rest = rest.into_iter();
        let mut under_way = FuturesUnordered::new();
        let mut write_back = WriteBack::of(&files);
        let failed =
            |(at, source): (usize, io::Error)| not_written(image, &image.index.files[at].0, source);
        loop {
            while under_way.len() < 2 * PARALLEL
                && let Some((file, name, piece)) = rest.next()
            {
                under_way.push(self.piece(image, file, name, piece, progress));
            }
            let Some(fetched) = under_way.next().await else {
                return write_back.end().await.map_err(failed);
            };
            write_back.wrote(fetched?).await.map_err(failed)?;
        }
    }

    /// Downloads one piece. Returns its size in bytes.
    async fn piece(
        &self,
        image: &StoredImage,
        file: Arc<File>,
        name: &str,
        piece: &Piece,
        progress: &Progress,
    ) -> Result<u64, Error> {
        let path = self.names.chunk(image.name.namespace(), &piece.name);
        let missing = || self.damaged(&path, "it does not exist".to_owned());
        let limit = u64::from(piece.len) + OVERHEAD;
        let object = self.read(&path, limit).await?.ok_or_else(missing)?;
        let sent = object.len() as u64;
        let of = piece.clone();
        let written = blocking(move || {
            let content = chunk::unpack(object, &of)?;
            Ok(file.write_all_at(&content, of.offset))
        });
        let written: Result<io::Result<()>, String> = written.await;
        written
            .map_err(|why| self.damaged(&path, why))?
            .map_err(|source| not_written(image, name, source))?;
        progress.add(u64::from(piece.len), sent);
        Ok(u64::from(piece.len))
    }

    pub(crate) fn unreadable(&self, path: &Path, why: Unreadable) -> Error {
        match why {
            Unreadable::Damaged(why) => self.damaged(path, why),
            Unreadable::KeyMissing(key) => Error::KeyMissing {
                object: path.to_string(),
                repository: self.shown.clone(),
                key,
            },
            Unreadable::KeyShut(shut) => self.shut(shut),
        }
    }

    /// Reads an object of at most `limit` bytes; none if it does not exist.
    pub(crate) async fn read(&self, path: &Path, limit: u64) -> Result<Option<Vec<u8>>, Error> {
        let read = self.read_versioned(path, limit).await?;
        Ok(read.map(|(bytes, _)| bytes))
    }

    /// Reads an object as [`Self::read`] does, and its version.
    pub(crate) async fn read_versioned(
        &self,
        path: &Path,
        limit: u64,
    ) -> Result<Option<(Vec<u8>, UpdateVersion)>, Error> {
        let failed = |error| self.failed("read", path, error);
        let found = match self.objects.get(path).await {
            Ok(found) => found,
            Err(error) if lacks_bucket(&error) => return Err(failed(error)),
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let version = UpdateVersion {
            e_tag: found.meta.e_tag.clone(),
            version: found.meta.version.clone(),
        };
        let size = found.meta.size.min(limit);
        let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or_default());
        let mut parts = found.into_stream();
        while let Some(part) = parts.try_next().await.map_err(failed)? {
            if (bytes.len() + part.len()) as u64 > limit {
                return Err(self.damaged(path, format!("it has more than {limit} bytes")));
            }
            bytes.extend_from_slice(&part);
        }
        Ok(Some((bytes, version)))
    }
}
