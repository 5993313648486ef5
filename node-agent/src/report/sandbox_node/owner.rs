//! The Node as the owner of its SandboxNode: Kubernetes deletes the SandboxNode with its Node.

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Client;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use torpor_api::node::SandboxNode;

/// Returns an owner reference to the Node; None if the Node does not exist or the agent may not
/// read the Node.
pub(super) async fn find(
    client: &Client,
    name: &str,
) -> Result<Option<OwnerReference>, kube::Error> {
    let nodes: Api<Node> = Api::all(client.clone());
    match nodes.get(name).await {
        Ok(node) => Ok(reference(node)),
        Err(kube::Error::Api(answer)) if answer.is_forbidden() || answer.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Corrects the owners of an existing SandboxNode, which may be older than this agent or than its
/// Node. If the apiserver forbids the correction, the SandboxNode stays without this owner.
pub(super) async fn correct(client: &Client, found: &SandboxNode) -> Result<(), kube::Error> {
    let name = found.metadata.name.as_deref().unwrap_or_default();
    let Some(node) = find(client, name).await? else {
        tracing::warn!("cannot read the Node: the SandboxNode will not be deleted with it");
        return Ok(());
    };
    let owners = found.metadata.owner_references.as_deref();
    let Some(owners) = corrected(owners.unwrap_or_default(), &node) else {
        return Ok(());
    };
    // A merge patch replaces the whole list, so it applies only to the version that was read.
    let patch = json!({"metadata": {
        "ownerReferences": owners,
        "resourceVersion": found.metadata.resource_version,
    }});
    let api: Api<SandboxNode> = Api::all(client.clone());
    let parameters = PatchParams::default();
    match api.patch(name, &parameters, &Patch::Merge(patch)).await {
        Err(kube::Error::Api(answer)) if answer.is_forbidden() => {
            let why = &answer.message;
            tracing::warn!(
                why,
                "cannot set the owner: the SandboxNode will not be deleted with its Node"
            );
            Ok(())
        }
        other => other.map(drop),
    }
}

fn reference(node: Node) -> Option<OwnerReference> {
    Some(OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.metadata.name?,
        uid: node.metadata.uid?,
        ..OwnerReference::default()
    })
}

/// Returns the correct owners, without an earlier Node of this name; None if the Node is among the
/// owners already.
fn corrected(owners: &[OwnerReference], node: &OwnerReference) -> Option<Vec<OwnerReference>> {
    if owners.iter().any(|owner| owner.uid == node.uid) {
        return None;
    }
    let is_node = |owner: &OwnerReference| owner.api_version == "v1" && owner.kind == "Node";
    let others = owners.iter().filter(|owner| !is_node(owner));
    Some(others.chain([node]).cloned().collect())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use torpor_api::node::SandboxNodeStatus;
    use torpor_test_apiserver::{Apiserver, Fault, FaultAnswer};

    use super::super::write;
    use super::*;

    /// Writes and corrects the SandboxNode as the agent does at its start. Returns its owners.
    async fn start(server: &Apiserver) -> Value {
        let client = server.client();
        let written = write(&client, "n", &SandboxNodeStatus::default()).await;
        let found = written.expect("it is written");
        correct(&client, &found).await.expect("it is corrected");
        let written = server.get("sandboxnodes", "", "n").expect("it is there");
        written["metadata"]["ownerReferences"].clone()
    }

    fn node(server: &Apiserver) -> Value {
        let made = server.create("nodes", json!({"metadata": {"name": "n"}}));
        let uid = &made["metadata"]["uid"];
        json!({"apiVersion": "v1", "kind": "Node", "name": "n", "uid": uid})
    }

    #[tokio::test]
    async fn a_sandboxnode_is_owned_by_its_node_also_after_the_node_was_made_anew() {
        let server = Apiserver::new();
        let first = node(&server);
        assert_eq!(start(&server).await, json!([first]));
        server.remove("nodes", "", "n");
        let second = node(&server);
        assert_ne!(first, second);
        assert_eq!(start(&server).await, json!([second]));
    }

    #[tokio::test]
    async fn a_sandboxnode_of_an_older_agent_gets_its_owner_once_and_keeps_other_owners() {
        let server = Apiserver::new();
        let node = node(&server);
        let other = json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "c", "uid": "u-1"});
        let gone = json!({"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u-0"});
        let owners = [&gone, &other];
        let old = json!({"metadata": {"name": "n", "ownerReferences": owners}, "spec": {}});
        server.create("sandboxnodes", old);
        assert_eq!(start(&server).await, json!([other, node]));
        server.take_writes();
        start(&server).await;
        assert_eq!(server.take_writes().len(), 1, "the status alone");
    }

    #[tokio::test]
    async fn a_sandboxnode_whose_owner_cannot_be_read_or_set_is_written_without_an_owner() {
        let server = Apiserver::new();
        assert_eq!(start(&server).await, Value::Null);
        node(&server);
        server.fail(Fault {
            verb: "patch",
            kind: "sandboxnodes",
            answer: FaultAnswer::Refuse(403),
        });
        assert_eq!(start(&server).await, Value::Null);
    }
}
