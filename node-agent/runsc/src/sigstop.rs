//! Stopping the host's processes of a sandbox that dozes.
//!
//! A dozing sandbox' tasks are paused, but the processes around them run on: the sentry and the
//! gofers are Go programs. Go's runtime collects garbage every two minutes (`forcegcperiod` in Go's
//! runtime/proc.go; an hour in Torpor's build of gVisor), and reads the heap back from swap for it.
//! So the 4 to 5 MB of a small sandbox became 19 to 20. A stopped process (SIGSTOP) does nothing,
//! and still ends when it is killed.
//!
//! A stopped process does not answer. So a caller that connects to the control socket continues the
//! processes first ([`crate::control::Control::connect`]), and a caller that only checks for the
//! sandbox uses [`is_stopped_by_signal`]. The network stack is stopped too: the pod's keeper
//! answers for the pod's address ([`torpor_messages::keeper::Request::Halt`]).
//!
//! No record is written: the kernel has the state of each process. When a caller dies halfway, the
//! next caller that connects completes the work. The processes come from runsc's own records. A
//! gofer counts only while it is in the sentry's cgroup: the number of an ended gofer may have
//! passed to another process.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::process;

use crate::state;

/// Limit for the sentry to stop. It stops at once, unless it gets no processor.
const HALT_LIMIT: Duration = Duration::from_secs(1);

/// Why a sandbox' processes could not be stopped or continued.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Record(#[from] state::Error),
    #[error("cannot signal process {pid} of the sandbox")]
    Signal {
        pid: i32,
        #[source]
        source: std::io::Error,
    },
    #[error("process {pid} of the sandbox does not stop")]
    DoesNotStop { pid: i32 },
}

/// Stops the processes of a sandbox of the runsc with this root directory. The sandbox must be
/// paused, its sentry must have just answered the caller, and the caller must hold the pod's lock.
/// Without the lock another caller could wait in vain for the sentry's answer.
pub fn stop_all(root: &Path, sandbox: &str) -> Result<(), Error> {
    let sentry = state::sentry(root, sandbox)?;
    let stopped = stop(root, sandbox, sentry);
    if stopped.is_err() {
        // Otherwise some processes would stay stopped beside running ones, or would stop while a
        // caller waits for their answer.
        continue_all(root, sandbox, sentry)?;
    }
    stopped
}

/// Stops the sentry first, then the gofers. A caller that connects checks only the sentry, so no
/// caller would notice a stopped gofer beside a running sentry.
fn stop(root: &Path, sandbox: &str, sentry: i32) -> Result<(), Error> {
    let gofers = state::gofers(root, sandbox)?;
    let sentry_cgroups = process::cgroups(sentry);
    for pid in [sentry].into_iter().chain(gofers) {
        signal(pid, sentry_cgroups.as_deref(), Signal::STOP)?;
    }
    let deadline = Instant::now() + HALT_LIMIT;
    while !process::is_stopped(sentry) {
        if Instant::now() >= deadline {
            return Err(Error::DoesNotStop { pid: sentry });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Reports whether the sandbox' processes exist and are stopped. Does not change them.
pub fn is_stopped_by_signal(root: &Path, sandbox: &str) -> bool {
    // A sandbox without a record, or that ends at this moment, is found by the next caller that
    // connects.
    state::sentry(root, sandbox).is_ok_and(process::is_stopped)
}

/// The gofers of a sandbox whose processes were continued.
#[derive(Debug)]
pub(crate) struct Gofers {
    pids: Vec<i32>,
    /// True: one of the gofers had ended. Its number is free, or another process has it.
    ended: bool,
}

impl Gofers {
    /// Reports whether each gofer lives.
    pub(crate) fn all_go_on(&self) -> bool {
        !self.ended && self.pids.iter().copied().all(process::goes_on)
    }
}

/// Continues the processes of a sandbox whose sentry, the process `sentry`, lives. Returns the
/// sandbox' gofers, which it has read for that. None where the sandbox was not stopped.
pub(crate) fn continue_stopped(
    root: &Path,
    sandbox: &str,
    sentry: i32,
) -> Result<Option<Gofers>, Error> {
    match process::is_stopped(sentry) {
        true => continue_all(root, sandbox, sentry).map(Some),
        false => Ok(None),
    }
}

/// Continues the processes of a sandbox by runsc's records, for a caller that gets no connection:
/// after too many attempts the kernel accepts no further connection for a stopped sentry.
pub(crate) fn continue_by_record(root: &Path, sandbox: &str) -> Result<(), Error> {
    continue_stopped(root, sandbox, state::sentry(root, sandbox)?).map(drop)
}

/// Continues the gofers first, then the sentry: a running sentry has all its gofers running. An
/// error of one process does not keep the others stopped.
fn continue_all(root: &Path, sandbox: &str, sentry: i32) -> Result<Gofers, Error> {
    let gofers = state::gofers(root, sandbox);
    let recorded = gofers.as_deref().unwrap_or_default();
    let sentry_cgroups = process::cgroups(sentry);
    let resume = |pid: i32| signal(pid, sentry_cgroups.as_deref(), Signal::CONT);
    let signalled: Vec<_> = recorded.iter().copied().map(resume).collect();
    resume(sentry)?;
    let pids = gofers?;
    let signalled = signalled.into_iter().collect::<Result<Vec<bool>, _>>()?;
    Ok(Gofers {
        pids,
        ended: signalled.contains(&false),
    })
}

/// Signals a process that is in the sentry's cgroups. Returns false, without a signal, for an ended
/// process and for a process in other cgroups.
fn signal(pid: i32, sentry_cgroups: Option<&str>, signal: Signal) -> Result<bool, Error> {
    let failed = |errno: Errno| Error::Signal {
        pid,
        source: errno.into(),
    };
    let Some(id) = Pid::from_raw(pid) else {
        return Ok(false);
    };
    let process = match pidfd_open(id, PidfdFlags::empty()) {
        Err(Errno::SRCH) => return Ok(false),
        opened => opened.map_err(failed)?,
    };
    // Only after the open: from here on the number cannot pass to another process.
    if !is_beside(process::cgroups(pid).as_deref(), sentry_cgroups) {
        return Ok(false);
    }
    match pidfd_send_signal(&process, signal) {
        Ok(()) => Ok(true),
        Err(Errno::SRCH) => Ok(false),
        Err(errno) => Err(failed(errno)),
    }
}

/// Reports whether a process in these cgroups is in the sentry's cgroups.
fn is_beside(cgroups: Option<&str>, sentry_cgroups: Option<&str>) -> bool {
    cgroups.is_some() && cgroups == sentry_cgroups
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    struct Processes {
        dir: tempfile::TempDir,
        sentry: Child,
        gofers: Vec<Child>,
    }

    impl Processes {
        /// Starts a sentry and gofers in the test's own cgroup, and writes runsc's records of them.
        fn with_gofers(gofers: usize) -> Self {
            let sleep = || Command::new("sleep").arg("600").spawn().expect("started");
            let (dir, sentry) = (tempfile::tempdir().expect("a directory"), sleep());
            let of_sandbox = format!(r#"{{"goferPid":0,"sandbox":{{"pid":{}}}}}"#, sentry.id());
            let write = |container: &str, state: String| {
                let path = dir.path().join(format!("{container}_sandbox:s.state"));
                std::fs::write(path, state).expect("written");
            };
            write("s", of_sandbox);
            let gofers: Vec<_> = (0..gofers).map(|_| sleep()).collect();
            for (number, gofer) in gofers.iter().enumerate() {
                write(
                    &number.to_string(),
                    format!(r#"{{"goferPid":{}}}"#, gofer.id()),
                );
            }
            Self {
                dir,
                sentry,
                gofers,
            }
        }

        fn pids(&self) -> Vec<i32> {
            let all = self.gofers.iter().chain([&self.sentry]);
            all.map(|child| child.id().cast_signed()).collect()
        }

        fn stopped(&self) -> Vec<bool> {
            self.pids().into_iter().map(process::is_stopped).collect()
        }

        /// Waits until the processes are in these states. A signal acts a moment after it was sent.
        fn until(&self, stopped: &[bool]) {
            let deadline = Instant::now() + Duration::from_secs(10);
            while self.stopped() != stopped {
                assert!(Instant::now() < deadline, "{:?}", self.stopped());
                std::thread::yield_now();
            }
        }
    }

    impl Drop for Processes {
        fn drop(&mut self) {
            for child in self.gofers.iter_mut().chain([&mut self.sentry]) {
                child.kill().expect("killed");
                child.wait().expect("it ends");
            }
        }
    }

    #[test]
    fn all_processes_of_a_sandbox_stop_and_continue_however_often_they_are_signalled() {
        let processes = Processes::with_gofers(2);
        let root = processes.dir.path();
        assert!(!is_stopped_by_signal(root, "s"));
        for _ in 0..2 {
            stop_all(root, "s").expect("stopped");
            processes.until(&[true; 3]);
            assert!(is_stopped_by_signal(root, "s"));
        }
        let sentry = processes.sentry.id().cast_signed();
        for count in [Some(2), None] {
            let gofers = continue_stopped(root, "s", sentry).expect("they go on");
            assert!(gofers.as_ref().is_none_or(Gofers::all_go_on));
            assert_eq!(gofers.map(|gofers| gofers.pids.len()), count);
            processes.until(&[false; 3]);
            assert!(!is_stopped_by_signal(root, "s"));
        }
    }

    #[test]
    fn processes_that_a_killed_caller_left_stopped_are_continued_by_the_next_caller() {
        let processes = Processes::with_gofers(1);
        let root = processes.dir.path();
        let [gofer, sentry] = processes.pids()[..] else {
            panic!("two")
        };
        stop_all(root, "s").expect("stopped");
        // The caller that continued them was killed in between.
        let cgroups = process::cgroups(sentry);
        signal(gofer, cgroups.as_deref(), Signal::CONT).expect("signalled");
        processes.until(&[false, true]);
        continue_stopped(root, "s", sentry).expect("they go on");
        processes.until(&[false, false]);
    }

    #[test]
    fn a_gofer_that_ended_while_it_was_stopped_is_detected() {
        let mut processes = Processes::with_gofers(2);
        let root = processes.dir.path().to_owned();
        stop_all(&root, "s").expect("stopped");
        let sentry = processes.sentry.id().cast_signed();
        let gofer = &mut processes.gofers[0];
        gofer.kill().expect("killed");
        // No process has its number any more.
        gofer.wait().expect("it ends");
        let gofers = continue_stopped(&root, "s", sentry).expect("the others go on");
        assert!(!gofers.expect("they were stopped").all_go_on());
        processes.until(&[false; 3]);
    }

    #[test]
    fn an_unreadable_record_keeps_no_process_stopped() {
        let processes = Processes::with_gofers(1);
        let root = processes.dir.path();
        stop_all(root, "s").expect("stopped");
        std::fs::write(root.join("torn_sandbox:s.state"), "{").expect("written");
        continue_by_record(root, "s").expect_err("one is not known");
        assert!(!process::is_stopped(processes.pids()[1]), "the sentry");
        // A sandbox with an unreadable record is not stopped.
        stop_all(root, "s").expect_err("one is not known");
        processes.until(&[true, false]);
    }

    #[test]
    fn a_sandbox_that_has_ended_is_not_halted() {
        let mut processes = Processes::with_gofers(1);
        stop_all(processes.dir.path(), "s").expect("stopped");
        processes.sentry.kill().expect("killed");
        processes.sentry.wait().expect("it ends");
        assert!(!is_stopped_by_signal(processes.dir.path(), "s"));
        assert!(!is_stopped_by_signal(processes.dir.path(), "unknown"));
    }

    #[test]
    fn a_process_in_another_cgroup_does_not_belong_to_the_sandbox() {
        let (a, b) = ("4:memory:/a\n0::/\n", "4:memory:/b\n0::/\n");
        assert!(is_beside(Some(a), Some(a)));
        assert!(!is_beside(Some(b), Some(a)));
        assert!(!is_beside(None, Some(a)));
        assert!(!is_beside(None, None));
    }
}
