//! Executes the steps of a plan and creates members, many at once where order does not matter.
//! Makes no choices: the first failure ends the pass.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use futures::{StreamExt, stream::FuturesUnordered};
use kube::ResourceExt;
use torpor_api::{Sandbox, SandboxTemplate};

use super::{
    Error,
    member::{self, Start},
    plan::{self, Action, Creation, NEXT_TURN, Observed, PRESSED_RETRY, Plan},
};
use crate::{
    calls::{self, Answer},
    context::Context,
    watches,
};

/// Most concurrent calls of one pool.
const MOST_AT_ONCE: usize = 32;
/// Delay until the next pass over a pool with a member that was not in the version read. The change
/// need not be one that queues the pool.
const CHANGED_RETRY: Duration = Duration::from_secs(1);

/// Executes the steps, then creates the members. Each call waits for its turn ([`crate::pace`]).
///
/// Returns the delay until the next pass if the apiserver is overloaded or other pools wait.
pub(super) async fn apply(
    plan: &Plan,
    observed: &Observed,
    context: &Context,
) -> Result<Option<Duration>, Error> {
    let mut pass = Pass {
        observed,
        context,
        begin: Instant::now(),
        worked: false,
    };
    let changed = AtomicBool::new(false);
    let steps = pass.each(&plan.steps, |step| {
        execute(step, observed, context, &changed)
    });
    if let Some(wait) = steps.await? {
        return Ok(Some(wait));
    }
    let again = changed.into_inner().then_some(CHANGED_RETRY);
    let Some(template) = &observed.template else {
        return Ok(again);
    };
    let made = pass.each(&plan.create, |new| create(new, template, observed, context));
    Ok(made.await?.or(again))
}

/// State of a pass that makes calls.
struct Pass<'a> {
    observed: &'a Observed,
    context: &'a Context,
    begin: Instant,
    /// True if a call has succeeded. Each pass makes some progress, even while others wait.
    worked: bool,
}

impl Pass<'_> {
    /// Returns the delay until the next pass, if no more calls may start now.
    fn yields(&self) -> Option<Duration> {
        if self.context.api.is_pressed() {
            return Some(PRESSED_RETRY);
        }
        let others_wait = self.context.queues.pools.has_waiting();
        let settings = &self.observed.settings;
        let ends = self.worked && plan::yields(others_wait, self.begin.elapsed(), settings);
        ends.then_some(NEXT_TURN)
    }

    /// Makes a call for each item.
    ///
    /// Starts with one call, and allows one more at once with each success, so that a refusing
    /// apiserver does not get a hundred calls. Checks before each call whether to yield, and waits
    /// for the running calls. The first error ends the pass.
    async fn each<'i, T, F>(
        &mut self,
        items: &'i [T],
        call: impl Fn(&'i T) -> F,
    ) -> Result<Option<Duration>, Error>
    where
        F: Future<Output = Result<(), Error>>,
    {
        let mut left = items.iter();
        let mut under_way = FuturesUnordered::new();
        let mut at_once = 1;
        let mut failed = None;
        loop {
            let more = failed.is_none() && under_way.len() < at_once && left.len() > 0;
            let yields = self.yields();
            if more && yields.is_none() {
                under_way.extend(left.next().map(&call));
                continue;
            }
            match under_way.next().await {
                Some(Ok(())) => {
                    self.worked = true;
                    at_once = MOST_AT_ONCE.min(at_once + 1);
                }
                Some(Err(error)) => failed = failed.or(Some(error)),
                None => return failed.map_or(Ok(yields.filter(|_| more)), Err),
            }
        }
    }
}

/// Executes one step. Sets `changed` if the member is no longer in the version that was read.
async fn execute(
    step: &Action,
    observed: &Observed,
    context: &Context,
    changed: &AtomicBool,
) -> Result<(), Error> {
    let pool = &observed.pool;
    let namespace = &pool.namespace().unwrap_or_default();
    match step {
        Action::Adopt { name, patch } | Action::Heat { name, patch } => {
            let api = context.api.in_advance(observed.advance);
            match api.patch::<Sandbox>(namespace, name, patch).await {
                Ok(sandbox) => watches::sandbox_written(context, sandbox),
                Err(error) => newer_or(error, changed)?,
            }
            Ok(())
        }
        Action::Delete {
            name,
            uid,
            resource_version,
        } => {
            let version = resource_version.as_deref();
            let deleted = context
                .api
                .in_advance(observed.advance)
                .delete::<Sandbox>(namespace, name, uid, version)
                .await;
            match deleted {
                Ok(()) => context.pools.deleting(&pool.uid().unwrap_or_default(), uid),
                Err(error) => newer_or(error, changed)?,
            }
            Ok(())
        }
    }
}

/// Ends a write that came too late; returns any other error.
fn newer_or(error: calls::Error, changed: &AtomicBool) -> Result<(), Error> {
    match error.answer() {
        // The deletion is an event of its own.
        Answer::NotFound => Ok(()),
        Answer::Conflict => {
            changed.store(true, Ordering::Relaxed);
            Ok(())
        }
        Answer::Unknown => Err(Error::Unknown(error)),
        _ => Err(Error::Refused(error)),
    }
}

async fn create(
    new: &Creation,
    template: &SandboxTemplate,
    observed: &Observed,
    context: &Context,
) -> Result<(), Error> {
    let pool = &observed.pool;
    let namespace = &pool.namespace().unwrap_or_default();
    let uid = &pool.uid().unwrap_or_default();
    let Creation { name, asleep } = new;
    let start = Start {
        asleep: *asleep,
        golden: observed.golden.sandbox(),
        eviction: observed.settings.eviction,
    };
    let sandbox = member::sandbox(pool, template, name, start);
    context.pools.creating(uid, name);
    let api = context.api.in_advance(observed.advance);
    match api.create::<Sandbox>(namespace, sandbox).await {
        Ok(_) => {
            context.pools.created(uid, name);
            Ok(())
        }
        Err(error) if error.answer() == Answer::AlreadyExists => {
            taken(name, observed, context).await
        }
        Err(error) if error.answer() == Answer::Unknown => Err(Error::Unknown(error)),
        Err(error) => {
            context.pools.not_created(uid, name);
            Err(Error::Refused(error))
        }
    }
}

/// Handles a name that exists: created by this pool in a call without an answer, or by another
/// client.
async fn taken(name: &str, observed: &Observed, context: &Context) -> Result<(), Error> {
    let pool = &observed.pool;
    let namespace = &pool.namespace().unwrap_or_default();
    let uid = &pool.uid().unwrap_or_default();
    let found = context
        .api
        .in_advance(observed.advance)
        .get::<Sandbox>(namespace, name)
        .await;
    let found = found.map_err(Error::Unknown)?;
    let ours = found
        .as_ref()
        .is_some_and(|sandbox| crate::candidates::pool_of(sandbox) == Some(uid));
    if ours {
        context.pools.created(uid, name);
    } else {
        context.pools.not_created(uid, name);
    }
    Ok(())
}
