//! Streams into and out of containers: exec, attach, terminals, cp, port-forward.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use torpor_tests::case::case;
use torpor_tests::pods::{BUSYBOX, PYTHON, pod, shell, shell_pod, with};
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
        // The shell goes on when nobody is attached.
        let mut terminal = Terminal::open(&case.kubectl, &["attach", "-it", "p"])?;
        terminal.line("echo still-$kept")?;
        terminal.shows("still-first").await?;
        assert!(case.kubectl.ok(&["logs", "p"]).await?.contains("answer-42"), "logs show the terminal too");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn attach_shows_what_a_container_without_a_terminal_prints() -> anyhow::Result<()> {
    case("attachout", async |case| {
        let line = "while read line; do echo got $line; done";
        let container = with(shell("a", line), json!({ "stdin": true }));
        case.start(pod("p", json!({ "containers": [container] })))
            .await?;
        let mut child = case.kubectl.spawn(&["attach", "-i", "p"], true)?;
        let (mut stdin, stdout) = (child.stdin.take(), child.stdout.take());
        if let Some(stdin) = &mut stdin {
            stdin.write_all(b"a word\n").await?;
        }
        let mut lines = BufReader::new(stdout.ok_or_else(|| anyhow::anyhow!("no output"))?).lines();
        let line = tokio::time::timeout(Duration::from_secs(20), lines.next_line()).await??;
        assert_eq!(line.as_deref(), Some("got a word"));
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
