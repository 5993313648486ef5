//! Error of one attempt to fetch an image.

use torpor_api::reasons::restored as reasons;

use crate::peers::client;
use crate::reconcile::driver::ask::Error as AskError;
use crate::reconcile::observe::words;
use crate::repository::classes;

/// Error of one attempt to fetch an image.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Class(#[from] classes::Error),
    #[error("{}", .0.words())]
    Repository(#[from] torpor_repository::Error),
    #[error(transparent)]
    Peer(#[from] client::Error),
    #[error("{0}")]
    Corrupt(String),
    #[error("{0}")]
    NoRoom(String),
    #[error("cannot write the image to this node's disk: {0}")]
    Disk(String),
    #[error("{}", words(.0))]
    Ask(#[from] AskError),
}

impl Error {
    /// Returns the reason for the Pod's condition Restored.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Class(_) | Self::Ask(_) => reasons::REPOSITORY_UNAVAILABLE,
            Self::Peer(error) => error.reason(),
            Self::Repository(error) => match error.reason() {
                "RepositoryDenied" => reasons::REPOSITORY_DENIED,
                "ImageMissing" => reasons::IMAGE_MISSING,
                "ImageCorrupt" => reasons::IMAGE_CORRUPT,
                "KeyMissing" => reasons::KEY_MISSING,
                "KeyServiceUnavailable" => reasons::KEY_SERVICE_UNAVAILABLE,
                "ImageUnreadable" => reasons::RESTORE_FAILED,
                _ => reasons::REPOSITORY_UNAVAILABLE,
            },
            Self::Corrupt(_) => reasons::IMAGE_CORRUPT,
            Self::NoRoom(_) => reasons::NO_ROOM,
            Self::Disk(_) => reasons::RESTORE_FAILED,
        }
    }

    /// Reports whether another attempt fails too, as far as this node can tell.
    pub(super) fn is_final(&self) -> bool {
        match self {
            Self::Repository(error) => error.is_final(),
            Self::Peer(error) => error.is_final(),
            Self::Corrupt(_) => true,
            Self::Class(_) | Self::NoRoom(_) | Self::Disk(_) | Self::Ask(_) => false,
        }
    }

    /// Reports whether the image may be fetched from another place nevertheless. A node whose Pod
    /// has continued from the image decides for all places.
    pub(super) fn is_of_place(&self) -> bool {
        match self {
            Self::Peer(error) => error.reason() != reasons::IMAGE_STALE,
            Self::Corrupt(_) => true,
            _ => false,
        }
    }

    /// Reports whether the node that has the image only has no time for it.
    pub(super) fn is_busy(&self) -> bool {
        matches!(self, Self::Peer(error) if error.is_busy())
    }
}

pub(super) fn disk_error(error: &dyn std::fmt::Display) -> Error {
    Error::Disk(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::Reason;

    #[test]
    fn a_repository_stands_in_for_a_node_unless_the_memory_ran_there() {
        let refused = |reason| {
            Error::Peer(client::Error::Refused {
                node: "n".to_owned(),
                reason,
                words: String::new(),
            })
        };
        assert!(refused(Reason::Missing).is_of_place());
        assert!(refused(Reason::Unavailable).is_of_place());
        assert!(!refused(Reason::Consumed).is_of_place());
        assert!(Error::Corrupt(String::new()).is_of_place());
        assert!(!Error::NoRoom(String::new()).is_of_place());
    }
}
