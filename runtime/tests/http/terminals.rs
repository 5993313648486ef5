//! Terminals of commands.

use tonic::Code;
use torpor_runtime::proto::process::{Pty, ResizeTtyRequest, write_stdin_request::Payload};

use crate::{
    client::{connect, drain, input, read_until, shell, soon, start, write},
    world::Runtime,
};

const SIZE: Pty = Pty { cols: 80, rows: 24 };

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_has_its_own_terminal() {
    let runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    // This path opens only the controlling terminal.
    let script = "stty size; tty; echo err >&2; echo there > /dev/tty; exit 3";
    let (mut events, _) = start(&mut client, shell(script), Some(SIZE)).await;
    let done = drain(&mut events).await;
    let lines: Vec<_> = done.stdout.lines().collect();
    assert_eq!((lines[0], lines[2], lines[3]), ("24 80", "err", "there"));
    assert!(lines[1].starts_with("/dev/pts/"), "{lines:?}");
    assert_eq!((done.stderr.as_str(), done.exit_code), ("", Some(3)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_terminal_takes_input_resizes_and_a_hangup() {
    let runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    // A read may see the end of a hung-up terminal just before SIGHUP arrives; the command goes on.
    let script = "while :; do read line && stty size; done";
    let (mut events, id) = start(&mut client, shell(script), Some(SIZE)).await;
    write(&mut client, id, input("a\n")).await.unwrap();
    read_until(&mut events, "24 80\r\n").await;
    let size = ResizeTtyRequest {
        process_id: id,
        cols: 120,
        rows: 40,
    };
    soon(client.resize_tty(size)).await.unwrap();
    write(&mut client, id, input("b\n")).await.unwrap();
    read_until(&mut events, "40 120\r\n").await;
    let large = ResizeTtyRequest {
        cols: 65_536,
        ..size
    };
    let refused = soon(client.resize_tty(large)).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    write(&mut client, id, Payload::Eof(())).await.unwrap();
    // Exit code of SIGHUP.
    assert_eq!(drain(&mut events).await.exit_code, Some(129));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hangup_reaches_the_command_of_a_runtime_that_ignores_it() {
    let runtime = Runtime::start_by_nohup();
    let mut client = connect(&runtime).await;
    let script = "while :; do read line; done";
    let (mut events, id) = start(&mut client, shell(script), Some(SIZE)).await;
    write(&mut client, id, Payload::Eof(())).await.unwrap();
    assert_eq!(drain(&mut events).await.exit_code, Some(129));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_typed_interrupt_reaches_the_command() {
    let runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    let script = "trap 'echo caught; exit 4' INT; echo ready; while :; do sleep 0.1; done";
    let (mut events, id) = start(&mut client, shell(script), Some(SIZE)).await;
    read_until(&mut events, "ready").await;
    write(&mut client, id, input("\u{3}")).await.unwrap();
    let done = drain(&mut events).await;
    assert!(done.stdout.contains("caught"), "{done:?}");
    assert_eq!(done.exit_code, Some(4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_without_a_terminal_cannot_be_resized() {
    let runtime = Runtime::start(&[]);
    let mut client = connect(&runtime).await;
    let (_events, id) = start(&mut client, shell("cat"), None).await;
    let size = ResizeTtyRequest {
        process_id: id,
        cols: 80,
        rows: 24,
    };
    let refused = soon(client.resize_tty(size)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
}
