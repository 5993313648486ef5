//! Whether a request may go on to its sandbox, now, later or not at all. [`decide`] chooses and is pure; [`Gate::admit`] waits, within bounds.

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::{Semaphore, watch};

use crate::{
    directory::{Changes, Directory, View},
    refusal::Refusal,
    resume::{Fence, Outcome, Resumer},
    target::Target,
};

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    pub namespace: String,
    pub sandbox_uid: Arc<str>,
    pub pod_uid: Arc<str>,
    pub address: IpAddr,
    pub port: u16,
}

/// What to do with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Route(Destination),
    /// Until the sandbox is there.
    Wait(Patience),
    /// Resume this version of the Sandbox, and wait.
    Resume {
        uid: Arc<str>,
        version: Arc<str>,
    },
    Refuse(Refusal),
}

/// How long a request may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// As long as upstream tries to connect to a sandbox that is not there yet.
    Dial,
    /// As long as a sandbox may take to come back.
    Resume,
}

/// Decides from what the directory shows.
pub fn decide(target: &Target, view: Option<&View>) -> Step {
    let Some(view) = view else {
        return Step::Wait(Patience::Dial);
    };
    let meant = match &target.uid {
        Some(uid) => **uid == *view.uid,
        // It would be another's sandbox once it is claimed.
        None => !view.unclaimed,
    };
    if !meant {
        return Step::Wait(Patience::Dial);
    }
    if view.suspended {
        return if view.resume {
            Step::Resume {
                uid: Arc::clone(&view.uid),
                version: Arc::clone(&view.version),
            }
        } else {
            Step::Refuse(Refusal::Suspended(target.id.clone()))
        };
    }
    match &view.pod {
        Some(pod) => Step::Route(Destination {
            namespace: target.namespace.clone(),
            sandbox_uid: Arc::clone(&view.uid),
            pod_uid: Arc::clone(&pod.uid),
            address: pod.address,
            port: target.port,
        }),
        // Perhaps somebody has just resumed it.
        None if view.resume => Step::Wait(Patience::Resume),
        None => Step::Wait(Patience::Dial),
    }
}

/// Bounds of waiting.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub dial: Duration,
    pub resume: Duration,
    /// Requests that wait at once.
    pub held: usize,
    /// Requests that wait for one sandbox at once, so that one cannot take all places.
    pub held_per_sandbox: usize,
}

/// Lets requests through when their sandbox is there.
#[derive(Debug)]
pub struct Gate {
    directory: Directory,
    resumer: Resumer,
    limits: Limits,
    places: Semaphore,
}

impl Gate {
    /// A gate with all places free.
    pub fn new(directory: Directory, resumer: Resumer, limits: Limits) -> Self {
        let places = Semaphore::new(limits.held.min(Semaphore::MAX_PERMITS));
        Self {
            directory,
            resumer,
            limits,
            places,
        }
    }

    /// The directory it looks into.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// How many requests wait.
    pub fn held(&self) -> usize {
        self.limits
            .held
            .saturating_sub(self.places.available_permits())
    }

    fn look(&self, target: &Target) -> Step {
        decide(
            target,
            self.directory
                .look_up(&target.namespace, &target.id)
                .as_ref(),
        )
    }

    /// Waits until the request may go on. Dropping the future ends the waiting, and nothing else.
    pub async fn admit(&self, target: &Target) -> Result<Destination, Refusal> {
        match self.look(target) {
            Step::Route(destination) => return Ok(destination),
            Step::Refuse(refusal) => return Err(refusal),
            Step::Wait(_) | Step::Resume { .. } => {}
        }
        let _place = self
            .places
            .try_acquire()
            .map_err(|_| Refusal::TooManyHeld)?;
        let changes =
            self.directory
                .changes(&target.namespace, &target.id, self.limits.held_per_sandbox);
        let mut changes = changes.ok_or(Refusal::TooManyHeld)?;
        let begin = Instant::now();
        loop {
            let (patience, outcome) = match self.look(target) {
                Step::Route(destination) => return Ok(destination),
                Step::Refuse(refusal) => return Err(refusal),
                Step::Wait(patience) => (patience, None),
                Step::Resume { uid, version } => {
                    let fence = Fence {
                        namespace: target.namespace.clone(),
                        name: target.id.clone(),
                        uid,
                        version,
                    };
                    (Patience::Resume, Some(self.resumer.ask(fence)))
                }
            };
            let (limit, late) = match patience {
                Patience::Dial => (self.limits.dial, Refusal::Unreachable(target.id.clone())),
                Patience::Resume => (
                    self.limits.resume,
                    Refusal::ResumeTimeout(target.id.clone()),
                ),
            };
            let left = limit.saturating_sub(begin.elapsed());
            match tokio::time::timeout(left, something_new(&mut changes, outcome)).await {
                Err(_) => return Err(late),
                Ok(Some(why)) => return Err(Refusal::NotResumed(target.id.clone(), why)),
                Ok(None) => {}
            }
        }
    }
}

/// How long to look only for changes after a try to resume whose outcome nobody knows; then to try again.
const UNKNOWN_OUTCOME: Duration = Duration::from_secs(1);

/// Waits until there is a reason to look again, or one to give up.
async fn something_new(
    changes: &mut Changes,
    outcome: Option<watch::Receiver<Outcome>>,
) -> Option<String> {
    let ended = async {
        let Some(mut outcome) = outcome else {
            return std::future::pending().await;
        };
        let last = outcome
            .wait_for(|outcome| *outcome != Outcome::Pending)
            .await;
        match last.map(|last| last.clone()) {
            Ok(Outcome::Refused(why)) => Some(why),
            // The watch will show it.
            Ok(Outcome::Asked | Outcome::Pending) => std::future::pending().await,
            Ok(Outcome::LookAgain) | Err(_) => {
                tokio::time::sleep(UNKNOWN_OUTCOME).await;
                None
            }
        }
    };
    tokio::select! {
        () = changes.next() => None,
        why = ended => why,
    }
}

#[cfg(test)]
mod tests;
