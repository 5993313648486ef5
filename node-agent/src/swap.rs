//! The node's swap: whether there is any to doze in, and what of it dozing sandboxes may take.

use std::num::NonZeroU64;

use crate::args::SwapArgs;

/// Bytes; none: as much as there is.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SwapLimits {
    per_sandbox: Option<NonZeroU64>,
    per_node: Option<NonZeroU64>,
}

/// Bytes of all swap devices together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Swap {
    total: u64,
    used: u64,
}

impl From<&SwapArgs> for SwapLimits {
    fn from(args: &SwapArgs) -> Self {
        Self {
            per_sandbox: args.doze_swap_per_sandbox.bytes(),
            per_node: args.doze_swap_per_node.bytes(),
        }
    }
}

/// Whether this node has anywhere to push memory out to.
pub(crate) fn has_swap() -> Result<(), String> {
    SwapLimits::default().may_doze(|| None)
}

impl SwapLimits {
    /// Whether a sandbox that is awake may doze: all of its memory may go into swap. `working_set`, in bytes, is looked up where a limit
    /// asks for it.
    pub(crate) fn may_doze(&self, working_set: impl FnOnce() -> Option<u64>) -> Result<(), String> {
        let swaps = std::fs::read_to_string("/proc/swaps");
        let swaps = swaps.map_err(|error| format!("cannot read /proc/swaps: {error}"))?;
        let limited = self.per_sandbox.or(self.per_node).is_some();
        self.decide(swap(&swaps), limited.then(working_set))
    }

    fn decide(&self, swap: Swap, working_set: Option<Option<u64>>) -> Result<(), String> {
        if swap.total == 0 {
            return Err("this node has no swap".to_owned());
        }
        let Some(working_set) = working_set else {
            return Ok(());
        };
        let Some(memory) = working_set else {
            return Err("its memory is not counted, and swap is limited".to_owned());
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
        if let Some(limit) = self.per_node
            && memory.saturating_add(swap.used) > limit.get()
        {
            return Err(format!(
                "of the {} MiB of the node's swap that may be taken (--doze-swap-per-node) {} MiB are, and its memory is {} MiB",
                mebibytes(limit.get()),
                mebibytes(swap.used),
                mebibytes(memory)
            ));
        }
        Ok(())
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

    #[test]
    fn a_sandbox_dozes_where_there_is_swap_and_the_limits_leave_room_for_it() {
        let limits = |per_sandbox: u64, per_node: u64| SwapLimits {
            per_sandbox: NonZeroU64::new(per_sandbox * MIB),
            per_node: NonZeroU64::new(per_node * MIB),
        };
        let node = |used: u64| Swap {
            total: 1000 * MIB,
            used: used * MIB,
        };
        let told = |limits: SwapLimits, swap, memory: u64| {
            limits
                .decide(swap, Some(Some(memory * MIB)))
                .err()
                .unwrap_or_default()
        };
        assert_eq!(limits(0, 0).decide(node(0), None), Ok(()));
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
        assert!(told(limits(0, 500), node(400), 101).contains("of the 500 MiB"));
        assert!(
            limits(64, 500).decide(node(0), Some(None)).is_err(),
            "not counted"
        );
    }
}
