//! The plugin as a program: exit codes, also where its output cannot be written.

use std::fs::File;
use std::process::{Command, Stdio};

const FAILS: [&str; 3] = ["get", "--kubeconfig", "/nowhere/config"];
const PRINTS: [&str; 2] = ["completion", "bash"];

fn plugin(line: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-torpor"));
    command
        .args(line)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

fn code(command: &mut Command) -> Option<i32> {
    command.status().unwrap().code()
}

/// Returns a pipe whose reading end is closed.
fn unread() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

#[test]
fn a_closed_pipe_does_not_change_the_exit_code() {
    assert_eq!(code(plugin(&PRINTS).stdout(unread())), Some(0));
    assert_eq!(code(plugin(&FAILS).stderr(unread())), Some(1));
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    assert_eq!(code(plugin(&PRINTS).stdout(full)), Some(1));
}

#[test]
fn an_invalid_command_line_has_its_own_exit_code() {
    for line in [
        &["sleep", "demo"][..],
        &["wake"],
        &["wake", "pod/demo"],
        &["wake", "demo", "--timeout", "8761h"],
        &["get", "-n", ""],
    ] {
        assert_eq!(code(&mut plugin(line)), Some(2), "{line:?}");
    }
}
