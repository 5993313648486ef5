//! Processes that the kernel has killed because a cgroup's memory was used up.

use std::path::Path;

use crate::Hierarchies;

impl Hierarchies {
    /// Returns how many processes of the cgroup the kernel has killed for want of memory. None if
    /// the kernel does not count them (before Linux 4.13).
    pub fn oom_kills(&self, relative: &Path) -> Option<u64> {
        self.existing(relative).find_map(|path| {
            let read = |file| std::fs::read_to_string(path.join(file)).ok();
            let text = read("memory.events").or_else(|| read("memory.oom_control"))?;
            let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
            count?.trim().parse().ok()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_counted_by_both_versions() {
        let v1 = (
            "memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        );
        let v2 = (
            "memory.events",
            "low 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n",
        );
        for (file, text) in [v1, v2] {
            let dir = tempfile::tempdir().expect("a directory");
            std::fs::write(dir.path().join("cgroup.controllers"), "memory").expect("written");
            std::fs::create_dir(dir.path().join("pod")).expect("made");
            let found = Hierarchies::find(dir.path()).expect("found");
            assert_eq!(found.oom_kills(Path::new("pod")), None);
            std::fs::write(dir.path().join("pod").join(file), text).expect("written");
            assert_eq!(found.oom_kills(Path::new("pod")), Some(2), "{file}");
            assert_eq!(found.oom_kills(Path::new("none")), None);
        }
    }
}
