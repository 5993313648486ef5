//! The node's swap: whether there is any to doze in, and what of it dozing sandboxes may take.

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;
use torpor_core::ids::PodUid;
use torpor_core::state::{Desired, Doze, Live, Observed, Policy};
use torpor_core::steps::{Action, Plan};

use crate::args::SwapArgs;

/// What of the node's swap may be taken, and what is promised of it.
#[derive(Debug)]
pub(crate) struct SwapRoom {
    limits: SwapLimits,
    promised: Mutex<Promised>,
}

/// Bytes of the sandboxes whose doze is under way: their memory is not in swap yet, where the kernel would count it.
#[derive(Debug, Default)]
struct Promised(HashMap<PodUid, u64>);

/// How far the doze of a sandbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Course {
    Begins,
    /// Its memory is still where it was.
    UnderWay,
    /// Its memory is in swap; or it is awake, or gone.
    Over,
    /// Nobody could be asked.
    Unknown,
}

/// Bytes; none: as much as there is.
#[derive(Debug, Clone, Copy, Default)]
struct SwapLimits {
    per_sandbox: Option<NonZeroU64>,
    per_node: Option<NonZeroU64>,
}

/// Bytes of all swap devices together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Swap {
    total: u64,
    used: u64,
}

/// Whether this node has anywhere to push memory out to.
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
            promised: Mutex::default(),
        }
    }

    /// Whether a sandbox that is awake may doze: all of its memory may go into swap. `working_set`, in bytes, is looked up where a limit
    /// asks for it. What is promised to others, for some seconds, concerns only who is about to doze: see [`Self::plan`].
    pub(crate) fn may_doze(&self, working_set: impl FnOnce() -> Option<u64>) -> Result<(), String> {
        let limited = self.limits.per_sandbox.or(self.limits.per_node).is_some();
        self.limits
            .decide(Swap::read()?, 0, limited.then(working_set))
    }

    /// The plan for what is observed. A doze for which there is no room beside those that are under way does not begin, and the plan says why. One that
    /// begins is one of those from now on.
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
        let mut promised = self.promised.lock().unwrap_or_else(PoisonError::into_inner);
        // The kernel is asked while nobody else is: what it counts by now may be promised no more a moment later.
        let followed = promised.follow(
            &desired.pod_uid,
            course,
            &self.limits,
            Swap::read,
            working_set,
        );
        drop(promised);
        match followed {
            Ok(()) => plan,
            Err(why) => {
                observed.can_doze = Err(why);
                torpor_core::plan(desired, observed, policy, now)
            }
        }
    }
}

/// `begins`: whether the plan for what is observed begins a doze.
fn course(observed: &Observed, begins: bool) -> Course {
    match (observed.live, observed.doze) {
        (Live::Unknown, _) => Course::Unknown,
        (Live::Paused, Some(Doze { reclaimed: false })) => Course::UnderWay,
        _ if begins => Course::Begins,
        _ => Course::Over,
    }
}

impl Promised {
    /// Keeps in mind what a sandbox is about to take. `Err`: its doze may not begin.
    fn follow(
        &mut self,
        pod: &PodUid,
        course: Course,
        limits: &SwapLimits,
        swap: impl FnOnce() -> Result<Swap, String>,
        working_set: impl FnOnce() -> Option<u64>,
    ) -> Result<(), String> {
        match course {
            Course::Unknown => {}
            Course::Over => {
                self.0.remove(pod);
            }
            // Begun by an agent that was here before, if it is not known.
            Course::UnderWay => {
                let memory = || working_set().unwrap_or(0);
                self.0.entry(pod.clone()).or_insert_with(memory);
            }
            Course::Begins => {
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
    /// `promised`: bytes that others are about to take. `working_set`: none where no limit asks for it.
    fn decide(
        &self,
        swap: Swap,
        promised: u64,
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
        let taken = swap.used.saturating_add(promised);
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

/// A line of names, then one for each swap device: name, type, KiB, KiB in use, priority.
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
    fn swap_is_what_all_devices_have_together() {
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
        let told = |limits: SwapLimits, swap, memory: u64| {
            limits
                .decide(swap, 0, Some(Some(memory * MIB)))
                .err()
                .unwrap_or_default()
        };
        assert_eq!(limits(0, 0).decide(node(0), 0, None), Ok(()));
        assert_eq!(
            told(limits(0, 0), Swap::default(), 1),
            "this node has no swap"
        );
        assert_eq!(told(limits(64, 0), node(900), 64), "");
        assert!(
            told(limits(64, 0), node(0), 65)
                .contains("its memory, 65 MiB, is more than the 64 MiB")
        );
        assert_eq!(told(limits(0, 500), node(400), 100), "");
        assert!(told(limits(0, 500), node(400), 101).contains("into the 500 MiB"));
        assert!(
            limits(64, 500).decide(node(0), 0, Some(None)).is_err(),
            "not counted"
        );
    }

    fn pod(name: &str) -> PodUid {
        PodUid::new(name).expect("a uid")
    }

    /// What a sandbox of 50 MiB is told on a node where 500 MiB of swap may be taken and so many are.
    fn told(promised: &mut Promised, name: &str, course: Course, used: u64) -> Result<(), String> {
        let (swap, memory) = (|| Ok(node(used)), || Some(50 * MIB));
        promised.follow(&pod(name), course, &limits(0, 500), swap, memory)
    }

    #[test]
    fn dozes_that_are_under_way_count_for_who_is_about_to_doze() {
        use Course::*;
        let promised = &mut Promised::default();
        // At the same moment: what the kernel counts is the same for all of them.
        assert_eq!(told(promised, "a", Begins, 400), Ok(()));
        assert_eq!(told(promised, "b", Begins, 400), Ok(()));
        let refused = told(promised, "c", Begins, 400).expect_err("no room");
        assert!(refused.contains("500 MiB are in use or about to be"));
        // Refused is not promised, and who is seen again does not count twice.
        for (name, course) in [("c", Over), ("a", UnderWay), ("b", Unknown)] {
            assert_eq!(told(promised, name, course, 400), Ok(()), "{name}");
        }
        assert_eq!(promised.sum(), 100 * MIB);
        // One is in swap, which the kernel counts; the other is awake again.
        assert_eq!(told(promised, "a", Over, 450), Ok(()));
        let refused = told(promised, "c", Begins, 450);
        assert!(refused.is_err_and(|why| why.contains("500 MiB are")));
        assert_eq!(told(promised, "b", Over, 450), Ok(()));
        assert_eq!(told(promised, "c", Begins, 450), Ok(()));
    }

    #[test]
    fn a_doze_that_an_agent_before_has_begun_counts() {
        let promised = &mut Promised::default();
        assert_eq!(told(promised, "a", Course::UnderWay, 430), Ok(()));
        assert!(told(promised, "b", Course::Begins, 430).is_err_and(|why| !why.is_empty()));
    }

    #[test]
    fn a_doze_is_under_way_from_its_plan_until_its_memory_is_in_swap() {
        let seen = |live, doze: Option<bool>| Observed {
            live,
            doze: doze.map(|reclaimed| Doze { reclaimed }),
            ..Observed::nothing()
        };
        for (live, doze, begins, expected) in [
            (Live::Running, None, false, Course::Over),
            (Live::Running, None, true, Course::Begins),
            // Paused for another reason: the doze is noted first.
            (Live::Paused, None, true, Course::Begins),
            (Live::Paused, Some(false), false, Course::UnderWay),
            (Live::Paused, Some(false), true, Course::UnderWay),
            (Live::Paused, Some(true), false, Course::Over),
            // It has died while it dozed.
            (Live::None, Some(false), false, Course::Over),
            (Live::Unknown, Some(false), false, Course::Unknown),
        ] {
            let course = course(&seen(live, doze), begins);
            assert_eq!(course, expected, "{live:?} {doze:?} {begins}");
        }
    }
}
