//! After a Pod is deleted nothing of it is left on the node, whatever was killed before.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::ensure;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use torpor_core::ids::{ContainerId, SandboxId};
use torpor_runsc::command::NodeRunsc;
use torpor_tests::case::{Case, START_LIMIT, case, uid};
use torpor_tests::machine::{Process, processes_naming};
use torpor_tests::node::containerd_socket;
use torpor_tests::pods::{COUNT, mounts, pod, shell, with};
use torpor_tests::remains::Footprint;
use torpor_tests::sleep::{is_ready, restarts};
use torpor_tests::wait;

/// Time for a recovery: the kubelet looks at its Pods every second or two; a crash costs a back-off
/// of ten.
pub(crate) const RECOVERY_LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn two_containers() -> Value {
    let volumes = json!({ "volumeMounts": mounts(&[("disk", "/disk"), ("memory", "/memory")]) });
    pod(
        "p",
        json!({
            "containers": [with(shell("a", COUNT), volumes.clone()), with(shell("b", COUNT), volumes)],
            "volumes": [
                { "name": "disk", "emptyDir": {} },
                { "name": "memory", "emptyDir": { "medium": "Memory" } },
            ],
        }),
    )
}

pub(crate) async fn nothing_is_left(case: &Case, footprint: &Footprint) -> anyhow::Result<()> {
    case.delete_pod("p", Duration::from_secs(30)).await?;
    wait::until(
        "nothing of the Pod is left on the node",
        Duration::from_secs(30),
        async || {
            let left = [
                footprint.of_sandbox(&case.node),
                footprint.of_memory(&case.node),
            ]
            .concat();
            wait::holds(left.is_empty(), || format!("{left:#?}"))
        },
    )
    .await
}

#[tokio::test]
async fn a_deleted_pod_leaves_nothing() -> anyhow::Result<()> {
    case("left", async |case| {
        let pod = case.start(two_containers()).await?;
        let footprint = Footprint::take(&case.node, &case.namespace, &uid(&pod))?;
        let there = footprint.of_sandbox(&case.node);
        assert!(there.len() > 10, "the check sees what is there");
        for kind in ["network namespace", "socket"] {
            assert!(
                there.iter().any(|one| one.starts_with(kind)),
                "the check sees no {kind}: {there:#?}"
            );
        }
        nothing_is_left(case, &footprint).await
    })
    .await
}

#[tokio::test]
async fn a_pod_that_never_started_leaves_nothing() -> anyhow::Result<()> {
    case("leftfailed", async |case| {
        let container = with(shell("a", ""), json!({ "command": ["/no/such/program"] }));
        case.create(pod("p", json!({ "containers": [container] })))
            .await?;
        let failed = |pod: &Pod| restarts(pod) > 0;
        let pod = case
            .pod_until("p", "it fails to start", START_LIMIT, failed)
            .await?;
        let footprint = Footprint::take(&case.node, &case.namespace, &uid(&pod))?;
        nothing_is_left(case, &footprint).await
    })
    .await
}

/// Kills one of the Pod's processes, waits until the kubelet has recovered the Pod, deletes it and
/// checks that nothing is left.
async fn killed(
    name: &str,
    kill: impl AsyncFnOnce(&Case, &mut Footprint) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    case(name, async |case| {
        let pod = case.start(two_containers()).await?;
        let mut footprint = Footprint::take(&case.node, &case.namespace, &uid(&pod))?;
        kill(case, &mut footprint).await?;
        let back = |pod: &Pod| restarts(pod) > 0 && is_ready(pod);
        case.pod_until("p", "the kubelet brought it back", RECOVERY_LIMIT, back)
            .await?;
        case.written("p", "a", "/n").await?;
        footprint.add(&case.node)?;
        nothing_is_left(case, &footprint).await
    })
    .await
}

#[tokio::test]
async fn the_kubelet_recovers_a_pod_whose_shim_was_killed() -> anyhow::Result<()> {
    killed("killshim", async |case, footprint| {
        footprint.kill_shim(&case.node)
    })
    .await
}

/// containerd gives the removal of a dead shim's container up after five seconds.
#[tokio::test]
async fn a_removal_that_containerd_has_given_up_goes_on_and_leaves_nothing() -> anyhow::Result<()> {
    killed("killheld", async |case, footprint| {
        let sandbox = case.node.sandbox_of(footprint.uid())?.sandbox;
        let lock = case.node.records.lock(&sandbox)?;
        footprint.kill_shim(&case.node)?;
        wait::until(
            "containerd gives the removal up",
            RECOVERY_LIMIT,
            async || {
                let removals = processes_naming(&["torpor-delete delete ".to_owned()]);
                let mut of_pod = removals
                    .iter()
                    .filter(|one| one.command.contains(sandbox.as_str()));
                let of_containerd = format!("-id {sandbox}");
                let callers = processes_naming(&[of_containerd]);
                let is_alone =
                    |one: &Process| callers.iter().all(|caller| caller.pid != one.parent);
                wait::holds(of_pod.any(is_alone), || format!("{removals:?} {callers:?}"))
            },
        )
        .await?;
        drop(lock);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_kubelet_recovers_a_pod_whose_sentry_was_killed() -> anyhow::Result<()> {
    killed("killsentry", async |case, footprint| {
        case.node.sentry(footprint.uid())?.kill()
    })
    .await
}

#[tokio::test]
async fn the_kubelet_recovers_a_pod_whose_gofer_was_killed() -> anyhow::Result<()> {
    killed("killgofer", async |case, footprint| {
        case.node.gofer(footprint.uid())?.kill()
    })
    .await
}

/// gVisor watches the gofers of containers that it has begun, and not of those that it has
/// restored.
#[tokio::test]
async fn the_kubelet_recovers_a_woken_pod_whose_gofer_was_killed() -> anyhow::Result<()> {
    killed("killwokengofer", async |case, footprint| {
        case.hibernate("p").await?;
        case.wake("p").await?;
        footprint.add(&case.node)?;
        case.node.gofer(footprint.uid())?.kill()
    })
    .await
}

/// Returns the path of runsc's record of a container in this root directory.
fn state_in(root: &Path, container: &ContainerId, sandbox: &SandboxId) -> PathBuf {
    let (container, sandbox) = (container.as_str(), sandbox.as_str());
    root.join(format!("{container}_sandbox:{sandbox}.state"))
}

/// runsc writes its state of a container in place: a runsc that is killed meanwhile leaves a part
/// of it, which no runsc reads.
#[tokio::test]
async fn a_container_whose_state_a_killed_runsc_left_half_written_is_brought_back()
-> anyhow::Result<()> {
    case("torn", async |case| {
        let pod = case.start(two_containers()).await?;
        let mut footprint = Footprint::take(&case.node, &case.namespace, &uid(&pod))?;
        let record = case.node.container(&uid(&pod), "a")?;
        let root = NodeRunsc::new(&case.node.config).root_of(&record.sandbox);
        let state = state_in(&root, &record.id, &record.sandbox);
        std::fs::OpenOptions::new()
            .write(true)
            .open(&state)?
            .set_len(100)?;
        case.node.gofer_of(&uid(&pod), "a")?.kill()?;
        let back = |pod: &Pod| restarts(pod) == 1 && is_ready(pod);
        case.pod_until("p", "a is there again", RECOVERY_LIMIT, back)
            .await?;
        assert!(!state.exists(), "gone with its container");
        // A save and a restore succeed, too.
        let before = case.written("p", "b", "/n").await?;
        case.hibernate("p").await?;
        let pod = case.wake("p").await?;
        let after = case.written("p", "b", "/n").await?;
        anyhow::ensure!(
            after.parse::<u64>()? >= before.parse()?,
            "b went on: {before} → {after}"
        );
        assert_eq!(restarts(&pod), 1);
        footprint.add(&case.node)?;
        nothing_is_left(case, &footprint).await
    })
    .await
}

/// containerd that is killed between the start of a shim and the creation of its first container
/// forgets the shim (`hack/chaos`, seed 20261128).
#[tokio::test]
async fn a_shim_in_which_containerd_creates_no_container_ends() -> anyhow::Result<()> {
    case("lone-shim", async |case| {
        let started = case.start(pod("p", json!({ "containers": [shell("a", COUNT)] })));
        let uid = uid(&started.await?);
        let other = case.node.shim(&uid)?;
        let other_sandbox = case.node.sandbox_of(&uid)?.sandbox;
        // No other sandbox has the reversed id.
        let sandbox: String = other_sandbox.as_str().chars().rev().collect();
        let bundle = tempfile::tempdir()?;
        let config = format!("/proc/{}/cwd/config.json", other.pid);
        let config = std::fs::read_to_string(config)?.replace(other_sandbox.as_str(), &sandbox);
        std::fs::write(bundle.path().join("config.json"), config)?;
        let socket = containerd_socket()?;
        let output = Command::new(case.node.shim_program())
            .args(["-namespace", "k8s.io", "-id", &sandbox, "-address"])
            .arg(&socket)
            .arg("start")
            .env("TTRPC_ADDRESS", format!("{}.ttrpc", socket.display()))
            .current_dir(bundle.path())
            .stdin(Stdio::null())
            .output()?;
        ensure!(output.status.success(), "{output:?}");
        let sandbox = SandboxId::new(sandbox)?;
        ensure!(!case.node.shims_of(&sandbox).is_empty(), "no shim started");
        let limit = Duration::from_secs(120);
        wait::until("the shim ends", limit, async || {
            let left = case.node.shims_of(&sandbox);
            wait::holds(left.is_empty(), || format!("{left:?}"))
        })
        .await?;
        ensure!(
            !case.node.shims_of(&other_sandbox).is_empty(),
            "a used shim ended"
        );
        Ok(())
    })
    .await
}
