//! Reconciler of SandboxTemplates: sets a label by which the template's Sandboxes are found, and
//! writes one NetworkPolicy that they share. A template has no status.

use std::{sync::Arc, time::Duration};

use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use torpor_api::{SandboxTemplate, reasons::event};

use crate::{
    calls::{self, Answer, Namespaced},
    context::Context,
    golden, outline, staging,
};

pub mod faults;
pub mod memory;
pub mod plan;

use self::plan::{Action, Observed};

/// Most plans within one pass.
const ROUNDS: usize = 4;

/// Failure of a pass; the pass is tried again with a growing delay.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the current state")]
    Observe(#[source] calls::Error),
    #[error("cannot write an object")]
    Write(#[source] calls::Error),
    #[error(
        "NetworkPolicy {0:?} exists and is not controlled by this SandboxTemplate; it is not changed, and no Sandbox of the template is created"
    )]
    NotOwned(String),
    #[error("the objects around the SandboxTemplate keep changing")]
    Unsettled,
}

impl Error {
    /// Returns a stable name for metrics and logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Observe(_) => "ObserveFailed",
            Self::Write(_) => "WriteFailed",
            Self::NotOwned(_) => "NotOwned",
            Self::Unsettled => "Unsettled",
        }
    }
}

/// Reconciles one template.
pub async fn reconcile(
    template: Arc<SandboxTemplate>,
    context: Arc<Context>,
) -> Result<Option<Duration>, Error> {
    let Some(template) = whole(template, &context).await? else {
        return Ok(None);
    };
    let namespace = template.namespace().unwrap_or_default();
    let name = plan::policy_name(&template);
    let policy = match context.caches.policies.get(&namespace, &name) {
        Some(policy) => whole(policy, &context).await?,
        None => None,
    };
    let mut observed = Observed {
        policy,
        except: context.settings.network.except.clone(),
        template,
    };
    for _ in 0..ROUNDS {
        let steps = match plan::plan(&observed) {
            Ok(steps) => steps,
            Err(policy) => {
                publish_not_owned(&observed.template, &policy, &context).await;
                return Err(Error::NotOwned(policy));
            }
        };
        let mut as_planned = true;
        for step in &steps {
            as_planned &= execute(step, &namespace, &mut observed, &context).await?;
        }
        if as_planned {
            let Observed {
                template,
                policy,
                except,
            } = &observed;
            context
                .templates
                .forget(&template.uid().unwrap_or_default());
            let isolated = plan::isolation(template, policy.as_deref(), except).is_ok();
            let golden = golden::reconcile(template, isolated, &context).await;
            let staged = staging::reconcile(template, &context).await;
            let delays = [golden, staged].into_iter();
            let delays = delays
                .collect::<Result<Vec<_>, _>>()
                .map_err(Error::Write)?;
            return Ok(delays.into_iter().flatten().min());
        }
    }
    Err(Error::Unsettled)
}

/// Returns the whole object where the cache has only its outline; `None` if it is gone.
async fn whole<K: Namespaced>(object: Arc<K>, context: &Context) -> Result<Option<Arc<K>>, Error> {
    if !outline::is_outline(&*object) {
        return Ok(Some(object));
    }
    let found = outline::read_full(&context.api, &*object).await;
    Ok(found.map_err(Error::Observe)?.map(Arc::new))
}

/// Publishes an Event about a foreign NetworkPolicy. A template has no status and its author reads
/// no log, so that only the Event explains why no Sandbox of it is created.
async fn publish_not_owned(template: &SandboxTemplate, policy: &str, context: &Context) {
    let uid = template.uid().unwrap_or_default();
    let message = format!(
        "NetworkPolicy {policy:?} exists and is not controlled by this SandboxTemplate: it is not changed, and no Sandbox of the template is created without the template's rules \
             (Sandboxes older than that NetworkPolicy are without them). Delete it or recreate it under another name, and the template's own is created; \
             or set spec.networkPolicyManagement: Unmanaged to keep it as the only one"
    );
    faults::warn(
        template,
        &uid,
        event::NETWORK_POLICY_NOT_OWNED,
        message,
        context,
    )
    .await;
}

/// Executes one step; one call per arm. Returns false if an object differed from the plan's input;
/// `observed` then has its current version.
async fn execute(
    step: &Action,
    namespace: &str,
    observed: &mut Observed,
    context: &Context,
) -> Result<bool, Error> {
    let api = &context.api;
    let policy = plan::policy_name(&observed.template);
    let done = match step {
        Action::LabelTemplate(patch) => {
            let name = observed.template.name_any();
            api.patch::<SandboxTemplate>(namespace, &name, patch)
                .await
                .map(drop)
        }
        Action::CreatePolicy(object) => api
            .create::<NetworkPolicy>(namespace, object.clone())
            .await
            .map(drop),
        Action::PatchPolicy(patch) => api
            .patch::<NetworkPolicy>(namespace, &policy, patch)
            .await
            .map(drop),
        Action::DeletePolicy { uid } => {
            api.delete::<NetworkPolicy>(namespace, &policy, uid, None)
                .await
        }
    };
    match done {
        Ok(()) => Ok(true),
        // The template is gone or replaced: its events follow.
        Err(error) if matches!(step, Action::LabelTemplate(_)) && is_newer(&error) => Ok(true),
        Err(error) if is_newer(&error) => {
            let found = api.get::<NetworkPolicy>(namespace, &policy).await;
            observed.policy = found.map_err(Error::Observe)?.map(Arc::new);
            Ok(false)
        }
        Err(error) => Err(Error::Write(error)),
    }
}

fn is_newer(error: &calls::Error) -> bool {
    matches!(
        error.answer(),
        Answer::Conflict | Answer::NotFound | Answer::AlreadyExists
    )
}
