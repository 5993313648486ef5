//! Resumes suspended Sandboxes: one patch at a time for each, whatever the number of requests.

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

/// Error of a patch that should resume a Sandbox.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The apiserver did not respond in time; the patch may have taken effect.
    #[error("no response from the apiserver in {0:?}")]
    Timeout(Duration),
    /// The apiserver refused the patch or could not be reached.
    #[error(transparent)]
    Kube(#[from] kube::Error),
}

impl Error {
    /// Returns a CamelCase reason for logs and metrics.
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

    /// Reports whether another attempt may succeed: the object changed, or the outcome is unknown.
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

/// Outcome of a patch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The patch is in flight.
    Pending,
    /// The patch succeeded; the watch will report the change.
    Patched,
    /// The Sandbox may have changed; the caller decides again on its new version.
    Retry,
    /// The apiserver refused the patch for this reason.
    Refused(String),
}

/// Sandbox to resume, with the version for which that was decided.
#[derive(Clone, Debug)]
pub struct Fence {
    pub namespace: String,
    pub name: String,
    pub uid: Arc<str>,
    pub version: Arc<str>,
}

/// Attempt to resume a Sandbox.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// resourceVersion of the Sandbox in the patch.
    pub version: Arc<str>,
    pub outcome: watch::Receiver<Outcome>,
    since: Instant,
}

/// Resumes Sandboxes by patches.
pub struct Resumer {
    client: Client,
    timeout: Duration,
    /// Slots of patches in flight.
    permits: Arc<Semaphore>,
    /// Last attempts by UID of the Sandbox.
    attempts: Mutex<HashMap<Arc<str>, Attempt>>,
}

/// Field manager of the patches.
const FIELD_MANAGER: &str = "sandbox-router";
/// Time for which a refusal applies to later requests, and before an attempt with an unknown
/// outcome is repeated.
const PAUSE: Duration = Duration::from_secs(1);
/// Most patches in flight: each takes a connection to the apiserver, and clients may ask for
/// thousands of sandboxes at once.
const AT_ONCE: usize = 64;
/// Most attempts kept before old ones are dropped.
const KEPT: usize = 1024;

impl fmt::Debug for Resumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Resumer(timeout {:?})", self.timeout)
    }
}

impl Resumer {
    /// Returns a resumer that patches through `client`, each call at most `timeout` long.
    pub fn new(client: Client, timeout: Duration) -> Self {
        Self {
            client,
            timeout,
            permits: Arc::new(Semaphore::new(AT_ONCE)),
            attempts: Mutex::default(),
        }
    }

    /// Resumes the Sandbox.
    ///
    /// All requests share one attempt while its patch is in flight, even an earlier version's, and
    /// until the watch reports its effect. The patch depends on no request: a client that
    /// disconnects does not cancel it for the others.
    pub fn resume(&self, fence: Fence) -> Attempt {
        let mut attempts = self.attempts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = attempts.get(&fence.uid)
            && last.applies_to(&fence)
        {
            return last.clone();
        }
        if attempts.len() >= KEPT {
            attempts.retain(|_, last| {
                last.since.elapsed() < PAUSE || *last.outcome.borrow() == Outcome::Pending
            });
        }
        let (sender, outcome) = watch::channel(Outcome::Pending);
        let uid = Arc::clone(&fence.uid);
        let last = Attempt {
            version: Arc::clone(&fence.version),
            since: Instant::now(),
            outcome,
        };
        attempts.insert(uid, last.clone());
        drop(attempts);
        let (client, timeout) = (self.client.clone(), self.timeout);
        let permits = Arc::clone(&self.permits);
        tokio::spawn(async move {
            // The semaphore is never closed.
            let _permit = permits.acquire_owned().await;
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

impl Attempt {
    /// Reports whether the attempt resumed an earlier version than this one, which is suspended
    /// again.
    pub fn was_undone(&self, version: &str) -> bool {
        *self.version != *version && *self.outcome.borrow() == Outcome::Patched
    }

    fn applies_to(&self, fence: &Fence) -> bool {
        match &*self.outcome.borrow() {
            Outcome::Pending => true,
            // The patch was fenced with the version: the next version is running.
            Outcome::Patched => self.version == fence.version,
            Outcome::Retry => self.version == fence.version && self.since.elapsed() < PAUSE,
            Outcome::Refused(_) => self.since.elapsed() < PAUSE,
        }
    }
}

fn outcome_of(result: Result<(), Error>) -> Outcome {
    match result {
        Ok(()) => Outcome::Patched,
        Err(error) if error.retry() => Outcome::Retry,
        Err(Error::Kube(kube::Error::Api(status))) => Outcome::Refused(status.reason.clone()),
        Err(error) => Outcome::Refused(error.reason().to_owned()),
    }
}

async fn patch(client: Client, timeout: Duration, fence: &Fence) -> Result<(), Error> {
    let api: Api<WatchedSandbox> = Api::namespaced(client, &fence.namespace);
    // UID and version fence the patch: it must not resume another Sandbox of the same name, nor
    // revert a user's change that the watch has not reported yet.
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
