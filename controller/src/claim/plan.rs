//! No client required. Plans the steps for one claim: pure, total, deterministic.
//!
//! Order, as upstream: expiry; then the Sandbox that the claim has; then the claim's own name; then
//! a member of the pool; then a new Sandbox. A claim with environment variables or volumes takes no
//! member of a pool, because a member's Pod runs already, unless its template lets them arrive late
//! ([`late_bind`]).

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use serde_json::Value;
use torpor_api::{
    Sandbox, SandboxClaim, SandboxSnapshot, SandboxTemplate, SandboxWarmPool,
    annotations::{self, ClaimFile},
    conditions,
    extensions::{ClaimShutdownPolicy, WarmPoolUpdateStrategyType},
    reasons::claim as reasons,
};

use super::{
    adopt,
    binding::{self, Binding, ClaimSandboxes},
    files, fork, is_ready,
    late_bind::{self, Additions},
    metadata::{self, Invalid},
    sandbox_spec::{self, Rejected},
    wake,
};
use crate::{
    blueprint::Blueprint,
    network::Cidr,
    sandbox,
    template::plan::{Unisolated, isolation},
};

/// Input of the plan for one claim.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    pub claim: Arc<SandboxClaim>,
    pub sandboxes: ClaimSandboxes,
    pub pool: Option<Arc<SandboxWarmPool>>,
    pub template: Option<Arc<SandboxTemplate>>,
    /// NetworkPolicy with the name of the template's own, whatever controls it.
    pub template_policy: Option<Arc<NetworkPolicy>>,
    /// SandboxSnapshot that the claim asks to fork.
    pub fork: Option<Arc<SandboxSnapshot>>,
    /// Ranges that the operator blocks in addition to the private addresses.
    pub except: Vec<Cidr>,
    /// True if pool and template were read from the apiserver and not only from the caches.
    pub fresh: bool,
    /// Sandbox with the claim's own name, whatever controls it.
    pub namesake: Option<Arc<Sandbox>>,
    /// Name of a Sandbox that the status names and that another object controls.
    pub foreign: Option<String>,
    /// NetworkPolicy that an old version of upstream's controller made for the claim: name and UID.
    pub legacy_policy: Option<(String, String)>,
    pub offer: Offered,
    /// Number of members offered in this pass that could not be taken.
    pub lost: usize,
    pub label_domains: Vec<String>,
    /// Time after its creation that the claim waits for a member without an address.
    pub candidate_grace: Duration,
    /// Time since which the claim waits for a member that sleeps.
    pub waits_since: Option<Timestamp>,
}

/// Offer of the pool.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Offered {
    /// The pool has not been asked yet.
    #[default]
    NotAsked,
    Sandbox(Arc<Sandbox>),
    /// The pool has only members without an address.
    Pending,
    Nothing,
}

/// Step of a plan: one call.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Read the Sandbox of this name from the apiserver.
    Lookup(String),
    /// Read pool, template and the template's NetworkPolicy from the apiserver.
    Refresh,
    /// Note the Sandbox on the claim, before the claim is Ready with it.
    Note(String),
    /// Make the claim the controller of a member of a pool, and note the member on the claim at the
    /// same time.
    Assign { name: String, patch: Value },
    /// Change a Sandbox that the claim controls already.
    PatchSandbox { name: String, patch: Value },
    /// Create a Sandbox with the claim's name, and note it on the claim at the same time.
    CreateSandbox(Value),
    /// Write the claim's files into the Secret of its Sandbox, and note that on the Sandbox.
    WriteFiles {
        sandbox: Arc<Sandbox>,
        sources: Vec<ClaimFile>,
    },
    /// Look at the written files of the claim's Sandbox, and renew their token. A failure changes
    /// nothing else.
    KeepFiles(Arc<Sandbox>),
    DeleteSandbox {
        name: String,
        uid: String,
        resource_version: Option<String>,
    },
    /// `policy` is Delete or DeleteForeground.
    DeleteClaim { policy: ClaimShutdownPolicy },
    /// Delete the NetworkPolicy that an old version of upstream's controller made for the claim.
    DeletePolicy { name: String, uid: String },
}

/// Reason why the claim has no Sandbox, or not the one that it asks for.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    #[error("SandboxWarmPool {0:?} not found")]
    PoolNotFound(String),
    #[error("SandboxTemplate {0:?} not found")]
    TemplateNotFound(String),
    #[error(transparent)]
    Metadata(#[from] Invalid),
    #[error(transparent)]
    Rejected(#[from] Rejected),
    #[error(
        "Sandbox {0:?} exists and is not controlled by this claim. Please use a different claim name or delete the sandbox manually"
    )]
    NameTaken(String),
    #[error(transparent)]
    Files(#[from] files::Refused),
    #[error(transparent)]
    Fork(#[from] fork::Refused),
    #[error(transparent)]
    Unisolated(#[from] Unisolated),
    #[error("Sandbox already created; waiting for cache to converge")]
    CreatePending,
    #[error("{0} pool members were taken by others; the next pass retries from a converged view")]
    Contention(usize),
}

impl Refusal {
    /// Returns the reason of the Ready condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::PoolNotFound(_) => reasons::WARM_POOL_NOT_FOUND,
            Self::TemplateNotFound(_) => reasons::TEMPLATE_NOT_FOUND,
            Self::Metadata(_) => reasons::INVALID_METADATA,
            Self::Rejected(rejected) if rejected.is_about_env() => {
                reasons::ENV_VARS_INJECTION_REJECTED
            }
            Self::Rejected(_) => reasons::VOLUME_CLAIM_TEMPLATES_ERROR,
            Self::NameTaken(_) => reasons::RECONCILER_ERROR,
            Self::Files(_) => reasons::CLAIM_FILES_REJECTED,
            Self::Fork(_) => reasons::FORK_REJECTED,
            Self::Unisolated(why) if why.is_passing() => reasons::NETWORK_POLICY_PENDING,
            Self::Unisolated(_) => reasons::NETWORK_POLICY_NOT_OWNED,
            Self::CreatePending => reasons::SANDBOX_CREATE_PENDING,
            Self::Contention(_) => reasons::ADOPTION_CONFLICT,
        }
    }

    /// Reports whether outdated caches may be the cause. Clients give up at once on these reasons,
    /// so that a false one must not be published.
    fn may_be_stale(&self) -> bool {
        matches!(
            self,
            Self::PoolNotFound(_)
                | Self::TemplateNotFound(_)
                | Self::Metadata(Invalid::Conflict { .. })
                | Self::Rejected(_)
                | Self::Files(_)
                | Self::Fork(_)
        )
    }

    /// Returns the delay until the next try; `None` if only a change by the user can help.
    pub fn retry(&self) -> Option<Duration> {
        match self {
            Self::PoolNotFound(_)
            | Self::TemplateNotFound(_)
            | Self::NameTaken(_)
            | Self::Unisolated(_) => Some(MISSING_RETRY),
            Self::Metadata(_) | Self::Rejected(_) => None,
            Self::Files(_) | Self::Fork(_) => Some(FILES_RETRY),
            Self::CreatePending | Self::Contention(_) => Some(CACHE_LAG_RETRY),
        }
    }
}

/// Content of the next status.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Outlook {
    /// Ready as the Sandbox.
    Sandbox(Arc<Sandbox>),
    #[default]
    NoSandbox,
    Refused {
        why: Refusal,
        sandbox: Option<Arc<Sandbox>>,
    },
    /// The apiserver refused a step, with this message.
    Failed {
        message: String,
        sandbox: Option<Arc<Sandbox>>,
    },
    Expired {
        sandbox: Option<Arc<Sandbox>>,
        /// Name of a Sandbox that the status names and that is not the claim's.
        foreign: Option<String>,
    },
}

/// Steps for the claim, and the content of its status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub steps: Vec<Action>,
    pub outlook: Outlook,
    /// True if the pool has to be asked for a member before the plan is complete.
    pub wants_member: bool,
    /// True if the status is not written: the claim is deleted once the steps are executed, or its
    /// Sandbox' status is about to change.
    pub keeps_status: bool,
    pub requeue: Option<Duration>,
}

/// Delay before a missing object is looked up again; this and the following delays are upstream's.
const MISSING_RETRY: Duration = Duration::from_secs(60);
/// Delay before sources of files, or a snapshot, are looked at again. No change of them queues the
/// claim.
const FILES_RETRY: Duration = Duration::from_secs(15);
const MEMBER_RETRY: Duration = Duration::from_millis(500);
const CACHE_LAG_RETRY: Duration = Duration::from_millis(200);
const AT_ONCE: Duration = Duration::from_millis(1);
/// Most members that are tried in one pass.
pub const ATTEMPTS: usize = 3;
/// Most members that a claim takes in place of others that could not wake. A golden image that is
/// damaged affects all members of its node.
const REPLACEMENTS: usize = 2;

/// Plans the steps for one claim.
pub fn plan(observed: &Observed, now: Timestamp) -> Plan {
    let mut plan = match expires_at(&observed.claim) {
        Some(time) if time <= now => plan_expired(observed),
        time => {
            let mut plan = plan_active(observed, now);
            let left = time.and_then(|time| Duration::try_from(time.duration_since(now)).ok());
            plan.requeue = plan.requeue.into_iter().chain(left).min();
            plan
        }
    };
    if let Some((name, uid)) = observed.legacy_policy.clone() {
        plan.steps.insert(0, Action::DeletePolicy { name, uid });
    }
    plan
}

/// Returns the earlier of the shutdown time and the end of the time to live after the Sandbox has
/// finished.
pub fn expires_at(claim: &SandboxClaim) -> Option<Timestamp> {
    let lifecycle = claim.spec.lifecycle.as_ref()?;
    let shutdown = lifecycle.shutdown_time.as_ref().map(|time| time.0);
    let conditions = claim.status.as_ref().map(|status| &status.conditions[..]);
    let finished = conditions::find(conditions.unwrap_or_default(), conditions::FINISHED)
        .filter(|condition| condition.status == "True");
    let ttl = lifecycle.ttl_seconds_after_finished.zip(finished);
    let outlived = ttl.and_then(|(seconds, finished)| {
        let seconds = jiff::SignedDuration::from_secs(seconds.into());
        finished.last_transition_time.0.checked_add(seconds).ok()
    });
    shutdown.into_iter().chain(outlived).min()
}

/// Reports whether the status marks the claim as expired already.
pub fn marked_expired(claim: &SandboxClaim) -> bool {
    let conditions = claim.status.as_ref().map(|status| &status.conditions[..]);
    conditions::find(conditions.unwrap_or_default(), conditions::READY)
        .is_some_and(|ready| ready.reason == reasons::CLAIM_EXPIRED)
}

fn plan_expired(observed: &Observed) -> Plan {
    let claim = &*observed.claim;
    let committed = binding::committed_name(claim);
    let sandboxes = &observed.sandboxes;
    if let Binding::Lookup(name) = binding::bind(claim, sandboxes) {
        return Plan {
            steps: vec![Action::Lookup(name)],
            ..Plan::default()
        };
    }
    let sandbox = match committed {
        Some(name) => sandboxes.owned.get(name).cloned(),
        None => sandboxes.owned.values().next().cloned(),
    };
    let mut plan = Plan {
        outlook: Outlook::Expired {
            sandbox,
            foreign: observed.foreign.clone(),
        },
        ..Plan::default()
    };
    if !marked_expired(claim) {
        // The mark is written first, so that clients that watch the claim see why it is deleted.
        plan.requeue = Some(AT_ONCE);
        return plan;
    }
    let lifecycle = claim.spec.lifecycle.clone().unwrap_or_default();
    match lifecycle.shutdown_policy.unwrap_or_default() {
        ClaimShutdownPolicy::Retain => {
            let living = sandboxes
                .owned
                .values()
                .filter(|sandbox| sandbox.metadata.deletion_timestamp.is_none());
            plan.steps
                .extend(living.map(|sandbox| delete(sandbox, None)));
        }
        policy => {
            plan.steps.push(Action::DeleteClaim { policy });
            plan.keeps_status = true;
        }
    }
    plan
}

fn delete(sandbox: &Sandbox, resource_version: Option<String>) -> Action {
    Action::DeleteSandbox {
        name: sandbox.name_any(),
        uid: sandbox.uid().unwrap_or_default(),
        resource_version,
    }
}

fn plan_active(observed: &Observed, now: Timestamp) -> Plan {
    let claim = &*observed.claim;
    let allowed = metadata::check(claim, &observed.label_domains);
    match binding::bind(claim, &observed.sandboxes) {
        Binding::Lookup(name) => Plan {
            steps: vec![Action::Lookup(name)],
            ..Plan::default()
        },
        Binding::Mark { sandbox, replaces } => Plan {
            steps: vec![Action::PatchSandbox {
                name: sandbox.name_any(),
                patch: adopt::mark(&sandbox, &replaces),
            }],
            ..Plan::default()
        },
        Binding::Bound { sandbox, surplus } => {
            if let Some(plan) = plan_replacement(observed, &sandbox, now) {
                return plan;
            }
            let mut plan = plan_bound(observed, allowed, sandbox, now);
            plan.steps.extend(surplus.iter().map(|other| {
                // Only in the version that was read: a pass that commits this Sandbox writes it
                // first.
                delete(other, other.resource_version())
            }));
            plan
        }
        Binding::Unbound { replaces } => {
            let unbound = allowed
                .map_err(Refusal::from)
                .and_then(|()| plan_unbound(observed, replaces.as_deref(), now));
            match unbound {
                Ok(plan) => plan,
                Err(why) if why.may_be_stale() && !observed.fresh => Plan {
                    steps: vec![Action::Refresh],
                    ..Plan::default()
                },
                Err(why) => refused(why, None),
            }
        }
    }
}

fn refused(why: Refusal, sandbox: Option<Arc<Sandbox>>) -> Plan {
    Plan {
        requeue: why.retry(),
        outlook: Outlook::Refused { why, sandbox },
        ..Plan::default()
    }
}

/// Plans for a claim with a Sandbox: edits of the claim are copied to the Sandbox and its Pod.
///
/// A forbidden edit is reported, and the Sandbox stays unchanged. Clients read the claim's
/// annotations when the claim becomes Ready, so that the annotations are written before.
fn plan_bound(
    observed: &Observed,
    allowed: Result<(), Invalid>,
    sandbox: Arc<Sandbox>,
    now: Timestamp,
) -> Plan {
    let claim = &*observed.claim;
    let noted = claim.annotations().get(annotations::SANDBOX_NAME);
    if noted != Some(&sandbox.name_any()) && !is_ready(claim) {
        return Plan {
            steps: vec![Action::Note(sandbox.name_any())],
            ..Plan::default()
        };
    }
    let corrected = files::correction(claim, &sandbox);
    if let Some(patch) = corrected {
        let name = sandbox.name_any();
        return Plan {
            steps: vec![Action::PatchSandbox { name, patch }],
            ..Plan::default()
        };
    }
    if let Some(sources) = files::due(&sandbox) {
        return Plan {
            steps: vec![Action::WriteFiles { sandbox, sources }],
            ..Plan::default()
        };
    }
    let patch = allowed.and_then(|()| adopt::propagation(claim, &sandbox));
    let mut plan = match patch {
        Err(why) => refused(why.into(), Some(Arc::clone(&sandbox))),
        Ok(patch) => Plan {
            steps: patch
                .map(|patch| Action::PatchSandbox {
                    name: sandbox.name_any(),
                    patch,
                })
                .into_iter()
                .collect(),
            outlook: Outlook::Sandbox(Arc::clone(&sandbox)),
            ..Plan::default()
        },
    };
    if matches!(plan.outlook, Outlook::Sandbox(_)) && binding::committed_name(claim).is_none() {
        let patience = wake::patience(&sandbox, claim, observed.waits_since, now);
        plan.keeps_status = patience.is_some() || late_bind::is_from_before(&sandbox);
        plan.requeue = patience;
    }
    let renewal = files::renewal_in(&sandbox, now);
    plan.requeue = plan.requeue.into_iter().chain(renewal).min();
    if files::need_upkeep(&sandbox, now) {
        plan.steps.push(Action::KeepFiles(sandbox));
    }
    plan
}

/// Plans to take another member in place of the claim's, which could not continue from its image
/// and starts cold; `None` if there is none, or if a client may have seen the first one.
///
/// The first one is surplus once the other is committed ([`binding`]).
fn plan_replacement(observed: &Observed, failed: &Sandbox, now: Timestamp) -> Option<Plan> {
    let is_seen = binding::committed_name(&observed.claim).is_some();
    if is_seen
        || !wake::has_failed(failed, &observed.claim)
        || observed.sandboxes.owned.len() > REPLACEMENTS
    {
        return None;
    }
    metadata::check(&observed.claim, &observed.label_domains).ok()?;
    // A member that is not Ready is no better than this one.
    if let Offered::Sandbox(member) = &observed.offer
        && !sandbox::status::is_ready(member.status.as_ref())
    {
        return None;
    }
    let plan = plan_unbound(observed, None, now).ok()?;
    let takes = |step: &Action| matches!(step, Action::Assign { .. });
    (plan.wants_member || plan.steps.iter().any(takes)).then_some(plan)
}

fn plan_unbound(
    observed: &Observed,
    replaces: Option<&str>,
    now: Timestamp,
) -> Result<Plan, Refusal> {
    let claim = &*observed.claim;
    if let Some(namesake) = &observed.namesake
        && !binding::owns(claim, namesake)
    {
        return Err(Refusal::NameTaken(namesake.name_any()));
    }
    let pool_name = &claim.spec.warm_pool_ref.name;
    let not_found = || Refusal::PoolNotFound(pool_name.clone());
    let pool = observed.pool.as_deref().ok_or_else(not_found)?;
    let template_name = &pool.spec.sandbox_template_ref.name;
    let not_found = || Refusal::TemplateNotFound(template_name.clone());
    let template = observed.template.as_deref().ok_or_else(not_found)?;
    let pod_metadata = metadata::merged(template.spec.pod_template.metadata.as_ref(), claim)?;
    let isolated = || {
        let policy = observed.template_policy.as_deref();
        isolation(template, policy, &observed.except)
    };
    let fork = fork::source(claim, observed.fork.as_deref())?;
    let late_env = late_bind::env(claim, template);
    if fork.is_some() && late_env.is_none() {
        return Err(fork::Refused::Variables.into());
    }
    let additions = additions(claim, template)?;
    let cold = || -> Result<Plan, Refusal> {
        let mut sandbox = sandbox_spec::sandbox(claim, template, &pod_metadata, &additions)?;
        isolated()?;
        if let Some(snapshot) = fork {
            sandbox["metadata"]["annotations"][annotations::RESTORE_FROM] = snapshot.into();
        }
        if let Some(gone) = replaces {
            sandbox["metadata"]["annotations"][annotations::REPLACES] = gone.into();
        }
        Ok(Plan {
            steps: vec![Action::CreateSandbox(sandbox)],
            ..Plan::default()
        })
    };
    let can_be_late = late_env.is_some() && claim.spec.volume_claim_templates.is_empty();
    if fork.is_some() || !can_be_late || replaces == Some(claim.name_any().as_str()) {
        return cold();
    }
    match &observed.offer {
        Offered::NotAsked if observed.lost >= ATTEMPTS => Err(Refusal::Contention(observed.lost)),
        Offered::NotAsked => Ok(Plan {
            wants_member: true,
            ..Plan::default()
        }),
        Offered::Sandbox(member) if !additions.suit(member.annotations()) => cold(),
        Offered::Sandbox(member) => {
            // The policy may have been deleted since the member was made.
            isolated()?;
            let mut patch = adopt::assignment(claim, member, &pod_metadata, &additions, replaces);
            adopt::wake(&mut patch, member, now);
            let name = member.name_any();
            Ok(Plan {
                steps: vec![Action::Assign { name, patch }],
                ..Plan::default()
            })
        }
        Offered::Pending if is_young(claim, observed.candidate_grace, now) => Ok(Plan {
            requeue: Some(MEMBER_RETRY),
            ..Plan::default()
        }),
        Offered::Pending | Offered::Nothing => cold(),
    }
}

/// Returns the claim's additions to a sandbox that runs already.
pub fn additions(
    claim: &SandboxClaim,
    template: &SandboxTemplate,
) -> Result<Additions, files::Refused> {
    Ok(Additions {
        env: late_bind::env(claim, template).unwrap_or_default(),
        files: files::wanted(claim, template)?.map(str::to_owned),
    })
}

fn is_young(claim: &SandboxClaim, grace: Duration, now: Timestamp) -> bool {
    let created = claim.metadata.creation_timestamp.as_ref();
    created
        .and_then(|created| Duration::try_from(now.duration_since(created.0)).ok())
        .is_some_and(|age| age < grace)
}

/// Reports whether a member may be handed out. Under Recreate a member must not be stale; under
/// OnReplenish a stale member is accepted, as upstream.
pub fn is_acceptable(member: &Sandbox, pool: &SandboxWarmPool, blueprint: &Blueprint<'_>) -> bool {
    let strategy = pool.spec.update_strategy.as_ref();
    strategy.is_none_or(|strategy| strategy.type_ == WarmPoolUpdateStrategyType::OnReplenish)
        || !blueprint.is_stale(member)
}

/// Reports whether the Sandbox's own shutdown time has passed.
pub fn sandbox_expired(sandbox: &Sandbox, now: Timestamp) -> bool {
    sandbox::plan::marked_expired(sandbox)
        || sandbox::plan::expiry(sandbox, now) == sandbox::plan::Expiry::Past
}

#[cfg(test)]
mod tests;
