//! Settings of the kernel that make a wake faster, while it runs.
//!
//! They are settings of the whole machine. So they are set while a wake is in progress and put back
//! after the last wake. A setting with another value than the default was chosen by an operator and
//! is not changed. Nothing is changed on a kernel without the setting.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

/// A setting that is off unless an operator turns it on.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// Path of the kernel's file.
    switch: &'static str,
    /// Name of the note, a file in the state directory that records whether Torpor has turned the
    /// setting on.
    note: &'static str,
    off: &'static str,
    on: &'static str,
}

/// Short RCU grace periods. Every runsc process registers for membarrier(2) when it starts, and the
/// registration waits for a grace period: 10 to 15 ms on an otherwise idle machine, 0.05 ms when
/// grace periods are expedited (which interrupts the other processors).
pub const GRACE_PERIODS: Setting = Setting {
    switch: "/sys/kernel/rcu_expedited",
    note: "rcu-expedited",
    off: "0",
    on: "1",
};

/// Shared memory in pieces of 64 KiB (the kernel's folios; Linux 6.11), for the memory of a gVisor
/// sandbox. A restore reads the image into new memory, which otherwise takes one page fault for
/// each 4 KiB. The setting does not affect files of a tmpfs.
const LARGE_FOLIOS: Setting = Setting {
    switch: "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/shmem_enabled",
    note: "large-folios",
    off: "never",
    on: "always",
};

const ALL: [Setting; 2] = [GRACE_PERIODS, LARGE_FOLIOS];

/// Bytes of the smallest image whose restore uses [`LARGE_FOLIOS`]. A smaller image is read within
/// 10 ms. Memory in large pieces also comes back from swap in large pieces, so a small sandbox that
/// has dozed would read more than it needs.
const MIN_LARGE_FOLIOS: u64 = 16 << 20;

/// Content of the note while Torpor has turned the setting on.
const OURS: &[u8] = b"torpor";

/// Sets the settings for the restore of an image of so many bytes, until the result is dropped.
/// Puts back an unused setting that a killed wake has left on.
pub fn for_restore(state_dir: &Path, bytes: u64) -> Vec<SettingGuard> {
    restore_below(Path::new("/"), state_dir, bytes)
}

fn restore_below(root: &Path, state_dir: &Path, bytes: u64) -> Vec<SettingGuard> {
    let begin = |setting: &Setting| SettingGuard::below(root, state_dir, setting);
    match bytes {
        ..MIN_LARGE_FOLIOS => {
            put_back_left(root, state_dir, &[LARGE_FOLIOS]);
            vec![begin(&GRACE_PERIODS)]
        }
        _ => ALL.iter().map(begin).collect(),
    }
}

/// Puts back the settings that a killed wake has left on, for a machine that may have no further
/// wake. `root`: mount point of the machine's root directory.
pub fn put_all_back(root: &Path, state_dir: &Path) {
    put_back_left(root, state_dir, &ALL);
}

fn put_back_left(root: &Path, state_dir: &Path, settings: &[Setting]) {
    for setting in settings {
        let path = state_dir.join(setting.note);
        let Ok(note) = OpenOptions::new().read(true).write(true).open(path) else {
            continue;
        };
        // Refused while a wake is in progress: its end puts the setting back.
        if let Ok(mut note) = Flock::lock(note, FlockArg::LockExclusiveNonblock) {
            let _ = put_back(&mut note, &setting.below(root), setting);
        }
    }
}

/// A setting that is on for the time of one wake. Concurrent wakes share the setting: each holds
/// the note's lock, and the last wake to release the lock puts the setting back. A killed wake
/// leaves the setting on until the end of the next wake.
#[derive(Debug)]
pub struct SettingGuard {
    note: Option<Flock<File>>,
    switch: PathBuf,
    setting: Setting,
}

impl Setting {
    fn below(&self, root: &Path) -> PathBuf {
        root.join(self.switch.trim_start_matches('/'))
    }
}

impl SettingGuard {
    /// Turns the setting on where this machine allows it. An error is ignored: the wake is slower.
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
        // No other wake is in progress.
        Ok(mut lock) => {
            let ours = read(&mut lock)? == OURS;
            let text = std::fs::read_to_string(switch)?;
            let now = chosen(&text);
            if now == setting.off || ours && now == setting.on {
                write(&mut lock, OURS)?;
                std::fs::write(switch, setting.on)?;
            } else if ours {
                // An operator has changed the setting since.
                write(&mut lock, b"")?;
            }
            relock(lock, FlockArg::LockShared)
        }
        Err((file, _)) => shared(file),
    }
}

/// Turns the setting off. The caller holds the note's lock alone. A value that an operator has set
/// meanwhile stays.
fn put_back(note: &mut File, switch: &Path, setting: &Setting) -> std::io::Result<()> {
    if read(note)? != OURS {
        return Ok(());
    }
    if chosen(&std::fs::read_to_string(switch)?) == setting.on {
        std::fs::write(switch, setting.off)?;
    }
    write(note, b"")
}

/// Returns the current value in a list of all values of a setting, as in `always [madvise] never`.
pub fn bracketed(text: &str) -> Option<&str> {
    Some(text.split_once('[')?.1.split_once(']')?.0)
}

/// Returns the current value of a setting with or without such a list.
fn chosen(text: &str) -> &str {
    bracketed(text).unwrap_or_else(|| text.trim())
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

impl Drop for SettingGuard {
    fn drop(&mut self) {
        let Some(note) = self.note.take() else {
            return;
        };
        // Refused while another wake is in progress: its end puts the setting back.
        if let Ok(mut note) = relock(note, FlockArg::LockExclusiveNonblock) {
            // A drop cannot return an error. The next wake tries again.
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

        fn begin(&self) -> SettingGuard {
            SettingGuard::below(self.0.path(), self.0.path(), &SETTING)
        }

        fn setting(&self) -> String {
            std::fs::read_to_string(self.0.path().join("switch")).expect("read")
        }
    }

    #[test]
    fn a_kernel_setting_is_changed_during_wakes_and_put_back_after_the_last() {
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
    fn a_kernel_setting_that_the_operator_chose_is_kept() {
        for decided in ["always\n", "always [inherit] advise never\n"] {
            let machine = Machine::with(decided);
            drop(machine.begin());
            assert_eq!(machine.setting(), decided);
        }
    }

    #[test]
    fn a_kernel_setting_that_a_killed_wake_left_is_put_back_by_the_next_wake() {
        let machine = Machine::with("always inherit within_size advise [never]\n");
        let mut killed = machine.begin();
        // As after a kill: the lock is released, the setting stays.
        drop(killed.note.take());
        drop(killed);
        assert_eq!(machine.setting(), "always");
        drop(machine.begin());
        assert_eq!(machine.setting(), "never");
    }

    #[test]
    fn a_kernel_setting_that_the_operator_changes_during_or_after_a_wake_is_kept() {
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

    /// The kernel's files, below a root directory of the test.
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

        fn restore(&self, bytes: u64) -> Vec<SettingGuard> {
            restore_below(self.0.path(), self.0.path(), bytes)
        }

        fn values(&self) -> [String; 2] {
            ALL.map(|setting| std::fs::read_to_string(setting.below(self.0.path())).expect("read"))
        }
    }

    #[test]
    fn a_large_restore_turns_large_folios_on_and_a_small_restore_does_not() {
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
        let kill = |mut wakes: Vec<SettingGuard>| {
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
    fn the_kernel_of_this_machine_accepts_the_values_of_the_setting() {
        // A kernel before 6.11 has no such file.
        if let Ok(text) = std::fs::read_to_string(LARGE_FOLIOS.switch) {
            let words: Vec<_> = text.split_whitespace().map(chosen).collect();
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
