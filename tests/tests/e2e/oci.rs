//! Life of the containers of a Pod: order, ends, restarts, probes, signals, refusals.

use std::time::{Duration, Instant};

use anyhow::ensure;
use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Event, Pod};
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde_json::json;
use torpor_tests::case::{Case, START_LIMIT, case};
use torpor_tests::pods::{COUNT, pod, python, shell, shell_pod, with};
use torpor_tests::sandboxes::sandbox;
use torpor_tests::wait;

fn phase(pod: &Pod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or_default()
}

fn status_of(pod: &Pod, container: &str) -> ContainerStatus {
    let status = pod.status.clone().unwrap_or_default();
    let init = status.init_container_statuses.unwrap_or_default();
    let all = status
        .container_statuses
        .unwrap_or_default()
        .into_iter()
        .chain(init);
    all.into_iter()
        .find(|status| status.name == container)
        .unwrap_or_default()
}

/// Returns exit code and reason of a container that has ended.
fn end_of(pod: &Pod, container: &str) -> Option<(i32, String)> {
    let ContainerState { terminated, .. } = status_of(pod, container).state?;
    let terminated = terminated?;
    Some((terminated.exit_code, terminated.reason.unwrap_or_default()))
}

/// Waits until a container's log is this text: the container is Ready before its program has
/// written anything.
async fn says(case: &Case, container: &str, words: &str) -> anyhow::Result<()> {
    wait::until("the container's log", START_LIMIT, async || {
        let log = case.log("p", container).await?;
        wait::holds(log == words, || log.clone())
    })
    .await
}

#[tokio::test]
async fn init_containers_run_first_and_sidecars_beside_and_each_has_its_log() -> anyhow::Result<()>
{
    case("order", async |case| {
        let sidecar = with(
            shell("sidecar", "echo sidecar started; exec sleep 1000000"),
            json!({ "restartPolicy": "Always" }),
        );
        let pod = pod(
            "p",
            json!({
                "initContainers": [shell("first", "echo in the init container"), sidecar],
                "containers": [
                    shell("a", "echo hello from a; exec sleep 1000000"),
                    shell("b", "echo hello from b >&2; exec sleep 1000000"),
                ],
            }),
        );
        let pod = case.start(pod).await?;
        assert_eq!(end_of(&pod, "first"), Some((0, "Completed".to_owned())));
        assert!(
            status_of(&pod, "sidecar")
                .state
                .is_some_and(|state| state.running.is_some())
        );
        for (container, log) in [
            ("first", "in the init container"),
            ("sidecar", "sidecar started"),
            ("a", "hello from a"),
            ("b", "hello from b"),
        ] {
            says(case, container, log).await?;
        }
        // All containers share one sandbox: they see one hostname and can reach one another on
        // localhost.
        let uid = torpor_tests::case::uid(&pod);
        assert_eq!(case.node.sandboxes_of(&uid)?.len(), 1);
        let sentries = case.node.sandbox_processes(&uid)?;
        let sentries = sentries
            .iter()
            .filter(|p| p.command.starts_with("runsc-sandbox"))
            .count();
        assert_eq!(sentries, 1, "one gVisor kernel for the Pod");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_pod_succeeds_if_every_container_ends_well() -> anyhow::Result<()> {
    case("succeeds", async |case| {
        let containers = json!([shell("a", "exit 0"), shell("b", "echo done")]);
        case.create(pod(
            "p",
            json!({ "restartPolicy": "Never", "containers": containers }),
        ))
        .await?;
        let pod = case
            .pod_until("p", "it ends", START_LIMIT, |p| {
                phase(p) != "Pending" && phase(p) != "Running"
            })
            .await?;
        assert_eq!(phase(&pod), "Succeeded");
        assert_eq!(end_of(&pod, "a"), Some((0, "Completed".to_owned())));
        assert_eq!(case.log("p", "b").await?, "done");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_container_that_exits_with_3_fails_its_pod_with_that_code() -> anyhow::Result<()> {
    case("fails", async |case| {
        let containers = json!([shell("a", "echo last words; exit 3")]);
        case.create(pod(
            "p",
            json!({ "restartPolicy": "Never", "containers": containers }),
        ))
        .await?;
        let pod = case
            .pod_until("p", "it ends", START_LIMIT, |p| phase(p) == "Failed")
            .await?;
        assert_eq!(end_of(&pod, "a"), Some((3, "Error".to_owned())));
        assert_eq!(case.log("p", "a").await?, "last words");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn one_container_is_restarted_while_the_other_runs_on() -> anyhow::Result<()> {
    case("restart", async |case| {
        // The container ends once: at its second start the file exists.
        let line =
            "if [ -e /shared/once ]; then exec sleep 1000000; fi; touch /shared/once; exit 1";
        let mount = json!({ "volumeMounts": [{ "name": "shared", "mountPath": "/shared" }] });
        let pod = pod(
            "p",
            json!({
                "containers": [with(shell("unsteady", line), mount), shell("steady", COUNT)],
                "volumes": [{ "name": "shared", "emptyDir": {} }],
            }),
        );
        case.create(pod).await?;
        let pod = case
            .pod_until("p", "one restart", START_LIMIT, |pod| {
                let status = status_of(pod, "unsteady");
                status.restart_count == 1 && status.ready
            })
            .await?;
        assert_eq!(status_of(&pod, "steady").restart_count, 0);
        let last = status_of(&pod, "unsteady")
            .last_state
            .and_then(|state| state.terminated);
        assert_eq!(last.map(|end| end.exit_code), Some(1));
        let log = case.log("p", "steady").await?;
        assert_eq!(
            log.lines().filter(|line| *line == "count 1").count(),
            1,
            "it never began anew"
        );
        Ok(())
    })
    .await
}

/// containerd has the shim kill the probe's process, which runs in the sandbox.
#[tokio::test]
async fn a_probe_by_exec_that_takes_too_long_leaves_nothing_and_the_next_one_is_made()
-> anyhow::Result<()> {
    case("slowprobe", async |case| {
        let probe = json!({ "readinessProbe": {
            "exec": { "command": ["sh", "-c", "echo >> /probes; exec sleep 1000"] },
            "periodSeconds": 1, "timeoutSeconds": 1,
        }});
        let container = with(shell("a", "exec sleep 1000000"), probe);
        case.create(pod("p", json!({ "containers": [container] })))
            .await?;
        case.pod_until("p", "its program runs", START_LIMIT, |pod| {
            status_of(pod, "a").started == Some(true)
        })
        .await?;
        let line = "until [ $(cat /probes 2>/dev/null | wc -l) -ge 4 ]; do sleep 0.1; done
            ps | grep '[s]leep 1000$' | wc -l";
        let left: u32 = case.sh("p", "a", line).await?.trim().parse()?;
        // The process of the fourth probe may still run.
        ensure!(left <= 1, "{left} of four probes are left");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_liveness_probe_by_exec_restarts_a_container_that_fails_it() -> anyhow::Result<()> {
    case("liveness", async |case| {
        let probe = json!({ "livenessProbe": {
            "exec": { "command": ["test", "-e", "/healthy"] },
            "periodSeconds": 1, "failureThreshold": 2,
        }});
        let line = "touch /healthy; exec sleep 1000000";
        case.start(pod(
            "p",
            json!({ "containers": [with(shell("a", line), probe)] }),
        ))
        .await?;
        // A container is Ready before its program has done anything.
        let line = "until [ -e /healthy ]; do sleep 0.1; done; rm /healthy";
        case.sh("p", "a", line).await?;
        case.pod_until("p", "the probe restarted it", START_LIMIT, |pod| {
            let status = status_of(pod, "a");
            status.restart_count == 1 && status.ready
        })
        .await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_handler_of_sigterm_runs_before_the_end() -> anyhow::Result<()> {
    case("sigterm", async |case| {
        // The trap must see the signal while the shell waits, not when a long sleep has ended.
        let line = "trap 'echo handled >/kept/end; exit 0' TERM; echo ready; while true; do sleep 0.1; done";
        let container = with(shell("a", line), json!({ "volumeMounts": [{ "name": "kept", "mountPath": "/kept" }] }));
        let claim = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "kept" },
            "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Mi" } } },
        });
        let volumes = json!([{ "name": "kept", "persistentVolumeClaim": { "claimName": "kept" } }]);
        let spec = |container| json!({
            "terminationGracePeriodSeconds": 30, "containers": [container], "volumes": volumes,
        });
        case.create(claim).await?;
        case.start(pod("p", spec(container.clone()))).await?;
        let began = Instant::now();
        case.delete_pod("p", Duration::from_secs(25)).await?;
        assert!(began.elapsed() < Duration::from_secs(25), "it ended before its grace period");
        // Another Pod reads what the handler wrote.
        let reader = with(container, json!({ "command": ["sh", "-c", "exec sleep 1000000"] }));
        let soon = json!({ "spec": { "terminationGracePeriodSeconds": 1 } });
        case.start(with(pod("reader", spec(reader)), soon)).await?;
        assert_eq!(case.sh("reader", "a", "cat /kept/end").await?, "handled");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_program_that_ignores_sigterm_is_killed_after_its_grace_period() -> anyhow::Result<()> {
    case("stubborn", async |case| {
        let line = "trap '' TERM; while true; do sleep 0.1; done";
        case.start(shell_pod("p", line)).await?;
        let began = Instant::now();
        case.delete_pod("p", Duration::from_secs(20)).await?;
        let took = began.elapsed();
        assert!(
            took >= Duration::from_secs(2),
            "the grace period of 2 s was kept: {took:?}"
        );
        Ok(())
    })
    .await
}

/// Waits for words in the output of `kubectl describe pod`, which runs again for each new Event.
async fn described(case: &Case, words: &[&str]) -> anyhow::Result<()> {
    let events: Api<Event> = case.api();
    let (mut seen, mut text) = (Vec::new(), String::new());
    wait::until(
        &format!("{words:?} in kubectl describe pod"),
        START_LIMIT,
        async || {
            let listed = events.list(&ListParams::default()).await?.items;
            let now: Vec<_> = listed.iter().map(ResourceExt::resource_version).collect();
            if now != seen {
                seen = now;
                text = case.kubectl.ok(&["describe", "pod", "p"]).await?;
            }
            wait::holds(words.iter().all(|word| text.contains(word)), || {
                text.clone()
            })
        },
    )
    .await
}

#[tokio::test]
async fn a_command_that_is_not_there_is_named_in_the_pods_description() -> anyhow::Result<()> {
    case("nocommand", async |case| {
        let container = with(shell("a", ""), json!({ "command": ["/no/such/program"] }));
        case.create(pod("p", json!({ "containers": [container] })))
            .await?;
        described(case, &["starting container", "/no/such/program"]).await
    })
    .await
}

#[tokio::test]
async fn host_network_is_refused_with_the_reason_and_the_remedy() -> anyhow::Result<()> {
    case("hostnetwork", async |case| {
        let spec = json!({ "hostNetwork": true, "containers": [shell("a", COUNT)] });
        case.create(pod("p", spec)).await?;
        described(case, &["hostNetwork", "remove hostNetwork"]).await
    })
    .await
}

#[tokio::test]
async fn a_part_of_an_empty_dir_is_refused_with_the_volume_and_the_remedy() -> anyhow::Result<()> {
    case("subpath", async |case| {
        let part = json!({ "name": "work", "mountPath": "/conf", "subPath": "conf" });
        let container = with(shell("a", COUNT), json!({ "volumeMounts": [part] }));
        let spec =
            json!({ "volumes": [{ "name": "work", "emptyDir": {} }], "containers": [container] });
        case.create(pod("p", spec)).await?;
        described(case, &["\"work\" by subPath", "Mount the whole volume"]).await
    })
    .await
}

/// Reports whether the container's first process, and one that exec starts, may use raw sockets.
async fn raw_sockets(case: &Case, container: &str) -> anyhow::Result<[bool; 2]> {
    /// CAP_NET_RAW of capabilities(7).
    const NET_RAW: u64 = 1 << 13;
    const OPEN: &str = "python3 -c 'import socket
try:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    print(\"opened\")
except PermissionError:
    print(\"refused\")'";
    let effective = "sed -n 's/^CapEff:[[:space:]]*//p' /proc/1/status";
    let effective = case.sh("s", container, effective).await?;
    let first = u64::from_str_radix(effective.trim(), 16)? & NET_RAW != 0;
    let opened = case.sh("s", container, OPEN).await?;
    ensure!(["opened", "refused"].contains(&opened.trim()), "{opened}");
    Ok([first, opened.trim() == "opened"])
}

/// Program that does nothing and has no port.
const WAIT: &str = "import signal; signal.pause()";

#[tokio::test]
async fn raw_sockets_are_for_containers_that_add_net_raw() -> anyhow::Result<()> {
    case("netraw", async |case| {
        let adds = json!({ "securityContext": { "capabilities": { "add": ["NET_RAW"] } } });
        let containers = [with(python("adds", WAIT), adds), python("default", WAIT)];
        case.create(sandbox("s", json!({ "containers": containers })))
            .await?;
        case.sandbox_ready("s").await?;
        for resumed in [false, true] {
            if resumed {
                case.suspend("s").await?;
                case.resume("s").await?;
            }
            ensure!(
                raw_sockets(case, "adds").await? == [true; 2],
                "resumed: {resumed}"
            );
            let default = raw_sockets(case, "default").await?;
            ensure!(default == [false; 2], "resumed: {resumed}");
        }
        Ok(())
    })
    .await
}
