//! A fake containerd: a gRPC server on a unix socket that answers like containerd 2.4 with the
//! shims of runc and Kata.
//!
//! Sources of its answers:
//! - `plugins/services/tasks/local.go`, getTask: `task X not found`, NotFound
//! - `cmd/containerd-shim-runc-v2/process/init_state.go`: refused calls per state and their
//!   messages; an error without a code of its own is Unknown (`errgrpc.ToGRPC`)
//! - `pkg/namespaces`: FailedPrecondition for a call without a namespace
//!
//! The e2e test `kata` shows that the real containerd answers like this on the development cluster.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use serde_json::json;
use tokio::net::UnixListener;
use tonic::{Request, Response, Status as Refusal};
use torpor_kata::proto::containers::containers_server::{Containers, ContainersServer};
use torpor_kata::proto::containers::{
    Container, ListContainersRequest, ListContainersResponse, Packed, Runtime,
};
use torpor_kata::proto::tasks::tasks_server::{Tasks, TasksServer};
use torpor_kata::proto::tasks::{
    GetRequest, GetResponse, Nothing, PauseTaskRequest, Process, ResumeTaskRequest, Status,
};

pub(crate) const POD: &str = "0a1b2c3d-0000-4000-8000-000000000001";
pub(crate) const RUNTIME: &str = "io.containerd.kata-qemu.v2";
/// Pid of the virtual machine, which Kata reports for every container.
pub(crate) const VMM: u32 = 4711;

/// Fault of the next call that would change a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The call changes nothing and never returns.
    HangsBefore,
    /// The call changes the task and never returns.
    HangsAfter,
    Refuses,
}

#[derive(Debug, Default)]
pub(crate) struct World {
    tasks: BTreeMap<String, Status>,
    pub(crate) faults: BTreeMap<String, Fault>,
    /// Successful calls, in order.
    pub(crate) done: Vec<(Verb, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Pause,
    Resume,
}

/// The containers of one Pod: `5`, its sandbox container, and others.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fake(Arc<Mutex<World>>);

pub(crate) fn id(letter: &str) -> String {
    letter.repeat(64)
}

impl Fake {
    pub(crate) fn with(tasks: &[(&str, Status)]) -> Self {
        let fake = Self::default();
        for (letter, status) in tasks {
            fake.set(letter, *status);
        }
        fake
    }

    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().expect("no test has panicked in the middle")
    }

    pub(crate) fn set(&self, letter: &str, status: Status) {
        self.world().tasks.insert(id(letter), status);
    }

    pub(crate) fn remove(&self, letter: &str) {
        self.world().tasks.remove(&id(letter));
    }

    pub(crate) fn status(&self, letter: &str) -> Option<Status> {
        self.world().tasks.get(&id(letter)).copied()
    }

    /// Serves until the test ends.
    pub(crate) fn serve(&self, listener: UnixListener) -> impl Future<Output = ()> + use<> {
        let routes = tonic_routes(self.clone());
        async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = TowerToHyperService::new(routes.clone());
                tokio::spawn(async move {
                    let http2 = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    // A client that disconnects is no error of the server.
                    let _ = http2.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        }
    }

    async fn change(&self, verb: Verb, container: String) -> Result<Response<Nothing>, Refusal> {
        let fault = self.world().faults.remove(&container);
        match fault {
            Some(Fault::HangsBefore) => std::future::pending::<()>().await,
            Some(Fault::Refuses) => return Err(Refusal::unknown("OCI runtime failed")),
            Some(Fault::HangsAfter) | None => {}
        }
        self.changed(verb, &container)?;
        if fault == Some(Fault::HangsAfter) {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(Nothing {}))
    }

    fn changed(&self, verb: Verb, container: &str) -> Result<(), Refusal> {
        let mut world = self.world();
        let Some(status) = world.tasks.get_mut(container) else {
            return Err(not_found(container));
        };
        let refused = match (verb, *status) {
            (Verb::Pause, Status::Running) => {
                *status = Status::Paused;
                None
            }
            (Verb::Resume, Status::Paused) => {
                *status = Status::Running;
                None
            }
            (Verb::Pause, Status::Paused) => Some("cannot pause a paused container"),
            (Verb::Pause, Status::Created) => Some("cannot pause task in created state"),
            (Verb::Pause, _) => Some("cannot pause a stopped container"),
            (Verb::Resume, Status::Running) => Some("cannot resume a running process"),
            (Verb::Resume, Status::Created) => Some("cannot resume task in created state"),
            (Verb::Resume, _) => Some("cannot resume a stopped container"),
        };
        match refused {
            Some(words) => Err(Refusal::unknown(words)),
            None => {
                world.done.push((verb, container.to_owned()));
                Ok(())
            }
        }
    }
}

fn not_found(container: &str) -> Refusal {
    Refusal::not_found(format!("task {container} not found"))
}

fn in_namespace<T>(request: Request<T>) -> Result<T, Refusal> {
    let namespace = request.metadata().get("containerd-namespace");
    match namespace.is_some_and(|namespace| namespace == "k8s.io") {
        true => Ok(request.into_inner()),
        false => Err(Refusal::failed_precondition(
            "namespace is required: failed precondition",
        )),
    }
}

#[tonic::async_trait]
impl Containers for Fake {
    async fn list(
        &self,
        request: Request<ListContainersRequest>,
    ) -> Result<Response<ListContainersResponse>, Refusal> {
        let request = in_namespace(request)?;
        let filter = format!("labels.\"io.kubernetes.pod.uid\"=={POD}");
        if request.filters != [filter] {
            return Ok(Response::new(ListContainersResponse::default()));
        }
        let world = self.world();
        // A container without a task still exists.
        let mut letters: Vec<String> = world.tasks.keys().cloned().collect();
        letters.push(id("e"));
        letters.dedup();
        let containers = letters.iter().map(|id| container(id)).collect();
        Ok(Response::new(ListContainersResponse { containers }))
    }
}

fn container(id: &str) -> Container {
    let kind = match id.starts_with('5') {
        true => "sandbox",
        false => "container",
    };
    let spec = json!({
        "annotations": {
            "io.kubernetes.cri.container-type": kind,
            "io.kubernetes.cri.sandbox-id": self::id("5"),
        },
        "linux": { "cgroupsPath": format!("/kubepods/pod1/{}", &id[..1]) },
    });
    Container {
        id: id.to_owned(),
        runtime: Some(Runtime {
            name: RUNTIME.to_owned(),
        }),
        spec: Some(Packed {
            type_url: "types.containerd.io/opencontainers/runtime-spec/1/Spec".to_owned(),
            value: spec.to_string().into_bytes(),
        }),
        ..Container::default()
    }
}

#[tonic::async_trait]
impl Tasks for Fake {
    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Refusal> {
        let id = in_namespace(request)?.container_id;
        let status = self.world().tasks.get(&id).copied();
        let status = status.ok_or_else(|| not_found(&id))?;
        let process = Some(Process {
            pid: VMM,
            status: status.into(),
        });
        Ok(Response::new(GetResponse { process }))
    }

    async fn pause(
        &self,
        request: Request<PauseTaskRequest>,
    ) -> Result<Response<Nothing>, Refusal> {
        let id = in_namespace(request)?.container_id;
        self.change(Verb::Pause, id).await
    }

    async fn resume(
        &self,
        request: Request<ResumeTaskRequest>,
    ) -> Result<Response<Nothing>, Refusal> {
        let id = in_namespace(request)?.container_id;
        self.change(Verb::Resume, id).await
    }
}

/// Routes a call by its path, as gRPC does.
fn tonic_routes(
    fake: Fake,
) -> impl tower::Service<
    hyper::Request<hyper::body::Incoming>,
    Response = hyper::Response<tonic::body::Body>,
    Error = std::convert::Infallible,
    Future = impl Future<Output = Result<hyper::Response<tonic::body::Body>, std::convert::Infallible>>
             + Send,
> + Clone
+ Send
+ 'static {
    tower::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let fake = fake.clone();
        async move {
            let of_tasks = request
                .uri()
                .path()
                .starts_with("/containerd.services.tasks.v1.Tasks/");
            match of_tasks {
                true => tower::ServiceExt::oneshot(TasksServer::new(fake), request).await,
                false => tower::ServiceExt::oneshot(ContainersServer::new(fake), request).await,
            }
        }
    })
}
