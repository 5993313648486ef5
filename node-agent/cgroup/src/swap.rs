//! Limits of swap: cgroups that forbid swap, and the limit of an awake sandbox.
//!
//! An awake sandbox may use as much swap as the kubelet gives its containers, which is none by
//! default. Otherwise a sandbox that needs more memory than its limit would fill the swap that
//! dozing sandboxes need. [`crate::reclaim`] lifts the limit while it pushes memory out. Pages in
//! swap stay there afterwards.
//!
//! - cgroup v2: `memory.swap.max` of 0 forbids swap to the cgroup and all cgroups below it.
//! - cgroup v1: a cgroup cannot forbid swap to the cgroups below it. `memory.memsw.limit_in_bytes`
//!   limits the sum of memory and swap, which stays the same when a page is swapped, even if the
//!   limit equals `memory.limit_in_bytes`. `memory.swappiness` applies to the pages of its own
//!   cgroup, and [`crate::reclaim`] sets it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::{Error, Hierarchies, MemoryGroup, SANDBOX_PREFIX, write};

/// v2's file with the limit of swap. Every cgroup but the machine's root has one.
pub(crate) const MAX: &str = "memory.swap.max";

/// v1's file for the use of swap. With 0 the kernel swaps no memory because of the cgroup's limits,
/// and because of the node's shortage only as a last resort.
pub(crate) const SWAPPINESS: &str = "memory.swappiness";

/// Levels that are searched for a kubelet's cgroup for Pods: its `--cgroup-root` may be two levels
/// deep.
const DEPTH: usize = 3;

/// Error: this cgroup forbids swap to itself and all cgroups below it. The path is relative to the
/// hierarchy's root.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "memory.swap.max of the cgroup /{0} is 0, which forbids swap: lift it (systemd: MemorySwapMax=infinity; kubelet: memorySwap.swapBehavior: LimitedSwap)"
)]
pub struct Forbidden(PathBuf);

/// Returns an error if the cgroup or a cgroup above it forbids swap. The hierarchy's root is
/// checked, too: if the node is a container, that root is not the machine's.
pub fn allowed(hierarchies: &Hierarchies, relative: &Path) -> Result<(), Forbidden> {
    // Without v2's memory controller no cgroup forbids swap.
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

/// Returns an error if swap is forbidden to all of this machine's Pods. Each kubelet on the machine
/// has its own cgroup for its Pods, and the caller cannot tell which one belongs to its node. Swap
/// is therefore forbidden only if all of these cgroups forbid it.
pub fn allowed_to_pods(hierarchies: &Hierarchies) -> Result<(), Forbidden> {
    let Some(MemoryGroup::V2 { root, .. }) = hierarchies.memory(Path::new("")) else {
        return Ok(());
    };
    let groups = above_pods(&root);
    let results = groups.iter().map(|group| allowed(hierarchies, group));
    results.reduce(Result::or).unwrap_or(Ok(()))
}

/// Sets the limit of swap of a container's own cgroup (v2). `bytes` is the limit's text in the
/// spec.
pub fn limit(hierarchies: &Hierarchies, container: &Path, bytes: &str) -> Result<(), Error> {
    match hierarchies.memory(container) {
        Some(MemoryGroup::V2 { group, .. }) => write_if_there(&group.join(MAX), bytes),
        _ => Ok(()),
    }
}

/// Limits the swap of a sandbox's leaf cgroup to the sum of its containers' limits. The caller does
/// this when it makes the leaf or a container's cgroup, and after a reclaim.
pub fn keep_in_memory(hierarchies: &Hierarchies, leaf: &Path) -> Result<(), Error> {
    match hierarchies.memory(leaf) {
        Some(MemoryGroup::V1(group)) => write_if_there(&group.join(SWAPPINESS), "0"),
        Some(MemoryGroup::V2 { group, .. }) => {
            write_if_there(&group.join(MAX), &containers_limit(&group).to_string())
        }
        None => Ok(()),
    }
}

/// Returns the sum of the limits of swap of the containers' cgroups beside the leaf, in bytes. A
/// cgroup without a number as its limit counts 0.
fn containers_limit(leaf: &Path) -> u64 {
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

/// Writes the file if it exists. The machine's root and a cgroup without the memory controller have
/// no such file.
fn write_if_there(file: &Path, text: &str) -> Result<(), Error> {
    match file.exists() {
        true => write(file, text),
        false => Ok(()),
    }
}

/// Returns the cgroups that kubelets make for all their Pods, sorted by path.
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

/// Returns the cgroups directly below `group`; none below a service or scope of systemd. No kubelet
/// makes its Pods there, but a kubelet of another machine in a container may.
fn below(root: &Path, group: &Path) -> Vec<PathBuf> {
    let kind = group.extension().and_then(OsStr::to_str);
    if matches!(kind, Some("service" | "scope")) {
        return Vec::new();
    }
    // A cgroup that does not exist any more has no cgroups below.
    let entries = std::fs::read_dir(root.join(group)).into_iter().flatten();
    entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| group.join(entry.file_name()))
        .collect()
}

/// Reports whether a kubelet made the cgroup for its Pods: `kubepods`; with the systemd driver
/// `kubepods.slice`, or `<root>-kubepods.slice` below a `--cgroup-root`.
fn is_above_pods(group: &Path) -> bool {
    let name = group.file_name().unwrap_or_default().to_string_lossy();
    name == "kubepods" || name == "kubepods.slice" || name.ends_with("-kubepods.slice")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes cgroups of v2, each with its limit of swap.
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

    fn refusal(limits: &[(&str, &str)]) -> Option<String> {
        let (_root, hierarchies) = v2_tree(limits);
        let result = allowed_to_pods(&hierarchies);
        result.err().map(|error| error.to_string())
    }

    #[test]
    fn on_v2_a_cgroup_above_all_pods_that_forbids_swap_is_named_with_the_remedy() {
        let slices = |above: &'static str, pods: &'static str| {
            [
                ("kubelet.slice", above),
                ("kubelet.slice/kubelet-kubepods.slice", pods),
            ]
        };
        assert_eq!(refusal(&slices("max", "1048576")), None);
        let words = refusal(&slices("max", "0")).expect("forbidden");
        let named = "memory.swap.max of the cgroup /kubelet.slice/kubelet-kubepods.slice is 0";
        assert!(words.starts_with(named), "{words}");
        assert!(
            words.contains("memorySwap.swapBehavior: LimitedSwap"),
            "{words}"
        );
        let words = refusal(&slices("0", "max")).expect("forbidden");
        assert!(words.contains("cgroup /kubelet.slice is 0"), "{words}");
        for pods in ["kubepods", "kubepods.slice", "nodes/node-0/kubepods"] {
            let words = refusal(&[(pods, "0")]).expect("forbidden");
            assert!(words.contains(&format!("cgroup /{pods} is 0")), "{words}");
        }
        // The node is a container, and its root is an ordinary cgroup.
        let words = refusal(&[("", "0"), ("kubepods", "max")]).expect("forbidden");
        assert!(words.contains("cgroup / is 0"), "{words}");
    }

    #[test]
    fn a_swap_limit_beside_or_below_is_not_reported_for_all_pods() {
        for limits in [
            &[("kubepods.slice", "max"), ("system.slice", "0")][..],
            &[("kubepods", "max"), ("kubepods/besteffort", "0")],
            &[("kubepods", "max"), ("kubepods/pod1/kubepods", "0")],
            // The kubelet of another machine in a container.
            &[
                ("a.slice/b.scope", "max"),
                ("a.slice/b.scope/kubepods", "0"),
            ],
            // Another kubelet that forbids swap to its own Pods.
            &[("node-0/kubepods", "0"), ("node-1/kubepods", "max")],
            &[("user.slice", "0")],
            &[],
        ] {
            assert_eq!(refusal(limits), None, "{limits:?}");
        }
        let each = [("node-0/kubepods", "0"), ("node-1/kubepods", "0")];
        assert!(refusal(&each).is_some());
    }

    #[test]
    fn a_swap_limit_above_one_pod_is_found() {
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
    fn an_awake_sandbox_has_only_the_swap_that_the_kubelet_gives_its_containers() {
        let leaf = "kubepods/pod1/torpor-1";
        let limits = [
            (leaf, "max"),
            ("kubepods/pod1/pause", "max"),
            ("kubepods/pod1/a", "max"),
            ("kubepods/pod1/b", "max"),
            // The leaf of the Pod's previous sandbox.
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
        let groups = ["memory/pod1/torpor-1", "memory/pod1/a"];
        let values = groups.map(|group| limit_of(root.path(), group, SWAPPINESS));
        assert_eq!(values, ["0", "60"]);
    }

    #[test]
    fn on_v1_no_cgroup_forbids_swap_to_cgroups_below_it() {
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
        // In a hybrid the hierarchy of v2 has no memory controller.
        set(root.path(), "unified", "cgroup.controllers", "");
        set(root.path(), "unified", "cgroup.procs", "");
        set(root.path(), "unified/kubepods", MAX, "0");
        let hierarchies = Hierarchies::find(root.path()).expect("found");
        assert_eq!(allowed_to_pods(&hierarchies), Ok(()));
        assert_eq!(allowed(&hierarchies, Path::new("kubepods/pod1")), Ok(()));
    }
}
