//! Copies an image to another Pod. Original and copy share the bytes of their files.

use std::os::fd::AsFd;

use rustix::fs::AtFlags;
use torpor_core::{ImageId, Namespace};

use super::error::{ImageError, SaveError};
use super::image::Image;
use super::partial::Partial;
use super::root::Store;
use crate::dirs::{self, PathError};
use crate::manifest::{Manifest, ManifestDraft};

impl Store {
    /// Makes image `copy` of a Pod named `pod_name` with the content of `image`. The files are hard
    /// links, so that a copy takes a few KiB, and neither image needs the other. The copy has
    /// `image` as its parent. A repeated call does nothing.
    ///
    /// Errors: `image` is missing or damaged; `copy` exists and is no copy of `image`.
    pub fn copy_image(
        &self,
        namespace: &Namespace,
        image: &ImageId,
        copy: &ImageId,
        pod_name: &str,
    ) -> Result<(), SaveError> {
        match self.image(namespace, copy) {
            Ok(found) if found.manifest().parent.as_ref() == Some(image) => return Ok(()),
            Ok(_) => {
                return Err(SaveError::Exists {
                    image: copy.clone(),
                });
            }
            Err(ImageError::Missing { .. }) => {}
            Err(source) => return Err(not_good(copy, source)),
        }
        let original = self
            .image(namespace, image)
            .map_err(|source| not_good(image, source))?;
        original
            .verify_sizes()
            .map_err(|source| not_good(image, source))?;
        self.remove_partial(namespace, copy)?;
        let partial = self.begin(namespace, copy)?;
        partial.link_files(&original)?;
        let manifest = original.manifest();
        let draft = ManifestDraft {
            pod_name: pod_name.to_owned(),
            sandbox_name: pod_name.to_owned(),
            reason: manifest.reason,
            created_at: manifest.created_at,
            fingerprint: manifest.fingerprint.clone(),
            containers: manifest.containers.clone(),
            completed: manifest.completed.clone(),
            parent: Some(image.clone()),
        };
        let files = manifest.files.clone();
        let manifest = Manifest::new(namespace.clone(), copy.clone(), files, draft);
        partial.commit_as(&manifest).map(drop)
    }
}

fn not_good(image: &ImageId, source: ImageError) -> SaveError {
    SaveError::NotGood {
        image: image.clone(),
        source: Box::new(source),
    }
}

impl Partial {
    /// Links the files of a committed image, which never change, into this one.
    fn link_files(&self, original: &Image) -> Result<(), SaveError> {
        for file in &original.manifest().files {
            let (from, to) = (original.dir(), self.dir());
            rustix::fs::linkat(from, &file.name, to, &file.name, AtFlags::empty())
                .map_err(|e| PathError::new("link", &self.path().join(&file.name), e))?;
        }
        Ok(dirs::sync_dir(self.dir().as_fd(), self.path())?)
    }
}
