//! The memory of a pod's processes, in main memory or swap, as the kernel counts it. An image of
//! the sandbox may have to contain all of it.

use std::path::Path;

use crate::{Hierarchies, MemoryGroup, counted, meminfo};

impl Hierarchies {
    /// Returns the bytes of the cgroup and the cgroups below it that no file on a disk backs. None
    /// if the kernel does not count all of them.
    pub fn held(&self, relative: &Path) -> Option<u64> {
        let has_swap = meminfo::read().map_or(true, |memory| memory.swap_total > 0);
        held(&self.memory(relative)?, has_swap)
    }

    /// Returns a number of bytes that [`Self::held`] does not exceed. It includes file cache, and
    /// is the kernel's counter of this moment: `memory.stat` may be two seconds old
    /// (`mem_cgroup_flush_stats` in Linux; measured: 33 of 100 MiB, for 1.9 s).
    pub fn held_at_most(&self, relative: &Path) -> Option<u64> {
        held_at_most(&self.memory(relative)?)
    }
}

fn held_at_most(group: &MemoryGroup) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        let text = std::fs::read_to_string(group.path().join(name)).ok()?;
        text.trim().parse().ok()
    };
    match group {
        // `memsw` is the sum of memory and swap.
        MemoryGroup::V1(_) => {
            number("memory.memsw.usage_in_bytes").or_else(|| number("memory.usage_in_bytes"))
        }
        MemoryGroup::V2 { .. } => {
            let swapped = number("memory.swap.current").unwrap_or(0);
            Some(number("memory.current")?.saturating_add(swapped))
        }
    }
}

/// Returns the bytes that no file on a disk backs. If the kernel does not count swap per cgroup,
/// they are known only on a machine without swap.
fn held(group: &MemoryGroup, has_swap: bool) -> Option<u64> {
    let stat = std::fs::read_to_string(group.path().join("memory.stat")).ok()?;
    let first = |keys: [&str; 2]| keys.iter().find_map(|key| counted(&stat, key));
    // On v1 only the keys with `total_` include the cgroups below.
    let anonymous = match group {
        MemoryGroup::V1(_) => first(["total_rss", "rss"]),
        MemoryGroup::V2 { .. } => counted(&stat, "anon"),
    };
    let shared = first(["total_shmem", "shmem"]);
    let swapped = match group {
        MemoryGroup::V1(_) => first(["total_swap", "swap"]),
        MemoryGroup::V2 { group, .. } => {
            let text = std::fs::read_to_string(group.join("memory.swap.current"));
            text.ok().and_then(|text| text.trim().parse().ok())
        }
    };
    let swapped: u64 = swapped.or_else(|| (!has_swap).then_some(0))?;
    let sum = anonymous?.saturating_add(shared?);
    Some(sum.saturating_add(swapped))
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

    #[test]
    fn swapped_and_unswapped_memory_counts_and_file_cache_does_not() {
        let (_dir, v1) = group(true, &[("memory.stat", V1)]);
        assert_eq!(held(&v1, true), Some(1130));
        let files = [("memory.stat", V2), ("memory.swap.current", "30\n")];
        let (_dir, v2) = group(false, &files);
        assert_eq!(held(&v2, true), Some(1130));
    }

    #[test]
    fn the_counters_of_this_moment_include_file_cache_and_swap() {
        let files = [
            ("memory.current", "5000\n"),
            ("memory.swap.current", "30\n"),
        ];
        let (_dir, v2) = group(false, &files);
        assert_eq!(held_at_most(&v2), Some(5030));
        let (_dir, v2) = group(false, &files[..1]);
        assert_eq!(held_at_most(&v2), Some(5000));
        let memsw = ("memory.memsw.usage_in_bytes", "5030\n");
        let files = [("memory.usage_in_bytes", "5000\n"), memsw];
        let (_dir, v1) = group(true, &files);
        assert_eq!(held_at_most(&v1), Some(5030));
        let (_dir, v1) = group(true, &files[..1]);
        assert_eq!(held_at_most(&v1), Some(5000));
        let (_dir, none) = group(true, &[]);
        assert_eq!(held_at_most(&none), None);
    }

    #[test]
    fn swap_without_a_count_leaves_the_sum_unknown() {
        let (_dir, v2) = group(false, &[("memory.stat", V2)]);
        assert_eq!(held(&v2, true), None);
        assert_eq!(held(&v2, false), Some(1100));
        let without_swap = V1.replace("swap", "other");
        let (_dir, v1) = group(true, &[("memory.stat", &without_swap)]);
        assert_eq!(held(&v1, true), None);
        assert_eq!(held(&v1, false), Some(1100));
        let (_dir, none) = group(false, &[]);
        assert_eq!(held(&none, false), None);
    }
}
