//! List of fetched images in the node's SandboxNode (`status.fetched`).
//!
//! The list is the fence of a restore on another node than the image's own. An entry is in the API
//! before the Pod can be restored from the image, so the controller makes no second Pod for an
//! image that the first one may have used. Only this node's agent writes the list.

use kube::Client;
use kube::api::{Api, Patch, PatchParams};
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

/// The list as the apiserver has it.
pub(super) struct Claims {
    api: Api<SandboxNode>,
    node: String,
    /// None until the list has been read.
    known: Option<Vec<FetchedImage>>,
}

impl Claims {
    pub(super) fn new(client: Client, node: String) -> Self {
        let api = Api::all(client);
        Self {
            api,
            node,
            known: None,
        }
    }

    /// Returns the list; reads it once. The agent may not read SandboxNodes; a patch without a
    /// change returns the object.
    pub(super) async fn read(&mut self) -> Result<&[FetchedImage], Error> {
        if self.known.is_none() {
            let found = self.patch(json!({})).await?;
            self.known = Some(found);
        }
        Ok(self.known.as_deref().unwrap_or_default())
    }

    /// Replaces the list, unless it is already so.
    pub(super) async fn write(&mut self, claims: &[FetchedImage]) -> Result<(), Error> {
        if self.known.as_deref() == Some(claims) {
            return Ok(());
        }
        // A write without an answer may have happened.
        self.known = None;
        let fetched = match claims {
            [] => json!(null),
            claims => json!(claims),
        };
        let found = self
            .patch(json!({ "status": { "fetched": fetched } }))
            .await?;
        self.known = Some(found);
        Ok(())
    }

    async fn patch(&self, patch: serde_json::Value) -> Result<Vec<FetchedImage>, Error> {
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(patch));
        let patched = self.api.patch_status(&self.node, &parameters, &patch);
        let node = self.node.clone();
        match tokio::time::timeout(API_LIMIT, patched).await {
            Err(_) => Err(Error::Timeout { node }),
            Ok(Err(source)) => Err(Error::Api { node, source }),
            Ok(Ok(found)) => Ok(found.status.unwrap_or_default().fetched),
        }
    }
}
