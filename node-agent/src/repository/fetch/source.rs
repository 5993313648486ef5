//! Place from which an image is fetched.

use std::fmt::{self, Display};
use std::fs::File;

use torpor_repository::{Progress, Repository, StoredImage};
use torpor_snapshots::Manifest;

use super::Error;
use super::plan::Want;
use crate::peers::client::Offer;

/// An image in its place.
pub(super) enum Source {
    Repository(Repository, StoredImage),
    Node(Offer),
}

impl Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Repository(repository, _) => f.write_str(repository.url()),
            Self::Node(offer) => write!(f, "node {:?}", offer.node()),
        }
    }
}

impl Source {
    /// Returns the content of the image's `manifest.json`.
    pub(super) fn manifest(&self) -> &[u8] {
        match self {
            Self::Repository(_, stored) => stored.manifest(),
            Self::Node(offer) => offer.manifest(),
        }
    }

    /// Checks the manifest: it must be the one that the SandboxSnapshot names, and its files those
    /// that the repository has.
    pub(super) fn checked(&self, want: &Want) -> Result<Manifest, Error> {
        let decoded = Manifest::decode(self.manifest());
        let (manifest, digest) = decoded.map_err(|error| Error::Corrupt(error.to_string()))?;
        if digest.to_string() != want.digest {
            return Err(Error::Corrupt(format!(
                "{self} has another image of this name (digest {digest}, not {})",
                want.digest
            )));
        }
        let named = manifest.files.iter();
        let named = named.map(|file| (file.name.as_str(), file.size));
        let are_there = match self {
            Self::Repository(_, stored) => {
                named.eq(stored.files().map(|file| (file.name, file.size)))
            }
            // The manifest is all that a node says of an image's files.
            Self::Node(_) => true,
        };
        match are_there {
            true => Ok(manifest),
            false => Err(Error::Corrupt(
                "the repository has other files than the manifest names".to_owned(),
            )),
        }
    }

    /// Downloads all files, in the order of the manifest.
    pub(super) async fn download(
        &mut self,
        manifest: &Manifest,
        files: Vec<File>,
        progress: &Progress,
    ) -> Result<(), Error> {
        match self {
            Self::Repository(repository, stored) => {
                Ok(repository.fetch(stored, files, progress).await?)
            }
            Self::Node(offer) => Ok(offer.download(manifest, files, progress).await?),
        }
    }
}
