//! Kills of the processes that all Pods of a node run on: the agent, containerd.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use torpor_core::ids::SandboxId;
use torpor_records::PodRecord;
use torpor_tests::agent::Agent;
use torpor_tests::case::{Case, case_alone, uid};
use torpor_tests::machine;
use torpor_tests::node::containerd;
use torpor_tests::pods::with;
use torpor_tests::remains::Footprint;
use torpor_tests::sleep::{is_ready, restarts};
use torpor_tests::wait;

use crate::leftovers::{RECOVERY_LIMIT, nothing_is_left, two_containers};

/// Waits until an exec succeeds again, by way of the kubelet.
async fn containerd_answers(case: &Case, pod: &str, container: &str) -> anyhow::Result<()> {
    wait::until("containerd answers again", RECOVERY_LIMIT, async || {
        let asked = case.kubectl.exec(pod, container, &["cat", "/n"]).await?;
        wait::holds(asked.code == 0, || asked.err.clone())
    })
    .await
}

#[tokio::test]
async fn a_killed_agent_comes_back_and_harms_no_pod() -> anyhow::Result<()> {
    case_alone("killagent", async |case| {
        let pod = case.start(two_containers()).await?;
        let footprint = Footprint::take(&case.node, &case.namespace, &uid(&pod))?;
        Agent::find()?.kill_and_replace(case.client()).await?;
        case.hibernate("p").await?;
        let agent = Agent::find()?.kill_and_replace(case.client()).await?;
        let pod = case.wake("p").await?;
        assert_eq!(restarts(&pod), 0);
        assert!(agent.process.lives(), "the agent that woke it runs on");
        nothing_is_left(case, &footprint).await
    })
    .await
}

#[tokio::test]
async fn a_killed_containerd_comes_back_to_running_and_sleeping_pods() -> anyhow::Result<()> {
    case_alone("killctrd", async |case| {
        let awake = case.start(two_containers()).await?;
        let sleeper = with(
            two_containers(),
            json!({ "metadata": { "name": "sleeper" } }),
        );
        let sleeper = case.start(sleeper).await?;
        case.hibernate("sleeper").await?;
        let footprint = Footprint::take(&case.node, &case.namespace, &uid(&awake))?;
        let of_sleeper = Footprint::take(&case.node, &case.namespace, &uid(&sleeper))?;
        let before: u64 = case.written("p", "a", "/n").await?.parse()?;
        containerd()?.kill()?;
        containerd_answers(case, "p", "a").await?;
        let now: u64 = case.written("p", "a", "/n").await?.parse()?;
        assert!(now >= before, "{before} → {now}");
        assert_eq!(restarts(&case.wake("sleeper").await?), 0);
        assert_eq!(restarts(&case.ready("p").await?), 0);
        case.delete_pod("sleeper", Duration::from_secs(30)).await?;
        nothing_is_left(case, &footprint).await?;
        assert_eq!(of_sleeper.of_sandbox(&case.node), Vec::<String>::new());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn containerd_comes_back_right_after_a_shim_was_killed() -> anyhow::Result<()> {
    case_alone("shimctrd", async |case| {
        let pod = case.start(two_containers()).await?;
        let mut footprint = Footprint::take(&case.node, &case.namespace, &uid(&pod))?;
        footprint.kill_shim(&case.node)?;
        containerd()?.kill()?;
        containerd_answers(case, "p", "b").await?;
        let restarted = |pod: &Pod| restarts(pod) > 0 && is_ready(pod);
        case.pod_until(
            "p",
            "the container is there again",
            RECOVERY_LIMIT,
            restarted,
        )
        .await?;
        footprint.add(&case.node)?;
        nothing_is_left(case, &footprint).await
    })
    .await
}

/// Calls `act` while the sandbox is paused as for a save, and its agent is stopped.
async fn in_a_save<T>(
    case: &Case,
    pod: &Pod,
    act: impl AsyncFnOnce(&SandboxId) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let agent = Agent::find()?.process;
    let sandbox = case.node.sandbox_of(&uid(pod))?.sandbox;
    // An agent that works on a Pod would be stopped with that Pod's lock, for which each exec into
    // the Pod waits.
    wait::until(
        "the agent is stopped without a lock",
        RECOVERY_LIMIT,
        async || {
            agent.stop()?;
            let records = &case.node.records;
            let is_free = |pod: &PodRecord| matches!(records.try_lock(&pod.sandbox), Ok(Some(_)));
            let free = records.pods()?.iter().all(is_free);
            if !free {
                agent.go_on()?;
            }
            wait::holds(free, || "it has a lock".to_owned())
        },
    )
    .await?;
    let acted = async {
        command(case, "pause", &sandbox).await?;
        act(&sandbox).await
    };
    let acted = acted.await;
    agent.go_on()?;
    acted
}

/// Runs a command of the shim on the sandbox.
async fn command(case: &Case, name: &str, sandbox: &SandboxId) -> anyhow::Result<()> {
    let done = tokio::process::Command::new(case.node.shim_program())
        .args([name, sandbox.as_str()])
        .output()
        .await?;
    anyhow::ensure!(done.status.success(), "{name}: {done:?}");
    Ok(())
}

/// The process that paused a sandbox for a save is gone, and so is the Pod's shim.
///
/// The container's program cannot end while the sandbox is paused, and containerd waits for that.
#[tokio::test]
async fn a_shim_that_dies_in_a_save_whose_agent_is_gone_blocks_nothing() -> anyhow::Result<()> {
    case_alone("shimpaused", async |case| {
        let pod = case.start(two_containers()).await?;
        let restarted = in_a_save(case, &pod, async |_| {
            case.node.shim(&uid(&pod))?.kill()?;
            let restarted = |pod: &Pod| restarts(pod) == 2 && is_ready(pod);
            let words = "both containers are there again";
            case.pod_until("p", words, RECOVERY_LIMIT, restarted).await
        });
        assert_eq!(restarts(&restarted.await?), 2);
        Ok(())
    })
    .await
}

/// A containerd that starts gives up the containers of a paused task, so a save must not show as
/// one.
#[tokio::test]
async fn containerd_comes_back_in_a_save_and_ends_no_container() -> anyhow::Result<()> {
    case_alone("savectrd", async |case| {
        let pod = case.start(two_containers()).await?;
        let other = json!({ "metadata": { "name": "other" } });
        case.start(with(two_containers(), other)).await?;
        in_a_save(case, &pod, async |sandbox| {
            containerd()?.kill()?;
            // containerd answers for any Pod once it knows the containers of all.
            containerd_answers(case, "other", "a").await?;
            command(case, "resume", sandbox).await
        })
        .await?;
        containerd_answers(case, "p", "a").await?;
        assert_eq!(restarts(&case.ready("p").await?), 0);
        Ok(())
    })
    .await
}

/// Number of tries: the creation of a container takes a few hundredths of a second.
const TRIES: usize = 8;

/// When containerd starts, it ends a container that was created and not started. The sandbox's
/// other containers continue.
#[tokio::test]
async fn containerd_comes_back_to_a_container_that_it_had_not_started() -> anyhow::Result<()> {
    case_alone("created", async |case| {
        for number in 0..TRIES {
            let name = format!("p{number}");
            let pod = with(two_containers(), json!({ "metadata": { "name": name } }));
            case.create(pod).await?;
            let pod = case
                .pod_until(&name, "it is there", RECOVERY_LIMIT, |_| true)
                .await?;
            let Some(created) = created(case, &uid(&pod)).await? else {
                case.delete_pod(&name, Duration::from_secs(30)).await?;
                continue;
            };
            containerd()?.kill()?;
            let has_run = |pod: &Pod| is_ready(pod);
            let words = "both containers run";
            let pod = case
                .pod_until(&name, words, RECOVERY_LIMIT, has_run)
                .await?;
            let running = case.node.container(&uid(&pod), "b")?.id;
            let restarted = restarts_of(&pod, "a");
            case.delete_pod(&name, Duration::from_secs(30)).await?;
            if running.as_str() != created {
                assert_eq!(restarted, Some(0), "the other container went on");
                return Ok(());
            }
        }
        anyhow::bail!("containerd never died between a creation and a start")
    })
    .await
}

/// Returns the id of the Pod's container `b` while the shim creates it, after container `a`; none
/// if its creation was over between two looks.
async fn created(case: &Case, pod: &str) -> anyhow::Result<Option<String>> {
    let deadline = tokio::time::Instant::now() + RECOVERY_LIMIT;
    loop {
        let first = case.node.container(pod, "a");
        // Read before the commands: a creation that ends meanwhile is no longer among them.
        let is_over = case.node.container(pod, "b").is_ok();
        if let Ok(first) = &first {
            let commands = machine::processes_naming(&["torpor-create create ".to_owned()]);
            let mut ids = commands
                .iter()
                .filter_map(|one| one.command.rsplit(' ').next());
            let second = ids.find(|id| *id != first.id.as_str());
            if second.is_some() || is_over {
                return Ok(second.map(str::to_owned));
            }
        }
        let in_time = tokio::time::Instant::now() < deadline;
        anyhow::ensure!(in_time, "no container b is created after {first:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn restarts_of(pod: &Pod, container: &str) -> Option<i32> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let status = statuses.iter().find(|status| status.name == container)?;
    Some(status.restart_count)
}
