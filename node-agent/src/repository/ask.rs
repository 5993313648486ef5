//! Questions to the apiserver, where a watch that is behind would cost memory.

use kube::Client;
use kube::api::{Api, ListParams};
use torpor_api::snapshot::SandboxSnapshot;
use torpor_core::ids::{ImageId, PodUid};

use crate::reconcile::driver::ask::{Error, PAGE, pod_of_node, within};

/// Returns whether the apiserver has the Pod on this node, and it is not being deleted.
pub(super) async fn is_to_run(
    client: &Client,
    node: &str,
    namespace: &str,
    pod: &PodUid,
) -> Result<bool, Error> {
    let found = pod_of_node(client, node, namespace, pod).await?;
    Ok(found.is_some_and(|pod| pod.deletion_timestamp.is_none()))
}

/// Returns whether the apiserver has no such Pod on this node.
pub(super) async fn is_gone(
    client: &Client,
    node: &str,
    namespace: &str,
    pod: &PodUid,
) -> Result<bool, Error> {
    Ok(pod_of_node(client, node, namespace, pod).await?.is_none())
}

/// Returns whether a SandboxSnapshot of the namespace names the image.
pub(super) async fn is_named(
    client: &Client,
    namespace: &str,
    image: &ImageId,
) -> Result<bool, Error> {
    let api: Api<SandboxSnapshot> = Api::namespaced(client.clone(), namespace);
    let id = image.to_string();
    let mut params = ListParams::default().limit(PAGE);
    loop {
        let listed = within("SandboxSnapshots", namespace, api.list(&params)).await?;
        let names = |snapshot: &SandboxSnapshot| {
            let status = snapshot.status.as_ref();
            status.and_then(|status| status.image_id.as_ref()) == Some(&id)
        };
        if listed.items.iter().any(names) {
            return Ok(true);
        }
        match listed.metadata.continue_.filter(|next| !next.is_empty()) {
            Some(next) => params = params.continue_token(&next),
            None => return Ok(false),
        }
    }
}
