//! Upload of an image.
//!
//! 1. The files are cut into chunks.
//! 2. The index is written to `pending/`, so that a sweep keeps the chunks that it names.
//! 3. Chunks that are not there are written.
//! 4. The index is written to `images/`: from then on the image is in the repository.
//! 5. The object in `pending/` is removed.
//!
//! An upload that was cut off is begun again: it finds its chunks and sends only the rest.

use std::collections::HashSet;
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use jiff::Timestamp;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};

use crate::chunk::{self, Piece};
use crate::clock::modified;
use crate::index::Index;
use crate::names::{ChunkName, ImageName};
use crate::pace::Pace;
use crate::progress::Progress;
use crate::seal::Sealer;
use crate::settings::LONGEST_REQUEST;
use crate::sweep::{DELETES_FOR, KEPT_FOR};
use crate::{Error, PARALLEL, Repository};

/// A file of an image on this node.
#[derive(Debug)]
pub struct LocalFile {
    pub name: String,
    pub file: File,
}

/// Result of an upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Bytes of the image's files.
    pub size: u64,
    /// Bytes that were sent: compressed, and without chunks that were there.
    pub sent: u64,
}

/// A chunk's state in the repository, before it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// It is there, and no sweep deletes it before the image is committed.
    Young,
    /// It is there, but a sweep may be about to delete it.
    Old,
    Absent,
}

impl Found {
    fn of(written: Option<Timestamp>, now: Timestamp) -> Self {
        match written {
            None => Self::Absent,
            Some(written) if now.duration_since(written) > KEPT_FOR / 2 => Self::Old,
            Some(_) => Self::Young,
        }
    }
}

impl Repository {
    /// Uploads an image. Of an image that is there with the same manifest it sends only chunks that
    /// are missing.
    pub async fn upload(
        &self,
        image: &ImageName,
        manifest: Vec<u8>,
        files: Vec<LocalFile>,
        progress: &Progress,
        pace: &Pace,
    ) -> Result<Stored, Error> {
        let is_there = self.has(image, &manifest).await?;
        let sealer = self.sealer(image);
        let files: Vec<Arc<LocalFile>> = files.into_iter().map(Arc::new).collect();
        let index = cut(image, manifest, &files, sealer.as_ref()).await?;
        let size = index.size();
        let place = self.names.image(image);
        let encoded = index.encode(self.names.cluster(), image, sealer.as_ref());
        let encoded = encoded.map_err(|why| self.damaged(&place, why))?;
        let encoded = Bytes::from(encoded);
        let begun = Instant::now();
        let pending = self.names.pending(image);
        self.put(&pending, encoded.clone()).await?;
        let now = self.now().await?;
        let sealer = sealer.map(|(_, sealer)| sealer);
        let sending = Sending {
            repository: self,
            image,
            is_there,
            sealer: sealer.as_ref(),
            now,
            progress,
            pace,
        };
        let any_old = sending.send(&index, &files).await?;
        let mut sent = progress.sent();
        if any_old && !is_there {
            // A sweep that did not see the pending index may delete old chunks for this long.
            let passed = begun.elapsed();
            tokio::time::sleep((DELETES_FOR + LONGEST_REQUEST).saturating_sub(passed)).await;
            sending.send(&index, &files).await?;
            sent += progress.sent();
        }
        self.put(&place, encoded).await?;
        self.delete(&pending).await?;
        Ok(Stored { size, sent })
    }

    /// Returns the sealer of new objects and its key's id; none without keys.
    pub(crate) fn sealer(&self, image: &ImageName) -> Option<(String, Sealer)> {
        let sealer = self.keys.newest(self.names.cluster(), image.namespace());
        sealer.map(|(id, sealer)| (id.to_owned(), sealer))
    }

    /// Reports whether the image's index is there with this manifest.
    async fn has(&self, image: &ImageName, manifest: &[u8]) -> Result<bool, Error> {
        match self.image(image).await {
            Ok(found) => Ok(found.manifest() == manifest),
            Err(error) if !error.is_final() => Err(error),
            // An image that cannot be read is written anew.
            Err(_) => Ok(false),
        }
    }

    /// Returns when an object was written last; none if it does not exist.
    pub(crate) async fn modified(&self, path: &Path) -> Result<Option<Timestamp>, Error> {
        match self.objects.head(path).await {
            Ok(meta) => Ok(Some(modified(&meta))),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed("examine", path, error)),
        }
    }

    pub(crate) async fn put(&self, path: &Path, bytes: Bytes) -> Result<(), Error> {
        let put = self.objects.put(path, PutPayload::from_bytes(bytes)).await;
        put.map(drop).map_err(|e| self.failed("write", path, e))
    }

    /// Deletes an object. A missing object is no error.
    pub(crate) async fn delete(&self, path: &Path) -> Result<(), Error> {
        match self.objects.delete(path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed("delete", path, error)),
        }
    }

    pub(crate) fn failed(
        &self,
        doing: &'static str,
        object: &Path,
        source: object_store::Error,
    ) -> Error {
        Error::Request {
            doing,
            object: object.to_string(),
            repository: self.shown.clone(),
            source: Box::new(source),
        }
    }

    pub(crate) fn damaged(&self, object: &Path, why: String) -> Error {
        Error::Damaged {
            object: object.to_string(),
            repository: self.shown.clone(),
            why,
        }
    }
}

/// Runs work that blocks.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

async fn cut(
    image: &ImageName,
    manifest: Vec<u8>,
    files: &[Arc<LocalFile>],
    sealer: Option<&(String, Sealer)>,
) -> Result<Index, Error> {
    let mut index = Index {
        manifest,
        files: Vec::new(),
    };
    for file in files {
        let (reading, sealer) = (Arc::clone(file), sealer.map(|(_, sealer)| sealer.clone()));
        let pieces = blocking(move || chunk::cut(&reading.file, sealer.as_ref())).await;
        let pieces = pieces.map_err(|source| local("read", file, image, source))?;
        index.files.push((file.name.clone(), pieces));
    }
    Ok(index)
}

fn local(
    doing: &'static str,
    file: &LocalFile,
    image: &ImageName,
    source: std::io::Error,
) -> Error {
    Error::Local {
        doing,
        name: file.name.clone(),
        image: image.image().to_owned(),
        source,
    }
}

/// Chunks on their way.
struct Sending<'a> {
    repository: &'a Repository,
    image: &'a ImageName,
    /// The image's index is there, so no sweep deletes its chunks.
    is_there: bool,
    sealer: Option<&'a Sealer>,
    now: Timestamp,
    progress: &'a Progress,
    pace: &'a Pace,
}

impl Sending<'_> {
    /// Sends the chunks that are not there. Returns whether one of them is old.
    async fn send(&self, index: &Index, files: &[Arc<LocalFile>]) -> Result<bool, Error> {
        self.progress.begin(index.size());
        let mut seen = HashSet::new();
        let mut distinct: Vec<(&Arc<LocalFile>, &Piece)> = Vec::new();
        for (file, (_, pieces)) in files.iter().zip(&index.files) {
            for piece in pieces {
                match seen.insert(piece.name) {
                    true => distinct.push((file, piece)),
                    false => self.progress.add(u64::from(piece.len), 0),
                }
            }
        }
        let mut rest = distinct.into_iter();
        let mut under_way = FuturesUnordered::new();
        let mut any_old = false;
        loop {
            while under_way.len() < PARALLEL
                && let Some((file, piece)) = rest.next()
            {
                under_way.push(self.one(file, piece));
            }
            match under_way.next().await {
                Some(found) => any_old |= found? == Found::Old,
                None => return Ok(any_old),
            }
        }
    }

    async fn one(&self, file: &Arc<LocalFile>, piece: &Piece) -> Result<Found, Error> {
        let path = self.path(&piece.name);
        let found = Found::of(self.repository.modified(&path).await?, self.now);
        let mut sent = 0;
        if found == Found::Absent || found == Found::Old && !self.is_there {
            let packed = self.packed(file, piece).await?;
            sent = packed.len() as u64;
            self.pace.wait(sent).await;
            self.repository.put(&path, packed).await?;
        }
        self.progress.add(u64::from(piece.len), sent);
        Ok(found)
    }

    fn path(&self, name: &ChunkName) -> Path {
        let names = &self.repository.names;
        names.chunk(self.image.namespace(), name)
    }

    async fn packed(&self, file: &Arc<LocalFile>, piece: &Piece) -> Result<Bytes, Error> {
        let (reading, of, sealer) = (Arc::clone(file), piece.clone(), self.sealer.cloned());
        let packed = blocking(move || chunk::pack(&reading.file, &of, sealer.as_ref())).await;
        let packed = packed.map_err(|source| local("read", file, self.image, source))?;
        packed.map(Bytes::from).ok_or_else(|| Error::Changed {
            name: file.name.clone(),
            image: self.image.image().to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;

    use super::*;

    #[test]
    fn a_chunk_that_a_sweep_may_be_deleting_is_written_again() {
        let now = Timestamp::UNIX_EPOCH + KEPT_FOR;
        let found = |age: SignedDuration| Found::of(Some(now - age), now);
        assert_eq!(Found::of(None, now), Found::Absent);
        assert_eq!(found(SignedDuration::ZERO), Found::Young);
        assert_eq!(found(KEPT_FOR / 2), Found::Young);
        assert_eq!(
            found(KEPT_FOR / 2 + SignedDuration::from_secs(1)),
            Found::Old
        );
        assert_eq!(found(-SignedDuration::from_secs(5)), Found::Young);
    }
}
