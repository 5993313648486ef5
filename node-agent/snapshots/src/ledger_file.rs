//! Ledgers on disk: one file per Pod. A lock protects appends. [`torpor_core::ledger`] defines the
//! format.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, OFlags};
use rustix::io::Errno;
use torpor_core::ledger::{self, Tail};
use torpor_core::{Entry, LedgerState, PodUid};

use crate::dirs::{OpenError, PathError, Removed, Unsafe, open_checked, read_limited};
use crate::failpoint;

/// Bytes allocated for a new ledger. On a full disk they hold the records without which a sandbox
/// could not run on.
const RESERVED: u64 = 64 * 1024;
/// Length in bytes above which a ledger is rewritten as one record. On a full disk the rewrite
/// fails; the other half of the allocated bytes is left for the records that follow.
const FOLD_AT: u64 = RESERVED / 2;
/// Most bytes of a ledger that is read. A rewritten ledger is far shorter.
const MAX_FILE: usize = 16 << 20;

/// Error of reading or writing a ledger.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the ledger {} cannot be trusted, so the memory of its Pod is neither saved nor woken nor removed; delete the Pod to start cold", path.display())]
    Corrupt {
        path: PathBuf,
        source: ledger::Error,
    },
    #[error("the ledger {} has {found} bytes, more than a valid ledger can have", path.display())]
    TooLarge { path: PathBuf, found: u64 },
    #[error("the ledger {} has changed: the step was planned for record {expected}, the ledger is at record {found}", path.display())]
    Fenced {
        path: PathBuf,
        expected: u64,
        found: u64,
    },
    #[error("no room on the disk for the ledger {}", path.display())]
    DiskFull { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Unsafe(#[from] Unsafe),
    #[error("cannot {doing} {}", path.display())]
    Io {
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl Error {
    /// Returns the reason for conditions: LedgerCorrupt, LedgerFenced, DiskFull or
    /// LedgerUnavailable.
    pub fn reason(&self) -> &'static str {
        match self {
            Error::Corrupt { .. } | Error::TooLarge { .. } | Error::Unsafe(_) => "LedgerCorrupt",
            Error::Fenced { .. } => "LedgerFenced",
            Error::DiskFull { .. } => "DiskFull",
            Error::Io { .. } => "LedgerUnavailable",
        }
    }
}

impl From<PathError> for Error {
    fn from(error: PathError) -> Self {
        let PathError {
            doing,
            path,
            source,
        } = error;
        match source.kind() {
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => Error::DiskFull { path, source },
            _ => Error::Io {
                doing,
                path,
                source,
            },
        }
    }
}

impl From<OpenError> for Error {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Path(error) => error.into(),
            OpenError::Unsafe(error) => error.into(),
        }
    }
}

/// The ledger of one Pod. Several processes may use the same ledger: each call takes the file's
/// lock.
#[derive(Debug)]
pub struct LedgerFile {
    dir: OwnedFd,
    name: String,
    path: PathBuf,
}

/// Content of the file, read under its lock.
struct Content {
    state: LedgerState,
    /// Bytes up to the end of the last whole record; 0: the file has no whole header.
    whole: u64,
}

impl LedgerFile {
    pub(crate) fn new(dir: BorrowedFd<'_>, dir_path: &Path, pod: &PodUid) -> Result<Self, Error> {
        let path = dir_path.join(pod.as_str());
        let dir = dir
            .try_clone_to_owned()
            .map_err(|e| PathError::new("open", &path, e))?;
        Ok(Self {
            dir,
            name: pod.to_string(),
            path,
        })
    }

    /// Reads the ledger; a missing ledger is an empty one. A torn last record is ignored and stays
    /// in the file.
    pub fn read(&self) -> Result<LedgerState, Error> {
        match self.locked(OFlags::RDONLY, FlockOperation::LockShared)? {
            Some(file) => Ok(self.content(&file)?.state),
            None => Ok(LedgerState::default()),
        }
    }

    /// Appends one entry, durably, and returns the ledger's new state. Makes a missing file.
    pub fn append(&self, entry: &Entry) -> Result<LedgerState, Error> {
        self.append_checked(entry, None)
    }

    /// Appends one entry like [`LedgerFile::append`], but only if the ledger has exactly `seq`
    /// entries.
    pub fn append_at(&self, seq: u64, entry: &Entry) -> Result<LedgerState, Error> {
        self.append_checked(entry, Some(seq))
    }

    /// Removes the ledger. A missing ledger is no error.
    pub fn remove(&self) -> Result<Removed, Error> {
        // The lock orders a concurrent append: before the removal, or after it in a new file.
        let Some(_file) = self.locked(OFlags::RDWR, FlockOperation::LockExclusive)? else {
            return Ok(Removed::Already);
        };
        let failed = |e: Errno| PathError::new("remove", &self.path, e);
        rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty()).map_err(failed)?;
        match rustix::fs::unlinkat(&self.dir, self.fold_name(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(failed(errno).into()),
        }
        self.sync_dir()?;
        Ok(Removed::Done)
    }

    /// Removes the ledger if it has no whole record, which a crash at its creation causes. Reports
    /// whether the ledger exists afterwards.
    pub(crate) fn sweep(&self) -> Result<bool, Error> {
        let lock = FlockOperation::LockExclusive;
        let Some(file) = self.locked(OFlags::RDWR, lock)? else {
            return Ok(false);
        };
        match self.content(&file) {
            Ok(content) if content.state.seq == 0 => {}
            Ok(_) | Err(Error::Corrupt { .. } | Error::TooLarge { .. }) => return Ok(true),
            Err(error) => return Err(error),
        }
        rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty())
            .map_err(|e| PathError::new("remove", &self.path, e))?;
        Ok(false)
    }

    fn append_checked(&self, entry: &Entry, seq: Option<u64>) -> Result<LedgerState, Error> {
        let flags = OFlags::RDWR | OFlags::CREATE;
        let file = self.locked(flags, FlockOperation::LockExclusive)?;
        let file = file.expect("a file opened with CREATE is there");
        let Content {
            mut state,
            mut whole,
        } = self.content(&file)?;
        if let Some(expected) = seq.filter(|expected| *expected != state.seq) {
            return Err(Error::Fenced {
                path: self.path.clone(),
                expected,
                found: state.seq,
            });
        }
        self.truncate(&file, whole)?;
        if whole == 0 {
            whole = self.write_header(&file)?;
        }
        let record = ledger::encode(entry).map_err(|source| Error::Corrupt {
            path: self.path.clone(),
            source,
        })?;
        if let Err(error) = self.write_durably(&file, &record, whole) {
            // Best effort: the next append removes a torn record.
            let _ = self.truncate(&file, whole);
            return Err(error);
        }
        state.apply(entry);
        if whole + record.len() as u64 > FOLD_AT {
            // Best effort: the entry is durable already, and the next entry tries the rewrite
            // again.
            let _ = self.fold(&state);
        }
        Ok(state)
    }

    /// Opens the file and takes its lock. Returns none if the file does not exist and `flags` do
    /// not make it.
    fn locked(&self, flags: OFlags, lock: FlockOperation) -> Result<Option<OwnedFd>, Error> {
        loop {
            let opened = open_checked(self.dir.as_fd(), &self.name, &self.path, flags);
            let file = match opened {
                Err(error) if error.is_not_found() => return Ok(None),
                other => other?,
            };
            match rustix::fs::flock(&file, lock) {
                Ok(()) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(PathError::new("lock", &self.path, errno).into()),
            }
            // During the wait for the lock another process may have replaced or removed the ledger.
            // The open file has no name then.
            if self.is_current(&file)? {
                return Ok(Some(file));
            }
        }
    }

    fn is_current(&self, file: &OwnedFd) -> Result<bool, Error> {
        let failed = |e: Errno| PathError::new("examine", &self.path, e);
        let ours = rustix::fs::fstat(file).map_err(failed)?;
        match rustix::fs::statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(named) => Ok((named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(failed(errno).into()),
        }
    }

    fn content(&self, file: &OwnedFd) -> Result<Content, Error> {
        let bytes =
            read_limited(file.as_fd(), MAX_FILE, &self.path)?.map_err(|found| Error::TooLarge {
                path: self.path.clone(),
                found,
            })?;
        let (entries, tail) = ledger::decode(&bytes).map_err(|source| Error::Corrupt {
            path: self.path.clone(),
            source,
        })?;
        let whole = match tail {
            Tail::Clean => bytes.len() as u64,
            Tail::Torn { offset, len: _ } => offset,
        };
        Ok(Content {
            state: LedgerState::fold(&entries),
            whole,
        })
    }

    fn truncate(&self, file: &OwnedFd, len: u64) -> Result<(), Error> {
        let failed = |e: Errno| PathError::new("cut", &self.path, e);
        let stat = rustix::fs::fstat(file).map_err(failed)?;
        if u64::try_from(stat.st_size) == Ok(len) {
            return Ok(());
        }
        rustix::fs::ftruncate(file, len).map_err(failed)?;
        Ok(())
    }

    fn write_header(&self, file: &OwnedFd) -> Result<u64, Error> {
        // Best effort: not every file system supports it. Without it the actions that need the
        // ledger wait while the disk is full.
        let _ = rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, 0, RESERVED);
        let header = ledger::encode_header();
        self.write_at(file, &header, 0)?;
        let failed = |e: Errno| PathError::new("make durable", &self.path, e);
        rustix::fs::fsync(file).map_err(failed)?;
        self.sync_dir()?;
        failpoint::hit("ledger:created");
        Ok(header.len() as u64)
    }

    fn write_durably(&self, file: &OwnedFd, record: &[u8], at: u64) -> Result<(), Error> {
        self.write_at(file, record, at)?;
        failpoint::hit("ledger:appended");
        rustix::fs::fdatasync(file).map_err(|e| PathError::new("make durable", &self.path, e))?;
        failpoint::hit("ledger:synced");
        Ok(())
    }

    /// Writes with one call. A short write means that the disk is full.
    fn write_at(&self, file: &OwnedFd, bytes: &[u8], at: u64) -> Result<(), Error> {
        loop {
            let short = || io::Error::from(io::ErrorKind::StorageFull);
            return match rustix::io::pwrite(file, bytes, at) {
                Ok(written) if written == bytes.len() => Ok(()),
                Ok(_) => Err(PathError::new("write", &self.path, short()).into()),
                Err(Errno::INTR) => continue,
                Err(errno) => Err(PathError::new("write", &self.path, errno).into()),
            };
        }
    }

    /// Rewrites the ledger as one record in a new file and renames the new file over the ledger.
    fn fold(&self, state: &LedgerState) -> Result<(), Error> {
        let entry = Entry::Folded {
            state: state.clone(),
        };
        let record = ledger::encode(&entry).map_err(|source| Error::Corrupt {
            path: self.path.clone(),
            source,
        })?;
        let name = self.fold_name();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC;
        let file = open_checked(self.dir.as_fd(), &name, &self.path, flags)?;
        let header = ledger::encode_header();
        let _ = rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, RESERVED);
        self.write_at(&file, &header, 0)?;
        self.write_at(&file, &record, header.len() as u64)?;
        rustix::fs::fsync(&file).map_err(|e| PathError::new("make durable", &self.path, e))?;
        failpoint::hit("ledger:folded");
        rustix::fs::renameat(&self.dir, &name, &self.dir, &self.name)
            .map_err(|e| PathError::new("replace", &self.path, e))?;
        self.sync_dir()
    }

    fn fold_name(&self) -> String {
        format!(".fold-{}", self.name)
    }

    fn sync_dir(&self) -> Result<(), Error> {
        let failed = |e: Errno| PathError::new("make durable", &self.path, e);
        Ok(rustix::fs::fsync(&self.dir).map_err(failed)?)
    }
}
