//! Nodes on which images may be staged. The list is kept for a while, for all templates.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Mutex;

use super::fit::NodeFacts;
use crate::calls::{self, Apiserver};

/// Time for which a list of the nodes is used again.
const FRESH: Duration = Duration::from_secs(30);

/// Nodes of the cluster; `None`: the controller may not list them.
type Listed = Option<Arc<[NodeFacts]>>;

/// Nodes of the cluster, as listed last.
#[derive(Debug, Default)]
pub struct Nodes(Mutex<Option<(Instant, Listed)>>);

impl Nodes {
    /// Returns the nodes as they were within the last [`FRESH`].
    pub(super) async fn listed(&self, api: &Apiserver) -> Result<Listed, calls::Error> {
        let mut last = self.0.lock().await;
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
