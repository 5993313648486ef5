//! Annotations of the Pod that a restore reads. The controller sets them, or copies the user's
//! from the Sandbox.

use torpor_core::ids::ImageId;
use torpor_runsc::spec::Spec;
use torpor_snapshots::Store;

use torpor_records::PodRecord;

/// The image to restore.
pub(super) const RESTORE_IMAGE: &str = "torpor.dev/restore-image";
/// `true`: the user requested the image by name.
pub(super) const RESTORE_COPY: &str = "torpor.dev/restore-copy";
/// The digest of the image's manifest, where the image is in a repository.
pub(super) const RESTORE_DIGEST: &str = "torpor.dev/restore-digest";
/// The user's command after a restore in a new place: a JSON array of words.
pub(super) const ON_RESTORE_EXEC: &str = "torpor.dev/on-restore-exec";
/// The name of the container in which the command runs.
pub(super) const ON_RESTORE_EXEC_CONTAINER: &str = "torpor.dev/on-restore-exec-container";
/// The user's choice how a sandbox starts that crashed while it was awake.
pub(super) const ON_CRASH: &str = "torpor.dev/on-crash";
/// Images of golden sandboxes, one for each node that has one, separated by commas.
const GOLDEN_IMAGES: &str = "torpor.dev/golden-images";
/// `true`: the sandbox is to sleep.
const HIBERNATE: &str = "torpor.dev/hibernate";

/// The image that a Pod is to start from, by its annotations.
#[derive(Debug, Default)]
pub(super) struct Given {
    pub(super) image: Option<ImageId>,
    /// The image may be stale and may be used again.
    pub(super) copy: bool,
}

impl Given {
    /// Reads the annotations of the pause container. Of the golden images it takes the first one
    /// that the store holds. Errors: the id of the image to restore is not one.
    pub(super) fn of(spec: &Spec, store: &Store, pod: &PodRecord) -> anyhow::Result<Self> {
        if let Some(image) = spec.annotation(RESTORE_IMAGE) {
            return Ok(Self {
                image: Some(ImageId::parse(image)?),
                copy: spec.annotation(RESTORE_COPY) == Some("true"),
            });
        }
        let is_held = |image: &ImageId| store.image(&pod.namespace, image).is_ok();
        let image = golden_images(spec).find(is_held);
        Ok(Self {
            copy: image.is_some(),
            image,
        })
    }
}

fn golden_images(spec: &Spec) -> impl Iterator<Item = ImageId> {
    let listed = spec.annotation(GOLDEN_IMAGES).unwrap_or_default();
    listed
        .split(',')
        .filter_map(|image| ImageId::parse(image).ok())
}

/// Reports whether the Pod starts from this image because it is a golden one.
pub(super) fn is_golden(spec: &Spec, image: &ImageId) -> bool {
    spec.annotation(RESTORE_IMAGE).is_none() && golden_images(spec).any(|golden| golden == *image)
}

/// Reports whether the user named the image, or it is a golden one: others may start from it, too.
pub(super) fn is_copy(spec: &Spec, image: &ImageId) -> bool {
    spec.annotation(RESTORE_COPY) == Some("true") || is_golden(spec, image)
}

/// Reports whether the sandbox is to sleep.
pub(super) fn is_to_sleep(spec: &Spec) -> bool {
    spec.annotation(HIBERNATE) == Some("true")
}
