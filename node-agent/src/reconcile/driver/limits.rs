//! Telling a sandbox that runs what its Pod may use.

use std::time::Duration;

use torpor_cgroup::limits::Limits;
use torpor_core::ids::SandboxId;
use torpor_core::state::{Live, Observed};
use torpor_records::PodRecord;
use torpor_records::Role;
use torpor_runsc::limits::{self, Machine};

use crate::reconcile::node::Node;
use crate::reconcile::observe::words;

/// The sandbox' lock is held meanwhile, and the next look tries again.
const TELL_LIMIT: Duration = Duration::from_secs(2);

/// The limits that this agent told a sandbox last.
pub(super) type ToldLimits = (SandboxId, Limits);

/// Tells a sandbox its Pod's limits: when it was restored, which brings those of its image, and
/// when the Pod was resized. Answers what it was told. The caller holds the sandbox' lock.
pub(super) fn tell(
    node: &Node,
    record: &PodRecord,
    observed: &Observed,
    told: Option<ToldLimits>,
) -> Option<ToldLimits> {
    match observed.live {
        Live::Running => {}
        // Where it stands still it goes on as it is.
        Live::Paused | Live::Unknown => return told,
        Live::None => return None,
    }
    let now = (record.sandbox.clone(), limits_of(node, record)?);
    if told.as_ref() == Some(&now) {
        return told;
    }
    if let Err(error) = write(node, &now) {
        tracing::warn!(pod_uid = %record.pod_uid, error, "the Pod's programs see its old limits until the agent can update them");
        return told;
    }
    Some(now)
}

fn limits_of(node: &Node, record: &PodRecord) -> Option<Limits> {
    let cgroups = node.cgroups.as_ref()?;
    limits::of_pod(&node.records, cgroups, record).ok()?
}

fn write(node: &Node, (sandbox, limits): &ToldLimits) -> Result<(), String> {
    let parts = node.records.containers_of(sandbox);
    let parts = parts.map_err(|error| words(&error))?;
    let with_programs = parts.iter().filter(|part| part.role == Role::Container);
    let containers: Vec<&str> = with_programs.map(|part| part.id.as_str()).collect();
    let machine = Machine::read().map_err(|error| error.to_string())?;
    let mut control = node.runsc.connect(sandbox).map_err(|error| words(&error))?;
    match limits::tell(&mut control, &containers, limits, machine, TELL_LIMIT) {
        Err(error) if error.is_refusal() => {
            tracing::warn!(
                error = words(&error),
                "the Pod's programs see its old limits"
            );
            Ok(())
        }
        told => told.map_err(|error| words(&error)),
    }
}
