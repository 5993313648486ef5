//! Takes the steps of a plan, one call each, without choosing. What it finds different from what the plan assumed it reports as a fact, and the plan is made again.

use std::sync::Arc;

use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use serde_json::Value;
use torpor_api::{
    Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool,
    extensions::{ClaimShutdownPolicy, SandboxClaimStatus},
};

use super::{
    Error, annotate,
    dereference::Session,
    plan::{Action, Offered, Plan, Refusal},
};
use crate::{
    calls::{self, Answer},
    candidates::{is_member, pool_of},
    context::Context,
    outline,
    template::plan::policy_name,
    watches,
};

/// How the steps of a plan ended.
#[derive(Debug)]
pub enum Step {
    /// As planned.
    Through,
    /// Plan again with what was learnt.
    Again,
    Refused(Refusal),
    /// The apiserver refused, in these words.
    Failed(String),
}

/// What a pass has done.
#[derive(Debug)]
pub enum Happened {
    Adopted(String),
    Created(String),
    /// The claim was deleted.
    Ended(ClaimShutdownPolicy),
    Said {
        before: Box<SandboxClaimStatus>,
        after: Box<SandboxClaimStatus>,
    },
}

/// Takes the steps in order. The first that does not end as planned ends it.
pub async fn apply(plan: &Plan, session: &mut Session, context: &Context) -> Result<Step, Error> {
    for action in &plan.steps {
        match execute(action, session, context).await? {
            Step::Through => {}
            other => return Ok(other),
        }
    }
    Ok(Step::Through)
}

/// One arm per action. Nothing is decided here.
async fn execute(action: &Action, session: &mut Session, context: &Context) -> Result<Step, Error> {
    let claim = Arc::clone(&session.observed.claim);
    let namespace = &claim.namespace().unwrap_or_default();
    let api = &context.api;
    match action {
        Action::Ask(name) => {
            look(name, session, context).await?;
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
            // It is gone, and the caches are about to show it.
            Err(error) if matches!(error.answer(), Answer::NotFound | Answer::Conflict) => {
                Err(Error::Unsettled)
            }
            Err(error) => refused(error),
        },
        Action::Assign { name, patch } => assign(name, patch, session, context).await,
        Action::PatchSandbox { name, patch } => {
            match api.patch::<Sandbox>(namespace, name, patch).await {
                Ok(sandbox) => take_in(sandbox, session, context),
                Err(error) => match error.answer() {
                    Answer::Conflict | Answer::NotFound => look(name, session, context).await?,
                    _ => return refused(error),
                },
            }
            Ok(Step::Again)
        }
        Action::CreateSandbox(sandbox) => create(sandbox, session, context).await,
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
                session.happened.push(Happened::Ended(*policy));
            }
            gone(deleted)
        }
        Action::DeletePolicy { name, uid } => gone(
            api.delete::<NetworkPolicy>(namespace, name, uid, None)
                .await,
        ),
    }
}

/// Reads what the caches have only outlines of, as far as the plan works with it: the claim's own Sandboxes, the member that is offered, and the template of a claim that has no Sandbox.
pub async fn complete(session: &mut Session, context: &Context) -> Result<(), Error> {
    let owned = session.observed.known.owned.values();
    let owned: Vec<String> = owned
        .filter(|sandbox| outline::is_outline(&***sandbox))
        .map(|sandbox| sandbox.name_any())
        .collect();
    for name in owned {
        look(&name, session, context).await?;
    }
    let observed = &session.observed;
    let template = observed.template.as_deref();
    if observed.known.owned.is_empty() && template.is_some_and(outline::is_outline) {
        refresh(session, context).await?;
    }
    if let Offered::Sandbox(member) = &session.observed.offer
        && outline::is_outline(&**member)
    {
        let name = member.name_any();
        session.observed.offer = Offered::Unasked;
        lost(&name, session, context).await?;
        if session.observed.offer == Offered::Unasked {
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

/// What is gone already, or is another object or another version by now, is left alone.
fn gone(deleted: Result<(), calls::Error>) -> Result<Step, Error> {
    match deleted {
        Ok(()) => Ok(Step::Through),
        Err(error) if matches!(error.answer(), Answer::NotFound | Answer::Conflict) => {
            Ok(Step::Through)
        }
        Err(error) => refused(error),
    }
}

fn settled(session: &mut Session, context: &Context) {
    let claim = &session.observed.claim;
    context.sightings.set_unsettled(claim, None);
    session.observed.known.unsettled = None;
}

/// Everybody in this process knows the Sandbox as it is now.
fn take_in(sandbox: Sandbox, session: &mut Session, context: &Context) {
    watches::sandbox_written(context, sandbox.clone());
    session.learn(Arc::new(sandbox));
}

/// Asks the apiserver for a Sandbox.
async fn look(name: &str, session: &mut Session, context: &Context) -> Result<(), Error> {
    let namespace = session.observed.claim.namespace().unwrap_or_default();
    let found = context.api.get::<Sandbox>(&namespace, name).await;
    match found.map_err(Error::Observe)? {
        Some(sandbox) => take_in(sandbox, session, context),
        None => session.learn_not_ours(name),
    }
    Ok(())
}

/// Asks the apiserver for pool, template and the template's NetworkPolicy.
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
    observed.template_policy = None;
    if let Some(template) = &observed.template {
        let name = policy_name(template);
        let policy = api.get::<NetworkPolicy>(&namespace, &name).await;
        observed.template_policy = policy.map_err(Error::Observe)?.map(Arc::new);
    }
    observed.fresh = true;
    Ok(())
}

/// The claim becomes the member's controller, unless the member has changed since it was looked at.
async fn assign(
    name: &str,
    patch: &Value,
    session: &mut Session,
    context: &Context,
) -> Result<Step, Error> {
    let claim = Arc::clone(&session.observed.claim);
    let namespace = claim.namespace().unwrap_or_default();
    context
        .sightings
        .set_unsettled(&claim, Some(name.to_owned()));
    session.observed.offer = Offered::Unasked;
    let noting = annotate::note(name, session, context);
    let assigning = context.api.patch::<Sandbox>(&namespace, name, patch);
    let (assigned, noted) = tokio::join!(assigning, noting);
    learn_noted(noted, session);
    match assigned {
        Ok(sandbox) => {
            take_in(sandbox, session, context);
            session.happened.push(Happened::Adopted(name.to_owned()));
        }
        Err(error) if matches!(error.answer(), Answer::Conflict | Answer::NotFound) => {
            session.observed.lost += 1;
            lost(name, session, context).await?;
        }
        Err(error) if error.answer() == Answer::Unknown => return Err(Error::Unknown(error)),
        Err(error) => {
            settled(session, context);
            return refused(error);
        }
    }
    settled(session, context);
    // In the pool or not, the cache knows it as it is.
    if session.observed.offer == Offered::Unasked {
        session.taken = None;
    }
    Ok(Step::Again)
}

/// The member is not as it was. If it is still to be had, it is offered again as it is now; else the pool has others.
async fn lost(name: &str, session: &mut Session, context: &Context) -> Result<(), Error> {
    let namespace = session.observed.claim.namespace().unwrap_or_default();
    let found = context.api.get::<Sandbox>(&namespace, name).await;
    let Some(sandbox) = found.map_err(Error::Unknown)? else {
        session.learn_not_ours(name);
        return Ok(());
    };
    let pool = session.observed.pool.as_ref().and_then(|pool| pool.uid());
    let again = is_member(&sandbox) && pool_of(&sandbox) == pool.as_deref();
    take_in(sandbox.clone(), session, context);
    if again && session.observed.lost < super::plan::ATTEMPTS {
        session.observed.offer = Offered::Sandbox(Arc::new(sandbox));
    }
    Ok(())
}

/// A note that failed is planned again before the claim is Ready.
fn learn_noted(noted: Result<SandboxClaim, calls::Error>, session: &mut Session) {
    match noted {
        Ok(noted) => session.learn_claim(noted),
        Err(error) => {
            let claim = session.observed.claim.name_any();
            tracing::debug!(%error, claim, "the claim's Sandbox is not noted yet");
        }
    }
}

async fn create(sandbox: &Value, session: &mut Session, context: &Context) -> Result<Step, Error> {
    let claim = Arc::clone(&session.observed.claim);
    let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
    context.sightings.set_unsettled(&claim, Some(name.clone()));
    let noting = annotate::note(&name, session, context);
    let creating = context.api.create::<Sandbox>(&namespace, sandbox.clone());
    let (created, noted) = tokio::join!(creating, noting);
    learn_noted(noted, session);
    match created {
        Ok(sandbox) => {
            session.learn(Arc::new(sandbox));
            session.happened.push(Happened::Created(name));
        }
        Err(error) if error.answer() == Answer::AlreadyExists => {
            look(&name, session, context).await?;
            if session.observed.known.not_ours.contains(&name) && !is_there(session) {
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

/// Whether the Sandbox with the claim's name was found.
fn is_there(session: &Session) -> bool {
    let namesake = session.observed.namesake.as_ref();
    namesake.is_some_and(|sandbox| sandbox.metadata.deletion_timestamp.is_none())
}
