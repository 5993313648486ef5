//! NetworkPolicies of sandboxes.
//!
//! The development cluster's network enforces none. The tests show that each Pod is selected by the
//! policy that it is to have, and that none is made before the policy.

use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::{
    ResourceExt,
    api::{DeleteParams, ListParams},
};
use serde_json::json;
use torpor_api::{SandboxClaim, conditions::find};
use torpor_tests::case::case;
use torpor_tests::pods::{COUNT, pod_spec, shell};
use torpor_tests::pools::extension;
use torpor_tests::sandboxes::{LIMIT, sandbox};
use torpor_tests::wait;

const LABEL: &str = "torpor.dev/network-policy";

#[tokio::test]
async fn a_sandbox_without_a_template_has_the_strict_policy_unless_it_asks_to_be_left_out()
-> anyhow::Result<()> {
    case("networks", async |case| {
        let spec = json!({ "containers": [shell("a", COUNT)] });
        case.create(sandbox("s", spec.clone())).await?;
        let mut open = sandbox("open", spec);
        open["metadata"]["annotations"] = json!({ LABEL: "none" });
        case.create(open).await?;
        for (name, expected) in [("s", "default"), ("open", "none")] {
            let pod = case.ready(name).await?;
            let label = pod.labels().get(LABEL).map(String::as_str);
            assert_eq!(label, Some(expected), "{name}");
        }
        let policies = case.api::<NetworkPolicy>();
        let found = policies.list(&ListParams::default()).await?;
        let names: Vec<String> = found.iter().map(ResourceExt::name_any).collect();
        assert_eq!(names, ["torpor-default-network-policy"]);
        // A running Pod follows its Sandbox.
        let asks = json!({ "metadata": { "annotations": { LABEL: "none" } } });
        case.patch("s", asks).await?;
        case.pod_until("s", "it is left out", LIMIT, |pod| {
            pod.labels().get(LABEL).is_some_and(|value| value == "none")
        })
        .await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_claim_waits_for_its_templates_policy_and_reports_another_owner_of_the_name()
-> anyhow::Result<()> {
    case("awaited", async |case| {
        let foreign = json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": { "name": "t-network-policy" },
            "spec": { "podSelector": {} },
        });
        case.create(foreign).await?;
        let spec = pod_spec(json!({ "containers": [shell("a", COUNT)] }));
        let template = json!({ "podTemplate": { "spec": spec } });
        case.create(extension("SandboxTemplate", "t", template))
            .await?;
        let pool = json!({ "replicas": 0, "sandboxTemplateRef": { "name": "t" } });
        case.create(extension("SandboxWarmPool", "w", pool)).await?;
        let claim = json!({ "warmPoolRef": { "name": "w" } });
        case.create(extension("SandboxClaim", "c", claim)).await?;
        let says = async |words: &str, reason: &str| {
            wait::object(case.api::<SandboxClaim>(), "c", words, LIMIT, |found| {
                let status = found.and_then(|claim| claim.status).unwrap_or_default();
                match find(&status.conditions, "Ready") {
                    Some(ready) if ready.reason == reason => Ok(()),
                    other => Err(format!("{other:?}")),
                }
            })
            .await
        };
        says("another owner has the name", "NetworkPolicyNotOwned").await?;
        assert!(case.sandboxes().get_opt("c").await?.is_none());
        let policies = case.api::<NetworkPolicy>();
        policies
            .delete("t-network-policy", &DeleteParams::default())
            .await?;
        says("the claim is Ready", "DependenciesReady").await?;
        let owned = policies.get("t-network-policy").await?;
        assert_eq!(owned.owner_references()[0].name, "t");
        Ok(())
    })
    .await
}
