//! Staged images: those of a template are on a node before the first member of its pool starts
//! there.

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::ResourceExt;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use torpor_api::annotations::{INJECT_RUNTIME, STAGE_IMAGES};
use torpor_api::{SandboxTemplate, SandboxWarmPool, labels};
use torpor_tests::case::{Case, case, node_of, uid};
use torpor_tests::pods::{annotated, pod_spec};
use torpor_tests::pools::extension;
use torpor_tests::registry::Registry;
use torpor_tests::sandboxes::LIMIT;
use torpor_tests::wait;

/// Creates a template that stages this image, and an empty pool of it.
async fn pool_of(case: &Case, image: &str) -> anyhow::Result<()> {
    // The sandbox runtime is the program: the image has none.
    let container = json!({ "name": "a", "image": image, "imagePullPolicy": "IfNotPresent" });
    let spec = pod_spec(json!({ "containers": [container] }));
    let template = json!({ "podTemplate": { "spec": spec } });
    let template = annotated(
        extension("SandboxTemplate", "t", template),
        STAGE_IMAGES,
        "true",
    );
    case.create(annotated(template, INJECT_RUNTIME, "true"))
        .await?;
    let pool = json!({ "replicas": 0, "sandboxTemplateRef": { "name": "t" } });
    case.create(extension("SandboxWarmPool", "w", pool)).await
}

async fn staging(case: &Case) -> anyhow::Result<Vec<Pod>> {
    let staged = ListParams::default().labels(labels::STAGED_IMAGES);
    Ok(case.pods().list(&staged).await?.items)
}

/// Waits until the only Pod that stages images has ended; returns it.
async fn staged(case: &Case) -> anyhow::Result<Pod> {
    wait::until("the image is on the node", LIMIT, async || {
        let mut pods = staging(case).await?;
        let phase = |pod: &Pod| pod.status.as_ref()?.phase.clone();
        let found = pods
            .pop()
            .filter(|pod| phase(pod).as_deref() == Some("Succeeded"));
        Ok(found.ok_or_else(|| format!("{:?}", pods.first().map(phase))))
    })
    .await
}

#[tokio::test]
async fn a_member_needs_no_pull_where_the_image_was_staged() -> anyhow::Result<()> {
    case("staged", async |case| {
        let registry = Registry::start(&case.namespace).await?;
        pool_of(case, &registry.image()).await?;
        let pod = staged(case).await?;
        wait::until("the Pod has no sandbox any more", LIMIT, async || {
            let left = case.node.sandboxes_of(&uid(&pod))?.len();
            wait::holds(left == 0, || format!("{left} are left"))
        })
        .await?;
        drop(registry);

        let grown = Patch::Merge(json!({ "spec": { "replicas": 1 } }));
        let pools = case.api::<SandboxWarmPool>();
        pools.patch("w", &PatchParams::default(), &grown).await?;
        case.pool_is_ready("w", 1).await?;
        let member = case.members().await?.pop().context("a member")?;
        let started = case.ready(&member.name_any()).await?;
        assert_eq!(node_of(&started), node_of(&pod));

        let off: Value = json!({ "metadata": { "annotations": { STAGE_IMAGES: null } } });
        let templates = case.api::<SandboxTemplate>();
        templates
            .patch("t", &PatchParams::default(), &Patch::Merge(off))
            .await?;
        wait::until("the Pod that staged the image is gone", LIMIT, async || {
            let left = staging(case).await?.len();
            wait::holds(left == 0, || format!("{left} are left"))
        })
        .await
    })
    .await
}

#[tokio::test]
async fn a_failed_pull_is_an_event_on_the_template_with_the_registrys_message() -> anyhow::Result<()>
{
    case("unstaged", async |case| {
        let registry = Registry::start(&case.namespace).await?;
        pool_of(case, &registry.missing()).await?;
        let words = "an Event of the template says that the image is not there";
        let events: Api<Event> = case.api();
        let message = wait::until(words, LIMIT, async || {
            let of = ListParams::default().fields("reason=ImagesNotStaged");
            let found = events.list(&of).await?.items.pop();
            let message = found.and_then(|event| event.note);
            Ok(message.ok_or_else(|| "no Event".to_owned()))
        })
        .await?;
        for expected in [
            "images are missing on 1 of 1 nodes",
            &registry.missing(),
            "not found",
        ] {
            assert!(message.contains(expected), "{message}");
        }
        Ok(())
    })
    .await
}
