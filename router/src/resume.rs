//! Resumes suspended Sandboxes: one patch at a time for each, however many requests ask.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::sync::{Semaphore, watch};

use crate::watched::WatchedSandbox;

/// A patch did not resume the Sandbox.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No answer in time; it may have taken effect.
    #[error("no answer from the apiserver in {0:?}")]
    Timeout(Duration),
    /// The apiserver refused, or could not be reached.
    #[error(transparent)]
    Kube(#[from] kube::Error),
}

impl Error {
    /// One word for logs and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Timeout(_) => "Timeout",
            Self::Kube(kube::Error::Api(status)) if status.is_conflict() => "Conflict",
            Self::Kube(kube::Error::Api(status)) if status.is_not_found() => "NotFound",
            Self::Kube(kube::Error::Api(status)) if status.is_forbidden() => "Forbidden",
            Self::Kube(kube::Error::Api(_)) => "Refused",
            Self::Kube(_) => "Unreachable",
        }
    }

    /// Whether looking again may help: the object changed, or nobody knows what happened.
    pub fn retry(&self) -> bool {
        match self {
            Self::Timeout(_) => true,
            Self::Kube(kube::Error::Api(status)) => {
                status.is_conflict()
                    || status.is_not_found()
                    || status.code >= 500
                    || status.code == 429
            }
            Self::Kube(_) => true,
        }
    }
}

/// How a patch ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Under way.
    Pending,
    /// The Sandbox shall run; the watch will show it.
    Asked,
    /// Look again: another version of the Sandbox decides.
    LookAgain,
    /// It will not be resumed.
    Refused(String),
}

/// The Sandbox that shall run, as it was when that was decided.
#[derive(Clone, Debug)]
pub struct Fence {
    pub namespace: String,
    pub name: String,
    pub uid: Arc<str>,
    pub version: Arc<str>,
}

/// A try to resume a Sandbox.
#[derive(Clone, Debug)]
pub struct Try {
    /// Of the Sandbox when the patch was made.
    pub version: Arc<str>,
    pub outcome: watch::Receiver<Outcome>,
    since: Instant,
}

/// Makes the patches.
pub struct Resumer {
    client: Client,
    timeout: Duration,
    /// Patches under way at once.
    places: Arc<Semaphore>,
    /// By UID of the Sandbox.
    tries: Mutex<HashMap<Arc<str>, Try>>,
}

/// Field manager of the patches.
const FIELD_MANAGER: &str = "sandbox-router";
/// How long a refusal stands for requests that come after it, and how long before a try of unknown outcome is repeated.
const PAUSE: Duration = Duration::from_secs(1);
/// Patches under way at once: each takes a connection to the apiserver, and thousands of sandboxes may be asked for in one moment.
const AT_ONCE: usize = 64;
/// Tries kept before old ones are dropped.
const KEPT: usize = 1024;

impl fmt::Debug for Resumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Resumer(timeout {:?})", self.timeout)
    }
}

impl Resumer {
    /// Patches through `client`, each call at most `timeout` long.
    pub fn new(client: Client, timeout: Duration) -> Self {
        Self {
            client,
            timeout,
            places: Arc::new(Semaphore::new(AT_ONCE)),
            tries: Mutex::default(),
        }
    }

    /// Asks for the Sandbox to run. All who ask while a patch is under way, also one of an earlier version, or before the watch shows what it did, get the same try. The
    /// patch does not depend on any of them: whoever goes away takes nothing from the others.
    pub fn ask(&self, fence: Fence) -> Try {
        let mut tries = self.tries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = tries.get(&fence.uid)
            && last.stands_for(&fence)
        {
            return last.clone();
        }
        if tries.len() >= KEPT {
            tries.retain(|_, last| {
                last.since.elapsed() < PAUSE || *last.outcome.borrow() == Outcome::Pending
            });
        }
        let (sender, outcome) = watch::channel(Outcome::Pending);
        let uid = Arc::clone(&fence.uid);
        let last = Try {
            version: Arc::clone(&fence.version),
            since: Instant::now(),
            outcome,
        };
        tries.insert(uid, last.clone());
        drop(tries);
        let (client, timeout) = (self.client.clone(), self.timeout);
        let places = Arc::clone(&self.places);
        tokio::spawn(async move {
            // The semaphore is never closed.
            let _place = places.acquire_owned().await;
            let result = patch(client, timeout, &fence).await;
            let Fence {
                namespace, name, ..
            } = &fence;
            match &result {
                Ok(()) => tracing::info!(namespace, name, "resumed for a request"),
                Err(error) => {
                    tracing::warn!(namespace, name, %error, reason = error.reason(), "not resumed");
                }
            }
            sender.send_replace(outcome_of(result));
        });
        last
    }
}

impl Try {
    /// Whether it resumed an earlier version than this one, which is suspended again.
    pub fn was_undone(&self, version: &str) -> bool {
        *self.version != *version && *self.outcome.borrow() == Outcome::Asked
    }

    fn stands_for(&self, fence: &Fence) -> bool {
        match &*self.outcome.borrow() {
            Outcome::Pending => true,
            // The patch was fenced with the version: what follows it is running.
            Outcome::Asked => self.version == fence.version,
            Outcome::LookAgain => self.version == fence.version && self.since.elapsed() < PAUSE,
            Outcome::Refused(_) => self.since.elapsed() < PAUSE,
        }
    }
}

fn outcome_of(result: Result<(), Error>) -> Outcome {
    match result {
        Ok(()) => Outcome::Asked,
        Err(error) if error.retry() => Outcome::LookAgain,
        Err(Error::Kube(kube::Error::Api(status))) => Outcome::Refused(status.reason.clone()),
        Err(error) => Outcome::Refused(error.reason().to_owned()),
    }
}

async fn patch(client: Client, timeout: Duration, fence: &Fence) -> Result<(), Error> {
    let api: Api<WatchedSandbox> = Api::namespaced(client, &fence.namespace);
    // Exactly the object that was looked at: not another of its name, and not against a change of mind that the watch has not shown yet.
    let patch = json!({
        "metadata": {"uid": &*fence.uid, "resourceVersion": &*fence.version},
        "spec": {"operatingMode": "Running"},
    });
    let params = PatchParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PatchParams::default()
    };
    let patch = Patch::Merge(&patch);
    let call = api.patch(&fence.name, &params, &patch);
    match tokio::time::timeout(timeout, call).await {
        Ok(result) => Ok(result.map(|_| ())?),
        Err(_) => Err(Error::Timeout(timeout)),
    }
}
