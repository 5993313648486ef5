//! Reading a paused sandbox' memory into a partial image.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use torpor_core::ids::{ContainerId, SandboxId};
use torpor_core::image_size::Stop;
use torpor_core::state::CONTAINER_NOT_RUNNING;
use torpor_snapshots::{Partial, SaveError};

use crate::control::{self, ContainerState, Control};

use crate::state;

/// For a question that gVisor answers at once.
const QUESTION_LIMIT: Duration = Duration::from_secs(5);
/// How often the sizes of an image's files are read while the sandbox writes them.
const LOOK: Duration = Duration::from_millis(100);
/// How long a sandbox whose save was stopped may take to end it. An honest one writes what is left of its memory.
const STOP_LIMIT: Duration = Duration::from_secs(20);

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
        "no room for the sandbox's memory on the disk that holds the images. Delete SandboxSnapshots, or enlarge the disk"
    )]
    DiskFull(#[source] control::Error),
    #[error("container {0} has ended or has not started: it would be missing in the image")]
    NotRunning(ContainerId),
    #[error("the gofer of container {0} has ended: its files would be missing in the image")]
    GoferGone(ContainerId),
    #[error("cannot determine whether the gofer of container {container} runs")]
    Gofer {
        container: ContainerId,
        #[source]
        source: state::Error,
    },
    #[error("{why}")]
    Stopped {
        why: Stop,
        /// The sandbox has not ended the save, and may still write into the image's files.
        writes: bool,
    },
}

impl Error {
    /// CamelCase, for conditions and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Store(error) => error.reason(),
            Self::Control(control::Error::NotRunning { .. }) => "SandboxGone",
            Self::DiskFull(_) => "DiskFull",
            Self::Control(_) => "CheckpointFailed",
            // A container without its gofer is ended as soon as the sandbox runs on, by gVisor or
            // by the agent.
            Self::NotRunning(_) | Self::GoferGone(_) => CONTAINER_NOT_RUNNING,
            Self::Gofer { .. } => "NoRecord",
            Self::Stopped { why, .. } => why.reason(),
        }
    }

    /// Whether the sandbox goes on with a save that was stopped because it wrote too much: only its end frees the disk. A sandbox that others have
    /// taken the disk from is not at fault.
    pub fn is_defiance(&self) -> bool {
        let why = match self {
            Self::Stopped { why, writes: true } => why,
            _ => return false,
        };
        matches!(why, Stop::TooLarge { .. })
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
/// An image in which one of `containers` or its files are missing could never be restored, and is
/// an error. `stop` is asked now and then whether so many bytes are too many; the files are empty
/// when it has stopped the save.
pub fn checkpoint(
    runsc_root: &Path,
    sandbox: &SandboxId,
    containers: &[ContainerId],
    partial: &Partial,
    limit: Duration,
    stop: &mut dyn FnMut(u64) -> Option<Stop>,
) -> Result<(), Error> {
    let files: Vec<File> = FILES
        .iter()
        .map(|name| partial.open_file(name).map(File::from))
        .collect::<Result<_, _>>()?;
    let mut control = Control::connect(runsc_root, sandbox.as_str())?;
    write_watched(&mut control, &files, [limit, STOP_LIMIT], stop)?;
    // A container or gofer that lives after the checkpoint has lived throughout it. A container
    // that was killed meanwhile is in the image too, and ends when it is restored.
    for container in containers {
        if !lives(&mut control, container)? {
            return Err(Error::NotRunning(container.clone()));
        }
        let gofer = state::gofer_goes_on(runsc_root, container.as_str(), sandbox.as_str());
        let goes_on = gofer.map_err(|source| Error::Gofer {
            container: container.clone(),
            source,
        })?;
        if !goes_on {
            return Err(Error::GoferGone(container.clone()));
        }
    }
    Ok(())
}

/// The second limit is for the sandbox to end a save that was stopped.
fn write_watched(
    control: &mut Control,
    files: &[File],
    [limit, stop_limit]: [Duration; 2],
    stop: &mut dyn FnMut(u64) -> Option<Stop>,
) -> Result<(), Error> {
    let mut stopped = None;
    let mut looked: Option<Instant> = None;
    let mut watch = || {
        // A sandbox that answers in drips is not looked at for each of them.
        if looked.is_none_or(|at| at.elapsed() >= LOOK) {
            looked = Some(Instant::now());
            stopped = stop(written(files));
        }
        stopped.is_none()
    };
    let fds = [&files[0], &files[1], &files[2]].map(AsFd::as_fd);
    let answer = control.checkpoint(fds, limit, &mut watch);
    if let Some(why) = stopped {
        // A sandbox that is not at fault gets the time of a whole save.
        let limit = match why {
            Stop::TooLarge { .. } => stop_limit,
            Stop::DiskShort { .. } => limit,
        };
        let ended = end_writing(control, files, limit);
        return Err(Error::Stopped {
            why,
            writes: !ended,
        });
    }
    answer?;
    // It may have written all of it since the last look.
    if let Some(why) = stop(written(files)) {
        empty(files);
        return Err(Error::Stopped { why, writes: false });
    }
    Ok(())
}

/// Bytes of the files, and of the disk that they take. XFS sets aside as many blocks again for a file that grows.
fn written(files: &[File]) -> u64 {
    let sizes = files.iter().filter_map(|file| file.metadata().ok());
    sizes
        .map(|file| file.len().max(file.blocks().saturating_mul(512) / 2))
        .fold(0, u64::saturating_add)
}

/// Frees what was written until the sandbox says that it has ended, or its time is over. Whether it has ended.
fn end_writing(control: &mut Control, files: &[File], limit: Duration) -> bool {
    let mut watch = || {
        empty(files);
        true
    };
    let answer = control.end_of_checkpoint(limit, &mut watch);
    empty(files);
    // One that closes the connection without a word may write all the same.
    matches!(answer, Ok(()) | Err(control::Error::Refused { .. }))
}

/// A file that cannot be emptied is removed with its image.
fn empty(files: &[File]) {
    for file in files {
        let _ = file.set_len(0);
    }
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
    use std::os::unix::fs::FileExt;
    use std::os::unix::net::UnixListener;

    use torpor_core::ids::{ImageId, Namespace, PodUid};
    use torpor_core::image_size;
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
        saved_with([std::process::id(); 2], answers)
    }

    /// `gofers`: process ids of the gofers of containers `aaa…` and `bbb…`, as runsc records them.
    fn saved_with(gofers: [u32; 2], answers: &[&'static str]) -> Result<(), Error> {
        let dir = tempfile::tempdir().expect("a directory");
        let sandbox = SandboxId::try_from("a".repeat(64)).expect("an id");
        let containers = ["a", "b"].map(|id| ContainerId::try_from(id.repeat(64)).expect("an id"));
        for (container, pid) in containers.iter().zip(gofers) {
            let record = serde_json::json!({ "goferPid": pid });
            state::write(dir.path(), container.as_str(), sandbox.as_str(), &record)
                .expect("written");
        }
        sandbox_with(dir.path(), sandbox.as_str(), answers.to_vec());
        let store = dir.path().join("store");
        std::fs::create_dir(&store).expect("made");
        let store = Store::open(&store).expect("a store");
        let namespace = Namespace::try_from("n".to_owned()).expect("a name");
        let pod = PodUid::try_from("u".to_owned()).expect("a uid");
        let image = ImageId::new(pod, 1).expect("an id");
        let partial = store.begin(&namespace, &image).expect("begun");
        let mut any_size = |_| None;
        checkpoint(
            dir.path(),
            &sandbox,
            &containers,
            &partial,
            QUESTION_LIMIT,
            &mut any_size,
        )
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

    #[test]
    fn an_image_of_a_container_whose_gofer_has_ended_is_none() {
        let mut gone = std::process::Command::new("true").spawn().expect("begun");
        let [lives, ended] = [std::process::id(), gone.id()];
        gone.wait().expect("it ends");
        // A container without a gofer is whole.
        saved_with([lives, 0], &[RUNS, RUNS]).expect("whole");
        for gofers in [[ended, lives], [lives, ended]] {
            let error = saved_with(gofers, &[RUNS, RUNS]).expect_err("not whole");
            assert!(matches!(error, Error::GoferGone(_)), "{error:?}");
            assert_eq!(error.reason(), CONTAINER_NOT_RUNNING);
        }
    }

    const MIB: u64 = 1 << 20;
    const CAP: u64 = 4 * MIB;

    /// How a sandbox saves itself that may write [`CAP`].
    #[derive(Clone, Copy, PartialEq)]
    enum Sandbox {
        /// Writes so many bytes and answers.
        Writes(u64),
        /// Writes more than it may, and answers once it sees that nobody wants it.
        Overshoots,
        /// Writes and never answers.
        NeverEnds,
        /// Writes more than it may, and closes the connection without an answer: it may write all the same.
        HangsUp,
    }

    const DONE: &[u8] = br#"{"success":true,"err":"","result":null}"#;

    fn serve(listener: &UnixListener, sandbox: Sandbox) {
        let (mut peer, _) = listener.accept().expect("a connection");
        let fd = peer.try_clone().expect("a copy").into();
        let (request, mut fds) = crate::keeper::receive(&fd).expect("a request");
        assert!(String::from_utf8_lossy(&request).contains("containerManager.Checkpoint"));
        let pages = File::from(fds.pop().expect("the pages' file"));
        let megabyte = vec![1; 1 << 20];
        let write = |at: u64| pages.write_all_at(&megabyte, at).expect("written");
        let bytes = match sandbox {
            Sandbox::Writes(bytes) => bytes,
            _ => 2 * CAP,
        };
        (0..bytes / MIB).for_each(|n| write(n * MIB));
        match sandbox {
            Sandbox::Writes(_) => {}
            Sandbox::Overshoots | Sandbox::HangsUp => {
                while pages.metadata().expect("examined").len() > 0 {
                    std::thread::yield_now();
                }
            }
            Sandbox::NeverEnds => {
                peer.set_nonblocking(true).expect("set");
                let mut at = bytes;
                // Until whoever saves it hangs up.
                while !matches!(peer.read(&mut [0]), Ok(0)) {
                    write(at);
                    at += MIB;
                }
                return;
            }
        }
        if sandbox == Sandbox::HangsUp {
            return;
        }
        peer.write_all(DONE).expect("an answer");
    }

    /// Saves the sandbox while the disk has so much room; answers also how many bytes are left in the files.
    fn watched(sandbox: Sandbox, free: u64) -> (Result<(), Error>, u64) {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(socket_path(dir.path(), "s")).expect("a socket");
        let served = std::thread::spawn(move || serve(&listener, sandbox));
        let file = |name| File::create_new(dir.path().join(name)).expect("made");
        let files = FILES.map(file);
        let mut control = Control::connect(dir.path(), "s").expect("connected");
        let ends = match sandbox {
            Sandbox::NeverEnds => Duration::from_millis(300),
            _ => Duration::from_secs(60),
        };
        let limits = [Duration::from_secs(60), ends];
        let mut stop = |written| image_size::stop(written, Some(CAP), Some(free), MIB);
        let saved = write_watched(&mut control, &files, limits, &mut stop);
        drop(control);
        served.join().expect("no panic");
        (saved, written(&files))
    }

    #[test]
    fn a_sandbox_that_writes_what_it_may_is_saved() {
        let (saved, left) = watched(Sandbox::Writes(CAP), MIB);
        saved.expect("saved");
        assert_eq!(left, CAP);
    }

    #[test]
    fn a_sandbox_that_writes_more_than_its_memory_is_stopped_and_nothing_is_left_of_it() {
        for sandbox in [Sandbox::Overshoots, Sandbox::Writes(2 * CAP)] {
            let (saved, left) = watched(sandbox, MIB);
            let error = saved.expect_err("stopped");
            assert_eq!(error.reason(), "ImageTooLarge");
            assert!(!error.is_defiance() && !error.is_unknown(), "{error:?}");
            assert_eq!(left, 0);
        }
    }

    #[test]
    fn a_sandbox_that_goes_on_writing_is_found_out() {
        for sandbox in [Sandbox::NeverEnds, Sandbox::HangsUp] {
            let (saved, _) = watched(sandbox, MIB);
            let error = saved.expect_err("stopped");
            assert_eq!(error.reason(), "ImageTooLarge");
            assert!(error.is_defiance() && !error.is_unknown(), "{error:?}");
        }
    }

    #[test]
    fn a_save_is_stopped_when_others_have_taken_the_disk() {
        let (saved, left) = watched(Sandbox::Overshoots, MIB - 1);
        let error = saved.expect_err("stopped");
        assert!(!error.is_defiance(), "{error:?}");
        assert_eq!(left, 0);
        let (saved, _) = watched(Sandbox::Writes(0), MIB - 1);
        assert_eq!(saved.expect_err("stopped").reason(), "DiskFull");
    }
}
