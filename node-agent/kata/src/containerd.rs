//! Calls to containerd. They are synchronous, for threads that may block.
//!
//! Access to containerd's socket is equivalent to root on the node. These calls only read, pause
//! and resume.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use torpor_core::ids::PodUid;

use crate::proto::containers::containers_client::ContainersClient;
use crate::proto::containers::{Container, ListContainersRequest};
use crate::proto::tasks::tasks_client::TasksClient;
use crate::proto::tasks::{GetRequest, PauseTaskRequest, Process, ResumeTaskRequest};

/// The containerd namespace of the kubelet's containers.
const NAMESPACE: &str = "k8s.io";

/// Error of a call to containerd.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("containerd at {socket} has no {what}")]
    NotFound { socket: PathBuf, what: String },
    #[error("containerd at {socket} refused to {doing}: {message}")]
    Refused {
        socket: PathBuf,
        doing: String,
        message: String,
    },
    #[error("containerd at {socket} did not answer the request to {doing} within {limit:?}")]
    NoAnswer {
        socket: PathBuf,
        doing: String,
        limit: Duration,
    },
    #[error(
        "the connection to containerd at {socket} broke during the request to {doing}: {message}"
    )]
    Broken {
        socket: PathBuf,
        doing: String,
        message: String,
    },
}

impl Error {
    /// Reports whether the call's effect is unknown.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::NoAnswer { .. } | Self::Broken { .. })
    }
}

/// A client of containerd. The first call connects, and a later call connects again after
/// containerd was unreachable.
#[derive(Debug, Clone)]
pub struct Containerd {
    socket: PathBuf,
    runtime: Handle,
    channel: Channel,
    limit: Duration,
}

impl Containerd {
    /// Makes a client of the containerd that listens at `socket`. Calls run on `runtime` and end
    /// with an error after `limit`.
    pub fn at(socket: &Path, runtime: Handle, limit: Duration) -> Self {
        let path = socket.to_owned();
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let _context = runtime.enter();
        // The connector ignores the host name.
        let channel =
            Endpoint::from_static("http://containerd").connect_with_connector_lazy(connector);
        Self {
            socket: socket.to_owned(),
            runtime,
            channel,
            limit,
        }
    }

    /// Returns the path of containerd's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the containers of a Pod, including the sandbox container.
    pub fn containers_of(&self, pod: &PodUid) -> Result<Vec<Container>, Error> {
        let mut client = ContainersClient::new(self.channel.clone());
        let request = ListContainersRequest {
            // A Pod's UID contains no character with a meaning in a filter.
            filters: vec![format!("labels.\"io.kubernetes.pod.uid\"=={pod}")],
        };
        let doing = || format!("list the containers of Pod {pod}");
        let answer = self.call(doing, client.list(in_namespace(request)))?;
        Ok(answer.containers)
    }

    /// Returns a container's task; none if the container has no task, or has none any more.
    pub fn task(&self, container: &str) -> Result<Option<Process>, Error> {
        let mut client = TasksClient::new(self.channel.clone());
        let request = GetRequest {
            container_id: container.to_owned(),
        };
        let doing = || format!("get the task of container {container}");
        match self.call(doing, client.get(in_namespace(request))) {
            Ok(answer) => Ok(answer.process),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Pauses a container. containerd refuses a container that does not run.
    pub fn pause(&self, container: &str) -> Result<(), Error> {
        let mut client = TasksClient::new(self.channel.clone());
        let request = PauseTaskRequest {
            container_id: container.to_owned(),
        };
        let doing = || format!("pause container {container}");
        self.call(doing, client.pause(in_namespace(request)))?;
        Ok(())
    }

    /// Resumes a container. containerd refuses a container that is not paused.
    pub fn resume(&self, container: &str) -> Result<(), Error> {
        let mut client = TasksClient::new(self.channel.clone());
        let request = ResumeTaskRequest {
            container_id: container.to_owned(),
        };
        let doing = || format!("resume container {container}");
        self.call(doing, client.resume(in_namespace(request)))?;
        Ok(())
    }

    fn call<T>(
        &self,
        doing: impl Fn() -> String,
        answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, Error> {
        let limited = async { tokio::time::timeout(self.limit, answer).await };
        let socket = self.socket.clone();
        let doing = doing();
        let limit = self.limit;
        match self.runtime.block_on(limited) {
            Err(_) => Err(Error::NoAnswer {
                socket,
                doing,
                limit,
            }),
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(refusal(socket, doing, &status)),
        }
    }
}

/// Converts a status to an error. containerd has a code for a missing container. The refusal of a
/// shim has the code Unknown and a message (containerd's `pkg/errgrpc`).
fn refusal(socket: PathBuf, doing: String, status: &Status) -> Error {
    let message = status.message().to_owned();
    match status.code() {
        Code::NotFound => Error::NotFound {
            socket,
            what: format!("such container ({message}), asked to {doing}"),
        },
        Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded | Code::Aborted => {
            Error::Broken {
                socket,
                doing,
                message,
            }
        }
        // tonic's own code for a connection that ended in the middle of an answer.
        Code::Unknown if std::error::Error::source(status).is_some() => Error::Broken {
            socket,
            doing,
            message,
        },
        _ => Error::Refused {
            socket,
            doing,
            message,
        },
    }
}

fn in_namespace<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    let namespace = tonic::metadata::MetadataValue::from_static(NAMESPACE);
    request
        .metadata_mut()
        .insert("containerd-namespace", namespace);
    request
}
