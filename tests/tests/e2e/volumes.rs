//! Volumes: a shared volume is the same for all containers, and a mounted one has the right
//! content.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use torpor_api::annotations::HIBERNATE;
use torpor_tests::case::{Case, START_LIMIT, case};
use torpor_tests::pods::{mounts, pod, shell, with};
use torpor_tests::sandboxes::sandbox;
use torpor_tests::wait;

/// Time for an eviction: the kubelet measures volumes once a minute.
const EVICTION: Duration = Duration::from_secs(180);
const IDLE: &str = "exec sleep 1000000";

#[tokio::test]
async fn containers_share_empty_dirs_on_disk_and_in_memory() -> anyhow::Result<()> {
    case("emptydir", async |case| {
        let both = json!({ "volumeMounts": mounts(&[("disk", "/disk"), ("memory", "/memory")]) });
        let pod = pod("p", json!({
            "initContainers": [with(shell("init", "echo init >/disk/init; echo init >/memory/init"), both.clone())],
            "containers": [with(shell("a", IDLE), both.clone()), with(shell("b", IDLE), both)],
            "volumes": [
                { "name": "disk", "emptyDir": {} },
                { "name": "memory", "emptyDir": { "medium": "Memory" } },
            ],
        }));
        case.start(pod).await?;
        for dir in ["/disk", "/memory"] {
            case.sh("p", "a", &format!("echo from a >{dir}/a; mkdir {dir}/sub; ln -s a {dir}/link")).await?;
            let seen = case.sh("p", "b", &format!("cat {dir}/init {dir}/link; ls -d {dir}/sub")).await?;
            assert_eq!(seen, format!("init\nfrom a\n{dir}/sub"));
            case.sh("p", "b", &format!("rm {dir}/a; echo from b >{dir}/b")).await?;
            assert_eq!(case.sh("p", "a", &format!("cat {dir}/b; ls {dir}")).await?, "from b\nb\ninit\nlink\nsub");
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn config_maps_secrets_and_projected_volumes_are_mounted_and_updated() -> anyhow::Result<()> {
    case("config", async |case| {
        let config = |value: &str| json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "config" }, "data": { "key": value },
        });
        case.create(config("one")).await?;
        case.create(json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "secret" }, "stringData": { "word": "hush" },
        }))
        .await?;
        let container = with(
            shell("a", IDLE),
            json!({ "volumeMounts": mounts(&[("config", "/config"), ("secret", "/secret"), ("all", "/all")]) }),
        );
        let pod = pod("p", json!({
            "containers": [container],
            "volumes": [
                { "name": "config", "configMap": { "name": "config" } },
                { "name": "secret", "secret": { "secretName": "secret", "defaultMode": 256 } },
                { "name": "all", "projected": { "sources": [
                    { "configMap": { "name": "config" } },
                    { "downwardAPI": { "items": [{ "path": "name", "fieldRef": { "fieldPath": "metadata.name" } }] } },
                    { "serviceAccountToken": { "path": "token" } },
                ]}},
            ],
        }));
        case.start(pod).await?;
        let seen = case.sh("p", "a", "cat /config/key /secret/word /all/key /all/name; test -s /all/token").await?;
        assert_eq!(seen, "onehushonep");
        let mode = case.sh("p", "a", "stat -Lc %a /secret/word").await?;
        assert_eq!(mode, "400");
        let read_only = case.exec("p", "a", &["sh", "-c", "echo x >/config/new"]).await?;
        assert_ne!(read_only.code, 0, "a ConfigMap is read-only");

        let maps: Api<ConfigMap> = case.api();
        maps.patch("config", &PatchParams::default(), &Patch::Merge(config("two"))).await?;
        // The kubelet looks at a Pod's volumes once a minute, and when the Pod is changed.
        case.annotate("p", "changed", Some("now")).await?;
        wait::until("the new value is there", START_LIMIT, async || {
            let seen = case.sh("p", "a", "cat /config/key /all/key").await?;
            wait::holds(seen == "twotwo", || seen.clone())
        })
        .await
    })
    .await
}

#[tokio::test]
async fn a_persistent_volume_outlives_its_pod() -> anyhow::Result<()> {
    case("pvc", async |case| {
        case.create(json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "data" },
            "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Mi" } } },
        }))
        .await?;
        let spec = json!({
            "containers": [with(shell("a", IDLE), json!({ "volumeMounts": mounts(&[("data", "/data")]) }))],
            "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": "data" } }],
        });
        case.start(pod("first", spec.clone())).await?;
        case.sh("first", "a", "echo kept >/data/file; sync").await?;
        case.delete_pod("first", std::time::Duration::from_secs(20)).await?;
        case.start(pod("second", spec)).await?;
        assert_eq!(case.sh("second", "a", "cat /data/file").await?, "kept");
        Ok(())
    })
    .await
}

/// As with runc, the kubelet makes the directories and sets owner, group and size there.
#[tokio::test]
async fn volumes_have_the_group_and_the_size_that_the_pod_asks_for() -> anyhow::Result<()> {
    case("fsgroup", async |case| {
        let container = json!({
            "securityContext": { "runAsUser": 1000 },
            "volumeMounts": mounts(&[("disk", "/disk"), ("memory", "/memory")]),
        });
        let volumes = json!([
            { "name": "disk", "emptyDir": {} },
            { "name": "memory", "emptyDir": { "medium": "Memory", "sizeLimit": "8Mi" } },
        ]);
        let spec = json!({
            "containers": [with(shell("a", IDLE), container)],
            "securityContext": {
                "fsGroup": 3003, "fsGroupChangePolicy": "OnRootMismatch",
                "supplementalGroups": [4004], "supplementalGroupsPolicy": "Strict",
            },
            "volumes": volumes,
        });
        case.create(sandbox("s", spec)).await?;
        case.sandbox_ready("s").await?;
        volumes_are_as_asked_for(case, "made").await?;
        let hibernate = |value| json!({ "metadata": { "annotations": { HIBERNATE: value } } });
        case.patch("s", hibernate("true")).await?;
        case.asleep("s").await?;
        case.patch("s", hibernate("false")).await?;
        volumes_are_as_asked_for(case, "woken").await?;
        case.suspend("s").await?;
        case.resume("s").await?;
        volumes_are_as_asked_for(case, "resumed").await
    })
    .await
}

async fn volumes_are_as_asked_for(case: &Case, file: &str) -> anyhow::Result<()> {
    let owners = format!(
        "touch /disk/{file} /memory/{file}; stat -c '%u:%g' /disk /memory /disk/{file} /memory/{file}"
    );
    let seen = case.sh("s", "a", &owners).await?;
    assert_eq!(seen, "0:3003\n0:3003\n1000:3003\n1000:3003");
    let setgid = "for d in /disk /memory; do stat -c %a $d | tail -c 5; done";
    let modes = case.sh("s", "a", setgid).await?;
    for mode in modes.lines() {
        let bits = u32::from_str_radix(mode, 8)?;
        assert_eq!(bits & 0o2777, 0o2777, "{mode}");
    }
    let groups = case.sh("s", "a", "id -G").await?;
    assert_eq!(groups, "0 3003 4004");
    // 24 MiB do not fit, 8 MiB do.
    let fill = "dd if=/dev/zero of=/memory/big bs=1M count=24 2>&1 | grep -c 'No space left'; stat -c %s /memory/big; rm /memory/big; df -k /memory | tail -n 1 | awk '{print $2}'";
    let seen = case.sh("s", "a", fill).await?;
    assert_eq!(seen, "1\n8388608\n8192");
    Ok(())
}

/// The files of an emptyDir on disk are in a file of its directory, which the kubelet counts.
#[tokio::test]
async fn a_pod_that_fills_its_disk_volume_beyond_the_limit_is_evicted() -> anyhow::Result<()> {
    case("disklimit", async |case| {
        let mounting = json!({ "volumeMounts": mounts(&[("disk", "/disk")]) });
        let fill = "dd if=/dev/zero of=/disk/big bs=1M count=24; exec sleep 1000000";
        let spec = json!({
            "containers": [with(shell("a", fill), mounting)],
            "volumes": [{ "name": "disk", "emptyDir": { "sizeLimit": "8Mi" } }],
        });
        case.create(pod("p", spec)).await?;
        let evicted = |pod: &Pod| {
            let status = pod.status.as_ref();
            let reason = status.and_then(|status| status.reason.as_deref());
            reason == Some("Evicted")
        };
        let pod = case
            .pod_until("p", "it is evicted", EVICTION, evicted)
            .await?;
        let message = pod
            .status
            .and_then(|status| status.message)
            .unwrap_or_default();
        assert!(message.contains("disk"), "{message}");
        Ok(())
    })
    .await
}
