//! A wait for an object of the cluster to reach a state.

use std::time::Duration;

use futures::StreamExt;
use kube::api::Api;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::connect::Cluster;
use crate::error::{Error, full_message};
use crate::goal::Progress;

/// A wait, as its messages describe it.
#[derive(Clone, Copy)]
pub(crate) struct Wait<'a> {
    pub(crate) cluster: &'a Cluster,
    /// Name of the Sandbox that the command is about.
    pub(crate) sandbox: &'a str,
    /// Word for the reached state, to follow "not yet".
    pub(crate) goal: &'static str,
    pub(crate) limit: Duration,
    /// Receives a line for each change of the progress.
    pub(crate) say: &'a (dyn Fn(&str) + Sync),
}

impl<'a> Wait<'a> {
    pub(crate) fn new(
        cluster: &'a Cluster,
        sandbox: &'a str,
        goal: &'static str,
        limit: Duration,
        say: &'a (dyn Fn(&str) + Sync),
    ) -> Self {
        Self {
            cluster,
            sandbox,
            goal,
            limit,
            say,
        }
    }

    /// Watches `known`, and no other object that gets its name, until `progress` is done or
    /// refused, or the time limit passes. Returns the object as it is then.
    pub(crate) async fn until<K>(
        &self,
        api: Api<K>,
        known: &K,
        mut progress: impl FnMut(&K) -> Progress,
    ) -> Result<K, Error>
    where
        K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + Send + 'static,
    {
        let name = known.name_any();
        let ended = |why: &str| {
            Progress::Refused(match name == self.sandbox {
                true => why.to_owned(),
                false => format!("{} {name} was {why}", K::kind(&())),
            })
        };
        let found = self.until_named(api, &name, |now| match now {
            None => ended(DELETED),
            Some(now) if now.uid() != known.uid() => ended(RECREATED),
            Some(now) => progress(now),
        });
        // A wait that is done has an object.
        found.await.map(|now| now.unwrap_or_else(|| known.clone()))
    }

    /// Does the same with whatever object has the name; `progress` gets none while there is none.
    pub(crate) async fn until_named<K>(
        &self,
        api: Api<K>,
        name: &str,
        mut progress: impl FnMut(Option<&K>) -> Progress,
    ) -> Result<Option<K>, Error>
    where
        K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned + Send + 'static,
    {
        let deadline = Instant::now() + self.limit;
        let events = watcher::watch_object(api, name);
        let mut events = std::pin::pin!(events.default_backoff());
        let mut last = "its state was not observed".to_owned();
        loop {
            let Ok(event) = tokio::time::timeout_at(deadline, events.next()).await else {
                return Err(self.timed_out(last));
            };
            let status = match event {
                Some(Ok(now)) => match progress(now.as_ref()) {
                    Progress::Done => return Ok(now),
                    Progress::Refused(message) => return Err(refused(self.sandbox, &message)),
                    Progress::Waiting(words) => words,
                },
                Some(Err(error)) if is_forbidden(&error) => {
                    return Err(self.unwatched(&cause(&error)));
                }
                // The watch restarts itself after a delay.
                Some(Err(error)) => format!("the watch was interrupted: {}", cause(&error)),
                None => return Err(self.unwatched("the watch ended")),
            };
            if status != last {
                (self.say)(&format!("{}: {status}", self.sandbox));
                last = status;
            }
        }
    }

    fn timed_out(&self, last: String) -> Error {
        Error::Timeout {
            namespace: self.cluster.namespace.clone(),
            name: self.sandbox.to_owned(),
            goal: self.goal,
            limit: self.limit,
            last,
        }
    }

    fn unwatched(&self, why: &str) -> Error {
        Error::Unwatched {
            namespace: self.cluster.namespace.clone(),
            name: self.sandbox.to_owned(),
            why: why.to_owned(),
        }
    }
}

pub(crate) const DELETED: &str = "deleted meanwhile";
pub(crate) const RECREATED: &str = "deleted meanwhile, and created again";

/// Returns the error of a Sandbox for which the command cannot do its work.
pub(crate) fn refused(name: &str, message: &str) -> Error {
    Error::Refused {
        name: name.to_owned(),
        message: message.to_owned(),
    }
}

/// Reports whether the apiserver denies the watch, so that a retry cannot succeed.
fn is_forbidden(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchError, WatchFailed, WatchStartFailed};
    let status = match error {
        InitialListFailed(kube::Error::Api(status))
        | WatchStartFailed(kube::Error::Api(status))
        | WatchFailed(kube::Error::Api(status))
        | WatchError(status) => status,
        _ => return false,
    };
    status.is_forbidden() || status.code == 401
}

/// Returns why a watch failed.
///
/// The text of the error itself repeats the cause in Rust's debug notation.
fn cause(error: &watcher::Error) -> String {
    full_message(std::error::Error::source(error).unwrap_or(error))
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(403, "Forbidden", true)]
    #[case(401, "Unauthorized", true)]
    #[case(410, "Expired", false)]
    #[case(500, "InternalError", false)]
    fn a_denied_watch_is_not_retried(
        #[case] code: u16,
        #[case] reason: &str,
        #[case] forbidden: bool,
    ) {
        let status = || Status::failure("words", reason).with_code(code).boxed();
        for error in [
            watcher::Error::InitialListFailed(kube::Error::Api(status())),
            watcher::Error::WatchStartFailed(kube::Error::Api(status())),
            watcher::Error::WatchError(status()),
        ] {
            assert_eq!(is_forbidden(&error), forbidden, "{error}");
            assert!(cause(&error).starts_with("words"), "{error}");
            assert!(!cause(&error).contains("Status"), "{error}");
        }
    }
}
