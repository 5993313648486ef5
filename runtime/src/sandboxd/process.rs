//! Commands over gRPC: the service of upstream's `process.proto`.

use std::{io, pin::Pin, process::Stdio, sync::Arc, time::Duration};

use futures::Stream;
use rustix::process::Signal;
use tokio::{process::Command, time::timeout};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::{Request, Response, Status, async_trait};

use crate::{
    claim,
    files::blocking,
    group::Group,
    orphans::Children,
    proto::process::{
        self as wire, ExecuteRequest, ExecuteResponse, ExitEvent, InitEvent, ProcessConfig,
        ResizeTtyRequest, ResizeTtyResponse, SendSignalRequest, SendSignalResponse, StartRequest,
        StartResponse, WriteStdinRequest, WriteStdinResponse, start_response,
        write_stdin_request::Payload,
    },
    root::{self, Root},
    sandboxd::{
        child, deadline,
        output::{Event, Output, Source},
        processes::{Controls, Input, Process, Processes, Registered, Slot},
        terminal::Terminal,
    },
};

/// Time limit of output after the end of a command of `Start`, as in upstream.
const START_GRACE: Duration = Duration::from_secs(5);
/// Time limit of output after the end of a command of `Execute`, as in upstream.
const EXECUTE_GRACE: Duration = Duration::from_secs(10);

/// Limits of the calls.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Maximum size of each output of `Execute` in bytes.
    pub output: usize,
    /// Maximum size of an event in bytes.
    pub chunk: usize,
}

/// Implementation of the service.
#[derive(Clone, Debug)]
pub struct ProcessService {
    pub root: Arc<Root>,
    pub children: Arc<Children>,
    pub processes: Arc<Processes>,
    pub settings: Settings,
}

/// Command of `Start`, which lives as long as its call.
#[derive(Debug)]
struct Started {
    output: Output,
    /// The init event has not been sent yet.
    new: bool,
    /// Cancelled when the deadline has killed the command.
    late: CancellationToken,
    _deadline: Option<AbortOnDropHandle<()>>,
    registered: Registered,
}

#[async_trait]
impl wire::process_service_server::ProcessService for ProcessService {
    type StartStream = Pin<Box<dyn Stream<Item = Result<StartResponse, Status>> + Send>>;

    async fn start(
        &self,
        request: Request<StartRequest>,
    ) -> Result<Response<Self::StartStream>, Status> {
        let deadline = deadline::timeout_of(request.metadata());
        let StartRequest { config, pty } = request.into_inner();
        let slot = self.slot()?;
        let mut command = self.command(config).await?;
        let (output, registered) = match pty {
            None => self.start_piped(&mut command, slot)?,
            Some(size) => self.start_terminal(command, slot, &size)?,
        };
        let late = CancellationToken::new();
        // The deadline is its own task, because a client that does not read polls no events.
        let deadline = deadline.map(|limit| {
            let (late, signals) = (late.clone(), Arc::clone(&registered.process.signals));
            AbortOnDropHandle::new(tokio::spawn(async move {
                tokio::time::sleep(limit).await;
                late.cancel();
                if let Err(error) = signals.send(Signal::KILL) {
                    tracing::debug!(%error, "cannot kill a command at its deadline");
                }
            }))
        });
        let started = Started {
            output,
            new: true,
            late,
            _deadline: deadline,
            registered,
        };
        let events = futures::stream::unfold(Some(started), |started| async {
            let mut started = started?;
            match started.next().await {
                Ok(Some(event)) => Some((Ok(StartResponse { event: Some(event) }), Some(started))),
                Ok(None) => None,
                Err(status) => Some((Err(status), None)),
            }
        });
        Ok(Response::new(Box::pin(events)))
    }

    async fn execute(
        &self,
        request: Request<ExecuteRequest>,
    ) -> Result<Response<ExecuteResponse>, Status> {
        let deadline = deadline::timeout_of(request.metadata()).unwrap_or(Duration::MAX);
        let slot = self.slot()?;
        let mut command = self.command(request.into_inner().config).await?;
        command.stdin(Stdio::null());
        let mut group = self
            .start_with_pipes(&mut command)
            .map_err(|error| start_error("failed to execute command", &error))?;
        let _registered = slot.register(group.signals(), None);
        let sources = piped(&mut group);
        let output = Output::new(group, sources, self.settings.chunk, EXECUTE_GRACE);
        // At the deadline the output is dropped, which kills the command.
        match timeout(deadline, collect(output, self.settings.output)).await {
            Ok(collected) => collected.map(Response::new),
            Err(_) => Err(Status::deadline_exceeded("context deadline exceeded")),
        }
    }

    async fn write_stdin(
        &self,
        request: Request<WriteStdinRequest>,
    ) -> Result<Response<WriteStdinResponse>, Status> {
        let WriteStdinRequest {
            process_id,
            payload,
        } = request.into_inner();
        let process = self.process(process_id)?;
        match (payload, &process.controls) {
            (Some(Payload::Eof(())), Some(controls)) => controls.close().await,
            (Some(Payload::Input(input)), Some(controls)) if !input.is_empty() => {
                let written = controls.write(&input).await;
                let failed = |error| Status::internal(format!("failed to write stdin: {error}"));
                written.map_err(failed)?;
            }
            _ => {}
        }
        Ok(Response::new(WriteStdinResponse {}))
    }

    async fn send_signal(
        &self,
        request: Request<SendSignalRequest>,
    ) -> Result<Response<SendSignalResponse>, Status> {
        let SendSignalRequest { process_id, signal } = request.into_inner();
        let process = self.process(process_id)?;
        let signal = signal_of(signal)?;
        let failed = |error| Status::internal(format!("failed to send signal: {error}"));
        process.signals.send(signal).map_err(failed)?;
        Ok(Response::new(SendSignalResponse {}))
    }

    async fn resize_tty(
        &self,
        request: Request<ResizeTtyRequest>,
    ) -> Result<Response<ResizeTtyResponse>, Status> {
        let ResizeTtyRequest {
            process_id,
            cols,
            rows,
        } = request.into_inner();
        let process = self.process(process_id)?;
        let (columns, rows) = size_of(cols, rows)?;
        let terminal = process.controls.as_ref().and_then(Controls::terminal);
        let resized = match terminal {
            Some(terminal) => terminal.resize(columns, rows),
            None => Err(io::Error::other("process has no active PTY")),
        };
        let failed = |error| Status::failed_precondition(format!("failed to resize TTY: {error}"));
        resized.map_err(failed)?;
        Ok(Response::new(ResizeTtyResponse {}))
    }
}

impl ProcessService {
    fn slot(&self) -> Result<Slot, Status> {
        let full = "too many commands: --max-processes are running, or the runtime is stopping";
        let slot = self.processes.slot();
        slot.ok_or_else(|| Status::resource_exhausted(full))
    }

    fn process(&self, id: i32) -> Result<Arc<Process>, Status> {
        let process = self.processes.get(id);
        process.ok_or_else(|| Status::not_found(format!("process {id} not found")))
    }

    async fn command(&self, config: Option<ProcessConfig>) -> Result<Command, Status> {
        let config = config.unwrap_or_default();
        let Some((program, arguments)) = config.command.split_first() else {
            return Err(Status::invalid_argument("command is required"));
        };
        let mut command = Command::new(program);
        command.args(arguments).envs(claim::variables().await);
        command.envs(config.env_vars);
        match config.cwd.filter(|cwd| !cwd.is_empty()) {
            None => command.current_dir(self.root.path()),
            Some(cwd) => {
                let asked = cwd.clone();
                let opened = blocking(&self.root, move |root| root.directory(&asked)).await;
                let directory = opened.map_err(|error| cwd_error(&cwd, &error))?;
                child::start_in(&mut command, directory)
            }
        };
        Ok(command)
    }

    fn start_with_pipes(&self, command: &mut Command) -> io::Result<Group> {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Group::start(command, &self.children)
    }

    fn start_piped(
        &self,
        command: &mut Command,
        slot: Slot,
    ) -> Result<(Output, Registered), Status> {
        command.stdin(Stdio::piped());
        let mut group = self
            .start_with_pipes(command)
            .map_err(|error| start_error("failed to start command", &error))?;
        let input = group.stdin().map_or(Input::Closed, Input::Pipe);
        let registered = slot.register(group.signals(), Some(Controls::new(input)));
        let sources = piped(&mut group);
        let output = Output::new(group, sources, self.settings.chunk, START_GRACE);
        Ok((output, registered))
    }

    /// Starts a command with a terminal.
    ///
    /// `command` is taken by value to be dropped, because it holds the terminal open.
    fn start_terminal(
        &self,
        mut command: Command,
        slot: Slot,
        size: &wire::Pty,
    ) -> Result<(Output, Registered), Status> {
        let wanted = size.cols > 0 && size.rows > 0;
        let size = size_of(size.cols, size.rows)?;
        let started = || {
            let (terminal, slave) = Terminal::open(wanted.then_some(size))?;
            child::attach(&mut command, slave)?;
            let group = Group::start_session(&mut command, &self.children)?;
            Ok((Arc::new(terminal), group))
        };
        let started: io::Result<_> = { started }();
        let (terminal, group) =
            started.map_err(|error| start_error("failed to start command with PTY", &error))?;
        let controls = Controls::new(Input::Terminal(Arc::clone(&terminal)));
        let source = Source::Terminal(terminal, controls.hung_up.clone());
        let registered = slot.register(group.signals(), Some(controls));
        let output = Output::new(
            group,
            [Some(source), None],
            self.settings.chunk,
            START_GRACE,
        );
        Ok((output, registered))
    }
}

impl Started {
    async fn next(&mut self) -> Result<Option<start_response::Event>, Status> {
        if std::mem::take(&mut self.new) {
            let process_id = self.registered.id;
            return Ok(Some(start_response::Event::Init(InitEvent { process_id })));
        }
        let next = tokio::select! {
            biased;
            () = self.late.cancelled() => {
                return Err(Status::deadline_exceeded("context deadline exceeded"));
            }
            next = self.output.next() => next,
        };
        let failed = |error| Status::internal(format!("failed to read output: {error}"));
        Ok(next.map_err(failed)?.map(|event| match event {
            Event::Stdout(bytes) => start_response::Event::Stdout(bytes),
            Event::Stderr(bytes) => start_response::Event::Stderr(bytes),
            Event::Exit(exit_code) => start_response::Event::Exit(ExitEvent { exit_code }),
        }))
    }
}

fn piped(group: &mut Group) -> [Option<Source>; 2] {
    let pipes = group.pipes();
    pipes.map_or([None, None], |(stdout, stderr)| {
        [
            Some(Source::Pipe(Box::pin(stdout))),
            Some(Source::Pipe(Box::pin(stderr))),
        ]
    })
}

/// Collects the whole output; output above the limit is an error, as a part would look complete.
async fn collect(mut output: Output, limit: usize) -> Result<ExecuteResponse, Status> {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let failed = |error| Status::internal(format!("failed to execute command: {error}"));
    while let Some(event) = output.next().await.map_err(failed)? {
        match event {
            Event::Stdout(bytes) => stdout.extend_from_slice(&bytes),
            Event::Stderr(bytes) => stderr.extend_from_slice(&bytes),
            Event::Exit(exit_code) => {
                return Ok(ExecuteResponse {
                    exit_code,
                    stdout: stdout.into(),
                    stderr: stderr.into(),
                });
            }
        }
        if stdout.len().max(stderr.len()) > limit {
            let larger = "the output is larger than --max-output-bytes; the command was killed; \
                          Start streams output of any size";
            return Err(Status::resource_exhausted(larger));
        }
    }
    Err(Status::internal("failed to execute command: no exit event"))
}

fn signal_of(number: i32) -> Result<Signal, Status> {
    match wire::Signal::try_from(number) {
        Ok(wire::Signal::Sigint) => Ok(Signal::INT),
        Ok(wire::Signal::Sigkill) => Ok(Signal::KILL),
        Ok(wire::Signal::Sigterm) => Ok(Signal::TERM),
        Ok(wire::Signal::Unspecified) | Err(_) => {
            let text = format!("unsupported or unspecified signal: {number}");
            Err(Status::invalid_argument(text))
        }
    }
}

fn size_of(columns: u32, rows: u32) -> Result<(u16, u16), Status> {
    let pair = u16::try_from(columns).ok().zip(u16::try_from(rows).ok());
    pair.ok_or_else(|| Status::invalid_argument("a terminal has at most 65535 columns and rows"))
}

fn cwd_error(cwd: &str, error: &root::Error) -> Status {
    match error {
        root::Error::Denied => {
            let text = format!("cwd: access denied: path {cwd:?}: path escapes sandbox root");
            Status::permission_denied(text)
        }
        root::Error::Missing => Status::not_found(format!("cwd: {error}")),
        root::Error::Io(errno) if *errno == rustix::io::Errno::ACCESS => {
            Status::permission_denied(format!("cwd: {error}"))
        }
        _ => Status::internal(format!("cwd: {error}")),
    }
}

fn start_error(what: &str, error: &io::Error) -> Status {
    match error.kind() {
        io::ErrorKind::NotFound => {
            Status::not_found(format!("{what}: command or path not found: {error}"))
        }
        io::ErrorKind::PermissionDenied => {
            Status::permission_denied(format!("{what}: permission denied: {error}"))
        }
        // A word or variable contains a NUL byte.
        io::ErrorKind::InvalidInput => Status::invalid_argument(format!("{what}: {error}")),
        _ => Status::internal(format!("{what}: {error}")),
    }
}
