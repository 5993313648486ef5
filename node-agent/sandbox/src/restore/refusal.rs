//! Refusals of a restore, each with a reason for conditions.

use torpor_records::config::Revoked;
use torpor_snapshots::Mismatch;

/// The error of an image that was not restored: a reason for conditions, and a message.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    pub reason: &'static str,
    pub message: String,
}

impl From<torpor_snapshots::ImageError> for Refusal {
    fn from(error: torpor_snapshots::ImageError) -> Self {
        let reason = error.reason();
        Self {
            reason,
            message: format!("{:#}", anyhow::Error::new(error)),
        }
    }
}

impl From<Mismatch> for Refusal {
    fn from(mismatch: Mismatch) -> Self {
        Self {
            reason: mismatch.reason(),
            message: mismatch.to_string(),
        }
    }
}

impl From<Revoked> for Refusal {
    fn from(revoked: Revoked) -> Self {
        Self {
            reason: Revoked::REASON,
            message: revoked.to_string(),
        }
    }
}

/// Returns the reason of a failed restore: the refusal's own, or `RestoreFailed`.
pub(super) fn reason_of(error: &anyhow::Error) -> &'static str {
    let refusal = error.downcast_ref::<Refusal>();
    refusal.map_or("RestoreFailed", |refusal| refusal.reason)
}
