//! Memory for a wake. A wake raises the Pod's limit of memory for its duration, because the
//! processes that restore a sandbox (runsc's commands, the sentry's buffers) are in the Pod's
//! cgroup, too.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::{Error, Hierarchies, counted, write};

/// Bytes by which a raised limit exceeds the Pod's own limit beside whole steps. They distinguish a
/// raised limit from a limit that another process has set. They are whole pages of 64 KiB, which no
/// kernel rounds.
const MARK: u64 = 7 << 16;
/// Bytes between two raised limits.
const STEP: u64 = 1 << 20;
/// Bytes by which the memory in use may grow while a raised limit is lowered.
const SLACK: u64 = 4 << 20;
/// Bytes that a Pod may use beyond its own limit during a wake.
pub const ROOM: u64 = 64 * STEP + MARK;
/// Least number of v1 that means "no limit": the largest signed number, in whole pages of 64 KiB.
const NO_LIMIT: u64 = i64::MAX as u64 & !0xffff;

/// A Pod's own limit of memory and the raised limit that replaces it, in bytes.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Room {
    path: PathBuf,
    limit: u64,
    wider: u64,
}

impl Hierarchies {
    /// Returns the cgroup's limits of memory; empty if it has none.
    pub fn rooms(&self, relative: &Path) -> Vec<Room> {
        self.existing(relative)
            .flat_map(|group| ["memory.limit_in_bytes", "memory.max"].map(|file| group.join(file)))
            .filter_map(|path| {
                let limit = number(&path).ok()?.filter(|limit| *limit < NO_LIMIT)?;
                let wider = limit.checked_add(ROOM)?;
                Some(Room { path, limit, wider })
            })
            .collect()
    }
}

impl Room {
    /// Raises the limit.
    pub fn make(&self) -> Result<(), Error> {
        write(&self.path, &self.wider.to_string())
    }

    /// Reports whether a raised limit is set. False if another process (the kubelet) has set
    /// another limit, or if the cgroup does not exist any more.
    pub fn is_made(&self) -> Result<bool, Error> {
        Ok(number(&self.path)?.is_some_and(|now| self.is_wider(now)))
    }

    fn is_wider(&self, limit: u64) -> bool {
        let more = limit
            .checked_sub(self.limit)
            .and_then(|more| more.checked_sub(MARK));
        limit <= self.wider && more.is_some_and(|more| more.is_multiple_of(STEP))
    }

    /// Returns the lowest limit for `used` bytes: the Pod's own limit if they fit, otherwise a
    /// raised one.
    fn lowest(&self, used: u64) -> u64 {
        if used <= self.limit {
            return self.limit;
        }
        let more = used.saturating_add(SLACK).saturating_sub(self.limit + MARK);
        let steps = more.div_ceil(STEP);
        (self.limit + MARK)
            .saturating_add(steps.saturating_mul(STEP))
            .min(self.wider)
    }

    /// Returns the Pod's own limit, in bytes.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the Pod's own limit if `now` is a raised limit, otherwise `now`; in bytes.
    pub(crate) fn own_limit(&self, now: u64) -> u64 {
        match self.is_wider(now) {
            true => self.limit,
            false => now,
        }
    }

    /// Reports whether both are about the limit of the same cgroup.
    pub fn is_of_same(&self, other: &Self) -> bool {
        self.path == other.path
    }

    /// Restores the Pod's own limit if the memory in use, without file cache, fits into it.
    /// Otherwise v1 would refuse the limit, and v2 would kill a process. Returns whether no raised
    /// limit is left.
    pub fn give_back(&self) -> Result<bool, Error> {
        if self.is_exceeded()? {
            return Ok(false);
        }
        self.enforce()
    }

    /// Restores the Pod's own limit like [`Self::give_back`]. If the memory in use does not fit, it
    /// lowers the raised limit to the memory in use and never raises it again. Returns whether no
    /// raised limit is left.
    pub fn narrow(&self) -> Result<bool, Error> {
        let Some(now) = number(&self.path)?.filter(|now| self.is_wider(*now)) else {
            return Ok(true);
        };
        let limit = self.lowest(self.used()?);
        if limit >= now {
            return Ok(false);
        }
        Ok(self.limit_to(limit)? && limit == self.limit)
    }

    /// Restores the Pod's own limit regardless of the memory in use. The kernel reclaims memory; if
    /// too little becomes free, v2 kills a process of the cgroup, and v1 refuses the limit. Returns
    /// whether no raised limit is left.
    pub fn enforce(&self) -> Result<bool, Error> {
        if !self.is_made()? {
            return Ok(true);
        }
        self.limit_to(self.limit)
    }

    /// Reports whether a raised limit is set and the memory in use, without file cache, exceeds the
    /// Pod's own limit.
    pub fn is_exceeded(&self) -> Result<bool, Error> {
        Ok(self.is_made()? && self.used()? > self.limit)
    }

    /// Sets the limit. Returns false if v1 refuses the limit because too little memory can be
    /// reclaimed.
    fn limit_to(&self, limit: u64) -> Result<bool, Error> {
        match write(&self.path, &limit.to_string()) {
            Err(Error::Write { source, .. }) if source.kind() == ErrorKind::ResourceBusy => {
                Ok(false)
            }
            written => written.map(|()| true),
        }
    }

    /// Returns the bytes in use without file cache, which the kernel reclaims by itself.
    fn used(&self) -> Result<u64, Error> {
        let group = self.path.parent().unwrap_or(&self.path);
        let mut used = None;
        for file in ["memory.current", "memory.usage_in_bytes"] {
            used = used.or(number(&group.join(file))?);
        }
        let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        // On v1 only the keys with `total_` include the cgroups below.
        let cache = |key: &str| {
            counted(&stat, &format!("total_{key}"))
                .or_else(|| counted(&stat, key))
                .unwrap_or(0)
        };
        let cache = cache("inactive_file").saturating_add(cache("active_file"));
        Ok(used.unwrap_or(0).saturating_sub(cache))
    }
}

/// Reads the number in a file; none if the file does not exist or contains no number.
fn number(path: &Path) -> Result<Option<u64>, Error> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text.trim().parse().ok()),
        Err(error) if is_gone(&error) => Ok(None),
        Err(source) => Err(Error::Read {
            path: path.into(),
            source,
        }),
    }
}

/// Reports whether the error means that the cgroup does not exist any more. The files of a cgroup
/// that is being removed still exist, and reading them returns ENODEV (19).
fn is_gone(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(19)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rstest::rstest;

    use super::*;

    const POD: &str = "kubepods/pod1";
    const LIMIT: u64 = 256 << 20;

    /// Makes hierarchies with the cgroup of one pod and these files of v1 or v2 in it.
    fn pod(files: &[(&str, &str)]) -> (tempfile::TempDir, Hierarchies) {
        let root = tempfile::tempdir().expect("a directory");
        std::fs::write(root.path().join("cgroup.controllers"), "memory\n").expect("written");
        std::fs::create_dir_all(root.path().join(POD)).expect("made");
        for (file, text) in files {
            std::fs::write(root.path().join(POD).join(file), text).expect("written");
        }
        let hierarchies = Hierarchies::find(root.path()).expect("found");
        (root, hierarchies)
    }

    #[rstest]
    #[case::v2("memory.max", "memory.current", "")]
    #[case::v1("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")]
    fn room_is_made_and_given_back_once_the_used_memory_fits(
        #[case] limit: &str,
        #[case] usage: &str,
        #[case] prefix: &str,
    ) {
        let (root, hierarchies) = pod(&[(limit, "268435456\n"), (usage, "250000000\n")]);
        let path = |file: &str| root.path().join(POD).join(file);
        let set = |file: &str, text: &str| std::fs::write(path(file), text).expect("written");
        let now = || std::fs::read_to_string(path(limit)).expect("read");
        let rooms = hierarchies.rooms(Path::new(POD));
        let [room] = rooms.as_slice() else {
            panic!("{rooms:?}")
        };
        assert!(!room.is_made().expect("read"));
        room.make().expect("made");
        assert!(room.is_made().expect("read"));
        assert_eq!(now(), (LIMIT + ROOM).to_string());

        set(usage, &(LIMIT + 4096).to_string());
        assert!(!room.give_back().expect("looked"), "v2 would kill");
        assert!(room.is_made().expect("read"));
        assert!(room.enforce().expect("enforced"));
        assert_eq!(now(), LIMIT.to_string(), "whatever is used");
        room.make().expect("made again");
        set(
            "memory.stat",
            &format!("{prefix}inactive_file 1024\n{prefix}active_file 3072\n"),
        );
        assert!(room.give_back().expect("given back"), "the rest is cache");
        assert_eq!(now(), LIMIT.to_string());
        assert!(room.give_back().expect("again"));
        assert_eq!(now(), LIMIT.to_string());
    }

    #[test]
    fn a_wider_limit_follows_the_used_memory_down_and_never_up() {
        const MIB: u64 = 1 << 20;
        let (root, hierarchies) = pod(&[("memory.max", "268435456\n"), ("memory.current", "0\n")]);
        let path = |file: &str| root.path().join(POD).join(file);
        let rooms = hierarchies.rooms(Path::new(POD));
        let [room] = rooms.as_slice() else {
            panic!("{rooms:?}")
        };
        room.make().expect("made");
        for (used, more) in [(63, 64), (20, 24), (30, 24), (1, 5), (4, 5)] {
            let used = (LIMIT + used * MIB).to_string();
            std::fs::write(path("memory.current"), used).expect("written");
            assert!(!room.narrow().expect("looked"));
            let now = std::fs::read_to_string(path("memory.max")).expect("read");
            assert_eq!(now, (LIMIT + more * MIB + MARK).to_string());
            assert!(room.is_made().expect("read"), "it is known for a wider one");
        }
    }

    #[test]
    fn a_limit_that_the_kubelet_has_changed_meanwhile_is_left_alone() {
        let (root, hierarchies) = pod(&[("memory.max", "268435456\n")]);
        let file = root.path().join(POD).join("memory.max");
        let rooms = hierarchies.rooms(Path::new(POD));
        rooms[0].make().expect("made");
        std::fs::write(&file, "512000000\n").expect("written");
        assert!(rooms[0].give_back().expect("left alone"));
        assert!(rooms[0].enforce().expect("left alone"));
        assert_eq!(std::fs::read_to_string(&file).expect("read"), "512000000\n");
        std::fs::remove_file(&file).expect("removed");
        assert!(rooms[0].give_back().expect("it is gone"));
    }

    /// Needs root and a hierarchy that counts memory, as the development cluster does.
    #[test]
    fn a_limit_below_the_memory_in_use_is_refused_on_v1_and_kills_on_v2() {
        const MIB: u64 = 1 << 20;
        let hierarchies = Hierarchies::find(Path::new("/sys/fs/cgroup")).expect("found");
        let group = PathBuf::from(format!("torpor-room-test-{}", std::process::id()));
        hierarchies.create(&group).expect("a cgroup");
        let memory = hierarchies.memory(&group).expect("memory is counted");
        let file = |name: &str| memory.path().join(name);
        let is_v1 = file("memory.limit_in_bytes").exists();
        let (limit, swap) = match is_v1 {
            true => ("memory.limit_in_bytes", "memory.swappiness"),
            false => ("memory.max", "memory.swap.max"),
        };
        write(&file(limit), &(8 * MIB).to_string()).expect("limited");
        if file(swap).exists() {
            write(&file(swap), "0").expect("kept out of swap");
        }
        let rooms = hierarchies.rooms(&group);
        let room = rooms.first().expect("a limit");
        room.make().expect("made");

        // `tail` keeps its input in memory until the input ends.
        let mut holder = std::process::Command::new("sh")
            .args(["-c", "echo $$ >\"$0\" && exec tail -c 64M"])
            .arg(file("cgroup.procs"))
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("started");
        let mut input = holder.stdin.take().expect("piped");
        let held = vec![1; usize::try_from(24 * MIB).expect("a length")];
        input.write_all(&held).expect("read by tail");
        assert!(room.is_exceeded().expect("looked"));

        let is_back = room.enforce().expect("tried");
        assert_eq!(is_back, !is_v1);
        assert_eq!(room.is_made().expect("looked"), is_v1);
        drop(input);
        let status = holder.wait().expect("ended");
        assert_eq!(status.success(), is_v1, "v2 has killed it: {status}");
        assert!(room.enforce().expect("tried again"));
        assert!(!room.is_made().expect("looked"));
        hierarchies.remove(&group).expect("removed");
    }

    #[rstest]
    #[case::v2("max\n")]
    #[case::v1("9223372036854771712\n")]
    #[case::v1_with_large_pages("9223372036854710272\n")]
    fn where_memory_is_not_limited_there_is_no_room_to_make(#[case] limit: &str) {
        let (_root, hierarchies) = pod(&[("memory.max", limit)]);
        assert_eq!(hierarchies.rooms(Path::new(POD)), []);
    }
}
