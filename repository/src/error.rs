//! Errors of requests to a repository.

use std::io;

/// Error of an operation on a repository.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {doing} {object} in {repository}")]
    Request {
        doing: &'static str,
        object: String,
        repository: String,
        #[source]
        source: Box<object_store::Error>,
    },
    #[error("{repository} has no image {image}")]
    Missing { image: String, repository: String },
    #[error("{repository} has no archive {object}")]
    NoArchive { object: String, repository: String },
    #[error("{object} in {repository} is damaged: {why}")]
    Damaged {
        object: String,
        repository: String,
        why: String,
    },
    #[error(
        "{object} in {repository} is encrypted with key {key:?}, which the Secret of the repository lacks"
    )]
    KeyMissing {
        object: String,
        repository: String,
        key: String,
    },
    #[error("encryption key {key:?} for {repository} is not open: {why}")]
    KeyShut {
        repository: String,
        key: String,
        why: String,
    },
    #[error("cannot {doing} {name:?} of image {image}")]
    Local {
        doing: &'static str,
        name: String,
        image: String,
        #[source]
        source: io::Error,
    },
    #[error("file {name:?} of image {image} has changed while it was uploaded")]
    Changed { name: String, image: String },
}

/// Reports whether an object was not found because its bucket does not exist. S3 and GCS answer
/// with the code `NoSuchBucket`, Azure with `ContainerNotFound`.
pub(crate) fn lacks_bucket(error: &object_store::Error) -> bool {
    let object_store::Error::NotFound { source, .. } = error else {
        return false;
    };
    let answer = source.to_string();
    ["<Code>NoSuchBucket<", "<Code>ContainerNotFound<"]
        .iter()
        .any(|code| answer.contains(code))
}

impl Error {
    /// Reports whether another attempt fails too, as long as nobody changes the repository or its
    /// keys.
    pub fn is_final(&self) -> bool {
        match self {
            Self::Missing { .. }
            | Self::NoArchive { .. }
            | Self::Damaged { .. }
            | Self::KeyMissing { .. } => true,
            Self::Request { .. }
            | Self::KeyShut { .. }
            | Self::Local { .. }
            | Self::Changed { .. } => false,
        }
    }

    /// Returns the reason for conditions.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Request { source, .. } => match **source {
                object_store::Error::Unauthenticated { .. }
                | object_store::Error::PermissionDenied { .. } => "RepositoryDenied",
                _ => "RepositoryUnavailable",
            },
            Self::Missing { .. } | Self::NoArchive { .. } => "ImageMissing",
            Self::Damaged { .. } => "ImageCorrupt",
            Self::KeyMissing { .. } => "KeyMissing",
            Self::KeyShut { .. } => "KeyServiceUnavailable",
            Self::Local { .. } | Self::Changed { .. } => "ImageUnreadable",
        }
    }

    /// Returns the error with its causes, in one line.
    pub fn words(&self) -> String {
        words(self)
    }
}

/// Returns an error with its causes, in one line.
pub(crate) fn words(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        words.push_str(": ");
        words.push_str(error.to_string().lines().next().unwrap_or_default());
        cause = error.source();
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_bucket_is_no_missing_object() {
        let not_found = |answer: &str| object_store::Error::NotFound {
            path: "chunks/00".to_owned(),
            source: answer.to_owned().into(),
        };
        assert!(lacks_bucket(&not_found(
            "404 Not Found: <Error><Code>NoSuchBucket</Code></Error>"
        )));
        assert!(lacks_bucket(&not_found("<Code>ContainerNotFound</Code>")));
        assert!(!lacks_bucket(&not_found("<Code>NoSuchKey</Code>")));
        assert!(
            !lacks_bucket(&not_found("NoSuchBucket/chunks/00")),
            "a name"
        );
    }
}
