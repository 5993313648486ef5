//! List of fetched images in the node's SandboxNode (`status.fetched`).
//!
//! The list is the fence of a restore on another node than the image's own. An entry is in the API
//! before the Pod can be restored from the image, so the controller makes no second Pod for an
//! image that the first one may have used. Only this node's agent writes the list.

use std::time::{Duration, Instant};

use kube::api::{Api, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::json;
use torpor_api::node::{FetchedImage, SandboxNode};

use crate::report::publish::API_LIMIT;

/// Error: the list could not be read or written.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot write the fetched images into SandboxNode {node:?}: {source}")]
    Api { node: String, source: kube::Error },
    #[error("the apiserver did not answer the write of the fetched images of SandboxNode {node:?}")]
    Timeout { node: String },
}

/// Time after which the list is read again: a SandboxNode that was deleted is made anew without it.
pub(super) const READ_AGAIN: Duration = Duration::from_secs(60);

/// The list as the apiserver has it.
pub(super) struct Claims {
    api: Api<SandboxNode>,
    node: String,
    /// The list, and when it was read or written. None if that is not known.
    known: Option<(Vec<FetchedImage>, Instant)>,
    /// The list that was written last, and the UID of the object.
    last: Option<(Vec<FetchedImage>, String)>,
}

impl Claims {
    pub(super) fn new(client: Client, node: String) -> Self {
        Self {
            api: Api::all(client),
            node,
            known: None,
            last: None,
        }
    }

    /// Returns the list. The agent may not read SandboxNodes; a patch without a change returns the
    /// object. The list of an object that was deleted meanwhile is kept.
    pub(super) async fn read(&mut self) -> Result<Vec<FetchedImage>, Error> {
        // An empty list cannot be lost, so it is read once.
        let is_fresh = |(known, at): &&(Vec<FetchedImage>, Instant)| {
            known.is_empty() || at.elapsed() < READ_AGAIN
        };
        if let Some((known, _)) = self.known.as_ref().filter(is_fresh) {
            return Ok(known.clone());
        }
        let (found, uid) = self.patch(json!({})).await?;
        self.known = Some((found.clone(), Instant::now()));
        match &self.last {
            Some((last, of)) if *of != uid => Ok(last.clone()),
            _ => Ok(found),
        }
    }

    /// Replaces the list, unless it is already so.
    pub(super) async fn write(&mut self, claims: &[FetchedImage]) -> Result<(), Error> {
        if self
            .known
            .as_ref()
            .is_some_and(|(known, _)| known == claims)
        {
            return Ok(());
        }
        // A write without an answer may have happened.
        self.known = None;
        let fetched = match claims {
            [] => json!(null),
            claims => json!(claims),
        };
        let patch = json!({ "status": { "fetched": fetched } });
        let (found, uid) = self.patch(patch).await?;
        self.known = Some((found.clone(), Instant::now()));
        self.last = Some((found, uid));
        Ok(())
    }

    async fn patch(&self, patch: serde_json::Value) -> Result<(Vec<FetchedImage>, String), Error> {
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(patch));
        let patched = self.api.patch_status(&self.node, &parameters, &patch);
        let node = self.node.clone();
        match tokio::time::timeout(API_LIMIT, patched).await {
            Err(_) => Err(Error::Timeout { node }),
            Ok(Err(source)) => Err(Error::Api { node, source }),
            Ok(Ok(found)) => {
                let uid = found.uid().unwrap_or_default();
                Ok((found.status.unwrap_or_default().fetched, uid))
            }
        }
    }
}
