//! Volumes: what is shared is the same for all containers, what is mounted has the right content.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use torpor_tests::case::{START_LIMIT, case};
use torpor_tests::pods::{mounts, pod, shell, with};
use torpor_tests::wait;

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
