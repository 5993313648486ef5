//! Upstream's Python SDK, unmodified, on sandboxes whose image does not contain the runtime: an
//! annotation injects it.

use k8s_openapi::api::core::v1::Namespace;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use torpor_tests::case::{Case, case};
use torpor_tests::pods::{BUSYBOX, mounts, pod_spec};
use torpor_tests::pools::extension;
use torpor_tests::sdk;

/// Shell line that counts ten times a second in a variable, and writes the number into its working
/// directory.
const COUNT: &str = "n=0; while true; do n=$((n+1)); echo $n >n.new; mv n.new n; sleep 0.1; done";

/// Returns a Pod as the profile `restricted` requires it: no root, and nothing writable but a
/// volume.
fn restricted(volume: &str) -> Value {
    json!({
        "securityContext": {
            "runAsNonRoot": true, "runAsUser": 1000, "fsGroup": 1000,
            "seccompProfile": { "type": "RuntimeDefault" },
        },
        "containers": [{
            "name": "a", "image": BUSYBOX, "imagePullPolicy": "Never",
            "command": ["sh", "-c"], "args": [COUNT], "workingDir": "/data",
            "volumeMounts": mounts(&[(volume, "/data")]),
            "securityContext": {
                "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
                "capabilities": { "drop": ["ALL"] },
            },
        }],
    })
}

/// Creates the template `t` with its pool `w` of `replicas` members that wait for claims.
///
/// The template itself asks for the runtime.
async fn pool(case: &Case, replicas: u32) -> anyhow::Result<()> {
    let mut spec = pod_spec(restricted("work"));
    spec["volumes"] = json!([{ "name": "work", "emptyDir": {} }]);
    let mut template = extension(
        "SandboxTemplate",
        "t",
        json!({ "podTemplate": { "spec": spec } }),
    );
    template["metadata"]["annotations"] = json!({ "torpor.dev/inject-runtime": "true" });
    case.create(template).await?;
    let pool = json!({ "replicas": replicas, "sandboxTemplateRef": { "name": "t" } });
    case.create(extension("SandboxWarmPool", "w", pool)).await?;
    case.pool_is_ready("w", replicas).await
}

/// Creates the template `tv`, whose claims may change the volume and add variables, with its empty
/// pool `v`.
///
/// The pod template asks for the runtime.
async fn pool_with_volumes(case: &Case) -> anyhow::Result<()> {
    let mut spec = pod_spec(restricted("data"));
    // The volumes of the development cluster's provisioner belong to root; fsGroup does not change
    // that.
    spec["securityContext"] = json!({});
    let claim = json!({
        "metadata": { "name": "data" },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "16Mi" } } },
    });
    let template = json!({
        "podTemplate": {
            "metadata": { "annotations": { "torpor.dev/inject-runtime": "true" } },
            "spec": spec,
        },
        "volumeClaimTemplates": [claim],
        "volumeClaimTemplatesPolicy": "Overrides",
        "envVarsInjectionPolicy": "Allowed",
    });
    case.create(extension("SandboxTemplate", "tv", template))
        .await?;
    let pool = json!({ "replicas": 0, "sandboxTemplateRef": { "name": "tv" } });
    case.create(extension("SandboxWarmPool", "v", pool)).await
}

/// Makes the namespace refuse Pods that do not follow the profile, the injected container included.
async fn restrict(case: &Case) -> anyhow::Result<()> {
    let namespaces: Api<Namespace> = Api::all(case.client());
    let label =
        json!({ "metadata": { "labels": { "pod-security.kubernetes.io/enforce": "restricted" } } });
    namespaces
        .patch(
            &case.namespace,
            &PatchParams::default(),
            &Patch::Merge(label),
        )
        .await?;
    Ok(())
}

#[tokio::test]
async fn the_python_sdk_works_through_the_router_by_a_tunnel_and_directly() -> anyhow::Result<()> {
    sdk::python().await?;
    case("sdk", async |case| {
        pool_with_volumes(case).await?;
        pool(case, 2).await?;
        case.with_sdk("calls.py").await
    })
    .await
}

#[tokio::test]
async fn the_asynchronous_python_sdk_works_through_the_router_and_directly() -> anyhow::Result<()> {
    sdk::python().await?;
    case("sdkasync", async |case| {
        restrict(case).await?;
        pool(case, 3).await?;
        case.with_sdk("calls_async.py").await
    })
    .await
}

/// The profile of the test above does not apply here: root's volumes need root.
#[tokio::test]
async fn claims_of_the_asynchronous_python_sdk_bring_volumes_end_in_time_and_are_deleted()
-> anyhow::Result<()> {
    sdk::python().await?;
    case("sdkclaims", async |case| {
        pool_with_volumes(case).await?;
        pool(case, 2).await?;
        case.with_sdk("claims_async.py").await
    })
    .await
}

#[tokio::test]
async fn the_python_sdk_works_with_sandboxds_calls_in_each_way_and_no_path_leaves_the_root()
-> anyhow::Result<()> {
    sdk::python().await?;
    case("sandboxd", async |case| {
        pool(case, 1).await?;
        case.with_sdk("sandboxd.py").await
    })
    .await
}

#[tokio::test]
async fn a_sandbox_goes_on_after_a_suspension_by_the_sdk_and_by_kubectl() -> anyhow::Result<()> {
    sdk::python().await?;
    case("sdksuspend", async |case| {
        pool(case, 1).await?;
        case.with_pod_snapshots(async || case.with_sdk("suspend.py").await)
            .await
    })
    .await
}
