//! Writing the Pod's resource limits into its running sandbox.

use std::time::Duration;

use torpor_cgroup::limits::Limits;
use torpor_core::ids::SandboxId;
use torpor_core::state::{Live, Observed};
use torpor_records::PodRecord;
use torpor_records::Role;
use torpor_runsc::limits::{self, Machine};

use crate::reconcile::node::Node;
use crate::reconcile::observe::words;

/// The sandbox's lock is held meanwhile, and the next turn tries again.
const SEND_LIMIT: Duration = Duration::from_secs(2);

/// The limits that this agent wrote into a sandbox last.
pub(super) type SentLimits = (SandboxId, Limits);

/// Writes the Pod's limits into its sandbox. They differ after a restore, which brings the limits
/// of the image, and after a resize of the Pod. Returns the limits that the sandbox has got. The
/// caller holds the sandbox's lock.
pub(super) fn send(
    node: &Node,
    record: &PodRecord,
    observed: &Observed,
    sent: Option<SentLimits>,
) -> Option<SentLimits> {
    match observed.live {
        Live::Running => {}
        // A sandbox that does not run keeps its limits.
        Live::Paused | Live::Unknown => return sent,
        Live::None => return None,
    }
    let now = (record.sandbox.clone(), limits_of(node, record)?);
    if sent.as_ref() == Some(&now) {
        return sent;
    }
    if let Err(error) = write(node, &now) {
        tracing::warn!(pod_uid = %record.pod_uid, error, "the Pod's programs see its old limits until the agent can update them");
        return sent;
    }
    Some(now)
}

fn limits_of(node: &Node, record: &PodRecord) -> Option<Limits> {
    let cgroups = node.cgroups.as_ref()?;
    limits::of_pod(&node.records, cgroups, record).ok()?
}

fn write(node: &Node, (sandbox, limits): &SentLimits) -> Result<(), String> {
    let parts = node.records.containers_of(sandbox);
    let parts = parts.map_err(|error| words(&error))?;
    let with_programs = parts.iter().filter(|part| part.role == Role::Container);
    let containers: Vec<&str> = with_programs.map(|part| part.id.as_str()).collect();
    let machine = Machine::read().map_err(|error| error.to_string())?;
    let mut control = node.runsc.connect(sandbox).map_err(|error| words(&error))?;
    match limits::tell(&mut control, &containers, limits, machine, SEND_LIMIT) {
        Err(error) if error.is_refusal() => {
            tracing::warn!(
                error = words(&error),
                "the Pod's programs see its old limits"
            );
            Ok(())
        }
        result => result.map_err(|error| words(&error)),
    }
}
