//! Admission of requests to sandboxes: now, later or not at all.
//!
//! [`decide`] chooses and is pure; [`Gate::admit`] waits, within limits.

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::watch;

use crate::{
    directory::{Changes, Directory, View},
    refusal::Refusal,
    resume::{Attempt, Fence, Outcome, Resumer},
    target::Target,
    wait_slots::{Bounds, WaitSlots},
};

/// Pod and port that receive a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Destination {
    pub namespace: String,
    pub sandbox_uid: Arc<str>,
    pub pod_uid: Arc<str>,
    pub address: IpAddr,
    pub port: u16,
}

/// Next step of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Route(Destination),
    /// Wait until the sandbox is ready.
    Wait(WaitLimit),
    /// Resume this version of the Sandbox and wait.
    Resume {
        uid: Arc<str>,
        version: Arc<str>,
    },
    Refuse(Refusal),
}

/// Limit of the time that a request is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitLimit {
    /// The time for which upstream tries to connect to a sandbox that is not ready yet.
    Dial,
    /// The time that a sandbox may take to resume.
    Resume,
}

/// Decides the next step from the directory's view of the Sandbox.
pub fn decide(target: &Target, view: Option<&View>) -> Step {
    let Some(view) = view else {
        return Step::Wait(WaitLimit::Dial);
    };
    if !means(target, view) {
        return Step::Wait(WaitLimit::Dial);
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
        // Another client may have just resumed the Sandbox.
        None if view.resume => Step::Wait(WaitLimit::Resume),
        None => Step::Wait(WaitLimit::Dial),
    }
}

/// Reports whether a target means the Sandbox of its name.
fn means(target: &Target, view: &View) -> bool {
    match &target.uid {
        Some(uid) => **uid == *view.uid,
        // An unclaimed Sandbox will belong to another user.
        None => !view.unclaimed,
    }
}

/// Limits of held requests.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub dial: Duration,
    pub resume: Duration,
    /// Most requests held at once.
    pub held: Bounds,
}

/// Holds requests until their sandboxes are ready.
#[derive(Debug)]
pub struct Gate {
    directory: Directory,
    resumer: Resumer,
    limits: Limits,
    slots: WaitSlots,
}

impl Gate {
    /// Returns a gate that holds no request.
    pub fn new(directory: Directory, resumer: Resumer, limits: Limits) -> Self {
        let slots = WaitSlots::new(limits.held);
        Self {
            directory,
            resumer,
            limits,
            slots,
        }
    }

    /// Returns the directory of Sandboxes.
    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// Returns the number of held requests.
    pub fn held(&self) -> usize {
        self.slots.taken()
    }

    fn view(&self, target: &Target) -> Option<View> {
        self.directory.look_up(&target.namespace, &target.id)
    }

    /// Returns the UID of the Sandbox that a target means, if it exists.
    pub fn uid(&self, target: &Target) -> Option<Arc<str>> {
        let view = self.view(target)?;
        means(target, &view).then_some(view.uid)
    }

    /// Waits until the request may go on, at most until `deadline`.
    ///
    /// Dropping the future ends the wait; a resume continues.
    pub async fn admit(
        &self,
        target: &Target,
        deadline: Option<Instant>,
    ) -> Result<Destination, Refusal> {
        let view = self.view(target);
        match decide(target, view.as_ref()) {
            Step::Route(destination) => return Ok(destination),
            Step::Refuse(refusal) => return Err(refusal),
            Step::Wait(_) | Step::Resume { .. } => {}
        }
        // All unknown names share the slots of one sandbox: a client can invent any number of them.
        let sandbox = view.map_or_else(|| "".into(), |view| view.uid);
        let _slot = self.slots.take(&sandbox).ok_or(Refusal::TooManyHeld)?;
        let mut changes = self.directory.changes(&target.namespace, &target.id);
        let begin = Instant::now();
        let mut resuming: Option<Attempt> = None;
        loop {
            let (wait, outcome) = match decide(target, self.view(target).as_ref()) {
                Step::Route(destination) => return Ok(destination),
                Step::Refuse(refusal) => return Err(refusal),
                Step::Wait(wait) => (wait, None),
                Step::Resume { uid, version } => {
                    let outcome = self.resume(target, uid, version, &mut resuming)?;
                    (WaitLimit::Resume, Some(outcome))
                }
            };
            let (limit, late) = match wait {
                WaitLimit::Dial => (self.limits.dial, Refusal::Unreachable(target.id.clone())),
                WaitLimit::Resume => (
                    self.limits.resume,
                    Refusal::ResumeTimeout(target.id.clone()),
                ),
            };
            let end = begin + limit;
            let end = deadline.map_or(end, |deadline| end.min(deadline));
            let woken = tokio::time::timeout_at(end.into(), wait_for_change(&mut changes, outcome));
            match woken.await {
                Err(_) => return Err(late),
                Ok(Some(why)) => return Err(Refusal::NotResumed(target.id.clone(), why)),
                Ok(None) => {}
            }
        }
    }
}

/// Outcome of an attempt to resume, and whether it was for the version in the directory.
type PendingResume = (watch::Receiver<Outcome>, bool);

impl Gate {
    /// Resumes the Sandbox. `last` is the previous attempt of the same request.
    fn resume(
        &self,
        target: &Target,
        uid: Arc<str>,
        version: Arc<str>,
        last: &mut Option<Attempt>,
    ) -> Result<PendingResume, Refusal> {
        if last.as_ref().is_some_and(|last| last.was_undone(&version)) {
            // A user suspended the Sandbox after this request resumed it. Only another request may
            // resume it again.
            let why = "it was suspended again".to_owned();
            return Err(Refusal::NotResumed(target.id.clone(), why));
        }
        let attempt = last.insert(self.resumer.resume(Fence {
            namespace: target.namespace.clone(),
            name: target.id.clone(),
            uid,
            version: Arc::clone(&version),
        }));
        Ok((attempt.outcome.clone(), attempt.version == version))
    }
}

/// Time to wait for changes after an attempt with an unknown outcome, before the next attempt.
const UNKNOWN_OUTCOME: Duration = Duration::from_secs(1);

/// Waits until the Sandbox changes or the attempt ends; returns the reason if it was refused.
async fn wait_for_change(changes: &mut Changes, outcome: Option<PendingResume>) -> Option<String> {
    let ended = async {
        let Some((mut outcome, of_this_version)) = outcome else {
            return std::future::pending().await;
        };
        let last = outcome
            .wait_for(|outcome| *outcome != Outcome::Pending)
            .await;
        match last.map(|last| last.clone()) {
            Ok(Outcome::Refused(why)) => Some(why),
            Ok(Outcome::Patched) if !of_this_version => None,
            // The watch will report the change.
            Ok(Outcome::Patched | Outcome::Pending) => std::future::pending().await,
            Ok(Outcome::Retry) | Err(_) => {
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
