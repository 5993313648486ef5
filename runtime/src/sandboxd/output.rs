//! What a command does, in order: its output while there is any, and then its end.
//!
//! Nothing is read before it is asked for. A client that does not read stops its command, as a full pipe does.

use std::{io, pin::Pin, process::ExitStatus, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use crate::{group::Group, sandboxd::terminal::Terminal};

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
            if silent && matches!(self.exited, Exited::At(_)) {
                let status = self.group.wait().await?;
                self.over = true;
                return Ok(Some(Event::Exit(exit_code(status))));
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
                    Step::GraceOver => (self.stdout, self.stderr) = (None, None),
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
    }
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

/// As Go has it: -1 for a command that a signal ended.
fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or(-1)
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
