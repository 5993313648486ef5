//! Archives: a Sandbox moves into the repository, leaves its node, and comes back on another one.

use anyhow::{Context, ensure};
use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::json;
use torpor_api::annotations::{ARCHIVE_AFTER, SNAPSHOT_CLASS};
use torpor_api::snapshot::{SandboxSnapshot, SnapshotClass};
use torpor_tests::case::{Case, uid};
use torpor_tests::sandboxes::sandbox;
use torpor_tests::{wait, witness};

use super::{LIMIT, case, continues_on, objects, start_on, upload_is};

async fn is_gone(case: &Case, name: &str) -> anyhow::Result<()> {
    let found = case.sandboxes().get_opt(name).await?;
    ensure!(found.is_none(), "the Sandbox is there: {found:?}");
    Ok(())
}

/// Returns the only archive of the namespace.
async fn archive(case: &Case) -> anyhow::Result<SandboxSnapshot> {
    let names = case.torpor_output(&["list-archives", "-o", "name"]).await?;
    let name = names.trim().strip_prefix("sandboxsnapshot.torpor.dev/");
    let name = name.with_context(|| format!("archives: {names:?}"))?;
    Ok(case.snapshots().get(name).await?)
}

#[tokio::test]
async fn an_archived_sandbox_leaves_its_node_and_continues_on_the_other() -> anyhow::Result<()> {
    case("nodes-archive", async |case| {
        let first = start_on(case, "node-0", 20).await?;
        let before = witness::ask(&first).await?;
        let said = case.torpor_output(&["archive", "s"]).await?;
        ensure!(said.contains("archived in s-archive-"), "{said}");
        is_gone(case, "s").await?;
        let made = archive(case).await?;
        ensure!(made.owner_references().is_empty(), "{made:?}");
        wait::until("node-0 has no image", LIMIT, async || {
            let left = case.node.images_of(&case.namespace, &uid(&first));
            Ok(left
                .is_empty()
                .then_some(())
                .ok_or_else(|| format!("{left:?}")))
        })
        .await?;
        let records = objects(case, "/archives/");
        ensure!(records.len() == 1, "{records:?}");
        let record = std::fs::read(&records[0])?;
        let clear = record.windows(7).any(|part| part == b"witness");
        ensure!(!clear, "the record is not encrypted");

        case.cordon("node-0", true).await?;
        case.torpor_output(&["restore-archive", "s"]).await?;
        let second = case.ready("s").await?;
        continues_on(&second, "node-1", &before).await?;
        case.cordon("node-0", false).await?;
        is_listed_again(case, &made, &before).await
    })
    .await
}

/// Deletes the Sandbox and its archive's SandboxSnapshot, and restores the Sandbox from the
/// repository alone, as another cluster would.
async fn is_listed_again(
    case: &Case,
    archive: &SandboxSnapshot,
    before: &witness::State,
) -> anyhow::Result<()> {
    case.sandboxes()
        .delete("s", &DeleteParams::default())
        .await?;
    let snapshot = archive.name_any();
    case.snapshots()
        .delete(&snapshot, &DeleteParams::default())
        .await?;
    wait::until("the Sandbox is gone", LIMIT, async || {
        Ok(is_gone(case, "s").await.map_err(|error| error.to_string()))
    })
    .await?;
    let source = archive.spec.archive.as_ref().context("no source")?;
    let foreign = [
        "restore-archive",
        "s",
        "--class",
        &*case.namespace,
        "--image",
        &*source.image_id,
    ];
    let other = [&foreign[..], &["--from-cluster", "another-cluster"]].concat();
    let refused = case.torpor(&other).await?;
    ensure!(
        refused.code == 1 && refused.err.contains("ClusterNotAllowed"),
        "{refused:?}"
    );
    let wrong = refused.err.split("delete sandboxsnapshot ").nth(1);
    let wrong = wrong
        .and_then(|rest| rest.split('`').next())
        .context("no remedy")?;
    case.snapshots()
        .delete(wrong, &DeleteParams::default())
        .await?;

    let own = [&foreign[..], &["--from-cluster", &*source.cluster]].concat();
    case.torpor_output(&own).await?;
    let third = case.ready("s").await?;
    witness::ask(&third).await?.goes_on_from(before)?;
    Ok(())
}

#[tokio::test]
async fn an_image_that_has_lost_an_object_is_reported_and_uploaded_again() -> anyhow::Result<()> {
    case("nodes-scrub", async |case| {
        let first = start_on(case, "node-0", 5).await?;
        let before = witness::ask(&first).await?;
        case.suspend("s").await?;
        upload_is(case, "True", "Uploaded").await?;
        let lost = objects(case, "/chunks/").pop().context("no chunk")?;
        std::fs::remove_file(&lost)?;
        // Between two sweeps the condition may be True again already.
        wait::until("the object is back", LIMIT, async || {
            Ok(lost
                .exists()
                .then_some(())
                .ok_or_else(|| format!("{} is lost", lost.display())))
        })
        .await?;
        upload_is(case, "True", "Uploaded").await?;
        let events: Api<Event> = Api::namespaced(case.client(), &case.namespace);
        let events = events.list(&ListParams::default()).await?;
        let mut reasons = events
            .items
            .iter()
            .filter_map(|event| event.reason.as_deref());
        ensure!(
            reasons.any(|reason| reason == "Damaged"),
            "no Event reports it"
        );

        case.cordon("node-0", true).await?;
        let second = case.resume("s").await?;
        continues_on(&second, "node-1", &before).await
    })
    .await
}

#[tokio::test]
async fn an_image_beyond_the_namespaces_limit_stays_on_its_node() -> anyhow::Result<()> {
    case("nodes-quota", async |case| {
        let classes: Api<SnapshotClass> = Api::all(case.client());
        let limit = |size: &str| {
            let parameters = json!({ "maxSizePerNamespace": size });
            Patch::Merge(json!({ "spec": { "parameters": parameters } }))
        };
        let set = PatchParams::default();
        classes.patch(&case.namespace, &set, &limit("1Mi")).await?;
        let first = start_on(case, "node-0", 5).await?;
        let before = witness::ask(&first).await?;
        case.suspend("s").await?;
        upload_is(case, "False", "QuotaExceeded").await?;
        ensure!(objects(case, "/chunks/").is_empty(), "chunks were sent");
        classes.patch(&case.namespace, &set, &limit("1Gi")).await?;
        upload_is(case, "True", "Uploaded").await?;
        let second = case.resume("s").await?;
        witness::ask(&second).await?.goes_on_from(&before)
    })
    .await
}

#[tokio::test]
async fn a_sandbox_without_a_repository_is_not_archived_and_resumes() -> anyhow::Result<()> {
    case("nodes-archive-not", async |case| {
        let container = witness::container(5, &[]);
        case.create(sandbox("s", json!({ "containers": [container] })))
            .await?;
        let first = case.sandbox_ready("s").await?;
        let before = witness::ask(&first).await?;
        let refused = case.torpor(&["archive", "s"]).await?;
        ensure!(
            refused.code == 1 && refused.err.contains("it has no SnapshotClass"),
            "{refused:?}"
        );
        witness::ask(&case.ready("s").await?)
            .await?
            .goes_on_from(&before)?;
        // The class comes too late for the image of this suspension.
        case.suspend("s").await?;
        let class = json!({ "metadata": { "annotations": { SNAPSHOT_CLASS: case.namespace } } });
        case.patch("s", class).await?;
        let refused = case.torpor(&["archive", "s"]).await?;
        ensure!(
            refused.code == 1 && refused.err.contains("NoRepository"),
            "{refused:?}"
        );
        let sandbox = case.sandboxes().get("s").await?;
        ensure!(
            !sandbox.annotations().contains_key(ARCHIVE_AFTER),
            "{sandbox:?}"
        );
        let second = case.resume("s").await?;
        witness::ask(&second).await?.goes_on_from(&before)
    })
    .await
}
