//! Files that are written back to the disk while they are downloaded.

use std::fs::File;
use std::io;
use std::sync::Arc;

use tokio::task::{JoinHandle, spawn_blocking};

use crate::upload::joined;

/// Bytes after which the files are written back.
const PART: u64 = 16 << 20;

/// Number of a file, and the error of its write-back.
type Failed = (usize, io::Error);

/// Files that are written back to the disk while they are downloaded, so that an `fsync` afterwards
/// has little left to do.
///
/// A write-back may keep the files open for a moment after this was dropped.
#[derive(Debug)]
pub struct WriteBack {
    files: Arc<[Arc<File>]>,
    /// Bytes that were written since the last write-back began.
    unwritten: u64,
    running: Option<JoinHandle<Result<(), Failed>>>,
}

impl WriteBack {
    pub fn of(files: &[Arc<File>]) -> Self {
        Self {
            files: files.into(),
            unwritten: 0,
            running: None,
        }
    }

    /// Counts bytes that were written to the files, and begins a write-back if none runs.
    pub async fn wrote(&mut self, bytes: u64) -> Result<(), Failed> {
        self.unwritten += bytes;
        let is_idle = self.running.as_ref().is_none_or(JoinHandle::is_finished);
        if self.unwritten < PART || !is_idle {
            return Ok(());
        }
        self.end().await?;
        self.unwritten = 0;
        let files = self.files.clone();
        self.running = Some(spawn_blocking(move || {
            let mut files = files.iter().enumerate();
            files.try_for_each(|(at, file)| file.sync_data().map_err(|error| (at, error)))
        }));
        Ok(())
    }

    /// Waits for the write-back that runs. Its error may be reported here only, and not by a later
    /// `fsync`.
    pub async fn end(&mut self) -> Result<(), Failed> {
        match self.running.take() {
            Some(running) => joined(running).await,
            None => Ok(()),
        }
    }
}
