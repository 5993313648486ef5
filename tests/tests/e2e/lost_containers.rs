//! Pods with a container that containerd has lost.

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use torpor_api::annotations::DOZE_AFTER;
use torpor_core::ids::ContainerId;
use torpor_records::ContainerRecord;
use torpor_tests::case::{Case, case, uid};
use torpor_tests::pods::{annotated, pod, shell};
use torpor_tests::remains::Footprint;
use torpor_tests::sleep::{is_ready, restarts};
use torpor_tests::swap::Swap;

use crate::leftovers::{RECOVERY_LIMIT, nothing_is_left};

/// Adds a container to the Pod that containerd has lost.
///
/// containerd was killed while it took up the end of the container's keeper, forgot the container
/// and never asked for its removal (`hack/chaos`, seed 20261122, cycle 124).
fn lose_a_container(case: &Case, uid: &str) -> anyhow::Result<ContainerRecord> {
    let own = case.node.container(uid, "a")?;
    // No other container has the reversed id.
    let id: String = own.id.as_str().chars().rev().collect();
    let id = ContainerId::try_from(id)?;
    let lost = ContainerRecord {
        cgroup: own.cgroup.with_file_name(id.as_str()),
        id,
        // No process has this id.
        keeper_pid: 0,
        in_shim: false,
        ..own
    };
    case.node.records.create_container_dir(&lost.id)?;
    case.node.records.write_container(&lost)?;
    Ok(lost)
}

#[tokio::test]
async fn a_dozing_pod_with_a_container_that_containerd_has_lost_can_be_deleted()
-> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("lostgoes", async |case| {
        let sleeper = pod("p", json!({ "containers": [shell("a", "sleep 1000000")] }));
        let pod = case.start(annotated(sleeper, DOZE_AFTER, "1s")).await?;
        let footprint = Footprint::take(&case.node, &case.namespace, &uid(&pod))?;
        case.dozes("p").await?;
        let lost = lose_a_container(case, &uid(&pod))?;
        nothing_is_left(case, &footprint).await?;
        let dir = case.node.records.container_dir(&lost.id);
        anyhow::ensure!(!dir.exists(), "{} is left", dir.display());
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_container_that_containerd_has_lost_goes_when_another_of_its_name_is_made()
-> anyhow::Result<()> {
    case("lostreplaced", async |case| {
        let line = "until [ -e /end ]; do sleep 0.2; done";
        let pod = case
            .start(pod("p", json!({ "containers": [shell("a", line)] })))
            .await?;
        let lost = lose_a_container(case, &uid(&pod))?;
        case.sh("p", "a", "touch /end").await?;
        let again = |pod: &Pod| restarts(pod) == 1 && is_ready(pod);
        case.pod_until("p", "a runs again", RECOVERY_LIMIT, again)
            .await?;
        let dir = case.node.records.container_dir(&lost.id);
        anyhow::ensure!(!dir.exists(), "{} is left", dir.display());
        // The Pod still sleeps and wakes.
        case.hibernate("p").await?;
        assert_eq!(restarts(&case.wake("p").await?), 1);
        Ok(())
    })
    .await
}
