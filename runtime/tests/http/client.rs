//! gRPC client of the tests.

use std::future::Future;

use tonic::{Status, Streaming, transport::Channel};
use torpor_runtime::proto::process::{
    ExecuteRequest, ExecuteResponse, ProcessConfig, Pty, StartRequest, StartResponse,
    WriteStdinRequest, process_service_client::ProcessServiceClient, start_response::Event,
    write_stdin_request::Payload,
};

use crate::world::{PATIENCE, Runtime};

pub(crate) type Client = ProcessServiceClient<Channel>;

/// Collected events of a started command.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Done {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) exit_code: Option<i32>,
}

/// Awaits a future, and fails when it takes too long.
pub(crate) async fn soon<T>(what: impl Future<Output = T>) -> T {
    let ended = tokio::time::timeout(PATIENCE, what).await;
    ended.expect("the time limit passed")
}

pub(crate) async fn channel(runtime: &Runtime) -> Channel {
    let address = format!("http://{}", runtime.grpc);
    let endpoint = Channel::from_shared(address).unwrap();
    soon(endpoint.connect()).await.unwrap()
}

pub(crate) async fn connect(runtime: &Runtime) -> Client {
    ProcessServiceClient::new(channel(runtime).await)
}

pub(crate) fn config(words: &[&str]) -> Option<ProcessConfig> {
    Some(ProcessConfig {
        command: words.iter().map(|word| (*word).to_owned()).collect(),
        ..ProcessConfig::default()
    })
}

pub(crate) fn shell(script: &str) -> Option<ProcessConfig> {
    config(&["sh", "-c", script])
}

pub(crate) async fn execute(
    client: &mut Client,
    config: Option<ProcessConfig>,
) -> Result<ExecuteResponse, Status> {
    let executed = soon(client.execute(ExecuteRequest { config })).await;
    Ok(executed?.into_inner())
}

/// Starts a command, and returns its events and its id.
pub(crate) async fn start(
    client: &mut Client,
    config: Option<ProcessConfig>,
    pty: Option<Pty>,
) -> (Streaming<StartResponse>, i32) {
    let started = soon(client.start(StartRequest { config, pty })).await;
    let mut events = started.unwrap().into_inner();
    match next(&mut events).await {
        Some(Event::Init(init)) => (events, init.process_id),
        other => panic!("{other:?}"),
    }
}

pub(crate) async fn next(events: &mut Streaming<StartResponse>) -> Option<Event> {
    let event = soon(events.message()).await.unwrap();
    event.and_then(|event| event.event)
}

/// Reads until the output contains the text.
pub(crate) async fn read_until(events: &mut Streaming<StartResponse>, text: &str) -> String {
    let mut output = String::new();
    while !output.contains(text) {
        match next(events).await {
            Some(Event::Stdout(bytes)) => output += std::str::from_utf8(&bytes).unwrap(),
            other => panic!("{other:?} after {output:?}"),
        }
    }
    output
}

pub(crate) async fn drain(events: &mut Streaming<StartResponse>) -> Done {
    let mut done = Done::default();
    while let Some(event) = next(events).await {
        assert_eq!(done.exit_code, None, "the exit is the last");
        match event {
            Event::Stdout(bytes) => done.stdout += std::str::from_utf8(&bytes).unwrap(),
            Event::Stderr(bytes) => done.stderr += std::str::from_utf8(&bytes).unwrap(),
            Event::Exit(exit) => done.exit_code = Some(exit.exit_code),
            Event::Init(_) => panic!("started twice"),
        }
    }
    done
}

pub(crate) async fn write(client: &mut Client, id: i32, payload: Payload) -> Result<(), Status> {
    let request = WriteStdinRequest {
        process_id: id,
        payload: Some(payload),
    };
    soon(client.write_stdin(request)).await.map(drop)
}

pub(crate) fn input(text: &str) -> Payload {
    Payload::Input(text.to_owned().into())
}
