//! Decides whether a node gets an image. Pure, but for the questions to the apiserver.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::{Api, Client, Resource};
use torpor_api::node::{ImageServer, SandboxNode};
use torpor_api::{Sandbox, annotations};
use torpor_core::ids::PodUid;

use super::identity::CertificateDigest;
use super::protocol::{Reason, Refusal, Request};
use crate::reconcile::driver::ask::{self, within};

/// Returns what the apiserver says of a node's image server; none if the node has none.
pub(super) async fn image_server(
    client: &Client,
    node: &str,
) -> Result<Option<ImageServer>, ask::Error> {
    let api: Api<SandboxNode> = Api::all(client.clone());
    let found = within("SandboxNodes", "", api.get_opt(node)).await?;
    Ok(found.and_then(|node| node.status?.image_server))
}

/// Use of an image that the apiserver confirms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Use {
    /// Digest of the image's manifest.
    digest: String,
    /// The user named the image. Many Pods may start from it, and none consumes it.
    copy: bool,
}

/// Asks the apiserver whether the request is that of a node whose Pod continues from an image of
/// the node `here`. `certificate`: that of the connection's other end.
pub(super) async fn admit(
    client: &Client,
    here: &str,
    request: &Request,
    certificate: Option<&CertificateDigest>,
) -> Result<Use, Refusal> {
    let unknown = |error: ask::Error| Refusal::new(Reason::Unavailable, error.to_string());
    let registered = image_server(client, &request.node).await.map_err(unknown)?;
    check_node(request, certificate, registered.as_ref())?;
    let namespace = request.namespace.as_str();
    let pod = ask::pod_of_node(client, &request.node, namespace, &request.pod).await;
    check_pod(request, here, pod.map_err(unknown)?.as_ref())
}

/// Checks that the other end is the agent of the node that it names.
fn check_node(
    request: &Request,
    certificate: Option<&CertificateDigest>,
    registered: Option<&ImageServer>,
) -> Result<(), Refusal> {
    let registered = registered.map(|server| CertificateDigest::written(&server.certificate));
    match (certificate, registered) {
        (Some(shown), Some(registered)) if *shown == registered => Ok(()),
        _ => Err(Refusal::new(
            Reason::Denied,
            format!(
                "the certificate is not the one in the SandboxNode of node {:?}",
                request.node
            ),
        )),
    }
}

/// Checks that a Pod of the asking node continues from the image. `pod`: as the apiserver has it.
fn check_pod(request: &Request, here: &str, pod: Option<&ObjectMeta>) -> Result<Use, Refusal> {
    let denied = |words: String| Err(Refusal::new(Reason::Denied, words));
    let Some(pod) = pod.filter(|pod| pod.deletion_timestamp.is_none()) else {
        return denied(format!(
            "node {:?} has no Pod {}",
            request.node, request.pod
        ));
    };
    // A kubelet that was taken over makes mirror Pods of its node, with any annotations: their
    // owner is the Node (admission plug-in NodeRestriction).
    let mut owners = pod.owner_references.iter().flatten();
    let is_of_sandbox = |owner: &OwnerReference| {
        owner.controller == Some(true)
            && owner.kind == Sandbox::kind(&())
            && owner.api_version == Sandbox::api_version(&())
    };
    if !owners.any(is_of_sandbox) {
        return denied(format!("Pod {} is of no Sandbox", request.pod));
    }
    let none = BTreeMap::new();
    let annotated = pod.annotations.as_ref().unwrap_or(&none);
    let says = |key: &str, value: &str| annotated.get(key).is_some_and(|found| found == value);
    let image = request.image.to_string();
    if !says(annotations::RESTORE_IMAGE, &image) || !says(annotations::RESTORE_NODE, here) {
        return denied(format!(
            "Pod {} does not continue from image {image} of node {here:?}",
            request.pod
        ));
    }
    let digest = annotated.get(annotations::RESTORE_DIGEST);
    Ok(Use {
        digest: digest.cloned().unwrap_or_default(),
        copy: says(annotations::RESTORE_COPY, "true"),
    })
}

/// Checks that an image of this node is the one that the Pod continues from, and that no Pod of
/// this node has. `digest`: of the image's manifest.
pub(super) fn check_image(
    wanted: &Use,
    digest: &str,
    consumed_by: Option<&PodUid>,
) -> Result<(), Refusal> {
    if wanted.digest != digest {
        let words = format!("the image of this name has the digest {digest}");
        return Err(Refusal::new(Reason::Missing, words));
    }
    match consumed_by.filter(|_| !wanted.copy) {
        Some(pod) => Err(Refusal::new(
            Reason::Consumed,
            format!("Pod {pod} has continued from the image"),
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use torpor_core::ids::{ImageId, Namespace};

    use super::*;

    fn request() -> Request {
        Request {
            namespace: Namespace::new("n").expect("a name"),
            image: ImageId::parse("saved.1").expect("an image"),
            node: "asking".to_owned(),
            pod: PodUid::new("p").expect("a UID"),
        }
    }

    fn pod(annotations: serde_json::Value, deleted: bool) -> ObjectMeta {
        let deleted = deleted.then_some("2026-11-28T00:00:00Z");
        let owner = json!({
            "apiVersion": Sandbox::api_version(&()), "kind": "Sandbox", "name": "s", "uid": "s",
            "controller": true,
        });
        let meta = json!({
            "annotations": annotations, "deletionTimestamp": deleted, "ownerReferences": [owner],
        });
        serde_json::from_value(meta).expect("metadata")
    }

    fn wishes() -> serde_json::Value {
        json!({
            annotations::RESTORE_IMAGE: "saved.1", annotations::RESTORE_NODE: "here",
            annotations::RESTORE_DIGEST: "blake3:0",
        })
    }

    #[test]
    fn a_node_gets_an_image_only_with_the_certificate_of_its_sandbox_node() {
        let registered = ImageServer {
            certificate: "aa".to_owned(),
            ..ImageServer::default()
        };
        let check = |certificate: Option<&str>, registered| {
            let certificate = certificate.map(CertificateDigest::written);
            check_node(&request(), certificate.as_ref(), registered).map_err(|no| no.reason)
        };
        assert_eq!(check(Some("aa"), Some(&registered)), Ok(()));
        assert_eq!(check(Some("bb"), Some(&registered)), Err(Reason::Denied));
        assert_eq!(check(None, Some(&registered)), Err(Reason::Denied));
        assert_eq!(check(Some("aa"), None), Err(Reason::Denied));
    }

    #[test]
    fn a_node_gets_only_images_that_its_pods_continue_from() {
        let check = |pod: Option<&ObjectMeta>| {
            let found = check_pod(&request(), "here", pod);
            found.map_err(|no| no.reason)
        };
        let of_pod = Use {
            digest: "blake3:0".to_owned(),
            copy: false,
        };
        assert_eq!(check(Some(&pod(wishes(), false))), Ok(of_pod));
        assert_eq!(check(None), Err(Reason::Denied));
        assert_eq!(check(Some(&pod(wishes(), true))), Err(Reason::Denied));
        let mut mirror = pod(wishes(), false);
        let owner = mirror.owner_references.iter_mut().flatten().next();
        owner.expect("an owner").kind = "Node".to_owned();
        assert_eq!(check(Some(&mirror)), Err(Reason::Denied), "a mirror Pod");
        mirror.owner_references = None;
        assert_eq!(check(Some(&mirror)), Err(Reason::Denied), "a Pod of nobody");
        for (key, value) in [
            (annotations::RESTORE_IMAGE, json!("saved.2")),
            (annotations::RESTORE_IMAGE, json!(null)),
            (annotations::RESTORE_NODE, json!("elsewhere")),
            (annotations::RESTORE_NODE, json!(null)),
        ] {
            let mut other = wishes();
            other[key] = value;
            other
                .as_object_mut()
                .expect("a map")
                .retain(|_, value| !value.is_null());
            assert_eq!(
                check(Some(&pod(other, false))),
                Err(Reason::Denied),
                "{key}"
            );
        }
    }

    #[test]
    fn an_image_is_sent_as_long_as_no_pod_of_its_node_has_continued_from_it() {
        let wanted = |copy| Use {
            digest: "blake3:0".to_owned(),
            copy,
        };
        let other = PodUid::new("q").expect("a UID");
        let check = |copy, digest, consumed_by| {
            check_image(&wanted(copy), digest, consumed_by).map_err(|no| no.reason)
        };
        assert_eq!(check(false, "blake3:0", None), Ok(()));
        assert_eq!(check(false, "blake3:1", None), Err(Reason::Missing));
        let consumed = check(false, "blake3:0", Some(&other));
        assert_eq!(consumed, Err(Reason::Consumed));
        assert_eq!(check(true, "blake3:0", Some(&other)), Ok(()), "a copy");
    }
}
