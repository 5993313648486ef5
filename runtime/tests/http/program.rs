//! The runtime with a user's program: the container behaves as with the program alone.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::{fd::OwnedFd, unix::fs::PermissionsExt as _},
    process::{Command, Stdio},
};

use rstest::rstest;
use rustix::{
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
};
use tempfile::TempDir;

use crate::world::{Runtime, until, until_gone};

/// Script that writes its process id and the received signals to files, each line by one write.
const LISTENER: &str = "trap 'echo usr1 >> app/got' USR1; trap 'echo hup >> app/got' HUP
    trap 'echo term >> app/got; exit 5' TERM
    echo $$ > app/pids; while :; do sleep 0.02; done";

/// Flags of a runtime without APIs.
const NO_PORTS: [&str; 3] = [
    "--legacy-bind-address=0",
    "--rest-bind-address=0",
    "--grpc-bind-address=0",
];

fn around(program: &[&str]) -> Runtime {
    Runtime::start(&[&["--shutdown-timeout=100ms", "run", "--"], program].concat())
}

fn send(runtime: &Runtime, signal: Signal) {
    let pid = Pid::from_raw(runtime.process.id().try_into().unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

#[rstest]
#[case(&["sh", "-c", "exit 7"], 7)]
#[case(&["true"], 0)]
#[case(&["sh", "-c", "kill -9 $$"], 137)]
#[case(&["missing-program"], 127)]
#[case(&["/"], 126)]
fn the_container_has_the_exit_code_of_its_program(#[case] program: &[&str], #[case] code: i32) {
    assert_eq!(around(program).process.wait().unwrap().code(), Some(code));
}

#[test]
fn signals_reach_the_program_and_its_exit_code_is_the_containers() {
    let mut runtime = around(&["sh", "-c", LISTENER]);
    runtime.pids("pids", 1);
    let got = |expected: &str| {
        until("the signal", || {
            fs::read_to_string(runtime.file("got")).unwrap_or_default() == expected
        });
    };
    send(&runtime, Signal::USR1);
    got("usr1\n");
    send(&runtime, Signal::HUP);
    got("usr1\nhup\n");
    // Commands run beside the program and see its processes.
    assert_eq!(runtime.execute("cat got")["stdout"], "usr1\nhup\n");
    send(&runtime, Signal::TERM);
    got("usr1\nhup\nterm\n");
    assert_eq!(runtime.process.wait().unwrap().code(), Some(5));
}

#[test]
fn commands_end_with_the_program() {
    let mut runtime = around(&[
        "sh",
        "-c",
        "until [ -e app/go ]; do sleep 0.02; done; exit 3",
    ]);
    let _stream = runtime.begin("sh -c 'sleep 1000 & echo $! > pids; wait'");
    let pids = runtime.pids("pids", 1);
    fs::write(runtime.file("go"), "").unwrap();
    assert_eq!(runtime.process.wait().unwrap().code(), Some(3));
    // In a container they end with its first process; here another process adopts them first.
    pids.into_iter().for_each(until_gone);
}

#[test]
fn orphans_of_the_program_leave_no_zombie() {
    // The command ends with the runtime, as in a container.
    let orphan =
        "(sleep 0.01 & echo $! > app/pids); while kill -0 $PPID 2>/dev/null; do sleep 0.1; done";
    let runtime = around(&["sh", "-c", orphan]);
    runtime.pids("pids", 1).into_iter().for_each(until_gone);
}

#[test]
fn standard_streams_are_the_programs_own() {
    let world = TempDir::new().unwrap();
    let mut process = Command::new(env!("CARGO_BIN_EXE_sandbox-runtime"))
        .args(NO_PORTS)
        .args(["run", "--"])
        .args(["sh", "-c", "cat; pwd; echo err >&2"])
        .current_dir(&world)
        .env_remove("SANDBOX_RUNTIME_LOG")
        .env("RUST_LOG", "debug") // for the program only
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    process.stdin.take().unwrap().write_all(b"in\n").unwrap();
    let output = process.wait_with_output().unwrap();
    let directory = world.path().canonicalize().unwrap();
    let expected = format!("in\n{}\n", directory.display());
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "err\n");
}

/// Opens a terminal, and returns both sides.
fn terminal() -> (fs::File, OwnedFd) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY;
    let master = openpt(flags).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let own = fs::File::options()
        .read(true)
        .write(true)
        .open(name.to_str().unwrap())
        .unwrap();
    (master.into(), own.into())
}

#[test]
fn the_program_has_the_terminal_and_gets_a_key_once() {
    let (mut master, own) = terminal();
    // Without noflsh the key may discard output of the program.
    let program = "stty noflsh; trap 'echo int; n=$((n+1)); [ $n = 1 ]' INT; read line; echo read $line; read line; echo rest $line $n";
    let stream = || Stdio::from(own.try_clone().unwrap());
    let mut process = Command::new("setsid")
        .args(["--ctty", "--wait", env!("CARGO_BIN_EXE_sandbox-runtime")])
        .args(NO_PORTS)
        .args(["--root=/", "run", "--"])
        .args(["bash", "-c", program])
        .env_remove("SANDBOX_RUNTIME_LOG")
        .stdin(stream())
        .stdout(stream())
        .stderr(stream())
        .spawn()
        .unwrap();
    drop(own);
    let mut said = String::new();
    let mut until_said = |master: &mut fs::File, words: &str| {
        while !said.contains(words) {
            let mut bytes = [0; 256];
            let length = master.read(&mut bytes).expect(words);
            said.push_str(&String::from_utf8_lossy(&bytes[..length]));
        }
    };
    master.write_all(b"one\n").unwrap();
    until_said(&mut master, "read one");
    master.write_all(b"\x03").unwrap();
    until_said(&mut master, "int");
    master.write_all(b"two\n").unwrap();
    until_said(&mut master, "rest two 1");
    assert!(process.wait().unwrap().success());
}

#[test]
fn an_installation_may_be_repeated() {
    let world = TempDir::new().unwrap();
    let installed = world.path().join("sandbox-runtime");
    for _ in 0..2 {
        let status = Command::new(env!("CARGO_BIN_EXE_sandbox-runtime"))
            .arg("install")
            .arg(world.path())
            .status();
        assert!(status.unwrap().success());
        let mode = fs::metadata(&installed).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o555);
        let answer = Command::new(&installed).arg("--version").output().unwrap();
        assert!(answer.stdout.starts_with(b"sandbox-runtime "));
    }
    assert_eq!(fs::read_dir(&world).unwrap().count(), 1);
}
