//! What a command does, in order: its output while there is any, and then its end.
//!
//! Nothing is read before it is asked for. A client that does not read stops its command, as a full pipe does.

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

/// What a command may have left in one of its outputs, in bytes: as much as a pipe holds.
const HELD: usize = 64 * 1024;

/// What a command did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Stdout(Bytes),
    Stderr(Bytes),
    /// The last.
    Exit(i32),
}

/// Where output comes from.
pub enum Source {
    Pipe(Pin<Box<dyn AsyncRead + Send>>),
    /// Until no process has it open, or it is hung up.
    Terminal(Arc<Terminal>, CancellationToken),
}

/// A command and its output. Dropped before the end, it is killed.
pub struct Output {
    group: Group,
    stdout: Option<Source>,
    stderr: Option<Source>,
    /// Bytes of an event at most.
    chunk: usize,
    /// How long output is waited for after the end of the command itself.
    grace: Duration,
    exited: Exited,
    over: bool,
}

enum Exited {
    Not(Pin<Box<dyn Future<Output = io::Result<()>> + Send>>),
    At(Instant),
    /// So long ago that no more output is waited for. What is there is read yet, as its reader may have been slow; but of each output no more than this, as what was left
    /// in the background may write for ever.
    Before {
        left: [usize; 2],
    },
}

impl Output {
    /// Follows a command. What it left in the background and that holds its output is waited for no longer than `grace`.
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

    /// The next event; none after [`Event::Exit`]. Nothing is lost when this future is dropped.
    pub async fn next(&mut self) -> io::Result<Option<Event>> {
        while !self.over {
            let silent = self.stdout.is_none() && self.stderr.is_none();
            if silent && !matches!(self.exited, Exited::Not(_)) {
                let status = self.group.wait().await?;
                self.over = true;
                return Ok(Some(Event::Exit(exit_code(status))));
            }
            if let Exited::Before { left: [out, err] } = &mut self.exited {
                if let Some(piece) = at_hand(&mut self.stdout, self.chunk, out)? {
                    return Ok(Some(Event::Stdout(piece)));
                }
                if let Some(piece) = at_hand(&mut self.stderr, self.chunk, err)? {
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
                    Step::GraceOver => self.exited = Exited::Before { left: [HELD; 2] },
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
        Exited::Before { .. } => Ok(Step::GraceOver),
    }
}

/// A piece of what is there already, and of what is left to be read.
fn at_hand(
    source: &mut Option<Source>,
    chunk: usize,
    left: &mut usize,
) -> io::Result<Option<Bytes>> {
    // tokio lets a task that has done much find nothing for a while.
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

/// The exit code of a command, as shells and upstream have it (#1897, 1.0.7): 128 and the signal's
/// number where a signal ended it.
fn exit_code(status: ExitStatus) -> i32 {
    let of_signal = || status.signal().map(|signal| 128 + signal);
    status.code().or_else(of_signal).unwrap_or(-1)
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

    /// The raw status is what `wait` of POSIX gives: the code in the second byte, or the signal.
    #[rstest]
    #[case(0, 0)]
    #[case(3 << 8, 3)]
    #[case(255 << 8, 255)]
    #[case(9, 137)]
    #[case(15, 143)]
    #[case(11 | 0x80, 139)]
    fn a_signal_is_told_as_shells_do(#[case] raw: i32, #[case] code: i32) {
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

    /// Reads to the end, with a rest after each piece: how many bytes of both outputs there were, and the exit code.
    async fn read_all(mut output: Output, rest: Duration) -> (usize, Option<i32>) {
        let (mut bytes, mut code) = (0, None);
        while let Some(event) = output.next().await.unwrap() {
            match event {
                Event::Stdout(piece) | Event::Stderr(piece) => bytes += piece.len(),
                Event::Exit(exit) => code = Some(exit),
            }
            sleep(rest).await;
        }
        (bytes, code)
    }

    #[tokio::test]
    async fn a_reader_that_is_slower_than_the_grace_gets_all_that_an_ended_command_said() {
        let script = "head -c 15000 /dev/zero; head -c 15000 /dev/zero >&2; exit 3";
        let output = started(script, 1000);
        assert_eq!(read_all(output, 2 * GRACE).await, (30_000, Some(3)));
    }

    #[tokio::test]
    async fn what_writes_on_in_the_background_does_not_hold_the_end_up() {
        let reading = read_all(started("yes & exit 0", 1000), Duration::ZERO);
        let ended = tokio::time::timeout(Duration::from_secs(30), reading).await;
        assert_eq!(ended.unwrap().1, Some(0));
    }
}
