//! `torpor.dev/inject-runtime`: the runtime is added to the user's own container.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerStateTerminated, Pod};
use serde_json::{Value, json};
use torpor_api::annotations::HIBERNATE_AFTER;
use torpor_api::conditions::POD_HIBERNATED;
use torpor_tests::case::{case, condition};
use torpor_tests::forward::Forward;
use torpor_tests::pods::{mounts, python, shell, with};
use torpor_tests::sandboxes::{LIMIT, sandbox};
use torpor_tests::sleep::restarts;
use torpor_tests::wait;

const ASK: &[u8] = b"GET / HTTP/1.1\r\nHost: sandbox\r\nConnection: close\r\n\r\n";
const PAUSE: &str = "torpor.dev/pause:dev";

fn injected(spec: Value) -> Value {
    let annotations =
        json!({ "metadata": { "annotations": { "torpor.dev/inject-runtime": "true" } } });
    with(sandbox("s", spec), annotations)
}

/// Returns a request that runs a command.
fn command(words: &str) -> Vec<u8> {
    let body = json!({ "command": words }).to_string();
    let length = body.len();
    format!("POST /execute HTTP/1.1\r\nHost: sandbox\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}").into()
}

/// Sends a request through a port-forward; the answer must have status 200.
async fn ask(forward: &Forward, request: &[u8]) -> anyhow::Result<String> {
    let answer = String::from_utf8(forward.exchange(request).await?)?;
    anyhow::ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    Ok(answer)
}

fn ended(pod: &Pod) -> Option<&ContainerStateTerminated> {
    let containers = pod.status.as_ref()?.container_statuses.as_ref()?;
    containers.first()?.state.as_ref()?.terminated.as_ref()
}

#[tokio::test]
async fn the_program_has_its_signals_and_its_exit_code_and_leaves_no_zombies() -> anyhow::Result<()>
{
    case("inject", async |case| {
        let program = "trap 'exit 7' TERM; (sleep 0.1 &); echo up; while :; do sleep 0.2; done";
        // The program claims port 8888 for itself; the runtime is ready on another.
        let ports = json!({ "ports": [{ "containerPort": 8888 }] });
        let container = with(shell("a", program), ports);
        let spec = json!({ "restartPolicy": "Never", "containers": [container] });
        case.create(injected(spec)).await?;
        case.sandbox_ready("s").await?;
        let sh = async |line: &str| case.sh("s", "a", line).await;
        assert_eq!(
            sh("tr '\\0' ' ' </proc/1/cmdline | cut -d ' ' -f 1-4").await?,
            "/.torpor/sandbox-runtime --legacy-bind-address=0 run --"
        );
        wait::until("the program's own output", LIMIT, async || {
            let log = case.log("s", "a").await?;
            wait::holds(log == "up", || log.clone())
        })
        .await?;
        // An orphan of an exec ends, and the container's first process waits for it.
        sh("(sleep 0.1 &); sleep 0.5").await?;
        // Each child of the program is a zombie, too, until its shell has waited for it.
        wait::until("no zombie stays", LIMIT, async || {
            let zombies = sh("cat /proc/[0-9]*/stat | grep -c ') Z ' || true").await?;
            wait::holds(zombies == "0", || zombies.clone())
        })
        .await?;
        // No process in the container can change the runtime, not even as root.
        let change = case.exec("s", "a", &["sh", "-c", "echo x >>/.torpor/sandbox-runtime"]);
        assert_ne!(change.await?.code, 0);
        sh("kill -TERM 1").await?;
        let pod = case
            .pod_until("s", "its container ended", LIMIT, |pod| {
                ended(pod).is_some()
            })
            .await?;
        assert_eq!(ended(&pod).map(|end| end.exit_code), Some(7));
        case.sandbox_has("s", "Finished", "True", "PodFailed")
            .await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_image_without_a_shell_has_the_runtime_alone_and_it_sleeps_and_wakes_with_the_pod()
-> anyhow::Result<()> {
    case("injectalone", async |case| {
        let container = json!({ "name": "a", "image": PAUSE, "imagePullPolicy": "Never" });
        case.create(injected(json!({ "containers": [container] })))
            .await?;
        let pod = case.sandbox_ready("s").await?;
        let forward = Forward::open(&case.kubectl, "s", 8888).await?;
        let answer = ask(&forward, ASK).await?;
        assert!(answer.contains("Sandbox Runtime is active"), "{answer}");
        let version = command("/.torpor/sandbox-runtime --version");
        let answer = ask(&forward, &version).await?;
        assert!(answer.contains("sandbox-runtime "), "{answer}");

        // The binary is in a volume that is part of the image, so that it can be started again
        // after a wake.
        case.patch("s", json!({ "metadata": { "annotations": { "torpor.dev/hibernate": "true" } } }))
            .await?;
        case.asleep("s").await?;
        ask(&forward, &version).await?;
        // It can be started after a suspension, too, although the annotation is gone.
        let taken = json!({ "metadata": { "annotations": { "torpor.dev/hibernate": null, "torpor.dev/inject-runtime": null } } });
        case.patch("s", taken).await?;
        case.suspend("s").await?;
        let resumed = case.resume("s").await?;
        assert_ne!(resumed.metadata.uid, pod.metadata.uid);
        assert_eq!(restarts(&resumed), 0);
        let forward = Forward::open(&case.kubectl, "s", 8888).await?;
        ask(&forward, &version).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_runtime_that_cannot_be_injected_is_reported_on_the_sandbox() -> anyhow::Result<()> {
    case("injectno", async |case| {
        let container = with(
            shell("a", ""),
            json!({ "command": null, "args": ["sleep", "1"] }),
        );
        case.create(injected(json!({ "containers": [container] })))
            .await?;
        let told = case
            .sandbox_has("s", "Ready", "False", "ReconcilerError")
            .await?;
        let (_, _, message) = torpor_tests::sandboxes::condition_of(&told, "Ready");
        assert!(
            message.contains("set command to the entrypoint"),
            "{message}"
        );
        assert_eq!(case.pods().get_opt("s").await?, None);
        Ok(())
    })
    .await
}

/// Program that reports for how long it is busy, and does nothing visible.
const BUSY: &str = "import time, urllib.request as r
r.urlopen(r.Request('http://127.0.0.1:8080/v1/busy?for=25s', method='PUT')).read()
while True: time.sleep(1000)";

#[tokio::test]
async fn a_call_to_be_busy_keeps_an_idle_sandbox_awake_until_its_time_is_over() -> anyhow::Result<()>
{
    case("busycall", async |case| {
        let mounted = json!({ "volumeMounts": mounts(&[("torpor", "/run/torpor")]) });
        let spec = json!({
            "containers": [with(python("a", BUSY), mounted)],
            "volumes": [{ "name": "torpor", "emptyDir": {} }],
        });
        let sleepy = json!({ "metadata": { "annotations": { HIBERNATE_AFTER: "5s" } } });
        case.create(with(injected(spec), sleepy)).await?;
        case.sandbox_ready("s").await?;
        // This is three times as long as the Pod stays awake without the call.
        let long = Duration::from_secs(20);
        let awake = |pod: &Pod| condition(pod, POD_HIBERNATED).0 != "True";
        case.pod_stays("s", "awake", long, awake).await?;
        case.asleep("s").await?;
        assert_eq!(case.sh("s", "a", "ls /run/torpor").await?, "");
        Ok(())
    })
    .await
}
