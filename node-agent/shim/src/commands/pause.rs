//! Pause and resume of a whole sandbox.

use std::time::SystemTime;

use anyhow::bail;
use torpor_core::ids::ContainerId;
use torpor_core::transition::Ran;
use torpor_records::{SandboxState, WakeCause};
use torpor_runsc::pause;
use torpor_sandbox::node::{CALL_LIMIT, Node};
use torpor_sandbox::restore::transitions;

pub(crate) fn pause(node: &Node, id: &ContainerId) -> anyhow::Result<()> {
    let record = node.container(id)?;
    let _lock = node.records.lock(&record.sandbox)?;
    if node.records.state(&record.sandbox)? != SandboxState::Running {
        bail!("the sandbox is not running");
    }
    let mut control = node.runsc.connect(&record.sandbox)?;
    let now = SystemTime::now();
    pause::pause(
        &node.records,
        &mut control,
        &record.sandbox,
        now,
        CALL_LIMIT,
    )?;
    Ok(())
}

pub(crate) fn resume(node: &Node, id: &ContainerId) -> anyhow::Result<()> {
    let record = node.container(id)?;
    let _lock = node.records.lock(&record.sandbox)?;
    if transitions::run_on(node, &record.sandbox, WakeCause::Asked)? == Ran::Already {
        bail!("the sandbox is not paused");
    }
    Ok(())
}
