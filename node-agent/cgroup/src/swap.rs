//! Whether cgroups let their memory be swapped, and how much of a sandbox' may be while it is awake: what the kubelet gives its containers, which is nothing by
//! default. Else one that needs more than its limit would fill the swap that others doze in. [`crate::reclaim`] lifts that while it pushes memory out; what
//! is in swap then stays there.
//!
//! - cgroup v2: a `memory.swap.max` of 0 lets nothing be swapped of the cgroup and of those below it.
//! - cgroup v1 has nothing by which a cgroup forbids that to those below it. `memory.memsw.limit_in_bytes` limits memory and swap together, and
//!   what goes from one to the other leaves their sum as it was, also where the limit equals `memory.limit_in_bytes`. Of `memory.swappiness` the
//!   kernel goes by that of the cgroup whose pages it looks at, and [`crate::reclaim`] sets it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::{Error, Hierarchies, MemoryGroup, SANDBOX_PREFIX, write};

/// What every cgroup of v2 has but the machine's root.
pub(crate) const MAX: &str = "memory.swap.max";

/// Of v1: 0 lets no memory of the cgroup be swapped for its limits' sake, and for the node's only when nothing else is left.
pub(crate) const SWAPPINESS: &str = "memory.swappiness";

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

/// Sets how many bytes of a container's own cgroup may be in swap, as its spec writes it (v2).
pub fn limit(hierarchies: &Hierarchies, container: &Path, bytes: &str) -> Result<(), Error> {
    match hierarchies.memory(container) {
        Some(MemoryGroup::V2 { group, .. }) => write_where(&group.join(MAX), bytes),
        _ => Ok(()),
    }
}

/// Lets no more of a sandbox' leaf be swapped than the containers beside it may have together. Called when either is made, and after a reclaim.
pub fn keep_in_memory(hierarchies: &Hierarchies, leaf: &Path) -> Result<(), Error> {
    match hierarchies.memory(leaf) {
        Some(MemoryGroup::V1(group)) => write_where(&group.join(SWAPPINESS), "0"),
        Some(MemoryGroup::V2 { group, .. }) => {
            write_where(&group.join(MAX), &of_containers(&group).to_string())
        }
        None => Ok(()),
    }
}

/// Bytes of swap that the containers' cgroups beside this one may have; nothing for those of which it is not said.
fn of_containers(leaf: &Path) -> u64 {
    let entries = leaf.parent().map(std::fs::read_dir);
    let beside = entries.into_iter().flatten().flatten();
    let limits = beside.filter_map(Result::ok).filter_map(|entry| {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with(SANDBOX_PREFIX) {
            return None;
        }
        let limit = std::fs::read_to_string(entry.path().join(MAX)).ok()?;
        limit.trim().parse::<u64>().ok()
    });
    limits.fold(0, u64::saturating_add)
}

/// The machine's root, and a cgroup without the controller, have no such file.
fn write_where(file: &Path, text: &str) -> Result<(), Error> {
    match file.exists() {
        true => write(file, text),
        false => Ok(()),
    }
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

    fn limit_of(root: &Path, group: &str, file: &str) -> String {
        let text = std::fs::read_to_string(root.join(group).join(file)).expect("read");
        text.trim().to_owned()
    }

    #[test]
    fn an_awake_sandbox_has_no_swap_but_what_the_kubelet_gives_its_containers() {
        let leaf = "kubepods/pod1/torpor-1";
        let limits = [
            (leaf, "max"),
            ("kubepods/pod1/pause", "max"),
            ("kubepods/pod1/a", "max"),
            ("kubepods/pod1/b", "max"),
            // Of the sandbox that was there before.
            ("kubepods/pod1/torpor-0", "4096"),
            ("kubepods/pod2/a", "4096"),
        ];
        let (root, hierarchies) = v2_tree(&limits);
        let kept = || {
            keep_in_memory(&hierarchies, Path::new(leaf)).expect("written");
            limit_of(root.path(), leaf, MAX)
        };
        assert_eq!(kept(), "0");
        let limit = |container: &str, bytes| {
            let container = Path::new("kubepods/pod1").join(container);
            limit(&hierarchies, &container, bytes).expect("written");
        };
        limit("a", "0");
        assert_eq!(kept(), "0");
        limit("a", "1048576");
        limit("b", "2097152");
        assert_eq!(kept(), "3145728");
        assert_eq!(limit_of(root.path(), "kubepods/pod1/pause", MAX), "max");
    }

    #[test]
    fn where_cgroups_do_not_limit_swap_nothing_is_set() {
        let root = tempfile::tempdir().expect("a directory");
        std::fs::write(root.path().join("cgroup.controllers"), "cpu").expect("written");
        let leaf = Path::new("pod1/torpor-1");
        std::fs::create_dir_all(root.path().join(leaf)).expect("made");
        let hierarchies = Hierarchies::find(root.path()).expect("found");
        keep_in_memory(&hierarchies, leaf).expect("nothing to do");
        limit(&hierarchies, leaf, "0").expect("nothing to do");
        assert!(!root.path().join(leaf).join(MAX).exists());
    }

    #[test]
    fn on_v1_an_awake_sandbox_is_not_swapped_and_no_container_is_touched() {
        let root = tempfile::tempdir().expect("a directory");
        set(root.path(), "memory", "cgroup.procs", "");
        for group in ["memory/pod1/torpor-1", "memory/pod1/a"] {
            set(root.path(), group, SWAPPINESS, "60");
        }
        let hierarchies = Hierarchies::find(root.path()).expect("found");
        keep_in_memory(&hierarchies, Path::new("pod1/torpor-1")).expect("written");
        limit(&hierarchies, Path::new("pod1/a"), "0").expect("nothing to do");
        let told = ["memory/pod1/torpor-1", "memory/pod1/a"];
        let told = told.map(|group| limit_of(root.path(), group, SWAPPINESS));
        assert_eq!(told, ["0", "60"]);
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
