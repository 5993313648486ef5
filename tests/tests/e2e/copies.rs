//! Copies: what a program that runs twice can see, and what differs in each copy (docs/clones.md).

use std::collections::BTreeSet;

use anyhow::Context;
use serde_json::{Value, json};
use torpor_api::annotations::{ON_RESTORE_EXEC, RESTORE_FROM};
use torpor_tests::case::{Case, case};
use torpor_tests::pods::{annotated, python};
use torpor_tests::sandboxes::{LIMIT, condition_of, sandbox};
use torpor_tests::wait;

/// Program that draws from OpenSSL's generator on request (a file /ask), mixes the kernel's
/// randomness in on SIGUSR1, and notes when its generation changes.
const PROGRAM: &str = r#"
import ctypes, os, signal, ssl, threading, time

def watch():
    libc = ctypes.CDLL(None)
    watcher = libc.inotify_init1(0)
    IN_CLOSE_WRITE = 8
    if libc.inotify_add_watch(watcher, b"/run/torpor/generation", IN_CLOSE_WRITE) < 0:
        return
    with open("/watching", "w") as watching:
        watching.write("yes")
    while os.read(watcher, 4096):
        with open("/run/torpor/generation") as now, open("/changed", "a") as changed:
            changed.write(now.read())

threading.Thread(target=watch, daemon=True).start()
signal.signal(signal.SIGUSR1, lambda *_: ssl.RAND_add(os.urandom(32), 32.0))
ssl.RAND_bytes(16)
while True:
    if os.path.exists("/ask"):
        os.remove("/ask")
        with open("/said", "w") as said:
            said.write(ssl.RAND_bytes(16).hex())
        os.rename("/said", "/answer")
    time.sleep(0.05)
"#;

/// Returns the program's next random number.
async fn drawn(case: &Case, pod: &str) -> anyhow::Result<String> {
    case.sh(pod, "a", "rm -f /answer; touch /ask").await?;
    case.written(pod, "a", "/answer").await
}

fn copy(name: &str, command: Option<&str>) -> Value {
    let copy = annotated(original(name), RESTORE_FROM, "snap");
    match command {
        Some(command) => annotated(copy, ON_RESTORE_EXEC, command),
        None => copy,
    }
}

fn original(name: &str) -> Value {
    sandbox(name, json!({ "containers": [python("a", PROGRAM)] }))
}

/// Starts an original, and takes a snapshot of it.
async fn snapshot(case: &Case) -> anyhow::Result<()> {
    case.create(original("s")).await?;
    case.sandbox_ready("s").await?;
    case.written("s", "a", "/watching")
        .await
        .context("it watches")?;
    case.snapshot("snap", "s").await
}

#[tokio::test]
async fn a_copy_has_its_own_name_and_generation_and_its_program_is_notified() -> anyhow::Result<()>
{
    case("copies", async |case| {
        snapshot(case).await?;
        let mut generations = BTreeSet::new();
        generations.insert(case.sh("s", "a", "cat /run/torpor/generation").await?);
        for name in ["one", "two"] {
            case.create(copy(name, None)).await?;
            case.sandbox_ready(name).await?;
            let names = "uname -n; cat /etc/hostname /proc/sys/kernel/hostname; tail -n 1 /etc/hosts | tr '\\t' '\\n' | tail -n 1";
            assert_eq!(case.sh(name, "a", names).await?, [name; 4].join("\n"));
            let generation = case.sh(name, "a", "cat /run/torpor/generation").await?;
            let changed = case.written(name, "a", "/changed").await?;
            assert_eq!(changed.trim(), generation, "inotify notified the program");
            generations.insert(generation);
        }
        assert_eq!(generations.len(), 3, "{generations:?}");
        Ok(())
    })
    .await
}

/// OpenSSL's generator is in the program's memory: copies draw the same numbers, unless the program
/// renews the generator before the copies can be reached.
#[tokio::test]
async fn the_command_of_a_copy_runs_before_the_copy_can_be_reached_and_can_renew_shared_state()
-> anyhow::Result<()> {
    case("renewed", async |case| {
        snapshot(case).await?;
        let mut numbers = Vec::new();
        let renew = r#"["/bin/sh","-c","test \"$TORPOR_RESTORE\" = copy && kill -USR1 1"]"#;
        for (name, command) in [
            ("same", None),
            ("again", None),
            ("one", Some(renew)),
            ("two", Some(renew)),
        ] {
            case.create(copy(name, command)).await?;
            case.sandbox_ready(name).await?;
            numbers.push(drawn(case, name).await?);
        }
        assert_eq!(numbers[0], numbers[1], "the copies share what they draw");
        let others: BTreeSet<_> = numbers[1..].iter().collect();
        assert_eq!(others.len(), 3, "{numbers:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_copy_whose_command_fails_does_not_continue_and_reports_why() -> anyhow::Result<()> {
    case("unrenewed", async |case| {
        snapshot(case).await?;
        case.create(copy("c", Some(r#"["/bin/false"]"#))).await?;
        let sandbox = case
            .sandbox_has("c", "Restored", "False", "OnRestoreExecFailed")
            .await?;
        let (_, _, message) = condition_of(&sandbox, "Restored");
        assert!(
            message.contains(ON_RESTORE_EXEC) && message.contains("exit code 1"),
            "{message}"
        );
        case.create(copy("d", Some("/bin/true"))).await?;
        wait::object(
            case.sandboxes(),
            "d",
            "its annotation is refused",
            LIMIT,
            |found| {
                let found = found.ok_or("there is none")?;
                let all = found.status.iter().flat_map(|status| &status.conditions);
                match all
                    .into_iter()
                    .any(|one| one.message.contains("JSON array of words"))
                {
                    true => Ok(()),
                    false => Err(format!("{:?}", found.status)),
                }
            },
        )
        .await
    })
    .await
}
