//! Processes of the host, as the kernel describes them in `/proc`.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use procfs_core::FromRead;
pub use procfs_core::process::Stat;
use procfs_core::process::Status;

fn path_of(pid: i32, file: &str) -> PathBuf {
    Path::new("/proc").join(pid.to_string()).join(file)
}

/// Bytes that are read of `/proc/<pid>/stat`. Its line is shorter: 50 numbers and a name of 64
/// bytes.
const MAX_STAT: u64 = 8 << 10;
/// Bytes that are read of `/proc/<pid>/status`. The file is shorter: its longest line lists up to
/// 65,536 groups.
const MAX_STATUS: u64 = 1 << 20;

/// Reads a file of `/proc/<pid>`. The kernel does not report the length of such a file. The buffer
/// has room for most of them, so that one call reads the file.
fn text_of(pid: i32, file: &str) -> Option<String> {
    let mut text = String::with_capacity(4096);
    let read = File::open(path_of(pid, file)).and_then(|mut file| file.read_to_string(&mut text));
    read.ok().map(|_| text)
}

/// Reads `/proc/<pid>/stat` (proc_pid_stat(5)). None: there is no such process.
pub fn stat(pid: i32) -> Option<Stat> {
    stat_in(File::open(path_of(pid, "stat")).ok()?)
}

/// Parses a line of `/proc/<pid>/stat`.
pub fn stat_in(line: impl Read) -> Option<Stat> {
    Stat::from_read(line.take(MAX_STAT)).ok()
}

/// Returns the process id of the parent. A process gets another parent when its parent ends.
pub fn parent(pid: i32) -> Option<i32> {
    Some(stat(pid)?.ppid)
}

/// Returns the arguments of the process in one string. Empty for a process that is gone.
pub fn command_line(pid: i32) -> String {
    let bytes = std::fs::read(path_of(pid, "cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ")
}

/// Reports whether the process has ended and its parent has not waited for it yet.
pub fn is_zombie(pid: i32) -> bool {
    stat(pid).is_some_and(|stat| stat.state == 'Z')
}

/// Reports whether the process exists and has not ended.
pub fn lives(pid: i32) -> bool {
    stat(pid).is_some_and(|stat| !has_ended(&stat))
}

/// Reports whether the process is dead, waited for or not.
pub fn has_ended(stat: &Stat) -> bool {
    matches!(stat.state, 'Z' | 'X')
}

/// Reports whether the process lives and is not ending. A killed process that gets no processor may
/// take long to end: until then it exists without working.
pub fn goes_on(pid: i32) -> bool {
    stat(pid).is_some_and(|stat| !is_ending(&stat)) && !is_killed(pid)
}

/// Reports whether the process has certainly ended, or is ending. False where `/proc` cannot be
/// read for another reason, such as too many open files.
pub fn is_gone(pid: i32) -> bool {
    is_gone_by(File::open(path_of(pid, "stat")))
}

fn is_gone_by(opened: std::io::Result<impl Read>) -> bool {
    let mut line = Vec::new();
    let read = opened.and_then(|file| file.take(MAX_STAT).read_to_end(&mut line));
    match read {
        Ok(_) => stat_in(&line[..]).is_some_and(|stat| is_ending(&stat)),
        // ESRCH: the process ended between the two calls.
        Err(error) => {
            let errno = rustix::io::Errno::from_io_error(&error);
            error.kind() == std::io::ErrorKind::NotFound || errno == Some(rustix::io::Errno::SRCH)
        }
    }
}

/// Reports whether a SIGKILL is pending for the whole process (`ShdPnd` of proc_pid_status(5)). The
/// kernel keeps it pending there to the end. A thread that takes the signal is for an instant
/// neither ending nor has it pending.
fn is_killed(pid: i32) -> bool {
    let status = File::open(path_of(pid, "status")).ok();
    status.is_some_and(has_kill_pending)
}

fn has_kill_pending(status: impl Read) -> bool {
    let status = Status::from_read(status.take(MAX_STATUS));
    status.is_ok_and(|status| status.shdpnd & KILLED != 0)
}

/// SIGKILL in a set of signals.
const KILLED: u64 = 1 << (9 - 1);

/// Reports whether the process is stopped (SIGSTOP).
pub fn is_stopped(pid: i32) -> bool {
    stat(pid).is_some_and(|stat| stat.state == 'T')
}

/// Returns the text of `/proc/<pid>/cgroup`. None for a process that is gone.
pub(crate) fn cgroups(pid: i32) -> Option<String> {
    text_of(pid, "cgroup")
}

/// Reports whether the process is ending, or has ended.
fn is_ending(stat: &Stat) -> bool {
    /// `PF_EXITING` (include/linux/sched.h).
    const EXITING: u32 = 0x4;
    // The kernel sets SIGKILL pending for each thread before the process ends.
    has_ended(stat) || stat.flags & EXITING != 0 || stat.signal & KILLED != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_process_counts_as_ending_in_any_state() {
        // The third line is of a process in a frozen cgroup after `kill -9`. The process ends only
        // when the cgroup is thawed (Linux 6.18).
        let stat = |state: &str, flags: u64, pending: u64| {
            format!(
                "7 (a) R 1) {state} 1 7 7 0 -1 {flags} 92 0 0 0 0 0 0 0 20 0 1 0 5 6 7 8 1 1 0 0 0 {pending} 0 4096 0 0 0 0 17 1 0 0 0 0 0"
            )
        };
        for (state, flags, pending, ends) in [
            ("S", 4_194_560, 0, false),
            ("D", 4_259_840, 0, false),
            ("D", 4_259_840, 256, true),
            ("S", 4_194_560, 128, false),
            ("R", 4_194_560 | 4, 0, true),
            ("Z", 4_194_560, 0, true),
        ] {
            let line = stat(state, flags, pending);
            let stat = stat_in(line.as_bytes()).expect("understood");
            assert_eq!((stat.comm.as_str(), stat.ppid), ("a) R 1", 1));
            assert_eq!(is_ending(&stat), ends, "{line}");
        }
    }

    #[test]
    fn a_process_that_cannot_be_looked_at_is_not_taken_for_gone() {
        let gone =
            |errno: i32| is_gone_by(Err::<&[u8], _>(std::io::Error::from_raw_os_error(errno)));
        assert!(
            gone(rustix::io::Errno::NOENT.raw_os_error())
                && gone(rustix::io::Errno::SRCH.raw_os_error())
        );
        for other in [
            rustix::io::Errno::MFILE,
            rustix::io::Errno::NOMEM,
            rustix::io::Errno::ACCESS,
        ] {
            assert!(!gone(other.raw_os_error()), "{other}");
        }
        assert!(!is_gone_by(Ok(&b"no line of the kernel's"[..])));
        let own = i32::try_from(std::process::id()).expect("a pid");
        assert!(!is_gone(own));
        assert!(is_gone(i32::MAX));
    }

    #[test]
    fn a_kill_that_is_pending_for_the_whole_process_is_seen() {
        let own = std::fs::read_to_string("/proc/self/status").expect("own status");
        let killed = |pending: &str| {
            let lines = own.lines().map(|line| match line {
                line if line.starts_with("ShdPnd:") => format!("ShdPnd:\t{pending}\n"),
                line if line.starts_with("SigPnd:") => "SigPnd:\t0000000000000100\n".to_owned(),
                line => format!("{line}\n"),
            });
            has_kill_pending(lines.collect::<String>().as_bytes())
        };
        assert!(killed("0000000000000100"));
        assert!(killed("0000000000004102"));
        assert!(!killed("0000000000004002"));
        assert!(!has_kill_pending(&b""[..]));
    }

    #[test]
    fn a_process_goes_on_until_it_was_killed() {
        for _ in 0..200 {
            goes_on_until_killed();
        }
    }

    fn goes_on_until_killed() {
        let mut child = std::process::Command::new("sleep")
            .arg("infinity")
            .spawn()
            .expect("started");
        let pid = i32::try_from(child.id()).expect("a pid");
        assert!(goes_on(pid) && lives(pid));
        child.kill().expect("killed");
        // At once, before the process has ended.
        assert!(!goes_on(pid));
        child.wait().expect("waited for");
        assert!(!goes_on(pid) && !lives(pid));
    }
}
