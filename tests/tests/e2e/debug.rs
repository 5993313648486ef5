//! `kubectl debug`: a container that is added to a Pod that sleeps.

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use torpor_api::annotations::{DOZE_AFTER, HIBERNATE};
use torpor_api::conditions::POD_HIBERNATED;
use torpor_tests::case::{Case, START_LIMIT, case, condition};
use torpor_tests::pods::{BUSYBOX, annotated, pod, shell};
use torpor_tests::sleep::{SLEEP_LIMIT, restarts};
use torpor_tests::swap::Swap;

const KEEPS: &str = "cat /proc/sys/kernel/random/uuid >/mem; sleep 1000000";
/// Shell line of the debugger, which ends on request.
const DEBUGS: &str = "echo debugs >/said; until [ -e /end ]; do sleep 0.2; done";

/// Adds a container to the Pod and checks that it runs, beside a program that has lost nothing.
async fn debug(case: &Case, kept: &str) -> anyhow::Result<()> {
    let image = format!("--image={BUSYBOX}");
    let args = [
        "debug",
        "p",
        &image,
        "--image-pull-policy=Never",
        "-c",
        "debugger",
    ];
    let command = ["--", "sh", "-c", DEBUGS];
    case.kubectl.ok(&[&args[..], &command].concat()).await?;
    case.pod_until("p", "the debugger runs", START_LIMIT, debugger_runs)
        .await?;
    assert_eq!(case.written("p", "debugger", "/said").await?, "debugs");
    assert_eq!(case.sh("p", "a", "cat /mem").await?, kept);
    Ok(())
}

fn debugger_runs(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let statuses = status.and_then(|status| status.ephemeral_container_statuses.as_ref());
    let mut states = statuses.into_iter().flatten().map(|one| one.state.as_ref());
    states.any(|state| state.is_some_and(|state| state.running.is_some()))
}

#[tokio::test]
async fn kubectl_debug_wakes_a_hibernated_pod_which_does_not_sleep_while_the_debugger_runs()
-> anyhow::Result<()> {
    case("debughib", async |case| {
        case.start(pod("p", json!({ "containers": [shell("a", KEEPS)] })))
            .await?;
        let kept = case.written("p", "a", "/mem").await?;
        case.hibernate("p").await?;
        debug(case, &kept).await?;
        // The request for sleep remains: the condition says why it waits, and the Pod sleeps once
        // the debugger has ended.
        let refused = |pod: &Pod| {
            let (_, _, message) = condition(pod, POD_HIBERNATED);
            message.contains("debugger") && message.contains("kubectl debug")
        };
        case.pod_until(
            "p",
            "its condition says why it does not sleep",
            SLEEP_LIMIT,
            refused,
        )
        .await?;
        case.sh("p", "debugger", "touch /end").await?;
        case.asleep("p").await?;
        case.annotate("p", HIBERNATE, None).await?;
        assert_eq!(case.sh("p", "a", "cat /mem").await?, kept);
        assert_eq!(restarts(&case.ready("p").await?), 0);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn kubectl_debug_wakes_a_dozing_pod() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("debugdoze", async |case| {
        let sleepy = annotated(
            pod("p", json!({ "containers": [shell("a", KEEPS)] })),
            DOZE_AFTER,
            "1s",
        );
        case.start(sleepy).await?;
        let kept = case.written("p", "a", "/mem").await?;
        case.dozes("p").await?;
        debug(case, &kept).await?;
        case.sh("p", "debugger", "touch /end").await?;
        case.dozes("p").await?;
        assert_eq!(case.sh("p", "a", "cat /mem").await?, kept);
        assert_eq!(restarts(&case.ready("p").await?), 0);
        Ok(())
    })
    .await
}
