//! runsc's own records: a state and a lock for each container, in its root directory.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Error, NodeRunsc, Runsc};
use crate::control::Control;
use crate::process;
use crate::sentry::Kept;

/// A state holds the container's whole OCI spec.
const MAX_RECORD: u64 = 16 << 20;

/// What most of them have, and so are read by one call: a sandbox that dozes waits for it.
const USUAL_RECORD: usize = 32 << 10;

/// runsc's record of a container of the sandbox.
fn state_path(root: &Path, id: &str, sandbox: &str) -> PathBuf {
    root.join(format!("{id}_sandbox:{sandbox}.state"))
}

/// How often a lock is asked for that somebody has.
const LOCK_PERIOD: Duration = Duration::from_millis(2);

/// Of a sandbox' id, which is in hexadecimal: 256 root directories.
pub(super) const SPREAD: usize = 2;

/// What is read of runsc's record of a sandbox.
#[derive(serde::Deserialize)]
struct RunscState {
    sandbox: RunscSandbox,
}

#[derive(serde::Deserialize)]
struct RunscSandbox {
    /// Of the sentry.
    #[serde(default)]
    pid: i32,
    #[serde(default)]
    uid: u32,
    #[serde(default)]
    gid: u32,
}

/// What is read of runsc's record of a container.
#[derive(serde::Deserialize)]
struct RunscContainer {
    /// 0: it has none.
    #[serde(rename = "goferPid", default)]
    gofer_pid: i32,
}

impl RunscContainer {
    /// The process that serves its files, which may have ended.
    fn gofer(&self) -> Option<i32> {
        Some(self.gofer_pid).filter(|pid| *pid > 0)
    }
}

impl NodeRunsc {
    /// The runsc of each root directory that has a record of the container. It is for a container of which nothing else is known: it takes a look
    /// at all of them.
    pub fn that_know(&self, id: &str) -> Result<Vec<Runsc>, Error> {
        let mut found = Vec::new();
        let mut roots = vec![self.runsc.root.clone()];
        roots.extend(records(&self.runsc.root, |name| name.len() <= SPREAD)?);
        for root in roots {
            let runsc = Runsc {
                root,
                ..self.runsc.clone()
            };
            if !runsc.states_of(id)?.is_empty() {
                found.push(runsc);
            }
        }
        Ok(found)
    }
}

impl Runsc {
    /// Whether runsc has a record of the container; reading it is left to runsc.
    pub fn knows(&self, id: &str, sandbox: &str) -> bool {
        state_path(&self.root, id, sandbox).exists()
    }

    /// What runsc keeps of the sandbox' containers: a state and a lock each.
    fn records_of(&self, sandbox: &str) -> Result<Vec<PathBuf>, Error> {
        let part = format!("_sandbox:{sandbox}.");
        records(&self.root, |name| name.contains(&part))
    }

    /// The states of containers of this name, each with its sandbox: one or none, unless a killed runsc has left more.
    pub(super) fn states_of(&self, id: &str) -> Result<Vec<(PathBuf, String)>, Error> {
        let part = format!("{id}_sandbox:");
        let states = |name: &str| name.starts_with(&part) && name.ends_with(".state");
        let with_sandbox = |path: PathBuf| {
            let sandbox = path.file_stem()?.to_str()?.strip_prefix(&part)?.to_owned();
            Some((path, sandbox))
        };
        let found = records(&self.root, states)?.into_iter();
        Ok(found.filter_map(with_sandbox).collect())
    }

    /// runsc writes a state in its place, and reads none of which it had written only a part when it was killed: neither that of a
    /// container that it is to delete, nor that of another one of a sandbox that it restores. Such a state goes, once gVisor has let go of
    /// its container.
    pub(super) fn forget_torn(&self, id: &str, limit: Duration) -> Result<(), Error> {
        for (path, sandbox) in self.states_of(id)? {
            if !is_torn(&path)? {
                continue;
            }
            // Who does not answer has ended, and holds no container any more; one that gVisor does not know it has let go of.
            if sandbox != id
                && let Ok(mut control) = Control::connect(&self.root, &sandbox)
            {
                let _ = control.destroy_container(id, limit);
            }
            remove(&path)?;
        }
        Ok(())
    }

    /// Removes what a runsc that was killed has left of a sandbox whose processes have ended: its control socket, locks, and states.
    pub fn sweep(&self, sandbox: &str) -> Result<(), Error> {
        let mut left = self.records_of(sandbox)?;
        left.push(crate::control::socket_path(&self.root, sandbox));
        left.iter().try_for_each(|path| remove(path))
    }

    /// What is known of how runsc began the sandbox and its other containers, for [`crate::sentry`]; none where runsc knows nothing of it.
    pub fn kept<'a>(
        &self,
        sandbox: &str,
        others: impl IntoIterator<Item = &'a str>,
    ) -> Result<Option<Kept>, Error> {
        let Some(first) = of_container(&self.root, sandbox, sandbox)? else {
            return Ok(None);
        };
        let mut containers = BTreeMap::new();
        for id in others {
            let record = of_container(&self.root, id, sandbox)?;
            containers.extend(record.map(|record| (id.to_owned(), record)));
        }
        Ok(Some(Kept::new(first, containers)))
    }

    /// Whether each of the sandbox' gofers lives, by runsc's own records. gVisor kills a container
    /// that has lost its gofer as soon as it may run, unless the sandbox was restored.
    pub fn has_its_gofers(&self, sandbox: &str) -> Result<bool, Error> {
        Ok(gofers(&self.root, sandbox)?
            .into_iter()
            .all(process::goes_on))
    }

    /// Whether the container's gofer has certainly ended, by runsc's own record. A container that
    /// never had one has lost none.
    pub fn has_lost_gofer(&self, container: &str, sandbox: &str) -> Result<bool, Error> {
        let record: RunscContainer = read_record(&state_path(&self.root, container, sandbox))?;
        Ok(record.gofer().is_some_and(process::is_gone))
    }

    /// The same of the sandbox at the other end of the connection.
    pub fn has_its_gofers_beside(&self, sandbox: &str, control: &Control) -> Result<bool, Error> {
        match control.gofers() {
            Some(known) => Ok(known.all_go_on()),
            None => self.has_its_gofers(sandbox),
        }
    }

    /// User and group that the sandbox' processes run as, from runsc's own record.
    pub fn sandbox_user(&self, sandbox: &str) -> Result<(u32, u32), Error> {
        let RunscSandbox { uid, gid, .. } = of_sandbox(&self.root, sandbox)?;
        Ok((uid, gid))
    }
}

/// What runsc, whose root directory this is, has recorded of the sandbox.
fn of_sandbox(root: &Path, sandbox: &str) -> Result<RunscSandbox, Error> {
    let path = state_path(root, sandbox, sandbox);
    Ok(read_record::<RunscState>(&path)?.sandbox)
}

/// The sandbox' first process, by runsc's own record.
pub(crate) fn sentry(root: &Path, sandbox: &str) -> Result<i32, Error> {
    Ok(of_sandbox(root, sandbox)?.pid)
}

/// The processes that serve the files of the sandbox' containers, by runsc's own records: they may have ended.
pub(crate) fn gofers(root: &Path, sandbox: &str) -> Result<Vec<i32>, Error> {
    let end = format!("_sandbox:{sandbox}.state");
    let mut found = Vec::new();
    for path in records(root, |name| name.ends_with(&end))? {
        match read_record::<RunscContainer>(&path) {
            Ok(container) => found.extend(container.gofer()),
            // Its container was deleted meanwhile.
            Err(Error::Record { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Whether the process that serves the container's files goes on, by runsc's own record. A
/// container that never had one counts as well.
pub(crate) fn gofer_goes_on(root: &Path, id: &str, sandbox: &str) -> Result<bool, Error> {
    let record: RunscContainer = read_record(&state_path(root, id, sandbox))?;
    Ok(record.gofer().is_none_or(process::goes_on))
}

/// What runsc has recorded of the container. None where it has nothing.
fn of_container(root: &Path, id: &str, sandbox: &str) -> Result<Option<serde_json::Value>, Error> {
    match read_record(&state_path(root, id, sandbox)) {
        Err(Error::Record { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
        record => record.map(Some),
    }
}

/// Writes that record, where runsc has not begun the container: in its place when it is whole, because other commands of runsc's look for it.
pub(crate) fn write(
    root: &Path,
    id: &str,
    sandbox: &str,
    record: &serde_json::Value,
) -> Result<(), Error> {
    let path = state_path(root, id, sandbox);
    let unfinished = path.with_extension("state.new");
    let bytes = record.to_string();
    let written = || -> std::io::Result<()> {
        let mut file = std::fs::File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o640)
            .open(&unfinished)?;
        file.write_all(bytes.as_bytes())?;
        std::fs::rename(&unfinished, &path)
    };
    written().map_err(|source| Error::WriteRecord {
        path: path.clone(),
        source,
    })
}

/// What runsc holds while it makes a container and again while it starts it; of a sandbox' first one until that has the image. Its commands for the other containers
/// wait for that, and so come neither before there is a sandbox nor before that has the image (gVisor, `runsc/container/state_file.go`). The kernel gives it back with the file.
pub(crate) fn lock(
    root: &Path,
    id: &str,
    sandbox: &str,
    deadline: Instant,
) -> Result<std::fs::File, Error> {
    let path = state_path(root, id, sandbox).with_extension("lock");
    let locked = || -> std::io::Result<std::fs::File> {
        let file = std::fs::File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)?;
        // Who has it looks whether a record is whole, or is one that should have been killed with the sandbox.
        let at_once = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        loop {
            match rustix::fs::flock(&file, at_once) {
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    std::thread::sleep(LOCK_PERIOD);
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(ErrorKind::TimedOut.into()),
                locked => return Ok(locked.map(|()| file)?),
            }
        }
    };
    locked().map_err(|source| Error::WriteRecord {
        path: path.clone(),
        source,
    })
}

fn records(root: &Path, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>, Error> {
    let failed = |source| Error::Record {
        path: root.to_owned(),
        source,
    };
    let entries = match std::fs::read_dir(root) {
        // No runsc has run yet.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().unwrap_or_default();
        if wanted(&name.to_string_lossy()) {
            found.push(path);
        }
    }
    Ok(found)
}

fn remove(path: &Path) -> Result<(), Error> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => Err(Error::Record {
            path: path.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

/// Whether a killed runsc has left it half written. One that writes has the lock beside it.
fn is_torn(state: &Path) -> Result<bool, Error> {
    let lock = std::fs::File::open(state.with_extension("lock"));
    if let Ok(lock) = &lock
        && rustix::fs::flock(lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err()
    {
        return Ok(false);
    }
    match read_record::<serde::de::IgnoredAny>(state) {
        Err(Error::Record { source, .. }) => match source.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::InvalidData => Ok(true),
            ErrorKind::NotFound => Ok(false),
            _ => Err(Error::Record {
                path: state.to_owned(),
                source,
            }),
        },
        read => read.map(|_| false),
    }
}

/// Reads one of runsc's own records.
fn read_record<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, Error> {
    let record = |source| Error::Record {
        path: path.to_owned(),
        source,
    };
    let file = std::fs::File::open(path).map_err(record)?;
    let mut bytes = Vec::with_capacity(USUAL_RECORD);
    file.take(MAX_RECORD)
        .read_to_end(&mut bytes)
        .map_err(record)?;
    serde_json::from_slice(&bytes).map_err(|error| record(error.into()))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use torpor_core::ids::SandboxId;

    use super::*;

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
        let node = NodeRunsc::new(&crate::config::tests::on(dir.path()));
        (dir, node)
    }

    #[test]
    fn sandboxes_are_spread_and_one_of_before_stays_in_the_base() {
        let (dir, node) = node();
        let base = dir.path().join("runsc");
        let id = |beginning: &str| {
            SandboxId::new(format!("{beginning}{}", "5".repeat(60))).expect("an id")
        };
        let [old, new, beside, other] = ["ab12", "ab34", "ab56", "cd12"].map(id);
        for sandbox in [&old, &new, &beside, &other] {
            node.records.create_pod_dir(sandbox).expect("made");
        }
        for sandbox in [&new, &beside, &other] {
            node.records.note_spread(sandbox).expect("noted");
        }
        assert_eq!(node.root_of(&new), base.join("ab"));
        assert_eq!(node.root_of(&beside), node.root_of(&new));
        assert_eq!(node.root_of(&other), base.join("cd"));
        // It hibernates: there is nothing of it in the base, and its keepers look there all the same.
        assert_eq!(node.root_of(&old), base);
        let socket = crate::control::socket_path(&node.root_of(&new), new.as_str());
        let socket = Path::new("/run/torpor").join(socket.strip_prefix(dir.path()).expect("in it"));
        assert!(socket.as_os_str().len() <= 107, "{socket:?}");
    }

    #[test]
    fn a_container_of_which_only_the_name_is_known_is_found_wherever_it_is() {
        let (dir, node) = node();
        assert!(node.that_know("c").expect("looked").is_empty());
        let base = dir.path().join("runsc");
        let roots = [base.clone(), base.join("ab")];
        for root in [&roots[1], &base.join("cd")] {
            std::fs::create_dir_all(root).expect("made");
        }
        std::fs::write(state_path(&roots[0], "d", "s"), "{}").expect("written");
        std::fs::write(state_path(&roots[1], "c", "ab12"), "{}").expect("written");
        for (id, root) in [("d", &roots[0]), ("c", &roots[1])] {
            let found = node.that_know(id).expect("looked");
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
    fn a_state_that_a_killed_runsc_has_left_half_written_goes_and_no_other() {
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
        // Somebody is writing this one.
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
