//! Commands of the legacy API, and shutdown of the process.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
};

use rstest::rstest;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::world::{Runtime, answer, until, until_gone};

#[test]
fn the_health_check_answers() {
    let runtime = Runtime::start(&[]);
    let answer = runtime.get("/");
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.json(),
        json!({"status": "ok", "message": "Sandbox Runtime is active."})
    );
}

#[rstest]
#[case("echo 'a b' $HOME", "a b $HOME\n", "", 0)]
#[case("sh -c 'echo out; echo err >&2; exit 3'", "out\n", "err\n", 3)]
#[case("sh -c 'kill -9 $$'", "", "", -9)]
#[case("cat", "", "", 0)]
#[case(
    "missing-program a",
    "",
    "Failed to execute command: [Errno 2] No such file or directory: 'missing-program'",
    1
)]
#[case(
    "/",
    "",
    "Failed to execute command: [Errno 13] Permission denied: '/'",
    1
)]
#[case("echo 'a", "", "Failed to execute command: No closing quotation", 1)]
fn a_command_has_upstreams_answer(
    #[case] command: &str,
    #[case] stdout: &str,
    #[case] stderr: &str,
    #[case] exit_code: i32,
) {
    let runtime = Runtime::start(&[]);
    let expected = json!({
        "stdout": stdout,
        "stderr": stderr,
        "exit_code": exit_code,
        "timed_out": false,
    });
    assert_eq!(runtime.execute(command), expected);
}

#[test]
fn a_command_starts_in_the_root() {
    let runtime = Runtime::start(&[]);
    let root = runtime.file("").canonicalize().unwrap();
    let expected = format!("{}\n", root.display());
    assert_eq!(runtime.execute("pwd")["stdout"], expected);
}

#[rstest]
#[case("POST /execute", "{}", 422)]
#[case("POST /execute", "{", 422)]
#[case("POST /execute", "", 422)]
#[case("GET /execute", "", 405)]
#[case("POST /", "", 405)]
#[case("GET /nothing", "", 404)]
fn an_invalid_call_is_refused(#[case] line: &str, #[case] body: &str, #[case] status: u16) {
    let runtime = Runtime::start(&[]);
    let answer = runtime.send(line, "application/json", body.as_bytes());
    assert_eq!(answer.status, status);
    assert!(answer.json()["detail"] != json!(null));
}

#[test]
fn a_command_that_is_too_large_is_refused() {
    let runtime = Runtime::start(&[]);
    let body = vec![b' '; (4 << 20) + 1];
    assert_eq!(
        runtime
            .send("POST /execute", "application/json", &body)
            .status,
        413
    );
}

#[test]
fn a_command_at_its_time_limit_is_killed_with_its_children() {
    let runtime = Runtime::start(&["--exec-timeout=2s"]);
    // The leader ends at once; its child has the output open.
    let outcome = runtime.execute("sh -c 'sleep 1000 & echo $! > pids; echo $$ >> pids'");
    assert_eq!(
        outcome,
        json!({
            "stdout": "",
            "stderr": "Command timed out after 2 seconds",
            "exit_code": 124,
            "timed_out": true,
        })
    );
    runtime.pids("pids", 2).into_iter().for_each(until_gone);
}

#[test]
fn a_request_may_shorten_the_time_limit_and_gets_the_output() {
    let runtime = Runtime::start(&["--exec-timeout=1s"]);
    let run = |seconds: f64, command: &str| {
        let body = json!({"command": command, "timeout_seconds": seconds}).to_string();
        let answer = runtime.send("POST /execute", "application/json", body.as_bytes());
        assert_eq!(answer.status, 200);
        answer.json()
    };
    let said = "sh -c 'echo out; printf err >&2; exec sleep 1000'";
    let late = json!({
        "stdout": "out\n",
        "stderr": "err\nCommand timed out after 0.5 seconds",
        "exit_code": 124,
        "timed_out": true,
    });
    assert_eq!(run(0.5, said), late);
    // A request cannot exceed the server's own limit.
    let stderr = run(900.0, "sleep 1000")["stderr"].clone();
    assert_eq!(stderr, "Command timed out after 1 seconds");
    assert_eq!(run(900.0, "true")["timed_out"], false);
}

#[test]
fn a_disconnect_of_the_client_kills_its_command() {
    let runtime = Runtime::start(&[]);
    let stream = runtime.begin("sh -c 'sleep 1000 & echo $! > pids; echo $$ >> pids; wait'");
    let pids = runtime.pids("pids", 2);
    drop(stream);
    pids.into_iter().for_each(until_gone);
}

#[test]
fn a_background_process_lives_on_and_leaves_no_zombie() {
    let runtime = Runtime::start(&[]);
    let left = "sh -c 'sleep 1000 >/dev/null 2>&1 & echo $!'";
    let outcome = runtime.execute(left);
    let pid: u32 = outcome["stdout"].as_str().unwrap().trim().parse().unwrap();
    // The next call is answered while the background process lives.
    assert_eq!(runtime.execute(&format!("kill -0 {pid}"))["exit_code"], 0);
    assert_eq!(runtime.execute(&format!("kill -9 {pid}"))["exit_code"], 0);
    until_gone(pid);
}

#[test]
fn output_is_limited() {
    let runtime = Runtime::start(&["--max-output-bytes=1000"]);
    let outcome = runtime.execute("head -c 100000000 /dev/zero");
    assert_eq!(outcome["stdout"].as_str().unwrap().len(), 1000);
    assert_eq!(
        outcome["stderr"],
        "\n[stdout cut after 1000 bytes; 99999000 more were dropped]\n"
    );
    assert_eq!(outcome["exit_code"], 0);
    assert!(runtime.peak_memory() < 64 * 1024);
}

#[test]
fn a_missing_head_or_body_ends_the_connection_at_the_time_limit() {
    let runtime = Runtime::start(&["--read-header-timeout=200ms", "--read-body-timeout=200ms"]);
    let mut stream = runtime.open("GET / HTTP/1.1");
    let mut rest = Vec::new();
    let _ended = stream.read_to_end(&mut rest);
    assert!(!String::from_utf8_lossy(&rest).contains("200 OK"));
    let mut stream = runtime.open("POST /execute HTTP/1.1\r\nContent-Length: 10");
    stream.write_all(b"\r\n{").unwrap();
    assert_eq!(answer(&mut stream).status, 408);
}

fn terminate(runtime: &Runtime) {
    let pid = Pid::from_raw(runtime.process.id().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
}

#[test]
fn a_shutdown_completes_calls_under_way_and_refuses_new_ones() {
    let mut runtime = Runtime::start(&[]);
    let waiting = "sh -c 'echo $$ > pids; until [ -e go ]; do sleep 0.02; done; echo done'";
    let mut stream = runtime.begin(waiting);
    runtime.pids("pids", 1);
    terminate(&runtime);
    until("the port to close", || {
        TcpStream::connect(runtime.address).is_err()
    });
    fs::write(runtime.file("go"), "").unwrap();
    assert_eq!(answer(&mut stream).json()["stdout"], "done\n");
    assert!(runtime.process.wait().unwrap().success());
}

#[test]
fn a_shutdown_kills_calls_that_exceed_the_time_limit() {
    let mut runtime = Runtime::start(&["--shutdown-timeout=100ms"]);
    let _stream = runtime.begin("sh -c 'sleep 1000 & echo $! > pids; echo $$ >> pids; wait'");
    let pids = runtime.pids("pids", 2);
    terminate(&runtime);
    assert!(runtime.process.wait().unwrap().success());
    // The process that adopts them may reap them later.
    let ended = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
            .then_some(*pid)
    };
    until("the end of the group", || {
        pids.iter().find_map(ended).is_none()
    });
}
