//! Writing a paused sandbox' memory into a partial image.

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

/// Limit of a call that gVisor answers at once.
const QUESTION_LIMIT: Duration = Duration::from_secs(5);
/// Time between two reads of the sizes of an image's files while the sandbox writes them.
const SIZE_PERIOD: Duration = Duration::from_millis(100);
/// Limit for a sandbox to end a save that was stopped. An honest sandbox writes the rest of its
/// memory.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// gVisor's names of an image's files, which `runsc restore` reads.
pub const FILES: [&str; 3] = ["checkpoint.img", "pages_meta.img", "pages.img"];

/// Why a checkpoint was not made. The sandbox is as before, unless gVisor gave no answer.
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
        /// True: the sandbox has not ended the save, and may still write into the image's files.
        writes: bool,
    },
}

impl Error {
    /// Returns the reason in CamelCase, for conditions and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Store(error) => error.reason(),
            Self::Control(control::Error::NotRunning { .. }) => "SandboxGone",
            Self::DiskFull(_) => "DiskFull",
            Self::Control(_) => "CheckpointFailed",
            // gVisor or the shim ends a container without its gofer once the sandbox runs on.
            Self::NotRunning(_) | Self::GoferGone(_) => CONTAINER_NOT_RUNNING,
            Self::Gofer { .. } => "NoRecord",
            Self::Stopped { why, .. } => why.reason(),
        }
    }

    /// Reports whether the sandbox continues a save that was stopped because the sandbox wrote too
    /// much. Only the sandbox' end frees the disk then. A sandbox is not at fault where other
    /// writers have filled the disk.
    pub fn is_defiance(&self) -> bool {
        let why = match self {
            Self::Stopped { why, writes: true } => why,
            _ => return false,
        };
        matches!(why, Stop::TooLarge { .. })
    }

    /// Reports whether the checkpoint may have been made, or may still be in progress.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Control(error) if error.is_unknown())
    }
}

impl From<control::Error> for Error {
    /// Recognizes a full disk by gVisor's error message.
    fn from(error: control::Error) -> Self {
        match &error {
            control::Error::Refused { message, .. } if message.contains("no space left") => {
                Self::DiskFull(error)
            }
            _ => Self::Control(error),
        }
    }
}

/// Writes the sandbox into new files of `partial`; the caller makes them durable. The sandbox must
/// be paused, and stays paused.
///
/// An image without one of `containers`, or without its files, could never be restored: it is an
/// error. `stop` is called now and then with the number of bytes written, and returns a reason to
/// stop the save. The files are empty after a stopped save.
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
    // that was killed during the checkpoint is in the image too, and ends when it is restored.
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

/// Writes the checkpoint and stops it where `stop` returns a reason. The second limit is for the
/// sandbox to end a stopped save.
fn write_watched(
    control: &mut Control,
    files: &[File],
    [limit, stop_limit]: [Duration; 2],
    stop: &mut dyn FnMut(u64) -> Option<Stop>,
) -> Result<(), Error> {
    let mut stopped = None;
    let mut measured: Option<Instant> = None;
    let mut watch = || {
        // A sandbox that sends its answer byte by byte does not cause a read of the sizes for each.
        if measured.is_none_or(|at| at.elapsed() >= SIZE_PERIOD) {
            measured = Some(Instant::now());
            stopped = stop(written(files));
        }
        stopped.is_none()
    };
    let fds = [&files[0], &files[1], &files[2]].map(AsFd::as_fd);
    let answer = control.checkpoint(fds, limit, &mut watch);
    if let Some(why) = stopped {
        // A sandbox that is not at fault gets the limit of a whole save.
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
    // The sandbox may have written all its bytes since the last read of the sizes.
    if let Some(why) = stop(written(files)) {
        empty(files);
        return Err(Error::Stopped { why, writes: false });
    }
    Ok(())
}

/// Returns the bytes of the files, or of half the disk blocks that they take where that is more.
/// XFS preallocates as many blocks again for a growing file.
fn written(files: &[File]) -> u64 {
    let sizes = files.iter().filter_map(|file| file.metadata().ok());
    sizes
        .map(|file| file.len().max(file.blocks().saturating_mul(512) / 2))
        .fold(0, u64::saturating_add)
}

/// Empties the files until the sandbox answers that it has ended the save, or the limit is over.
/// Returns whether the sandbox has ended it.
fn end_writing(control: &mut Control, files: &[File], limit: Duration) -> bool {
    let mut watch = || {
        empty(files);
        true
    };
    let answer = control.end_of_checkpoint(limit, &mut watch);
    empty(files);
    // A sandbox that closes the connection without an answer may still write.
    matches!(answer, Ok(()) | Err(control::Error::Refused { .. }))
}

/// Empties the files. A file that cannot be emptied is removed with its image.
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
    // gVisor also reports a container as stopped when only its first thread has ended.
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

    /// Starts a sandbox that saves itself and then gives these answers.
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
    fn a_save_fails_if_the_image_lacks_a_container() {
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
    fn a_container_counts_as_saved_if_only_its_first_thread_has_ended() {
        saved(&[RUNS, STOPPED, SOMEBODY]).expect("whole");
    }

    #[test]
    fn a_save_fails_if_the_gofer_of_a_container_has_ended() {
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

    /// Behaviour of a sandbox that may write [`CAP`] bytes.
    #[derive(Clone, Copy, PartialEq)]
    enum Sandbox {
        /// Writes so many bytes and answers.
        Writes(u64),
        /// Writes more than it may, and answers once its files are emptied.
        Overshoots,
        /// Writes and never answers.
        NeverEnds,
        /// Writes more than it may, and closes the connection without an answer. May still write.
        HangsUp,
    }

    const DONE: &[u8] = br#"{"success":true,"err":"","result":null}"#;

    fn serve(listener: &UnixListener, sandbox: Sandbox) {
        let (mut peer, _) = listener.accept().expect("a connection");
        let fd = peer.try_clone().expect("a copy").into();
        let (request, mut fds) = torpor_messages::wire::receive(&fd).expect("a request");
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
                // Until the saving process closes the connection.
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

    /// Saves the sandbox while the disk has `free` bytes. Returns also the bytes left in the files.
    fn watched(sandbox: Sandbox, free: u64) -> (Result<(), Error>, u64) {
        let dir = tempfile::tempdir().expect("a directory");
        let listener = UnixListener::bind(socket_path(dir.path(), "s")).expect("a socket");
        let served = std::thread::spawn(move || serve(&listener, sandbox));
        let file = |name| File::create_new(dir.path().join(name)).expect("made");
        let files = FILES.map(file);
        let mut control = Control::connect(dir.path(), "s").expect("connected");
        let stop_limit = match sandbox {
            Sandbox::NeverEnds => Duration::from_millis(300),
            _ => Duration::from_secs(60),
        };
        let limits = [Duration::from_secs(60), stop_limit];
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
    fn a_sandbox_that_goes_on_writing_after_its_save_was_stopped_is_detected() {
        for sandbox in [Sandbox::NeverEnds, Sandbox::HangsUp] {
            let (saved, _) = watched(sandbox, MIB);
            let error = saved.expect_err("stopped");
            assert_eq!(error.reason(), "ImageTooLarge");
            assert!(error.is_defiance() && !error.is_unknown(), "{error:?}");
        }
    }

    #[test]
    fn a_save_is_stopped_when_other_writers_have_filled_the_disk() {
        let (saved, left) = watched(Sandbox::Overshoots, MIB - 1);
        let error = saved.expect_err("stopped");
        assert!(!error.is_defiance(), "{error:?}");
        assert_eq!(left, 0);
        let (saved, _) = watched(Sandbox::Writes(0), MIB - 1);
        assert_eq!(saved.expect_err("stopped").reason(), "DiskFull");
    }
}
