//! Reading a paused sandbox' memory into a partial image.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use torpor_core::ids::{ContainerId, SandboxId};
use torpor_snapshots::{Partial, SaveError};

use crate::control::{self, ContainerState, Control};
use crate::runsc::{self, Runsc};

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
    Control(#[from] control::Error),
    #[error("container {0} has ended, or has not begun: it would be missing in the image")]
    NotRunning(ContainerId),
    #[error(
        "the file server of one of the sandbox' containers has ended: gVisor ends that container"
    )]
    GoferGone,
    #[error("cannot tell whether the sandbox' file servers run")]
    Gofers(#[source] runsc::Error),
}

impl Error {
    /// CamelCase, for conditions and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Store(error) => error.reason(),
            Self::Control(control::Error::NotRunning { .. }) => "SandboxGone",
            Self::Control(control::Error::Refused { message, .. })
                if message.contains("no space left") =>
            {
                "DiskFull"
            }
            Self::Control(_) | Self::Gofers(_) => "CheckpointFailed",
            Self::NotRunning(_) => "ContainerNotRunning",
            Self::GoferGone => "GoferGone",
        }
    }

    /// Whether the checkpoint may have been made, or still be going on.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Control(error) if error.is_unknown())
    }
}

/// Writes the sandbox into fresh files of `partial`; the caller makes them durable. The sandbox must be paused and stays so.
/// An image in which one of `containers` is missing could never be restored, and is an error.
pub fn checkpoint(
    runsc: &Runsc,
    sandbox: &SandboxId,
    containers: &[ContainerId],
    partial: &Partial,
    limit: Duration,
) -> Result<(), Error> {
    let files: Vec<OwnedFd> = FILES
        .iter()
        .map(|name| partial.open_file(name))
        .collect::<Result<_, _>>()?;
    let mut control = Control::connect(runsc.root(), sandbox.as_str())?;
    let [state, metadata, pages] = [&files[0], &files[1], &files[2]].map(AsFd::as_fd);
    control.checkpoint([state, metadata, pages], limit)?;
    // Who lives after it has lived at its moment.
    for container in containers {
        let state = control.container_state(container.as_str(), QUESTION_LIMIT)?;
        if state != ContainerState::Running {
            return Err(Error::NotRunning(container.clone()));
        }
    }
    match runsc.has_its_gofers(sandbox.as_str()) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::GoferGone),
        Err(error) => Err(Error::Gofers(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use torpor_core::ids::{ImageId, Namespace, PodUid};
    use torpor_snapshots::Store;

    use super::*;
    use crate::control::socket_path;

    /// A sandbox that is saved without complaint and says of each container what is given.
    fn sandbox_with(root: &Path, name: &str, states: Vec<u8>) {
        let listener = UnixListener::bind(socket_path(root, name)).expect("a socket");
        std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().expect("a connection");
            let states = states.into_iter().map(|state| state.to_string());
            for result in std::iter::once("null".to_owned()).chain(states) {
                let mut request = [0; 4096];
                let _ = peer.read(&mut request).expect("a request");
                let answer = format!(r#"{{"success":true,"err":"","result":{result}}}"#);
                peer.write_all(answer.as_bytes()).expect("an answer");
            }
        });
    }

    fn saved(states: Vec<u8>, gofer: u32) -> Result<(), Error> {
        let dir = tempfile::tempdir().expect("a directory");
        let sandbox = SandboxId::try_from("a".repeat(64)).expect("an id");
        let containers: Vec<ContainerId> = ["a", "b"]
            .map(|id| ContainerId::try_from(id.repeat(64)).expect("an id"))
            .into();
        sandbox_with(dir.path(), sandbox.as_str(), states);
        let state = dir
            .path()
            .join(format!("{sandbox}_sandbox:{sandbox}.state"));
        std::fs::write(state, format!(r#"{{"goferPid":{gofer}}}"#)).expect("written");
        let store = dir.path().join("store");
        std::fs::create_dir(&store).expect("made");
        let store = Store::open(&store).expect("a store");
        let namespace = Namespace::try_from("n".to_owned()).expect("a name");
        let pod = PodUid::try_from("u".to_owned()).expect("a uid");
        let image = ImageId::new(pod, 1).expect("an id");
        let partial = store.begin(&namespace, &image).expect("begun");
        let runsc = Runsc::in_root(dir.path());
        checkpoint(&runsc, &sandbox, &containers, &partial, QUESTION_LIMIT)
    }

    #[test]
    fn an_image_that_a_container_is_missing_in_is_none() {
        let own = std::process::id();
        saved(vec![2, 2], own).expect("whole");
        for states in [vec![3], vec![2, 3], vec![2, 1]] {
            let error = saved(states.clone(), own).expect_err("not whole");
            assert!(
                matches!(error, Error::NotRunning(_)),
                "{states:?} {error:?}"
            );
            assert!(!error.is_unknown());
        }
    }

    #[test]
    fn an_image_of_a_sandbox_that_lost_a_gofer_meanwhile_is_none() {
        let mut gone = std::process::Command::new("true")
            .spawn()
            .expect("a process");
        let pid = gone.id();
        gone.wait().expect("it ends");
        let error = saved(vec![2, 2], pid).expect_err("not whole");
        assert_eq!(error.reason(), "GoferGone");
    }
}
