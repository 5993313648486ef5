//! Pausing a sandbox exactly once.
//!
//! gVisor counts pauses, has no call that returns whether a sandbox is paused, and ends a sandbox
//! that is resumed once too often. So a note is written before and after each pause and resume.
//! After a crash between the two notes, the stacks of the sandbox' tasks show whether the sandbox
//! is paused. The caller holds the pod's lock.

use std::time::{Duration, SystemTime};

use serde_json::Value;
use torpor_core::ids::SandboxId;

use crate::control::{self, Control};
use crate::forward;
use torpor_records::{DozeNote, PauseMark, Records};

/// Limit for the end of forwarded connections. A connection ends within milliseconds, except on a
/// busy machine.
const FORWARDS_LIMIT: Duration = Duration::from_secs(5);

/// Why a sandbox could not be paused or resumed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Record(#[from] torpor_records::Error),
    #[error(transparent)]
    Control(#[from] control::Error),
    #[error(transparent)]
    Forwards(#[from] forward::Error),
}

impl Error {
    /// Reports whether the sandbox ended before it received a resume: it was paused to its end.
    pub fn ended_before_call(&self) -> bool {
        matches!(self, Self::Control(control::Error::NotReceived { .. }))
    }
}

/// Reports whether the sandbox is paused, and completes the note that a crash has left. Only for a
/// caller that holds the pod's lock. A caller without the lock can only read
/// [`Records::pause_mark`].
pub fn is_paused(
    records: &Records,
    control: &mut Control,
    sandbox: &SandboxId,
    limit: Duration,
) -> Result<bool, Error> {
    match records.pause_mark(sandbox)? {
        None => Ok(false),
        Some(PauseMark::Paused) => Ok(true),
        Some(PauseMark::Changing) => {
            let paused = stacks_are_stopped(&control.stacks(limit)?);
            match paused {
                // The crashed process has recorded the beginning of the pause.
                true => {
                    let since = records.pause_began(sandbox);
                    records.note_pause(sandbox, PauseMark::Paused, since)?;
                }
                false => records.forget_pause(sandbox)?,
            }
            Ok(paused)
        }
    }
}

/// Pauses the sandbox; only the program that paused it resumes it. Returns false if it was paused
/// already.
///
/// Ends the connections that are forwarded into the sandbox: gVisor cannot be saved while one is
/// open, and a paused process cannot end. `decided`: the time of the decision to pause, which is
/// recorded as the beginning of the pause. A use of the sandbox after that time may come too late
/// to prevent the pause, and counts as a use of a paused sandbox.
pub fn pause(
    records: &Records,
    control: &mut Control,
    sandbox: &SandboxId,
    decided: SystemTime,
    limit: Duration,
) -> Result<bool, Error> {
    let done = stop(records, control, sandbox, decided, limit)?;
    records.write_doze(sandbox, None)?;
    Ok(done)
}

/// Pauses the sandbox as [`pause`] does, but the next use of the sandbox resumes it. A sandbox that
/// dozes already stays unchanged.
pub fn doze(
    records: &Records,
    control: &mut Control,
    sandbox: &SandboxId,
    decided: SystemTime,
    limit: Duration,
) -> Result<bool, Error> {
    if !is_dozing(records, control, sandbox, limit)? {
        records.write_doze(sandbox, Some(DozeNote::default()))?;
    }
    stop(records, control, sandbox, decided, limit)
}

/// Reports whether the sandbox is paused and its next use may resume it.
pub fn is_dozing(
    records: &Records,
    control: &mut Control,
    sandbox: &SandboxId,
    limit: Duration,
) -> Result<bool, Error> {
    Ok(records.doze(sandbox)?.is_some() && is_paused(records, control, sandbox, limit)?)
}

fn stop(
    records: &Records,
    control: &mut Control,
    sandbox: &SandboxId,
    decided: SystemTime,
    limit: Duration,
) -> Result<bool, Error> {
    if is_paused(records, control, sandbox, limit)? {
        return Ok(false);
    }
    forward::end_all(records, sandbox, FORWARDS_LIMIT)?;
    records.note_pause(sandbox, PauseMark::Changing, Some(decided))?;
    control.pause(limit)?;
    records.note_pause(sandbox, PauseMark::Paused, Some(decided))?;
    Ok(true)
}

/// Resumes the sandbox; returns false if it was running already.
pub fn resume(
    records: &Records,
    control: &mut Control,
    sandbox: &SandboxId,
    limit: Duration,
) -> Result<bool, Error> {
    if !is_paused(records, control, sandbox, limit)? {
        return Ok(false);
    }
    // The note keeps the beginning of the pause. If the resume fails, the use that caused it still
    // counts as a use since the pause began.
    let since = records.pause_began(sandbox);
    records.note_pause(sandbox, PauseMark::Changing, since)?;
    control.resume(limit)?;
    records.forget_pause(sandbox)?;
    records.write_doze(sandbox, None)?;
    Ok(true)
}

/// Reports whether each task's goroutine waits in `doStop`, as in a paused sandbox. The goroutine
/// of a task that job control has stopped waits there, too. But a sandbox with all tasks stopped by
/// job control at the instant of a crash has not been observed.
fn stacks_are_stopped(stacks: &str) -> bool {
    let tasks = stacks
        .split("\n\n")
        .filter(|stack| stack.contains("kernel.(*Task).run("));
    let mut any = false;
    for task in tasks {
        any = true;
        if !task.contains("kernel.(*Task).doStop(") {
            return false;
        }
    }
    any
}

impl Control {
    /// Returns the stacks of all goroutines of the sandbox.
    fn stacks(&mut self, limit: Duration) -> Result<String, control::Error> {
        self.call("debug.Stacks", &Value::Null, &[], limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STOPPED: &str =
        "goroutine 7 [sync.Cond.Wait]:\nkernel.(*Task).doStop(0x1)\nkernel.(*Task).run(0x1)\n";
    const BLOCKED: &str =
        "goroutine 8 [select]:\nkernel.(*Task).block(0x1)\nkernel.(*Task).run(0x1)\n";
    const OTHER: &str = "goroutine 1 [IO wait]:\nurpc.(*Server).handleOne(0x1)\n";

    #[test]
    fn a_sandbox_is_paused_when_all_its_tasks_are_stopped() {
        assert!(stacks_are_stopped(&[OTHER, STOPPED, STOPPED].join("\n")));
        assert!(!stacks_are_stopped(&[OTHER, STOPPED, BLOCKED].join("\n")));
        assert!(!stacks_are_stopped(OTHER));
    }
}
