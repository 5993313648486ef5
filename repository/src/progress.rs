//! Progress of an upload or a download, for statuses.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of an image, counted while it moves.
#[derive(Debug, Default)]
pub struct Progress {
    total: AtomicU64,
    done: AtomicU64,
    sent: AtomicU64,
}

impl Progress {
    /// Returns the bytes of the image's files; 0 until they are known.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Returns the bytes of the files that are at their destination.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Returns the bytes that passed the network: compressed, and without chunks that were there.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Begins anew, with this many bytes of files.
    pub fn begin(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
        self.sent.store(0, Ordering::Relaxed);
    }

    /// Adds bytes of files, and the bytes that passed the network for them.
    pub fn add(&self, done: u64, sent: u64) {
        self.done.fetch_add(done, Ordering::Relaxed);
        self.sent.fetch_add(sent, Ordering::Relaxed);
    }
}
