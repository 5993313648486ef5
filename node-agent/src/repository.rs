//! Images in repositories: upload after the commit, download before the restore of a Pod whose
//! image is not on this node.
//!
//! | module | content |
//! |---|---|
//! | `classes` | repositories of SnapshotClasses |
//! | `upload` | uploads the images of this node's snapshots, and reports them in their status |
//! | `fetch` | fetches images for Pods of this node; `fetch/plan.rs` decides |
//! | `ask` | questions to the apiserver where a watch may be behind |
//! | `retries` | when an upload or a download that failed is tried again |
//! | `claims` | list of fetched images in the SandboxNode |

use std::sync::Arc;

use kube::Api;
use kube::runtime::watcher;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use torpor_api::snapshot::SnapshotClass;
use torpor_repository::Pace;

use self::classes::Repositories;
use self::fetch::Fetches;
use self::upload::Uploads;
use crate::args::RepositoryArgs;
use crate::peers::client::Peers;
use crate::reconcile::driver::Shared;
use crate::watches::{pump, reflect, trim_snapshot_class};

mod ask;
mod claims;
mod classes;
mod fetch;
mod retries;
mod upload;

/// Starts the uploads and downloads of this node. They end when `stop` is cancelled.
pub(crate) fn start(
    shared: &Arc<Shared>,
    pod_events: watch::Receiver<u64>,
    args: &RepositoryArgs,
    peers: Peers,
    stop: &CancellationToken,
    tasks: &mut JoinSet<anyhow::Result<()>>,
) {
    let client = shared.publisher.client().clone();
    let all = Api::<SnapshotClass>::all(client.clone());
    let (classes, events) = reflect(all, watcher::Config::default(), trim_snapshot_class);
    tasks.spawn(pump(events, stop.clone(), |_: &SnapshotClass| {}));
    let repositories = Arc::new(Repositories::new(client, classes.clone(), args));
    let uploads = Arc::new(Uploads {
        node: shared.node.clone(),
        snapshots: shared.snapshots.clone(),
        repositories: repositories.clone(),
        publisher: shared.publisher.clone(),
        metrics: shared.metrics.clone(),
        pace: Pace::new(args.upload_bandwidth.bytes().map(Into::into)),
        at_once: args.uploads_at_once,
    });
    let fetches = Arc::new(Fetches {
        node: shared.node.clone(),
        pods: shared.pods.clone(),
        pod_events,
        snapshots: shared.snapshots.clone(),
        repositories,
        peers,
        publisher: shared.publisher.clone(),
        metrics: shared.metrics.clone(),
        at_once: args.fetches_at_once,
    });
    let stop = stop.clone();
    tasks.spawn(async move {
        // Until the classes are known, each one would be reported as missing.
        tokio::select! {
            ready = classes.wait_until_ready() => ready?,
            () = stop.cancelled() => return Ok(()),
        }
        tokio::join!(
            upload::run(uploads, stop.clone()),
            fetch::run(fetches, stop)
        );
        Ok(())
    });
}
