//! Streams into and out of containers: exec, attach, terminals, cp, port-forward.

use serde_json::json;
use torpor_tests::case::case;
use torpor_tests::forward::Forward;
use torpor_tests::pods::{BUSYBOX, PYTHON, pod, python, shell, shell_pod, with};
use torpor_tests::terminal::Terminal;

const IDLE: &str = "exec sleep 1000000";

#[tokio::test]
async fn exec_carries_streams_and_the_exit_code() -> anyhow::Result<()> {
    case("exec", async |case| {
        case.start(shell_pod("p", IDLE)).await?;
        for code in [0, 1, 7, 255] {
            let ran = case
                .kubectl
                .exec("p", "a", &["sh", "-c", &format!("exit {code}")])
                .await?;
            assert_eq!(ran.code, code);
        }
        let ran = case
            .kubectl
            .exec("p", "a", &["sh", "-c", "echo out; echo err >&2"])
            .await?;
        assert_eq!((ran.out.as_str(), ran.err.as_str()), ("out\n", "err\n"));
        let ran = case.kubectl.exec("p", "a", &["/no/such/program"]).await?;
        assert_ne!(ran.code, 0);
        assert!(ran.err.contains("/no/such/program"), "{}", ran.err);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn exec_takes_a_megabyte_on_standard_input() -> anyhow::Result<()> {
    case("stdin", async |case| {
        case.start(shell_pod("p", IDLE)).await?;
        let input = vec![b'x'; 1 << 20];
        let args = ["exec", "-i", "p", "--", "wc", "-c"];
        let ran = case.kubectl.run_with(&args, Some(&input)).await?;
        assert_eq!(ran.ok()?, (1 << 20).to_string());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn exec_with_a_terminal_is_interactive() -> anyhow::Result<()> {
    case("tty", async |case| {
        case.start(shell_pod("p", IDLE)).await?;
        let mut terminal = Terminal::open(&case.kubectl, &["exec", "-it", "p", "--", "sh"])?;
        terminal.line("[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo terminals-$((40+2))")?;
        terminal.shows("terminals-42").await?;
        terminal.line("exit 5")?;
        assert_eq!(terminal.ended().await?, 5);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn attach_reaches_the_shell_of_a_container_with_a_terminal() -> anyhow::Result<()> {
    case("attach", async |case| {
        let container = json!({
            "name": "a", "image": BUSYBOX, "imagePullPolicy": "Never", "command": ["sh"], "stdin": true, "tty": true,
        });
        case.start(pod("p", json!({ "containers": [container] }))).await?;
        let mut terminal = Terminal::open(&case.kubectl, &["attach", "-it", "p"])?;
        terminal.line("kept=first; echo answer-$((40+2))")?;
        terminal.shows("answer-42").await?;
        drop(terminal);
        // The shell continues while no client is attached.
        let mut terminal = Terminal::open(&case.kubectl, &["attach", "-it", "p"])?;
        terminal.line("echo still-$kept")?;
        terminal.shows("still-first").await?;
        assert!(case.kubectl.ok(&["logs", "p"]).await?.contains("answer-42"), "logs show the terminal too");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn files_are_copied_both_ways() -> anyhow::Result<()> {
    case("cp", async |case| {
        let container = with(
            shell("a", IDLE),
            json!({ "image": PYTHON, "command": ["sleep", "1000000"] }),
        );
        case.start(pod("p", json!({ "containers": [container] })))
            .await?;
        let dir = tempfile::tempdir()?;
        let (there, back) = (dir.path().join("there"), dir.path().join("back"));
        let content: Vec<u8> = (0..300_000u32).map(|n| n.to_le_bytes()[1]).collect();
        std::fs::write(&there, &content)?;
        let (there, back_text) = (there.display().to_string(), back.display().to_string());
        case.kubectl.ok(&["cp", &there, "p:/tmp/file"]).await?;
        case.kubectl.ok(&["cp", "p:/tmp/file", &back_text]).await?;
        assert_eq!(std::fs::read(&back)?, content);
        Ok(())
    })
    .await
}

/// Program that serves on the loopback only, reads slowly, and answers with the SHA-256 of the
/// whole body.
const DIGEST: &str = r#"
import hashlib, http.server, time

class Digest(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        left, total = int(self.headers["Content-Length"]), hashlib.sha256()
        while left:
            time.sleep(0.01)
            part = self.rfile.read(min(left, 100000))
            if not part:
                return
            total.update(part)
            left -= len(part)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(total.hexdigest().encode())

server = http.server.ThreadingHTTPServer(("127.0.0.1", 8080), Digest)
open("/tmp/serves", "w").close()
server.serve_forever()
"#;

fn digest_pod() -> serde_json::Value {
    let probe = json!({ "exec": { "command": ["test", "-e", "/tmp/serves"] }, "periodSeconds": 1 });
    let container = with(python("a", DIGEST), json!({ "readinessProbe": probe }));
    pod("p", json!({ "containers": [container] }))
}

#[tokio::test]
async fn port_forward_reaches_a_server_in_the_sandbox() -> anyhow::Result<()> {
    case("forward", async |case| {
        case.start(digest_pod()).await?;
        // The body is larger than all buffers on the way: no byte may be lost when the server reads
        // slowly.
        let body = vec![b'x'; 8 << 20];
        let mut request =
            format!("POST / HTTP/1.0\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
        request.extend(&body);
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("body");
        std::fs::write(&file, &body)?;
        let sum = tokio::process::Command::new("sha256sum")
            .arg(&file)
            .output();
        let sum = String::from_utf8(sum.await?.stdout)?;
        let sum = sum.split_whitespace().next().unwrap_or_default();
        assert_eq!(sum.len(), 64);
        let forward = Forward::open(&case.kubectl, "p", 8080).await?;
        for _ in 0..2 {
            let answer = String::from_utf8(forward.exchange(&request).await?)?;
            assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
            assert!(answer.ends_with(sum), "{answer}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn port_forward_to_a_closed_port_reports_an_error() -> anyhow::Result<()> {
    case("closed", async |case| {
        case.start(shell_pod("p", IDLE)).await?;
        let mut forward = Forward::open(&case.kubectl, "p", 8080).await?;
        // kubectl closes its side, with an error or without one.
        if let Ok(answer) = forward.exchange(b"GET / HTTP/1.0\r\n\r\n").await {
            assert_eq!(answer, b"");
        }
        let words = forward.complaint().await?;
        assert!(words.contains("reset by peer"), "{words}");
        Ok(())
    })
    .await
}
