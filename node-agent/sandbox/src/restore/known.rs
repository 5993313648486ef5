//! The containers of an image, compared with those of a pod.

use anyhow::{Context, bail};
use torpor_core::ids::{ContainerName, ImageId, SandboxId};
use torpor_records::Role;
use torpor_records::{ContainerRecord, PodRecord};
use torpor_runsc::spec::Spec;
use torpor_snapshots::{Digest, Image, Manifest, Mismatch, SavedName};

use super::failure::fail;
use super::refusal::Refusal;
use crate::node::Node;

/// Reports whether the image has no container of this name, neither running nor completed.
pub fn is_new(
    node: &Node,
    pod: &PodRecord,
    image: &ImageId,
    record: &ContainerRecord,
) -> anyhow::Result<bool> {
    let opened = node
        .store()?
        .image(&pod.namespace, image)
        .map_err(Refusal::from)?;
    let place = place_in(opened.manifest(), record);
    Ok(matches!(place, Err(Mismatch::ContainerAdded { .. })))
}

/// Returns the exit code of a container that had ended when the image was saved; none for a
/// container that is part of the image. A container that does not match the image is a failed
/// restore ([`fail`]). `spec`: of the pause container, which may not be recorded yet.
pub fn completed(
    node: &Node,
    pod: &PodRecord,
    spec: &Spec,
    image: &ImageId,
    record: &ContainerRecord,
) -> anyhow::Result<Option<u8>> {
    let opened = node
        .store()?
        .image(&pod.namespace, image)
        .map_err(Refusal::from)?;
    match place_in(opened.manifest(), record) {
        Ok(code) => Ok(code),
        Err(mismatch) => Err(fail(node, pod, spec, image, mismatch.into())?),
    }
}

/// Returns the digest of the pause container's spec in the image.
pub fn saved_pause(node: &Node, pod: &PodRecord, image: &ImageId) -> anyhow::Result<Digest> {
    let opened = node
        .store()?
        .image(&pod.namespace, image)
        .map_err(Refusal::from)?;
    let mut saved = opened.manifest().containers.iter();
    let pause = saved.find(|container| container.name == SavedName::Root);
    let pause = pause.with_context(|| format!("image {image} has no pause container"))?;
    Ok(pause.spec_digest)
}

/// Returns the records of the sandbox' containers that are restored from the image, without
/// completed ones. Fails where the kubelet has not recreated each container of the image yet.
pub(super) fn parts_of(
    node: &Node,
    sandbox: &SandboxId,
    image: &Image,
) -> anyhow::Result<Vec<ContainerRecord>> {
    let mut parts = node.records.containers_of(sandbox)?;
    parts.retain(|part| part.completed.is_none());
    if !is_complete(image.manifest(), &parts) {
        bail!("not all containers of the image exist; the kubelet is recreating them");
    }
    Ok(parts)
}

/// Reports whether `parts` has each container of the image.
pub(super) fn is_complete(manifest: &Manifest, parts: &[ContainerRecord]) -> bool {
    manifest.containers.iter().all(|saved| {
        parts
            .iter()
            .any(|part| saved_name(part).is_ok_and(|name| name == saved.name))
    })
}

/// Returns the container's name in an image.
fn saved_name(record: &ContainerRecord) -> Result<SavedName, Mismatch> {
    match record.role {
        Role::Sandbox => Ok(SavedName::Root),
        Role::Container => ContainerName::new(record.name.clone())
            .map(SavedName::Named)
            .map_err(|_| Mismatch::ContainerMissing {
                name: SavedName::Root,
            }),
    }
}

/// Returns the exit code of a container that had ended when the image was saved; none for a
/// container that is part of the image.
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
