//! Pausing a sandbox exactly once.
//!
//! gVisor counts pauses, tells nobody whether it is paused, and ends the sandbox when it is resumed once too often. So
//! each pause and each resume is noted before and after, and when a crash leaves a note of something begun, the stacks
//! of the sandbox' tasks tell whether it was done. The caller holds the pod's lock.

use std::time::{Duration, SystemTime};

use serde_json::Value;
use torpor_core::ids::SandboxId;

use crate::control::{self, Control};
use crate::forward;
use torpor_records::{DozeNote, PauseMark, Records};

/// A forwarded connection ends within milliseconds, unless nobody on a busy machine gets to it.
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
    /// Whether a sandbox that was to be resumed ended without having heard of it: it stood still to its end.
    pub fn was_not_heard(&self) -> bool {
        matches!(self, Self::Control(control::Error::NotHeard { .. }))
    }
}

/// Whether the sandbox is paused. Settles what a crash left open, and so is only for who holds the pod's lock: while somebody
/// else is at it, [`Records::pause_mark`] is all that there is to read.
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
                // Whoever left it open said since when.
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

/// Pauses the sandbox so that only who knows why lets it run on; answers false if it was paused already. Connections that are forwarded into it are ended: gVisor
/// cannot be saved while one is open, and a process that stands still cannot end. It sleeps since it was decided that it shall: who needs it at a
/// time after that may have said so too late for this.
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

/// The same, but whoever needs the sandbox resumes it; one that dozes already is left as it is.
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

/// Whether the sandbox is paused, and whoever needs it may resume it.
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

/// Lets the sandbox run on; answers false if it was running already.
pub fn resume(
    records: &Records,
    control: &mut Control,
    sandbox: &SandboxId,
    limit: Duration,
) -> Result<bool, Error> {
    if !is_paused(records, control, sandbox, limit)? {
        return Ok(false);
    }
    // Who is not resumed after all sleeps since it did, so that who asked for it is heard again.
    let since = records.pause_began(sandbox);
    records.note_pause(sandbox, PauseMark::Changing, since)?;
    control.resume(limit)?;
    records.forget_pause(sandbox)?;
    records.write_doze(sandbox, None)?;
    Ok(true)
}

/// In a paused sandbox every task's goroutine waits in `doStop`. One stopped by job control does so too, but a sandbox
/// whose every task is stopped by job control at the instant of a crash has not been seen.
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
    /// The stacks of all goroutines of the sandbox.
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
