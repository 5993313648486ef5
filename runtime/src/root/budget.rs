//! How far a call that does many things may go.

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

/// Bytes that are copied between two looks whether anybody still waits.
const STEP: u64 = 1 << 20;

/// Entries and bytes that a call may still use.
#[derive(Debug)]
pub struct Budget {
    entries: usize,
    bytes: u64,
    limit: u64,
    abandoned: Arc<AtomicBool>,
}

/// Held while a call is waited for. Once it is dropped, the call ends soon.
#[derive(Debug)]
pub struct Waiting(Arc<AtomicBool>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Budget {
    /// [`MAX_ENTRIES`] entries, and so many bytes.
    pub fn new(bytes: u64) -> (Self, Waiting) {
        let abandoned = Arc::new(AtomicBool::new(false));
        let waiting = Waiting(Arc::clone(&abandoned));
        let budget = Self {
            entries: MAX_ENTRIES,
            bytes,
            limit: bytes,
            abandoned,
        };
        (budget, waiting)
    }

    /// Takes one entry.
    pub fn entry(&mut self) -> Result<(), Error> {
        self.heard()?;
        self.entries = self.entries.checked_sub(1).ok_or(Error::TooMany)?;
        Ok(())
    }

    /// Takes bytes.
    pub fn bytes(&mut self, bytes: u64) -> Result<(), Error> {
        let left = self.bytes.checked_sub(bytes);
        self.bytes = left.ok_or(Error::TooLarge(self.limit))?;
        Ok(())
    }

    /// A directory within so many others.
    pub fn depth(depth: usize) -> Result<(), Error> {
        match depth < path::MAX_COMPONENTS {
            true => Ok(()),
            false => Err(Error::TooDeep),
        }
    }

    /// Copies to the end of `from`, and answers how many bytes that was.
    pub fn copy(&mut self, from: &mut dyn io::Read, to: &mut dyn io::Write) -> Result<u64, Error> {
        let mut copied = 0;
        loop {
            self.heard()?;
            // A byte more than there may be, so that more is noticed.
            let step = STEP.min(self.bytes.saturating_add(1));
            let piece = io::copy(&mut from.take(step), to).map_err(|error| of_io(&error))?;
            self.bytes(piece)?;
            copied += piece;
            if piece < step {
                to.flush().map_err(|error| of_io(&error))?;
                return Ok(copied);
            }
        }
    }

    /// Whether anybody still waits for the call.
    pub fn heard(&self) -> Result<(), Error> {
        match self.abandoned.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(Error::Io(Errno::CANCELED)),
        }
    }
}

fn of_io(error: &io::Error) -> Error {
    Errno::from_io_error(error).unwrap_or(Errno::IO).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_entries_end() {
        let (mut budget, _waiting) = Budget::new(5);
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
    fn what_nobody_waits_for_ends() {
        let (mut budget, waiting) = Budget::new(u64::MAX);
        budget.entry().unwrap();
        drop(waiting);
        let cancelled = |result| matches!(result, Err(Error::Io(Errno::CANCELED)));
        assert!(cancelled(budget.entry()));
        // It would never end.
        let endless = budget.copy(&mut io::repeat(0), &mut io::sink());
        assert!(cancelled(endless.map(drop)));
    }
}
