//! Takes the steps of a plan and makes members, many at once where order does not matter. Without choosing: what goes wrong ends the pass.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use futures::{StreamExt, stream::FuturesUnordered};
use kube::ResourceExt;
use torpor_api::{Sandbox, SandboxTemplate};

use super::{
    Error, member,
    plan::{self, Action, NEXT_TURN, Observed, PRESSED_RETRY, Plan},
};
use crate::{
    calls::{self, Answer},
    context::Context,
    watches,
};

/// Calls of one pool that are under way at once.
const MOST_AT_ONCE: usize = 32;
/// When a pool is looked at again whose member was not as it was seen. What has changed need not be anything that wakes the pool.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Takes the steps, then makes the members. Each call waits for its turn ([`crate::pace`]). Says when to go on, if the apiserver has too much to do or other pools wait for their passes.
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
    let again = changed.into_inner().then_some(LOOK_AGAIN);
    let Some(template) = &observed.template else {
        return Ok(again);
    };
    let made = pass.each(&plan.create, |name| {
        create(name, template, observed, context)
    });
    Ok(made.await?.or(again))
}

/// A pass that makes its calls.
struct Pass<'a> {
    observed: &'a Observed,
    context: &'a Context,
    begin: Instant,
    /// A call has come through. Each pass comes on by something, whoever waits.
    worked: bool,
}

impl Pass<'_> {
    /// When to go on, if nothing more is to be begun for now.
    fn gives_way(&self) -> Option<Duration> {
        if self.context.api.is_pressed() {
            return Some(PRESSED_RETRY);
        }
        let others_wait = self.context.queues.pools.is_waited_for();
        let settings = &self.observed.settings;
        let ends = self.worked && plan::gives_way(others_wait, self.begin.elapsed(), settings);
        ends.then_some(NEXT_TURN)
    }

    /// Makes a call for each item: one, and one more at once with each that comes through, so that an apiserver that refuses is not asked a hundred times. Asks before each whether to give way,
    /// and waits for those that are under way. The first error ends it.
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
            let gives_way = self.gives_way();
            if more && gives_way.is_none() {
                under_way.extend(left.next().map(&call));
                continue;
            }
            match under_way.next().await {
                Some(Ok(())) => {
                    self.worked = true;
                    at_once = MOST_AT_ONCE.min(at_once + 1);
                }
                Some(Err(error)) => failed = failed.or(Some(error)),
                None => return failed.map_or(Ok(gives_way.filter(|_| more)), Err),
            }
        }
    }
}

/// Notes in `changed` that the member is another by now than the one that was seen.
async fn execute(
    step: &Action,
    observed: &Observed,
    context: &Context,
    changed: &AtomicBool,
) -> Result<(), Error> {
    let pool = &observed.pool;
    let namespace = &pool.namespace().unwrap_or_default();
    match step {
        Action::Adopt { name, patch } => {
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

/// Somebody else was faster.
fn newer_or(error: calls::Error, changed: &AtomicBool) -> Result<(), Error> {
    match error.answer() {
        // Its end is an event.
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
    name: &str,
    template: &SandboxTemplate,
    observed: &Observed,
    context: &Context,
) -> Result<(), Error> {
    let pool = &observed.pool;
    let namespace = &pool.namespace().unwrap_or_default();
    let uid = &pool.uid().unwrap_or_default();
    let sandbox = member::sandbox(pool, template, name, observed.settings.eviction);
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

/// The name is taken: by this pool, whose first create had no answer, or by somebody else.
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
