//! Removes images from repositories that no SandboxSnapshot names any more, and the chunks that no
//! image needs.
//!
//! One sweep starts some time after the controller has become the leader, and one at each
//! interval.
//! An image goes when its index is older than an hour (by the object store's clock), the cache has
//! no SandboxSnapshot that names it, and neither has the apiserver when it is asked. A
//! SnapshotClass with `deletionPolicy: Retain` is not swept.
//!
//! Each sweep also reports images that lack an object ([`scrub`]). After the sweeps the keys of
//! images are wrapped with the newest encryption key ([`rotation`]).

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use kube::ResourceExt;
use tokio_util::sync::CancellationToken;
use torpor_api::{
    SandboxSnapshot, SnapshotClass,
    snapshot::{DeletionPolicy, REPOSITORY_PROVISIONER},
};
use torpor_repository::{ImageLeft, Keys, Repository};

use self::rotation::Rotation;
use crate::{calls, context::Context, repository};

mod rotation;
mod scrub;

/// Time from the start of the controller until the first sweep.
const FIRST: Duration = Duration::from_secs(60);

/// Error of a sweep of one repository.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Open(#[from] repository::Error),
    #[error("{}", .0.words())]
    Repository(#[from] torpor_repository::Error),
    #[error("cannot report the state of an image")]
    Report(#[source] calls::Error),
    #[error("cannot read {what}")]
    Observe {
        what: &'static str,
        #[source]
        source: calls::Error,
    },
}

/// Sweeps until `shutdown`.
pub async fn run(context: Arc<Context>, shutdown: CancellationToken) {
    let Some(interval) = context.settings.repositories.sweep_interval else {
        return;
    };
    let mut pause = FIRST.min(interval);
    let mut rotation = Rotation::default();
    context.caches.snapshots.wait_ready().await;
    loop {
        // Cancel-safe: both arms only wait.
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = shutdown.cancelled() => return,
        }
        pause = interval;
        let is_swept = |class: &SnapshotClass| {
            class.spec.provisioner == REPOSITORY_PROVISIONER
                && class.spec.deletion_policy == DeletionPolicy::Delete
        };
        let is_kept = |class: &SnapshotClass| {
            class.spec.provisioner == REPOSITORY_PROVISIONER
                && class.spec.deletion_policy == DeletionPolicy::Retain
        };
        let url = |class: &SnapshotClass| class.spec.parameters.get("url").cloned();
        let classes = &context.caches.snapshot_classes;
        let kept: Vec<_> = classes
            .filtered(is_kept)
            .iter()
            .map(|class| url(class))
            .collect();
        for class in classes.filtered(|class| is_swept(class) && !kept.contains(&url(class))) {
            let swept = tokio::select! {
                swept = sweep(&context, &class) => swept,
                () = shutdown.cancelled() => return,
            };
            if let Err(error) = swept {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(class = class.name_any(), error, "cannot sweep a repository");
            }
        }
        tokio::select! {
            () = rotation.round(&context) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// Sweeps the repository of a class once.
pub async fn sweep(context: &Context, class: &SnapshotClass) -> Result<(), Error> {
    let repository = repository::for_sweeps(context, class, Keys::default()).await?;
    let scope = &context.settings.namespaces;
    let mut namespaces: BTreeSet<String> = repository.namespaces().await?.into_iter().collect();
    // A namespace may have lost all of its objects.
    let of_class = Some(class.name_any());
    let named = context
        .caches
        .snapshots
        .filtered(|one| one.is_uploaded() && one.spec.snapshot_class_name == of_class);
    namespaces.extend(named.iter().filter_map(|one| one.namespace()));
    for namespace in namespaces {
        // A confined controller does not see the SandboxSnapshots of other namespaces.
        if !scope.has(&namespace) {
            continue;
        }
        // An error in one namespace does not keep the others from being swept.
        if let Err(error) = sweep_namespace(context, class, &repository, &namespace).await {
            let (class, error): (_, &dyn std::error::Error) = (class.name_any(), &error);
            tracing::warn!(
                class,
                namespace,
                error,
                "cannot sweep a namespace of a repository"
            );
        }
    }
    Ok(())
}

async fn sweep_namespace(
    context: &Context,
    class: &SnapshotClass,
    repository: &Repository,
    namespace: &str,
) -> Result<(), Error> {
    let images = repository.images(namespace).await?;
    let mut deleted = 0;
    for image in images.iter().filter(|image| image.is_garbage()) {
        repository.delete_image(image).await?;
    }
    let unnamed = unnamed(&images, &cached(context, namespace));
    if !unnamed.is_empty() {
        let named = asked(context, namespace).await?;
        for image in unnamed
            .iter()
            .filter(|image| !named.contains(image.name.image()))
        {
            repository.delete_image(image).await?;
            deleted += 1;
        }
    }
    let chunks = repository.sweep(namespace).await?;
    if deleted > 0 || chunks.deleted > 0 {
        tracing::info!(
            namespace,
            images = deleted,
            chunks = chunks.deleted,
            "removed what no SandboxSnapshot names from a repository"
        );
    }
    if chunks.left > 0 {
        tracing::warn!(
            namespace,
            left = chunks.left,
            "a sweep had no time for all chunks that no image needs; later sweeps go on"
        );
    }
    scrub::report(context, class, repository, namespace, &chunks.images).await
}

/// Returns the images that may be deleted and that no SandboxSnapshot names.
fn unnamed<'a>(images: &'a [ImageLeft], named: &BTreeSet<String>) -> Vec<&'a ImageLeft> {
    let images = images.iter().filter(|image| image.may_be_deleted());
    images
        .filter(|image| !named.contains(image.name.image()))
        .collect()
}

/// Returns the image that a snapshot names. An archive names it before its status is written.
fn image_of(snapshot: &SandboxSnapshot) -> Option<String> {
    match &snapshot.spec.archive {
        Some(archive) => Some(archive.image_id.clone()),
        None => snapshot.status.as_ref()?.image_id.clone(),
    }
}

fn cached(context: &Context, namespace: &str) -> BTreeSet<String> {
    let here = |snapshot: &SandboxSnapshot| snapshot.namespace().as_deref() == Some(namespace);
    let snapshots = context.caches.snapshots.filtered(here);
    snapshots
        .iter()
        .filter_map(|snapshot| image_of(snapshot))
        .collect()
}

/// Asks the apiserver for the images that SandboxSnapshots name.
async fn asked(context: &Context, namespace: &str) -> Result<BTreeSet<String>, Error> {
    let listed = context.api.list_whole::<SandboxSnapshot>(namespace).await;
    let listed = listed.map_err(|source| Error::Observe {
        what: "the SandboxSnapshots of a namespace",
        source,
    })?;
    Ok(listed.iter().filter_map(image_of).collect())
}

#[cfg(test)]
mod tests {
    use jiff::SignedDuration;
    use torpor_repository::{ImageName, Part};

    use super::*;

    #[test]
    fn an_image_goes_when_it_is_old_and_no_snapshot_names_it() {
        let image = |id: &str, hours, part| ImageLeft {
            name: ImageName::new("n", id).unwrap(),
            part,
            age: SignedDuration::from_hours(hours),
            is_left_over: false,
        };
        let images = [
            image("named.1", 2, Part::Image),
            image("named.1", 2, Part::Archive),
            image("old.1", 2, Part::Image),
            image("young.1", 0, Part::Image),
            image("cut-off.1", 2, Part::Pending),
            image("archived.1", 2, Part::Archive),
        ];
        let named = BTreeSet::from(["named.1".to_owned()]);
        let gone = unnamed(&images, &named);
        let gone: Vec<&str> = gone.iter().map(|image| image.name.image()).collect();
        assert_eq!(gone, ["old.1", "cut-off.1", "archived.1"]);
    }
}
