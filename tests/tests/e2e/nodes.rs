//! Memory that continues on another node. These tests take nodes and the S3 server away, so each
//! runs alone.
//!
//! All tests but those of `direct` are of repositories: in them no node gives images to others.

mod archives;
mod direct;
mod golden;
mod kms;

use std::time::Duration;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, EvictParams, ListParams, Patch, PatchParams};
use serde_json::json;
use torpor_api::annotations::{BACK_UP_AFTER, HIBERNATE, SNAPSHOT_CLASS};
use torpor_api::snapshot::{SandboxSnapshot, SnapshotClass};
use torpor_api::{conditions, labels};
use torpor_tests::agent::{AGENT, delete_pods};
use torpor_tests::case::{Case, alone_within, condition, node_of, uid};
use torpor_tests::sandboxes::{condition_of, sandbox};
use torpor_tests::two_nodes::{
    BUCKET, cluster, gone_from, no_image_servers, nothing_fetched, objects, on_both, other,
};
use torpor_tests::{moves, wait, witness};

/// Time limit of a test: a node starts again within a minute.
const TEST: Duration = Duration::from_secs(420);
const LIMIT: Duration = Duration::from_secs(120);

/// Runs a test with a SnapshotClass of its own, of the test's namespace's name, and puts the nodes
/// and the server back afterwards.
async fn case(
    name: &str,
    body: impl AsyncFnOnce(&Case) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    case_within(TEST, name, body).await
}

/// Runs a test as [`case`] does, with this time limit.
async fn case_within(
    limit: Duration,
    name: &str,
    body: impl AsyncFnOnce(&Case) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    alone_within(limit, name, async |case| {
        no_image_servers(case).await?;
        on_both(case, async || body(case).await).await
    })
    .await
}

/// Creates a Sandbox `s` with a witness, on this node, with the test's class.
async fn start_on(case: &Case, node: &str, megabytes: u32) -> anyhow::Result<Pod> {
    let class = json!({ SNAPSHOT_CLASS: case.namespace });
    start_with(case, node, megabytes, class).await
}

/// Creates a Sandbox `s` with a witness, on this node, with these annotations.
async fn start_with(
    case: &Case,
    node: &str,
    megabytes: u32,
    annotations: serde_json::Value,
) -> anyhow::Result<Pod> {
    let other = other(node);
    case.cordon(other, true).await?;
    let mut manifest = sandbox(
        "s",
        json!({ "containers": [witness::container(megabytes, &["/file"])] }),
    );
    manifest["metadata"]["annotations"] = annotations;
    case.create(manifest).await?;
    let pod = case.sandbox_ready("s").await?;
    ensure!(node_of(&pod) == node, "the Pod runs on {}", node_of(&pod));
    case.cordon(other, false).await?;
    Ok(pod)
}

/// Checks that the Pod runs on this node and continues from this state.
async fn continues_on(pod: &Pod, node: &str, before: &witness::State) -> anyhow::Result<()> {
    ensure!(node_of(pod) == node, "it runs on {}", node_of(pod));
    witness::ask(pod).await?.goes_on_from(before)
}

/// Waits until the only snapshot has this condition Uploaded; returns it.
async fn upload_is(case: &Case, status: &str, reason: &str) -> anyhow::Result<SandboxSnapshot> {
    let words = format!("Uploaded={status}/{reason}");
    wait::until(&words, LIMIT, async || {
        let all = case.snapshots().list(&ListParams::default()).await;
        let found = all?.items.into_iter().find(|snapshot| {
            let uploaded = conditions::find(snapshot.conditions(), conditions::UPLOADED);
            uploaded.is_some_and(|one| one.status == status && one.reason == reason)
        });
        Ok(found.ok_or_else(|| "no such snapshot".to_owned()))
    })
    .await
}

#[tokio::test]
async fn a_suspended_sandbox_continues_on_the_other_node_and_comes_back() -> anyhow::Result<()> {
    case("nodes", async |case| {
        let first = start_on(case, "node-0", 20).await?;
        let before = witness::ask(&first).await?;
        case.suspend("s").await?;
        let snapshot = upload_is(case, "True", "Uploaded").await?;
        let upload = snapshot
            .status
            .and_then(|status| status.upload)
            .context("no figures")?;
        ensure!(
            upload.done_bytes == upload.total_bytes && upload.sent_bytes > 0,
            "{upload:?}"
        );
        let sealed = objects(case, "/chunks/");
        ensure!(!sealed.is_empty(), "no object is in {BUCKET}");

        case.cordon("node-0", true).await?;
        let second = case.resume("s").await?;
        ensure!(
            node_of(&second) == "node-1",
            "it runs on {}",
            node_of(&second)
        );
        let there = witness::ask(&second).await?;
        there.goes_on_from(&before)?;
        nothing_fetched(case, "node-1").await?;
        let left = case.node.images_of(&case.namespace, &uid(&first));
        ensure!(left.is_empty(), "node-0 still has {left:?}");

        case.suspend("s").await?;
        let snapshot = upload_is(case, "True", "Uploaded").await?;
        let again = snapshot
            .status
            .and_then(|status| status.upload)
            .context("no figures")?;
        println!("first upload {upload:?}, second {again:?}");
        case.cordon("node-0", false).await?;
        case.cordon("node-1", true).await?;
        let third = case.resume("s").await?;
        continues_on(&third, "node-0", &there).await
    })
    .await
}

#[tokio::test]
async fn a_lost_node_takes_only_what_was_not_uploaded() -> anyhow::Result<()> {
    case("nodes-lost", async |case| {
        let first = start_on(case, "node-1", 5).await?;
        let before = witness::ask(&first).await?;
        case.suspend("s").await?;
        upload_is(case, "True", "Uploaded").await?;
        lose(case, "node-1").await?;
        let back = async {
            let second = case.resume("s").await?;
            ensure!(
                node_of(&second) == "node-0",
                "it runs on {}",
                node_of(&second)
            );
            let there = witness::ask(&second).await?;
            there.goes_on_from(&before)?;
            Ok(there)
        };
        let back = back.await;
        cluster(case, &["node-up", "node-1"]).await?;
        let there = back?;
        // The node that is back has an image of the past, and removes it.
        let folder = format!("/var/lib/torpor/images/{}", case.namespace);
        gone_from(case, "node-1", &folder).await?;
        let pod = case.ready("s").await?;
        witness::ask(&pod).await?.goes_on_from(&there)
    })
    .await
}

#[tokio::test]
async fn a_sandbox_asleep_in_place_continues_from_its_backup_when_its_node_is_lost()
-> anyhow::Result<()> {
    case("nodes-backup", async |case| {
        let first = start_on(case, "node-1", 5).await?;
        let before = witness::ask(&first).await?;
        let wishes = json!({ HIBERNATE: "true", BACK_UP_AFTER: "1s" });
        case.patch("s", json!({ "metadata": { "annotations": wishes } }))
            .await?;
        let backup = upload_is(case, "True", "Uploaded").await?;
        ensure!(
            backup.labels().contains_key(labels::BACKUP),
            "no backup: {backup:?}"
        );
        lose(case, "node-1").await?;
        let awake = json!({ "metadata": { "annotations": { HIBERNATE: null } } });
        case.patch("s", awake).await?;
        let back = async {
            let second = case.next_pod(&first, LIMIT).await?;
            continues_on(&second, "node-0", &before).await
        };
        let back = back.await;
        cluster(case, &["node-up", "node-1"]).await?;
        back?;
        wait::none(&case.snapshots(), "the used backup is deleted", LIMIT).await
    })
    .await
}

/// Takes a node's power, and its Node object as a cloud's controller would. No replica of Torpor's
/// controller is on the node: Kubernetes starts another one elsewhere only after minutes.
async fn lose(case: &Case, node: &str) -> anyhow::Result<()> {
    case.cordon(node, true).await?;
    let system = "agent-sandbox-system";
    let controllers: Api<Pod> = Api::namespaced(case.client(), system);
    let here = format!("spec.nodeName={node}");
    let all = ListParams::default()
        .labels("app=agent-sandbox-controller")
        .fields(&here);
    controllers
        .delete_collection(&DeleteParams::default(), &all)
        .await?;
    wait::until("two controllers run elsewhere", LIMIT, async || {
        let pods = controllers
            .list(&ListParams::default().labels("app=agent-sandbox-controller"))
            .await?;
        let ready = |pod: &&Pod| node_of(pod) != node && condition(pod, "Ready").0 == "True";
        let ready = pods.iter().filter(ready).count();
        wait::holds(ready >= 2, || format!("{ready} are ready"))
    })
    .await?;
    cluster(case, &["node-down", node]).await?;
    let nodes: Api<Node> = Api::all(case.client());
    nodes.delete(node, &DeleteParams::default()).await?;
    Ok(())
}

#[tokio::test]
async fn an_image_is_uploaded_once_its_repository_answers_again() -> anyhow::Result<()> {
    case("nodes-store", async |case| {
        cluster(case, &["store", "down"]).await?;
        let waits = async {
            let first = start_on(case, "node-0", 5).await?;
            let before = witness::ask(&first).await?;
            case.suspend("s").await?;
            let snapshot = upload_is(case, "False", "RepositoryUnavailable").await?;
            let uploaded = conditions::find(snapshot.conditions(), conditions::UPLOADED);
            let message = uploaded.map(|one| one.message.clone()).unwrap_or_default();
            ensure!(message.contains("s3://torpor/"), "{message}");
            // The node takes no Pods, and the image is nowhere else.
            case.cordon("node-0", true).await?;
            case.set_mode("s", "Running").await?;
            case.sandbox_has("s", "Restored", "False", "Uploading")
                .await?;
            Ok(before)
        };
        let before = waits.await;
        cluster(case, &["store", "up"]).await?;
        let before = before?;
        let second = case.sandbox_ready("s").await?;
        continues_on(&second, "node-1", &before).await
    })
    .await
}

#[tokio::test]
async fn a_damaged_object_is_named_and_nothing_is_started_from_it() -> anyhow::Result<()> {
    case("nodes-damage", async |case| {
        let first = start_on(case, "node-0", 5).await?;
        let before = witness::ask(&first).await?;
        case.suspend("s").await?;
        upload_is(case, "True", "Uploaded").await?;
        let chunk = objects(case, "/chunks/").pop().context("no chunk")?;
        let whole = std::fs::read(&chunk)?;
        let mut flipped = whole.clone();
        let middle = whole.len() / 2;
        flipped[middle] ^= 1;
        std::fs::write(&chunk, &flipped)?;
        case.cordon("node-0", true).await?;
        case.set_mode("s", "Running").await?;
        let refused = case
            .sandbox_has("s", "Restored", "False", "ImageCorrupt")
            .await?;
        let message = condition_of(&refused, "Restored").2.to_owned();
        let name = chunk
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        ensure!(message.contains(&name), "{message} does not name {name}");
        std::fs::write(&chunk, &whole)?;
        let second = case.sandbox_ready("s").await?;
        continues_on(&second, "node-1", &before).await
    })
    .await
}

#[tokio::test]
async fn a_hibernated_sandbox_of_a_drained_node_continues_on_the_other() -> anyhow::Result<()> {
    case("nodes-drain", async |case| {
        let first = start_on(case, "node-0", 5).await?;
        let before = witness::ask(&first).await?;
        let asleep = json!({ "metadata": { "annotations": { HIBERNATE: "true" } } });
        case.patch("s", asleep).await?;
        case.sandbox_has("s", "Hibernated", "True", "Hibernated")
            .await?;
        case.cordon("node-0", true).await?;
        case.pods().evict("s", &EvictParams::default()).await?;
        let awake = json!({ "metadata": { "annotations": { HIBERNATE: null } } });
        case.patch("s", awake).await?;
        let second = case.next_pod(&first, LIMIT).await?;
        ensure!(
            node_of(&second) == "node-1",
            "it runs on {}",
            node_of(&second)
        );
        assert_ne!(second.uid(), first.uid());
        witness::ask(&second).await?.goes_on_from(&before)
    })
    .await
}

/// Suspends a Sandbox of `node-0`, takes the server away, and resumes on `node-1`, whose agent then
/// waits for the server. Returns the witness's state.
async fn waits_for_its_image(case: &Case) -> anyhow::Result<witness::State> {
    let first = start_on(case, "node-0", 5).await?;
    let before = witness::ask(&first).await?;
    case.suspend("s").await?;
    upload_is(case, "True", "Uploaded").await?;
    cluster(case, &["store", "down"]).await?;
    case.cordon("node-0", true).await?;
    case.set_mode("s", "Running").await?;
    case.sandbox_has("s", "Restored", "False", "RepositoryUnavailable")
        .await?;
    Ok(before)
}

#[tokio::test]
async fn a_fetch_outlives_its_agent() -> anyhow::Result<()> {
    case("nodes-agent", async |case| {
        let waits = async {
            let before = waits_for_its_image(case).await?;
            let here = ListParams::default()
                .labels(AGENT)
                .fields("spec.nodeName=node-1");
            delete_pods(case.client(), &here).await?;
            Ok::<_, anyhow::Error>(before)
        };
        let before = waits.await;
        cluster(case, &["store", "up"]).await?;
        let before = before?;
        let second = case.sandbox_ready("s").await?;
        continues_on(&second, "node-1", &before).await?;
        nothing_fetched(case, "node-1").await
    })
    .await
}

#[tokio::test]
async fn a_pod_that_never_ran_gives_its_image_back() -> anyhow::Result<()> {
    case("nodes-back", async |case| {
        let waits = async {
            let before = waits_for_its_image(case).await?;
            case.cordon("node-0", false).await?;
            case.cordon("node-1", true).await?;
            case.delete_pod_at_once("s").await?;
            let second = case.sandbox_ready("s").await?;
            Ok::<_, anyhow::Error>((before, second))
        };
        let waits = waits.await;
        cluster(case, &["store", "up"]).await?;
        let (before, second) = waits?;
        continues_on(&second, "node-0", &before).await?;
        nothing_fetched(case, "node-1").await
    })
    .await
}

#[tokio::test]
async fn a_class_without_its_bucket_is_reported_and_costs_no_memory() -> anyhow::Result<()> {
    case("nodes-bucket", async |case| {
        let classes: Api<SnapshotClass> = Api::all(case.client());
        let nowhere = json!({ "spec": { "parameters": { "url": "s3://no-such-bucket/x" } } });
        let nowhere = Patch::Merge(nowhere);
        classes
            .patch(&case.namespace, &PatchParams::default(), &nowhere)
            .await?;
        let first = start_on(case, "node-0", 5).await?;
        let before = witness::ask(&first).await?;
        case.suspend("s").await?;
        let snapshot = upload_is(case, "False", "RepositoryUnavailable").await?;
        let uploaded = conditions::find(snapshot.conditions(), conditions::UPLOADED);
        let message = uploaded.map(|one| one.message.clone()).unwrap_or_default();
        ensure!(message.contains("no-such-bucket"), "{message}");
        let second = case.resume("s").await?;
        continues_on(&second, "node-0", &before).await
    })
    .await
}

#[tokio::test]
async fn sandboxes_move_while_the_store_the_agents_and_the_controller_fail() -> anyhow::Result<()> {
    use moves::schedule::{Fault, Moment, Round, Strike, Way};
    let strike = |moment, fault, after, lasts| Strike {
        moment,
        fault,
        after: Duration::from_millis(after),
        lasts: Duration::from_millis(lasts),
    };
    let first = Round {
        way: Way::Suspend,
        strikes: vec![
            strike(Moment::Leaving, Fault::StoreStopped, 500, 3000),
            strike(Moment::Leaving, Fault::OldAgent, 1000, 0),
            strike(Moment::Coming, Fault::BucketGone, 0, 3000),
            strike(Moment::Coming, Fault::NewAgent, 500, 0),
        ],
    };
    let second = Round {
        way: Way::Drain,
        strikes: vec![
            strike(Moment::Leaving, Fault::Controller, 500, 0),
            strike(Moment::Coming, Fault::StoreKilled, 500, 0),
            strike(Moment::Coming, Fault::ObjectFlipped, 1000, 2000),
        ],
    };
    let rounds = [(0, first), (1, second)];
    case("nodes-moves", async |case| {
        let report = |line: &str| println!("{line}");
        let tally = moves::run(case, 3, rounds, report).await?;
        println!("{tally}");
        for fault in [Fault::StoreStopped, Fault::BucketGone, Fault::StoreKilled] {
            ensure!(tally.has_had(fault), "{fault:?} had no target");
        }
        Ok(())
    })
    .await
}
