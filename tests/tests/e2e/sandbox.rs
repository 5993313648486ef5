//! Sandboxes: upstream's conditions during a suspension, the state that a resumed Pod finds, and
//! other ends of a suspension.

use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use torpor_api::node::SandboxReport;
use torpor_api::reasons::plan;
use torpor_api::{Sandbox, SandboxNode};
use torpor_tests::case::{Case, case, uid};
use torpor_tests::fullness::FullDisk;
use torpor_tests::pods::{BUSYBOX, COUNT, PYTHON, mounts, shell, with};
use torpor_tests::retag::Tag;
use torpor_tests::sandboxes::{LIMIT, condition_of, conditions, sandbox};
use torpor_tests::sleep::restarts;
use torpor_tests::{wait, witness};

fn counting() -> Value {
    sandbox("s", json!({ "containers": [shell("a", COUNT)] }))
}

async fn counted(case: &Case) -> anyhow::Result<u64> {
    Ok(case.written("s", "a", "/n").await?.parse()?)
}

async fn snapshots_are_gone(case: &Case) -> anyhow::Result<()> {
    let words = "the Suspend snapshot is deleted";
    wait::none(&case.snapshots(), words, LIMIT).await
}

/// Returns the types of a Sandbox's conditions that are upstream's.
fn of_upstream(sandbox: &Sandbox) -> Vec<&str> {
    let known = ["Ready", "Suspended", "PodScheduled", "Finished"];
    let types = conditions(sandbox)
        .iter()
        .map(|condition| condition.type_.as_str());
    let mut types: Vec<&str> = types.filter(|kind| known.contains(kind)).collect();
    types.sort_unstable();
    types
}

/// The fields are in the Pod's spec, in an object of it, and in an object of that: the API server
/// prunes each level by itself.
#[tokio::test]
async fn fields_of_a_newer_kubernetes_are_kept_by_the_apiserver() -> anyhow::Result<()> {
    case("tomorrow", async |case| {
        let mut container = shell("a", COUNT);
        container["fieldOfTomorrow"] = json!("b");
        container["securityContext"] = json!({ "fieldOfTomorrow": { "deep": true } });
        let spec = json!({ "fieldOfTomorrow": ["a"], "containers": [container] });
        let mut manifest = sandbox("s", spec.clone());
        // The Pod's own API does not know the fields either, so no Pod is made.
        manifest["spec"]["operatingMode"] = json!("Suspended");
        case.create(manifest).await?;
        let sandboxes: Api<Sandbox> = case.api();
        let stored = serde_json::to_value(sandboxes.get("s").await?)?;
        let stored = &stored["spec"]["podTemplate"]["spec"];
        anyhow::ensure!(stored["fieldOfTomorrow"] == json!(["a"]), "{stored}");
        for path in [
            "/containers/0/fieldOfTomorrow",
            "/containers/0/securityContext/fieldOfTomorrow",
        ] {
            anyhow::ensure!(
                stored.pointer(path) == spec.pointer(path),
                "{path}: {stored}"
            );
        }
        Ok(())
    })
    .await
}

/// Upstream's rule applies in the API server.
#[tokio::test]
async fn a_name_that_no_service_can_have_is_refused_where_one_is_asked_for() -> anyhow::Result<()> {
    case("longname", async |case| {
        let name = "n".repeat(64);
        let with_service = |wanted: bool| {
            let made = sandbox(&name, json!({ "containers": [shell("a", COUNT)] }));
            // No Pod has to run for this test.
            let spec = json!({ "service": wanted, "operatingMode": "Suspended" });
            with(made, json!({ "spec": spec }))
        };
        let refused = case.create(with_service(true)).await;
        let words = refused.map_or_else(|error| format!("{error:#}"), |()| "made".to_owned());
        anyhow::ensure!(words.contains("at most 63 characters"), "{words}");
        case.create(with_service(false)).await
    })
    .await
}

/// Checks that the API server refuses the change of the Sandbox's spec, with upstream's message.
async fn is_refused_as_immutable(case: &Case, name: &str, spec: Value) -> anyhow::Result<()> {
    let changed = case.patch(name, json!({ "spec": spec })).await;
    let Err(error) = changed else {
        anyhow::bail!("{name} was changed: {spec}");
    };
    let said = format!("{error:#}");
    anyhow::ensure!(
        said.contains("volumeClaimTemplates is immutable"),
        "{name}, {spec}: {said}"
    );
    Ok(())
}

/// Upstream's rule applies in the API server.
#[tokio::test]
async fn a_sandbox_keeps_the_volume_claim_templates_that_it_was_made_with() -> anyhow::Result<()> {
    case("immutable", async |case| {
        let templates = |size: &str| {
            json!({ "volumeClaimTemplates": [{
                "metadata": { "name": "data" },
                "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": size } } },
            }] })
        };
        for (name, spec) in [("without", json!({})), ("with", templates("1Mi"))] {
            let made = sandbox(name, json!({ "containers": [shell("a", COUNT)] }));
            // No Pod has to run for this test.
            let spec = with(spec, json!({ "operatingMode": "Suspended" }));
            case.create(with(made, json!({ "spec": spec }))).await?;
        }
        let removed = json!({ "volumeClaimTemplates": null });
        is_refused_as_immutable(case, "without", templates("1Mi")).await?;
        is_refused_as_immutable(case, "with", templates("2Mi")).await?;
        is_refused_as_immutable(case, "with", removed).await?;

        // Another change passes, also if it contains the same templates.
        let other = json!({ "shutdownPolicy": "Delete" });
        case.patch("without", json!({ "spec": other })).await?;
        let same = with(templates("1Mi"), other);
        case.patch("with", json!({ "spec": same })).await?;
        for (name, kept) in [("without", None), ("with", Some("1Mi"))] {
            let spec = serde_json::to_value(case.sandboxes().get(name).await?.spec)?;
            assert_eq!(spec["shutdownPolicy"], "Delete", "{name}");
            let size = spec.pointer("/volumeClaimTemplates/0/spec/resources/requests/storage");
            assert_eq!(size.and_then(Value::as_str), kept, "{name}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_conditions_of_a_suspension_are_upstreams() -> anyhow::Result<()> {
    case("conditions", async |case| {
        // The Pod takes its time to end, so that the conditions meanwhile can be seen.
        let line = "trap 'sleep 3; exit 0' TERM; while true; do sleep 0.1; done";
        let spec = json!({ "terminationGracePeriodSeconds": 20, "containers": [shell("a", line)] });
        let mut manifest = sandbox("s", spec);
        manifest["metadata"]["annotations"] = json!({ "torpor.dev/suspension-strategy": "Stop" });
        case.create(manifest).await?;
        case.sandbox_ready("s").await?;
        case.set_mode("s", "Suspended").await?;
        let going = case
            .sandbox_has("s", "Suspended", "False", "PodTerminating")
            .await?;
        assert_eq!(
            condition_of(&going, "Suspended").2,
            "Pod is terminating. Sandbox is suspending"
        );
        assert_eq!(
            condition_of(&going, "Ready"),
            ("False", "SandboxSuspended", "Sandbox is suspending")
        );
        let gone = case
            .sandbox_has("s", "Suspended", "True", "PodTerminated")
            .await?;
        assert_eq!(
            condition_of(&gone, "Suspended").2,
            "Pod has been terminated. Sandbox is suspended"
        );
        assert_eq!(
            condition_of(&gone, "Ready"),
            ("False", "SandboxSuspended", "Sandbox is suspended")
        );
        assert_eq!(of_upstream(&gone), ["Ready", "Suspended"]);
        case.set_mode("s", "Running").await?;
        let back = case
            .sandbox_has("s", "Ready", "True", "DependenciesReady")
            .await?;
        assert_eq!(
            condition_of(&back, "Suspended"),
            ("False", "NotSuspended", "Sandbox is not suspended")
        );
        assert_eq!(of_upstream(&back), ["PodScheduled", "Ready", "Suspended"]);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_saved_sandbox_has_the_same_upstream_conditions_as_a_stopped_one() -> anyhow::Result<()> {
    case("alike", async |case| {
        let mut stopped = sandbox("stopped", json!({ "containers": [shell("a", COUNT)] }));
        stopped["metadata"]["annotations"] = json!({ "torpor.dev/suspension-strategy": "Stop" });
        case.create(counting()).await?;
        case.create(stopped).await?;
        let in_upstreams_words = |sandbox: &Sandbox| {
            let types = of_upstream(sandbox);
            let words = |kind: &&str| {
                let (status, reason, message) = condition_of(sandbox, kind);
                format!("{kind}={status} {reason}: {message}")
            };
            types.iter().map(words).collect::<Vec<_>>()
        };
        for mode in ["Running", "Suspended", "Running"] {
            let mut told = Vec::new();
            for name in ["s", "stopped"] {
                let sandbox = if mode == "Suspended" {
                    case.suspend(name).await?
                } else {
                    case.run(name).await?;
                    case.sandboxes().get(name).await?
                };
                told.push(in_upstreams_words(&sandbox));
            }
            assert_eq!(told[0], told[1], "{mode}");
            assert!(told[0].len() >= 2, "{told:?}");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_resumed_pod_has_its_volume_its_name_and_the_current_configuration() -> anyhow::Result<()>
{
    case("volumes", async |case| {
        let config = |value: &str| json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "config" }, "data": { "key": value },
        });
        let secret = |value: &str| json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "secret" }, "stringData": { "word": value },
        });
        case.create(config("old")).await?;
        case.create(secret("old")).await?;
        let witness = with(
            witness::container(2, &["/data/file"]),
            json!({ "volumeMounts": mounts(&[("data", "/data"), ("config", "/config"), ("secret", "/secret"), ("about", "/about")]) }),
        );
        let mut manifest = sandbox("s", json!({
            // The default of a Sandbox whose network is open.
            "dnsPolicy": "ClusterFirst",
            "containers": [witness],
            "volumes": [
                { "name": "config", "configMap": { "name": "config" } },
                { "name": "secret", "secret": { "secretName": "secret" } },
                { "name": "about", "projected": { "sources": [
                    { "downwardAPI": { "items": [{ "path": "uid", "fieldRef": { "fieldPath": "metadata.uid" } }] } },
                    { "serviceAccountToken": { "path": "token" } },
                ]}},
            ],
        }));
        manifest["spec"]["volumeClaimTemplates"] = json!([{
            "metadata": { "name": "data" },
            "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Mi" } } },
        }]);
        case.create(manifest).await?;
        let before = witness::ask(&case.sandbox_ready("s").await?).await?;
        assert_eq!(before.hostname, "s");
        let read = async |path: &str| case.sh("s", "witness", &format!("cat {path}")).await;
        assert_eq!(read("/config/key /secret/word").await?, "oldold");
        let token = read("/about/token").await?;
        case.sh("s", "witness", "echo kept >/dev/shm/word").await?;
        case.suspend("s").await?;
        let change = kube::api::Patch::Merge(config("new"));
        let maps: kube::Api<k8s_openapi::api::core::v1::ConfigMap> = case.api();
        maps.patch("config", &kube::api::PatchParams::default(), &change).await?;
        let change = kube::api::Patch::Merge(secret("new"));
        let secrets: kube::Api<k8s_openapi::api::core::v1::Secret> = case.api();
        secrets.patch("secret", &kube::api::PatchParams::default(), &change).await?;
        let pod = case.run("s").await?;
        witness::ask(&pod).await?.goes_on_from(&before)?;
        assert_eq!(read("/config/key /secret/word").await?, "newnew");
        assert_eq!(read("/about/uid").await?, uid(&pod));
        assert_ne!(read("/about/token").await?, token, "the old Pod's token");
        let hosts = read("/etc/hosts").await?;
        assert!(hosts.contains(&witness::address(&pod)?), "{hosts}");
        let servers = read("/etc/resolv.conf").await?;
        assert!(servers.contains("svc.cluster.local"), "{servers}");
        assert_eq!(read("/dev/shm/word").await?, "kept");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_suspension_that_is_taken_back_in_time_keeps_the_pod() -> anyhow::Result<()> {
    case("takenback", async |case| {
        case.create(counting()).await?;
        let pod = case.sandbox_ready("s").await?;
        let before = counted(case).await?;
        // The disk is full: the save fails, and the Pod waits.
        let dir = case.node.images_dir(&case.namespace);
        let disk = FullDisk::over(dir, 64 << 10)?;
        case.set_mode("s", "Suspended").await?;
        let failed = case
            .sandbox_has("s", "Hibernated", "False", "SaveFailed")
            .await?;
        assert!(
            ["DiskFull", "enlarge the disk"]
                .iter()
                .all(|word| condition_of(&failed, "Hibernated").2.contains(word)),
            "{failed:?}"
        );
        case.set_mode("s", "Running").await?;
        let same = case.sandbox_ready("s").await?;
        assert_eq!((uid(&same), restarts(&same)), (uid(&pod), 0));
        assert!(counted(case).await? >= before);
        snapshots_are_gone(case).await?;
        drop(disk);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_sandbox_hibernates_in_place_on_request_and_stays_ready() -> anyhow::Result<()> {
    case("inplace", async |case| {
        case.create(counting()).await?;
        let pod = case.sandbox_ready("s").await?;
        let before = counted(case).await?;
        let wish = |value: Value| json!({ "metadata": { "annotations": { "torpor.dev/hibernate": value } } });
        case.patch("s", wish(json!("true"))).await?;
        let asleep = case.sandbox_has("s", "Hibernated", "True", "Hibernated").await?;
        assert_eq!(condition_of(&asleep, "Ready").0, "True");
        assert_eq!(condition_of(&asleep, "Suspended").0, "False");
        assert_eq!(case.node.sandbox_processes(&uid(&pod))?, []);
        case.patch("s", wish(Value::Null)).await?;
        case.sandbox_has("s", "Hibernated", "False", "Awake").await?;
        let same = case.sandbox_ready("s").await?;
        assert_eq!((uid(&same), restarts(&same)), (uid(&pod), 0));
        assert!(counted(case).await? >= before);
        Ok(())
    })
    .await
}

/// Waits until the node's report about a Pod's sandbox is as expected; returns the report.
async fn told(
    case: &Case,
    pod: &Pod,
    words: &str,
    wish: impl Fn(&SandboxReport) -> bool,
) -> anyhow::Result<SandboxReport> {
    let nodes: Api<SandboxNode> = Api::all(case.client());
    let name = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
    let name = name.unwrap_or_default();
    wait::object(nodes, &name, words, LIMIT, |node| {
        let found = node.and_then(|node| node.sandbox(&uid(pod)).cloned());
        let last = format!("{found:?}");
        found.filter(&wish).ok_or(last)
    })
    .await
}

#[tokio::test]
async fn the_node_reports_the_sizes_of_a_sleep_and_how_the_wake_went() -> anyhow::Result<()> {
    case("told", async |case| {
        case.create(counting()).await?;
        let pod = case.sandbox_ready("s").await?;
        let wish = |value: Value| json!({ "metadata": { "annotations": { "torpor.dev/hibernate": value } } });
        case.patch("s", wish(json!("true"))).await?;
        case.sandbox_has("s", "Hibernated", "True", "Hibernated").await?;
        let asleep = told(case, &pod, "the node reports the sleep", |told| {
            told.image_bytes.is_some() && told.reasons.iter().any(|why| why.reason == plan::SLEEPING)
        })
        .await?;
        assert!(asleep.image_bytes > Some(0), "{asleep:?}");
        let (before, after) = (asleep.memory_awake_bytes, asleep.memory_asleep_bytes);
        assert!(before > after && after.is_some(), "{asleep:?}");
        assert_eq!(asleep.last_wake, None);
        // An exec wakes the sandbox, which then stays awake.
        counted(case).await?;
        case.patch("s", wish(Value::Null)).await?;
        let words = "the node reports the wake";
        let awake = told(case, &pod, words, |told| {
            told.last_wake.is_some() && told.image_bytes.is_none()
        })
        .await?;
        let wake = awake.last_wake.context("the report has a wake")?;
        assert_eq!(wake.cause, "Exec");
        assert!(wake.duration_micros > 0, "{wake:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_sandbox_that_hibernates_in_place_can_be_suspended_and_comes_back() -> anyhow::Result<()>
{
    case("both", async |case| {
        case.create(counting()).await?;
        case.sandbox_ready("s").await?;
        let before = counted(case).await?;
        let wish = |value: Value| json!({ "metadata": { "annotations": { "torpor.dev/hibernate": value } } });
        case.patch("s", wish(json!("true"))).await?;
        case.sandbox_has("s", "Hibernated", "True", "Hibernated").await?;
        case.suspend("s").await?;
        case.patch("s", wish(Value::Null)).await?;
        case.resume("s").await?;
        let after = counted(case).await?;
        assert!(after >= before, "{before} → {after}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_tag_that_was_moved_does_not_change_what_a_sandbox_resumes_with() -> anyhow::Result<()> {
    case("moved", async |case| {
        let name = format!("torpor.dev/{}:test", case.namespace);
        let tag = Tag::new(&case.kubectl.program, name, BUSYBOX)?;
        let container = with(shell("a", COUNT), json!({ "image": tag.name }));
        case.create(sandbox("s", json!({ "containers": [container] })))
            .await?;
        case.sandbox_ready("s").await?;
        let before = counted(case).await?;
        case.suspend("s").await?;
        tag.point_to(PYTHON)?;
        let pod = case.resume("s").await?;
        let after = counted(case).await?;
        assert!(after >= before, "{before} → {after}");
        let python = case.exec("s", "a", &["ls", "/usr/bin/python3"]).await?;
        assert_ne!(python.code, 0, "it has the files of the old image");
        let image = pod
            .spec
            .unwrap_or_default()
            .containers
            .remove(0)
            .image
            .unwrap_or_default();
        assert!(
            image.contains("sha256:"),
            "the Pod names the image that was saved: {image}"
        );
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_sandbox_past_its_shutdown_time_is_deleted_with_its_image() -> anyhow::Result<()> {
    case("shutdown", async |case| {
        case.create(counting()).await?;
        let pod = uid(&case.sandbox_ready("s").await?);
        case.suspend("s").await?;
        case.node.image_of(&case.namespace, &pod)?;
        let now = k8s_openapi::jiff::Timestamp::now();
        let spec = json!({ "shutdownTime": now.to_string(), "shutdownPolicy": "Delete" });
        case.patch("s", json!({ "spec": spec })).await?;
        wait::until("Sandbox and image are gone", LIMIT, async || {
            let sandbox = case.sandboxes().get_opt("s").await?;
            let images = case.node.images_of(&case.namespace, &pod);
            wait::holds(sandbox.is_none() && images.is_empty(), || {
                format!("{sandbox:?} {images:?}")
            })
        })
        .await
    })
    .await
}

#[tokio::test]
async fn a_pod_that_is_deleted_under_its_sandbox_starts_anew_and_not_from_an_image()
-> anyhow::Result<()> {
    case("podgone", async |case| {
        case.create(sandbox(
            "s",
            json!({ "containers": [witness::container(1, &[])] }),
        ))
        .await?;
        let pod = case.sandbox_ready("s").await?;
        let before = witness::ask(&pod).await?;
        case.suspend("s").await?;
        let pod = case.resume("s").await?;
        witness::ask(&pod).await?.goes_on_from(&before)?;
        // The image of this resume is stale now.
        case.delete_pod_at_once("s").await?;
        let another = wait::object(case.pods(), "s", "another Pod", LIMIT, |found| {
            found
                .filter(|found| uid(found) != uid(&pod))
                .ok_or_else(|| "not yet".to_owned())
        })
        .await?;
        let another = case.ready(&another.name_any()).await?;
        assert_ne!(
            witness::ask(&another).await?.secret,
            before.secret,
            "another life"
        );
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_deleted_sandbox_leaves_nothing_on_the_node() -> anyhow::Result<()> {
    case("gone", async |case| {
        case.create(counting()).await?;
        let pod = case.sandbox_ready("s").await?;
        case.suspend("s").await?;
        let resumed = case.resume("s").await?;
        let nodes = [&pod, &resumed].map(|pod| {
            torpor_tests::remains::Footprint::take(&case.node, &case.namespace, &uid(pod))
        });
        case.sandboxes()
            .delete("s", &kube::api::DeleteParams::default())
            .await?;
        for footprint in nodes {
            let footprint = footprint?;
            wait::until("nothing is left", Duration::from_secs(40), async || {
                let left = [
                    footprint.of_sandbox(&case.node),
                    footprint.of_memory(&case.node),
                ]
                .concat();
                wait::holds(left.is_empty(), || format!("{left:#?}"))
            })
            .await?;
        }
        Ok(())
    })
    .await
}
