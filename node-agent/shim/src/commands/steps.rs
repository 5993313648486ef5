//! Command `steps`: takes the steps of the agent's plan. The process holds the pod's lock until the
//! last step is taken, also when the agent ends before.

use std::io::Read;
use std::os::fd::AsFd;

use anyhow::Context;
use torpor_core::ids::SandboxId;
use torpor_messages::service::{Answer, Steps};
use torpor_messages::wire::MAX_MESSAGE;
use torpor_sandbox::node::Node;
use torpor_sandbox::plan;
use torpor_sandbox::restore::reason_or;

use super::FAILED;

/// Takes the steps that standard input has, and sends the outcome of each to standard output.
pub(super) fn take(node: &Node, sandbox: &SandboxId) -> anyhow::Result<()> {
    let peer = std::io::stdout().as_fd().try_clone_to_owned()?;
    let taken = read().and_then(|steps| {
        plan::take(node, sandbox, &steps, |index, outcome, took| {
            let step = Answer::Step {
                index,
                outcome,
                took,
            };
            step.send(&peer);
        })
    });
    let last = match &taken {
        Ok(written) => Answer::Ended { written: *written },
        Err(error) => Answer::refused(reason_or(FAILED, error), format!("{error:#}")),
    };
    last.send(&peer);
    taken.map(drop)
}

fn read() -> anyhow::Result<Steps> {
    let mut bytes = Vec::new();
    let limit = MAX_MESSAGE as u64;
    std::io::stdin().take(limit).read_to_end(&mut bytes)?;
    serde_json::from_slice(&bytes).context("cannot parse the steps")
}
