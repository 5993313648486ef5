//! Limits of calls that handle many entries.

use std::{
    io::{self, Read as _},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::io::Errno;

use super::{Error, MAX_ENTRIES};
use crate::path;

/// Bytes that are copied between two checks for cancellation.
const STEP: u64 = 1 << 20;

/// Entries and bytes that a call may still use.
#[derive(Debug)]
pub struct Budget {
    entries: usize,
    bytes: u64,
    limit: u64,
    cancelled: Arc<AtomicBool>,
}

/// Guard of a call. Dropping it cancels the call.
#[derive(Debug)]
pub struct CancelGuard(Arc<AtomicBool>);

impl Drop for CancelGuard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Budget {
    /// Returns a budget of [`MAX_ENTRIES`] entries and `bytes` bytes.
    pub fn new(bytes: u64) -> (Self, CancelGuard) {
        let cancelled = Arc::new(AtomicBool::new(false));
        let guard = CancelGuard(Arc::clone(&cancelled));
        let budget = Self {
            entries: MAX_ENTRIES,
            bytes,
            limit: bytes,
            cancelled,
        };
        (budget, guard)
    }

    /// Uses one entry.
    pub fn entry(&mut self) -> Result<(), Error> {
        self.check_cancelled()?;
        self.entries = self.entries.checked_sub(1).ok_or(Error::TooMany)?;
        Ok(())
    }

    /// Uses bytes.
    pub fn bytes(&mut self, bytes: u64) -> Result<(), Error> {
        let left = self.bytes.checked_sub(bytes);
        self.bytes = left.ok_or(Error::TooLarge(self.limit))?;
        Ok(())
    }

    /// Checks the depth of a directory.
    pub fn depth(depth: usize) -> Result<(), Error> {
        match depth < path::MAX_COMPONENTS {
            true => Ok(()),
            false => Err(Error::TooDeep),
        }
    }

    /// Copies to the end of `from`, and returns the number of bytes.
    pub fn copy(&mut self, from: &mut dyn io::Read, to: &mut dyn io::Write) -> Result<u64, Error> {
        let mut copied = 0;
        loop {
            self.check_cancelled()?;
            // One byte more than the budget, so that an excess is detected.
            let step = STEP.min(self.bytes.saturating_add(1));
            let piece = io::copy(&mut from.take(step), to).map_err(|error| io_error(&error))?;
            self.bytes(piece)?;
            copied += piece;
            if piece < step {
                to.flush().map_err(|error| io_error(&error))?;
                return Ok(copied);
            }
        }
    }

    /// Fails if the call is cancelled.
    pub fn check_cancelled(&self) -> Result<(), Error> {
        match self.cancelled.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::Io(Errno::CANCELED)),
        }
    }
}

fn io_error(error: &io::Error) -> Error {
    Errno::from_io_error(error).unwrap_or(Errno::IO).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_entries_are_limited() {
        let (mut budget, _guard) = Budget::new(5);
        let mut to = Vec::new();
        assert_eq!(budget.copy(&mut &b"abc"[..], &mut to).unwrap(), 3);
        assert_eq!(budget.copy(&mut &b"de"[..], &mut to).unwrap(), 2);
        assert_eq!(budget.copy(&mut &b""[..], &mut to).unwrap(), 0);
        let more = budget.copy(&mut &b"f"[..], &mut to);
        assert!(matches!(more, Err(Error::TooLarge(5))), "{more:?}");
        for _ in 0..MAX_ENTRIES {
            budget.entry().unwrap();
        }
        assert!(matches!(budget.entry(), Err(Error::TooMany)));
    }

    #[test]
    fn a_cancelled_call_ends() {
        let (mut budget, guard) = Budget::new(u64::MAX);
        budget.entry().unwrap();
        drop(guard);
        let cancelled = |result| matches!(result, Err(Error::Io(Errno::CANCELED)));
        assert!(cancelled(budget.entry()));
        let endless = budget.copy(&mut io::repeat(0), &mut io::sink());
        assert!(cancelled(endless.map(drop)));
    }
}
