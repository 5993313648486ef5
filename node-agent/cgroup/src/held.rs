//! The memory of a pod's processes, in main memory or swap, as the kernel counts it. An image of
//! the sandbox may have to contain all of it.

use std::path::Path;

use crate::{Hierarchies, MemoryGroup, counted, meminfo};

impl Hierarchies {
    /// Returns the bytes of the cgroup and the cgroups below it that no file on a disk backs. None
    /// if the kernel does not count all of them.
    ///
    /// `memory.stat` may be two seconds old (`mem_cgroup_flush_stats` of Linux; measured: 33 of 100
    /// MiB, for 1.9 s), so the counter of this moment counts too, less the file cache. Until the
    /// next summary, new file cache counts as memory.
    pub fn held(&self, relative: &Path) -> Option<u64> {
        let group = self.memory(relative)?;
        let stat = stat(&group)?;
        let summed = summed(&group, &stat, has_swap())?;
        Some(summed.max(counted_now(&group, &stat).unwrap_or(0)))
    }

    /// Returns the same bytes by `memory.stat` alone. Sandboxes that write files, such as their own
    /// image, do not enlarge this number.
    pub fn held_by_summary(&self, relative: &Path) -> Option<u64> {
        let group = self.memory(relative)?;
        summed(&group, &stat(&group)?, has_swap())
    }
}

fn has_swap() -> bool {
    meminfo::read().map_or(true, |memory| memory.swap_total > 0)
}

fn stat(group: &MemoryGroup) -> Option<String> {
    std::fs::read_to_string(group.path().join("memory.stat")).ok()
}

/// Returns the first of the counts that the text has.
fn first(stat: &str, keys: [&str; 2]) -> Option<u64> {
    keys.iter().find_map(|key| counted(stat, key))
}

/// Returns the bytes that no file on a disk backs, as the kernel has summed them up. If the kernel
/// does not count swap per cgroup, they are known only on a machine without swap.
fn summed(group: &MemoryGroup, stat: &str, has_swap: bool) -> Option<u64> {
    // On v1 only the keys with `total_` include the cgroups below.
    let anonymous = match group {
        MemoryGroup::V1(_) => first(stat, ["total_rss", "rss"]),
        MemoryGroup::V2 { .. } => counted(stat, "anon"),
    };
    let swapped = match group {
        MemoryGroup::V1(_) => first(stat, ["total_swap", "swap"]),
        MemoryGroup::V2 { group, .. } => number(&group.join("memory.swap.current")),
    };
    let swapped: u64 = swapped.or_else(|| (!has_swap).then_some(0))?;
    let sum = anonymous?.saturating_add(first(stat, ["total_shmem", "shmem"])?);
    Some(sum.saturating_add(swapped))
}

/// Returns the bytes by the kernel's counters of this moment, less the file cache on disks. The
/// kernel's own memory counts too.
fn counted_now(group: &MemoryGroup, stat: &str) -> Option<u64> {
    let path = group.path();
    let used = match group {
        // `memsw` is the sum of memory and swap.
        MemoryGroup::V1(_) => number(&path.join("memory.memsw.usage_in_bytes"))
            .or_else(|| number(&path.join("memory.usage_in_bytes")))?,
        MemoryGroup::V2 { .. } => {
            let swapped = number(&path.join("memory.swap.current")).unwrap_or(0);
            number(&path.join("memory.current"))?.saturating_add(swapped)
        }
    };
    // The kernel counts shared memory as cache, too.
    let cache = first(stat, ["total_cache", "file"])?;
    let on_disk = cache.saturating_sub(first(stat, ["total_shmem", "shmem"])?);
    Some(used.saturating_sub(on_disk))
}

fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "rss 1\nshmem 1\nswap 1\ntotal_cache 9000\ntotal_rss 100\ntotal_shmem 1000\ntotal_swap 30\n";
    const V2: &str = "anon 100\nfile 9000\nshmem 1000\n";

    fn group(v1: bool, files: &[(&str, &str)]) -> (tempfile::TempDir, MemoryGroup) {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).expect("written");
        }
        let path = dir.path().to_owned();
        let group = match v1 {
            true => MemoryGroup::V1(path),
            false => MemoryGroup::V2 {
                root: path.clone(),
                group: path,
            },
        };
        (dir, group)
    }

    fn summed_of(group: &MemoryGroup, has_swap: bool) -> Option<u64> {
        summed(group, &stat(group)?, has_swap)
    }

    fn now(group: &MemoryGroup) -> Option<u64> {
        counted_now(group, &stat(group)?)
    }

    #[test]
    fn swapped_and_unswapped_memory_counts_and_file_cache_does_not() {
        let (_dir, v1) = group(true, &[("memory.stat", V1)]);
        assert_eq!(summed_of(&v1, true), Some(1130));
        let files = [("memory.stat", V2), ("memory.swap.current", "30\n")];
        let (_dir, v2) = group(false, &files);
        assert_eq!(summed_of(&v2, true), Some(1130));
    }

    #[test]
    fn the_counters_of_this_moment_count_without_file_cache() {
        let current = ("memory.current", "50000\n");
        let swap = ("memory.swap.current", "30\n");
        let (_dir, v2) = group(false, &[("memory.stat", V2), current, swap]);
        assert_eq!(now(&v2), Some(50_030 - 8000));
        let (_dir, v2) = group(false, &[("memory.stat", V2), current]);
        assert_eq!(now(&v2), Some(50_000 - 8000));
        let usage = ("memory.usage_in_bytes", "50000\n");
        let memsw = ("memory.memsw.usage_in_bytes", "50030\n");
        let (_dir, v1) = group(true, &[("memory.stat", V1), usage, memsw]);
        assert_eq!(now(&v1), Some(50_030 - 8000));
        let (_dir, v1) = group(true, &[("memory.stat", V1), usage]);
        assert_eq!(now(&v1), Some(50_000 - 8000));
        let (_dir, none) = group(true, &[]);
        assert_eq!(now(&none), None);
    }

    #[test]
    fn swap_without_a_count_leaves_the_sum_unknown() {
        let (_dir, v2) = group(false, &[("memory.stat", V2)]);
        assert_eq!(summed_of(&v2, true), None);
        assert_eq!(summed_of(&v2, false), Some(1100));
        let without_swap = V1.replace("swap", "other");
        let (_dir, v1) = group(true, &[("memory.stat", &without_swap)]);
        assert_eq!(summed_of(&v1, true), None);
        assert_eq!(summed_of(&v1, false), Some(1100));
        let (_dir, none) = group(false, &[]);
        assert_eq!(summed_of(&none, false), None);
    }
}
