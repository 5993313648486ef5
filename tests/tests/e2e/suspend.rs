//! Suspends a Sandbox with its memory, and resumes it in a new Pod.

use std::time::Duration;

use anyhow::ensure;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use torpor_snapshots::{Fingerprint, Manifest};
use torpor_tests::case::{Case, case, uid};
use torpor_tests::pods::{COUNT, mounts, pod_spec, shell, with};
use torpor_tests::remains::Footprint;
use torpor_tests::sandboxes::condition_of;
use torpor_tests::wait;
use torpor_tests::witness;

/// Time for a save, a deletion with its grace period and a start: seconds, more on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

fn sandbox(annotations: Value, spec: Value) -> Value {
    json!({
        "apiVersion": "agents.x-k8s.io/v1beta1",
        "kind": "Sandbox",
        "metadata": { "name": "s", "annotations": annotations },
        "spec": { "podTemplate": { "spec": pod_spec(spec) } },
    })
}

/// Returns a spec with a Python program with memory, files and a child, a counting shell, and both
/// kinds of emptyDir.
fn rich() -> Value {
    let volumes = json!({ "volumeMounts": mounts(&[("disk", "/disk"), ("memory", "/memory")]) });
    let witness = witness::container(5, &["/disk/file", "/memory/file", "/root-file"]);
    json!({
        "initContainers": [with(shell("init", "echo once >>/disk/init"), volumes.clone())],
        "containers": [with(witness, volumes.clone()), with(shell("count", COUNT), volumes)],
        "volumes": [
            { "name": "disk", "emptyDir": {} },
            { "name": "memory", "emptyDir": { "medium": "Memory" } },
        ],
    })
}

/// Returns a spec for tests whose subject is not the restored state: each further container is
/// another process of gVisor, at each start.
fn lean() -> Value {
    json!({ "containers": [witness::container(5, &["/root-file"])] })
}

fn counting() -> Value {
    json!({ "containers": [shell("a", COUNT)] })
}

#[tokio::test]
async fn a_suspended_sandbox_comes_back_with_memory_processes_and_files() -> anyhow::Result<()> {
    case("suspend", async |case| {
        case.create(sandbox(json!({}), rich())).await?;
        let first = case.sandbox_ready("s").await?;
        let before = witness::ask(&first).await?;
        let mut footprint = Footprint::take(&case.node, &case.namespace, &uid(&first))?;

        let sandbox = case.suspend("s").await?;
        assert_eq!(condition_of(&sandbox, "Ready").2, "Sandbox is suspended");
        assert!(case.pods().get_opt("s").await?.is_none(), "the Pod is gone");
        assert_eq!(footprint.of_sandbox(&case.node), Vec::<String>::new());

        let second = case.run("s").await?;
        footprint.add(&case.node)?;
        assert_ne!(uid(&first), uid(&second));
        witness::ask(&second).await?.goes_on_from(&before)?;
        let init = case.sh("s", "witness", "cat /disk/init").await?;
        assert_eq!(init, "once", "the init container did not run again");
        case.sandbox_has("s", "Restored", "True", "Restored")
            .await?;

        // The second suspend is of the new Pod.
        let before = witness::ask(&second).await?;
        case.suspend("s").await?;
        let third = case.run("s").await?;
        witness::ask(&third).await?.goes_on_from(&before)
    })
    .await
}

#[tokio::test]
async fn deleting_a_suspended_sandbox_deletes_its_bytes() -> anyhow::Result<()> {
    case("suspend-delete", async |case| {
        case.create(sandbox(json!({}), counting())).await?;
        let uid = uid(&case.sandbox_ready("s").await?);
        case.suspend("s").await?;
        case.node.image_of(&case.namespace, &uid)?;
        let parameters = DeleteParams::default();
        case.sandboxes().delete("s", &parameters).await?;
        wait::until("the image is gone", LIMIT, async || {
            let left = case.node.images_of(&case.namespace, &uid);
            wait::holds(left.is_empty(), || format!("{left:?}"))
        })
        .await
    })
    .await
}

/// Returns a spec with a sidecar that the other container waits for, and with hooks at the start of
/// both; the sidecar ends on request.
fn with_sidecar() -> Value {
    let line = "while [ ! -e /end ]; do sleep 0.1; done; rm /end; exit 1";
    let started = json!({ "exec": { "command": ["sh", "-c", "echo once >>/post-start"] } });
    let sidecar = json!({
        "restartPolicy": "Always",
        "startupProbe": { "exec": { "command": ["true"] }, "periodSeconds": 1 },
        "lifecycle": { "postStart": started },
    });
    let main = json!({ "lifecycle": { "postStart": started } });
    json!({
        "initContainers": [with(shell("sidecar", line), sidecar)],
        "containers": [with(shell("a", COUNT), main)],
    })
}

#[tokio::test]
async fn a_sidecar_comes_back_with_the_others_even_out_of_its_backoff() -> anyhow::Result<()> {
    case("sidecar", async |case| {
        case.create(sandbox(json!({}), with_sidecar())).await?;
        case.sandbox_ready("s").await?;
        // The second end is followed by a back-off of ten seconds, in which the suspend is
        // requested.
        for restarts in [1, 2] {
            case.sh("s", "sidecar", "touch /end").await?;
            let ended = |pod: &Pod| {
                let of = pod
                    .status
                    .iter()
                    .flat_map(|status| &status.init_container_statuses);
                let mut of = of.flatten().filter(|status| status.name == "sidecar");
                of.any(|status| {
                    let state = status.state.clone().unwrap_or_default();
                    let (waits, runs) = (state.waiting.is_some(), state.running.is_some());
                    let counted = status.restart_count == restarts;
                    if restarts == 1 {
                        counted && runs
                    } else {
                        counted || waits
                    }
                })
            };
            case.pod_until("s", "its sidecar has ended", LIMIT, ended)
                .await?;
        }
        let before = case.counted("s").await?;
        case.suspend("s").await?;
        case.run("s").await?;
        let after = case.counted("s").await?;
        ensure!(after >= before, "{before} → {after}");
        // The save came as soon as the kubelet had restarted the sidecar. So a suspension may have
        // cut off the sidecar's hook, as it does any exec.
        for (container, allowed) in [("sidecar", 0..=1), ("a", 1..=1)] {
            let lines = "cat /post-start 2>/dev/null | wc -l";
            let hooks: u32 = case.sh("s", container, lines).await?.trim().parse()?;
            ensure!(
                allowed.contains(&hooks),
                "{container}: its hook ran {hooks} times"
            );
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn strategy_stop_keeps_no_memory() -> anyhow::Result<()> {
    case("suspend-stop", async |case| {
        let annotations = json!({ "torpor.dev/suspension-strategy": "Stop" });
        case.create(sandbox(annotations, lean())).await?;
        let before = witness::ask(&case.sandbox_ready("s").await?).await?;
        case.suspend("s").await?;
        assert!(
            case.snapshots()
                .list(&Default::default())
                .await?
                .items
                .is_empty()
        );
        let after = witness::ask(&case.run("s").await?).await?;
        assert_ne!(after.secret, before.secret, "another life");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_frozen_sandbox_keeps_its_pod_and_is_paused() -> anyhow::Result<()> {
    case("suspend-freeze", async |case| {
        let annotations = json!({ "torpor.dev/suspension-strategy": "Freeze" });
        case.create(sandbox(annotations, lean())).await?;
        let first = case.sandbox_ready("s").await?;
        let before = witness::ask(&first).await?;
        case.set_mode("s", "Suspended").await?;
        case.sandbox_has("s", "Suspended", "True", "PodFrozen")
            .await?;
        let refused = case.kubectl.exec("s", "witness", &["true"]).await?;
        let words = format!("{refused:?}");
        assert!(words.contains("frozen"), "{words}");
        let second = case.run("s").await?;
        assert_eq!(uid(&first), uid(&second));
        witness::ask(&second).await?.goes_on_from(&before)
    })
    .await
}

#[tokio::test]
async fn a_sandbox_whose_runtime_cannot_save_is_stopped_and_its_lost_memory_is_reported()
-> anyhow::Result<()> {
    case("suspend-runc", async |case| {
        let annotations = json!({ "torpor.dev/suspension-strategy": "Hibernate" });
        let mut sandbox = sandbox(annotations, counting());
        if let Some(spec) = sandbox.pointer_mut("/spec/podTemplate/spec") {
            spec["runtimeClassName"] = Value::Null;
        }
        case.create(sandbox).await?;
        case.sandbox_ready("s").await?;
        case.suspend("s").await?;
        let sandbox = case
            .sandbox_has("s", "Hibernated", "False", "RuntimeNotCapable")
            .await?;
        let words = condition_of(&sandbox, "Hibernated").2;
        assert!(words.contains("memory was not kept"), "{words}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_snapshot_by_hand_is_the_start_of_a_copy() -> anyhow::Result<()> {
    case("suspend-copy", async |case| {
        case.create(sandbox(json!({}), rich())).await?;
        let pod = case.sandbox_ready("s").await?;
        let before = witness::ask(&pod).await?;
        case.snapshot("by-hand", "s").await?;
        witness::ask(&pod).await?.goes_on_from(&before)?;

        let mut copy = sandbox(json!({ "torpor.dev/restore-from": "by-hand" }), rich());
        copy["metadata"]["name"] = json!("copy");
        // The saved program knows its hostname.
        copy["spec"]["podTemplate"]["spec"]["hostname"] = json!("s");
        case.create(copy).await?;
        let copy = case.ready("copy").await?;
        witness::ask(&copy).await?.goes_on_from(&before)?;
        witness::ask(&pod).await?.goes_on_from(&before)
    })
    .await
}

#[tokio::test]
async fn an_unknown_snapshot_and_a_malformed_annotation_are_named() -> anyhow::Result<()> {
    case("suspend-words", async |case| {
        let annotations = json!({ "torpor.dev/restore-from": "nowhere" });
        case.create(sandbox(annotations, counting())).await?;
        let sandbox = case
            .sandbox_has("s", "Restored", "False", "SnapshotNotFound")
            .await?;
        assert!(condition_of(&sandbox, "Restored").2.contains("nowhere"));
        assert!(
            case.pods().get_opt("s").await?.is_none(),
            "nothing was started"
        );

        let annotations = json!({ "metadata": { "annotations": {
            "torpor.dev/restore-from": null, "torpor.dev/suspension-strategy": "Hibernat",
        }}});
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(annotations));
        case.sandboxes().patch("s", &parameters, &patch).await?;
        let sandbox = case
            .sandbox_has("s", "Hibernated", "False", "InvalidAnnotation")
            .await?;
        let words = condition_of(&sandbox, "Hibernated").2;
        for part in ["torpor.dev/suspension-strategy", "Hibernat", "Freeze"] {
            assert!(words.contains(part), "{part} in {words}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_damaged_image_is_refused_and_kept_and_a_cold_start_is_possible() -> anyhow::Result<()> {
    case("suspend-damaged", async |case| {
        case.create(sandbox(json!({}), lean())).await?;
        let pod = case.sandbox_ready("s").await?;
        let before = witness::ask(&pod).await?;
        case.suspend("s").await?;
        let image = case.node.image_of(&case.namespace, &uid(&pod))?;
        let pages = image.join("pages.img");
        let whole = std::fs::read(&pages)?;
        let mut flipped = whole.clone();
        let middle = flipped.len() / 2;
        flipped[middle] ^= 1;
        std::fs::write(&pages, &flipped)?;

        case.set_mode("s", "Running").await?;
        let sandbox = case
            .sandbox_has("s", "Restored", "False", "ImageCorrupt")
            .await?;
        let words = condition_of(&sandbox, "Restored").2;
        assert!(words.contains("pages.img"), "{words}");
        assert_eq!(std::fs::read(&pages)?, flipped, "the image is kept");

        // After the repair the same Pod continues: the kubelet tries again by itself.
        std::fs::write(&pages, &whole)?;
        let pod = case.sandbox_ready("s").await?;
        witness::ask(&pod).await?.goes_on_from(&before)?;

        case.suspend("s").await?;
        let image = case.node.image_of(&case.namespace, &uid(&pod))?;
        std::fs::File::options()
            .write(true)
            .open(image.join("pages.img"))?
            .set_len(4096)?;
        let patch = Patch::Merge(json!({
            "metadata": { "annotations": { "torpor.dev/on-restore-failure": "ColdStart" } },
            "spec": { "operatingMode": "Running" },
        }));
        let parameters = PatchParams::default();
        case.sandboxes().patch("s", &parameters, &patch).await?;
        let cold = case.sandbox_ready("s").await?;
        assert_ne!(witness::ask(&cold).await?.secret, before.secret);
        let sandbox = case
            .sandbox_has("s", "Restored", "False", "ColdStarted")
            .await?;
        assert!(condition_of(&sandbox, "Restored").2.contains("pages.img"));
        assert_eq!(cold.name_any(), "s");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn an_image_of_another_pod_spec_is_refused_and_kept_until_the_spec_fits_again()
-> anyhow::Result<()> {
    case("suspend-spec", async |case| {
        case.create(sandbox(json!({}), lean())).await?;
        let pod = case.sandbox_ready("s").await?;
        let before = witness::ask(&pod).await?;
        case.suspend("s").await?;
        let running_with = async |spec: Value| {
            let change =
                json!({ "spec": { "operatingMode": "Running", "podTemplate": { "spec": spec } } });
            case.patch("s", change).await
        };
        let mut other = lean();
        other["containers"][0]["workingDir"] = json!("/tmp");
        let name = other["containers"][0]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        running_with(other).await?;
        let sandbox = case
            .sandbox_has("s", "Restored", "False", "SpecMismatch")
            .await?;
        let words = condition_of(&sandbox, "Restored").2;
        assert!(words.contains(&name), "{words}");

        case.suspend("s").await?;
        running_with(lean()).await?;
        let pod = case.sandbox_ready("s").await?;
        witness::ask(&pod).await?.goes_on_from(&before)
    })
    .await
}

/// Changes the fingerprint of an image as if another node had made it; the refusal must name the
/// difference.
async fn is_refused_and_kept(
    case: &Case,
    change: impl FnOnce(&mut Fingerprint),
    named: &str,
) -> anyhow::Result<()> {
    case.create(sandbox(json!({}), lean())).await?;
    let pod = case.sandbox_ready("s").await?;
    let before = witness::ask(&pod).await?;
    case.suspend("s").await?;
    let image = case.node.image_of(&case.namespace, &uid(&pod))?;
    let path = image.join("manifest.json");
    let whole = std::fs::read(&path)?;
    let (mut manifest, _) = Manifest::decode(&whole)?;
    change(&mut manifest.fingerprint);
    std::fs::write(&path, manifest.encode()?.0)?;

    case.set_mode("s", "Running").await?;
    let sandbox = case
        .sandbox_has("s", "Restored", "False", "FingerprintMismatch")
        .await?;
    let words = condition_of(&sandbox, "Restored").2;
    ensure!(words.contains(named), "{named:?}: {words}");

    // Once the fingerprint fits, the same Pod continues: the kubelet tries again by itself.
    std::fs::write(&path, &whole)?;
    let pod = case.sandbox_ready("s").await?;
    witness::ask(&pod).await?.goes_on_from(&before)
}

#[tokio::test]
async fn an_image_of_another_runsc_is_refused_and_kept() -> anyhow::Result<()> {
    case("foreign-runsc", async |case| {
        let other = |of: &mut Fingerprint| of.runsc_digest = format!("blake3:{}", "0".repeat(64));
        is_refused_and_kept(case, other, "runsc").await
    })
    .await
}

#[tokio::test]
async fn an_image_of_another_platform_is_refused_and_kept() -> anyhow::Result<()> {
    case("foreign-platform", async |case| {
        let other = |of: &mut Fingerprint| of.platform = "kvm".to_owned();
        is_refused_and_kept(case, other, "platform").await
    })
    .await
}

#[tokio::test]
async fn an_image_of_another_processor_is_refused_and_kept() -> anyhow::Result<()> {
    case("foreign-processor", async |case| {
        let other = |of: &mut Fingerprint| {
            of.cpu_features.push("zz_not_of_this_world".to_owned());
            of.cpu_features_digest = format!("blake3:{}", "0".repeat(64));
        };
        is_refused_and_kept(case, other, "zz_not_of_this_world").await
    })
    .await
}
