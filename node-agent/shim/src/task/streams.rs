//! The standard streams of a container or of an exec'd process, as containerd names them.
//!
//! containerd makes a named pipe for each stream and gives its path. The process in the sandbox
//! gets the pipe itself, so that no byte passes through the shim. The shim holds the other end of
//! each pipe, too: containerd closes its own when it restarts, and the process would get SIGPIPE or
//! the end of its input.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::libc::{ENXIO, O_NONBLOCK};
use rustix::fs::OFlags;

use crate::keeper::Streams;

/// Time for containerd to open its end of an output. It takes a millisecond, unless containerd gets
/// no processor time or has died.
const READER_LIMIT: Duration = Duration::from_secs(10);
/// Time between two attempts.
const READER_INTERVAL: Duration = Duration::from_micros(500);

/// The paths of streams. An empty path is no stream.
#[derive(Debug, Clone, Default)]
pub(crate) struct Paths {
    pub(crate) stdin: String,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) terminal: bool,
}

/// The ends of the pipes that the shim holds.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// The writing end of standard input.
    pub(crate) stdin: Option<OwnedFd>,
    /// The reading ends of the others.
    _outputs: Vec<OwnedFd>,
}

/// Opens the streams for a process, and the ends that the shim holds.
pub(crate) fn open(paths: &Paths) -> anyhow::Result<(Streams, Held)> {
    let (stdin, writer) = input(&paths.stdin)?;
    let (stdout, first) = output(&paths.stdout)?;
    // A terminal has one output.
    let stderr = match paths.terminal {
        true => "",
        false => &paths.stderr,
    };
    let (stderr, second) = output(stderr)?;
    let held = Held {
        stdin: writer,
        _outputs: first.into_iter().chain(second).collect(),
    };
    let streams = Streams {
        stdin,
        stdout,
        stderr,
    };
    Ok((streams, held))
}

fn input(path: &str) -> anyhow::Result<(OwnedFd, Option<OwnedFd>)> {
    if path.is_empty() {
        return Ok((nothing()?, None));
    }
    // A pipe without a writer can only be opened like this.
    let reader = pipe(path, OpenOptions::new().read(true).custom_flags(O_NONBLOCK))?;
    let writer = pipe(path, OpenOptions::new().write(true))?;
    block(&reader)?;
    Ok((reader.into(), Some(writer.into())))
}

fn output(path: &str) -> anyhow::Result<(OwnedFd, Option<OwnedFd>)> {
    if path.is_empty() {
        return Ok((nothing()?, None));
    }
    // It stays open until the next one is: containerd must never see a pipe without a writer.
    let _first = await_reader(path);
    let reader = pipe(path, OpenOptions::new().read(true).custom_flags(O_NONBLOCK))?;
    let writer = pipe(path, OpenOptions::new().write(true))?;
    Ok((writer.into(), Some(reader.into())))
}

/// Waits until containerd has opened its end of an output; returns a writing end.
///
/// containerd opens it in a goroutine, which waits for a writer. It would wait for ever for a
/// process that has ended before, and the caller of the exec with it.
fn await_reader(path: &str) -> Option<File> {
    let deadline = Instant::now() + READER_LIMIT;
    loop {
        match OpenOptions::new()
            .write(true)
            .custom_flags(O_NONBLOCK)
            .open(path)
        {
            Err(error) if error.raw_os_error() == Some(ENXIO) && Instant::now() < deadline => {
                std::thread::sleep(READER_INTERVAL);
            }
            // The output works without containerd. Any other error is that of the next call.
            opened => return opened.ok(),
        }
    }
}

fn pipe(path: &str, options: &OpenOptions) -> anyhow::Result<File> {
    let path = Path::new(path);
    if !path.is_absolute() {
        // containerd also has the forms binary:// and file://, which its CRI does not use.
        bail!("the stream {} is not a named pipe", path.display());
    }
    let open = || options.open(path);
    let file = open().with_context(|| format!("cannot open the stream {}", path.display()))?;
    if !file.metadata()?.file_type().is_fifo() {
        bail!("the stream {} is not a named pipe", path.display());
    }
    Ok(file)
}

/// Makes reads wait for bytes, as a process expects of its standard input.
fn block(file: impl AsFd) -> anyhow::Result<()> {
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags.difference(OFlags::NONBLOCK))?;
    Ok(())
}

fn nothing() -> anyhow::Result<OwnedFd> {
    let file = torpor_sandbox::process::nothing().context("cannot open /dev/null")?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn named(dir: &Path, name: &str) -> String {
        let path = dir.join(name);
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
        path.to_str().expect("UTF-8").to_owned()
    }

    /// Opens the streams while containerd opens its end of the output.
    fn opened(paths: &Paths) -> (Streams, Held) {
        std::thread::scope(|scope| {
            let opening = scope.spawn(|| open(paths).expect("opened"));
            let reader = File::open(&paths.stdout).expect("opened");
            let opened = opening.join().expect("no panic");
            drop(reader);
            opened
        })
    }

    #[test]
    fn the_output_of_a_process_that_ends_at_once_ends_for_containerd_too() {
        let dir = tempfile::tempdir().expect("a directory");
        let paths = Paths {
            stdout: named(dir.path(), "out"),
            ..Paths::default()
        };
        std::thread::scope(|scope| {
            let process = scope.spawn(|| drop(open(&paths).expect("opened")));
            // However long containerd takes, its end is opened first.
            std::thread::sleep(READER_INTERVAL * 20);
            assert!(!process.is_finished());
            let mut out = File::open(&paths.stdout).expect("opened");
            let mut bytes = Vec::new();
            assert_eq!(out.read_to_end(&mut bytes).expect("read"), 0);
        });
    }

    #[test]
    fn containerds_restart_neither_ends_the_input_nor_breaks_the_output() {
        let dir = tempfile::tempdir().expect("a directory");
        let paths = Paths {
            stdin: named(dir.path(), "in"),
            stdout: named(dir.path(), "out"),
            ..Paths::default()
        };
        let (streams, held) = opened(&paths);
        let containerd = || {
            let out = OpenOptions::new()
                .read(true)
                .custom_flags(O_NONBLOCK)
                .open(&paths.stdout)
                .expect("opened");
            let into = OpenOptions::new()
                .write(true)
                .open(&paths.stdin)
                .expect("opened");
            (into, out)
        };
        let (mut stdin, mut stdout) = (File::from(streams.stdin), File::from(streams.stdout));
        let (into, out) = containerd();
        drop((into, out));
        stdout.write_all(b"x").expect("the pipe is open");
        let (mut into, mut out) = containerd();
        let mut byte = [0];
        out.read_exact(&mut byte).expect("the byte has waited");
        into.write_all(b"y").expect("written");
        stdin.read_exact(&mut byte).expect("read");
        assert_eq!(&byte, b"y");
        drop(into);
        drop(held);
        assert_eq!(
            stdin.read(&mut byte).expect("read"),
            0,
            "the input is closed"
        );
        drop((stdout, streams.stderr));
        assert_eq!(
            out.read(&mut byte).expect("read"),
            0,
            "the output has ended"
        );
    }

    #[test]
    fn only_named_pipes_are_streams() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("file");
        File::create(&file).expect("made");
        for path in [file.to_str().expect("UTF-8"), "binary:///bin/logger", "out"] {
            let stdout = path.to_owned();
            let paths = Paths {
                stdout,
                ..Paths::default()
            };
            let error = open(&paths).expect_err("no pipe").to_string();
            assert!(error.contains("is not a named pipe"), "{error}");
        }
    }
}
