//! Pushing the memory of a paused sandbox out of main memory, into swap.
//!
//! The memory of a gVisor sandbox is one memfd, that of a virtual machine is a memfd or anonymous, charged to its cgroup; the kernel
//! swaps either, and a sandbox that stands still brings none of it back. Nothing has to be put back at the wake: pages return as they
//! are touched. What is in swap stays there when the cgroup may swap no more ([`swap::keep_in_memory`]).
//!
//! - cgroup v1 has no call for it. A limit of almost nothing does it: the kernel frees what it can to make room for the limit, and
//!   then refuses it, because some memory is left. So the limit stays what it was, and no process is ever killed for it.
//! - cgroup v2 has `memory.reclaim` (Linux 5.19). Each ancestor must let it swap.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use crate::swap::{self, Forbidden};
use crate::{self as cgroup, Hierarchies, MemoryGroup, counted, write};

/// Rounds of reclaim. The kernel ends each at the first look that frees no page, which says little: such a look has often made pages old
/// that the next one takes, 32 at a time, and where the cgroup holds a page of a file that is being written, the kernel looks at files alone.
#[derive(Debug)]
struct Rounds {
    left: u32,
    patience: u32,
}

#[derive(Debug, PartialEq, Eq)]
enum Round {
    AtOnce,
    /// Nothing can be waited for: the kernel does not tell when it has written.
    After(Duration),
    Enough,
}

impl Rounds {
    const MOST: u32 = 64;
    const PATIENCE: u32 = 8;
    /// Less than this is not worth a wait.
    const WORTH: u64 = 1 << 20;
    /// Of 4096 bytes; what one look makes old.
    const PAGES: u64 = 32;

    fn begin() -> Self {
        Self {
            left: Self::MOST,
            patience: Self::PATIENCE,
        }
    }

    /// What follows a round that freed so many bytes; `left`: bytes that the kernel could still push out.
    fn next(&mut self, freed: u64, left: u64) -> Round {
        self.left -= 1;
        if self.left == 0 || left < Self::WORTH {
            return Round::Enough;
        }
        if freed >= Self::PAGES * 4096 / 2 {
            return Round::AtOnce;
        }
        self.patience -= 1;
        match self.patience {
            0 => Round::Enough,
            _ => Round::After(Duration::from_millis(5)),
        }
    }

    /// Waits, if that is what follows. Whether there is another round.
    fn go_on(&mut self, group: &Path, freed: u64) -> bool {
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

/// Bytes of the cgroup that are in main memory and could be in swap; nothing where the kernel does not say.
fn swappable(group: &Path) -> u64 {
    let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let lists = ["active_anon", "inactive_anon"];
    lists.iter().filter_map(|key| counted(&stat, key)).sum()
}

/// Why memory could not be pushed out.
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
    /// CamelCase, for conditions and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Forbidden(_) => "SwapForbidden",
            _ => "ReclaimFailed",
        }
    }
}

/// Bytes of main memory that the cgroup had and has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Reclaimed {
    pub bytes_before: u64,
    pub bytes_after: u64,
}

/// Who has made the cgroup, and so says how it is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// It may be set as is best for this, and is kept in memory afterwards.
    Ours,
    /// What is set stays: what is changed for the moment is put back, and what forbids is obeyed.
    Others,
}

/// Pushes out what the kernel can of the cgroup's memory. Twice does no harm.
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
        // Also where it failed. Of who dies before this, the next doze puts it right.
        swap::keep_in_memory(hierarchies, relative)?;
    }
    done
}

/// On v2.
fn lift_and_reclaim(
    hierarchies: &Hierarchies,
    relative: &Path,
    group: &Path,
    whose: Whose,
) -> Result<Reclaimed, Error> {
    let own = group.join(swap::MAX);
    // Those above it are not ours.
    if whose == Whose::Ours && own.exists() {
        write(&own, "max")?;
    }
    swap::allowed(hierarchies, relative)?;
    reclaim_v2(group)
}

/// Of v1.
const USAGE: &str = "memory.usage_in_bytes";
const LIMIT: &str = "memory.limit_in_bytes";

/// Asks for a limit that cannot be: the kernel pushes out what it can before it refuses. Answers how many bytes are left.
fn push_out(group: &Path, limited: u64, bytes: u64) -> Result<u64, Error> {
    let limit = &group.join(LIMIT);
    let mut left = bytes;
    let mut rounds = Rounds::begin();
    loop {
        match write(limit, "4096") {
            Err(error) if refused_with(&error, ErrorKind::ResourceBusy) => {}
            // Nothing is in it.
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
        if !rounds.go_on(group, before.saturating_sub(left)) {
            return Ok(left);
        }
    }
}

fn reclaim_v1(group: &Path, whose: Whose) -> Result<Reclaimed, Error> {
    let bytes_before = number(&group.join(USAGE))?;
    let limited = number(&group.join(LIMIT))?;
    // What it inherited may say that nothing is swapped.
    let swappiness = group.join(swap::SWAPPINESS);
    let was = number(&swappiness)?;
    write(&swappiness, "100")?;
    let asked = push_out(group, limited, bytes_before);
    if whose == Whose::Others {
        write(&swappiness, &was.to_string())?;
    }
    Ok(Reclaimed {
        bytes_before,
        bytes_after: asked?,
    })
}

fn reclaim_v2(group: &Path) -> Result<Reclaimed, Error> {
    let usage = group.join("memory.current");
    let bytes_before = number(&usage)?;
    let mut left = bytes_before;
    let mut rounds = Rounds::begin();
    loop {
        let path = group.join("memory.reclaim");
        let asked = write(&path, &left.to_string());
        let before = left;
        left = number(&usage)?;
        match asked {
            // Less than was asked for, as always: some memory is in use.
            Err(error) if refused_with(&error, ErrorKind::WouldBlock) => {}
            Ok(()) => {}
            Err(source) => return Err(Error::Refused { path, source }),
        }
        if !rounds.go_on(group, before.saturating_sub(left)) {
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

    /// Rounds and pauses until it is enough, of bytes freed and bytes left after each round.
    fn rounds_of(seen: impl IntoIterator<Item = (u64, u64)>) -> (usize, usize) {
        let mut rounds = Rounds::begin();
        let (mut done, mut pauses) = (0, 0);
        for (freed, left) in seen {
            done += 1;
            match rounds.next(freed, left) {
                Round::AtOnce => {}
                Round::After(_) => pauses += 1,
                Round::Enough => break,
            }
        }
        (done, pauses)
    }

    #[test]
    fn what_could_go_is_waited_for_and_not_for_ever() {
        const MIB: u64 = 1 << 20;
        // A Python program of 28 MB that had just been saved: 32 pages at a time, then none, and a moment later all of them.
        let few = (128 << 10, 5 * MIB);
        let shown = [(20 * MIB, 6 * MIB), few, few, (0, 5 * MIB), (5 * MIB, 0)];
        assert_eq!(rounds_of(shown), (5, 1));
        assert_eq!(rounds_of([(0, MIB / 2)]), (1, 0), "nothing is left");
        let stuck = std::iter::repeat((0, 9 * MIB));
        let patience = Rounds::PATIENCE as usize;
        assert_eq!(rounds_of(stuck), (patience, patience - 1));
        let endless = std::iter::repeat((MIB, 9 * MIB));
        assert_eq!(rounds_of(endless), (Rounds::MOST as usize, 0));
    }

    #[test]
    fn what_could_be_in_swap_is_not_what_is_of_files() {
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
    fn on_v2_the_sandbox_may_swap_and_all_it_has_is_asked_back() {
        let (root, hierarchies) = v2_tree();
        // As the kernel finds it meanwhile, and as it stays when somebody kills the program.
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
    fn what_forbids_swap_in_a_cgroup_of_others_is_obeyed_and_named() {
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
