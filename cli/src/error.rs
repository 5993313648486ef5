//! What can go wrong: each says what was being done to what, and the remedy.

use std::time::Duration;

use crate::units;

/// Why a command did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot use the kubeconfig{of}")]
    Kubeconfig {
        /// ` FILE`, ` context NAME`, or nothing.
        of: String,
        #[source]
        source: Box<kube::config::KubeconfigError>,
    },
    #[error("cannot use the credentials of the kubeconfig")]
    Client(#[source] Box<kube::Error>),
    #[error("cannot {doing}")]
    Api {
        doing: String,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("cannot {doing}: the apiserver did not answer in {}", units::span(*limit))]
    NoAnswer { doing: String, limit: Duration },
    #[error("there is no Sandbox {name} in namespace {namespace}")]
    NoSandbox { namespace: String, name: String },
    #[error("Sandbox {name}: {message}")]
    Refused { name: String, message: String },
    #[error(
        "Sandbox {name}: not yet {goal} after {}; {last}. It goes on by itself: `kubectl torpor why {name}`",
        units::span(*limit)
    )]
    Timeout {
        name: String,
        goal: &'static str,
        limit: Duration,
        last: String,
    },
    #[error(
        "the watch of Sandbox {name} ended; what became of it is not known: `kubectl torpor get {name}`"
    )]
    WatchEnded { name: String },
    #[error("cannot write the output")]
    Output(#[source] std::io::Error),
    #[error("cannot write the output as {format}: {message}")]
    Format {
        format: &'static str,
        message: String,
    },
}

impl Error {
    /// A call that the apiserver answered with an error, or did not get.
    pub fn api(doing: impl Into<String>, source: kube::Error) -> Self {
        Self::Api {
            doing: doing.into(),
            source: Box::new(source),
        }
    }

    /// What to do about it, where the error itself does not say.
    pub fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::Kubeconfig { .. } => Some(
                "kubectl config get-contexts lists what there is; --kubeconfig or KUBECONFIG names the file",
            ),
            Self::Client(_) => Some("log in to the cluster again"),
            Self::Api { source, .. } => remedy_of(source),
            Self::NoAnswer { .. } => Some("is the cluster up? kubectl cluster-info tells"),
            Self::NoSandbox { .. } => Some("kubectl torpor get -A lists all"),
            _ => None,
        }
    }

    /// Whether the cluster does not serve the kind that was asked for.
    pub fn is_unknown_kind(&self) -> bool {
        matches!(self, Self::Api { source, .. } if matches!(&**source, kube::Error::Api(status) if status.is_not_found()))
    }

    /// Whether the object is another than the one that the call was made from.
    pub fn is_conflict(&self) -> bool {
        matches!(self, Self::Api { source, .. } if matches!(&**source, kube::Error::Api(status) if status.is_conflict()))
    }

    /// Whether nobody knows what became of it, as against a failure.
    pub fn is_unknown(&self) -> bool {
        matches!(
            self,
            Self::NoAnswer { .. } | Self::Timeout { .. } | Self::WatchEnded { .. }
        )
    }
}

fn remedy_of(error: &kube::Error) -> Option<&'static str> {
    Some(match error {
        kube::Error::Api(status) if status.is_forbidden() => {
            "you may not: ask for the right that the message names"
        }
        kube::Error::Api(status) if status.code == 401 => {
            "the cluster does not know you: log in again"
        }
        kube::Error::Api(status) if status.is_not_found() => {
            "the cluster does not know this kind: is Torpor installed? kubectl torpor doctor tells"
        }
        kube::Error::Service(_) | kube::Error::HyperError(_) => {
            "is the cluster up, and is it the right context? kubectl cluster-info tells"
        }
        _ => return None,
    })
}

/// An error with all its causes, in one line. Causes that repeat what was said are left out.
pub fn words(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}
