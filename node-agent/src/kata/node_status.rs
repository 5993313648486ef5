//! The part of Kata in the status of SandboxNode: runtimes, counts and sandboxes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use torpor_api::node::{
    MAX_REPORTED, NodeRuntime, RuntimeCapabilities, RuntimeKind, SandboxNodeStatus, SandboxReport,
};

use super::{Kata, NO_IMAGES};
use crate::report::sandboxes::{Sandboxes, signed};

impl Kata {
    /// Returns one entry for each handler.
    fn runtimes(&self, can_doze: &Result<(), String>) -> Vec<NodeRuntime> {
        let message = match can_doze {
            Ok(()) => format!("cannot hibernate: {NO_IMAGES}; a dozing sandbox has no image"),
            Err(why) => format!("cannot hibernate: {NO_IMAGES}; cannot doze: {why}"),
        };
        let runtime = |handler: &String| NodeRuntime {
            capabilities: RuntimeCapabilities {
                doze: can_doze.is_ok(),
                freeze: true,
                ..RuntimeCapabilities::default()
            },
            handler: handler.clone(),
            kind: RuntimeKind::Kata,
            message: message.clone(),
        };
        self.handlers.iter().map(runtime).collect()
    }

    /// Adds the Kata sandboxes of this node to the status. A sandbox that is locked now is left
    /// out until the next status. `can_doze`: whether sandboxes can doze on this node.
    pub(crate) fn tell(
        &self,
        status: &mut SandboxNodeStatus,
        sandboxes: &Sandboxes,
        can_doze: &Result<(), String>,
    ) {
        status.runtimes.extend(self.runtimes(can_doze));
        let mut counts = status.counts.unwrap_or_default();
        let entries: Vec<_> = self.entries().clone().into_iter().collect();
        for (pod, entry) in entries {
            let Ok(state) = entry.state.try_lock() else {
                continue;
            };
            match (&state.sandbox, &state.doze) {
                (None, _) => continue,
                (Some(_), Some(_)) => counts.dozing += 1,
                (Some(_), None) => counts.running += 1,
            }
            let sleep = state.history.sleep.as_ref();
            if status.sandboxes.len() < MAX_REPORTED {
                status.sandboxes.push(SandboxReport {
                    asleep_since: state.doze.and(state.asleep_since).map(Time),
                    image_bytes: None,
                    image_id: None,
                    last_wake: state.history.wake.clone(),
                    memory_asleep_bytes: sleep.map(|note| signed(note.bytes_after)),
                    memory_awake_bytes: sleep.map(|note| signed(note.bytes_before)),
                    namespace: entry.namespace.clone(),
                    pod_gone_since: None,
                    pod_name: entry.name.clone(),
                    pod_uid: pod.to_string(),
                    reasons: sandboxes.reasons(&pod),
                    sandbox_name: String::new(),
                });
            }
        }
        status.counts = Some(counts);
    }
}
