//! Short RCU grace periods for the moment of a wake.
//!
//! Every runsc process registers for membarrier(2) when it starts, which waits for one grace period of the kernel's RCU:
//! 10 to 15 ms each on an otherwise idle machine, and a wake starts six such processes, one after the other. With
//! `/sys/kernel/rcu_expedited` set the same takes 0.05 ms. It is a setting of the whole machine (expedited grace periods
//! interrupt the other processors), so it is set while some wake is going on and put back after the last one. A machine
//! where somebody has set it for good is left alone.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

/// The kernel's switch.
pub const SWITCH: &str = "/sys/kernel/rcu_expedited";

/// What the note says while the setting is ours.
const OURS: &[u8] = b"torpor";

/// Held for the time of one wake. Wakes at the same time share the setting: each holds the note's lock, and the last one
/// to give it back puts the setting back. One that is killed leaves it set until the end of the next wake.
#[derive(Debug)]
pub struct Expedited {
    note: Option<Flock<File>>,
    switch: PathBuf,
}

impl Expedited {
    /// Sets it, as far as this machine lets us: a wake does not fail for want of speed.
    pub fn begin(state_dir: &Path, switch: &Path) -> Self {
        Self {
            note: begin(&state_dir.join("rcu-expedited"), switch).ok(),
            switch: switch.into(),
        }
    }
}

fn begin(note: &Path, switch: &Path) -> std::io::Result<Flock<File>> {
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .mode(0o600)
        .open(note)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        // Nobody else wakes anything now.
        Ok(mut lock) => {
            let ours = read(&mut lock)? == OURS;
            let set = std::fs::read_to_string(switch)?.trim() == "1";
            if ours || !set {
                write(&mut lock, OURS)?;
                std::fs::write(switch, "1")?;
            }
            relock(lock, FlockArg::LockShared)
        }
        Err((file, _)) => shared(file),
    }
}

fn shared(file: File) -> std::io::Result<Flock<File>> {
    Flock::lock(file, FlockArg::LockShared).map_err(|(_, errno)| errno.into())
}

fn relock(lock: Flock<File>, mode: FlockArg) -> std::io::Result<Flock<File>> {
    match lock.relock(mode) {
        Ok(()) => Ok(lock),
        Err(errno) => Err(errno.into()),
    }
}

fn read(file: &mut File) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    Read::by_ref(file).take(64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn write(file: &mut File, bytes: &[u8]) -> std::io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(bytes)
}

impl Drop for Expedited {
    fn drop(&mut self) {
        let Some(note) = self.note.take() else {
            return;
        };
        // Refused while another wake is going on: its end will do it.
        if let Ok(mut note) = relock(note, FlockArg::LockExclusiveNonblock)
            && read(&mut note).is_ok_and(|bytes| bytes == OURS)
        {
            // There is nobody to tell; the next wake tries again.
            let _ = std::fs::write(&self.switch, "0").and_then(|()| write(&mut note, b""));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Machine(tempfile::TempDir);

    impl Machine {
        fn with(setting: &str) -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            std::fs::write(dir.path().join("switch"), setting).expect("written");
            Self(dir)
        }

        fn begin(&self) -> Expedited {
            Expedited::begin(self.0.path(), &self.0.path().join("switch"))
        }

        fn setting(&self) -> String {
            std::fs::read_to_string(self.0.path().join("switch")).expect("read")
        }
    }

    #[test]
    fn it_is_set_while_any_wake_goes_on_and_put_back_after_the_last() {
        let machine = Machine::with("0\n");
        let one = machine.begin();
        let other = machine.begin();
        assert_eq!(machine.setting(), "1");
        drop(one);
        assert_eq!(machine.setting(), "1");
        drop(other);
        assert_eq!(machine.setting(), "0");
    }

    #[test]
    fn a_machine_that_has_it_set_for_good_keeps_it() {
        let machine = Machine::with("1\n");
        drop(machine.begin());
        assert_eq!(machine.setting().trim(), "1");
    }

    #[test]
    fn what_a_killed_wake_left_is_put_back_by_the_next() {
        let machine = Machine::with("0\n");
        let mut killed = machine.begin();
        // As a kill does: the lock goes, the setting stays.
        drop(killed.note.take());
        drop(killed);
        assert_eq!(machine.setting(), "1");
        drop(machine.begin());
        assert_eq!(machine.setting(), "0");
    }
}
