//! Swap for tests on a machine that has none.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use nix::fcntl::{FallocateFlags, fallocate};

const FILE: &str = "/var/tmp/torpor-e2e.swap";
const SIZE: i64 = 256 << 20;

/// Users of the swap file, which tests that run side by side share.
///
/// The lock is held while the file is made or removed: a test that wants swap meanwhile waits, and
/// does not take the file for the machine's own swap.
static USERS: Mutex<Users> = Mutex::new(Users {
    count: 0,
    made: false,
});

struct Users {
    count: usize,
    made: bool,
}

fn users() -> MutexGuard<'static, Users> {
    USERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Swap of this machine until drop; swap that the machine had before stays.
#[derive(Debug)]
pub struct Swap(());

impl Swap {
    /// Makes a swap file of 256 MiB, unless there is swap.
    pub fn on() -> anyhow::Result<Self> {
        let mut users = users();
        if users.count == 0 {
            users.made = fs::read_to_string("/proc/swaps")?.lines().count() <= 1;
            if users.made {
                make().inspect_err(|_| take_away())?;
            }
        }
        users.count += 1;
        Ok(Self(()))
    }
}

fn make() -> anyhow::Result<()> {
    let path = Path::new(FILE);
    let file = File::create(path).context("no swap file")?;
    // A file with holes is refused.
    fallocate(&file, FallocateFlags::empty(), 0, SIZE)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    for program in ["mkswap", "swapon"] {
        let done = Command::new(program).arg(path).output();
        let done = done.with_context(|| format!("cannot run {program}"))?;
        let words = String::from_utf8_lossy(&done.stderr);
        anyhow::ensure!(done.status.success(), "{program}: {words}");
    }
    Ok(())
}

/// Removes the swap file, whose content goes back to memory first.
///
/// If the file is still in use, the next test that wants to make it fails.
fn take_away() {
    let _ = Command::new("swapoff").arg(FILE).status();
    let _ = fs::remove_file(FILE);
}

impl Drop for Swap {
    fn drop(&mut self) {
        let mut users = users();
        users.count -= 1;
        if users.count == 0 && users.made {
            take_away();
        }
    }
}
