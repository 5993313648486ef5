//! Whether cgroups let their memory be swapped.
//!
//! - cgroup v2: a `memory.swap.max` of 0 lets nothing be swapped of the cgroup and of those below it.
//! - cgroup v1 has nothing by which a cgroup forbids that to those below it. `memory.memsw.limit_in_bytes` limits memory and swap together, and
//!   what goes from one to the other leaves their sum as it was, also where the limit equals `memory.limit_in_bytes`. Of `memory.swappiness` the
//!   kernel goes by that of the cgroup whose pages it looks at, and [`crate::reclaim`] sets it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::{Hierarchies, MemoryGroup};

/// What every cgroup of v2 has but the machine's root.
pub(crate) const MAX: &str = "memory.swap.max";

/// So deep may lie what a kubelet makes for its Pods (its `--cgroup-root` two deep) to be found.
const DEPTH: usize = 3;

/// A cgroup that forbids swap to itself and all below it, by its path below the hierarchy's root.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "memory.swap.max of the cgroup /{0} is 0, which forbids swap: lift it (systemd: MemorySwapMax=infinity; kubelet: memorySwap.swapBehavior: LimitedSwap)"
)]
pub struct Forbidden(PathBuf);

/// Whether neither the cgroup nor one above it forbids swap. The hierarchy's root counts: in a container that is a node, it is not the machine's.
pub fn allowed(hierarchies: &Hierarchies, relative: &Path) -> Result<(), Forbidden> {
    // Where cgroups do not limit memory, none forbids anything.
    let Some(MemoryGroup::V2 { root, .. }) = hierarchies.memory(relative) else {
        return Ok(());
    };
    let forbids = |group: &&Path| {
        let limit = std::fs::read_to_string(root.join(group).join(MAX));
        limit.is_ok_and(|limit| limit.trim() == "0")
    };
    match relative.ancestors().find(forbids) {
        Some(group) => Err(Forbidden(group.to_owned())),
        None => Ok(()),
    }
}

/// Whether this machine's Pods may be swapped, as far as that is the same for all of them. Several kubelets have a cgroup each for their Pods; who
/// asks does not know which of them is its own, so it is forbidden only where all of them forbid it.
pub fn allowed_to_pods(hierarchies: &Hierarchies) -> Result<(), Forbidden> {
    let Some(MemoryGroup::V2 { root, .. }) = hierarchies.memory(Path::new("")) else {
        return Ok(());
    };
    let groups = above_pods(&root);
    let told = groups.iter().map(|group| allowed(hierarchies, group));
    told.reduce(Result::or).unwrap_or(Ok(()))
}

/// The cgroups that kubelets make for all their Pods, in the order of their paths.
fn above_pods(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut level = vec![PathBuf::new()];
    for _ in 0..DEPTH {
        let next = level.iter().flat_map(|group| below(root, group));
        let (pods, others): (Vec<PathBuf>, Vec<PathBuf>) =
            next.partition(|group| is_above_pods(group));
        found.extend(pods);
        level = others;
    }
    found.sort();
    found
}

/// The cgroups directly below. None below that of a program that systemd runs: no kubelet puts its Pods there, but another machine in a container may.
fn below(root: &Path, group: &Path) -> Vec<PathBuf> {
    let kind = group.extension().and_then(OsStr::to_str);
    if matches!(kind, Some("service" | "scope")) {
        return Vec::new();
    }
    // One that is gone by now has none.
    let entries = std::fs::read_dir(root.join(group)).into_iter().flatten();
    entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| group.join(entry.file_name()))
        .collect()
}

/// `kubepods`; with the systemd driver `kubepods.slice`, and below a root of the kubelet's own `<root>-kubepods.slice`.
fn is_above_pods(group: &Path) -> bool {
    let name = group.file_name().unwrap_or_default().to_string_lossy();
    name == "kubepods" || name == "kubepods.slice" || name.ends_with("-kubepods.slice")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cgroups of v2, each with its limit of swap.
    fn v2_tree(limits: &[(&str, &str)]) -> (tempfile::TempDir, Hierarchies) {
        let root = tempfile::tempdir().expect("a directory");
        std::fs::write(root.path().join("cgroup.controllers"), "memory").expect("written");
        for (group, limit) in limits {
            set(root.path(), group, MAX, limit);
        }
        let found = Hierarchies::find(root.path()).expect("found");
        (root, found)
    }

    fn set(root: &Path, group: &str, file: &str, text: &str) {
        let group = root.join(group);
        std::fs::create_dir_all(&group).expect("made");
        std::fs::write(group.join(file), format!("{text}\n")).expect("written");
    }

    fn told(limits: &[(&str, &str)]) -> Option<String> {
        let (_root, hierarchies) = v2_tree(limits);
        let told = allowed_to_pods(&hierarchies);
        told.err().map(|error| error.to_string())
    }

    #[test]
    fn on_v2_a_cgroup_above_all_pods_that_forbids_swap_is_named_with_the_remedy() {
        let slices = |above: &'static str, pods: &'static str| {
            [
                ("kubelet.slice", above),
                ("kubelet.slice/kubelet-kubepods.slice", pods),
            ]
        };
        assert_eq!(told(&slices("max", "1048576")), None);
        let words = told(&slices("max", "0")).expect("forbidden");
        let named = "memory.swap.max of the cgroup /kubelet.slice/kubelet-kubepods.slice is 0";
        assert!(words.starts_with(named), "{words}");
        assert!(
            words.contains("memorySwap.swapBehavior: LimitedSwap"),
            "{words}"
        );
        let words = told(&slices("0", "max")).expect("forbidden");
        assert!(words.contains("cgroup /kubelet.slice is 0"), "{words}");
        for pods in ["kubepods", "kubepods.slice", "nodes/node-0/kubepods"] {
            let words = told(&[(pods, "0")]).expect("forbidden");
            assert!(words.contains(&format!("cgroup /{pods} is 0")), "{words}");
        }
        // The node is a container, and its root a cgroup like any other.
        let words = told(&[("", "0"), ("kubepods", "max")]).expect("forbidden");
        assert!(words.contains("cgroup / is 0"), "{words}");
    }

    #[test]
    fn what_forbids_swap_beside_or_below_is_not_said_of_all_pods() {
        for limits in [
            &[("kubepods.slice", "max"), ("system.slice", "0")][..],
            &[("kubepods", "max"), ("kubepods/besteffort", "0")],
            &[("kubepods", "max"), ("kubepods/pod1/kubepods", "0")],
            // Of another machine, in a container.
            &[
                ("a.slice/b.scope", "max"),
                ("a.slice/b.scope/kubepods", "0"),
            ],
            // Of another kubelet, which forbids it to its own Pods.
            &[("node-0/kubepods", "0"), ("node-1/kubepods", "max")],
            &[("user.slice", "0")],
            &[],
        ] {
            assert_eq!(told(limits), None, "{limits:?}");
        }
        let each = [("node-0/kubepods", "0"), ("node-1/kubepods", "0")];
        assert!(told(&each).is_some());
    }

    #[test]
    fn what_forbids_swap_above_one_pod_is_found() {
        let limits = [
            ("kubepods", "max"),
            ("kubepods/besteffort", "0"),
            ("kubepods/besteffort/pod1", "max"),
            ("kubepods/pod2", "max"),
        ];
        let (_root, hierarchies) = v2_tree(&limits);
        let allowed = |pod: &str| allowed(&hierarchies, Path::new(pod));
        assert_eq!(allowed("kubepods/pod2"), Ok(()));
        assert_eq!(allowed("kubepods/of-no-controller"), Ok(()));
        let named = Forbidden("kubepods/besteffort".into());
        assert_eq!(allowed("kubepods/besteffort/pod1"), Err(named));
    }

    #[test]
    fn on_v1_no_cgroup_forbids_swap_to_those_below_it() {
        let root = tempfile::tempdir().expect("a directory");
        set(root.path(), "memory", "cgroup.procs", "");
        for (file, text) in [
            ("memory.limit_in_bytes", "1048576"),
            ("memory.memsw.limit_in_bytes", "1048576"),
            ("memory.swappiness", "0"),
            ("memory.use_hierarchy", "1"),
        ] {
            set(root.path(), "memory/kubepods", file, text);
        }
        // The hybrid's own hierarchy of v2 has no memory controller.
        set(root.path(), "unified", "cgroup.controllers", "");
        set(root.path(), "unified", "cgroup.procs", "");
        set(root.path(), "unified/kubepods", MAX, "0");
        let hierarchies = Hierarchies::find(root.path()).expect("found");
        assert_eq!(allowed_to_pods(&hierarchies), Ok(()));
        assert_eq!(allowed(&hierarchies, Path::new("kubepods/pod1")), Ok(()));
    }
}
