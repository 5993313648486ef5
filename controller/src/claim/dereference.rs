//! Collects everything that decides about one claim from the caches. Makes no decisions and no
//! calls to the apiserver.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use jiff::Timestamp;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use torpor_api::{Sandbox, SandboxClaim, SandboxTemplate};

use super::{
    apply::Effect,
    binding::{self, ClaimSandboxes, noted_name, owns},
    fork,
    plan::{self, Observed, Offered},
    wake,
};
use crate::{
    blueprint::Blueprint,
    candidates::{Nodes, Offer, Taken, is_member, pool_of, prefers_labels},
    context::Context,
    template::plan::policy_name,
    watches::extensions::controller_of,
};

/// State of one pass over one claim.
#[derive(Debug)]
pub struct Session {
    pub observed: Observed,
    /// Member offered to this claim alone.
    pub taken: Option<Taken>,
    /// Actions of the pass, for the reports.
    pub effects: Vec<Effect>,
    /// Carrier of the trace, if the claim's annotation has none yet.
    pub trace: Option<String>,
}

/// Reads the caches and starts a pass.
pub fn dereference(claim: Arc<SandboxClaim>, context: &Context) -> Session {
    let caches = &context.caches;
    let namespace = &claim.namespace().unwrap_or_default();
    let name = claim.name_any();
    let owned = caches
        .sandboxes
        .indexed(namespace, &claim.uid().unwrap_or_default());
    let sandboxes = ClaimSandboxes {
        owned: by_name(owned),
        not_owned: BTreeSet::new(),
        unsettled: context.claims.of(&claim, Timestamp::now()).unsettled,
    };
    let mut waking = sandboxes.owned.values();
    let waits = waking.any(|sandbox| wake::is_asleep(sandbox));
    let waits_since = waits.then(|| context.claims.waits_since(&claim, Timestamp::now()));
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
        sandboxes,
        pool,
        template_policy: template_policy(template.as_deref(), namespace, context),
        fork: fork::asked(&claim).and_then(|snapshot| caches.snapshots.get(namespace, snapshot)),
        except: context.settings.network.except.clone(),
        template,
        fresh: false,
        namesake: caches.sandboxes.get(namespace, &name),
        legacy_policy: legacy_policy.map(|policy| (legacy, policy.uid().unwrap_or_default())),
        foreign: None,
        offer: Offered::NotAsked,
        lost: 0,
        label_domains: context.settings.claims.label_domains.clone(),
        candidate_grace: context.settings.claims.candidate_grace,
        waits_since,
        claim,
    };
    Session {
        observed,
        taken: None,
        effects: Vec::new(),
        trace: None,
    }
}

/// Returns the NetworkPolicy with the name of the template's own, whatever controls it.
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
    /// Records a newer version of a Sandbox.
    pub fn learn(&mut self, sandbox: Arc<Sandbox>) {
        let observed = &mut self.observed;
        let name = sandbox.name_any();
        if name == observed.claim.name_any() {
            observed.namesake = Some(Arc::clone(&sandbox));
        }
        if owns(&observed.claim, &sandbox) {
            observed.sandboxes.not_owned.remove(&name);
            observed.sandboxes.owned.insert(name, sandbox);
        } else {
            if binding::committed_name(&observed.claim) == Some(name.as_str()) {
                observed.foreign = Some(name.clone());
            }
            self.learn_not_owned(&name);
        }
    }

    /// Records a newer version of the claim, written by this pass.
    pub fn learn_claim(&mut self, written: SandboxClaim) {
        match written.metadata.generation == self.observed.claim.metadata.generation {
            true => self.observed.claim = Arc::new(written),
            false => self.start_anew(Arc::new(written)),
        }
    }

    /// Starts again with a claim that another client has changed; earlier answers of the apiserver
    /// may be outdated.
    pub fn start_anew(&mut self, claim: Arc<SandboxClaim>) {
        self.observed.claim = claim;
        self.observed.sandboxes.not_owned.clear();
        self.observed.foreign = None;
    }

    /// Records that the Sandbox of this name does not exist or is not the claim's.
    pub fn learn_not_owned(&mut self, name: &str) {
        let sandboxes = &mut self.observed.sandboxes;
        sandboxes.owned.remove(name);
        sandboxes.not_owned.insert(name.to_owned());
    }

    /// Asks the claim's pool for a member. The member noted on the claim by another controller
    /// comes first: it may be half assigned.
    pub async fn ask_pool(&mut self, context: &Context) {
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
        // Members without a volume for what the claim brings are left to others.
        let additions = plan::additions(&observed.claim, template).unwrap_or_default();
        // Stale members are left to the pool. They are held until a good member is found, so that
        // none is offered twice.
        let facts = match prefers_labels(&observed.claim) {
            true => context.nodes.for_claim(&context.api).await,
            false => [].into(),
        };
        let nodes = context.caches.nodes.filtered(|_| true);
        let nodes = Nodes::of(&nodes, &facts, &observed.claim, Timestamp::now());
        let (mut stale, blueprint) = (Vec::new(), Blueprint::of(template));
        self.observed.offer = loop {
            match context.candidates.take(&pool_uid, &nodes) {
                Offer::Sandbox(taken)
                    if !plan::is_acceptable(&taken.sandbox, pool, &blueprint)
                        || !additions.suit(taken.sandbox.annotations()) =>
                {
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
