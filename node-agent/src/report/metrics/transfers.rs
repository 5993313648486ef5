//! Metrics of images that move between this node, repositories and other nodes.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::{Metrics, SECONDS};

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OutcomeLabels {
    direction: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, Hash, PartialEq, Eq, EncodeLabelSet)]
struct DirectionLabel {
    direction: &'static str,
}

const UPLOAD: &str = "upload";
const FETCH: &str = "fetch";
const SEND: &str = "send";
const DONE: &str = "Done";

/// Metrics of uploads and downloads.
#[derive(Debug)]
pub(super) struct Transfers {
    ended: Family<OutcomeLabels, Counter>,
    bytes: Family<DirectionLabel, Counter>,
    seconds: Family<DirectionLabel, Histogram>,
}

impl Transfers {
    pub(super) fn new() -> Self {
        Self {
            ended: Family::default(),
            bytes: Family::default(),
            seconds: Family::new_with_constructor(|| Histogram::new(SECONDS)),
        }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "transfers",
            "Uploads of images to repositories, fetches from them or other nodes, and sends to other nodes, by outcome",
            self.ended.clone(),
        );
        registry.register(
            "transfer_bytes",
            "Bytes of images that passed the network: uploads and fetches compressed, except between nodes",
            self.bytes.clone(),
        );
        registry.register(
            "transfer_seconds",
            "Time of successful uploads, fetches and sends of images",
            self.seconds.clone(),
        );
    }

    fn ended(&self, direction: &'static str, outcome: &'static str) {
        let labels = OutcomeLabels { direction, outcome };
        self.ended.get_or_create(&labels).inc();
    }

    fn done(&self, direction: &'static str, bytes: u64, took: Duration) {
        self.ended(direction, DONE);
        let label = DirectionLabel { direction };
        self.bytes.get_or_create(&label).inc_by(bytes);
        let seconds = self.seconds.get_or_create(&label);
        seconds.observe(took.as_secs_f64());
    }
}

impl Metrics {
    /// Counts an upload of an image. `bytes`: those that were sent.
    pub(crate) fn uploaded(&self, bytes: u64, took: Duration) {
        self.transfers.done(UPLOAD, bytes, took);
    }

    /// Counts a failed attempt at an upload.
    pub(crate) fn upload_failed(&self, reason: &'static str) {
        self.transfers.ended(UPLOAD, reason);
    }

    /// Counts a download of an image. `bytes`: those that were received.
    pub(crate) fn fetched(&self, bytes: u64, took: Duration) {
        self.transfers.done(FETCH, bytes, took);
    }

    /// Counts a failed attempt at a download.
    pub(crate) fn fetch_failed(&self, reason: &'static str) {
        self.transfers.ended(FETCH, reason);
    }

    /// Counts an image that was sent to another node.
    pub(crate) fn sent(&self, bytes: u64, took: Duration) {
        self.transfers.done(SEND, bytes, took);
    }

    /// Counts a request of another node that got no image, or not all of it.
    pub(crate) fn not_sent(&self, reason: &'static str) {
        self.transfers.ended(SEND, reason);
    }
}
