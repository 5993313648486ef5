//! A Pod's limits, from its cgroup.

use std::path::Path;
use std::time::Duration;

use crate::room::Room;
use crate::{Hierarchies, Quota};

/// Limits of a Pod. None means no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Limit of memory in bytes.
    pub memory: Option<u64>,
    pub processors: Option<ProcessorLimit>,
}

/// Limit of processor time: the quota in each period, both in microseconds (the kernel's
/// `cpu.cfs_quota_us` and `cpu.cfs_period_us`, or `cpu.max`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessorLimit {
    pub quota: u64,
    pub period: u64,
}

impl ProcessorLimit {
    fn in_a_second(self) -> Duration {
        let micros = self.quota.saturating_mul(1_000_000);
        Duration::from_micros(micros.checked_div(self.period).unwrap_or(u64::MAX))
    }

    /// Returns the number of processors that can use the whole quota.
    pub fn processors(self) -> u64 {
        self.quota.div_ceil(self.period.max(1))
    }
}

impl Hierarchies {
    /// Returns the cgroup's own limits. `lifted` and `rooms` are the limits that a wake has
    /// replaced for its duration; a wake that was killed has not restored them.
    pub fn limits(&self, relative: &Path, lifted: &[Quota], rooms: &[Room]) -> Limits {
        let memory = self.rooms(relative).into_iter().map(|found| {
            let recorded = rooms.iter().find(|room| room.is_of_same(&found));
            let now = found.limit();
            recorded.map_or(now, |room| room.own_limit(now))
        });
        let mut groups = self.existing(relative);
        Limits {
            memory: memory.min(),
            processors: groups.find_map(|group| processors(&group, lifted)),
        }
    }

    /// Returns the processor time that the cgroup may use in a second; none if the cgroup has no
    /// limit of its own.
    pub fn processor_limit(&self, relative: &Path) -> Option<Duration> {
        self.existing(relative)
            .find_map(|path| processors(&path, &[]))
            .map(|limit| limit.in_a_second())
    }
}

/// Returns the limit of processor time of a cgroup, with the values of the `lifted` limits. v1 has
/// quota and period in two files, v2 in one. Without a limit the quota is no number, or -1.
fn processors(group: &Path, lifted: &[Quota]) -> Option<ProcessorLimit> {
    let read = |file: &str| {
        let path = group.join(file);
        let now = std::fs::read_to_string(&path).ok()?.trim().to_owned();
        let replaced = lifted
            .iter()
            .find(|quota| quota.path == path && quota.unlimited == now);
        Some(replaced.map_or(now, |quota| quota.value.clone()))
    };
    let text = match read("cpu.max") {
        Some(text) => text,
        None => format!(
            "{} {}",
            read("cpu.cfs_quota_us")?,
            read("cpu.cfs_period_us")?
        ),
    };
    let (quota, period) = text.split_once(' ')?;
    let (quota, period) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0).then_some(ProcessorLimit { quota, period })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const POD: &str = "kubepods/pod1";
    const LIMIT: u64 = 256 << 20;

    /// Makes hierarchies with the cgroup of one Pod and these files in it.
    fn with_pod(files: &[(&str, &str)]) -> (tempfile::TempDir, Hierarchies) {
        let root = tempfile::tempdir().expect("a directory");
        std::fs::write(root.path().join("cgroup.controllers"), "memory cpu").expect("written");
        std::fs::create_dir_all(root.path().join(POD)).expect("made");
        for (file, text) in files {
            let path = root.path().join(POD).join(file);
            std::fs::write(path, format!("{text}\n")).expect("written");
        }
        let hierarchies = Hierarchies::find(root.path()).expect("found");
        (root, hierarchies)
    }

    #[rstest]
    #[case::v2(&[("memory.max", "268435456"), ("cpu.max", "150000 100000")])]
    #[case::v1(&[("memory.limit_in_bytes", "268435456"), ("cpu.cfs_quota_us", "150000"), ("cpu.cfs_period_us", "100000")])]
    fn the_limits_are_the_pods_own_during_a_wake_too(#[case] files: &[(&str, &str)]) {
        let (root, hierarchies) = with_pod(files);
        let pod = Path::new(POD);
        let own = Limits {
            memory: Some(LIMIT),
            processors: Some(ProcessorLimit {
                quota: 150_000,
                period: 100_000,
            }),
        };
        let (quotas, rooms) = (hierarchies.quotas(pod), hierarchies.rooms(pod));
        assert_eq!(hierarchies.limits(pod, &[], &[]), own);
        quotas
            .iter()
            .for_each(|quota| quota.lift().expect("lifted"));
        rooms.iter().for_each(|room| room.make().expect("made"));
        assert_eq!(hierarchies.limits(pod, &quotas, &rooms), own);
        let unnoted = hierarchies.limits(pod, &[], &[]);
        assert!(unnoted.processors.is_none() && unnoted.memory > own.memory);
        assert_eq!(own.processors.map(ProcessorLimit::processors), Some(2));
        // The kubelet has set other limits meanwhile.
        for (file, _) in files
            .iter()
            .filter(|(file, _)| !file.ends_with("period_us"))
        {
            let text = match *file {
                "cpu.max" => "300000 100000",
                "cpu.cfs_quota_us" => "300000",
                _ => "536870912",
            };
            std::fs::write(root.path().join(POD).join(file), text).expect("written");
        }
        let now = hierarchies.limits(pod, &quotas, &rooms);
        assert_eq!(now.memory, Some(2 * LIMIT));
        assert_eq!(now.processors.map(ProcessorLimit::processors), Some(3));
    }

    #[test]
    fn a_pod_without_limits_has_none() {
        let (_root, hierarchies) = with_pod(&[("memory.max", "max"), ("cpu.max", "max 100000")]);
        assert_eq!(
            hierarchies.limits(Path::new(POD), &[], &[]),
            Limits::default()
        );
    }
}
