//! Takes the steps of a plan and makes members, many at once where order does not matter. Without choosing: what goes wrong ends the pass.

use std::time::{Duration, Instant};

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

/// Creates of one pool that are under way at once.
const MOST_AT_ONCE: usize = 32;

/// Takes the steps, then makes the members: one, then two, then four at once, so that an apiserver that refuses is not asked a hundred times. Each call waits for its turn
/// ([`crate::pace`]). Says when to go on, if the apiserver has too much to do or other pools wait for their passes.
pub(super) async fn apply(
    plan: &Plan,
    observed: &Observed,
    context: &Context,
) -> Result<Option<Duration>, Error> {
    let begin = Instant::now();
    // Each pass comes on by something, whoever waits.
    let mut worked = false;
    let gives_way = |worked: bool| {
        let others_wait = context.queues.pools.is_waited_for();
        worked && plan::gives_way(others_wait, begin.elapsed(), &observed.settings)
    };
    for steps in plan.steps.chunks(MOST_AT_ONCE) {
        if gives_way(worked) {
            return Ok(Some(NEXT_TURN));
        }
        let steps = steps.iter().map(|step| execute(step, observed, context));
        first_error(futures::future::join_all(steps).await)?;
        worked = true;
    }
    let Some(template) = &observed.template else {
        return Ok(None);
    };
    let mut left = &plan.create[..];
    let mut at_once = 1;
    while !left.is_empty() {
        if context.api.is_pressed() {
            return Ok(Some(PRESSED_RETRY));
        }
        if gives_way(worked) {
            return Ok(Some(NEXT_TURN));
        }
        let (batch, rest) = left.split_at(at_once.min(MOST_AT_ONCE).min(left.len()));
        let creates = batch
            .iter()
            .map(|name| create(name, template, observed, context));
        first_error(futures::future::join_all(creates).await)?;
        left = rest;
        worked = true;
        at_once *= 2;
    }
    Ok(None)
}

fn first_error(results: Vec<Result<(), Error>>) -> Result<(), Error> {
    results.into_iter().find(Result::is_err).unwrap_or(Ok(()))
}

async fn execute(step: &Action, observed: &Observed, context: &Context) -> Result<(), Error> {
    let pool = &observed.pool;
    let namespace = &pool.namespace().unwrap_or_default();
    match step {
        Action::Adopt { name, patch } => {
            let api = context.api.in_advance(observed.advance);
            match api.patch::<Sandbox>(namespace, name, patch).await {
                Ok(sandbox) => watches::sandbox_written(context, sandbox),
                Err(error) => newer_or(error)?,
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
                Err(error) => newer_or(error)?,
            }
            Ok(())
        }
    }
}

/// Somebody else was faster: an event tells what became of it.
fn newer_or(error: calls::Error) -> Result<(), Error> {
    match error.answer() {
        Answer::NotFound | Answer::Conflict => Ok(()),
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
