//! Executes the steps of a plan, one call each, without making choices. Differences from the plan's
//! assumptions are recorded as facts, and the plan is made again.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use serde_json::Value;
use torpor_api::{
    Sandbox, SandboxClaim, SandboxSnapshot, SandboxTemplate, SandboxWarmPool,
    annotations::{ClaimFile, is_dns_subdomain},
    extensions::{ClaimShutdownPolicy, SandboxClaimStatus},
};

use super::{
    Error, annotate,
    binding::{self, Binding},
    deliver::{self, Failure, Kept},
    dereference::Session,
    files, fork,
    plan::{Action, Observed, Offered, Plan, Refusal},
    wake,
};
use crate::{
    calls::{self, Answer},
    candidates::{is_member, pool_of},
    context::Context,
    outline,
    template::plan::policy_name,
    watches,
};

/// Result of the steps of a plan.
#[derive(Debug)]
pub enum Step {
    /// All steps were executed as planned.
    Done,
    /// Plan again with the new facts.
    Again,
    Refused(Refusal),
    /// The apiserver refused, with this message.
    Failed(String),
}

/// Action of a pass, for metrics and Events.
#[derive(Debug)]
pub enum Effect {
    Adopted(String),
    Created(String),
    ClaimDeleted(ClaimShutdownPolicy),
    StatusWritten {
        before: Box<SandboxClaimStatus>,
        after: Box<SandboxClaimStatus>,
    },
}

/// Executes the steps in order, up to the first that does not end as planned.
pub async fn apply(plan: &Plan, session: &mut Session, context: &Context) -> Result<Step, Error> {
    for action in &plan.steps {
        match execute(action, session, context).await? {
            Step::Done => {}
            other => return Ok(other),
        }
    }
    Ok(Step::Done)
}

/// Executes one step. One arm per action; nothing is decided here.
async fn execute(action: &Action, session: &mut Session, context: &Context) -> Result<Step, Error> {
    let claim = Arc::clone(&session.observed.claim);
    let namespace = &claim.namespace().unwrap_or_default();
    let api = &context.api;
    match action {
        Action::Lookup(name) => {
            look_up(name, session, context).await?;
            settled(session, context);
            Ok(Step::Again)
        }
        Action::Refresh => {
            refresh(session, context).await?;
            Ok(Step::Again)
        }
        Action::Note(name) => match annotate::note(name, session, context).await {
            Ok(noted) => {
                session.learn_claim(noted);
                Ok(Step::Again)
            }
            // The claim is gone, and the caches are about to show it.
            Err(error) if matches!(error.answer(), Answer::NotFound | Answer::Conflict) => {
                Err(Error::Unsettled)
            }
            Err(error) => refused(error),
        },
        Action::Assign { name, patch } => assign(name, patch, session, context).await,
        Action::PatchSandbox { name, patch } => {
            match api.patch::<Sandbox>(namespace, name, patch).await {
                Ok(sandbox) => record(sandbox, session, context),
                Err(error) => match error.answer() {
                    Answer::Conflict | Answer::NotFound => look_up(name, session, context).await?,
                    _ => return refused(error),
                },
            }
            Ok(Step::Again)
        }
        Action::CreateSandbox(sandbox) => create(sandbox, session, context).await,
        Action::WriteFiles { sandbox, sources } => {
            write_files(sandbox, sources, session, context).await
        }
        Action::KeepFiles(sandbox) => keep_files(sandbox, session, context).await,
        Action::DeleteSandbox {
            name,
            uid,
            resource_version,
        } => {
            let version = resource_version.as_deref();
            gone(api.delete::<Sandbox>(namespace, name, uid, version).await)
        }
        Action::DeleteClaim { policy } => {
            let (name, uid) = (claim.name_any(), claim.uid().unwrap_or_default());
            let deleted = if *policy == ClaimShutdownPolicy::DeleteForeground {
                api.delete_foreground::<SandboxClaim>(namespace, &name, &uid)
                    .await
            } else {
                api.delete::<SandboxClaim>(namespace, &name, &uid, None)
                    .await
            };
            if deleted.is_ok() {
                session.effects.push(Effect::ClaimDeleted(*policy));
            }
            gone(deleted)
        }
        Action::DeletePolicy { name, uid } => gone(
            api.delete::<NetworkPolicy>(namespace, name, uid, None)
                .await,
        ),
    }
}

/// Writes the claim's files, and notes that on its Sandbox.
async fn write_files(
    sandbox: &Sandbox,
    sources: &[ClaimFile],
    session: &mut Session,
    context: &Context,
) -> Result<Step, Error> {
    let uid = session.observed.claim.uid().unwrap_or_default();
    match deliver::write(sandbox, &uid, sources, &context.api).await {
        Ok(renew) => {
            let patch = files::noted(sandbox, files::WRITTEN, renew);
            note_files(sandbox, &patch, session, context).await
        }
        Err(Failure::Refused(why)) => Ok(Step::Refused(why.into())),
        Err(Failure::Call(error)) => refused(error),
    }
}

/// Looks at the claim's files. Where that fails the claim stays as it is, and a later pass looks
/// again: the sandbox has the files, and its token lasts a while.
async fn keep_files(
    sandbox: &Sandbox,
    session: &mut Session,
    context: &Context,
) -> Result<Step, Error> {
    let claim = Arc::clone(&session.observed.claim);
    let uid = claim.uid().unwrap_or_default();
    let account = files::account_to_renew(sandbox, Timestamp::now());
    let kept = deliver::keep(sandbox, &uid, account.as_deref(), &context.api).await;
    let patch = match kept {
        Ok(Kept::Whole) => return Ok(Step::Done),
        Ok(Kept::Renewed(at)) => files::noted(sandbox, files::WRITTEN, Some(at)),
        Ok(Kept::Missing) => files::noted(sandbox, files::PENDING, None),
        Err(failure) => {
            let (claim, error) = (claim.name_any(), failure.to_string());
            tracing::warn!(claim, error, "cannot renew the token among a claim's files");
            return Ok(Step::Done);
        }
    };
    note_files(sandbox, &patch, session, context).await
}

/// Notes the state of a claim's files on its Sandbox.
async fn note_files(
    sandbox: &Sandbox,
    patch: &Value,
    session: &mut Session,
    context: &Context,
) -> Result<Step, Error> {
    let (namespace, name) = (sandbox.namespace().unwrap_or_default(), sandbox.name_any());
    match context.api.patch::<Sandbox>(&namespace, &name, patch).await {
        Ok(sandbox) => record(sandbox, session, context),
        Err(error) => match error.answer() {
            Answer::Conflict | Answer::NotFound => look_up(&name, session, context).await?,
            _ => return refused(error),
        },
    }
    Ok(Step::Again)
}

/// Reads the whole objects where the caches have only outlines and the plan needs more: the claim's
/// own Sandboxes, the offered member, and the template of a claim that is to get a Sandbox.
pub async fn complete(session: &mut Session, context: &Context) -> Result<(), Error> {
    let owned = session.observed.sandboxes.owned.values();
    let owned: Vec<String> = owned
        .filter(|sandbox| outline::is_outline(&***sandbox))
        .map(|sandbox| sandbox.name_any())
        .collect();
    for name in owned {
        look_up(&name, session, context).await?;
    }
    let Observed {
        claim,
        sandboxes,
        template,
        ..
    } = &session.observed;
    let takes = match binding::bind(claim, sandboxes) {
        Binding::Unbound { .. } => true,
        Binding::Bound { sandbox, .. } => {
            binding::committed_name(claim).is_none() && wake::has_failed(&sandbox, claim)
        }
        Binding::Lookup(_) | Binding::Mark { .. } => false,
    };
    if takes && template.as_deref().is_some_and(outline::is_outline) {
        refresh(session, context).await?;
    }
    if let Offered::Sandbox(member) = &session.observed.offer
        && outline::is_outline(&**member)
    {
        let name = member.name_any();
        session.observed.offer = Offered::NotAsked;
        reoffer(&name, session, context).await?;
        if session.observed.offer == Offered::NotAsked {
            session.observed.lost += 1;
            session.taken = None;
        }
    }
    Ok(())
}

fn refused(error: calls::Error) -> Result<Step, Error> {
    match error.answer() {
        Answer::Unknown => Err(Error::Unknown(error)),
        _ => Ok(Step::Failed(error.to_string())),
    }
}

/// Ends a deletion. Success includes an object that is gone already, or is another object or
/// version by now.
fn gone(deleted: Result<(), calls::Error>) -> Result<Step, Error> {
    match deleted {
        Ok(()) => Ok(Step::Done),
        Err(error) if matches!(error.answer(), Answer::NotFound | Answer::Conflict) => {
            Ok(Step::Done)
        }
        Err(error) => refused(error),
    }
}

fn settled(session: &mut Session, context: &Context) {
    let claim = &session.observed.claim;
    context.claims.set_unsettled(claim, None);
    session.observed.sandboxes.unsettled = None;
}

/// Records the current version of a Sandbox for this pass and in the caches.
fn record(sandbox: Sandbox, session: &mut Session, context: &Context) {
    watches::sandbox_written(context, sandbox.clone());
    session.learn(Arc::new(sandbox));
}

/// Reads a Sandbox from the apiserver.
async fn look_up(name: &str, session: &mut Session, context: &Context) -> Result<(), Error> {
    let namespace = session.observed.claim.namespace().unwrap_or_default();
    let found = context.api.get::<Sandbox>(&namespace, name).await;
    match found.map_err(Error::Observe)? {
        Some(sandbox) => record(sandbox, session, context),
        None => session.learn_not_owned(name),
    }
    Ok(())
}

/// Reads pool, template, the template's NetworkPolicy and the snapshot to fork from the apiserver.
async fn refresh(session: &mut Session, context: &Context) -> Result<(), Error> {
    let observed = &mut session.observed;
    let namespace = observed.claim.namespace().unwrap_or_default();
    let api = &context.api;
    let name = &observed.claim.spec.warm_pool_ref.name;
    let pool = api.get::<SandboxWarmPool>(&namespace, name).await;
    observed.pool = pool.map_err(Error::Observe)?.map(Arc::new);
    observed.template = None;
    if let Some(pool) = &observed.pool {
        let name = &pool.spec.sandbox_template_ref.name;
        let template = api.get::<SandboxTemplate>(&namespace, name).await;
        observed.template = template.map_err(Error::Observe)?.map(Arc::new);
    }
    observed.fork = None;
    if let Some(name) = fork::asked(&observed.claim).filter(|name| is_dns_subdomain(name)) {
        let snapshot = api.get::<SandboxSnapshot>(&namespace, name).await;
        observed.fork = snapshot.map_err(Error::Observe)?.map(Arc::new);
    }
    observed.template_policy = None;
    if let Some(template) = &observed.template {
        let name = policy_name(template);
        let policy = api.get::<NetworkPolicy>(&namespace, &name).await;
        observed.template_policy = policy.map_err(Error::Observe)?.map(Arc::new);
    }
    observed.fresh = true;
    Ok(())
}

/// Makes the claim the member's controller, unless the member has changed since it was read.
async fn assign(
    name: &str,
    patch: &Value,
    session: &mut Session,
    context: &Context,
) -> Result<Step, Error> {
    let claim = Arc::clone(&session.observed.claim);
    let namespace = claim.namespace().unwrap_or_default();
    context.claims.set_unsettled(&claim, Some(name.to_owned()));
    session.observed.offer = Offered::NotAsked;
    let noting = annotate::note(name, session, context);
    let assigning = context.api.patch::<Sandbox>(&namespace, name, patch);
    let (assigned, noted) = tokio::join!(assigning, noting);
    learn_noted(noted, session);
    match assigned {
        Ok(sandbox) => {
            record(sandbox, session, context);
            session.effects.push(Effect::Adopted(name.to_owned()));
        }
        Err(error) if matches!(error.answer(), Answer::Conflict | Answer::NotFound) => {
            session.observed.lost += 1;
            reoffer(name, session, context).await?;
        }
        Err(error) if error.answer() == Answer::Unknown => return Err(Error::Unknown(error)),
        Err(error) => {
            settled(session, context);
            return refused(error);
        }
    }
    settled(session, context);
    // The cache has the member's current state, whether it is in the pool or not.
    if session.observed.offer == Offered::NotAsked {
        session.taken = None;
    }
    Ok(Step::Again)
}

/// Handles a member that has changed. A member that can still be taken is offered again in its
/// current version; otherwise the pool is asked for another.
async fn reoffer(name: &str, session: &mut Session, context: &Context) -> Result<(), Error> {
    let namespace = session.observed.claim.namespace().unwrap_or_default();
    let found = context.api.get::<Sandbox>(&namespace, name).await;
    let Some(sandbox) = found.map_err(Error::Unknown)? else {
        session.learn_not_owned(name);
        return Ok(());
    };
    let pool = session.observed.pool.as_ref().and_then(|pool| pool.uid());
    let again = is_member(&sandbox) && pool_of(&sandbox) == pool.as_deref();
    record(sandbox.clone(), session, context);
    if again && session.observed.lost < super::plan::ATTEMPTS {
        session.observed.offer = Offered::Sandbox(Arc::new(sandbox));
    }
    Ok(())
}

/// Records the result of a write of the annotations. A failed write is planned again before the
/// claim is Ready.
fn learn_noted(noted: Result<SandboxClaim, calls::Error>, session: &mut Session) {
    match noted {
        Ok(noted) => session.learn_claim(noted),
        Err(error) => {
            let claim = session.observed.claim.name_any();
            tracing::debug!(%error, claim, "cannot write the annotations of a claim yet");
        }
    }
}

async fn create(sandbox: &Value, session: &mut Session, context: &Context) -> Result<Step, Error> {
    let claim = Arc::clone(&session.observed.claim);
    let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
    context.claims.set_unsettled(&claim, Some(name.clone()));
    let noting = annotate::note(&name, session, context);
    let creating = context.api.create::<Sandbox>(&namespace, sandbox.clone());
    let (created, noted) = tokio::join!(creating, noting);
    learn_noted(noted, session);
    match created {
        Ok(sandbox) => {
            session.learn(Arc::new(sandbox));
            session.effects.push(Effect::Created(name));
        }
        Err(error) if error.answer() == Answer::AlreadyExists => {
            look_up(&name, session, context).await?;
            if session.observed.sandboxes.not_owned.contains(&name) && !is_there(session) {
                settled(session, context);
                return Ok(Step::Refused(Refusal::CreatePending));
            }
        }
        Err(error) if error.answer() == Answer::Unknown => return Err(Error::Unknown(error)),
        Err(error) => {
            settled(session, context);
            return refused(error);
        }
    }
    settled(session, context);
    Ok(Step::Again)
}

/// Reports whether a Sandbox with the claim's name was found and is not being deleted.
fn is_there(session: &Session) -> bool {
    let namesake = session.observed.namesake.as_ref();
    namesake.is_some_and(|sandbox| sandbox.metadata.deletion_timestamp.is_none())
}
