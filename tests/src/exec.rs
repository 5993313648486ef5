//! Commands in containers, run by CRI ExecSync from this process.
//!
//! containerd runs them as it runs those of `kubectl exec`. A kubectl takes a tenth of a second of
//! a processor to start, and its request passes three more servers. Tests of `kubectl exec` itself
//! use [`crate::kubectl::Kubectl::exec`].

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use hyper_util::rt::TokioIo;
use prost::Message;
use tokio::net::UnixStream;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Response};
use tonic_prost::ProstCodec;

use crate::case::Case;
use crate::kubectl::Ran;
use crate::node::containerd_socket;
use crate::wait;

/// Time for a command: an exec that wakes a sandbox takes a second on a loaded machine.
const LIMIT: Duration = Duration::from_secs(40);
/// Exit code of kubectl if the command was not run.
const REFUSED: i32 = 1;
/// `CONTAINER_RUNNING`.
const RUNNING: i32 = 1;

impl Case {
    /// Runs a command in a container to its end, whatever the exit code.
    ///
    /// A refused command has kubectl's exit code, and containerd's message as its error output.
    pub async fn exec(&self, pod: &str, container: &str, command: &[&str]) -> anyhow::Result<Ran> {
        let socket = containerd_socket()?;
        let asked = Box::pin(run(&socket, &self.namespace, pod, container, command));
        let answer = tokio::time::timeout(wait::scaled(LIMIT), asked).await;
        let words = || format!("{command:?} in {pod}/{container} did not end within {LIMIT:?}");
        Ok(ran(answer.with_context(words)?))
    }

    /// Runs a shell line that must succeed; returns its output.
    pub async fn sh(&self, pod: &str, container: &str, line: &str) -> anyhow::Result<String> {
        let ran = self.exec(pod, container, &["sh", "-c", line]).await?;
        ran.ok()
            .with_context(|| format!("in {pod}/{container}: {line}"))
    }

    /// Returns a file's content once the container's program has written it, which may be after the
    /// container is Ready.
    pub async fn written(&self, pod: &str, container: &str, file: &str) -> anyhow::Result<String> {
        let line = format!("until [ -s {file} ]; do sleep 0.1; done; cat {file}");
        self.sh(pod, container, &line).await
    }
}

fn ran(answer: Result<Output, String>) -> Ran {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match answer {
        Ok(output) => Ran {
            code: output.exit_code,
            out: text(&output.stdout),
            err: text(&output.stderr),
        },
        Err(why) => Ran {
            code: REFUSED,
            out: String::new(),
            err: why,
        },
    }
}

async fn run(
    socket: &Path,
    namespace: &str,
    pod: &str,
    container: &str,
    command: &[&str],
) -> Result<Output, String> {
    // Each command connects anew: another containerd may run by now.
    let channel = connect(socket).await?;
    let question = ExecSync {
        container_id: running(&channel, namespace, pod, container).await?,
        cmd: command.iter().map(|&word| word.to_owned()).collect(),
    };
    call(&channel, "/runtime.v1.RuntimeService/ExecSync", question).await
}

async fn connect(socket: &Path) -> Result<Channel, String> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The connector ignores the name.
    let endpoint = Endpoint::from_static("http://containerd");
    let connected = endpoint.connect_with_connector(connector).await;
    connected.map_err(|error| format!("no connection to {}: {error:?}", socket.display()))
}

/// Returns the id of the newest running container of that name.
async fn running(
    channel: &Channel,
    namespace: &str,
    pod: &str,
    container: &str,
) -> Result<String, String> {
    let labels = [
        ("io.kubernetes.pod.namespace", namespace),
        ("io.kubernetes.pod.name", pod),
        ("io.kubernetes.container.name", container),
    ];
    let labels = labels.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let filter = Filter {
        state: Some(State { state: RUNNING }),
        label_selector: HashMap::from(labels),
    };
    let question = List {
        filter: Some(filter),
    };
    let method = "/runtime.v1.RuntimeService/ListContainers";
    let listed: Listed = call(channel, method, question).await?;
    let newest = listed.containers.into_iter().max_by_key(|c| c.created_at);
    let id = newest.map(|container| container.id);
    id.ok_or_else(|| format!("container not found (\"{container}\")"))
}

async fn call<Q, A>(channel: &Channel, method: &'static str, question: Q) -> Result<A, String>
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    let mut client = Grpc::new(channel.clone());
    let ready = client.ready().await;
    ready.map_err(|error| format!("containerd is not ready: {error:?}"))?;
    let codec = ProstCodec::<Q, A>::default();
    let path = PathAndQuery::from_static(method);
    let answer = client.unary(Request::new(question), path, codec).await;
    answer
        .map(Response::into_inner)
        .map_err(|refused| refused.message().to_owned())
}

// Messages of `runtime.v1` (k8s.io/cri-api), with the fields that are needed.

/// `ListContainersRequest`.
#[derive(Clone, PartialEq, Message)]
struct List {
    #[prost(message, optional, tag = "1")]
    filter: Option<Filter>,
}

/// `ContainerFilter`.
#[derive(Clone, PartialEq, Message)]
struct Filter {
    #[prost(message, optional, tag = "2")]
    state: Option<State>,
    #[prost(map = "string, string", tag = "4")]
    label_selector: HashMap<String, String>,
}

/// `ContainerStateValue`.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
struct State {
    #[prost(int32, tag = "1")]
    state: i32,
}

/// `ListContainersResponse`.
#[derive(Clone, PartialEq, Message)]
struct Listed {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<Container>,
}

#[derive(Clone, PartialEq, Eq, Message)]
struct Container {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(int64, tag = "7")]
    created_at: i64,
}

/// `ExecSyncRequest`, without its timeout: the command ends when its client disconnects.
#[derive(Clone, PartialEq, Eq, Message)]
struct ExecSync {
    #[prost(string, tag = "1")]
    container_id: String,
    #[prost(string, repeated, tag = "2")]
    cmd: Vec<String>,
}

/// `ExecSyncResponse`.
#[derive(Clone, PartialEq, Eq, Message)]
struct Output {
    #[prost(bytes = "vec", tag = "1")]
    stdout: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    stderr: Vec<u8>,
    #[prost(int32, tag = "3")]
    exit_code: i32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_command_has_kubectls_exit_code_and_another_its_own() {
        let refused = ran(Err("container not found".to_owned()));
        assert_eq!(
            (refused.code, refused.err.as_str()),
            (1, "container not found")
        );
        // Encoding by containerd: fields 1 and 2 with their lengths, field 3 a number.
        let bytes = b"\x0a\x04out\n\x12\x04err\n\x18\x07";
        let output = Output::decode(&bytes[..]).expect("an ExecSyncResponse");
        let (code, out, err) = (7, "out\n".to_owned(), "err\n".to_owned());
        assert_eq!(ran(Ok(output)), Ran { code, out, err });
    }

    #[test]
    fn requests_are_encoded_as_containerd_reads_them() {
        let command = ExecSync {
            container_id: "id".to_owned(),
            cmd: vec!["a".to_owned(), "b".to_owned()],
        };
        assert_eq!(command.encode_to_vec(), b"\x0a\x02id\x12\x01a\x12\x01b");
        let filter = Filter {
            state: Some(State { state: RUNNING }),
            label_selector: HashMap::from([("k".to_owned(), "v".to_owned())]),
        };
        let list = List {
            filter: Some(filter),
        };
        let expected = b"\x0a\x0c\x12\x02\x08\x01\x22\x06\x0a\x01k\x12\x01v";
        assert_eq!(list.encode_to_vec(), expected);
    }
}
