//! Hibernation in place: the Pod stays, its sandbox becomes an image, and the first use restores
//! it.

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use torpor_records::PauseMark;
use torpor_snapshots::AGENT_ID;
use torpor_tests::case::{Case, START_LIMIT, case, uid};
use torpor_tests::pods::{BUSYBOX, COUNT, mounts, pod, shell, shell_pod, with};
use torpor_tests::remains::Footprint;
use torpor_tests::sleep::{is_ready, restarts};
use torpor_tests::terminal::Terminal;
use torpor_tests::wait;
use torpor_tests::witness::{self, Connection};

/// Returns a Pod with everything at once: a Python program with memory, files and a child, a
/// counting shell, and both kinds of emptyDir.
fn rich_pod() -> Value {
    let volumes = json!({ "volumeMounts": mounts(&[("disk", "/disk"), ("memory", "/memory")]) });
    let witness = witness::container(5, &["/disk/file", "/memory/file", "/root-file"]);
    pod(
        "p",
        json!({
            "initContainers": [with(shell("init", "echo once >>/disk/init"), volumes.clone())],
            "containers": [with(witness, volumes.clone()), with(shell("count", COUNT), volumes)],
            "volumes": [
                { "name": "disk", "emptyDir": {} },
                { "name": "memory", "emptyDir": { "medium": "Memory" } },
            ],
        }),
    )
}

/// Returns a Pod for tests of its connections only.
fn witness_pod() -> Value {
    pod("p", json!({ "containers": [witness::container(5, &[])] }))
}

/// Checks that the counting shell's log has each number once, in order, from 1 on; returns the
/// last.
async fn log_has_no_gap(case: &Case, container: &str) -> anyhow::Result<u64> {
    let log = case.log("p", container).await?;
    let mut last = 0;
    for line in log.lines() {
        let number = line
            .strip_prefix("count ")
            .and_then(|number| number.parse::<u64>().ok());
        anyhow::ensure!(number == Some(last + 1), "{line:?} follows {last}");
        last += 1;
    }
    Ok(last)
}

/// Returns the number that the counting shell holds.
async fn counted(case: &Case, container: &str) -> anyhow::Result<u64> {
    Ok(case.written("p", container, "/n").await?.parse()?)
}

fn address(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.pod_ip.as_deref()
}

#[tokio::test]
async fn a_hibernated_pod_is_an_image_and_goes_on_where_it_was() -> anyhow::Result<()> {
    case("hibernate", async |case| {
        let pod = case.start(rich_pod()).await?;
        let (uid, before) = (uid(&pod), witness::ask(&pod).await?);

        let asleep = case.hibernate("p").await?;
        assert!(is_ready(&asleep), "the Pod stays ready");
        assert_eq!(
            case.node.sandbox_processes(&uid)?,
            [],
            "no process of the sandbox is left"
        );
        let image = case.node.image_of(&case.namespace, &uid)?;
        // For root and for the agent, which uploads and removes images.
        assert_eq!(access(&image)?, (0o770, 0, AGENT_ID));
        for entry in std::fs::read_dir(&image)? {
            let path = entry?.path();
            assert_eq!(access(&path)?, (0o640, 0, AGENT_ID), "{}", path.display());
        }
        let logged = log_has_no_gap(case, "count").await?;

        let awake = case.wake("p").await?;
        witness::ask(&awake).await?.goes_on_from(&before)?;
        assert_eq!(address(&awake), address(&pod), "same address");
        assert_eq!(
            (restarts(&awake), torpor_tests::case::uid(&awake)),
            (0, uid)
        );
        assert_eq!(
            case.sh("p", "count", "cat /disk/init").await?,
            "once",
            "init ran once"
        );
        wait::until("the log goes on", START_LIMIT, async || {
            let now = log_has_no_gap(case, "count").await?;
            wait::holds(now > logged, || format!("{logged} → {now}"))
        })
        .await
    })
    .await
}

/// Returns mode, owner and group.
fn access(path: &std::path::Path) -> anyhow::Result<(u32, u32, u32)> {
    let found = std::fs::symlink_metadata(path)?;
    Ok((found.mode() & 0o7777, found.uid(), found.gid()))
}

#[tokio::test]
async fn an_exec_wakes_a_hibernated_pod_and_finds_its_memory() -> anyhow::Result<()> {
    case("execwake", async |case| {
        case.start(shell_pod("p", COUNT)).await?;
        let before = counted(case, "a").await?;
        case.hibernate("p").await?;
        let after: u64 = case.kubectl.sh("p", "a", "cat /n").await?.parse()?;
        assert!(after >= before, "{before} → {after}");
        let pod = case.pods().get("p").await?;
        assert_eq!(restarts(&pod), 0);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_exec_is_not_cut_off_although_hibernation_is_wanted() -> anyhow::Result<()> {
    case("execlong", async |case| {
        case.start(shell_pod("p", COUNT)).await?;
        case.hibernate("p").await?;
        let line = "echo begun; for i in 1 2 3 4 5 6 7 8; do sleep 1; done; echo ended";
        assert_eq!(case.kubectl.sh("p", "a", line).await?, "begun\nended");
        // The Pod sleeps again when nothing works in it.
        case.asleep("p").await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_pod_hibernates_and_wakes_again_and_again() -> anyhow::Result<()> {
    case("cycles", async |case| {
        let pod = case.start(rich_pod()).await?;
        let mut before = witness::ask(&pod).await?;
        for _ in 0..3 {
            case.hibernate("p").await?;
            let awake = case.wake("p").await?;
            let after = witness::ask(&awake).await?;
            after.goes_on_from(&before)?;
            assert_eq!((address(&awake), restarts(&awake)), (address(&pod), 0));
            before = after;
        }
        log_has_no_gap(case, "count").await?;
        let uid = uid(&pod);
        wait::until("stale images are removed", START_LIMIT, async || {
            let images = case.node.images_of(&case.namespace, &uid);
            wait::holds(images.len() <= 1, || format!("{images:?}"))
        })
        .await
    })
    .await
}

/// The process that hibernated the Pod died after the sandbox's processes, before it removed the
/// note of the pause.
///
/// gVisor ends a sandbox that is resumed without having been paused.
#[tokio::test]
async fn a_note_of_a_pause_does_not_outlive_the_sandbox_that_was_paused() -> anyhow::Result<()> {
    case("pausenote", async |case| {
        let pod = case.start(shell_pod("p", COUNT)).await?;
        let mut before = 0;
        for _ in 0..2 {
            case.hibernate("p").await?;
            let sandbox = case.node.sandbox_of(&uid(&pod))?.sandbox;
            let paused = PauseMark::Paused;
            case.node.records.note_pause(&sandbox, paused, None)?;
            assert_eq!(restarts(&case.wake("p").await?), 0);
            before = wait::until("it counts on", START_LIMIT, async || {
                let now = case.counted("p").await?;
                Ok(if now > before {
                    Ok(now)
                } else {
                    Err(format!("{before} → {now}"))
                })
            })
            .await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_hibernated_pod_is_deleted_at_once_and_leaves_nothing() -> anyhow::Result<()> {
    case("deleted", async |case| {
        let grace = json!({ "spec": { "terminationGracePeriodSeconds": 60 } });
        let pod = case.start(with(rich_pod(), grace)).await?;
        case.hibernate("p").await?;
        let footprint = Footprint::take(&case.node, &case.namespace, &uid(&pod))?;
        let began = Instant::now();
        case.delete_pod("p", Duration::from_secs(15)).await?;
        wait::until(
            "nothing of the sandbox is left",
            Duration::from_secs(15),
            async || {
                let left = footprint.of_sandbox(&case.node);
                wait::holds(left.is_empty(), || format!("{left:?}"))
            },
        )
        .await?;
        wait::until(
            "image and ledger are gone",
            Duration::from_secs(30),
            async || {
                let left = footprint.of_memory(&case.node);
                wait::holds(left.is_empty(), || format!("{left:?}"))
            },
        )
        .await?;
        assert!(began.elapsed() < Duration::from_secs(40));
        Ok(())
    })
    .await
}

/// Kills a process of a hibernated Pod, waits until the kubelet has noticed, and checks that the
/// memory is still there.
async fn survives(
    name: &str,
    kill: impl AsyncFnOnce(&Case, &str) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    case(name, async |case| {
        let pod = case.start(rich_pod()).await?;
        let (uid, before) = (uid(&pod), witness::ask(&pod).await?);
        let counted_before = counted(case, "count").await?;
        case.hibernate("p").await?;
        kill(case, &uid).await?;
        let restarted = |pod: &Pod| restarts(pod) > 0;
        case.pod_until("p", "the kubelet noticed", START_LIMIT, restarted)
            .await?;
        let awake = case.wake("p").await?;
        witness::ask(&awake).await?.goes_on_from(&before)?;
        let counted_after = counted(case, "count").await?;
        assert!(
            counted_after >= counted_before,
            "{counted_before} → {counted_after}"
        );
        assert_eq!(
            case.sh("p", "count", "cat /disk/init").await?,
            "once",
            "init ran once"
        );
        Ok(())
    })
    .await
}

#[tokio::test]
async fn memory_survives_the_death_of_the_shim_of_a_hibernated_pod() -> anyhow::Result<()> {
    survives("shimdies", async |case, uid| case.node.shim(uid)?.kill()).await
}

/// Between the shim's death and the removal of its remains, nothing answers for the Pod.
#[tokio::test]
async fn a_packet_right_after_the_shims_death_costs_a_hibernated_pod_no_memory()
-> anyhow::Result<()> {
    survives("shimpacket", async |case, uid| {
        let address = witness::address(&case.pods().get("p").await?)?;
        case.node.shim(uid)?.kill()?;
        let asked = tokio::net::TcpStream::connect((address.as_str(), 9));
        // Nothing answers: only the packet matters.
        let _ = tokio::time::timeout(Duration::from_secs(1), asked).await;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_terminal_survives_hibernation() -> anyhow::Result<()> {
    case("ttysleep", async |case| {
        let container = json!({
            "name": "a", "image": BUSYBOX, "imagePullPolicy": "Never", "command": ["sh"], "stdin": true, "tty": true,
        });
        case.start(pod("p", json!({ "containers": [container] }))).await?;
        let mut terminal = Terminal::open(&case.kubectl, &["attach", "-it", "p"])?;
        terminal.line("told=before; stty -echo")?;
        terminal.line("echo ready-$((40+2))")?;
        terminal.shows("ready-42").await?;
        for round in 1..=2 {
            case.hibernate("p").await?;
            // In the second round the typed line wakes the Pod.
            if round == 1 {
                case.wake("p").await?;
            }
            terminal.line("[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo told-$told-$((round+1)); round=$((round+1))")?;
            terminal.shows(&format!("told-before-{round}")).await?;
            terminal.line("stty -a | grep -q -- '-echo ' && echo quiet-$round")?;
            terminal.shows(&format!("quiet-{round}")).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_established_connection_survives_hibernation() -> anyhow::Result<()> {
    case("tcp", async |case| {
        let pod = case.start(witness_pod()).await?;
        witness::ask(&pod).await?;
        let mut connection = Connection::open(&pod).await?;
        let before = connection.ask().await?;
        case.hibernate("p").await?;
        case.wake("p").await?;
        connection.ask().await?.goes_on_from(&before)
    })
    .await
}

#[tokio::test]
async fn a_connection_on_which_data_is_sent_while_the_pod_wakes_survives() -> anyhow::Result<()> {
    case("tcpwake", async |case| {
        let pod = case.start(witness_pod()).await?;
        witness::ask(&pod).await?;
        for _ in 0..3 {
            let mut connection = Connection::open(&pod).await?;
            let before = connection.ask().await?;
            case.hibernate("p").await?;
            let woken = std::cell::Cell::new(false);
            let wake = async {
                let result = case.wake("p").await;
                woken.set(true);
                result
            };
            // Data arrives in every moment of the wake.
            let talk = async {
                let mut asked = 0;
                let mut every = tokio::time::interval(Duration::from_millis(20));
                while !woken.get() {
                    connection.send().await?;
                    asked += 1;
                    every.tick().await;
                }
                anyhow::Ok(asked)
            };
            let (wake, asked) = tokio::join!(wake, talk);
            wake?;
            for _ in 0..asked? {
                connection.answer().await?.goes_on_from(&before)?;
            }
        }
        Ok(())
    })
    .await
}
