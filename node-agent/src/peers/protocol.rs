//! Request for an image and the answer to it.
//!
//! `GET /v1/images/<namespace>/<image>` with the headers `torpor-node` (the asking node) and
//! `torpor-pod` (UID of the Pod that continues from the image). The answer's body is the image's
//! `manifest.json`, whose length is in `torpor-manifest-length`, and then the content of its files
//! in the manifest's order. Any other status has words as its body.

use std::time::Duration;

use hyper::header::HeaderMap;
use hyper::{StatusCode, Uri};
use torpor_api::reasons::restored;
use torpor_core::ids::{ImageId, Namespace, PodUid};

/// Header with the name of the asking node.
pub(super) const NODE: &str = "torpor-node";
/// Header with the UID of the Pod that continues from the image.
pub(super) const POD: &str = "torpor-pod";
/// Header of an answer: bytes of the manifest at the beginning of the body.
pub(super) const MANIFEST_LENGTH: &str = "torpor-manifest-length";

const PREFIX: &str = "/v1/images/";
/// Longest name of a node (RFC 1123 subdomain, as Kubernetes checks it).
const LONGEST_NAME: usize = 253;

/// Least bytes a second of a transfer, beside [`STALLED`].
const SLOWEST: u64 = 1 << 20;
/// Time without progress after which the other end counts as lost.
pub(super) const STALLED: Duration = Duration::from_secs(30);

/// Returns the time limit of a transfer of as many bytes.
pub(super) fn time_limit(bytes: u64) -> Duration {
    STALLED + Duration::from_secs(bytes / SLOWEST)
}

/// Request for an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) namespace: Namespace,
    pub(super) image: ImageId,
    pub(super) node: String,
    pub(super) pod: PodUid,
}

impl Request {
    /// Returns the path of the request.
    pub(super) fn path(&self) -> String {
        format!("{PREFIX}{}/{}", self.namespace, self.image)
    }

    /// Reads a request; none if it has another form.
    pub(super) fn parse(uri: &Uri, headers: &HeaderMap) -> Option<Self> {
        let (namespace, image) = uri.path().strip_prefix(PREFIX)?.split_once('/')?;
        let header = |name| headers.get(name)?.to_str().ok();
        let node = header(NODE).filter(|name| is_node_name(name))?;
        Some(Self {
            namespace: Namespace::new(namespace).ok()?,
            image: ImageId::parse(image).ok()?,
            node: node.to_owned(),
            pod: PodUid::new(header(POD)?).ok()?,
        })
    }
}

fn is_node_name(name: &str) -> bool {
    let is_part = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.');
    (1..=LONGEST_NAME).contains(&name.len())
        && name.bytes().all(is_part)
        && !name.starts_with(['.', '-'])
}

/// Reason why a node gets no image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The request has another form, or another server's address was used.
    Malformed,
    /// The apiserver does not say that the node has a Pod that continues from the image.
    Denied,
    /// The node does not have the image.
    Missing,
    /// A Pod of this node has continued from the image.
    Consumed,
    /// The image cannot be read, or the apiserver does not answer. Another attempt may succeed.
    Unavailable,
    /// As many images are being sent as may be at once.
    Busy,
}

impl Reason {
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::Malformed => StatusCode::BAD_REQUEST,
            Self::Denied => StatusCode::FORBIDDEN,
            Self::Missing => StatusCode::NOT_FOUND,
            Self::Consumed => StatusCode::CONFLICT,
            Self::Unavailable => StatusCode::BAD_GATEWAY,
            Self::Busy => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Returns the reason for the condition Restored of the Pod that waits for the image.
    pub(super) fn of_condition(self) -> &'static str {
        match self {
            Self::Missing => restored::IMAGE_MISSING,
            Self::Consumed => restored::IMAGE_STALE,
            Self::Malformed | Self::Denied | Self::Unavailable | Self::Busy => {
                restored::SOURCE_NODE_UNAVAILABLE
            }
        }
    }

    /// Returns the name in metrics.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Malformed => "Malformed",
            Self::Denied => "Denied",
            Self::Missing => "ImageMissing",
            Self::Consumed => "ImageStale",
            Self::Unavailable => "Unavailable",
            Self::Busy => "Busy",
        }
    }

    pub(super) fn of(status: StatusCode) -> Self {
        match status {
            StatusCode::BAD_REQUEST => Self::Malformed,
            StatusCode::FORBIDDEN => Self::Denied,
            StatusCode::NOT_FOUND => Self::Missing,
            StatusCode::CONFLICT => Self::Consumed,
            StatusCode::SERVICE_UNAVAILABLE => Self::Busy,
            _ => Self::Unavailable,
        }
    }
}

/// Refusal of a request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{words}")]
pub(super) struct Refusal {
    pub(super) reason: Reason,
    pub(super) words: String,
}

impl Refusal {
    pub(super) fn new(reason: Reason, words: impl Into<String>) -> Self {
        Self {
            reason,
            words: words.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(node: &'static str, pod: &'static str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(NODE, node.parse().expect("a value"));
        headers.insert(POD, pod.parse().expect("a value"));
        headers
    }

    #[test]
    fn a_request_is_read_as_it_was_written() {
        let uri = Uri::from_static("/v1/images/n/saved.1");
        let request = Request::parse(&uri, &headers("node-1", "p")).expect("a request");
        assert_eq!(request.path(), uri.path());
        assert_eq!((&*request.node, request.pod.as_str()), ("node-1", "p"));
    }

    #[test]
    fn a_request_with_a_path_or_a_name_of_another_form_is_refused() {
        let good = headers("node-1", "p");
        for path in [
            "/v1/images/n/../saved.1",
            "/v1/images/n/..",
            "/v1/images/../n/saved.1",
            "/v1/images/n/%2e%2e.1",
            "/v1/images/n/saved.1/pages.img",
            "/v1/images/n",
            "/images/n/saved.1",
        ] {
            let uri: Uri = path.parse().expect("a path");
            assert_eq!(Request::parse(&uri, &good), None, "{path}");
        }
        let uri = Uri::from_static("/v1/images/n/saved.1");
        for node in ["", "..", "a/b", "A", "a?b", "-a"] {
            assert_eq!(Request::parse(&uri, &headers(node, "p")), None, "{node}");
        }
        assert_eq!(Request::parse(&uri, &headers("node-1", "../p")), None);
        assert_eq!(Request::parse(&uri, &HeaderMap::new()), None);
    }

    #[test]
    fn a_reason_survives_its_status() {
        for reason in [
            Reason::Malformed,
            Reason::Denied,
            Reason::Missing,
            Reason::Consumed,
            Reason::Unavailable,
            Reason::Busy,
        ] {
            assert_eq!(Reason::of(reason.status()), reason);
        }
    }
}
