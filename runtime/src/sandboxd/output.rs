//! Events of a command: output, and at last its exit.
//!
//! Output is read only on demand: a client that does not read stops its command, as a full pipe
//! does.

use std::{
    io, os::unix::process::ExitStatusExt as _, pin::Pin, process::ExitStatus, sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures::FutureExt as _;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    task::coop::unconstrained,
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{group::Group, sandboxd::terminal::Terminal};

/// Capacity of a pipe in bytes, the most output that an ended command may have left unread.
const PIPE_CAPACITY: usize = 64 * 1024;

/// Event of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Stdout(Bytes),
    Stderr(Bytes),
    /// Exit code; the last event.
    Exit(i32),
}

/// Source of output.
pub enum Source {
    Pipe(Pin<Box<dyn AsyncRead + Send>>),
    /// Terminal, which ends when no process has it open or the token is cancelled by a hangup.
    Terminal(Arc<Terminal>, CancellationToken),
}

/// Running command and its output. Dropping it before the end kills the command.
pub struct Output {
    group: Group,
    stdout: Option<Source>,
    stderr: Option<Source>,
    /// Maximum size of an event in bytes.
    chunk: usize,
    /// Time limit of output after the end of the command itself.
    grace: Duration,
    exited: Exited,
    over: bool,
}

enum Exited {
    Not(Pin<Box<dyn Future<Output = io::Result<()>> + Send>>),
    At(Instant),
    /// The grace period is over: only output that is there already is read.
    ///
    /// A slow reader gets the rest. `left` limits the bytes of each output, because background
    /// processes may write without end.
    GraceOver {
        left: [usize; 2],
    },
}

impl Output {
    /// Follows a command. Background processes that hold its output delay the exit by at most
    /// `grace`.
    pub fn new(group: Group, sources: [Option<Source>; 2], chunk: usize, grace: Duration) -> Self {
        let exited = Exited::Not(Box::pin(group.exited()));
        let [stdout, stderr] = sources;
        Self {
            group,
            stdout,
            stderr,
            chunk,
            grace,
            exited,
            over: false,
        }
    }

    /// Returns the next event; `None` after [`Event::Exit`]. Dropping the future loses no output.
    pub async fn next(&mut self) -> io::Result<Option<Event>> {
        while !self.over {
            let drained = self.stdout.is_none() && self.stderr.is_none();
            if drained && !matches!(self.exited, Exited::Not(_)) {
                let status = self.group.wait().await?;
                self.over = true;
                return Ok(Some(Event::Exit(exit_code(status))));
            }
            if let Exited::GraceOver { left: [out, err] } = &mut self.exited {
                if let Some(piece) = read_available(&mut self.stdout, self.chunk, out)? {
                    return Ok(Some(Event::Stdout(piece)));
                }
                if let Some(piece) = read_available(&mut self.stderr, self.chunk, err)? {
                    return Ok(Some(Event::Stderr(piece)));
                }
                (self.stdout, self.stderr) = (None, None);
                continue;
            }
            tokio::select! {
                piece = read(&mut self.stdout, self.chunk), if self.stdout.is_some() => match piece? {
                    Some(piece) => return Ok(Some(Event::Stdout(piece))),
                    None => self.stdout = None,
                },
                piece = read(&mut self.stderr, self.chunk), if self.stderr.is_some() => match piece? {
                    Some(piece) => return Ok(Some(Event::Stderr(piece))),
                    None => self.stderr = None,
                },
                result = step(&mut self.exited, self.grace) => match result? {
                    Step::Exited => self.exited = Exited::At(Instant::now()),
                    Step::GraceOver => {
                        self.exited = Exited::GraceOver { left: [PIPE_CAPACITY; 2] };
                    }
                },
            }
        }
        Ok(None)
    }
}

enum Step {
    Exited,
    GraceOver,
}

async fn step(exited: &mut Exited, grace: Duration) -> io::Result<Step> {
    match exited {
        Exited::Not(exited) => exited.await.map(|()| Step::Exited),
        Exited::At(end) => {
            tokio::time::sleep_until(*end + grace).await;
            Ok(Step::GraceOver)
        }
        Exited::GraceOver { .. } => Ok(Step::GraceOver),
    }
}

/// Reads a piece of the output that is there already, at most `left` bytes.
fn read_available(
    source: &mut Option<Source>,
    chunk: usize,
    left: &mut usize,
) -> io::Result<Option<Bytes>> {
    // Without `unconstrained`, tokio's cooperative budget may report a ready source as pending.
    let reading = unconstrained(read(source, chunk.min(*left)));
    let piece = reading.now_or_never().transpose()?.flatten();
    *left -= piece.as_ref().map_or(0, Bytes::len);
    Ok(piece)
}

async fn read(source: &mut Option<Source>, chunk: usize) -> io::Result<Option<Bytes>> {
    let mut buffer = vec![0; chunk];
    let read = match source {
        None => 0,
        Some(Source::Pipe(pipe)) => pipe.read(&mut buffer).await?,
        Some(Source::Terminal(terminal, hung_up)) => tokio::select! {
            read = terminal.read(&mut buffer) => read?,
            () = hung_up.cancelled() => 0,
        },
    };
    buffer.truncate(read);
    Ok((read > 0).then(|| Bytes::from(buffer)))
}

/// Returns the exit code of a command as shells and upstream do (#1897, 1.0.7): 128 + n if signal n
/// ended the command.
fn exit_code(status: ExitStatus) -> i32 {
    let signal_code = || status.signal().map(|signal| 128 + signal);
    status.code().or_else(signal_code).unwrap_or(-1)
}

impl std::fmt::Debug for Output {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Output")
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Pipe(_) => "Pipe",
            Self::Terminal(..) => "Terminal",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use rstest::rstest;
    use tokio::{process::Command, time::sleep};

    use super::*;

    /// The raw status is that of POSIX `wait`: the code in the second byte, or the signal.
    #[rstest]
    #[case(0, 0)]
    #[case(3 << 8, 3)]
    #[case(255 << 8, 255)]
    #[case(9, 137)]
    #[case(15, 143)]
    #[case(11 | 0x80, 139)]
    fn the_exit_code_of_a_signal_is_that_of_shells(#[case] raw: i32, #[case] code: i32) {
        assert_eq!(exit_code(ExitStatus::from_raw(raw)), code);
    }

    const GRACE: Duration = Duration::from_millis(5);

    fn started(script: &str, chunk: usize) -> Output {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut group = Group::start(&mut command, &Arc::default()).unwrap();
        let (stdout, stderr) = group.pipes().unwrap();
        let sources = [
            Some(Source::Pipe(Box::pin(stdout))),
            Some(Source::Pipe(Box::pin(stderr))),
        ];
        Output::new(group, sources, chunk, GRACE)
    }

    /// Reads to the end with a pause after each event, and returns the number of bytes and the exit
    /// code.
    async fn read_all(mut output: Output, pause: Duration) -> (usize, Option<i32>) {
        let (mut bytes, mut code) = (0, None);
        while let Some(event) = output.next().await.unwrap() {
            match event {
                Event::Stdout(piece) | Event::Stderr(piece) => bytes += piece.len(),
                Event::Exit(exit) => code = Some(exit),
            }
            sleep(pause).await;
        }
        (bytes, code)
    }

    #[tokio::test]
    async fn a_reader_slower_than_the_grace_period_gets_all_output_of_an_ended_command() {
        let script = "head -c 15000 /dev/zero; head -c 15000 /dev/zero >&2; exit 3";
        let output = started(script, 1000);
        assert_eq!(read_all(output, 2 * GRACE).await, (30_000, Some(3)));
    }

    #[tokio::test]
    async fn a_background_process_that_keeps_writing_does_not_delay_the_exit() {
        let reading = read_all(started("yes & exit 0", 1000), Duration::ZERO);
        let ended = tokio::time::timeout(Duration::from_secs(30), reading).await;
        assert_eq!(ended.unwrap().1, Some(0));
    }
}
