//! Reading a paused sandbox' memory into a partial image.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use torpor_core::ids::{ContainerId, SandboxId};
use torpor_core::state::CONTAINER_NOT_RUNNING;
use torpor_snapshots::{Partial, SaveError};

use crate::control::{self, ContainerState, Control};

/// For a question that gVisor answers at once.
const QUESTION_LIMIT: Duration = Duration::from_secs(5);

/// gVisor's names of an image's files, as `runsc restore` looks for them.
pub const FILES: [&str; 3] = ["checkpoint.img", "pages_meta.img", "pages.img"];

/// Why a checkpoint was not made. The sandbox is as it was, unless the control socket gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Store(#[from] SaveError),
    #[error("gVisor cannot save the sandbox")]
    Control(#[source] control::Error),
    #[error(
        "no room for the sandbox' memory on the disk that holds the images. Delete SandboxSnapshots, or enlarge the disk"
    )]
    DiskFull(#[source] control::Error),
    #[error("container {0} has ended, or has not begun: it would be missing in the image")]
    NotRunning(ContainerId),
}

impl Error {
    /// CamelCase, for conditions and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Store(error) => error.reason(),
            Self::Control(control::Error::NotRunning { .. }) => "SandboxGone",
            Self::DiskFull(_) => "DiskFull",
            Self::Control(_) => "CheckpointFailed",
            Self::NotRunning(_) => CONTAINER_NOT_RUNNING,
        }
    }

    /// Whether the checkpoint may have been made, or still be going on.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Control(error) if error.is_unknown())
    }
}

impl From<control::Error> for Error {
    /// gVisor says in words that its file could not be written.
    fn from(error: control::Error) -> Self {
        match &error {
            control::Error::Refused { message, .. } if message.contains("no space left") => {
                Self::DiskFull(error)
            }
            _ => Self::Control(error),
        }
    }
}

/// Writes the sandbox into fresh files of `partial`; the caller makes them durable. The sandbox must be paused and stays so.
/// An image in which one of `containers` is missing could never be restored, and is an error.
pub fn checkpoint(
    runsc_root: &Path,
    sandbox: &SandboxId,
    containers: &[ContainerId],
    partial: &Partial,
    limit: Duration,
) -> Result<(), Error> {
    let files: Vec<OwnedFd> = FILES
        .iter()
        .map(|name| partial.open_file(name))
        .collect::<Result<_, _>>()?;
    let mut control = Control::connect(runsc_root, sandbox.as_str())?;
    let [state, metadata, pages] = [&files[0], &files[1], &files[2]].map(AsFd::as_fd);
    control.checkpoint([state, metadata, pages], limit)?;
    // Who lives after it has lived at its moment. One that was killed in that moment is in the image too, and dies when it is restored.
    for container in containers {
        if !lives(&mut control, container)? {
            return Err(Error::NotRunning(container.clone()));
        }
    }
    Ok(())
}

fn lives(control: &mut Control, container: &ContainerId) -> Result<bool, control::Error> {
    let state = control.container_state(container.as_str(), QUESTION_LIMIT)?;
    if state == ContainerState::Running {
        return Ok(true);
    }
    // It is said to have stopped as well when only its first thread has ended.
    let processes = control.processes(container.as_str(), QUESTION_LIMIT)?;
    Ok(!processes.is_empty())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use torpor_core::ids::{ImageId, Namespace, PodUid};
    use torpor_snapshots::Store;

    use super::*;
    use crate::control::socket_path;

    const RUNS: &str = "2";
    const STOPPED: &str = "3";
    const NOBODY: &str = "null";
    const SOMEBODY: &str = r#"[{"pid":1}]"#;

    /// A sandbox that is saved without complaint and then gives these answers.
    fn sandbox_with(root: &Path, name: &str, answers: Vec<&'static str>) {
        let listener = UnixListener::bind(socket_path(root, name)).expect("a socket");
        std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().expect("a connection");
            for result in std::iter::once("null").chain(answers) {
                let mut request = [0; 4096];
                let _ = peer.read(&mut request).expect("a request");
                let answer = format!(r#"{{"success":true,"err":"","result":{result}}}"#);
                peer.write_all(answer.as_bytes()).expect("an answer");
            }
        });
    }

    fn saved(answers: &[&'static str]) -> Result<(), Error> {
        let dir = tempfile::tempdir().expect("a directory");
        let sandbox = SandboxId::try_from("a".repeat(64)).expect("an id");
        let containers = ["a", "b"].map(|id| ContainerId::try_from(id.repeat(64)).expect("an id"));
        sandbox_with(dir.path(), sandbox.as_str(), answers.to_vec());
        let store = dir.path().join("store");
        std::fs::create_dir(&store).expect("made");
        let store = Store::open(&store).expect("a store");
        let namespace = Namespace::try_from("n".to_owned()).expect("a name");
        let pod = PodUid::try_from("u".to_owned()).expect("a uid");
        let image = ImageId::new(pod, 1).expect("an id");
        let partial = store.begin(&namespace, &image).expect("begun");
        checkpoint(dir.path(), &sandbox, &containers, &partial, QUESTION_LIMIT)
    }

    #[test]
    fn an_image_that_a_container_is_missing_in_is_none() {
        saved(&[RUNS, RUNS]).expect("whole");
        for answers in [
            &[STOPPED, NOBODY][..],
            &[RUNS, STOPPED, NOBODY],
            &[RUNS, "1", NOBODY],
        ] {
            let error = saved(answers).expect_err("not whole");
            assert!(
                matches!(error, Error::NotRunning(_)),
                "{answers:?} {error:?}"
            );
            assert!(!error.is_unknown());
        }
    }

    #[test]
    fn a_container_whose_first_thread_alone_has_ended_is_there() {
        saved(&[RUNS, STOPPED, SOMEBODY]).expect("whole");
    }
}
