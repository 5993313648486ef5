//! The pod's limit of processor time, which a wake lifts.
//!
//! A sandbox with a fifth of a processor would take six times as long to load its memory. So the
//! pod has no limit for the duration of a wake. The limit is recorded before it is lifted: when a
//! process dies meanwhile, a later one restores the limit.

use torpor_core::ids::SandboxId;
use torpor_records::PodRecord;

use crate::node::Node;

/// Calls `work` while the pod's limit of processor time is lifted.
pub(super) fn without_quotas<T>(
    node: &Node,
    pod: &PodRecord,
    work: impl FnOnce() -> T,
) -> anyhow::Result<T> {
    lift_quotas(node, pod)?;
    let done = work();
    put_quotas_back(node, &pod.sandbox);
    Ok(done)
}

fn lift_quotas(node: &Node, pod: &PodRecord) -> anyhow::Result<()> {
    let Some(cgroup) = pod.cgroup.parent() else {
        return Ok(());
    };
    let quotas = node.cgroups.quotas(cgroup);
    if !quotas.is_empty() {
        node.records.note_quotas(&pod.sandbox, &quotas)?;
    }
    for quota in &quotas {
        quota.lift()?;
    }
    Ok(())
}

/// Restores the pod's limit of processor time, if it is lifted.
///
/// Logs a failure and does not return it: a running sandbox is not ended for it, and a wake or a
/// removal does not wait for it. The sandbox' keeper tries again.
pub fn put_quotas_back(node: &Node, sandbox: &SandboxId) {
    let put_back = || -> anyhow::Result<()> {
        for quota in node.records.quotas(sandbox)? {
            quota.put_back()?;
        }
        Ok(node.records.forget_quotas(sandbox)?)
    };
    if let Err(error) = put_back() {
        crate::log_line!("cannot restore the pod's limit of processor time: {error:#}");
    }
}

#[cfg(test)]
mod tests {
    use anyhow::ensure;
    use torpor_records::SandboxState;

    use super::*;
    use crate::node::tests::Limited;
    use crate::restore::transitions::catch_up;

    const LIMIT: &str = "20000 100000";

    /// A node with a pod that may use a fifth of a processor.
    fn limited() -> Limited {
        Limited::by(&[("cpu.max", LIMIT)])
    }

    impl Limited {
        fn processor(&self) -> String {
            self.get("cpu.max")
        }

        fn lift(&self) {
            lift_quotas(&self.node, &self.pod).expect("lifted");
            assert_eq!(self.processor(), "max 100000");
        }
    }

    #[test]
    fn the_limit_is_lifted_for_the_work_and_put_back_however_the_work_ends() {
        let limited = limited();
        for well in [true, false] {
            let work = || -> anyhow::Result<()> {
                assert_eq!(limited.processor(), "max 100000");
                ensure!(well, "it failed");
                Ok(())
            };
            let done = without_quotas(&limited.node, &limited.pod, work).expect("put back");
            assert_eq!(
                (done.is_ok(), limited.processor()),
                (well, LIMIT.to_owned())
            );
        }
    }

    #[test]
    fn a_catch_up_puts_back_the_limit_of_a_wake_that_was_cut_off() {
        // The interrupted wake, up to the moment of its end.
        type Killed = fn(&Limited);
        let moments: [(&str, Killed); 4] = [
            ("before it began", |_| {}),
            ("noted", |limited| {
                limited.lift();
                limited.set("cpu.max", LIMIT);
            }),
            ("lifted", Limited::lift),
            ("lifted again", |limited| {
                limited.lift();
                limited.lift();
            }),
        ];
        for (moment, killed) in moments {
            let limited = limited();
            let (node, sandbox) = (&limited.node, &limited.pod.sandbox);
            killed(&limited);
            for again in [false, true] {
                catch_up(node, sandbox).expect("caught up");
                assert_eq!(limited.processor(), LIMIT, "{moment} {again}");
                assert_eq!(node.records.quotas(sandbox).expect("read"), []);
            }
            let state = node.records.state(sandbox).expect("written");
            assert_eq!(state, SandboxState::Running);
            // No note is left that would undo a later limit of the kubelet.
            limited.set("cpu.max", "max 100000");
            catch_up(node, sandbox).expect("caught up");
            assert_eq!(limited.processor(), "max 100000", "{moment}");
        }
    }
}
