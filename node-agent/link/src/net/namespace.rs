//! Threads inside a network namespace.

use std::os::fd::AsFd;
use std::path::Path;

use nix::sched::{CloneFlags, setns};

use super::error::Error;

/// Runs `work` on a thread of its own inside the namespace at `path`.
pub fn inside<T: Send>(path: &Path, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    within(path, || Ok(work()))
}

/// Runs `work`, which may fail, on a thread of its own inside the namespace at `path`.
///
/// A namespace belongs to a thread, and this thread ends with `work`.
pub fn within<T: Send, E: From<Error> + Send>(
    path: &Path,
    work: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E> {
    let file = std::fs::File::open(path).map_err(|source| Error::Namespace {
        path: path.into(),
        source,
    })?;
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                setns(file.as_fd(), CloneFlags::CLONE_NEWNET).map_err(|source| Error::Enter {
                    path: path.into(),
                    source,
                })?;
                work()
            })
            .join()
            .map_err(|_| Error::Panicked)?
    })
}
