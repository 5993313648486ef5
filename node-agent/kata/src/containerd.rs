//! Calls to containerd. Synchronous: for threads that may block.
//!
//! containerd's socket is root on its node. Of all that it offers, these calls read, pause and resume.

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

/// Why containerd did not do as asked.
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
    /// Nobody knows whether it was done.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::NoAnswer { .. } | Self::Broken { .. })
    }
}

/// A containerd. It is connected to at the first call, and again after it was away.
#[derive(Debug, Clone)]
pub struct Containerd {
    socket: PathBuf,
    runtime: Handle,
    channel: Channel,
    limit: Duration,
}

impl Containerd {
    /// The one that listens at `socket`. Calls are made on the runtime and given up after `limit`.
    pub fn at(socket: &Path, runtime: Handle, limit: Duration) -> Self {
        let path = socket.to_owned();
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let _inside = runtime.enter();
        // The name goes nowhere: the connector knows the way.
        let channel =
            Endpoint::from_static("http://containerd").connect_with_connector_lazy(connector);
        Self {
            socket: socket.to_owned(),
            runtime,
            channel,
            limit,
        }
    }

    /// Path of its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The containers of a Pod, the sandbox' own among them.
    pub fn containers_of(&self, pod: &PodUid) -> Result<Vec<Container>, Error> {
        let mut client = ContainersClient::new(self.channel.clone());
        let request = ListContainersRequest {
            // A Pod's UID holds nothing that would mean something in a filter.
            filters: vec![format!("labels.\"io.kubernetes.pod.uid\"=={pod}")],
        };
        let doing = || format!("list the containers of Pod {pod}");
        let answer = self.call(doing, client.list(of_namespace(request)))?;
        Ok(answer.containers)
    }

    /// A container's task; none when it has none (any more).
    pub fn task(&self, container: &str) -> Result<Option<Process>, Error> {
        let mut client = TasksClient::new(self.channel.clone());
        let request = GetRequest {
            container_id: container.to_owned(),
        };
        let doing = || format!("get the task of container {container}");
        match self.call(doing, client.get(of_namespace(request))) {
            Ok(answer) => Ok(answer.process),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Pauses a container. One that does not run is refused.
    pub fn pause(&self, container: &str) -> Result<(), Error> {
        let mut client = TasksClient::new(self.channel.clone());
        let request = PauseTaskRequest {
            container_id: container.to_owned(),
        };
        let doing = || format!("pause container {container}");
        self.call(doing, client.pause(of_namespace(request)))?;
        Ok(())
    }

    /// Lets a container run on. One that is not paused is refused.
    pub fn resume(&self, container: &str) -> Result<(), Error> {
        let mut client = TasksClient::new(self.channel.clone());
        let request = ResumeTaskRequest {
            container_id: container.to_owned(),
        };
        let doing = || format!("resume container {container}");
        self.call(doing, client.resume(of_namespace(request)))?;
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

/// containerd has a code for what is not there; what a shim does not do comes as Unknown, with words (`pkg/errgrpc`).
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
        // tonic's own word for a connection that ended in the middle of an answer.
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

fn of_namespace<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    let namespace = tonic::metadata::MetadataValue::from_static(NAMESPACE);
    request
        .metadata_mut()
        .insert("containerd-namespace", namespace);
    request
}
