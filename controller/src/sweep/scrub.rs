//! Reports images of a repository that lack an object, in the condition Uploaded of their
//! SandboxSnapshots. The node that holds such an image uploads it again. If no node holds it, the
//! condition stays until the object is back.

use std::collections::BTreeMap;

use kube::ResourceExt;
use torpor_api::{
    SandboxSnapshot, SnapshotClass,
    conditions::{self, Draft, Status},
    reasons::snapshot as reasons,
};
use torpor_repository::{Health, ImageName, Repository};

use super::{Error, image_of};
use crate::{
    calls::Answer,
    context::Context,
    events::{self, Note, Severity},
    snapshot::condition_patch,
};

/// Writes the conditions that the state of the images asks for. `images` is the state of all images
/// of the namespace whose index was listed.
pub(super) async fn report(
    context: &Context,
    class: &SnapshotClass,
    repository: &Repository,
    namespace: &str,
    images: &BTreeMap<String, Health>,
) -> Result<(), Error> {
    let of_class = Some(class.name_any());
    let snapshots = context.caches.snapshots.filtered(|snapshot| {
        snapshot.namespace().as_deref() == Some(namespace)
            && snapshot.spec.snapshot_class_name == of_class
            && is_examined(snapshot)
    });
    for snapshot in snapshots {
        if is_of_other_cluster(&snapshot, context) {
            continue;
        }
        let Some(image) = image_of(&snapshot) else {
            continue;
        };
        let health = match images.get(&image) {
            Some(known) => known.clone(),
            // It may have been uploaded since the listing.
            None => match ImageName::new(namespace, &image) {
                Some(name) if !repository.has_index(&name).await? => {
                    let (image, url) = (name.image(), repository.url());
                    Health::Damaged(format!(
                        "the index of image {image} in {url} does not exist"
                    ))
                }
                _ => continue,
            },
        };
        if let Some(draft) = verdict(&snapshot, &health) {
            write(context, &snapshot, draft).await?;
        }
    }
    Ok(())
}

/// Reports whether the image was whole in the repository once and is still of use.
fn is_examined(snapshot: &SandboxSnapshot) -> bool {
    let was_damaged = snapshot.upload_reason() == Some(reasons::DAMAGED);
    (snapshot.is_uploaded() || was_damaged)
        && !snapshot.is_consumed()
        && snapshot.metadata.deletion_timestamp.is_none()
}

fn is_of_other_cluster(snapshot: &SandboxSnapshot, context: &Context) -> bool {
    let archive = snapshot.spec.archive.as_ref();
    archive.is_some_and(|archive| Some(&archive.cluster) != context.cluster_uid.get())
}

/// Returns the condition Uploaded that the image's state asks for, if the snapshot has another one.
/// Pure.
fn verdict(snapshot: &SandboxSnapshot, health: &Health) -> Option<Draft> {
    match (health, snapshot.is_uploaded()) {
        (Health::Damaged(why), true) => {
            let node = snapshot
                .status
                .as_ref()
                .and_then(|status| status.node_name.as_deref());
            let next = match node {
                Some(node) => format!("node {node:?} uploads the image again"),
                None => "no node has the image: restore the object".to_owned(),
            };
            let (status, reason) = (Status::False, reasons::DAMAGED);
            let message = format!("{why}; {next}");
            Some(Draft::new(conditions::UPLOADED, status, reason, message))
        }
        (Health::Whole, false) => {
            let (status, reason) = (Status::True, reasons::UPLOADED);
            let message = "The image is whole in its repository again";
            Some(Draft::new(conditions::UPLOADED, status, reason, message))
        }
        _ => None,
    }
}

/// Writes the condition. A snapshot that has changed meanwhile waits for the next sweep.
async fn write(context: &Context, snapshot: &SandboxSnapshot, draft: Draft) -> Result<(), Error> {
    let (severity, reason) = match draft.status == "True" {
        true => (Severity::Normal, reasons::UPLOADED),
        false => (Severity::Warning, reasons::DAMAGED),
    };
    let note = Note {
        severity,
        reason,
        message: draft.message.to_string(),
    };
    let patch = condition_patch(snapshot, draft);
    let (namespace, name) = (
        snapshot.namespace().unwrap_or_default(),
        snapshot.name_any(),
    );
    let written = context
        .api
        .patch_status::<SandboxSnapshot>(&namespace, &name, &patch);
    match written.await {
        Ok(_) => events::publish(&context.api, snapshot, note).await,
        Err(error) if matches!(error.answer(), Answer::Conflict | Answer::NotFound) => {}
        Err(error) => return Err(Error::Report(error)),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    fn snapshot(uploaded: &str, reason: &str, node: Option<&str>) -> SandboxSnapshot {
        serde_json::from_value(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": {"name": "s"}, "spec": {"sandboxName": "s"},
            "status": {"nodeName": node, "conditions": [{
                "type": "Uploaded", "status": uploaded, "reason": reason, "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }]},
        }))
        .unwrap()
    }

    #[rstest]
    #[case::damaged("True", "Uploaded", Health::Damaged("x".to_owned()), Some("Damaged"))]
    #[case::reported("False", "Damaged", Health::Damaged("x".to_owned()), None)]
    #[case::mended("False", "Damaged", Health::Whole, Some("Uploaded"))]
    #[case::whole("True", "Uploaded", Health::Whole, None)]
    fn a_condition_follows_the_image(
        #[case] uploaded: &str,
        #[case] reason: &str,
        #[case] health: Health,
        #[case] expected: Option<&str>,
    ) {
        let draft = verdict(&snapshot(uploaded, reason, None), &health);
        assert_eq!(
            draft.map(|draft| draft.reason.into_owned()).as_deref(),
            expected
        );
    }

    #[test]
    fn the_message_names_the_node_that_has_the_image() {
        let damaged = Health::Damaged("x".to_owned());
        let message = |node| {
            let draft = verdict(&snapshot("True", "Uploaded", node), &damaged);
            draft.unwrap().message.into_owned()
        };
        assert_eq!(message(Some("n")), "x; node \"n\" uploads the image again");
        assert_eq!(
            message(None),
            "x; no node has the image: restore the object"
        );
    }

    #[rstest]
    #[case::uploading("False", "Uploading", false)]
    #[case::whole("True", "Uploaded", true)]
    #[case::damaged("False", "Damaged", true)]
    fn an_image_is_examined_once_it_was_whole(
        #[case] uploaded: &str,
        #[case] reason: &str,
        #[case] expected: bool,
    ) {
        assert_eq!(is_examined(&snapshot(uploaded, reason, None)), expected);
        let mut deleted = snapshot(uploaded, reason, None);
        deleted.metadata.deletion_timestamp =
            serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        assert!(!is_examined(&deleted));
    }
}
