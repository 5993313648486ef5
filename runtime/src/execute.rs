//! The call `execute`: runs a command and returns its output.

use std::{
    io,
    os::unix::process::ExitStatusExt as _,
    path::Path,
    process::{ExitStatus, Stdio},
    sync::Arc,
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _},
    process::Command,
    time::timeout,
};

use crate::{claim, command_line, group::Group, orphans::Children, refusal::Refusal};

/// Limits of a command.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub time: Duration,
    /// Bytes that are kept of each output.
    pub output: usize,
}

/// Result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub stdout: String,
    pub stderr: String,
    pub exit_code: i32,
    /// The command was killed at its time limit.
    pub timed_out: bool,
}

/// Request to run a command.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub command: String,
    /// Time limit of the request; the server's limit applies too.
    pub time: Option<Duration>,
}

/// Exit code of a command that exceeded its time limit, as by `timeout` of coreutils.
const TIMED_OUT: i32 = 124;

/// Failure to run a command to its end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Split(#[from] command_line::Error),
    #[error("{}: '{program}'", as_python(.source))]
    Start { program: String, source: io::Error },
    #[error("cannot read the output: {0}")]
    Output(io::Error),
}

/// Captured output of a command.
#[derive(Debug, Default)]
struct Captured {
    kept: Vec<u8>,
    dropped: u64,
}

/// Parses the body of a request.
pub fn request_of(body: &[u8]) -> Result<Request, Refusal> {
    if body.is_empty() {
        return Err(Refusal::missing(None));
    }
    let invalid = |kind, field, message| Refusal::Field {
        kind,
        field,
        message,
    };
    match serde_json::from_slice(body) {
        Err(_) => Err(invalid("json_invalid", None, "JSON decode error")),
        Ok(Value::Object(mut fields)) => match fields.remove("command") {
            Some(Value::String(command)) => {
                let time = fields.get("timeout_seconds").unwrap_or(&Value::Null);
                let time = time_of(time)
                    .map_err(|(kind, message)| invalid(kind, Some("timeout_seconds"), message))?;
                Ok(Request { command, time })
            }
            Some(_) => {
                let message = "Input should be a valid string";
                Err(invalid("string_type", Some("command"), message))
            }
            None => Err(Refusal::missing(Some("command"))),
        },
        Ok(_) => {
            let message = "Input should be a valid dictionary or object to extract fields from";
            Err(invalid("model_attributes_type", None, message))
        }
    }
}

/// Parses a number of seconds above zero; null and a number too large for a duration are `None`.
fn time_of(value: &Value) -> Result<Option<Duration>, (&'static str, &'static str)> {
    if value.is_null() {
        return Ok(None);
    }
    let number = value.as_f64();
    let seconds = number.ok_or(("float_type", "Input should be a valid number"))?;
    match seconds > 0.0 {
        true => Ok(Duration::try_from_secs_f64(seconds).ok()),
        false => Err(("greater_than", "Input should be greater than 0")),
    }
}

/// Runs the command in `directory`. A failure to start is an outcome too, as in upstream.
///
/// Dropping the future kills the command's process group.
pub async fn execute(
    command: &str,
    directory: &Path,
    limits: Limits,
    children: &Arc<Children>,
) -> Outcome {
    match run(command, directory, limits, children).await {
        Ok(outcome) => outcome,
        Err(error) => Outcome {
            stdout: String::new(),
            stderr: format!("Failed to execute command: {error}"),
            exit_code: 1,
            timed_out: false,
        },
    }
}

async fn run(
    command: &str,
    directory: &Path,
    limits: Limits,
    children: &Arc<Children>,
) -> Result<Outcome, Error> {
    let words = command_line::split(command)?;
    let program = words.first().cloned().unwrap_or_default();
    let mut command = Command::new(&program);
    command.args(&words[1..]).current_dir(directory);
    command.envs(claim::variables().await);
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut group =
        Group::start(&mut command, children).map_err(|source| Error::Start { program, source })?;
    let Some((stdout, stderr)) = group.pipes() else {
        return Err(Error::Output(io::ErrorKind::BrokenPipe.into()));
    };
    let (mut out, mut err) = (Captured::default(), Captured::default());
    let end = async {
        // The outputs end when no process has them open, which includes background processes.
        tokio::try_join!(
            capture(stdout, limits.output, &mut out),
            capture(stderr, limits.output, &mut err)
        )?;
        group.wait().await
    };
    match timeout(limits.time, end).await {
        Ok(ended) => Ok(outcome(&out, &err, ended.map_err(Error::Output)?)),
        Err(_) => {
            group.kill().await.map_err(Error::Output)?;
            Ok(timed_out(&out, &err, limits.time))
        }
    }
}

/// Reads to the end and keeps the first `limit` bytes. A full pipe would stop the command.
async fn capture(
    mut pipe: impl AsyncRead + Unpin,
    limit: usize,
    captured: &mut Captured,
) -> io::Result<()> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let read = pipe.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        let kept = read.min(limit - captured.kept.len());
        captured.kept.extend_from_slice(&buffer[..kept]);
        captured.dropped += (read - kept) as u64;
    }
}

fn outcome(stdout: &Captured, stderr: &Captured, status: ExitStatus) -> Outcome {
    let (stdout, stderr) = texts(stdout, stderr);
    Outcome {
        stdout,
        stderr,
        exit_code: exit_code(status),
        timed_out: false,
    }
}

/// Returns the outcome of a command that exceeded its time limit, with upstream's message.
fn timed_out(stdout: &Captured, stderr: &Captured, limit: Duration) -> Outcome {
    let (stdout, mut stderr) = texts(stdout, stderr);
    if !stderr.is_empty() && !stderr.ends_with('\n') {
        stderr.push('\n');
    }
    let seconds = limit.as_secs_f64();
    stderr += &format!("Command timed out after {seconds} seconds");
    Outcome {
        stdout,
        stderr,
        exit_code: TIMED_OUT,
        timed_out: true,
    }
}

/// Returns both outputs as text; stderr ends with a note on dropped bytes.
fn texts(stdout: &Captured, stderr: &Captured) -> (String, String) {
    let mut text = text(&stderr.kept);
    for (name, captured) in [("stdout", stdout), ("stderr", stderr)] {
        if captured.dropped > 0 {
            let (kept, dropped) = (captured.kept.len(), captured.dropped);
            text += &format!("\n[{name} cut after {kept} bytes; {dropped} more were dropped]\n");
        }
    }
    (self::text(&stdout.kept), text)
}

/// Returns the exit code as Python does: negative for a signal.
fn exit_code(status: ExitStatus) -> i32 {
    status
        .code()
        .or_else(|| status.signal().map(|signal| -signal))
        .unwrap_or(1)
}

/// Returns output as text with line feeds only, as upstream does.
///
/// Invalid UTF-8 is replaced; upstream loses the whole output in that case.
fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.replace("\r\n", "\n").replace('\r', "\n")
}

/// Returns a system error as Python writes it: `[Errno 2] No such file or directory`.
fn as_python(error: &io::Error) -> String {
    let text = error.to_string();
    match error.raw_os_error() {
        Some(number) => {
            let message = text.split(" (os error").next().unwrap_or(&text);
            format!("[Errno {number}] {message}")
        }
        None => text,
    }
}

impl Outcome {
    /// Returns the body of the answer.
    pub fn body(&self) -> Value {
        json!({
            "stdout": self.stdout,
            "stderr": self.stderr,
            "exit_code": self.exit_code,
            "timed_out": self.timed_out,
        })
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(r#"{"command":"ls"}"#, Ok("ls"))]
    #[case(r#"{"command":"","other":1}"#, Ok(""))]
    #[case("", Err(("missing", None)))]
    #[case("{", Err(("json_invalid", None)))]
    #[case("[]", Err(("model_attributes_type", None)))]
    #[case("{}", Err(("missing", Some("command"))))]
    #[case(r#"{"command":1}"#, Err(("string_type", Some("command"))))]
    #[case(r#"{"command":"ls","timeout_seconds":"1"}"#, Err(("float_type", Some("timeout_seconds"))))]
    #[case(r#"{"command":"ls","timeout_seconds":0}"#, Err(("greater_than", Some("timeout_seconds"))))]
    #[case(r#"{"command":"ls","timeout_seconds":-1.5}"#, Err(("greater_than", Some("timeout_seconds"))))]
    fn a_body_names_a_command(
        #[case] body: &str,
        #[case] expected: Result<&str, (&'static str, Option<&'static str>)>,
    ) {
        let request = request_of(body.as_bytes()).map_err(|refusal| match refusal {
            Refusal::Field { kind, field, .. } => (kind, field),
            other => panic!("{other}"),
        });
        let command = request.map(|request| request.command);
        assert_eq!(command, expected.map(str::to_owned));
    }

    #[rstest]
    #[case("null", None)]
    #[case("1", Some(1000))]
    #[case("0.25", Some(250))]
    #[case("1e300", None)]
    fn a_request_may_have_its_own_time_limit(#[case] text: &str, #[case] millis: Option<u128>) {
        let body = format!(r#"{{"command":"ls","timeout_seconds":{text}}}"#);
        let time = request_of(body.as_bytes()).unwrap().time;
        assert_eq!(time.map(|time| time.as_millis()), millis);
    }

    #[rstest]
    #[case(b"a\r\nb\rc\n", "a\nb\nc\n")]
    #[case(b"\xff", "\u{fffd}")]
    fn output_is_text(#[case] bytes: &[u8], #[case] expected: &str) {
        assert_eq!(text(bytes), expected);
    }

    #[tokio::test]
    async fn output_beyond_the_limit_is_read_and_dropped() {
        let mut captured = Captured::default();
        capture(&b"0123456789"[..], 4, &mut captured).await.unwrap();
        assert_eq!((&captured.kept[..], captured.dropped), (&b"0123"[..], 6));
    }
}
