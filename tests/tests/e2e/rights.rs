//! Writes that the admission policies of `deploy` refuse to the stolen token of an agent or of a
//! router.

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use torpor_api::annotations::{IMAGE_FINALIZER, RESTORE_FROM};
use torpor_api::conditions::POD_RESTORE_SETTLED;
use torpor_api::node::{SandboxNode, SandboxNodeSpec};
use torpor_api::snapshot::SandboxSnapshot;
use torpor_api::{Sandbox, install};
use torpor_tests::accounts::{client, running, token};
use torpor_tests::case::{Case, case};
use torpor_tests::pods::{shell, shell_pod};
use torpor_tests::sandboxes::sandbox;

/// Name that no node of the cluster has.
const ELSEWHERE: &str = "torpor-e2e-elsewhere";

/// Client with a stolen token of a ServiceAccount.
struct Thief {
    client: Client,
    node: String,
    namespace: String,
}

impl Thief {
    /// Takes the token that the kubelet mounts into a Pod of the account.
    async fn of(case: &Case, account: &str, label: &str) -> anyhow::Result<Self> {
        let pod = running(case.client(), install::NAMESPACE, label).await?;
        let stolen = token(case.client(), install::NAMESPACE, account, Some(&pod)).await?;
        let node = pod.spec.and_then(|spec| spec.node_name);
        Ok(Self {
            client: client(&stolen).await?,
            node: node.context("the Pod has no node")?,
            namespace: case.namespace.clone(),
        })
    }

    async fn of_agent(case: &Case) -> anyhow::Result<Self> {
        let label = format!("app.kubernetes.io/name={}", install::AGENT);
        Self::of(case, install::AGENT, &label).await
    }

    async fn snapshot(&self, name: &str, change: Value) -> kube::Result<()> {
        let api: Api<SandboxSnapshot> = Api::namespaced(self.client.clone(), &self.namespace);
        let (parameters, change) = (PatchParams::default(), Patch::Merge(change));
        api.patch(name, &parameters, &change).await.map(drop)
    }

    async fn snapshot_status(&self, name: &str, status: Value) -> kube::Result<()> {
        let api: Api<SandboxSnapshot> = Api::namespaced(self.client.clone(), &self.namespace);
        let (parameters, change) = (
            PatchParams::default(),
            Patch::Merge(json!({ "status": status })),
        );
        api.patch_status(name, &parameters, &change).await.map(drop)
    }

    async fn pod_status(&self, name: &str, change: Value) -> kube::Result<()> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let (parameters, change) = (PatchParams::default(), Patch::Strategic(change));
        api.patch_status(name, &parameters, &change).await.map(drop)
    }

    async fn sandbox(&self, name: &str, change: Value) -> kube::Result<()> {
        let api: Api<Sandbox> = Api::namespaced(self.client.clone(), &self.namespace);
        let (parameters, change) = (PatchParams::default(), Patch::Merge(change));
        api.patch(name, &parameters, &change).await.map(drop)
    }
}

/// Checks that the policy, and nothing else, has refused the write.
#[track_caller]
fn refused(policy: &str, what: &str, written: kube::Result<()>) {
    match written {
        Err(kube::Error::Api(answer)) => assert!(
            answer.code == 403
                && answer
                    .message
                    .contains(&format!("ValidatingAdmissionPolicy '{policy}'")),
            "{what}: {}",
            answer.message
        ),
        other => panic!("{what}: {other:?}"),
    }
}

/// Creates a SandboxSnapshot of a missing Sandbox as a user does; then records the node that holds
/// it as its agent does.
async fn snapshot(
    case: &Case,
    name: &str,
    spec: Value,
    holder: Option<&str>,
) -> anyhow::Result<()> {
    let mut wanted = json!({ "sandboxName": "nobody" });
    for (key, value) in spec.as_object().into_iter().flatten() {
        wanted[key] = value.clone();
    }
    case.create(json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot", "metadata": { "name": name }, "spec": wanted,
    }))
    .await?;
    if let Some(node) = holder {
        let status = json!({ "status": { "nodeName": node, "podUID": "u" } });
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(status));
        case.snapshots()
            .patch_status(name, &parameters, &patch)
            .await?;
    }
    Ok(())
}

fn condition_of(kind: &str) -> Value {
    let condition =
        json!({ "type": kind, "status": "True", "reason": "E2e", "message": "by a test" });
    json!({ "status": { "conditions": [condition] } })
}

#[tokio::test]
async fn a_stolen_agents_token_writes_no_sandboxnode_but_its_own() -> anyhow::Result<()> {
    const POLICY: &str = "torpor-agent-sandboxnodes";
    case("rightsnodes", async |case| {
        let thief = Thief::of_agent(case).await?;
        let (admin, name) = (
            Api::<SandboxNode>::all(case.client()),
            case.namespace.clone(),
        );
        let api: Api<SandboxNode> = Api::all(thief.client.clone());
        let (make, parameters) = (PostParams::default(), PatchParams::default());
        let other = SandboxNode::new(&name, SandboxNodeSpec::default());
        refused(
            POLICY,
            "to make another",
            api.create(&make, &other).await.map(drop),
        );
        admin.create(&make, &other).await?;
        let says = Patch::Merge(json!({ "status": { "agentVersion": "stolen" } }));
        let of_other = api.patch_status(&name, &parameters, &says).await.map(drop);
        let owners = Patch::Merge(json!({ "metadata": { "labels": { "a": "b" } } }));
        let itself = api.patch(&name, &parameters, &owners).await.map(drop);
        admin.delete(&name, &DeleteParams::default()).await?;
        refused(POLICY, "the status of another", of_other);
        refused(POLICY, "another", itself);
        let nothing = Patch::Merge(json!({ "status": {} }));
        api.patch_status(&thief.node, &parameters, &nothing).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_stolen_agents_token_takes_no_snapshot_from_another_node_and_moves_none()
-> anyhow::Result<()> {
    const ITSELF: &str = "torpor-agent-snapshots";
    const STATUS: &str = "torpor-agent-snapshot-status";
    case("rightssnaps", async |case| {
        let thief = Thief::of_agent(case).await?;
        let node = thief.node.as_str();
        snapshot(case, "meant", json!({ "nodeName": ELSEWHERE }), None).await?;
        snapshot(case, "held", json!({}), Some(ELSEWHERE)).await?;
        snapshot(case, "own", json!({ "nodeName": node }), Some(node)).await?;
        snapshot(case, "open", json!({}), None).await?;
        let ours = json!({ "metadata": { "finalizers": [IMAGE_FINALIZER] } });
        for name in ["meant", "held"] {
            refused(ITSELF, name, thief.snapshot(name, ours.clone()).await);
            let moved = json!({ "nodeName": node });
            refused(STATUS, name, thief.snapshot_status(name, moved).await);
            let told = json!({ "containers": [{ "name": "a", "imageID": "stolen" }] });
            refused(STATUS, name, thief.snapshot_status(name, told).await);
        }
        for (what, metadata) in [
            ("a label", json!({ "labels": { "a": "b" } })),
            ("an annotation", json!({ "annotations": { "a": "b" } })),
            ("another finalizer", json!({ "finalizers": ["e2e.dev/stays"] })),
            (
                "an owner",
                json!({ "ownerReferences": [{ "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u" }] }),
            ),
        ] {
            let change = json!({ "metadata": metadata });
            refused(ITSELF, what, thief.snapshot("own", change).await);
        }
        for (what, status) in [
            ("moved", json!({ "nodeName": ELSEWHERE })),
            ("without a node", json!({ "nodeName": null })),
            ("of another Pod", json!({ "podUID": "another" })),
        ] {
            refused(STATUS, what, thief.snapshot_status("own", status).await);
        }
        let elsewhere = json!({ "nodeName": ELSEWHERE });
        refused(STATUS, "open", thief.snapshot_status("open", elsewhere).await);
        // An agent adopts a snapshot, reports where it is, and releases it.
        thief.snapshot("open", ours).await?;
        thief.snapshot_status("open", json!({ "nodeName": node })).await?;
        let none = json!({ "metadata": { "finalizers": [] } });
        thief.snapshot("open", none).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_stolen_agents_token_writes_only_the_agents_conditions_of_its_own_nodes_pods()
-> anyhow::Result<()> {
    const POLICY: &str = "torpor-agent-pod-status";
    case("rightspods", async |case| {
        let thief = Thief::of_agent(case).await?;
        let mut far = shell_pod("far", "");
        far["spec"]["nodeName"] = ELSEWHERE.into();
        far["spec"]["runtimeClassName"] = Value::Null;
        case.create(far).await?;
        let said = condition_of(POD_RESTORE_SETTLED);
        let of_far = thief.pod_status("far", said.clone()).await;
        // No kubelet is there to end the Pod.
        let at_once = DeleteParams::default().grace_period(0);
        case.pods().delete("far", &at_once).await?;
        refused(POLICY, "a Pod of another node", of_far);
        case.start(shell_pod("p", "sleep 1000000")).await?;
        for (what, change) in [
            ("Ready", condition_of("Ready")),
            ("a condition of others", condition_of("DisruptionTarget")),
            (
                "no condition",
                json!({ "status": { "conditions": [{ "type": "Ready", "$patch": "delete" }] } }),
            ),
            ("the phase", json!({ "status": { "phase": "Failed" } })),
            (
                "an image",
                json!({ "status": { "containerStatuses": [{ "name": "a", "imageID": "stolen" }] } }),
            ),
            ("a label", json!({ "metadata": { "labels": { "a": "b" } } })),
            ("an annotation", json!({ "metadata": { "annotations": { "a": "b" } } })),
        ] {
            refused(POLICY, what, thief.pod_status("p", change).await);
        }
        thief.pod_status("p", said).await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_token_of_the_agents_account_that_names_no_node_writes_nothing() -> anyhow::Result<()> {
    case("rightsunbound", async |case| {
        let bound = Thief::of_agent(case).await?;
        let unbound = token(case.client(), install::NAMESPACE, install::AGENT, None).await?;
        let thief = Thief {
            client: client(&unbound).await?,
            ..bound
        };
        let node = thief.node.as_str();
        snapshot(case, "own", json!({ "nodeName": node }), None).await?;
        case.start(shell_pod("p", "sleep 1000000")).await?;
        let ours = json!({ "metadata": { "finalizers": [IMAGE_FINALIZER] } });
        let adopted = thief.snapshot("own", ours).await;
        refused("torpor-agent-snapshots", "adopted", adopted);
        let told = thief
            .snapshot_status("own", json!({ "nodeName": node }))
            .await;
        refused("torpor-agent-snapshot-status", "reported", told);
        let said = thief
            .pod_status("p", condition_of(POD_RESTORE_SETTLED))
            .await;
        refused("torpor-agent-pod-status", "conditions", said);
        let nodes: Api<SandboxNode> = Api::all(thief.client.clone());
        let nothing = Patch::Merge(json!({ "status": { "agentVersion": "stolen" } }));
        let parameters = PatchParams::default();
        let report = nodes.patch_status(node, &parameters, &nothing).await;
        let report = report.map(drop);
        refused("torpor-agent-sandboxnodes", "reported", report);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_stolen_routers_token_resumes_a_sandbox_and_changes_nothing_else() -> anyhow::Result<()> {
    const POLICY: &str = "sandbox-router-sandboxes";
    case("rightsrouter", async |case| {
        let thief = Thief::of(case, install::ROUTER, "app=sandbox-router").await?;
        let mut suspended = sandbox("s", json!({ "containers": [shell("a", "sleep 1000000")] }));
        suspended["spec"]["operatingMode"] = "Suspended".into();
        case.create(suspended).await?;
        let image = json!([{ "name": "a", "image": "stolen" }]);
        let running = |metadata: Value| json!({ "metadata": metadata, "spec": { "operatingMode": "Running" } });
        for (what, change) in [
            (
                "the pod template",
                json!({ "spec": { "operatingMode": "Running", "podTemplate": { "spec": { "containers": image } } } }),
            ),
            ("another field", json!({ "spec": { "operatingMode": "Running", "shutdownTime": "2050-01-01T00:00:00Z" } })),
            ("a label", running(json!({ "labels": { "a": "b" } }))),
            ("an annotation", running(json!({ "annotations": { RESTORE_FROM: "stolen" } }))),
            ("a finalizer", running(json!({ "finalizers": ["e2e.dev/stays"] }))),
            (
                "an owner",
                running(json!({ "ownerReferences": [{ "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u" }] })),
            ),
        ] {
            refused(POLICY, what, thief.sandbox("s", change).await);
        }
        thief.sandbox("s", running(json!({}))).await?;
        let suspend = json!({ "spec": { "operatingMode": "Suspended" } });
        refused(POLICY, "a suspension", thief.sandbox("s", suspend).await);
        let found = case.sandboxes().get("s").await?;
        assert!(!found.labels().contains_key("a"), "{:?}", found.labels());
        let settings = found.annotations();
        assert!(!settings.contains_key(RESTORE_FROM), "{settings:?}");
        Ok(())
    })
    .await
}
