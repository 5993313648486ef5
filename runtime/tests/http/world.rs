//! The runtime as a process, and an HTTP client on a socket.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;

/// Time limit of each wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_sandbox-runtime");
const BOUNDARY: &str = "b0undary";

pub(crate) struct Runtime {
    pub(crate) process: Child,
    /// Address of the legacy API.
    pub(crate) address: SocketAddr,
    pub(crate) rest: SocketAddr,
    pub(crate) grpc: SocketAddr,
    world: TempDir,
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Runtime {
    /// Starts the runtime on free ports, with the root `app` in a new directory.
    pub(crate) fn start(flags: &[&str]) -> Self {
        Self::started(Command::new(PROGRAM), flags)
    }

    /// Starts the runtime with this environment variable.
    pub(crate) fn start_with(variable: &str, value: &str) -> Self {
        let mut program = Command::new(PROGRAM);
        program.env(variable, value);
        Self::started(program, &[])
    }

    /// Starts the runtime by nohup, so that it ignores SIGHUP.
    pub(crate) fn start_by_nohup() -> Self {
        let mut nohup = Command::new("nohup");
        nohup.arg(PROGRAM);
        Self::started(nohup, &[])
    }

    fn started(mut command: Command, flags: &[&str]) -> Self {
        let world = TempDir::new().unwrap();
        let mut process = command
            .arg("--legacy-bind-address=127.0.0.1:0")
            .arg("--rest-bind-address=127.0.0.1:0")
            .arg("--grpc-bind-address=127.0.0.1:0")
            .arg(format!("--root={}", world.path().join("app").display()))
            .arg(format!("--root-dir={}", world.path().join("app").display()))
            .args(flags)
            .env_remove("SANDBOX_EXEC_TIMEOUT_SECONDS")
            .env("SANDBOX_ID", "one")
            .env("SANDBOX_API_TOKEN", "secret")
            .env("SANDBOX_RUNTIME_LOG", "info")
            .current_dir(world.path())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(process.stderr.take().unwrap());
        let mut line = String::new();
        let mut bound = |api: &str| loop {
            line.clear();
            assert!(log.read_line(&mut line).unwrap() > 0, "it ended at once");
            let line = line.trim();
            if let Some((before, address)) = line.rsplit_once(" bound=") {
                assert!(
                    before.ends_with(&format!("serving api=\"{api}\"")),
                    "{line}"
                );
                break address.parse().unwrap();
            }
        };
        let (address, rest, grpc) = (bound("legacy"), bound("rest"), bound("grpc"));
        thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        Self {
            process,
            address,
            rest,
            grpc,
            world,
        }
    }

    pub(crate) fn file(&self, path: &str) -> PathBuf {
        self.world.path().join("app").join(path)
    }

    /// Opens a connection and sends the head of a request.
    pub(crate) fn open(&self, head: &str) -> TcpStream {
        open(self.address, head)
    }

    pub(crate) fn send(&self, line: &str, kind: &str, body: &[u8]) -> Answer {
        let length = body.len();
        let line = format!("{line} HTTP/1.1\r\nContent-Length: {length}\r\nContent-Type: {kind}");
        let mut stream = self.open(&line);
        stream.write_all(b"\r\n").unwrap();
        // The runtime may refuse and close the connection before all is sent.
        let _sent = stream.write_all(body);
        answer(&mut stream)
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.send(&format!("GET {path}"), "text/plain", b"")
    }

    pub(crate) fn execute(&self, command: &str) -> Value {
        let body = serde_json::json!({"command": command}).to_string();
        let answer = self.send("POST /execute", "application/json", body.as_bytes());
        assert_eq!(answer.status, 200);
        answer.json()
    }

    /// Sends a command, and returns the connection without reading the answer.
    pub(crate) fn begin(&self, command: &str) -> TcpStream {
        let body = serde_json::json!({"command": command}).to_string();
        let length = body.len();
        let mut stream = self.open(&format!(
            "POST /execute HTTP/1.1\r\nContent-Length: {length}"
        ));
        write!(stream, "\r\n{body}").unwrap();
        stream
    }

    pub(crate) fn upload(&self, name: &str, content: &[u8]) -> Answer {
        let body = [&form_head("file", name), content, &form_end()].concat();
        self.send("POST /upload", &form_kind(), &body)
    }

    /// Returns the process ids that a command writes to a file, one a line, once there are `count`.
    pub(crate) fn pids(&self, file: &str, count: usize) -> Vec<u32> {
        let file = self.file(file);
        let mut pids = Vec::new();
        until("the command's process ids", || {
            let text = fs::read_to_string(&file).unwrap_or_default();
            pids = text.lines().filter_map(|line| line.parse().ok()).collect();
            pids.len() == count && text.ends_with('\n')
        });
        pids
    }

    /// Returns the peak memory of the process, in KiB.
    pub(crate) fn peak_memory(&self) -> u64 {
        let path = format!("/proc/{}/status", self.process.id());
        let status = fs::read_to_string(path).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM"));
        let number = line.unwrap().split_whitespace().nth(1);
        number.unwrap().parse().unwrap()
    }
}

/// Opens a connection and sends the head of a request.
pub(crate) fn open(address: SocketAddr, head: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!("{head}\r\nHost: sandbox\r\nConnection: close\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    stream
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let _killed = self.process.kill();
        let _ended = self.process.wait();
    }
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// Sends a whole body as one chunk; the head must have said `Transfer-Encoding: chunked`.
pub(crate) fn send_chunked(stream: &mut TcpStream, body: &[u8]) {
    write!(stream, "\r\n{:x}\r\n", body.len()).unwrap();
    stream.write_all(body).unwrap();
    stream.write_all(b"\r\n0\r\n\r\n").unwrap();
}

pub(crate) fn form_kind() -> String {
    format!("multipart/form-data; boundary={BOUNDARY}")
}

pub(crate) fn form_head(field: &str, name: &str) -> Vec<u8> {
    let disposition = format!("form-data; name=\"{field}\"; filename=\"{name}\"");
    format!("--{BOUNDARY}\r\nContent-Disposition: {disposition}\r\n\r\n").into_bytes()
}

pub(crate) fn form_end() -> Vec<u8> {
    format!("\r\n--{BOUNDARY}--\r\n").into_bytes()
}

/// Reads an answer to the end of the connection, and checks the length of its body.
pub(crate) fn answer(stream: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    if let Err(error) = stream.read_to_end(&mut bytes) {
        assert!(!bytes.is_empty(), "{error}");
    }
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
    let end = end.expect("an answer has a head");
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let body = bytes.split_off(end + 4);
    // An answer that cannot have a body has no Content-Length.
    let length = head.split("content-length: ").nth(1);
    let length = length.and_then(|rest| rest.lines().next()?.parse().ok());
    let bodiless = matches!(status, 204 | 304);
    assert_eq!(length, (!bodiless).then_some(body.len()), "{head}");
    Answer { status, head, body }
}

/// Waits until a condition holds.
#[track_caller]
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a process is gone; a zombie is not gone.
#[track_caller]
pub(crate) fn until_gone(pid: u32) {
    let path = format!("/proc/{pid}");
    until("the end of a process", || !Path::new(&path).exists());
}
