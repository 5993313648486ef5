//! Processes, cgroups and mounts of this machine.

use std::path::{Path, PathBuf};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use torpor_runsc::process;

const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// A running process; a zombie does not count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    pub pid: i32,
    pub parent: i32,
    /// The command line, its words separated by blanks.
    pub command: String,
}

impl Process {
    fn read(pid: i32) -> Option<Self> {
        let stat = process::stat(pid)?;
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let words: Vec<_> = line
            .split(|byte| *byte == 0)
            .map(String::from_utf8_lossy)
            .collect();
        (stat.state != 'Z').then(|| Self {
            pid,
            parent: stat.ppid,
            command: words.join(" ").trim().to_owned(),
        })
    }

    /// Kills the process with SIGKILL: no handler runs.
    pub fn kill(&self) -> anyhow::Result<()> {
        self.signal(Signal::KILL)
    }

    /// Stops the process with SIGSTOP until [`Self::go_on`], as if it got no processor.
    pub fn stop(&self) -> anyhow::Result<()> {
        self.signal(Signal::STOP)
    }

    pub fn go_on(&self) -> anyhow::Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = Pid::from_raw(self.pid).context("no process has this id")?;
        Ok(kill_process(pid, signal)?)
    }

    /// Reports whether the process is stopped by a signal ([`Self::stop`]).
    pub fn is_stopped(&self) -> bool {
        process::is_stopped(self.pid)
    }

    /// Reports whether the same process still runs.
    pub fn lives(&self) -> bool {
        Self::read(self.pid).is_some_and(|now| now == *self)
    }

    /// Returns the proportional set size in KiB: the process's own memory and its part of shared
    /// memory.
    pub fn pss_kib(&self) -> Option<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.pid)).ok()?;
        let line = text.lines().find(|line| line.starts_with("Pss:"))?;
        line.split_whitespace().nth(1)?.parse().ok()
    }

    /// Returns the files of the Unix sockets that the process serves.
    pub fn sockets(&self) -> Vec<PathBuf> {
        let proc = PathBuf::from(format!("/proc/{}", self.pid));
        let links = std::fs::read_dir(proc.join("fd"));
        let inodes: Vec<String> = links
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|link| {
                let target = std::fs::read_link(link.path()).ok()?;
                let inode = target.to_str()?.strip_prefix("socket:[")?;
                Some(inode.strip_suffix(']')?.to_owned())
            })
            .collect();
        let table = std::fs::read_to_string(proc.join("net/unix")).unwrap_or_default();
        let mut found: Vec<PathBuf> = table
            .lines()
            .filter_map(|line| {
                // Address, references, protocol, flags, type, state, inode, and a name if there is
                // one; a client's socket has none.
                let mut fields = line.split_whitespace();
                let inode = fields.nth(6)?;
                let path = fields.next().filter(|name| name.starts_with('/'))?;
                let own = inodes.iter().any(|own| own == inode);
                own.then(|| PathBuf::from(path))
            })
            .collect();
        // An accepted connection bears the name of the listening socket.
        found.sort();
        found.dedup();
        found
    }

    /// Returns user and system time so far, in clock ticks.
    pub fn cpu_ticks(&self) -> Option<u64> {
        let stat = process::stat(self.pid)?;
        Some(stat.utime + stat.stime)
    }
}

/// Returns all processes of the machine.
pub fn processes() -> Vec<Process> {
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter_map(Process::read).collect()
}

/// Returns the processes whose command line contains one of `words`.
pub fn processes_naming(words: &[String]) -> Vec<Process> {
    let mut found = processes();
    found.retain(|process| {
        words
            .iter()
            .any(|word| process.command.contains(word.as_str()))
    });
    found
}

/// Returns the mounted hierarchies: one on cgroup v2, several on v1.
fn hierarchies() -> Vec<PathBuf> {
    let root = Path::new(CGROUP_ROOT);
    if root.join("cgroup.controllers").exists() {
        return vec![root.into()];
    }
    let Ok(entries) = std::fs::read_dir(root) else {
        return Vec::new();
    };
    let dirs = entries.filter_map(Result::ok).filter(|entry| {
        entry.file_type().is_ok_and(|kind| kind.is_dir())
            && entry.path().join("cgroup.procs").exists()
    });
    dirs.map(|entry| entry.path()).collect()
}

/// Returns the processes in the cgroup, over all hierarchies.
pub fn processes_in(cgroup: &Path) -> Vec<Process> {
    let mut pids: Vec<i32> = hierarchies()
        .iter()
        .filter_map(|root| std::fs::read_to_string(root.join(cgroup).join("cgroup.procs")).ok())
        .flat_map(|text| {
            text.lines()
                .filter_map(|pid| pid.parse().ok())
                .collect::<Vec<_>>()
        })
        .collect();
    pids.sort_unstable();
    pids.dedup();
    pids.into_iter().filter_map(Process::read).collect()
}

/// Returns the lines of a file of the cgroup, of all hierarchies that have it (`cpu.stat` is in
/// more than one).
pub fn cgroup_file(cgroup: &Path, name: &str) -> Vec<String> {
    let paths = hierarchies()
        .into_iter()
        .map(|root| root.join(cgroup).join(name));
    let texts = paths.filter_map(|path| std::fs::read_to_string(path).ok());
    texts
        .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

/// Returns the directories of cgroups whose name contains one of `words`.
///
/// There are thousands of cgroups, so one search serves all words.
pub fn cgroups_naming(words: &[String]) -> Vec<PathBuf> {
    // The kubelet's systemd driver writes a UID with underscores.
    let underscored = words.iter().map(|word| word.replace('-', "_"));
    let words: Vec<String> = words.iter().cloned().chain(underscored).collect();
    let mut found = Vec::new();
    let mut left = hierarchies();
    while let Some(dir) = left.pop() {
        let Ok(entries) = std::fs::read_dir(&dir) else {
            continue;
        };
        for entry in entries.filter_map(Result::ok) {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let name = entry.file_name().to_string_lossy().into_owned();
            if words.iter().any(|word| name.contains(word.as_str())) {
                found.push(entry.path());
            }
            left.push(entry.path());
        }
    }
    found
}

/// Returns the mount points of this mount namespace whose line in mountinfo contains one of
/// `words`.
pub fn mounts_naming(words: &[String]) -> Vec<String> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let lines = text
        .lines()
        .filter(|line| words.iter().any(|word| line.contains(word.as_str())));
    lines
        .filter_map(|line| line.split(' ').nth(4))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_process_serves_the_sockets_that_it_listens_on_and_no_others() {
        let own = i32::try_from(std::process::id()).unwrap();
        let own = Process::read(own).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        assert!(!own.sockets().contains(&path));
        let listener = UnixListener::bind(&path).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        let _server = listener.accept().unwrap();
        let sockets = own.sockets();
        assert_eq!(sockets.iter().filter(|found| **found == path).count(), 1);
    }
}
