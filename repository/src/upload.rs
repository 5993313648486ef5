//! Upload of an image.
//!
//! 1. The files are cut into chunks.
//! 2. The index is written to `pending/`, so that a sweep keeps the chunks that it names.
//! 3. Chunks that are not there are written. If a sweep may not have seen the index, this is done
//!    again after that sweep.
//! 4. The index is written to `images/`: from then on the image is in the repository.
//! 5. The object in `pending/` is removed.
//!
//! An upload that was cut off is begun again: it finds its chunks and sends only the rest.

use std::collections::HashSet;
use std::fs::File;
use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use jiff::Timestamp;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use tokio::task::{JoinHandle, spawn_blocking};

use crate::chunk::{self, Piece};
use crate::clock::modified;
use crate::index::Index;
use crate::keys::KeyShut;
use crate::names::{ChunkName, ImageName};
use crate::pace::Pace;
use crate::progress::Progress;
use crate::seal::Sealer;
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

impl Repository {
    /// Uploads an image. Sends only the chunks that are not there.
    pub async fn upload(
        &self,
        image: &ImageName,
        manifest: Vec<u8>,
        files: Vec<LocalFile>,
        progress: &Progress,
        pace: &Pace,
    ) -> Result<Stored, Error> {
        let sealer = self.sealer(image)?;
        let files: Vec<Arc<LocalFile>> = files.into_iter().map(Arc::new).collect();
        let index = cut(image, manifest, &files, sealer.as_ref(), pace).await?;
        let size = index.size();
        let place = self.names.image(image);
        let encoded = index.encode(self.names.cluster(), image, sealer.as_ref());
        let encoded = encoded.map_err(|why| self.damaged(&place, why))?;
        let encoded = Bytes::from(encoded);
        let pending = self.names.pending(image);
        self.put(&pending, encoded.clone()).await?;
        // Sweeps that may not have seen the index.
        let sweeps = self.marks(image.namespace()).await?;
        let sealer = sealer.map(|(_, sealer)| sealer);
        let sending = Sending {
            repository: self,
            image,
            sealer: sealer.as_ref(),
            progress,
            pace,
        };
        sending.send(&index, &files).await?;
        let mut sent = progress.sent();
        if !sweeps.is_empty() {
            self.outlast(sweeps, image.namespace()).await?;
            sending.send(&index, &files).await?;
            sent += progress.sent();
        }
        self.put(&place, encoded).await?;
        self.delete(&pending).await?;
        Ok(Stored { size, sent })
    }

    /// Returns the sealer of new objects and its key's id; none without keys.
    pub(crate) fn sealer(&self, image: &ImageName) -> Result<Option<(String, Sealer)>, Error> {
        let sealer = self.keys.newest(self.names.cluster(), image.namespace());
        sealer.map_err(|shut| self.shut(shut))
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

    pub(crate) fn shut(&self, shut: KeyShut) -> Error {
        Error::KeyShut {
            repository: self.shown.clone(),
            key: shut.id,
            why: shut.why,
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
    joined(spawn_blocking(work)).await
}

/// Waits for work that was spawned; panics where it has panicked.
pub(crate) async fn joined<T>(work: JoinHandle<T>) -> T {
    work.await
        .unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}

async fn cut(
    image: &ImageName,
    manifest: Vec<u8>,
    files: &[Arc<LocalFile>],
    sealer: Option<&(String, Sealer)>,
    pace: &Pace,
) -> Result<Index, Error> {
    let mut index = Index {
        manifest,
        files: Vec::new(),
    };
    for file in files {
        let (reading, sealer) = (Arc::clone(file), sealer.map(|(_, sealer)| sealer.clone()));
        let packing = pace.packing();
        let cut = move || packing.alone(|| chunk::cut(&reading.file, sealer.as_ref()));
        let pieces = blocking(cut).await;
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
    sealer: Option<&'a Sealer>,
    progress: &'a Progress,
    pace: &'a Pace,
}

impl Sending<'_> {
    /// Sends the chunks that are not there.
    async fn send(&self, index: &Index, files: &[Arc<LocalFile>]) -> Result<(), Error> {
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
        loop {
            while under_way.len() < PARALLEL
                && let Some((file, piece)) = rest.next()
            {
                under_way.push(self.one(file, piece));
            }
            match under_way.next().await {
                Some(sent) => sent?,
                None => return Ok(()),
            }
        }
    }

    async fn one(&self, file: &Arc<LocalFile>, piece: &Piece) -> Result<(), Error> {
        let path = self.path(&piece.name);
        let mut sent = 0;
        if self.repository.modified(&path).await?.is_none() {
            let packed = self.packed(file, piece).await?;
            sent = packed.len() as u64;
            self.pace.wait(sent).await;
            self.repository.put(&path, packed).await?;
        }
        self.progress.add(u64::from(piece.len), sent);
        Ok(())
    }

    fn path(&self, name: &ChunkName) -> Path {
        let names = &self.repository.names;
        names.chunk(self.image.namespace(), name)
    }

    async fn packed(&self, file: &Arc<LocalFile>, piece: &Piece) -> Result<Bytes, Error> {
        let (reading, of, sealer) = (Arc::clone(file), piece.clone(), self.sealer.cloned());
        let packing = self.pace.packing();
        let pack = move || packing.alone(|| chunk::pack(&reading.file, &of, sealer.as_ref()));
        let packed = blocking(pack).await;
        let packed = packed.map_err(|source| local("read", file, self.image, source))?;
        packed.map(Bytes::from).ok_or_else(|| Error::Changed {
            name: file.name.clone(),
            image: self.image.image().to_owned(),
        })
    }
}
