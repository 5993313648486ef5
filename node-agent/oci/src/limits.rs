//! The Pod's limits that a sandbox begins with.

use anyhow::Context;
use torpor_records::PodRecord;
use torpor_runsc::limits::{Machine, boot_flags, of_pod};

use crate::node::Node;

/// Words of `runsc boot` for the sandbox that is about to begin.
pub(crate) fn flags(node: &Node, pod: &PodRecord) -> anyhow::Result<Vec<String>> {
    let Some(limits) = of_pod(&node.records, &node.cgroups, pod)? else {
        return Ok(Vec::new());
    };
    let machine = Machine::read().context("cannot read what the machine has")?;
    Ok(boot_flags(&limits, machine))
}
