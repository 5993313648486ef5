//! Gathers from the caches everything that decides about one claim; nothing is judged here, and nothing is asked of the apiserver.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use jiff::Timestamp;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use torpor_api::{Sandbox, SandboxClaim, SandboxTemplate};

use super::{
    apply::Happened,
    binding::{self, Known, noted_name, owns},
    plan::{self, Observed, Offered},
};
use crate::{
    blueprint::Blueprint,
    candidates::{Offer, Taken, is_member, pool_of},
    context::Context,
    template::plan::policy_name,
    watches::extensions::controller_of,
};

/// One pass over one claim.
#[derive(Debug)]
pub struct Session {
    pub observed: Observed,
    /// The member that is offered to this claim and to no other.
    pub taken: Option<Taken>,
    /// What the pass has done, for what is told afterwards.
    pub happened: Vec<Happened>,
    /// The trace that the claim's annotation does not name yet, as a carrier.
    pub trace: Option<String>,
}

/// Reads the caches.
pub fn dereference(claim: Arc<SandboxClaim>, context: &Context) -> Session {
    let caches = &context.caches;
    let namespace = &claim.namespace().unwrap_or_default();
    let name = claim.name_any();
    let owned = caches
        .sandboxes
        .indexed(namespace, &claim.uid().unwrap_or_default());
    let known = Known {
        owned: by_name(owned),
        not_ours: BTreeSet::new(),
        unsettled: context.sightings.of(&claim, Timestamp::now()).unsettled,
    };
    let pool = caches.pools.get(namespace, &claim.spec.warm_pool_ref.name);
    let template = pool.as_ref().and_then(|pool| {
        caches
            .templates
            .get(namespace, &pool.spec.sandbox_template_ref.name)
    });
    let legacy = format!("{name}-network-policy");
    let legacy_policy = caches.policies.get(namespace, &legacy).filter(|policy| {
        controller_of(&**policy)
            .is_some_and(|owner| Some(&owner.uid) == claim.metadata.uid.as_ref())
    });
    let observed = Observed {
        known,
        pool,
        template_policy: template_policy(template.as_deref(), namespace, context),
        except: context.settings.network.except.clone(),
        template,
        fresh: false,
        namesake: caches.sandboxes.get(namespace, &name),
        legacy_policy: legacy_policy.map(|policy| (legacy, policy.uid().unwrap_or_default())),
        foreign: None,
        offer: Offered::Unasked,
        lost: 0,
        label_domains: context.settings.claims.label_domains.clone(),
        candidate_grace: context.settings.claims.candidate_grace,
        claim,
    };
    Session {
        observed,
        taken: None,
        happened: Vec::new(),
        trace: None,
    }
}

/// Whatever has the name of a template's NetworkPolicy.
pub fn template_policy(
    template: Option<&SandboxTemplate>,
    namespace: &str,
    context: &Context,
) -> Option<Arc<NetworkPolicy>> {
    let name = policy_name(template?);
    context.caches.policies.get(namespace, &name)
}

fn by_name(sandboxes: Vec<Arc<Sandbox>>) -> BTreeMap<String, Arc<Sandbox>> {
    sandboxes
        .into_iter()
        .map(|sandbox| (sandbox.name_any(), sandbox))
        .collect()
}

impl Session {
    /// Takes a newer view of a Sandbox in.
    pub fn learn(&mut self, sandbox: Arc<Sandbox>) {
        let observed = &mut self.observed;
        let name = sandbox.name_any();
        if name == observed.claim.name_any() {
            observed.namesake = Some(Arc::clone(&sandbox));
        }
        if owns(&observed.claim, &sandbox) {
            observed.known.not_ours.remove(&name);
            observed.known.owned.insert(name, sandbox);
        } else {
            if binding::committed_name(&observed.claim) == Some(name.as_str()) {
                observed.foreign = Some(name.clone());
            }
            self.learn_not_ours(&name);
        }
    }

    /// Takes a newer view of the claim in, which this pass has written.
    pub fn learn_claim(&mut self, written: SandboxClaim) {
        match written.metadata.generation == self.observed.claim.metadata.generation {
            true => self.observed.claim = Arc::new(written),
            false => self.start_anew(Arc::new(written)),
        }
    }

    /// Somebody else has changed the claim: what was asked before that may be so no longer.
    pub fn start_anew(&mut self, claim: Arc<SandboxClaim>) {
        self.observed.claim = claim;
        self.observed.known.not_ours.clear();
        self.observed.foreign = None;
    }

    /// There is no Sandbox of this name, or it is not the claim's.
    pub fn learn_not_ours(&mut self, name: &str) {
        let known = &mut self.observed.known;
        known.owned.remove(name);
        known.not_ours.insert(name.to_owned());
    }

    /// Asks the claim's pool for a member. What another controller has noted on the claim comes first: it may be half assigned.
    pub fn ask_pool(&mut self, context: &Context) {
        let observed = &self.observed;
        let (Some(pool), Some(template)) = (&observed.pool, &observed.template) else {
            return;
        };
        let pool_uid = pool.uid().unwrap_or_default();
        if observed.lost == 0
            && let Some(taken) = noted(&observed.claim, &pool_uid, context)
        {
            self.observed.offer = Offered::Sandbox(Arc::clone(&taken.sandbox));
            self.taken = Some(taken);
            return;
        }
        // Members that are not as the template says are left to the pool; held until a good one is found, so that none comes twice.
        let (mut stale, blueprint) = (Vec::new(), Blueprint::of(template));
        self.observed.offer = loop {
            match context.candidates.take(&pool_uid) {
                Offer::Sandbox(taken) if !plan::is_acceptable(&taken.sandbox, pool, &blueprint) => {
                    stale.push(taken);
                }
                Offer::Sandbox(taken) => {
                    let member = Arc::clone(&taken.sandbox);
                    self.taken = Some(taken);
                    break Offered::Sandbox(member);
                }
                Offer::Pending => break Offered::Pending,
                Offer::Nothing => break Offered::Nothing,
            }
        };
    }
}

fn noted(claim: &SandboxClaim, pool_uid: &str, context: &Context) -> Option<Taken> {
    let name = noted_name(claim)?;
    if binding::committed_name(claim).is_some() {
        return None;
    }
    let namespace = claim.namespace().unwrap_or_default();
    let sandbox = context.caches.sandboxes.get(&namespace, name)?;
    if !is_member(&sandbox) || pool_of(&sandbox) != Some(pool_uid) {
        return None;
    }
    context.candidates.take_named(pool_uid, name)
}
