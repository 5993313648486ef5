//! Questions to the apiserver, where a watch that is behind would cost memory.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use torpor_api::snapshot::SandboxSnapshot;
use torpor_core::ids::{ImageId, PodUid};

use crate::reconcile::driver::ask::{Error, PAGE, PODS_PAGE, within};

/// Returns whether the apiserver has the Pod on this node, and it is not being deleted.
pub(super) async fn is_to_run(
    client: &Client,
    node: &str,
    namespace: &str,
    pod: &PodUid,
) -> Result<bool, Error> {
    Ok(find_pod(client, node, namespace, pod)
        .await?
        .is_some_and(|is_deleting| !is_deleting))
}

/// Returns whether the apiserver has no such Pod on this node.
pub(super) async fn is_gone(
    client: &Client,
    node: &str,
    namespace: &str,
    pod: &PodUid,
) -> Result<bool, Error> {
    Ok(find_pod(client, node, namespace, pod).await?.is_none())
}

/// Returns whether the Pod is being deleted; none if there is no such Pod.
async fn find_pod(
    client: &Client,
    node: &str,
    namespace: &str,
    pod: &PodUid,
) -> Result<Option<bool>, Error> {
    let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let of_node = format!("spec.nodeName={node}");
    let mut params = ListParams::default().fields(&of_node).limit(PODS_PAGE);
    loop {
        let listed = within("Pods", namespace, api.list_metadata(&params)).await?;
        let mut found = listed.items.iter();
        let found = found.find(|one| one.uid().as_deref() == Some(pod.as_str()));
        if let Some(found) = found {
            return Ok(Some(found.metadata.deletion_timestamp.is_some()));
        }
        match listed.metadata.continue_.filter(|next| !next.is_empty()) {
            Some(next) => params = params.continue_token(&next),
            None => return Ok(None),
        }
    }
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
