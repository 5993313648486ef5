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

const ALL: [Setting; 2] = [GRACE_PERIODS, LARGE_FOLIOS];

/// From this size of an image on. Less is read within 10 ms, and what is in large pieces comes back from swap in large pieces too: a small sandbox
/// that has dozed would read more than it needs.
const WORTH_LARGE_FOLIOS: u64 = 16 << 20;

/// What the note says while the setting is ours.
const OURS: &[u8] = b"torpor";

/// For the time of a restore of an image of so many bytes. What a killed wake has left of a setting that this one has no use for is put back.
pub fn for_restore(state_dir: &Path, bytes: u64) -> Vec<Expedited> {
    restore_below(Path::new("/"), state_dir, bytes)
}

fn restore_below(root: &Path, state_dir: &Path, bytes: u64) -> Vec<Expedited> {
    let begin = |setting: &Setting| Expedited::below(root, state_dir, setting);
    match bytes {
        ..WORTH_LARGE_FOLIOS => {
            put_back_left(root, state_dir, &[LARGE_FOLIOS]);
            vec![begin(&GRACE_PERIODS)]
        }
        _ => ALL.iter().map(begin).collect(),
    }
}

/// Puts back what a killed wake has left, of the machine that is mounted at `root`: where there may be no next one.
pub fn put_all_back(root: &Path, state_dir: &Path) {
    put_back_left(root, state_dir, &ALL);
}

fn put_back_left(root: &Path, state_dir: &Path, settings: &[Setting]) {
    for setting in settings {
        let path = state_dir.join(setting.note);
        let Ok(note) = OpenOptions::new().read(true).write(true).open(path) else {
            continue;
        };
        // Refused while a wake is going on: its end will do it.
        if let Ok(mut note) = Flock::lock(note, FlockArg::LockExclusiveNonblock) {
            let _ = put_back(&mut note, &setting.below(root), setting);
        }
    }
}

/// Held for the time of one wake. Wakes at the same time share the setting: each holds the note's lock, and the last one
/// to give it back puts the setting back. One that is killed leaves it set until the end of the next wake.
#[derive(Debug)]
pub struct Expedited {
    note: Option<Flock<File>>,
    switch: PathBuf,
    setting: Setting,
}

impl Setting {
    fn below(&self, root: &Path) -> PathBuf {
        root.join(self.switch.trim_start_matches('/'))
    }
}

impl Expedited {
    /// Sets it, as far as this machine lets us: a wake does not fail for want of speed.
    pub fn begin(state_dir: &Path, setting: &Setting) -> Self {
        Self::below(Path::new("/"), state_dir, setting)
    }

    fn below(root: &Path, state_dir: &Path, setting: &Setting) -> Self {
        let switch = setting.below(root);
        Self {
            note: begin(&state_dir.join(setting.note), &switch, setting).ok(),
            switch,
            setting: *setting,
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
            let now = chosen(&said);
            if now == setting.off || ours && now == setting.on {
                write(&mut lock, OURS)?;
                std::fs::write(switch, setting.on)?;
            } else if ours {
                // Somebody has decided since.
                write(&mut lock, b"")?;
            }
            relock(lock, FlockArg::LockShared)
        }
        Err((file, _)) => shared(file),
    }
}

/// Nobody else has the note's lock. What an operator has set meanwhile stays.
fn put_back(note: &mut File, switch: &Path, setting: &Setting) -> std::io::Result<()> {
    if read(note)? != OURS {
        return Ok(());
    }
    if chosen(&std::fs::read_to_string(switch)?) == setting.on {
        std::fs::write(switch, setting.off)?;
    }
    write(note, b"")
}

/// Of a setting whose values the kernel names, as in `always [madvise] never`, the one that it has.
pub fn bracketed(said: &str) -> Option<&str> {
    Some(said.split_once('[')?.1.split_once(']')?.0)
}

/// The value of a setting of either kind.
fn chosen(said: &str) -> &str {
    bracketed(said).unwrap_or_else(|| said.trim())
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
        if let Ok(mut note) = relock(note, FlockArg::LockExclusiveNonblock) {
            // There is nobody to tell; the next wake tries again.
            let _ = put_back(&mut note, &self.switch, &self.setting);
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
    fn what_an_operator_decides_while_a_wake_goes_on_or_after_a_killed_one_stays() {
        let machine = Machine::with("never\n");
        let decide = || std::fs::write(machine.0.path().join("switch"), "advise");
        let wake = machine.begin();
        decide().expect("written");
        drop(wake);
        assert_eq!(machine.setting(), "advise");
        std::fs::write(machine.0.path().join("note"), OURS).expect("written");
        drop(machine.begin());
        assert_eq!(machine.setting(), "advise");
    }

    /// The kernel's own files, below a root of the test's own.
    struct Kernel(tempfile::TempDir);

    impl Kernel {
        fn new() -> Self {
            let kernel = Self(tempfile::tempdir().expect("a directory"));
            for setting in ALL {
                let switch = setting.below(kernel.0.path());
                std::fs::create_dir_all(switch.parent().expect("a folder")).expect("made");
                std::fs::write(switch, setting.off).expect("written");
            }
            kernel
        }

        fn restore(&self, bytes: u64) -> Vec<Expedited> {
            restore_below(self.0.path(), self.0.path(), bytes)
        }

        fn values(&self) -> [String; 2] {
            ALL.map(|setting| std::fs::read_to_string(setting.below(self.0.path())).expect("read"))
        }
    }

    #[test]
    fn memory_comes_in_large_pieces_where_there_is_much_to_read() {
        let kernel = Kernel::new();
        let small = kernel.restore((16 << 20) - 1);
        assert_eq!(kernel.values(), ["1", "never"]);
        let large = kernel.restore(16 << 20);
        assert_eq!(kernel.values(), ["1", "always"]);
        drop(large);
        assert_eq!(kernel.values(), ["1", "never"]);
        drop(small);
        assert_eq!(kernel.values(), ["0", "never"]);
    }

    #[test]
    fn a_small_wake_and_an_uninstallation_put_back_what_a_killed_large_one_left() {
        let kernel = Kernel::new();
        let kill = |mut wakes: Vec<Expedited>| {
            for wake in &mut wakes {
                drop(wake.note.take());
            }
        };
        kill(kernel.restore(16 << 20));
        assert_eq!(kernel.values(), ["1", "always"]);
        drop(kernel.restore(0));
        assert_eq!(kernel.values(), ["0", "never"]);
        kill(kernel.restore(16 << 20));
        let goes_on = kernel.restore(16 << 20);
        put_all_back(kernel.0.path(), kernel.0.path());
        assert_eq!(kernel.values(), ["1", "always"], "a wake goes on");
        kill(goes_on);
        put_all_back(kernel.0.path(), kernel.0.path());
        assert_eq!(kernel.values(), ["0", "never"]);
    }

    #[test]
    fn the_kernel_of_this_machine_knows_the_words() {
        // One before 6.11 has no such file.
        if let Ok(said) = std::fs::read_to_string(LARGE_FOLIOS.switch) {
            let words: Vec<_> = said.split_whitespace().map(chosen).collect();
            assert!(words.contains(&LARGE_FOLIOS.on) && words.contains(&LARGE_FOLIOS.off));
        }
    }

    #[test]
    fn a_kernel_without_the_setting_is_left_alone() {
        let machine = Machine::with("never");
        std::fs::remove_file(machine.0.path().join("switch")).expect("removed");
        drop(machine.begin());
        assert!(!machine.0.path().join("switch").exists());
    }
}
