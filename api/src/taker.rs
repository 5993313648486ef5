//! Pod that the controller made to continue from an image that other nodes can fetch.
//!
//! The controller writes the annotation [`TAKEN_BY`] on the SandboxSnapshot: `pending` before it
//! creates the Pod, then the Pod's UID and node.

use kube::ResourceExt;
use serde::{Deserialize, Serialize};

use crate::{SandboxSnapshot, annotations::TAKEN_BY};

/// Value of the annotation before the Pod is created.
pub const PENDING: &str = "pending";
/// Longest value that is read, in bytes.
const LONGEST: usize = 1024;

/// Pod that continues from an image, and its node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Taker {
    pub node_name: String,
    pub uid: String,
}

/// Content of the annotation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TakenBy {
    /// No Pod was made for the image.
    Nobody,
    /// A Pod may have been made.
    Unknown,
    Pod(Taker),
}

impl TakenBy {
    /// Reads the annotation of a snapshot. A value that cannot be read is `Unknown`.
    pub fn of(snapshot: &SandboxSnapshot) -> Self {
        match snapshot.annotations().get(TAKEN_BY) {
            None => Self::Nobody,
            Some(written) if written.len() > LONGEST => Self::Unknown,
            Some(written) => serde_json::from_str(written).map_or(Self::Unknown, Self::Pod),
        }
    }
}

impl Taker {
    /// Returns the value of the annotation.
    pub fn to_annotation(&self) -> String {
        // Two strings always have a JSON form.
        serde_json::to_string(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_cannot_be_read_makes_the_taker_unknown() {
        let of = |value: Option<&str>| {
            let mut snapshot = SandboxSnapshot::default();
            let written = value.map(|value| (TAKEN_BY.to_owned(), value.to_owned()));
            snapshot.metadata.annotations = Some(written.into_iter().collect());
            TakenBy::of(&snapshot)
        };
        let taker = Taker {
            node_name: "n".to_owned(),
            uid: "u".to_owned(),
        };
        assert_eq!(of(None), TakenBy::Nobody);
        assert_eq!(of(Some(&taker.to_annotation())), TakenBy::Pod(taker));
        for unclear in [PENDING, "", "{", &"x".repeat(LONGEST + 1)] {
            assert_eq!(of(Some(unclear)), TakenBy::Unknown, "{unclear:?}");
        }
    }
}
