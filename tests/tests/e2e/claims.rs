//! Claims: a pool of warm sandboxes, and the sandboxes that claims get.

use anyhow::Context;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::json;
use torpor_api::annotations::{CONTROLLER_FIRST_OBSERVED_AT, SANDBOX_NAME};
use torpor_api::{SandboxClaim, SandboxWarmPool};
use torpor_tests::case::{Case, case, uid};
use torpor_tests::pods::{COUNT, pod_spec, shell};
use torpor_tests::pools::extension;
use torpor_tests::sandboxes::LIMIT;
use torpor_tests::sleep::restarts;
use torpor_tests::wait;

/// Creates a template, and a pool with `replicas` members of it.
async fn pool(case: &Case, replicas: u32) -> anyhow::Result<()> {
    let spec = pod_spec(json!({ "containers": [shell("a", COUNT)] }));
    let template = json!({ "podTemplate": { "spec": spec } });
    case.create(extension("SandboxTemplate", "t", template))
        .await?;
    let pool = json!({ "replicas": replicas, "sandboxTemplateRef": { "name": "t" } });
    case.create(extension("SandboxWarmPool", "w", pool)).await?;
    case.pool_is_ready("w", replicas).await
}

#[tokio::test]
async fn a_claim_takes_a_running_sandbox_of_the_pool_and_its_memory_survives_a_suspension()
-> anyhow::Result<()> {
    case("claims", async |case| {
        pool(case, 2).await?;
        let members = case.sandboxes().list(&ListParams::default()).await?.items;
        let members: Vec<String> = members.iter().map(ResourceExt::name_any).collect();
        let name = case.claim("w", "c").await?;
        assert!(members.contains(&name), "{name} of {members:?}");
        let pod = case.ready(&name).await?;
        // The Sandbox had been running before it was claimed, and the pool makes another.
        let before: u64 = case.written(&name, "a", "/n").await?.parse()?;
        case.pool_is_ready("w", 2).await?;

        case.suspend(&name).await?;
        let resumed = case.resume(&name).await?;
        assert_ne!(uid(&resumed), uid(&pod));
        assert_eq!(restarts(&resumed), 0);
        let after: u64 = case.written(&name, "a", "/n").await?.parse()?;
        assert!(after >= before, "{before} → {after}");

        let claims = case.api::<SandboxClaim>();
        claims.delete("c", &DeleteParams::background()).await?;
        let words = "the claimed Sandbox is gone";
        wait::object(case.sandboxes(), &name, words, LIMIT, |left| {
            left.map_or(Ok(()), |_| Err("still there".to_owned()))
        })
        .await
    })
    .await
}

#[tokio::test]
async fn concurrent_claims_get_a_sandbox_each_even_if_the_pool_has_fewer() -> anyhow::Result<()> {
    case("claimsmany", async |case| {
        pool(case, 2).await?;
        let names = ["c1", "c2", "c3"].map(|name| case.claim("w", name));
        let mut got = futures::future::try_join_all(names).await?;
        got.sort();
        got.dedup();
        assert_eq!(got.len(), 3, "{got:?}");
        for name in &got {
            case.ready(name).await?;
        }
        Ok(())
    })
    .await
}

/// Creates Kubernetes' own autoscaler of the pool.
///
/// It needs no metrics to keep the pool within its bounds, which it looks at first.
async fn autoscaler(case: &Case, least: u32, most: u32) -> anyhow::Result<()> {
    let target = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxWarmPool",
        "name": "w",
    });
    let bounds = json!({ "scaleTargetRef": target, "minReplicas": least, "maxReplicas": most });
    case.create(json!({
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": { "name": "w" },
        "spec": bounds,
    }))
    .await
}

#[tokio::test]
async fn a_pool_is_scaled_by_the_scale_subresource_as_an_autoscaler_does() -> anyhow::Result<()> {
    case("claimsscale", async |case| {
        pool(case, 2).await?;
        let pool = "sandboxwarmpools.extensions.agents.x-k8s.io/w";
        case.kubectl.ok(&["scale", pool, "--replicas=1"]).await?;
        case.pool_is_ready("w", 1).await?;
        autoscaler(case, 2, 3).await?;
        case.pool_is_ready("w", 2).await?;
        let lower = Patch::Merge(json!({ "spec": { "minReplicas": 1, "maxReplicas": 1 } }));
        let autoscalers = case.api::<HorizontalPodAutoscaler>();
        autoscalers
            .patch("w", &PatchParams::default(), &lower)
            .await?;
        case.pool_is_ready("w", 1).await?;
        // An autoscaler reads the number of members and the selector of their Pods.
        let scale = case.api::<SandboxWarmPool>().get_scale("w").await?;
        let status = scale.status.unwrap_or_default();
        assert_eq!(status.replicas, 1);
        let selector = status.selector.unwrap_or_default();
        assert_ne!(selector, "");
        let selected = ListParams::default().labels(&selector);
        wait::until(
            "the selector finds only the pool's Pods",
            LIMIT,
            async || {
                let found = case.pods().list(&selected).await?.items;
                let names: Vec<String> = found.iter().map(ResourceExt::name_any).collect();
                wait::holds(names.len() == 1, || format!("{names:?}"))
            },
        )
        .await
    })
    .await
}

/// Upstream's clients and tests read the first version of the claim that is Ready, and no later
/// one.
#[tokio::test]
async fn the_first_ready_version_of_a_claim_has_all_that_clients_read() -> anyhow::Result<()> {
    case("readonce", async |case| {
        pool(case, 1).await?;
        // The pool has one member: the other claims start cold.
        for name in ["first", "second", "third"] {
            let spec = json!({ "warmPoolRef": { "name": "w" } });
            case.create(extension("SandboxClaim", name, spec)).await?;
            let claims = case.api::<SandboxClaim>();
            let claim = wait::object(claims, name, "the claim is Ready", LIMIT, |found| {
                let found = found.ok_or("there is none")?;
                let conditions = found.status.iter().flat_map(|status| &status.conditions);
                let mut ready = conditions.filter(|c| c.type_ == "Ready" && c.status == "True");
                match ready.next() {
                    Some(_) => Ok(found),
                    None => Err("it is not Ready".to_owned()),
                }
            })
            .await?;
            let said = |key: &str| claim.annotations().get(key).map(String::as_str);
            let status = claim.status.clone().unwrap_or_default();
            let sandbox = status.sandbox.unwrap_or_default();
            assert!(!sandbox.pod_ips.is_empty(), "{sandbox:?}");
            assert_eq!(said(SANDBOX_NAME), Some(sandbox.name.as_str()), "{name}");
            let seen = said(CONTROLLER_FIRST_OBSERVED_AT).unwrap_or_default();
            seen.parse::<jiff::Timestamp>()
                .with_context(|| format!("{name}: {seen:?} is no time"))?;
        }
        Ok(())
    })
    .await
}
