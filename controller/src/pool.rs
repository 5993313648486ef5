//! Reconciler of SandboxWarmPools: keeps a number of Sandboxes with running Pods ready to be
//! claimed. One pass: gather → **plan** (pure) → apply → status.
//!
//! A pool never has more members than requested. Requested members that the watch has not shown yet
//! count as present ([`memory::Memory`]). The name of a member is chosen before the create, so that
//! a create without an answer is repeated under the same name and creates one object.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{SandboxWarmPool, extensions::SandboxWarmPoolStatus, name_hash};

use crate::{
    calls::{self, Answer},
    claim::dereference::template_policy,
    context::Context,
    events::{self, Note},
    golden::{self, Golden},
    merge_patch, outline,
    pace::Advance,
    watches::extensions::orphan_index,
};

pub mod advice;
mod apply;
pub mod heat;
pub mod member;
pub mod memory;
pub mod plan;
pub mod status;

use self::{
    memory::Remembered,
    plan::{Observed, Plan},
};

/// Failure of a pass; the pass is tried again with a growing delay.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the current state")]
    Observe(#[source] calls::Error),
    #[error("cannot tell whether a step took effect")]
    Unknown(#[source] calls::Error),
    #[error("a step was refused")]
    Refused(#[source] calls::Error),
    #[error("cannot write the status")]
    WriteStatus(#[source] calls::Error),
}

impl Error {
    /// Returns a stable name for metrics and logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Observe(_) => "ObserveFailed",
            Self::Unknown(_) => "OutcomeUnknown",
            Self::Refused(_) => "Refused",
            Self::WriteStatus(_) => "StatusWriteFailed",
        }
    }
}

/// Reconciles one pool. Returns the delay until the next pass when nothing changes.
pub async fn reconcile(
    pool: Arc<SandboxWarmPool>,
    context: Arc<Context>,
) -> Result<Option<Duration>, Error> {
    if pool.metadata.deletion_timestamp.is_some() {
        return Ok(None);
    }
    let mut observed = gather(&pool, &context);
    if let Some(template) = &observed.template
        && outline::is_outline(&**template)
    {
        let whole = outline::read_full(&context.api, &**template).await;
        observed.template = whole.map_err(Error::Observe)?.map(Arc::new);
    }
    if let Some(template) = &observed.template {
        observed.golden = golden::state(template, &context);
    }
    let plan = plan::plan(&observed, Timestamp::now());
    let uid = pool.uid().unwrap_or_default();
    context.pools.held(&uid, &plan.held, Instant::now());
    context
        .pools
        .unisolated(&uid, plan.unisolated, Instant::now());
    context
        .pools
        .awaits_golden(&uid, plan.awaits_golden, Instant::now());
    let done = apply::apply(&plan, &observed, &context).await;
    if let Some(note) = context.pools.note(&pool, &plan, Instant::now()) {
        publish(&pool, note, &context).await;
    }
    for note in advise(&observed, &context) {
        publish(&pool, note, &context).await;
    }
    // The status shows the steps of this pass, even if some failed.
    let status_due = write_status(&pool, &plan, &context).await?;
    let pressed = done?;
    // Read again: most pending members were requested in this very pass.
    let remembered = remembered(&pool, &context);
    let delays = [plan.requeue, status_due, pressed, remembered.forgotten_in];
    Ok(delays.into_iter().flatten().min())
}

fn remembered(pool: &SandboxWarmPool, context: &Context) -> Remembered {
    let uid = pool.uid().unwrap_or_default();
    let settings = context.settings.pools.of(pool);
    context.pools.remembered(&uid, &settings, Instant::now())
}

/// Reads the caches and this process's memory of the pool.
fn gather(pool: &Arc<SandboxWarmPool>, context: &Context) -> Observed {
    let namespace = pool.namespace().unwrap_or_default();
    let caches = &context.caches;
    let uid = pool.uid().unwrap_or_default();
    let orphans = orphan_index(&name_hash(&pool.name_any()));
    let template = &pool.spec.sandbox_template_ref.name;
    let settings = context.settings.pools.of(pool);
    // The memory is read before the cache: members that the watch shows in between are counted
    // twice rather than missed.
    let mut remembered = remembered(pool, context);
    remembered.creating.retain(|name| {
        // The watch has shown the member, which may be claimed already.
        let seen = caches.sandboxes.get(&namespace, name);
        if let Some(sandbox) = &seen {
            context.pools.seen(&uid, sandbox, false);
        }
        seen.is_none()
    });
    let template = caches.templates.get(&namespace, template);
    Observed {
        pool: Arc::clone(pool),
        template_policy: template_policy(template.as_deref(), &namespace, context),
        except: context.settings.network.except.clone(),
        template,
        members: caches.sandboxes.indexed(&namespace, &uid),
        orphans: caches.sandboxes.indexed(&namespace, &orphans),
        pressed: context.api.is_pressed(),
        advance: context.candidates.advance(pool),
        demand: context.candidates.demand(&uid),
        // It needs the whole template.
        golden: Golden::Off,
        remembered,
        settings,
    }
}

/// Returns the advice that a pool's user gets once; each leading controller gives it again.
fn advise(observed: &Observed, context: &Context) -> Vec<Note> {
    let uid = observed.pool.uid().unwrap_or_default();
    let heat = advice::heat(&observed.pool).filter(|note| context.pools.is_new(&uid, note));
    let plain = observed
        .template
        .as_ref()
        .filter(|_| !context.pools.is_advised(&uid));
    let plain = plain.and_then(|template| {
        let classes = context.caches.runtime_classes.filtered(|_| true);
        let nodes = context.caches.nodes.filtered(|_| true);
        advice::plain_template(template, &classes, &nodes)
    });
    if plain.is_some() {
        context.pools.advised(&uid);
    }
    plain.into_iter().chain(heat).collect()
}

async fn publish(pool: &SandboxWarmPool, note: Note, context: &Context) {
    events::publish(&context.api.in_advance(Advance::Calm), pool, note).await;
}

/// Writes a changed status, at most once an interval while changes follow one another. Returns the
/// delay until the next write.
async fn write_status(
    pool: &Arc<SandboxWarmPool>,
    plan: &Plan,
    context: &Context,
) -> Result<Option<Duration>, Error> {
    let observed = gather(pool, context);
    let after = status::next(&observed, plan, Timestamp::now());
    let before = pool.status.clone().unwrap_or_default();
    let Some(patch) = status_patch(pool, &before, &after) else {
        return Ok(None);
    };
    let uid = pool.uid().unwrap_or_default();
    let settled = status::is_settled(&after, &observed)
        || before.observed_generation != after.observed_generation;
    let interval = context.settings.pools.status_interval;
    if let Some(wait) = context.pools.status_wait(&uid, interval, settled) {
        return Ok(Some(wait));
    }
    let (namespace, name) = (pool.namespace().unwrap_or_default(), pool.name_any());
    match context
        .api
        .in_advance(Advance::Calm)
        .patch_status::<SandboxWarmPool>(&namespace, &name, &patch)
        .await
    {
        Ok(written) => {
            context.caches.pools.assume(written);
            Ok(None)
        }
        Err(error) if matches!(error.answer(), Answer::NotFound | Answer::Conflict) => Ok(None),
        Err(error) => Err(Error::WriteStatus(error)),
    }
}

/// Returns the patch of the status, with the uid: the apiserver then refuses it if another pool has
/// taken the name.
fn status_patch(
    pool: &SandboxWarmPool,
    before: &SandboxWarmPoolStatus,
    after: &SandboxWarmPoolStatus,
) -> Option<Value> {
    let difference = merge_patch::difference(&json!(before), &json!(after))?;
    Some(json!({"metadata": {"uid": pool.uid()}, "status": difference}))
}
