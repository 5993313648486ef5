//! Stopping the host's processes of a sandbox that dozes.
//!
//! Its tasks stand still, and the processes around them do not: the sentry and the gofers are Go programs, whose runtime collects garbage
//! every two minutes (`forcegcperiod` in Go's runtime/proc.go; an hour in our build of gVisor) and reads the heap back from swap for it. Of a small sandbox 4 to 5 MB became
//! 19 to 20. One that is stopped (SIGSTOP) does nothing, and ends like any other when it is killed.
//!
//! It answers nobody either. So whoever connects to its control socket lets it go on first ([`crate::control::Control::connect`]), and who only
//! wants to know whether it is there asks [`is_halted`]. Its network stack stands still too: the pod's keeper speaks for its address
//! ([`crate::keeper::Request::Halt`]).
//!
//! Nothing is noted: the kernel knows who is stopped. Whoever dies on the way leaves it to the next one who connects. The processes are those of
//! runsc's own records, and of the gofers only what is in the sentry's cgroup: one that has ended may have left its number to another.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::process;

use crate::state;

/// A process is told at once, unless it gets no processor.
const HALT_LIMIT: Duration = Duration::from_secs(1);

/// Why a sandbox' processes could not be stopped, or told to go on.
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
    GoesOn { pid: i32 },
    /// In another PID namespace the numbers of its processes are those of others.
    #[error("the sandbox's processes are stopped, and only its pod's keeper can resume them")]
    OutOfReach,
}

/// Stops the processes of a sandbox of the runsc with this root directory. The sandbox is paused, and its sentry has just answered the caller, who
/// holds the pod's lock: who does not may be left waiting for an answer.
pub fn halt(root: &Path, sandbox: &str) -> Result<(), Error> {
    let sentry = state::sentry(root, sandbox)?;
    let halted = stop(root, sandbox, sentry);
    if halted.is_err() {
        // Otherwise some would stand still beside others, or stop while somebody waits for their answer.
        let_go_on(root, sandbox, sentry)?;
    }
    halted
}

/// The sentry first: who connects looks at that, and a gofer that stands still beside a sentry that runs would be seen by nobody.
fn stop(root: &Path, sandbox: &str, sentry: i32) -> Result<(), Error> {
    let gofers = state::gofers(root, sandbox)?;
    let of_sentry = process::cgroups(sentry);
    for pid in [sentry].into_iter().chain(gofers) {
        signal(pid, of_sentry.as_deref(), Signal::STOP)?;
    }
    let deadline = Instant::now() + HALT_LIMIT;
    while !process::is_stopped(sentry) {
        if Instant::now() >= deadline {
            return Err(Error::GoesOn { pid: sentry });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Whether the sandbox' processes are there and stopped. Leaves them as they are.
pub fn is_halted(root: &Path, sandbox: &str) -> bool {
    // Of one that has no record, or ends at this moment, the next to connect hears.
    state::sentry(root, sandbox).is_ok_and(process::is_stopped)
}

/// The gofers of a sandbox that was let go on.
#[derive(Debug)]
pub(crate) struct Gofers {
    pids: Vec<i32>,
    /// One of them had ended already: its number is nobody's, or another's.
    ended: bool,
}

impl Gofers {
    /// Whether each of them lives.
    pub(crate) fn all_go_on(&self) -> bool {
        !self.ended && self.pids.iter().copied().all(process::goes_on)
    }
}

/// Lets the sandbox go on whose sentry, which lives, is this process. Answers with its gofers, of which it has read then; none where it was not stopped.
pub(crate) fn go_on(root: &Path, sandbox: &str, sentry: i32) -> Result<Option<Gofers>, Error> {
    if !process::numbers_are_own() {
        return match is_halted(root, sandbox) {
            true => Err(Error::OutOfReach),
            false => Ok(None),
        };
    }
    match process::is_stopped(sentry) {
        true => let_go_on(root, sandbox, sentry).map(Some),
        false => Ok(None),
    }
}

/// The same by runsc's records, for who gets no connection: so many may have tried that the kernel lets nobody in any more.
pub(crate) fn go_on_by_record(root: &Path, sandbox: &str) -> Result<(), Error> {
    go_on(root, sandbox, state::sentry(root, sandbox)?).map(drop)
}

/// The gofers first: a sentry that runs has all of them running. What is in the way of one keeps nobody else standing still.
fn let_go_on(root: &Path, sandbox: &str, sentry: i32) -> Result<Gofers, Error> {
    let gofers = state::gofers(root, sandbox);
    let known = gofers.as_deref().unwrap_or_default();
    let of_sentry = process::cgroups(sentry);
    let tell = |pid: i32| signal(pid, of_sentry.as_deref(), Signal::CONT);
    let told: Vec<_> = known.iter().copied().map(tell).collect();
    tell(sentry)?;
    let pids = gofers?;
    let told = told.into_iter().collect::<Result<Vec<bool>, _>>()?;
    Ok(Gofers {
        pids,
        ended: told.contains(&false),
    })
}

/// Unless it has ended, or is none of the sandbox', whose sentry is in these cgroups: answers whether it was told.
fn signal(pid: i32, of_sentry: Option<&str>, signal: Signal) -> Result<bool, Error> {
    let failed = |errno: Errno| Error::Signal {
        pid,
        source: errno.into(),
    };
    let Some(known) = Pid::from_raw(pid) else {
        return Ok(false);
    };
    let process = match pidfd_open(known, PidfdFlags::empty()) {
        Err(Errno::SRCH) => return Ok(false),
        opened => opened.map_err(failed)?,
    };
    // Only now: from here on the number is no other's.
    if !is_beside(process::cgroups(pid).as_deref(), of_sentry) {
        return Ok(false);
    }
    match pidfd_send_signal(&process, signal) {
        Ok(()) => Ok(true),
        Err(Errno::SRCH) => Ok(false),
        Err(errno) => Err(failed(errno)),
    }
}

/// Whether a process in these cgroups is in the sentry's.
fn is_beside(cgroups: Option<&str>, of_sentry: Option<&str>) -> bool {
    cgroups.is_some() && cgroups == of_sentry
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
        /// A sandbox of runsc's records, of these processes in the test's own cgroup.
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

        /// A signal is heard a moment after it was sent.
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
    fn all_processes_of_a_sandbox_stop_and_go_on_however_often_they_are_told() {
        let processes = Processes::with_gofers(2);
        let root = processes.dir.path();
        assert!(!is_halted(root, "s"));
        for _ in 0..2 {
            halt(root, "s").expect("stopped");
            processes.until(&[true; 3]);
            assert!(is_halted(root, "s"));
        }
        let sentry = processes.sentry.id().cast_signed();
        for told in [Some(2), None] {
            let gofers = go_on(root, "s", sentry).expect("they go on");
            assert!(gofers.as_ref().is_none_or(Gofers::all_go_on));
            assert_eq!(gofers.map(|gofers| gofers.pids.len()), told);
            processes.until(&[false; 3]);
            assert!(!is_halted(root, "s"));
        }
    }

    #[test]
    fn who_was_stopped_halfway_goes_on_with_the_next_caller() {
        let processes = Processes::with_gofers(1);
        let root = processes.dir.path();
        let [gofer, sentry] = processes.pids()[..] else {
            panic!("two")
        };
        halt(root, "s").expect("stopped");
        // Who let them go on was killed in between.
        let cgroups = process::cgroups(sentry);
        signal(gofer, cgroups.as_deref(), Signal::CONT).expect("signalled");
        processes.until(&[false, true]);
        go_on(root, "s", sentry).expect("they go on");
        processes.until(&[false, false]);
    }

    #[test]
    fn a_gofer_that_ended_while_it_stood_still_is_missed() {
        let mut processes = Processes::with_gofers(2);
        let root = processes.dir.path().to_owned();
        halt(&root, "s").expect("stopped");
        let sentry = processes.sentry.id().cast_signed();
        let gofer = &mut processes.gofers[0];
        gofer.kill().expect("killed");
        // Nobody has its number any more.
        gofer.wait().expect("it ends");
        let gofers = go_on(&root, "s", sentry).expect("the others go on");
        assert!(!gofers.expect("they were stopped").all_go_on());
        processes.until(&[false; 3]);
    }

    #[test]
    fn a_record_that_cannot_be_read_keeps_nobody_standing_still() {
        let processes = Processes::with_gofers(1);
        let root = processes.dir.path();
        halt(root, "s").expect("stopped");
        std::fs::write(root.join("torn_sandbox:s.state"), "{").expect("written");
        go_on_by_record(root, "s").expect_err("one is not known");
        assert!(!process::is_stopped(processes.pids()[1]), "the sentry");
        // And none is stopped of which not all are known.
        halt(root, "s").expect_err("one is not known");
        processes.until(&[true, false]);
    }

    #[test]
    fn a_sandbox_that_has_ended_is_not_halted() {
        let mut processes = Processes::with_gofers(1);
        halt(processes.dir.path(), "s").expect("stopped");
        processes.sentry.kill().expect("killed");
        processes.sentry.wait().expect("it ends");
        assert!(!is_halted(processes.dir.path(), "s"));
        assert!(!is_halted(processes.dir.path(), "unknown"));
    }

    #[test]
    fn a_process_of_other_cgroups_is_none_of_the_sandbox() {
        let (a, b) = ("4:memory:/a\n0::/\n", "4:memory:/b\n0::/\n");
        assert!(is_beside(Some(a), Some(a)));
        assert!(!is_beside(Some(b), Some(a)));
        assert!(!is_beside(None, Some(a)));
        assert!(!is_beside(None, None));
    }
}
