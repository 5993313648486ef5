//! containerd's task service, version 2: one call for each thing that happens to a container.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use containerd_shim::api::{
    CloseIORequest, ConnectRequest, ConnectResponse, CreateTaskRequest, CreateTaskResponse,
    DeleteRequest, DeleteResponse, Empty, ExecProcessRequest, KillRequest, PauseRequest,
    PidsRequest, PidsResponse, ResizePtyRequest, ResumeRequest, ShutdownRequest, StartRequest,
    StartResponse, StateRequest, StateResponse, StatsRequest, StatsResponse, Status,
    UpdateTaskRequest, WaitRequest, WaitResponse,
};
use containerd_shim::protos::events::task::{
    TaskCreate, TaskDelete, TaskExecAdded, TaskExit, TaskIO, TaskPaused, TaskResumed,
};
use containerd_shim::protos::protobuf::well_known_types::timestamp::Timestamp;
use containerd_shim::protos::protobuf::{EnumOrUnknown, MessageField};
use containerd_shim::protos::ttrpc::{self, Code, get_status};
use containerd_shim::protos::types::task::ProcessInfo;
use containerd_shim::{Task, TtrpcContext};
use nix::sys::signal::Signal;
use torpor_core::ids::ContainerId;
use torpor_messages::keeper::{self, Request};
use torpor_runsc::control;
use torpor_sandbox::node::{CALL_LIMIT, Node};

use crate::commands::FINISHED;
use crate::keeper::relay::window;

pub(crate) mod container;
pub(crate) mod events;
mod exec;
pub(crate) mod init;
mod process;
mod run;
mod stats;
mod streams;
pub(crate) mod verbs;

use container::{Container, Pod, lock};
use exec::Exec;
use process::{Exit, Life, Stage};
use streams::Paths;
use verbs::{Caller, Refused};

/// Most processes of exec in one container at once. Each holds up to eight descriptors of the shim,
/// which needs some to end the container.
const MAX_EXECS: usize = 256;

type Result<T> = ttrpc::Result<T>;

/// The process id that containerd gets of every process of the pod: those in the sandbox have none
/// on this machine.
pub(crate) fn own_pid() -> u32 {
    std::process::id()
}

pub(crate) fn timestamp(time: SystemTime) -> Timestamp {
    time.into()
}

/// Returns the event of the end of a process. `id`: the container's, for its first process.
fn exited(container: &ContainerId, id: &str, exit: Exit) -> TaskExit {
    TaskExit {
        container_id: container.to_string(),
        id: id.to_owned(),
        pid: own_pid(),
        exit_status: exit.code.into(),
        exited_at: MessageField::some(timestamp(exit.at)),
        ..TaskExit::default()
    }
}

fn status(code: Code, message: impl std::fmt::Display) -> ttrpc::Error {
    ttrpc::Error::RpcStatus(get_status(code, message))
}

fn failed(error: anyhow::Error) -> ttrpc::Error {
    status(Code::UNKNOWN, format_args!("{error:#}"))
}

/// Returns the error for a process that has ended: containerd reads the code; the words are those
/// of its own shim (`cmd/containerd-shim-runc-v2/process/utils.go`).
fn finished() -> ttrpc::Error {
    status(Code::NOT_FOUND, "process already finished")
}

fn missing(id: &str) -> ttrpc::Error {
    status(Code::NOT_FOUND, format_args!("{id}: not found"))
}

/// The containers of one pod.
pub(crate) struct TaskService {
    pub(crate) pod: Arc<Pod>,
}

/// A process that a call names.
enum Named {
    Init(Arc<Container>),
    Exec(Arc<Exec>),
}

impl Named {
    fn life(&self) -> &Life {
        match self {
            Self::Init(container) => &container.life,
            Self::Exec(exec) => &exec.life,
        }
    }

    fn paths(&self) -> &Paths {
        match self {
            Self::Init(container) => &container.paths,
            Self::Exec(exec) => &exec.paths,
        }
    }
}

impl TaskService {
    fn container(&self, id: &str) -> Result<Arc<Container>> {
        self.pod.get(id).ok_or_else(|| missing(id))
    }

    /// Returns the container, also one whose creation is under way.
    fn container_to_delete(&self, id: &str) -> Result<Arc<Container>> {
        self.container(id).or_else(|_| {
            let _created = lock(&self.pod.creating);
            self.container(id)
        })
    }

    /// Returns the process: of an empty `exec`, the container's first one.
    fn named(&self, id: &str, exec: &str) -> Result<Named> {
        Self::named_in(self.container(id)?, exec)
    }

    fn named_in(container: Arc<Container>, exec: &str) -> Result<Named> {
        if exec.is_empty() {
            return Ok(Named::Init(container));
        }
        let found = container.exec(exec).ok_or_else(|| missing(exec))?;
        Ok(Named::Exec(found))
    }

    fn node(&self) -> Result<&Node> {
        self.pod.node().map(AsRef::as_ref).map_err(failed)
    }

    fn kill_init(&self, container: &Container, signal: u32, all: bool) -> Result<()> {
        if container.life.exit().is_some() {
            return Err(finished());
        }
        let signal = signal.to_string();
        let mut args = vec![container.id.as_str(), signal.as_str()];
        args.extend(all.then_some("--all"));
        verbs::run("kill", &args).map_err(|error| match error.downcast_ref::<Refused>() {
            Some(refused) if refused.reason == FINISHED => finished(),
            _ => failed(error),
        })
    }

    fn kill_exec(&self, exec: &Exec, signal: u32) -> Result<()> {
        if exec.life.exit().is_some() {
            return Err(finished());
        }
        let number = i32::try_from(signal).unwrap_or(0);
        match exec.signal(&self.pod, number) {
            None => Err(status(
                Code::FAILED_PRECONDITION,
                "the process is not started",
            )),
            Some(Ok(())) => Ok(()),
            // The process has just ended.
            Some(Err(control::Error::NotRunning { .. } | control::Error::Refused { .. })) => {
                Err(finished())
            }
            // A sandbox that does not answer cannot keep the caller from giving the process up.
            Some(Err(_)) if number == Signal::SIGKILL as i32 => {
                exec.give_up();
                Ok(())
            }
            Some(Err(error)) => Err(failed(anyhow::Error::new(error))),
        }
    }

    fn delete_exec(&self, container: &Container, exec: &Exec) -> Result<Exit> {
        let exit = match exec.life.stage() {
            Stage::Ended(exit) => exit,
            Stage::Created => exec.life.end(0),
            Stage::Started => {
                let text = "the process runs, and cannot be deleted";
                return Err(status(Code::FAILED_PRECONDITION, text));
            }
        };
        lock(&container.execs).remove(&exec.id);
        Ok(exit)
    }

    fn delete_init(&self, container: &Container) -> Result<Exit> {
        if container.life.stage() == Stage::Started {
            let text = "the container runs, and cannot be deleted";
            return Err(status(Code::FAILED_PRECONDITION, text));
        }
        init::delete(&self.pod, container).map_err(failed)?;
        let exit = container.life.wait();
        let id = container.id.to_string();
        let event = TaskDelete {
            container_id: id.clone(),
            id,
            pid: own_pid(),
            exit_status: exit.code.into(),
            exited_at: MessageField::some(timestamp(exit.at)),
            ..TaskDelete::default()
        };
        self.pod.events.publish(&event);
        Ok(exit)
    }
}

impl Task for TaskService {
    fn create(&self, call: &TtrpcContext, req: CreateTaskRequest) -> Result<CreateTaskResponse> {
        let id = ContainerId::try_from(req.id.clone())
            .map_err(|error| status(Code::INVALID_ARGUMENT, error))?;
        let paths = Paths {
            stdin: req.stdin.clone(),
            stdout: req.stdout.clone(),
            stderr: req.stderr.clone(),
            terminal: req.terminal,
        };
        let bundle = Path::new(&req.bundle);
        init::create(&self.pod, Caller(call), id, bundle, &req.rootfs, paths).map_err(failed)?;
        let event = TaskCreate {
            container_id: req.id,
            bundle: req.bundle,
            rootfs: req.rootfs,
            io: MessageField::some(TaskIO {
                stdin: req.stdin,
                stdout: req.stdout,
                stderr: req.stderr,
                terminal: req.terminal,
                ..TaskIO::default()
            }),
            checkpoint: req.checkpoint,
            pid: own_pid(),
            ..TaskCreate::default()
        };
        self.pod.events.publish(&event);
        Ok(CreateTaskResponse {
            pid: own_pid(),
            ..CreateTaskResponse::default()
        })
    }

    fn start(&self, call: &TtrpcContext, req: StartRequest) -> Result<StartResponse> {
        match self.named(&req.id, &req.exec_id)? {
            Named::Init(container) => init::start(&self.pod, Caller(call), &container),
            Named::Exec(exec) => exec.start(&self.pod, Caller(call)),
        }
        .map_err(failed)?;
        Ok(StartResponse {
            pid: own_pid(),
            ..StartResponse::default()
        })
    }

    fn exec(&self, _: &TtrpcContext, req: ExecProcessRequest) -> Result<Empty> {
        let container = self.container(&req.id)?;
        let process = serde_json::from_slice(&req.spec.value)
            .map_err(|error| status(Code::INVALID_ARGUMENT, error))?;
        let paths = Paths {
            stdin: req.stdin,
            stdout: req.stdout,
            stderr: req.stderr,
            terminal: req.terminal,
        };
        let (id, of) = (req.exec_id, container.id.clone());
        let exec = Arc::new(Exec::new(id.clone(), of, process, paths));
        let mut execs = lock(&container.execs);
        if execs.contains_key(&id) {
            let text = format_args!("the process {id} exists");
            return Err(status(Code::ALREADY_EXISTS, text));
        }
        if execs.len() >= MAX_EXECS {
            let text = format_args!("the container has {MAX_EXECS} processes of exec");
            return Err(status(Code::RESOURCE_EXHAUSTED, text));
        }
        execs.insert(id.clone(), exec);
        drop(execs);
        let event = TaskExecAdded {
            container_id: req.id,
            exec_id: id,
            ..TaskExecAdded::default()
        };
        self.pod.events.publish(&event);
        Ok(Empty::default())
    }

    fn state(&self, _: &TtrpcContext, req: StateRequest) -> Result<StateResponse> {
        let named = self.named(&req.id, &req.exec_id)?;
        let (status, exit) = match named.life().stage() {
            Stage::Created => (Status::CREATED, None),
            // Also while the sandbox is paused, for a save or by a user: a containerd that starts
            // gives up the containers of a paused task.
            Stage::Started => (Status::RUNNING, None),
            Stage::Ended(exit) => (Status::STOPPED, Some(exit)),
        };
        let paths = named.paths().clone();
        Ok(StateResponse {
            bundle: match &named {
                Named::Init(container) => container.bundle.to_string_lossy().into_owned(),
                Named::Exec(_) => String::new(),
            },
            id: req.id,
            exec_id: req.exec_id,
            pid: own_pid(),
            status: EnumOrUnknown::new(status),
            stdin: paths.stdin,
            stdout: paths.stdout,
            stderr: paths.stderr,
            terminal: paths.terminal,
            exit_status: exit.map_or(0, |exit| exit.code.into()),
            exited_at: exit.map(|exit| timestamp(exit.at)).into(),
            ..StateResponse::default()
        })
    }

    fn wait(&self, call: &TtrpcContext, req: WaitRequest) -> Result<WaitResponse> {
        let named = self.named(&req.id, &req.exec_id)?;
        let waited = named.life().wait_unless(|| Caller(call).is_gone());
        let exit = waited.ok_or_else(|| status(Code::CANCELLED, "nobody waits any more"))?;
        Ok(WaitResponse {
            exit_status: exit.code.into(),
            exited_at: MessageField::some(timestamp(exit.at)),
            ..WaitResponse::default()
        })
    }

    fn kill(&self, _: &TtrpcContext, req: KillRequest) -> Result<Empty> {
        match self.named(&req.id, &req.exec_id)? {
            Named::Init(container) => self.kill_init(&container, req.signal, req.all)?,
            Named::Exec(exec) => self.kill_exec(&exec, req.signal)?,
        }
        Ok(Empty::default())
    }

    fn delete(&self, _: &TtrpcContext, req: DeleteRequest) -> Result<DeleteResponse> {
        let container = self.container_to_delete(&req.id)?;
        let exit = match Self::named_in(Arc::clone(&container), &req.exec_id)? {
            Named::Init(container) => self.delete_init(&container)?,
            Named::Exec(exec) => self.delete_exec(&container, &exec)?,
        };
        Ok(DeleteResponse {
            pid: own_pid(),
            exit_status: exit.code.into(),
            exited_at: MessageField::some(timestamp(exit.at)),
            ..DeleteResponse::default()
        })
    }

    fn pause(&self, _: &TtrpcContext, req: PauseRequest) -> Result<Empty> {
        let container = self.container(&req.id)?;
        verbs::run("pause", &[container.id.as_str()]).map_err(failed)?;
        let event = TaskPaused {
            container_id: req.id,
            ..TaskPaused::default()
        };
        self.pod.events.publish(&event);
        Ok(Empty::default())
    }

    fn resume(&self, _: &TtrpcContext, req: ResumeRequest) -> Result<Empty> {
        let container = self.container(&req.id)?;
        verbs::run("resume", &[container.id.as_str()]).map_err(failed)?;
        let event = TaskResumed {
            container_id: req.id,
            ..TaskResumed::default()
        };
        self.pod.events.publish(&event);
        Ok(Empty::default())
    }

    fn pids(&self, _: &TtrpcContext, req: PidsRequest) -> Result<PidsResponse> {
        // containerd takes a container without a process for one that it has lost.
        self.container(&req.id)?;
        Ok(PidsResponse {
            processes: vec![ProcessInfo {
                pid: own_pid(),
                ..ProcessInfo::default()
            }],
            ..PidsResponse::default()
        })
    }

    fn resize_pty(&self, _: &TtrpcContext, req: ResizePtyRequest) -> Result<Empty> {
        let rows = u16::try_from(req.height).unwrap_or(u16::MAX);
        let columns = u16::try_from(req.width).unwrap_or(u16::MAX);
        match self.named(&req.id, &req.exec_id)? {
            Named::Init(container) => {
                let dir = self.node()?.records.container_dir(&container.id);
                let request = Request::Resize { rows, columns };
                keeper::ask(&dir, &request, &[], CALL_LIMIT)
                    .map_err(|error| failed(anyhow::Error::new(error)))?;
            }
            Named::Exec(exec) => exec.resize(&self.pod, window(rows, columns)),
        }
        Ok(Empty::default())
    }

    fn close_io(&self, _: &TtrpcContext, req: CloseIORequest) -> Result<Empty> {
        match self.named(&req.id, &req.exec_id)? {
            Named::Init(container) => lock(&container.held).stdin = None,
            Named::Exec(exec) => exec.close_stdin(),
        }
        Ok(Empty::default())
    }

    /// Accepts new limits: the kubelet sets those of a pod on the pod's cgroup.
    fn update(&self, _: &TtrpcContext, req: UpdateTaskRequest) -> Result<Empty> {
        self.container(&req.id).map(|_| Empty::default())
    }

    fn stats(&self, _: &TtrpcContext, req: StatsRequest) -> Result<StatsResponse> {
        let container = self.container(&req.id)?;
        let node = self.node()?;
        let record = node.container(&container.id).map_err(failed)?;
        let figures = stats::read(&node.cgroups, &record.cgroup)?;
        Ok(StatsResponse {
            stats: MessageField::some(figures),
            ..StatsResponse::default()
        })
    }

    fn connect(&self, _: &TtrpcContext, req: ConnectRequest) -> Result<ConnectResponse> {
        let known = self.pod.get(&req.id).is_some();
        Ok(ConnectResponse {
            shim_pid: own_pid(),
            task_pid: if known { own_pid() } else { 0 },
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..ConnectResponse::default()
        })
    }

    /// Ends the shim once the pod has no container.
    fn shutdown(&self, _: &TtrpcContext, req: ShutdownRequest) -> Result<Empty> {
        if self.pod.is_empty() || req.now {
            self.pod.end.give();
        }
        Ok(Empty::default())
    }
}
