//! The Pod's limits, as a sandbox gets them when it starts and while it runs.

use std::time::Duration;

use anyhow::Context;
use torpor_cgroup::limits::Limits;
use torpor_records::{PodRecord, Role};
use torpor_runsc::limits::{Machine, boot_flags, of_pod, tell};

use crate::node::Node;

/// Limit for the update of a running sandbox. Its lock is held meanwhile, and the next update tries
/// again.
const SEND_LIMIT: Duration = Duration::from_secs(2);

/// Returns arguments of `runsc boot` for the sandbox that is about to start; empty for a Pod
/// without a cgroup of its own.
pub fn flags(node: &Node, pod: &PodRecord) -> anyhow::Result<Vec<String>> {
    let Some(limits) = of_pod(&node.records, &node.cgroups, pod)? else {
        return Ok(Vec::new());
    };
    let machine = Machine::read().context("cannot read what the machine has")?;
    Ok(boot_flags(&limits, machine))
}

/// Writes the Pod's limits into its running sandbox, unless they are those that it got last,
/// `sent`. They differ after a restore, which brings the limits of the image, and after a resize of
/// the Pod. Returns the limits that the sandbox has got. The caller holds the sandbox's lock.
pub fn send(node: &Node, record: &PodRecord, sent: Option<Limits>) -> Option<Limits> {
    let now = of_pod(&node.records, &node.cgroups, record).ok()??;
    if sent.as_ref() == Some(&now) {
        return sent;
    }
    match write(node, record, &now) {
        Ok(()) => Some(now),
        Err(error) => {
            crate::log_line!(
                "the Pod's programs see its old limits until they can be updated: {error:#}"
            );
            sent
        }
    }
}

fn write(node: &Node, record: &PodRecord, limits: &Limits) -> anyhow::Result<()> {
    let parts = node.records.containers_of(&record.sandbox)?;
    let with_programs = parts.iter().filter(|part| part.role == Role::Container);
    let containers: Vec<&str> = with_programs.map(|part| part.id.as_str()).collect();
    let machine = Machine::read().context("cannot read what the machine has")?;
    let mut control = node.runsc.connect(&record.sandbox)?;
    match tell(&mut control, &containers, limits, machine, SEND_LIMIT) {
        Err(error) if error.is_refusal() => {
            let error = anyhow::Error::new(error);
            crate::log_line!("the Pod's programs see its old limits: {error:#}");
            Ok(())
        }
        result => Ok(result?),
    }
}
