//! The Pod's limits, as a sandbox gets them when it starts.

use anyhow::Context;
use torpor_records::PodRecord;
use torpor_runsc::limits::{Machine, boot_flags, of_pod};

use crate::node::Node;

/// Returns arguments of `runsc boot` for the sandbox that is about to start; empty for a Pod
/// without a cgroup of its own.
pub fn flags(node: &Node, pod: &PodRecord) -> anyhow::Result<Vec<String>> {
    let Some(limits) = of_pod(&node.records, &node.cgroups, pod)? else {
        return Ok(Vec::new());
    };
    let machine = Machine::read().context("cannot read what the machine has")?;
    Ok(boot_flags(&limits, machine))
}
