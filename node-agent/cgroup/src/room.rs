//! Room for a wake: what restores a sandbox (runsc's commands, the sentry's own buffers) is in its Pod's cgroup too. For that time the Pod's limit of memory is wider.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::{Error, Hierarchies, counted, write};

/// By so many bytes a wider limit differs from the Pod's own and whole steps, so that it is known from a limit that somebody else has set. Whole pages of
/// 64 KiB, which no kernel rounds.
const MARK: u64 = 7 << 16;
/// Wider limits are so many bytes apart.
const STEP: u64 = 1 << 20;
/// Memory in use may grow by so many bytes while a wider limit is narrowed.
const SLACK: u64 = 4 << 20;
/// How much more a Pod may have while it is woken, in bytes.
pub const ROOM: u64 = 64 * STEP + MARK;
/// From here on v1's number means "no limit": it is the largest of a signed one, in whole pages.
const NO_LIMIT: u64 = i64::MAX as u64 & !0xffff;

/// A limit of memory, in bytes, and the wider one that stands in its place.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Room {
    path: PathBuf,
    limit: u64,
    wider: u64,
}

impl Hierarchies {
    /// The limits of memory on the cgroup: none where there is no limit.
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
    /// Puts the wider limit in its place.
    pub fn make(&self) -> Result<(), Error> {
        write(&self.path, &self.wider.to_string())
    }

    /// Whether a wider limit is in its place: not once somebody (the kubelet) has set another one, or the cgroup is gone.
    pub fn is_made(&self) -> Result<bool, Error> {
        Ok(number(&self.path)?.is_some_and(|now| self.is_wider(now)))
    }

    fn is_wider(&self, limit: u64) -> bool {
        let more = limit
            .checked_sub(self.limit)
            .and_then(|more| more.checked_sub(MARK));
        limit <= self.wider && more.is_some_and(|more| more.is_multiple_of(STEP))
    }

    /// The limit for what is used now: the Pod's own where it fits, else the narrowest wider one.
    fn narrowest(&self, used: u64) -> u64 {
        if used <= self.limit {
            return self.limit;
        }
        let more = used.saturating_add(SLACK).saturating_sub(self.limit + MARK);
        let steps = more.div_ceil(STEP);
        (self.limit + MARK)
            .saturating_add(steps.saturating_mul(STEP))
            .min(self.wider)
    }

    /// The Pod's own limit, in bytes.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// The Pod's own limit where this one, in bytes, is in its place.
    pub(crate) fn limit_behind(&self, now: u64) -> u64 {
        match self.is_wider(now) {
            true => self.limit,
            false => now,
        }
    }

    /// Whether it is the same limit's.
    pub fn is_of_same(&self, other: &Self) -> bool {
        self.path == other.path
    }

    /// Puts the limit back where what is used fits, file cache aside: v1 would refuse it otherwise, and v2 would kill. Answers whether no wider limit is left.
    pub fn give_back(&self) -> Result<bool, Error> {
        if self.is_exceeded()? {
            return Ok(false);
        }
        self.enforce()
    }

    /// The same; where what is used does not fit, the wider limit is narrowed to it, and never widened again.
    pub fn narrow(&self) -> Result<bool, Error> {
        let Some(now) = number(&self.path)?.filter(|now| self.is_wider(*now)) else {
            return Ok(true);
        };
        let limit = self.narrowest(self.used()?);
        if limit >= now {
            return Ok(false);
        }
        Ok(self.limit_to(limit)? && limit == self.limit)
    }

    /// Puts the limit back whatever is used. The kernel takes back what it can; then v2's ends a process of the cgroup, and v1's refuses.
    /// Answers whether no wider limit is left.
    pub fn enforce(&self) -> Result<bool, Error> {
        if !self.is_made()? {
            return Ok(true);
        }
        self.limit_to(self.limit)
    }

    /// Whether more is used than the Pod's own limit, file cache aside.
    pub fn is_exceeded(&self) -> Result<bool, Error> {
        Ok(self.is_made()? && self.used()? > self.limit)
    }

    /// False: v1 refuses a limit below what cannot be taken back.
    fn limit_to(&self, limit: u64) -> Result<bool, Error> {
        match write(&self.path, &limit.to_string()) {
            Err(Error::Write { source, .. }) if source.kind() == ErrorKind::ResourceBusy => {
                Ok(false)
            }
            written => written.map(|()| true),
        }
    }

    /// Bytes in use without file cache, which the kernel takes back by itself.
    fn used(&self) -> Result<u64, Error> {
        let group = self.path.parent().unwrap_or(&self.path);
        let mut used = None;
        for file in ["memory.current", "memory.usage_in_bytes"] {
            used = used.or(number(&group.join(file))?);
        }
        let stat = std::fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        // v1's are the cgroup's own alone, unless they are the total.
        let cache = |key: &str| {
            counted(&stat, &format!("total_{key}"))
                .or_else(|| counted(&stat, key))
                .unwrap_or(0)
        };
        let cache = cache("inactive_file").saturating_add(cache("active_file"));
        Ok(used.unwrap_or(0).saturating_sub(cache))
    }
}

/// The number in a file; none where there is no such file, or no number in it.
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

/// A cgroup that is being removed has its files, and says ENODEV.
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

    /// A pod with these files, on a hierarchy that is v2's or v1's.
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
    fn room_is_made_and_given_back_once_what_is_used_fits(
        #[case] limit: &str,
        #[case] usage: &str,
        #[case] whole: &str,
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
            &format!("{whole}inactive_file 1024\n{whole}active_file 3072\n"),
        );
        assert!(room.give_back().expect("given back"), "the rest is cache");
        assert_eq!(now(), LIMIT.to_string());
        assert!(room.give_back().expect("again"));
        assert_eq!(now(), LIMIT.to_string());
    }

    #[test]
    fn a_wider_limit_follows_what_is_used_down_and_never_up() {
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
    fn the_limit_that_memory_in_use_does_not_fit_is_refused_by_v1_and_kills_by_v2() {
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

        // tail keeps what it reads until the end of its input.
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
