//! Reading of runsc's state files of the node's sandboxes and their containers.

use std::collections::BTreeMap;
use std::time::Duration;

use torpor_records::RunscRecord;

use super::{NodeRunsc, Runsc, SPREAD};
use crate::control::{Control, socket_path};
use crate::state;

impl NodeRunsc {
    /// Returns the runsc of each root directory that has a record of the container. Reads all root
    /// directories: it is for a container of which only the id is known.
    pub fn runscs_with_record(&self, id: &str) -> Result<Vec<Runsc>, state::Error> {
        let mut found = Vec::new();
        let mut roots = vec![self.runsc.root.clone()];
        roots.extend(state::records(&self.runsc.root, |name| {
            name.len() <= SPREAD
        })?);
        for root in roots {
            let runsc = Runsc {
                root,
                ..self.runsc.clone()
            };
            if !state::states_of(&runsc.root, id)?.is_empty() {
                found.push(runsc);
            }
        }
        Ok(found)
    }
}

impl Runsc {
    /// Reports whether runsc has a record of the container. The record is not read.
    pub fn knows(&self, id: &str, sandbox: &str) -> bool {
        state::is_known(&self.root, id, sandbox)
    }

    /// Removes the container's half-written states, after gVisor has released the container.
    ///
    /// runsc writes a state in place, so a killed runsc leaves a part of one. runsc fails on such a
    /// state: when it deletes the container, and when it restores another container of the sandbox.
    pub(super) fn remove_torn_states(&self, id: &str, limit: Duration) -> Result<(), state::Error> {
        for (path, sandbox) in state::states_of(&self.root, id)? {
            if !state::is_torn(&path)? {
                continue;
            }
            // A sandbox that does not answer has ended, and holds no container any more. A
            // container that gVisor does not know is released already.
            if sandbox != id
                && let Ok(mut control) = Control::connect(&self.root, &sandbox)
            {
                let _ = control.destroy_container(id, limit);
            }
            state::remove(&path)?;
        }
        Ok(())
    }

    /// Removes the files that a killed runsc has left of an ended sandbox: its control socket,
    /// locks and states.
    pub fn sweep(&self, sandbox: &str) -> Result<(), state::Error> {
        let mut left = state::files_of(&self.root, sandbox)?;
        left.push(socket_path(&self.root, sandbox));
        left.iter().try_for_each(|path| state::remove(path))
    }

    /// Returns runsc's records of the sandbox and of `others`, its other containers, from which
    /// `torpor-runsc-direct` begins them again. None: runsc has no record of the sandbox.
    pub fn kept<'a>(
        &self,
        sandbox: &str,
        others: impl IntoIterator<Item = &'a str>,
    ) -> Result<Option<RunscRecord>, state::Error> {
        let Some(first) = state::of_container(&self.root, sandbox, sandbox)? else {
            return Ok(None);
        };
        let mut containers = BTreeMap::new();
        for id in others {
            let record = state::of_container(&self.root, id, sandbox)?;
            containers.extend(record.map(|record| (id.to_owned(), record)));
        }
        Ok(Some(RunscRecord {
            sandbox: first,
            containers,
        }))
    }

    /// Reports whether each of the sandbox' gofers lives, by runsc's own records. gVisor kills a
    /// container that has lost its gofer as soon as the container may run, unless the sandbox was
    /// restored.
    pub fn has_its_gofers(&self, sandbox: &str) -> Result<bool, state::Error> {
        state::has_all_gofers(&self.root, sandbox)
    }

    /// Reports whether the container's gofer has certainly ended, by runsc's own record. False for
    /// a container that never had a gofer.
    pub fn has_lost_gofer(&self, container: &str, sandbox: &str) -> Result<bool, state::Error> {
        state::has_lost_gofer(&self.root, container, sandbox)
    }

    /// Reports whether each gofer of the sandbox at the other end of `control` lives. Gofers that
    /// [`Control::connect`] has read already are not read again.
    pub fn has_its_gofers_beside(
        &self,
        sandbox: &str,
        control: &Control,
    ) -> Result<bool, state::Error> {
        match control.gofers() {
            Some(gofers) => Ok(gofers.all_go_on()),
            None => self.has_its_gofers(sandbox),
        }
    }

    /// Returns the user and group ids of the sandbox' processes, from runsc's own record.
    pub fn sandbox_user(&self, sandbox: &str) -> Result<(u32, u32), state::Error> {
        state::user(&self.root, sandbox)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use torpor_core::ids::SandboxId;

    use std::path::Path;

    use super::*;
    use crate::state::state_path;

    fn runsc_in(root: &Path) -> Runsc {
        Runsc {
            path: "true".into(),
            own_flags: Vec::new(),
            root: root.to_owned(),
            platform: "systrap".into(),
            debug_log_dir: None,
        }
    }

    fn node() -> (tempfile::TempDir, NodeRunsc) {
        let dir = tempfile::tempdir().expect("a directory");
        let node = NodeRunsc::new(&crate::testing::on(dir.path()));
        (dir, node)
    }

    #[test]
    fn sandboxes_are_spread_over_directories() {
        let (dir, node) = node();
        let base = dir.path().join("runsc");
        let id = |beginning: &str| {
            SandboxId::new(format!("{beginning}{}", "5".repeat(60))).expect("an id")
        };
        let [new, beside, other] = ["ab34", "ab56", "cd12"].map(id);
        assert_eq!(node.root_of(&new), base.join("ab"));
        assert_eq!(node.root_of(&beside), node.root_of(&new));
        assert_eq!(node.root_of(&other), base.join("cd"));
        let socket = socket_path(&node.root_of(&new), new.as_str());
        let socket = Path::new("/run/torpor").join(socket.strip_prefix(dir.path()).expect("in it"));
        assert!(socket.as_os_str().len() <= 107, "{socket:?}");
    }

    #[test]
    fn a_container_known_only_by_name_is_found_in_any_directory() {
        let (dir, node) = node();
        assert!(node.runscs_with_record("c").expect("looked").is_empty());
        let base = dir.path().join("runsc");
        let roots = [base.clone(), base.join("ab")];
        for root in [&roots[1], &base.join("cd")] {
            std::fs::create_dir_all(root).expect("made");
        }
        std::fs::write(state_path(&roots[0], "d", "s"), "{}").expect("written");
        std::fs::write(state_path(&roots[1], "c", "ab12"), "{}").expect("written");
        for (id, root) in [("d", &roots[0]), ("c", &roots[1])] {
            let found = node.runscs_with_record(id).expect("looked");
            let found: Vec<_> = found.iter().map(Runsc::root).collect();
            assert_eq!(found, [root], "{id}");
        }
    }

    #[test]
    fn a_sandbox_is_whole_while_each_of_its_gofers_lives() {
        let dir = tempfile::tempdir().expect("a directory");
        let runsc = runsc_in(dir.path());
        let write = |container: &str, sandbox: &str, pid: u32| {
            let path = state_path(dir.path(), container, sandbox);
            std::fs::write(path, format!(r#"{{"goferPid":{pid}}}"#)).expect("written");
        };
        let mut gone = Command::new("true").spawn().expect("a process");
        write("s", "s", std::process::id());
        write("a", "s", 0);
        write("b", "other", gone.id());
        assert!(runsc.has_its_gofers("s").expect("known"));
        write("c", "s", gone.id());
        gone.wait().expect("it ends");
        assert!(!runsc.has_its_gofers("s").expect("known"));
    }

    #[test]
    fn only_a_state_that_a_killed_runsc_left_half_written_is_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let runsc = runsc_in(dir.path());
        let path = |container: &str| state_path(dir.path(), container, "s");
        let whole = r#"{"goferPid":0}"#;
        for (container, state) in [
            ("s", whole),
            ("empty", ""),
            ("cut", &whole[..9]),
            ("whole", whole),
        ] {
            std::fs::write(path(container), state).expect("written");
            std::fs::write(path(container).with_extension("lock"), "").expect("written");
        }
        // Another process writes this one.
        std::fs::write(path("held"), "").expect("written");
        let held = std::fs::File::create(path("held").with_extension("lock")).expect("a lock");
        let exclusive = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        rustix::fs::flock(&held, exclusive).expect("locked");
        let limit = Duration::from_secs(5);
        for container in ["empty", "cut", "whole", "held", "unknown"] {
            runsc
                .delete(container, limit)
                .expect("nothing is in its way");
        }
        let left = |container: &str| path(container).exists();
        assert!(!left("empty") && !left("cut"));
        assert!(
            left("s") && left("whole") && left("held"),
            "they are runsc's"
        );
        assert!(!runsc.knows("empty", "s"));
    }
}
