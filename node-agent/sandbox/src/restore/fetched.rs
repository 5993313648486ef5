//! Wait for an image that the node's agent fetches from a repository or another node.

use std::thread;
use std::time::{Duration, Instant};

use torpor_core::ids::ImageId;
use torpor_records::PodRecord;
use torpor_snapshots::Store;

use super::refusal::Refusal;
use crate::node::Node;

/// Time limit of the wait. containerd and the kubelet wait four minutes for a sandbox by default
/// (`runtimeRequestTimeout`, twice). After a failure the kubelet tries again.
const LIMIT: Duration = Duration::from_secs(90);
const PAUSE: Duration = Duration::from_millis(5);

/// Waits until the store has the image. Returns the agent's reason if the image was not fetched.
pub(super) fn wait(
    node: &Node,
    store: &Store,
    pod: &PodRecord,
    image: &ImageId,
) -> anyhow::Result<Option<Refusal>> {
    let begun = Instant::now();
    while store.image(&pod.namespace, image).is_err() {
        if let Some(failure) = node.records.fetch_failure(&pod.pod_uid)? {
            anyhow::ensure!(!failure.pod_ends, "{}", failure.message);
            return Ok(Some(Refusal {
                reason: reason(&failure.reason),
                message: failure.message,
            }));
        }
        anyhow::ensure!(
            begun.elapsed() < LIMIT,
            "image {image} is being fetched; the Pod's conditions have the progress"
        );
        thread::sleep(PAUSE);
    }
    Ok(None)
}

/// Returns a reason for conditions that is known here.
fn reason(written: &str) -> &'static str {
    const REASONS: [&str; 9] = [
        "ImageMissing",
        "ImageStale",
        "ImageCorrupt",
        "KeyMissing",
        "KeyServiceUnavailable",
        "NoRoom",
        "SourceNodeUnavailable",
        "RepositoryUnavailable",
        "RepositoryDenied",
    ];
    let mut known = REASONS.into_iter();
    known
        .find(|known| *known == written)
        .unwrap_or("RestoreFailed")
}
