//! The cluster's nodes, for the staging of images and for claims that prefer labels of nodes. The
//! list is kept for a while, for all of them.

use std::{
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::Mutex;

pub use super::fit::NodeFacts;
use crate::calls::{self, Apiserver};

/// Time for which a list of the nodes is used again.
const FRESH: Duration = Duration::from_secs(30);
/// Longest time that a claim waits for the list.
const CLAIM_WAITS: Duration = Duration::from_secs(2);

/// Nodes of the cluster; `None`: the controller may not list them.
type Listed = Option<Arc<[NodeFacts]>>;

/// Nodes of the cluster, as listed last.
#[derive(Debug, Default)]
pub struct Nodes {
    last: Mutex<Option<(Instant, Listed)>>,
    /// Time of the last list that failed for a claim.
    failed: std::sync::Mutex<Option<Instant>>,
}

impl Nodes {
    /// Returns the nodes for a claim, which waits for them at most [`CLAIM_WAITS`]; none if they
    /// cannot be listed. After a failure they are not asked for again within [`FRESH`].
    pub async fn for_claim(&self, api: &Apiserver) -> Arc<[NodeFacts]> {
        let failed = || self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failed().is_some_and(|at| at.elapsed() < FRESH) {
            return [].into();
        }
        let why = match tokio::time::timeout(CLAIM_WAITS, self.listed(api)).await {
            Ok(Ok(listed)) => return listed.unwrap_or_default(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {CLAIM_WAITS:?}"),
        };
        *failed() = Some(Instant::now());
        tracing::warn!(
            why,
            "cannot list the nodes; labels in torpor.dev/node-preference are ignored"
        );
        [].into()
    }

    /// Returns the nodes as they were within the last [`FRESH`].
    pub(super) async fn listed(&self, api: &Apiserver) -> Result<Listed, calls::Error> {
        let mut last = self.last.lock().await;
        if let Some((at, listed)) = &*last
            && at.elapsed() < FRESH
        {
            return Ok(listed.clone());
        }
        let listed = api.list_cluster(NodeFacts::of).await?;
        let listed = listed.map(Arc::from);
        *last = Some((Instant::now(), listed.clone()));
        Ok(listed)
    }
}
