//! Pushes the memory of a paused sandbox from main memory into swap.
//!
//! The memory of a gVisor sandbox is one memfd; the memory of a virtual machine is a memfd or
//! anonymous. It is charged to the sandbox's cgroup, and the kernel can swap it. A paused sandbox
//! reads none of it back. A wake needs no action: pages return when they are touched. Pages in swap
//! stay there when the cgroup may not swap any more ([`swap::keep_in_memory`]).
//!
//! - cgroup v1 has no call for this. A limit of 4096 bytes has the same effect: the kernel first
//!   frees all memory that it can and then refuses the limit, because some memory is left. The old
//!   limit stays in force, and no process is killed.
//! - cgroup v2 has `memory.reclaim` (Linux 5.19). Each ancestor of the cgroup must allow swap.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use crate::swap::{self, Forbidden};
use crate::{self as cgroup, Hierarchies, MemoryGroup, counted, write};

/// Rounds of reclaim.
///
/// The kernel ends a round at the first scan that frees no page. Another round may free pages
/// nevertheless: the scan has often made 32 pages old, which the next scan frees; and while the
/// cgroup has a page of a file that is being written, the kernel scans pages of files only.
#[derive(Debug)]
struct Rounds {
    left: u32,
    fruitless_left: u32,
}

#[derive(Debug, PartialEq, Eq)]
enum Round {
    AtOnce,
    /// After this time. The kernel does not notify when its writes are done.
    After(Duration),
    Enough,
}

impl Rounds {
    const MOST: u32 = 64;
    /// Most rounds that free few pages.
    const MOST_FRUITLESS: u32 = 8;
    /// Least bytes in main memory that justify another round.
    const WORTH: u64 = 1 << 20;
    /// Pages of 4096 bytes that one scan makes old.
    const PAGES: u64 = 32;

    fn begin() -> Self {
        Self {
            left: Self::MOST,
            fruitless_left: Self::MOST_FRUITLESS,
        }
    }

    /// Returns the next round. `freed`: bytes that the last round freed; `swappable`: bytes that
    /// the kernel could still push out.
    fn next(&mut self, freed: u64, swappable: u64) -> Round {
        self.left -= 1;
        if self.left == 0 || swappable < Self::WORTH {
            return Round::Enough;
        }
        if freed >= Self::PAGES * 4096 / 2 {
            return Round::AtOnce;
        }
        self.fruitless_left -= 1;
        match self.fruitless_left {
            0 => Round::Enough,
            _ => Round::After(Duration::from_millis(5)),
        }
    }

    /// Waits until the next round. Returns false if there is none.
    fn wait_for_next(&mut self, group: &Path, freed: u64) -> bool {
        match self.next(freed, swappable(group)) {
            Round::AtOnce => true,
            Round::After(pause) => {
                std::thread::sleep(pause);
                true
            }
            Round::Enough => false,
        }
    }
}

/// Returns the bytes of the cgroup that are in main memory and could be in swap; 0 if the kernel
/// does not count them.
fn swappable(group: &Path) -> u64 {
    let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let lists = ["active_anon", "inactive_anon"];
    lists.iter().filter_map(|key| counted(&stat, key)).sum()
}

/// Error of pushing memory out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Cgroup(#[from] cgroup::Error),
    #[error("the kernel does not count the memory of cgroups")]
    NoController,
    #[error(transparent)]
    Forbidden(#[from] Forbidden),
    #[error("cannot reclaim the memory of {path} (cgroup v2 needs Linux 5.19 or later)")]
    Refused {
        path: PathBuf,
        #[source]
        source: cgroup::Error,
    },
    #[error("{path} does not hold a number")]
    NoNumber { path: PathBuf },
}

impl Error {
    /// Returns the reason for conditions and metrics, in CamelCase.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Forbidden(_) => "SwapForbidden",
            _ => "ReclaimFailed",
        }
    }
}

/// The cgroup's main memory before and after a reclaim, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Reclaimed {
    pub bytes_before: u64,
    pub bytes_after: u64,
}

/// Owner of the cgroup's settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// Torpor made the cgroup. A reclaim may change its settings, and afterwards
    /// [`swap::keep_in_memory`] applies.
    Ours,
    /// Another program made the cgroup. A reclaim restores the settings that it changes, and obeys
    /// a setting that forbids swap.
    Others,
}

/// Pushes out as much of the cgroup's memory as the kernel can. The call may be repeated.
pub fn reclaim(
    hierarchies: &Hierarchies,
    relative: &Path,
    whose: Whose,
) -> Result<Reclaimed, Error> {
    let done = match hierarchies.memory(relative).ok_or(Error::NoController)? {
        MemoryGroup::V1(group) => reclaim_v1(&group, whose),
        MemoryGroup::V2 { group, .. } => lift_and_reclaim(hierarchies, relative, &group, whose),
    };
    if whose == Whose::Ours {
        // The limit is set after a failure, too. If this process dies before, the next doze sets
        // it.
        swap::keep_in_memory(hierarchies, relative)?;
    }
    done
}

/// Lifts the cgroup's limit of swap on v2 and reclaims its memory.
fn lift_and_reclaim(
    hierarchies: &Hierarchies,
    relative: &Path,
    group: &Path,
    whose: Whose,
) -> Result<Reclaimed, Error> {
    let own = group.join(swap::MAX);
    // Other programs made the cgroups above.
    if whose == Whose::Ours && own.exists() {
        write(&own, "max")?;
    }
    swap::allowed(hierarchies, relative)?;
    reclaim_v2(group)
}

/// Files of v1.
const USAGE: &str = "memory.usage_in_bytes";
const LIMIT: &str = "memory.limit_in_bytes";

/// Writes an impossible limit: the kernel pushes out all that it can before it refuses the limit.
/// Returns the bytes that are left in main memory. `limited`: the cgroup's limit.
fn push_out(group: &Path, limited: u64, bytes: u64) -> Result<u64, Error> {
    let limit = &group.join(LIMIT);
    let mut left = bytes;
    let mut rounds = Rounds::begin();
    loop {
        match write(limit, "4096") {
            Err(error) if refused_with(&error, ErrorKind::ResourceBusy) => {}
            // The cgroup has no memory, so that the kernel has accepted the limit.
            Ok(()) => write(limit, &limited.to_string())?,
            Err(source) => {
                return Err(Error::Refused {
                    path: limit.to_owned(),
                    source,
                });
            }
        }
        let before = left;
        left = number(&group.join(USAGE))?;
        if !rounds.wait_for_next(group, before.saturating_sub(left)) {
            return Ok(left);
        }
    }
}

fn reclaim_v1(group: &Path, whose: Whose) -> Result<Reclaimed, Error> {
    let bytes_before = number(&group.join(USAGE))?;
    let limited = number(&group.join(LIMIT))?;
    // The inherited value may forbid swap.
    let swappiness = group.join(swap::SWAPPINESS);
    let previous = number(&swappiness)?;
    write(&swappiness, "100")?;
    let bytes_after = push_out(group, limited, bytes_before);
    if whose == Whose::Others {
        write(&swappiness, &previous.to_string())?;
    }
    Ok(Reclaimed {
        bytes_before,
        bytes_after: bytes_after?,
    })
}

fn reclaim_v2(group: &Path) -> Result<Reclaimed, Error> {
    let usage = group.join("memory.current");
    let bytes_before = number(&usage)?;
    let mut left = bytes_before;
    let mut rounds = Rounds::begin();
    loop {
        let path = group.join("memory.reclaim");
        let written = write(&path, &left.to_string());
        let before = left;
        left = number(&usage)?;
        match written {
            // The kernel freed less than requested, as always: some memory is in use.
            Err(error) if refused_with(&error, ErrorKind::WouldBlock) => {}
            Ok(()) => {}
            Err(source) => return Err(Error::Refused { path, source }),
        }
        if !rounds.wait_for_next(group, before.saturating_sub(left)) {
            break;
        }
    }
    Ok(Reclaimed {
        bytes_before,
        bytes_after: left,
    })
}

fn refused_with(error: &cgroup::Error, kind: ErrorKind) -> bool {
    matches!(error, cgroup::Error::Write { source, .. } if source.kind() == kind)
}

fn number(path: &Path) -> Result<u64, Error> {
    let text = std::fs::read_to_string(path).map_err(|source| cgroup::Error::Read {
        path: path.into(),
        source,
    })?;
    let parsed = text.trim().parse();
    parsed.map_err(|_| Error::NoNumber { path: path.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of rounds and of pauses, from the bytes freed and the bytes left after
    /// each round.
    fn count_rounds(results: impl IntoIterator<Item = (u64, u64)>) -> (usize, usize) {
        let mut rounds = Rounds::begin();
        let (mut done, mut pauses) = (0, 0);
        for (freed, swappable) in results {
            done += 1;
            match rounds.next(freed, swappable) {
                Round::AtOnce => {}
                Round::After(_) => pauses += 1,
                Round::Enough => break,
            }
        }
        (done, pauses)
    }

    #[test]
    fn a_reclaim_is_repeated_while_memory_is_left_up_to_a_limit_of_rounds() {
        const MIB: u64 = 1 << 20;
        // Measured on a Python program of 28 MB just after its save: 32 pages per round, then none,
        // and a moment later all of them.
        let few = (128 << 10, 5 * MIB);
        let measured = [(20 * MIB, 6 * MIB), few, few, (0, 5 * MIB), (5 * MIB, 0)];
        assert_eq!(count_rounds(measured), (5, 1));
        assert_eq!(count_rounds([(0, MIB / 2)]), (1, 0), "nothing is left");
        let stuck = std::iter::repeat((0, 9 * MIB));
        let most = Rounds::MOST_FRUITLESS as usize;
        assert_eq!(count_rounds(stuck), (most, most - 1));
        let endless = std::iter::repeat((MIB, 9 * MIB));
        assert_eq!(count_rounds(endless), (Rounds::MOST as usize, 0));
    }

    #[test]
    fn swappable_memory_does_not_include_file_cache() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(swappable(dir.path()), 0, "nobody says");
        let stat =
            "anon 9\ninactive_anon 100\nactive_anon 20\ninactive_file 7\ntotal_active_anon 5\n";
        std::fs::write(dir.path().join("memory.stat"), stat).expect("written");
        assert_eq!(swappable(dir.path()), 120);
    }

    fn v2_tree() -> (tempfile::TempDir, Hierarchies) {
        let root = tempfile::tempdir().expect("a directory");
        std::fs::write(root.path().join("cgroup.controllers"), "memory").expect("written");
        let leaf = root.path().join("kubepods/pod1/leaf");
        std::fs::create_dir_all(&leaf).expect("made");
        for (file, text) in [
            ("memory.current", "5000000\n"),
            ("memory.reclaim", ""),
            ("memory.swap.max", "0\n"),
        ] {
            std::fs::write(leaf.join(file), text).expect("written");
        }
        let found = Hierarchies::find(root.path()).expect("found");
        (root, found)
    }

    #[test]
    fn on_v2_a_reclaim_of_all_memory_lifts_the_swap_limit_for_its_duration() {
        let (root, hierarchies) = v2_tree();
        // State during the reclaim. It stays like this if the process is killed.
        let relative = Path::new("kubepods/pod1/leaf");
        let group = root.path().join(relative);
        lift_and_reclaim(&hierarchies, relative, &group, Whose::Ours).expect("reclaimed");
        let limit = std::fs::read_to_string(group.join("memory.swap.max")).expect("read");
        assert_eq!(limit, "max");
        let leaf = Path::new("kubepods/pod1/leaf");
        let done = reclaim(&hierarchies, leaf, Whose::Ours).expect("reclaimed");
        assert_eq!(done.bytes_before, 5_000_000);
        let read = |file: &str| std::fs::read_to_string(root.path().join(leaf).join(file));
        let after = read("memory.swap.max").expect("read");
        assert_eq!(after, "0", "no more is swapped once it is awake");
        assert_eq!(read("memory.reclaim").expect("read"), "5000000");
    }

    #[test]
    fn a_pod_that_may_not_swap_is_named() {
        let (root, hierarchies) = v2_tree();
        let limit = root.path().join("kubepods/pod1/memory.swap.max");
        std::fs::write(&limit, "0\n").expect("written");
        let leaf = Path::new("kubepods/pod1/leaf");
        let error = reclaim(&hierarchies, leaf, Whose::Ours).expect_err("refused");
        assert_eq!(error.reason(), "SwapForbidden");
        let named = "memory.swap.max of the cgroup /kubepods/pod1 is 0";
        assert!(error.to_string().contains(named), "{error}");
    }

    #[test]
    fn on_v1_the_sandbox_is_swapped_by_its_doze_alone() {
        for (whose, left) in [(Whose::Ours, "0"), (Whose::Others, "60")] {
            let root = tempfile::tempdir().expect("a directory");
            let leaf = root.path().join("memory/pod1/leaf");
            std::fs::create_dir_all(&leaf).expect("made");
            std::fs::write(root.path().join("memory/cgroup.procs"), "").expect("written");
            for (file, text) in [
                (USAGE, "0\n"),
                (LIMIT, "9000000\n"),
                (swap::SWAPPINESS, "60\n"),
            ] {
                std::fs::write(leaf.join(file), text).expect("written");
            }
            let hierarchies = Hierarchies::find(root.path()).expect("found");
            reclaim(&hierarchies, Path::new("pod1/leaf"), whose).expect("reclaimed");
            let read = |file| std::fs::read_to_string(leaf.join(file)).expect("read");
            assert_eq!(read(swap::SWAPPINESS), left, "{whose:?}");
            assert_eq!(read(LIMIT), "9000000");
        }
    }

    #[test]
    fn a_swap_limit_in_a_foreign_cgroup_is_obeyed_and_named() {
        let (root, hierarchies) = v2_tree();
        let leaf = Path::new("kubepods/pod1/leaf");
        let error = reclaim(&hierarchies, leaf, Whose::Others).expect_err("refused");
        let named = "the cgroup /kubepods/pod1/leaf is 0";
        assert!(error.to_string().contains(named), "{error}");
        let limit = root.path().join(leaf).join("memory.swap.max");
        assert_eq!(std::fs::read_to_string(&limit).expect("read"), "0\n");
        std::fs::write(&limit, "1000000\n").expect("written");
        reclaim(&hierarchies, leaf, Whose::Others).expect("reclaimed");
        assert_eq!(std::fs::read_to_string(&limit).expect("read"), "1000000\n");
    }
}
