//! Settings of the kernel that make a wake faster, for its moment.
//!
//! They are settings of the whole machine, so they are set while some wake is going on and put back after the last one. A machine where
//! somebody has decided otherwise is left alone, and so is a kernel that does not know the setting.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

/// A setting that is off unless an operator wants it.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    switch: &'static str,
    /// Name of the note that says whose it is.
    note: &'static str,
    off: &'static str,
    on: &'static str,
}

/// Short RCU grace periods. Every runsc process registers for membarrier(2) when it starts, which waits for one: 10 to 15 ms each on an
/// otherwise idle machine, 0.05 ms when they are expedited (which interrupts the other processors).
pub const GRACE_PERIODS: Setting = Setting {
    switch: "/sys/kernel/rcu_expedited",
    note: "rcu-expedited",
    off: "0",
    on: "1",
};

/// Shared memory in pieces of 64 KiB (the kernel's folios; Linux 6.11), which hold the memory of a gVisor sandbox: it is read from the image into
/// new memory, which otherwise is one page fault for each 4 KiB. A file that is in a tmpfs has nothing to do with it.
const LARGE_FOLIOS: Setting = Setting {
    switch: "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/shmem_enabled",
    note: "large-folios",
    off: "never",
    on: "always",
};

/// From this size of an image on. Less is read within 10 ms, and what is in large pieces comes back from swap in large pieces too: a small sandbox
/// that has dozed would read more than it needs.
const WORTH_LARGE_FOLIOS: u64 = 16 << 20;

/// Those for a restore of an image of so many bytes.
pub fn of_restore(bytes: u64) -> &'static [Setting] {
    match bytes {
        ..WORTH_LARGE_FOLIOS => &[GRACE_PERIODS],
        _ => &[GRACE_PERIODS, LARGE_FOLIOS],
    }
}

/// What the note says while the setting is ours.
const OURS: &[u8] = b"torpor";

/// Held for the time of one wake. Wakes at the same time share the setting: each holds the note's lock, and the last one
/// to give it back puts the setting back. One that is killed leaves it set until the end of the next wake.
#[derive(Debug)]
pub struct Expedited {
    note: Option<Flock<File>>,
    switch: PathBuf,
    off: &'static str,
}

impl Expedited {
    /// Sets it, as far as this machine lets us: a wake does not fail for want of speed.
    pub fn begin(state_dir: &Path, setting: &Setting) -> Self {
        Self::below(Path::new("/"), state_dir, setting)
    }

    fn below(root: &Path, state_dir: &Path, setting: &Setting) -> Self {
        let switch = root.join(setting.switch.trim_start_matches('/'));
        Self {
            note: begin(&state_dir.join(setting.note), &switch, setting).ok(),
            switch,
            off: setting.off,
        }
    }
}

fn begin(note: &Path, switch: &Path, setting: &Setting) -> std::io::Result<Flock<File>> {
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
            let said = std::fs::read_to_string(switch)?;
            if ours || chosen(&said) == setting.off {
                write(&mut lock, OURS)?;
                std::fs::write(switch, setting.on)?;
            }
            relock(lock, FlockArg::LockShared)
        }
        Err((file, _)) => shared(file),
    }
}

/// The value of a setting: of several that the kernel names, the one in brackets.
fn chosen(said: &str) -> &str {
    let in_brackets = || Some(said.split_once('[')?.1.split_once(']')?.0);
    in_brackets().unwrap_or_else(|| said.trim())
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
            let _ = std::fs::write(&self.switch, self.off).and_then(|()| write(&mut note, b""));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTING: Setting = Setting {
        switch: "/switch",
        note: "note",
        off: "never",
        on: "always",
    };

    struct Machine(tempfile::TempDir);

    impl Machine {
        fn with(setting: &str) -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            std::fs::write(dir.path().join("switch"), setting).expect("written");
            Self(dir)
        }

        fn begin(&self) -> Expedited {
            Expedited::below(self.0.path(), self.0.path(), &SETTING)
        }

        fn setting(&self) -> String {
            std::fs::read_to_string(self.0.path().join("switch")).expect("read")
        }
    }

    #[test]
    fn it_is_set_while_any_wake_goes_on_and_put_back_after_the_last() {
        let machine = Machine::with("never\n");
        let one = machine.begin();
        let other = machine.begin();
        assert_eq!(machine.setting(), "always");
        drop(one);
        assert_eq!(machine.setting(), "always");
        drop(other);
        assert_eq!(machine.setting(), "never");
    }

    #[test]
    fn a_machine_whose_operator_has_decided_keeps_it() {
        for decided in ["always\n", "always [inherit] advise never\n"] {
            let machine = Machine::with(decided);
            drop(machine.begin());
            assert_eq!(machine.setting(), decided);
        }
    }

    #[test]
    fn what_a_killed_wake_left_is_put_back_by_the_next() {
        let machine = Machine::with("always inherit within_size advise [never]\n");
        let mut killed = machine.begin();
        // As a kill does: the lock goes, the setting stays.
        drop(killed.note.take());
        drop(killed);
        assert_eq!(machine.setting(), "always");
        drop(machine.begin());
        assert_eq!(machine.setting(), "never");
    }

    #[test]
    fn memory_comes_in_large_pieces_where_there_is_much_to_read() {
        let notes = |bytes| of_restore(bytes).iter().map(|setting| setting.note);
        assert_eq!(notes((16 << 20) - 1).collect::<Vec<_>>(), ["rcu-expedited"]);
        assert_eq!(
            notes(16 << 20).collect::<Vec<_>>(),
            ["rcu-expedited", "large-folios"]
        );
    }

    #[test]
    fn a_kernel_without_the_setting_is_left_alone() {
        let machine = Machine::with("never");
        std::fs::remove_file(machine.0.path().join("switch")).expect("removed");
        drop(machine.begin());
        assert!(!machine.0.path().join("switch").exists());
    }
}
