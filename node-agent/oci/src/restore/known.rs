//! What an image knows of a pod's containers.

use anyhow::Context;
use torpor_core::ids::{ContainerName, ImageId};
use torpor_records::Role;
use torpor_records::{ContainerRecord, PodRecord};
use torpor_snapshots::{Digest, Manifest, Mismatch, SavedName};

use super::{Refusal, fail, store};
use crate::node::Node;

/// Whether the image knows nothing of the container.
pub(crate) fn is_new(
    node: &Node,
    pod: &PodRecord,
    image: &ImageId,
    record: &ContainerRecord,
) -> anyhow::Result<bool> {
    let opened = store(node)?
        .image(&pod.namespace, image)
        .map_err(Refusal::from)?;
    let place = place_in(opened.manifest(), record);
    Ok(matches!(place, Err(Mismatch::ContainerAdded { .. })))
}

/// The exit code of a container that had ended when the image was saved; none for one that is part of the image.
pub(crate) fn completed(
    node: &Node,
    pod: &PodRecord,
    image: &ImageId,
    record: &ContainerRecord,
) -> anyhow::Result<Option<u8>> {
    let opened = store(node)?
        .image(&pod.namespace, image)
        .map_err(Refusal::from)?;
    match place_in(opened.manifest(), record) {
        Ok(code) => Ok(code),
        Err(mismatch) => Err(fail(node, pod, image, mismatch.into())?),
    }
}

/// The digest of the pause container's spec in the image.
pub(crate) fn saved_pause(node: &Node, pod: &PodRecord, image: &ImageId) -> anyhow::Result<Digest> {
    let opened = store(node)?
        .image(&pod.namespace, image)
        .map_err(Refusal::from)?;
    let mut saved = opened.manifest().containers.iter();
    let pause = saved.find(|container| container.name == SavedName::Root);
    let pause = pause.with_context(|| format!("image {image} has no pause container"))?;
    Ok(pause.spec_digest)
}

pub(super) fn saved_name(record: &ContainerRecord) -> Result<SavedName, Mismatch> {
    match record.role {
        Role::Sandbox => Ok(SavedName::Root),
        Role::Container => ContainerName::new(record.name.clone())
            .map(SavedName::Named)
            .map_err(|_| Mismatch::ContainerMissing {
                name: SavedName::Root,
            }),
    }
}

fn place_in(manifest: &Manifest, record: &ContainerRecord) -> Result<Option<u8>, Mismatch> {
    let name = saved_name(record)?;
    if let SavedName::Named(own) = &name
        && let Some(done) = manifest.completed.iter().find(|done| done.name == *own)
    {
        return Ok(Some(u8::try_from(done.exit_code).unwrap_or(255)));
    }
    let saved = manifest.containers.iter().find(|saved| saved.name == name);
    match saved {
        None => Err(Mismatch::ContainerAdded { name }),
        Some(saved) if saved.spec_digest != record.spec_digest => Err(Mismatch::Spec { name }),
        Some(_) => Ok(None),
    }
}
