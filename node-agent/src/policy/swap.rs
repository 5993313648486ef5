//! The node's swap: whether there is any, and how much of it dozing sandboxes may take.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;
use torpor_core::ids::PodUid;
use torpor_core::state::{Desired, Doze, Live, Observed, Policy};
use torpor_core::steps::{Action, Plan};

use crate::args::SwapArgs;

/// The limits on the node's swap, and the dozes that are under way.
#[derive(Debug)]
pub(crate) struct SwapRoom {
    limits: SwapLimits,
    pending: Mutex<PendingDozes>,
}

/// Bytes of memory of the sandboxes whose doze is under way, by Pod. Their memory is not in
/// swap yet, so the kernel does not count it there.
#[derive(Debug, Default)]
struct PendingDozes(HashMap<PodUid, u64>);

/// The progress of a sandbox's doze.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DozeProgress {
    Begins,
    /// The sandbox is paused, and its memory is not in swap yet.
    UnderWay,
    /// The memory is in swap, or the sandbox is awake or gone.
    Over,
    /// The sandbox did not answer.
    Unknown,
}

/// Limits in bytes. None: no limit.
#[derive(Debug, Clone, Copy, Default)]
struct SwapLimits {
    per_sandbox: Option<NonZeroU64>,
    per_node: Option<NonZeroU64>,
}

/// The sums over all swap devices, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Swap {
    total: u64,
    used: u64,
}

/// Checks that this node has swap. `Err`: the reason.
pub(crate) fn has_swap() -> Result<(), String> {
    SwapLimits::default().decide(Swap::read()?, 0, None)
}

impl SwapRoom {
    pub(crate) fn new(args: &SwapArgs) -> Self {
        Self {
            limits: SwapLimits {
                per_sandbox: args.doze_swap_per_sandbox.bytes(),
                per_node: args.doze_swap_per_node.bytes(),
            },
            pending: Mutex::default(),
        }
    }

    /// Checks that an awake sandbox may doze: all of its memory may go into swap. `Err`: the
    /// reason. `working_set`, in bytes, is read only for a limit. The dozes under way do not
    /// count here. They last some seconds, and [`Self::plan`] counts them when a doze begins.
    pub(crate) fn may_doze(&self, working_set: impl FnOnce() -> Option<u64>) -> Result<(), String> {
        let limited = self.limits.per_sandbox.or(self.limits.per_node).is_some();
        self.limits
            .decide(Swap::read()?, 0, limited.then(working_set))
    }

    /// Returns the plan for the observation. If there is no room for a doze beside those under way,
    /// the doze does not begin and the plan has the reason. A doze that begins counts as under way
    /// from now on.
    pub(crate) fn plan(
        &self,
        desired: &Desired,
        observed: &mut Observed,
        policy: &Policy,
        now: Timestamp,
        working_set: impl FnOnce() -> Option<u64>,
    ) -> Plan {
        let plan = torpor_core::plan(desired, observed, policy, now);
        if self.limits.per_node.is_none() {
            return plan;
        }
        let begins = plan.steps.iter().any(|step| step.action == Action::Doze);
        let course = course(observed, begins);
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        // The swap in use is read under this lock. Otherwise another task could end the doze of a
        // sandbox in between, and its memory would count in neither sum.
        let allowed = pending.follow(
            &desired.pod_uid,
            course,
            &self.limits,
            Swap::read,
            working_set,
        );
        drop(pending);
        match allowed {
            Ok(()) => plan,
            Err(why) => {
                observed.can_doze = Err(why);
                torpor_core::plan(desired, observed, policy, now)
            }
        }
    }
}

/// Returns the progress of the doze. `begins`: whether the plan for the observation begins a doze.
fn course(observed: &Observed, begins: bool) -> DozeProgress {
    match (observed.live, observed.doze) {
        (Live::Unknown, _) => DozeProgress::Unknown,
        (Live::Paused, Some(Doze { reclaimed: false })) => DozeProgress::UnderWay,
        _ if begins => DozeProgress::Begins,
        _ => DozeProgress::Over,
    }
}

impl PendingDozes {
    /// Updates the bytes that a sandbox is about to take. `Err`: why its doze may not begin.
    fn follow(
        &mut self,
        pod: &PodUid,
        course: DozeProgress,
        limits: &SwapLimits,
        swap: impl FnOnce() -> Result<Swap, String>,
        working_set: impl FnOnce() -> Option<u64>,
    ) -> Result<(), String> {
        match course {
            DozeProgress::Unknown => {}
            DozeProgress::Over => {
                self.0.remove(pod);
            }
            // If there is no entry yet, an earlier agent has begun the doze.
            DozeProgress::UnderWay => {
                let memory = || working_set().unwrap_or(0);
                self.0.entry(pod.clone()).or_insert_with(memory);
            }
            DozeProgress::Begins => {
                self.0.remove(pod);
                let memory = working_set();
                limits.decide(swap()?, self.sum(), Some(memory))?;
                self.0.insert(pod.clone(), memory.unwrap_or(0));
            }
        }
        Ok(())
    }

    fn sum(&self) -> u64 {
        self.0.values().copied().fold(0, u64::saturating_add)
    }
}

impl SwapLimits {
    /// Checks that there is room. `pending`: bytes that other sandboxes are about to take.
    /// `working_set`: bytes of the sandbox; the outer none: no limit needs it; the inner none:
    /// the kernel does not count it.
    fn decide(
        &self,
        swap: Swap,
        pending: u64,
        working_set: Option<Option<u64>>,
    ) -> Result<(), String> {
        if swap.total == 0 {
            return Err("this node has no swap".to_owned());
        }
        let Some(working_set) = working_set else {
            return Ok(());
        };
        let Some(memory) = working_set else {
            return Err("the kernel does not count its memory, and swap is limited".to_owned());
        };
        let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20);
        if let Some(limit) = self.per_sandbox
            && memory > limit.get()
        {
            return Err(format!(
                "its memory, {} MiB, is more than the {} MiB of swap that a sandbox may take (--doze-swap-per-sandbox)",
                mebibytes(memory),
                mebibytes(limit.get())
            ));
        }
        let taken = swap.used.saturating_add(pending);
        if let Some(limit) = self.per_node
            && memory.saturating_add(taken) > limit.get()
        {
            return Err(format!(
                "its memory, {} MiB, does not fit into the {} MiB of the node's swap that may be in use (--doze-swap-per-node): {} MiB are in use or about to be",
                mebibytes(memory),
                mebibytes(limit.get()),
                mebibytes(taken)
            ));
        }
        Ok(())
    }
}

impl Swap {
    fn read() -> Result<Self, String> {
        let swaps = std::fs::read_to_string("/proc/swaps");
        let swaps = swaps.map_err(|error| format!("cannot read /proc/swaps: {error}"))?;
        Ok(swap(&swaps))
    }
}

/// Parses /proc/swaps: a line of column names, then one line for each swap device with name,
/// type, KiB, KiB in use, and priority.
fn swap(swaps: &str) -> Swap {
    let number = |line: &str, column| line.split_whitespace().nth(column)?.parse::<u64>().ok();
    let sum = |column| {
        let devices = swaps.lines().skip(1);
        let kibibytes = devices.filter_map(|line| number(line, column));
        kibibytes.fold(0_u64, |sum, more| {
            sum.saturating_add(more.saturating_mul(1 << 10))
        })
    };
    Swap {
        total: sum(2),
        used: sum(3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn swap_is_the_sum_of_all_devices() {
        let names = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
        let devices = "/dev/zram0                              partition\t1048576\t\t2048\t\t100\n/swap file 1024 0 -2\n";
        let found = swap(&format!("{names}{devices}"));
        assert_eq!(found.total, (1 << 30) + MIB);
        assert_eq!(found.used, 2 * MIB);
        assert_eq!(swap(names), Swap::default());
        assert_eq!(swap(""), Swap::default());
    }

    fn limits(per_sandbox: u64, per_node: u64) -> SwapLimits {
        SwapLimits {
            per_sandbox: NonZeroU64::new(per_sandbox * MIB),
            per_node: NonZeroU64::new(per_node * MIB),
        }
    }

    fn node(used: u64) -> Swap {
        Swap {
            total: 1000 * MIB,
            used: used * MIB,
        }
    }

    #[test]
    fn a_sandbox_dozes_where_there_is_swap_and_the_limits_leave_room_for_it() {
        let refusal = |limits: SwapLimits, swap, memory: u64| {
            limits
                .decide(swap, 0, Some(Some(memory * MIB)))
                .err()
                .unwrap_or_default()
        };
        assert_eq!(limits(0, 0).decide(node(0), 0, None), Ok(()));
        assert_eq!(
            refusal(limits(0, 0), Swap::default(), 1),
            "this node has no swap"
        );
        assert_eq!(refusal(limits(64, 0), node(900), 64), "");
        assert!(
            refusal(limits(64, 0), node(0), 65)
                .contains("its memory, 65 MiB, is more than the 64 MiB")
        );
        assert_eq!(refusal(limits(0, 500), node(400), 100), "");
        assert!(refusal(limits(0, 500), node(400), 101).contains("into the 500 MiB"));
        assert!(
            limits(64, 500).decide(node(0), 0, Some(None)).is_err(),
            "not counted"
        );
    }

    fn pod(name: &str) -> PodUid {
        PodUid::new(name).expect("a uid")
    }

    /// Follows a sandbox of 50 MiB on a node where `used` of at most 500 MiB of swap are in use.
    fn follow(
        pending: &mut PendingDozes,
        name: &str,
        course: DozeProgress,
        used: u64,
    ) -> Result<(), String> {
        let (swap, memory) = (|| Ok(node(used)), || Some(50 * MIB));
        pending.follow(&pod(name), course, &limits(0, 500), swap, memory)
    }

    #[test]
    fn pending_dozes_count_against_the_swap_for_a_new_doze() {
        use DozeProgress::*;
        let pending = &mut PendingDozes::default();
        // All at the same moment: the kernel counts the same for each of them.
        assert_eq!(follow(pending, "a", Begins, 400), Ok(()));
        assert_eq!(follow(pending, "b", Begins, 400), Ok(()));
        let refused = follow(pending, "c", Begins, 400).expect_err("no room");
        assert!(refused.contains("500 MiB are in use or about to be"));
        // A refused doze does not count, and a sandbox that is observed again does not count twice.
        for (name, course) in [("c", Over), ("a", UnderWay), ("b", Unknown)] {
            assert_eq!(follow(pending, name, course, 400), Ok(()), "{name}");
        }
        assert_eq!(pending.sum(), 100 * MIB);
        // One sandbox is in swap, where the kernel counts it; the other is awake again.
        assert_eq!(follow(pending, "a", Over, 450), Ok(()));
        let refused = follow(pending, "c", Begins, 450);
        assert!(refused.is_err_and(|why| why.contains("500 MiB are")));
        assert_eq!(follow(pending, "b", Over, 450), Ok(()));
        assert_eq!(follow(pending, "c", Begins, 450), Ok(()));
    }

    #[test]
    fn a_doze_that_a_former_agent_began_counts() {
        let pending = &mut PendingDozes::default();
        assert_eq!(follow(pending, "a", DozeProgress::UnderWay, 430), Ok(()));
        assert!(follow(pending, "b", DozeProgress::Begins, 430).is_err_and(|why| !why.is_empty()));
    }

    #[test]
    fn a_doze_is_under_way_from_its_plan_until_its_memory_is_in_swap() {
        let observed = |live, doze: Option<bool>| Observed {
            live,
            doze: doze.map(|reclaimed| Doze { reclaimed }),
            ..Observed::nothing()
        };
        for (live, doze, begins, expected) in [
            (Live::Running, None, false, DozeProgress::Over),
            (Live::Running, None, true, DozeProgress::Begins),
            // A sandbox that is paused for another reason: the doze is recorded first.
            (Live::Paused, None, true, DozeProgress::Begins),
            (Live::Paused, Some(false), false, DozeProgress::UnderWay),
            (Live::Paused, Some(false), true, DozeProgress::UnderWay),
            (Live::Paused, Some(true), false, DozeProgress::Over),
            // A sandbox that has ended while it dozed.
            (Live::None, Some(false), false, DozeProgress::Over),
            (Live::Unknown, Some(false), false, DozeProgress::Unknown),
        ] {
            let course = course(&observed(live, doze), begins);
            assert_eq!(course, expected, "{live:?} {doze:?} {begins}");
        }
    }
}
