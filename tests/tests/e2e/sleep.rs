//! Sandboxes that fall asleep by themselves: when they may, when they must not, and what wakes
//! them.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use torpor_api::annotations::{DOZE_AFTER, FREEZE, HIBERNATE_AFTER};
use torpor_api::conditions::POD_HIBERNATED;
use torpor_api::reasons::hibernated::AWAKE;
use torpor_records::SandboxState;
use torpor_runsc::command::NodeRunsc;
use torpor_tests::attached::{self, Attached};
use torpor_tests::case::{Case, START_LIMIT, case, condition, uid};
use torpor_tests::pods::{WORK, mounts, pod, python, shell, with};
use torpor_tests::sleep::{SLEEP_LIMIT, restarts};
use torpor_tests::swap::Swap;
use torpor_tests::terminal::Terminal;
use torpor_tests::wait;

/// Shell line that writes a file into the sandbox's memory, which a cold start does not have.
const IDLE: &str = "echo kept >/mem; sleep 1000000";
const AFTER: Duration = Duration::from_secs(6);
/// Time for which a Pod that must not fall asleep is watched.
const WATCHED: Duration = Duration::from_secs(20);

fn sleepy(key: &str, spec: Value) -> Value {
    let after = format!("{}s", AFTER.as_secs());
    with(
        pod("p", spec),
        json!({ "metadata": { "annotations": { key: after } } }),
    )
}

/// Checks that the Pod's condition does not show sleep for this time.
async fn stays_awake(case: &Case, limit: Duration) -> anyhow::Result<()> {
    let awake = |pod: &Pod| condition(pod, POD_HIBERNATED).0 != "True";
    case.pod_stays("p", "awake", limit, awake).await
}

fn is_awake(pod: &Pod) -> bool {
    condition(pod, POD_HIBERNATED).1 == AWAKE
}

#[tokio::test]
async fn an_idle_pod_falls_asleep_by_itself_again_and_again_and_an_exec_wakes_it()
-> anyhow::Result<()> {
    case("idle", async |case| {
        let spec = json!({ "containers": [shell("a", IDLE)] });
        case.start(sleepy(HIBERNATE_AFTER, spec)).await?;
        for _ in 0..2 {
            let asleep = case.asleep("p").await?;
            let uid = uid(&asleep);
            assert_eq!(case.node.sandbox_processes(&uid)?, []);
            assert_eq!(case.sh("p", "a", "cat /mem").await?, "kept");
            let awake = case
                .pod_until("p", "it is awake", SLEEP_LIMIT, is_awake)
                .await?;
            assert_eq!(restarts(&awake), 0);
        }
        case.asleep("p").await?;
        // Without the annotation the Pod may not sleep any more, which wakes it.
        case.annotate("p", HIBERNATE_AFTER, None).await?;
        case.pod_until("p", "it is awake", SLEEP_LIMIT, is_awake)
            .await?;
        assert_eq!(case.sh("p", "a", "cat /mem").await?, "kept");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn work_in_progress_is_never_cut_off() -> anyhow::Result<()> {
    case("busy", async |case| {
        let spec = json!({ "containers": [shell("a", WORK)] });
        case.start(sleepy(HIBERNATE_AFTER, spec)).await?;
        stays_awake(case, WATCHED).await
    })
    .await
}

#[tokio::test]
async fn an_open_exec_keeps_a_pod_awake_and_its_end_lets_it_sleep() -> anyhow::Result<()> {
    case("session", async |case| {
        let spec = json!({ "containers": [shell("a", IDLE)] });
        case.start(sleepy(HIBERNATE_AFTER, spec)).await?;
        let line = format!("echo begun; sleep {}; echo ended", WATCHED.as_secs());
        let (said, awake) = tokio::join!(
            case.kubectl.sh("p", "a", &line),
            stays_awake(case, WATCHED - Duration::from_secs(2)),
        );
        awake?;
        assert_eq!(said?, "begun\nended");
        case.asleep("p").await.map(drop)
    })
    .await
}

#[tokio::test]
async fn a_program_that_marks_itself_busy_stays_awake_until_it_takes_the_mark_away()
-> anyhow::Result<()> {
    case("mark", async |case| {
        let line = format!("touch /run/torpor/busy; {IDLE}");
        let mounted = json!({ "volumeMounts": mounts(&[("torpor", "/run/torpor")]) });
        let spec = json!({
            "containers": [with(shell("a", &line), mounted)],
            "volumes": [{ "name": "torpor", "emptyDir": {} }],
        });
        case.start(sleepy(HIBERNATE_AFTER, spec)).await?;
        stays_awake(case, WATCHED).await?;
        case.sh("p", "a", "rm /run/torpor/busy").await?;
        case.asleep("p").await.map(drop)
    })
    .await
}

/// Program that echoes on each connection, and answers the probes on another port.
const ECHO: &str = "import socketserver, threading
class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while (data := self.request.recv(100)): self.request.sendall(data)
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
threading.Thread(target=Server(('', 8081), Echo).serve_forever).start()
Server(('', 8080), Echo).serve_forever()";

/// Sends a byte every two seconds, and waits for the answer.
async fn talk(stream: &mut tokio::net::TcpStream) -> std::io::Result<()> {
    loop {
        stream.write_all(b"x").await?;
        stream.read_exact(&mut [0]).await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
}

#[tokio::test]
async fn packets_keep_a_pod_awake_but_probes_do_not() -> anyhow::Result<()> {
    case("packets", async |case| {
        let probed = json!({
            "startupProbe": { "tcpSocket": { "port": 8081 }, "periodSeconds": 1 },
            "readinessProbe": { "tcpSocket": { "port": 8081 }, "periodSeconds": 2, "failureThreshold": 100 },
            "livenessProbe": { "exec": { "command": ["true"] }, "periodSeconds": 3, "failureThreshold": 100 },
        });
        let spec = json!({ "containers": [with(python("a", ECHO), probed)] });
        let started = case.start(sleepy(HIBERNATE_AFTER, spec)).await?;
        let address = started.status.and_then(|status| status.pod_ip);
        let address = address.ok_or_else(|| anyhow::anyhow!("no address"))?;
        let mut stream = tokio::net::TcpStream::connect((address.as_str(), 8080)).await?;
        tokio::select! {
            awake = stays_awake(case, WATCHED) => awake?,
            broken = talk(&mut stream) => broken?,
        }
        let asleep = case.asleep("p").await?;
        // The exec probe goes on, does not fail and does not wake the Pod.
        stays_asleep(case, Duration::from_secs(10)).await?;
        assert_eq!(restarts(&asleep), 0);
        Ok(())
    })
    .await
}

/// Checks that the Pod's condition shows sleep for this time.
async fn stays_asleep(case: &Case, limit: Duration) -> anyhow::Result<()> {
    let asleep = |pod: &Pod| condition(pod, POD_HIBERNATED).0 == "True";
    case.pod_stays("p", "asleep", limit, asleep).await
}

/// Returns the bytes of main memory that the sandbox's own cgroup has.
fn memory_of(case: &Case, uid: &str) -> anyhow::Result<u64> {
    let cgroup = case.node.sandbox_of(uid)?.cgroup;
    let files = [("memory", "memory.usage_in_bytes"), ("", "memory.current")];
    let root = std::path::Path::new("/sys/fs/cgroup");
    let read = files.iter().find_map(|(hierarchy, file)| {
        std::fs::read_to_string(root.join(hierarchy).join(&cgroup).join(file)).ok()
    });
    let text =
        read.ok_or_else(|| anyhow::anyhow!("the memory of {} is not counted", cgroup.display()))?;
    Ok(text.trim().parse()?)
}

const MIB: u64 = 1 << 20;

/// Returns the Pod once it dozes and its memory is in swap.
async fn dozes(case: &Case, most: u64) -> anyhow::Result<Pod> {
    let pod = case.dozes("p").await?;
    let uid = uid(&pod);
    wait::until("its memory is in swap", START_LIMIT, async || {
        let bytes = memory_of(case, &uid)?;
        wait::holds(bytes <= most, || format!("{} KiB", bytes >> 10))
    })
    .await?;
    Ok(pod)
}

#[tokio::test]
async fn a_dozing_pod_gives_its_memory_back_and_an_exec_finds_it_as_it_was() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("doze", async |case| {
        let program = "import os, time\nkept = os.urandom(60 << 20)\nopen('/ready', 'w').close()\nwhile True: time.sleep(1000)";
        let ready = json!({ "startupProbe": { "exec": { "command": ["test", "-e", "/ready"] }, "periodSeconds": 1 } });
        let spec = json!({ "containers": [with(python("a", program), ready)] });
        let started = case.start(sleepy(DOZE_AFTER, spec)).await?;
        let uid = uid(&started);
        assert!(memory_of(case, &uid)? > 60 * MIB);
        let (sentry, gofer) = (case.node.sentry(&uid)?, case.node.gofer_of(&uid, "a")?);
        let pod = dozes(case, 12 * MIB).await?;
        assert!(sentry.lives(), "the sandbox's processes stay");
        assert!(sentry.is_stopped() && gofer.is_stopped(), "the sandbox's processes are stopped");
        assert_eq!(case.kubectl.sh("p", "a", "ls /ready").await?, "/ready");
        assert!(sentry.lives());
        assert!(!sentry.is_stopped() && !gofer.is_stopped());
        // A doze goes on without this call where gVisor does not support it, so the test makes the
        // call.
        let sandbox = case.node.sandbox_of(&uid)?.sandbox;
        let control = NodeRunsc::new(&case.node.config).connect(&sandbox);
        control?.collect_garbage(SLEEP_LIMIT)?;
        let awake = case.pod_until("p", "it is awake", SLEEP_LIMIT, is_awake).await?;
        assert_eq!((restarts(&awake), torpor_tests::case::uid(&awake)), (0, uid));
        drop(pod);
        dozes(case, 12 * MIB).await.map(drop)
    })
    .await
}

#[tokio::test]
async fn a_line_typed_into_its_terminal_wakes_a_dozing_pod() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("dozetty", async |case| {
        let terminal = json!({ "command": ["sh"], "stdin": true, "tty": true });
        let spec = json!({ "containers": [with(shell("a", ""), terminal)] });
        case.start(sleepy(DOZE_AFTER, spec)).await?;
        let mut terminal = Terminal::open(&case.kubectl, &["attach", "-it", "p"])?;
        terminal.line("kept=first; echo ready-$((40+2))")?;
        terminal.shows("ready-42").await?;
        dozes(case, 12 * MIB).await?;
        terminal.line("echo still-$kept")?;
        terminal.shows("still-first").await
    })
    .await
}

#[tokio::test]
async fn data_written_to_its_input_wakes_a_dozing_pod_without_a_terminal() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("dozeinput", async |case| {
        let first = case.start(sleepy(DOZE_AFTER, attached::echoes())).await?;
        let mut attached = Attached::to(case)?;
        attached.answers("first").await?;
        for word in ["second", "third"] {
            dozes(case, 12 * MIB).await?;
            attached.answers(word).await?;
            let awake = |pod: &Pod| condition(pod, POD_HIBERNATED).1 == AWAKE;
            case.pod_until("p", "it is awake", SLEEP_LIMIT, awake)
                .await?;
        }
        assert_eq!(restarts(&first), restarts(&case.pods().get("p").await?));
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_pod_that_dies_while_it_dozes_comes_back_with_its_memory_and_one_that_dies_awake_does_not()
-> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("dozedeath", async |case| {
        // Only the first start makes the file; PID 1 of a restored sandbox is past that.
        let spec = json!({ "containers": [shell("a", "date +%s >/mem; sleep 1000000")] });
        case.start(sleepy(DOZE_AFTER, spec)).await?;
        let kept = case.written("p", "a", "/mem").await?;
        let pod = dozes(case, 12 * MIB).await?;
        let uid = uid(&pod);
        case.node.sentry(&uid)?.kill()?;
        wait::until("another sandbox has its memory", START_LIMIT, async || {
            let found = case.sh("p", "a", "cat /mem").await;
            wait::holds(found.as_ref().is_ok_and(|found| *found == kept), || {
                format!("{found:?}, not {kept}")
            })
        })
        .await?;
        // The exec has woken the Pod, so its image is stale.
        case.node.sentry(&uid)?.kill()?;
        wait::until("it starts cold", START_LIMIT, async || {
            let found = case.sh("p", "a", "cat /mem").await;
            wait::holds(found.as_ref().is_ok_and(|found| *found != kept), || {
                format!("{found:?}")
            })
        })
        .await
    })
    .await
}

/// Waits until the Pod answers; an answer without the memory of the first start is an error.
async fn goes_on_with(case: &Case, name: &str, kept: &str) -> anyhow::Result<()> {
    wait::until("it goes on with its memory", START_LIMIT, async || {
        let found = case.sh(name, "a", "cat /mem").await;
        anyhow::ensure!(
            found.as_ref().map_or(true, |found| found == kept),
            "{found:?}, not {kept}"
        );
        wait::holds(found.is_ok(), || format!("{found:?}"))
    })
    .await
}

#[tokio::test]
async fn memory_survives_the_death_of_the_shim_of_a_dozing_pod() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("dozeshim", async |case| {
        let spec = json!({ "containers": [shell("a", "cat /proc/sys/kernel/random/uuid >/mem; sleep 1000000")] });
        case.start(sleepy(DOZE_AFTER, spec)).await?;
        let kept = case.written("p", "a", "/mem").await?;
        let uid = uid(&dozes(case, 12 * MIB).await?);
        case.node.shim(&uid)?.kill()?;
        let restarted = |pod: &Pod| restarts(pod) > 0;
        case.pod_until("p", "the kubelet noticed", START_LIMIT, restarted)
            .await?;
        goes_on_with(case, "p", &kept).await
    })
    .await
}

/// gVisor kills a container that has lost its gofer as soon as the container may run: the sandbox
/// is restored from its image instead.
#[tokio::test]
async fn memory_survives_the_death_of_a_gofer_of_a_dozing_pod() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("dozegofer", async |case| {
        for by_agent in [false, true] {
            let name = if by_agent { "asked" } else { "p" };
            let spec = json!({ "containers": [shell("a", "cat /proc/sys/kernel/random/uuid >/mem; sleep 1000000")] });
            let named = json!({ "metadata": { "name": name } });
            let pod = case.start(with(sleepy(DOZE_AFTER, spec), named)).await?;
            let kept = case.written(name, "a", "/mem").await?;
            let uid = uid(&pod);
            wait::until("it dozes, its memory reclaimed", START_LIMIT, async || {
                let sandbox = case.node.sandbox_of(&uid)?.sandbox;
                let note = case.node.records.doze(&sandbox)?;
                wait::holds(note.is_some_and(|note| note.reclaimed), || format!("{note:?}"))
            })
            .await?;
            case.node.gofer(&uid)?.kill()?;
            if by_agent {
                case.annotate(name, DOZE_AFTER, None).await?;
                wait::until("it is awake", START_LIMIT, async || {
                    let sandbox = case.node.sandbox_of(&uid)?.sandbox;
                    let (note, state) = (case.node.records.doze(&sandbox)?, case.node.state_of(&uid)?);
                    let awake = note.is_none() && state == SandboxState::Running;
                    wait::holds(awake, || format!("{note:?}, {state:?}"))
                })
                .await?;
            }
            assert_eq!(case.sh(name, "a", "cat /mem").await?, kept, "{name}");
            assert_eq!(restarts(&case.ready(name).await?), 0, "{name}");
        }
        Ok(())
    })
    .await
}

/// A sandbox that was frozen during a doze has its memory in an image, and no note that allows a
/// resume.
///
/// A signal, or containerd's resume, lets it continue from the image, because gVisor would kill the
/// container that has lost its gofer.
#[tokio::test]
async fn memory_survives_the_death_of_a_gofer_of_a_frozen_pod_that_is_resumed() -> anyhow::Result<()>
{
    let _swap = Swap::on()?;
    case("frozengofer", async |case| {
        for (name, verb) in [("signalled", "kill"), ("resumed", "resume")] {
            let spec = json!({ "containers": [shell("a", "cat /proc/sys/kernel/random/uuid >/mem; sleep 1000000")] });
            let named = json!({ "metadata": { "name": name } });
            let pod = case.start(with(sleepy(DOZE_AFTER, spec), named)).await?;
            let kept = case.written(name, "a", "/mem").await?;
            let uid = uid(&pod);
            wait::until("it dozes, its memory reclaimed", START_LIMIT, async || {
                wait::holds(case.node.dozes(&uid)?, || "it does not".to_owned())
            })
            .await?;
            case.annotate(name, FREEZE, Some("true")).await?;
            let sandbox = case.node.sandbox_of(&uid)?.sandbox;
            wait::until("it is frozen", START_LIMIT, async || {
                let note = case.node.records.doze(&sandbox)?;
                let paused = case.node.records.is_noted_paused(&sandbox);
                wait::holds(paused && note.is_none(), || format!("{paused}, {note:?}"))
            })
            .await?;
            case.node.gofer(&uid)?.kill()?;
            let container = case.node.container(&uid, "a")?.id;
            let signal = (verb == "kill").then_some("18");
            let done = tokio::process::Command::new(case.node.shim_program())
                .args([verb, container.as_str()])
                .args(signal)
                .output()
                .await?;
            assert!(done.status.success(), "{verb}: {done:?}");
            case.annotate(name, FREEZE, None).await?;
            // Between the two the agent may have frozen it once more.
            goes_on_with(case, name, &kept).await?;
            assert_eq!(restarts(&case.ready(name).await?), 0, "{name}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_doze_becomes_hibernation_when_it_lasts() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("deeper", async |case| {
        let annotations = json!({ "metadata": { "annotations": { HIBERNATE_AFTER: "20s" } } });
        let spec = json!({ "containers": [shell("a", IDLE)] });
        let pod = case
            .start(with(sleepy(DOZE_AFTER, spec), annotations))
            .await?;
        dozes(case, 12 * MIB).await?;
        let uid = uid(&pod);
        assert_ne!(case.node.sandbox_processes(&uid)?, []);
        case.asleep("p").await?;
        assert_eq!(case.node.sandbox_processes(&uid)?, []);
        assert_eq!(case.sh("p", "a", "cat /mem").await?, "kept");
        Ok(())
    })
    .await
}

/// Shell line that leaves two processes: one as a shell leaves it, one as a daemon detaches itself.
const LEAVE: &str = "exec 2>/dev/null; sleep 1111 >/dev/null </dev/null & setsid sleep 2222 >/dev/null </dev/null & echo left";

#[tokio::test]
async fn processes_left_by_exec_prevent_hibernation_by_idleness_and_a_requested_sleep_names_them()
-> anyhow::Result<()> {
    case("left", async |case| {
        let spec = json!({ "containers": [shell("a", IDLE)] });
        case.start(sleepy(HIBERNATE_AFTER, spec)).await?;
        assert_eq!(case.sh("p", "a", LEAVE).await?, "left");
        let told = |pod: &Pod| condition(pod, POD_HIBERNATED).2.contains("(sleep, sleep)");
        case.pod_until(
            "p",
            "its condition says why it stays awake",
            SLEEP_LIMIT,
            told,
        )
        .await?;
        stays_awake(case, WATCHED).await?;
        let asleep = case.hibernate("p").await?;
        let (_, _, message) = condition(&asleep, POD_HIBERNATED);
        assert!(message.contains("left behind: sleep, sleep"), "{message}");
        case.wake("p").await?;
        // The program's own processes continue. Its first process does not reap: of the ended ones
        // the names are left.
        let running =
            "cat /mem; ps | grep -c '[s]leep [12][12][12][12]'; ps | grep -c '[s]leep 1000000'";
        assert_eq!(case.sh("p", "a", running).await?, "kept\n0\n1");
        // With nothing left behind the Pod falls asleep by itself again.
        case.asleep("p").await?;
        Ok(())
    })
    .await
}
