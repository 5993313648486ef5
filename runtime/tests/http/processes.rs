//! Commands over sandboxd's gRPC API.

use std::{
    collections::BTreeMap,
    fs,
    io::Write as _,
    net::TcpStream,
    os::unix::fs::symlink,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use rstest::rstest;
use rustix::process::{Pid, Signal as Posix, kill_process};
use serde_json::json;
use tonic::{Code, transport::Channel};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest,
};
use torpor_runtime::proto::process::{
    ProcessConfig, SendSignalRequest, Signal, StartRequest, start_response::Event,
    write_stdin_request::Payload,
};

use crate::{
    client::{
        Client, Done, config, connect, drain, execute, input, next, read_until, shell, soon, start,
        write,
    },
    world::{Runtime, answer, open, until_gone},
};

fn done(stdout: &str, stderr: &str, exit_code: i32) -> Done {
    let (stdout, stderr) = (stdout.to_owned(), stderr.to_owned());
    let exit_code = Some(exit_code);
    Done {
        stdout,
        stderr,
        exit_code,
    }
}

async fn signal(client: &mut Client, id: i32, signal: i32) -> Result<(), Code> {
    let process_id = id;
    let sent = soon(client.send_signal(SendSignalRequest { process_id, signal })).await;
    sent.map(drop).map_err(|status| status.code())
}

#[rstest]
#[case("echo out; echo err >&2; exit 7", "out\n", "err\n", 7)]
#[case("kill -9 $$", "", "", 137)]
#[case("kill -15 $$", "", "", 143)]
#[case("cat", "", "", 0)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_runs_to_its_end(
    #[case] script: &str,
    #[case] stdout: &str,
    #[case] stderr: &str,
    #[case] exit_code: i32,
) {
    let runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    let answer = execute(&mut client, shell(script)).await.unwrap();
    assert_eq!(
        (&answer.stdout[..], &answer.stderr[..], answer.exit_code),
        (stdout.as_bytes(), stderr.as_bytes(), exit_code)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_has_the_requested_environment_and_directory() {
    let runtime = Runtime::start(&[]);
    fs::create_dir(runtime.file("sub")).unwrap();
    symlink("sub", runtime.file("link")).unwrap();
    let mut client = connect(&runtime).await;
    let asked = ProcessConfig {
        env_vars: BTreeMap::from([("ASKED".into(), "a=b".into())]),
        cwd: Some("link".into()),
        ..shell("echo $ASKED $SANDBOX_ID; pwd").unwrap()
    };
    let answer = execute(&mut client, Some(asked)).await.unwrap();
    let directory = runtime.file("sub").canonicalize().unwrap();
    let expected = format!("a=b one\n{}\n", directory.display());
    assert_eq!(String::from_utf8_lossy(&answer.stdout), expected);
    let answer = execute(&mut client, config(&["pwd"])).await.unwrap();
    let expected = format!("{}\n", runtime.file("").canonicalize().unwrap().display());
    assert_eq!(String::from_utf8_lossy(&answer.stdout), expected);
}

#[rstest]
#[case(&[], "", Code::InvalidArgument)]
#[case(&["missing-program"], "", Code::NotFound)]
#[case(&["/"], "", Code::PermissionDenied)]
#[case(&["a\0b"], "", Code::InvalidArgument)]
#[case(&["true"], "missing", Code::NotFound)]
#[case(&["true"], "file", Code::Internal)]
#[case(&["true"], "../..", Code::PermissionDenied)]
#[case(&["true"], "sub/../../x", Code::PermissionDenied)]
#[case(&["true"], "out", Code::PermissionDenied)]
#[case(&["true"], "sub\0", Code::PermissionDenied)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_that_cannot_start_is_refused(
    #[case] command: &[&str],
    #[case] cwd: &str,
    #[case] code: Code,
) {
    let runtime = Runtime::start(&[]);
    fs::write(runtime.file("file"), "").unwrap();
    fs::create_dir(runtime.file("sub")).unwrap();
    symlink("/", runtime.file("out")).unwrap();
    let mut client = connect(&runtime).await;
    let mut asked = config(command).unwrap();
    asked.cwd = Some(cwd.to_owned());
    let refused = execute(&mut client, Some(asked.clone())).await.unwrap_err();
    assert_eq!(refused.code(), code, "{refused}");
    for pty in [None, Some(Default::default())] {
        let request = StartRequest {
            config: Some(asked.clone()),
            pty,
        };
        let refused = soon(client.start(request)).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_started_command_reads_writes_and_ends() {
    let runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    let (mut events, id) = start(&mut client, shell("cat; echo err >&2; exit 3"), None).await;
    assert!(id > 0);
    write(&mut client, id, input("one")).await.unwrap();
    read_until(&mut events, "one").await;
    write(&mut client, id, input(" two")).await.unwrap();
    write(&mut client, id, Payload::Eof(())).await.unwrap();
    assert_eq!(drain(&mut events).await, done(" two", "err\n", 3));
    let gone = write(&mut client, id, input("three")).await.unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn input_after_eof_is_refused_and_a_write_ends_with_the_command() {
    let runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    let (mut events, id) = start(&mut client, shell("echo; exec sleep 1000"), None).await;
    read_until(&mut events, "\n").await;
    let (mut writer, mut killer) = (client.clone(), client.clone());
    let large = Payload::Input(vec![b'x'; 1 << 20].into());
    // The input exceeds a pipe: the call ends because the command ends.
    let (written, killed, rest) = tokio::join!(
        write(&mut writer, id, large),
        signal(&mut killer, id, Signal::Sigkill.into()),
        drain(&mut events)
    );
    assert!(matches!(
        written.unwrap_err().code(),
        Code::Internal | Code::NotFound
    ));
    assert_eq!((killed, rest), (Ok(()), done("", "", 137)));
    let (_events, id) = start(&mut client, shell("exec sleep 1000"), None).await;
    for _ in 0..2 {
        write(&mut client, id, Payload::Eof(())).await.unwrap();
    }
    let closed = write(&mut client, id, input("x")).await.unwrap_err();
    assert_eq!(
        (closed.code(), closed.message()),
        (Code::Internal, "failed to write stdin: file already closed")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_reaches_the_whole_group() {
    let runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    let script = "sleep 1000 & echo $! > pids; echo $$ >> pids; wait";
    let (mut events, id) = start(&mut client, shell(script), None).await;
    let pids = runtime.pids("pids", 2);
    assert_eq!(signal(&mut client, id, 0).await, Err(Code::InvalidArgument));
    assert_eq!(signal(&mut client, id, 1).await, Err(Code::InvalidArgument));
    assert_eq!(signal(&mut client, id + 1, 15).await, Err(Code::NotFound));
    assert_eq!(signal(&mut client, id, 15).await, Ok(()));
    assert_eq!(drain(&mut events).await, done("", "", 143));
    pids.into_iter().for_each(until_gone);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interrupt_can_be_handled() {
    let runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    let script = "trap 'echo caught; exit 4' INT; echo ready; while :; do sleep 0.1; done";
    let (mut events, id) = start(&mut client, shell(script), None).await;
    read_until(&mut events, "ready\n").await;
    assert_eq!(signal(&mut client, id, Signal::Sigint.into()).await, Ok(()));
    assert_eq!(drain(&mut events).await, done("caught\n", "", 4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disconnect_of_the_client_kills_its_commands() {
    let runtime = Runtime::start(&[]);
    let script = |file: &str| format!("sleep 1000 & echo $! > {file}; echo $$ >> {file}; wait");
    let mut client = connect(&runtime).await;
    // A call is cancelled, and the connection stays.
    let (events, _) = start(&mut client, shell(&script("cancelled")), None).await;
    let cancelled = runtime.pids("cancelled", 2);
    drop(events);
    cancelled.into_iter().for_each(until_gone);
    // The connection of calls of both kinds is closed.
    let mut other = connect(&runtime).await;
    let (events, _) = start(&mut other, shell(&script("started")), None).await;
    let executing = tokio::spawn(async move { execute(&mut other, shell(&script("run"))).await });
    let (started, run) = (runtime.pids("started", 2), runtime.pids("run", 2));
    executing.abort();
    drop((events, executing));
    started.into_iter().chain(run).for_each(until_gone);
    execute(&mut client, config(&["true"])).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_kills_a_command_whatever_the_client_does() {
    let runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    // The deadline is set as a header, so that the client itself does not apply it.
    let timed = |request| {
        let mut request = tonic::Request::new(request);
        let limit = "300m".parse().unwrap();
        request.metadata_mut().insert("grpc-timeout", limit);
        request
    };
    let script = "sleep 1000 & echo $! > pids; echo $$ >> pids; wait";
    let request = StartRequest {
        config: shell(script),
        pty: None,
    };
    let mut events = soon(client.start(timed(request)))
        .await
        .unwrap()
        .into_inner();
    assert!(matches!(next(&mut events).await, Some(Event::Init(_))));
    // The client reads nothing before the deadline.
    runtime.pids("pids", 2).into_iter().for_each(until_gone);
    let late = soon(events.message()).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_waits_for_its_reader_and_is_complete() {
    const LENGTH: u64 = 256 << 20;
    let runtime = Runtime::start(&["--stream-chunk-size=65536"]);
    let mut client = connect(&runtime).await;
    let script = format!("head -c {LENGTH} /dev/zero; echo over >&2");
    let (mut events, _) = start(&mut client, shell(&script), None).await;
    let (mut received, mut rest) = (0, Vec::new());
    while let Some(event) = next(&mut events).await {
        match event {
            Event::Stdout(bytes) => received += bytes.len() as u64,
            other => rest.push(other),
        }
    }
    assert_eq!((received, rest.len()), (LENGTH, 2));
    assert!(
        runtime.peak_memory() < 64 * 1024,
        "{} KiB",
        runtime.peak_memory()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_whose_output_is_not_read_stops() {
    let runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    // The command counts the pieces that it has written.
    let script = "i=0; while head -c 65536 /dev/zero; do i=$((i+1)); echo $i > written; done";
    let (mut events, _) = start(&mut client, shell(script), None).await;
    let written = || fs::read_to_string(runtime.file("written")).unwrap_or_default();
    // Meanwhile other commands run on the same connection, each for longer than a piece takes.
    let mut last = String::new();
    while last.is_empty() || last != written() {
        last = written();
        for _ in 0..20 {
            execute(&mut client, shell("head -c 65536 /dev/zero"))
                .await
                .unwrap();
        }
    }
    let pieces: u64 = last.trim().parse().unwrap();
    assert!(
        pieces < 512,
        "{pieces} pieces of 64 KiB were taken though none was read"
    );
    // The command continues when its output is read.
    until_more(&mut events, &last, written).await;
}

async fn until_more(
    events: &mut tonic::Streaming<torpor_runtime::proto::process::StartResponse>,
    before: &str,
    written: impl Fn() -> String,
) {
    while written() == before {
        assert!(matches!(next(events).await, Some(Event::Stdout(_))));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_that_is_too_large_is_an_error_and_not_cut() {
    let runtime = Runtime::start(&["--max-output-bytes=1000"]);
    let mut client = connect(&runtime).await;
    let script = "echo $$ > pids; exec cat /dev/zero";
    let refused = execute(&mut client, shell(script)).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    runtime.pids("pids", 1).into_iter().for_each(until_gone);
    let exact = execute(&mut client, shell("head -c 1000 /dev/zero")).await;
    assert_eq!(exact.unwrap().stdout.len(), 1000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_background_process_delays_a_call_for_the_grace_period_only_and_lives_on() {
    let runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    let script = "sleep 1000 & echo $! > pids; echo out";
    let (mut events, _) = start(&mut client, shell(script), None).await;
    assert_eq!(drain(&mut events).await, done("out\n", "", 0));
    let left = runtime.pids("pids", 1)[0];
    let script = format!("kill -0 {left} && kill -9 {left}");
    assert_eq!(
        execute(&mut client, shell(&script))
            .await
            .unwrap()
            .exit_code,
        0
    );
    until_gone(left);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_number_of_commands_is_limited() {
    let runtime = Runtime::start(&["--max-processes=2"]);
    let mut client = connect(&runtime).await;
    let (first, _) = start(&mut client, shell("cat"), None).await;
    let (_second, id) = start(&mut client, shell("cat"), None).await;
    let refused = execute(&mut client, config(&["true"])).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    drop(first);
    // The slot is free when the call has ended in the runtime, too.
    while execute(&mut client, config(&["true"])).await.is_err() {}
    write(&mut client, id, input("still there")).await.unwrap();
}

/// All clients of a router share one connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_above_the_limit_is_refused_and_does_not_wait() {
    let runtime = Runtime::start(&["--max-processes=101"]);
    let mut client = connect(&runtime).await;
    let mut running = Vec::new();
    for _ in 0..101 {
        running.push(start(&mut client, config(&["cat"]), None).await);
    }
    let refused = execute(&mut client, config(&["true"])).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_are_not_read_do_not_block_others_of_their_connection() {
    let runtime = Runtime::start(&[]);
    let address = format!("http://{}", runtime.grpc);
    let endpoint = Channel::from_shared(address).unwrap();
    // The client's own window for all calls is larger than the unread answers.
    let endpoint = endpoint.initial_stream_window_size(65_535_u32);
    let channel = soon(endpoint.connect()).await.unwrap();
    let sent = Arc::new(AtomicUsize::new(0));
    let mut unread = Vec::new();
    for _ in 0..40 {
        let sent = Arc::clone(&sent);
        // The client reads no answers, so that the runtime stops to read the requests.
        let questions = futures::stream::repeat_with(move || {
            sent.fetch_add(1, Ordering::Relaxed);
            ServerReflectionRequest {
                host: "x".repeat(16 * 1024),
                message_request: Some(MessageRequest::ListServices(String::new())),
            }
        });
        let mut client = ServerReflectionClient::new(channel.clone());
        let answers = soon(client.server_reflection_info(questions)).await;
        unread.push(answers.unwrap());
    }
    let all_is_sent = async {
        loop {
            tokio::time::sleep(Duration::from_millis(200)).await;
            if sent.swap(0, Ordering::Relaxed) == 0 {
                return;
            }
        }
    };
    soon(all_is_sent).await;
    let mut client = Client::new(channel);
    execute(&mut client, config(&["true"])).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_is_too_large_and_an_unknown_call_are_refused() {
    let runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    let large = "x".repeat(5 << 20);
    let refused = execute(&mut client, config(&["true", &large]))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::OutOfRange, "{refused}");
    execute(&mut client, config(&["true"])).await.unwrap();
}

/// Writes the start of an HTTP/2 connection by hand.
fn preface(runtime: &Runtime) -> TcpStream {
    let mut stream = TcpStream::connect(runtime.grpc).unwrap();
    stream
        .set_read_timeout(Some(crate::world::PATIENCE))
        .unwrap();
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .unwrap();
    stream
}

#[rstest]
#[case::silent(true)]
#[case::settled(false)]
fn a_silent_client_is_disconnected(#[case] silent: bool) {
    let runtime = Runtime::start(&[
        "--grpc-idle-timeout=300ms",
        "--grpc-keepalive=300ms",
        "--max-connections=1",
    ]);
    let mut stream = match silent {
        true => TcpStream::connect(runtime.grpc).unwrap(),
        false => preface(&runtime),
    };
    stream
        .set_read_timeout(Some(crate::world::PATIENCE))
        .unwrap();
    let ended = std::io::copy(&mut stream, &mut std::io::sink());
    // A reset is an end too; a timeout of the read is none.
    let waited = ended.err().map(|error| error.kind());
    assert_ne!(waited, Some(std::io::ErrorKind::WouldBlock));
    let client = async { execute(&mut connect(&runtime).await, config(&["true"])).await };
    let runner = tokio::runtime::Runtime::new().unwrap();
    assert_eq!(runner.block_on(client).unwrap().exit_code, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_disappears_without_a_reset_ends_its_commands() {
    let runtime = Runtime::start(&["--grpc-keepalive=300ms"]);
    // A stopped relay keeps the connection open without traffic, as a client that has disappeared.
    let relay = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", relay.local_addr().unwrap());
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let grpc = runtime.grpc;
    std::thread::spawn(move || half_open(&relay, grpc, &stopped));
    let channel = soon(Channel::from_shared(address).unwrap().connect())
        .await
        .unwrap();
    let mut client = Client::new(channel);
    let script = "sleep 1000 & echo $! > pids; echo $$ >> pids; wait";
    let (_events, _) = start(&mut client, shell(script), None).await;
    let pids = runtime.pids("pids", 2);
    stop.send(()).unwrap();
    pids.into_iter().for_each(until_gone);
}

/// Relays one connection until it is stopped, then keeps the connection open without traffic.
fn half_open(
    relay: &std::net::TcpListener,
    to: std::net::SocketAddr,
    stopped: &std::sync::mpsc::Receiver<()>,
) {
    use std::io::Read as _;
    let (near, far) = (relay.accept().unwrap().0, TcpStream::connect(to).unwrap());
    let moment = Some(std::time::Duration::from_millis(5));
    let mut buffer = [0; 65536];
    while stopped.try_recv().is_err() {
        for (from, to) in [(&near, &far), (&far, &near)] {
            let (mut from, mut to) = (from, to);
            from.set_read_timeout(moment).unwrap();
            if let Ok(read) = from.read(&mut buffer) {
                to.write_all(&buffer[..read]).unwrap();
            }
        }
    }
    std::thread::park();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_without_its_body_ends_at_the_time_limit() {
    let runtime = Runtime::start(&["--read-body-timeout=300ms"]);
    let channel = crate::client::channel(&runtime).await;
    let mut grpc = tonic::client::Grpc::new(channel);
    soon(grpc.ready()).await.unwrap();
    let never = futures::stream::pending::<StartRequest>();
    let path = "/process.v1.ProcessService/Execute".parse().unwrap();
    let codec = tonic_prost::ProstCodec::<
        StartRequest,
        torpor_runtime::proto::process::ExecuteResponse,
    >::default();
    let refused = soon(grpc.client_streaming(tonic::Request::new(never), path, codec)).await;
    assert_eq!(refused.unwrap_err().code(), Code::DeadlineExceeded);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_fails_the_health_check_and_ends_commands() {
    let mut runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    let script =
        "trap '' TERM; sleep 1000 & echo $! > pids; echo $$ >> pids; while :; do wait; done";
    let (mut stubborn, _) = start(&mut client, shell(script), None).await;
    let (mut polite, _) = start(&mut client, shell("exec sleep 1000"), None).await;
    let pids = runtime.pids("pids", 2);
    let process = Pid::from_child(&runtime.process);
    kill_process(process, Posix::TERM).unwrap();
    assert_eq!(drain(&mut polite).await, done("", "", 143));
    let mut stream = open(runtime.rest, "GET /v1/health HTTP/1.1");
    stream.write_all(b"\r\n").unwrap();
    let health = answer(&mut stream);
    assert_eq!(
        (health.status, &health.json()["code"]),
        (503, &json!("UNAVAILABLE"))
    );
    assert_eq!(drain(&mut stubborn).await, done("", "", 137));
    drop((client, stubborn, polite));
    assert!(runtime.process.wait().unwrap().success());
    pids.into_iter().for_each(until_gone);
}
