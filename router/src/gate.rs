//! Whether a request may go on to its sandbox, now, later or not at all. [`decide`] chooses and is pure; [`Gate::admit`] waits, within bounds.

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::watch;

use crate::{
    directory::{Changes, Directory, View},
    places::{Bounds, Places},
    refusal::Refusal,
    resume::{Fence, Outcome, Resumer, Try},
    target::Target,
};

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
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
    if !means(target, view) {
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

/// Whether a target means the Sandbox of its name.
fn means(target: &Target, view: &View) -> bool {
    match &target.uid {
        Some(uid) => **uid == *view.uid,
        // It would be another's sandbox once it is claimed.
        None => !view.unclaimed,
    }
}

/// Bounds of waiting.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub dial: Duration,
    pub resume: Duration,
    /// Requests that wait at once.
    pub held: Bounds,
}

/// Lets requests through when their sandbox is there.
#[derive(Debug)]
pub struct Gate {
    directory: Directory,
    resumer: Resumer,
    limits: Limits,
    places: Places,
}

impl Gate {
    /// A gate with all places free.
    pub fn new(directory: Directory, resumer: Resumer, limits: Limits) -> Self {
        let places = Places::new(limits.held);
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
        self.places.taken()
    }

    fn view(&self, target: &Target) -> Option<View> {
        self.directory.look_up(&target.namespace, &target.id)
    }

    /// UID of the Sandbox that a target means, if there is one.
    pub fn uid(&self, target: &Target) -> Option<Arc<str>> {
        let view = self.view(target)?;
        means(target, &view).then_some(view.uid)
    }

    /// Waits until the request may go on, not past `deadline`. Dropping the future ends the waiting, and nothing else.
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
        // Names that nobody has share the places of one sandbox: they cost a client nothing.
        let sandbox = view.map_or_else(|| "".into(), |view| view.uid);
        let _place = self.places.take(&sandbox).ok_or(Refusal::TooManyHeld)?;
        let mut changes = self.directory.changes(&target.namespace, &target.id);
        let begin = Instant::now();
        let mut resuming: Option<Try> = None;
        loop {
            let (patience, outcome) = match decide(target, self.view(target).as_ref()) {
                Step::Route(destination) => return Ok(destination),
                Step::Refuse(refusal) => return Err(refusal),
                Step::Wait(patience) => (patience, None),
                Step::Resume { uid, version } => {
                    let outcome = self.resume(target, uid, version, &mut resuming)?;
                    (Patience::Resume, Some(outcome))
                }
            };
            let (limit, late) = match patience {
                Patience::Dial => (self.limits.dial, Refusal::Unreachable(target.id.clone())),
                Patience::Resume => (
                    self.limits.resume,
                    Refusal::ResumeTimeout(target.id.clone()),
                ),
            };
            let end = begin + limit;
            let end = deadline.map_or(end, |deadline| end.min(deadline));
            let woken = tokio::time::timeout_at(end.into(), something_new(&mut changes, outcome));
            match woken.await {
                Err(_) => return Err(late),
                Ok(Some(why)) => return Err(Refusal::NotResumed(target.id.clone(), why)),
                Ok(None) => {}
            }
        }
    }
}

/// The outcome of a try to resume, and whether it was of the version that is looked at.
type Asked = (watch::Receiver<Outcome>, bool);

impl Gate {
    /// Asks for the Sandbox to run. `last` is what the same request has asked for before.
    fn resume(
        &self,
        target: &Target,
        uid: Arc<str>,
        version: Arc<str>,
        last: &mut Option<Try>,
    ) -> Result<Asked, Refusal> {
        if last.as_ref().is_some_and(|last| last.was_undone(&version)) {
            // Its user's last word. The next request may ask again, this one has done so.
            let why = "it was suspended again".to_owned();
            return Err(Refusal::NotResumed(target.id.clone(), why));
        }
        let asked = last.insert(self.resumer.ask(Fence {
            namespace: target.namespace.clone(),
            name: target.id.clone(),
            uid,
            version: Arc::clone(&version),
        }));
        Ok((asked.outcome.clone(), asked.version == version))
    }
}

/// How long to look only for changes after a try to resume whose outcome nobody knows; then to try again.
const UNKNOWN_OUTCOME: Duration = Duration::from_secs(1);

/// Waits until there is a reason to look again, or one to give up.
async fn something_new(changes: &mut Changes, outcome: Option<Asked>) -> Option<String> {
    let ended = async {
        let Some((mut outcome, of_this_version)) = outcome else {
            return std::future::pending().await;
        };
        let last = outcome
            .wait_for(|outcome| *outcome != Outcome::Pending)
            .await;
        match last.map(|last| last.clone()) {
            Ok(Outcome::Refused(why)) => Some(why),
            Ok(Outcome::Asked) if !of_this_version => None,
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
