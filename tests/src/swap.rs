//! Swap for tests on a machine that has none.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use anyhow::Context;

/// Tests that run side by side share it.
static SWAP: Mutex<Weak<Swap>> = Mutex::new(Weak::new());

/// Swap that this machine has for as long as this lives; what it had before stays.
#[derive(Debug)]
pub struct Swap(Option<PathBuf>);

impl Swap {
    /// Makes a swap file of 256 MiB, unless there is swap.
    pub fn on() -> anyhow::Result<Arc<Self>> {
        let mut shared = SWAP.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(swap) = shared.upgrade() {
            return Ok(swap);
        }
        let swap = Arc::new(Self::make()?);
        *shared = Arc::downgrade(&swap);
        Ok(swap)
    }

    fn make() -> anyhow::Result<Self> {
        if std::fs::read_to_string("/proc/swaps")?.lines().count() > 1 {
            return Ok(Self(None));
        }
        let path = PathBuf::from("/var/tmp/torpor-e2e.swap");
        let file = std::fs::File::create(&path).context("no swap file")?;
        // A file with holes is refused.
        nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::empty(), 0, 256 << 20)?;
        let swap = Self(Some(path.clone()));
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        for program in ["mkswap", "swapon"] {
            let done = Command::new(program).arg(&path).output();
            let done = done.with_context(|| format!("cannot run {program}"))?;
            let words = String::from_utf8_lossy(&done.stderr);
            anyhow::ensure!(done.status.success(), "{program}: {words}");
        }
        Ok(swap)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // What is in it goes back to memory first; a file that is still in use is told of by the next test that wants to make it.
            let _ = Command::new("swapoff").arg(path).status();
            let _ = std::fs::remove_file(path);
        }
    }
}
