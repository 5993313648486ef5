//! The watches of SandboxClaim, SandboxTemplate, SandboxWarmPool and NetworkPolicy, and what a change of a Sandbox means to its claim or its pool.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{
    api::networking::v1::NetworkPolicy, apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use kube::{Resource, ResourceExt};
use tokio::task::JoinSet;
use torpor_api::{
    Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool, annotations,
    conditions::{self, find},
    extensions::GROUP,
    labels,
};

use super::{Place, copied_from, follow, follow_guarded, in_pages, in_small_pages, trim};
use crate::{
    cache::{Change, key_of},
    candidates::pool_of,
    claim::binding::{committed_name, owns},
    context::Context,
    network::default_policy::{self, Isolation},
    template::plan::template_of_policy,
};

/// How long after a change of a member its pool is looked at. A pass walks over all members, and in a storm of changes one pass serves many of them.
const POOL_LOOK: Duration = Duration::from_millis(100);

/// Starts the watches.
pub(super) fn start(context: &Arc<Context>, tasks: &mut JoinSet<()>) {
    let place = Place::of(context);
    let known = Arc::clone(context);
    tasks.spawn(follow_guarded(
        place.clone(),
        in_small_pages(),
        trim,
        move |event| {
            for change in known.caches.claims.apply_seen(event) {
                claim_changed(&known, &change);
            }
        },
    ));
    let known = Arc::clone(context);
    tasks.spawn(follow_guarded(
        place.clone(),
        in_pages(),
        trim,
        move |event| {
            for change in known.caches.pools.apply_seen(event) {
                pool_changed(&known, &change);
            }
        },
    ));
    let known = Arc::clone(context);
    tasks.spawn(follow_guarded(
        place,
        in_small_pages(),
        trim,
        move |event| {
            for change in known.caches.templates.apply_seen(event) {
                template_changed(&known, &change);
            }
        },
    ));
}

/// Starts the watch of NetworkPolicies.
pub(super) fn start_policies(context: &Arc<Context>, tasks: &mut JoinSet<()>) {
    let (place, known) = (Place::of(context), Arc::clone(context));
    tasks.spawn(follow(place, in_small_pages(), trim, move |event| {
        for change in known.caches.policies.apply_seen(event) {
            policy_changed(&known, &change);
        }
    }));
}

/// The controller of an object.
pub fn controller_of<K: Resource>(object: &K) -> Option<&OwnerReference> {
    let owners = object.meta().owner_references.iter().flatten();
    owners
        .into_iter()
        .find(|owner| owner.controller == Some(true))
}

/// The controller, if it is of this kind of the extensions' group, in whatever version.
pub fn controller_of_kind<'a, K: Resource>(
    object: &'a K,
    kind: &str,
) -> Option<&'a OwnerReference> {
    controller_of(object).filter(|owner| {
        let group = owner.api_version.split_once('/').map(|(group, _)| group);
        owner.kind == kind && group == Some(GROUP)
    })
}

/// The pool that a Sandbox is a member of.
pub fn pool_of_member(context: &Context, sandbox: &Sandbox) -> Option<Arc<SandboxWarmPool>> {
    let owner = controller_of_kind(sandbox, &SandboxWarmPool::kind(&()))?;
    let namespace = sandbox.namespace().unwrap_or_default();
    context.caches.pools.get(&namespace, &owner.name)
}

/// Index of Sandboxes: the UID of the controller; of one that nobody controls, the pool that its label names.
pub fn sandbox_index(sandbox: &Sandbox) -> Option<String> {
    match controller_of(sandbox) {
        Some(owner) => Some(owner.uid.clone()),
        None => {
            let hash = sandbox.labels().get(labels::WARM_POOL_SANDBOX)?;
            Some(orphan_index(hash))
        }
    }
}

/// Index value of the Sandboxes that nobody controls and that name the pool with this hash.
pub fn orphan_index(pool_hash: &str) -> String {
    format!("orphan {pool_hash}")
}

/// Offers what claims may take, and wakes the claim or the pool.
pub(super) fn sandbox_changed(context: &Context, change: &Change<Sandbox>) {
    context.candidates.update(change);
    remember(context, change);
    let (before, after) = (change.before.as_deref(), change.after.as_deref());
    let matters = match (before, after) {
        (Some(before), Some(after)) => matters_to_owner(before, after),
        _ => true,
    };
    for sandbox in [before, after].into_iter().flatten() {
        let namespace = sandbox.namespace().unwrap_or_default();
        if let Some(claim) = controller_of_kind(sandbox, &SandboxClaim::kind(&()))
            && matters
        {
            context.queues.claims.add((namespace, claim.name.clone()));
        } else if let Some(pool) = controller_of_kind(sandbox, &SandboxWarmPool::kind(&()))
            && matters
        {
            let key = (namespace, pool.name.clone());
            context.queues.pools.add_after(key, POOL_LOOK);
        } else if controller_of(sandbox).is_none() {
            wake_pools_of_orphan(context, sandbox, &namespace);
        }
    }
}

/// Tells the memory of pools what was seen of their members.
fn remember(context: &Context, change: &Change<Sandbox>) {
    let (before, after) = (change.before.as_deref(), change.after.as_deref());
    for sandbox in [before, after].into_iter().flatten() {
        if let Some(pool) = pool_of(sandbox) {
            context.pools.seen(pool, sandbox, after.is_none());
        }
    }
    let (Some(was), Some(after)) = (before.and_then(pool_of), after) else {
        return;
    };
    if pool_of(after) != Some(was) {
        let delay = context.settings.pools.replenish_delay;
        context.pools.left(was, delay);
    }
}

fn wake_pools_of_orphan(context: &Context, sandbox: &Sandbox, namespace: &str) {
    let Some(hash) = sandbox.labels().get(labels::WARM_POOL_SANDBOX) else {
        return;
    };
    let named = context.caches.pools.filtered(|pool| {
        pool.namespace().as_deref() == Some(namespace)
            && torpor_api::name_hash(&pool.name_any()) == *hash
    });
    for pool in named {
        context.queues.pools.add_after(key_of(&*pool), POOL_LOOK);
    }
}

/// Whether a claim or a pool has something to do because of a change of its Sandbox.
fn matters_to_owner(before: &Sandbox, after: &Sandbox) -> bool {
    let seen = |sandbox: &Sandbox| {
        let status = sandbox.status.clone().unwrap_or_default();
        let shown = [
            conditions::READY,
            conditions::FINISHED,
            conditions::POD_SCHEDULED,
        ]
        .map(|type_| {
            find(&status.conditions, type_)
                .map(|c| (c.status.clone(), c.reason.clone(), c.message.clone()))
        });
        let meta = &sandbox.metadata;
        (
            shown,
            status.pod_ips,
            meta.deletion_timestamp.is_some(),
            meta.owner_references.clone(),
            meta.labels.clone(),
            // Without it no claim is Ready.
            sandbox.annotations().get(annotations::POD_NAME).cloned(),
        )
    };
    seen(before) != seen(after)
}

/// Takes note of when a claim was first seen, and asks for a pass.
pub fn claim_changed(context: &Context, change: &Change<SandboxClaim>) {
    match (&change.before, &change.after) {
        (_, Some(claim)) => context.sightings.see(claim, Timestamp::now()),
        (Some(gone), None) => context.sightings.forget(gone),
        (None, None) => {}
    }
    if let Some(claim) = change.after.as_ref().or(change.before.as_ref()) {
        context.queues.claims.add(key_of(&**claim));
    }
}

/// Asks for a pass; a pool that came or changed may be what claims have waited for.
pub fn pool_changed(context: &Context, change: &Change<SandboxWarmPool>) {
    let Some(pool) = change.after.as_ref().or(change.before.as_ref()) else {
        return;
    };
    let key = key_of(&**pool);
    let generation = |pool: &Option<Arc<SandboxWarmPool>>| pool.as_ref()?.metadata.generation;
    if change.after.is_some() && generation(&change.before) != generation(&change.after) {
        wake_unbound_claims(context, &key.0, &key.1);
    }
    if change.after.is_none() {
        context.pools.forget(&pool.uid().unwrap_or_default());
    }
    context.queues.pools.add(key);
}

/// Asks for passes over the template and its pools; one that came or changed may be what claims have waited for.
pub fn template_changed(context: &Context, change: &Change<SandboxTemplate>) {
    let Some(template) = change.after.as_ref().or(change.before.as_ref()) else {
        return;
    };
    let key = key_of(&**template);
    let generation =
        |template: &Option<Arc<SandboxTemplate>>| template.as_ref()?.metadata.generation;
    let other = change.after.is_some() && generation(&change.before) != generation(&change.after);
    if change.after.is_none() {
        context
            .templates
            .forget(&template.uid().unwrap_or_default());
    }
    for template in [&change.before, &change.after].into_iter().flatten() {
        copied_from(context, &key.0, template.spec.pod_template.restore_from());
    }
    for pool in context.caches.pools.indexed(&key.0, &key.1) {
        if other {
            wake_unbound_claims(context, &key.0, &pool.name_any());
        }
        context.queues.pools.add(key_of(&*pool));
    }
    context.queues.templates.add(key);
}

/// Asks for a pass over the template, whether the policy is its own or only has its name, and over the pools and claims that may have waited for it.
pub fn policy_changed(context: &Context, change: &Change<NetworkPolicy>) {
    let mut templates = BTreeSet::new();
    for policy in [&change.before, &change.after].into_iter().flatten() {
        let owner = controller_of_kind(&**policy, &SandboxTemplate::kind(&()));
        templates.extend(owner.map(|owner| owner.name.clone()));
        let named = template_of_policy(policy.metadata.name.as_deref().unwrap_or_default());
        templates.extend(named.map(str::to_owned));
    }
    let Some(policy) = change.after.as_ref().or(change.before.as_ref()) else {
        return;
    };
    let (namespace, name) = key_of(&**policy);
    if name == default_policy::NAME {
        wake_isolated(context, &namespace);
    }
    for template in templates {
        for pool in context.caches.pools.indexed(&namespace, &template) {
            wake_unbound_claims(context, &namespace, &pool.name_any());
            context.queues.pools.add(key_of(&*pool));
        }
        if context
            .caches
            .templates
            .get(&namespace, &template)
            .is_some()
        {
            context.queues.templates.add((namespace.clone(), template));
        }
    }
}

/// Asks for passes over the Sandboxes of a namespace that count on its default policy: one of them brings it back, or has waited for its name to be free.
fn wake_isolated(context: &Context, namespace: &str) {
    let enabled = context.settings.network.default_policy;
    let isolated = context.caches.sandboxes.filtered(|sandbox| {
        sandbox.namespace().as_deref() == Some(namespace)
            && Isolation::of(sandbox, enabled) == Isolation::Strict
    });
    for sandbox in isolated {
        context.queues.sandboxes.add(key_of(&*sandbox));
    }
}

/// A claim that has a Sandbox does not wait for a pool or a template. One whose Sandbox is gone waits for them as a new one does, though its status names what it had.
fn wake_unbound_claims(context: &Context, namespace: &str, pool: &str) {
    for claim in context.caches.claims.indexed(namespace, pool) {
        if !has_sandbox(context, &claim) {
            context.queues.claims.add(key_of(&*claim));
        }
    }
}

/// Whether the Sandbox that a claim's status names is there. The Sandbox itself is looked for: a suspended one has no address either, and the addresses of one that has just gone stay in
/// the status until the pass that finds it gone has written.
fn has_sandbox(context: &Context, claim: &SandboxClaim) -> bool {
    let namespace = claim.namespace().unwrap_or_default();
    let sandboxes = &context.caches.sandboxes;
    let named = committed_name(claim).and_then(|name| sandboxes.get(&namespace, name));
    named.is_some_and(|sandbox| owns(claim, &sandbox))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn sandbox(change: Value) -> Sandbox {
        let mut whole = json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {"name": "s", "namespace": "ns"},
            "spec": {"podTemplate": {"spec": {}}},
            "status": {"podIPs": ["10.0.0.1"]},
        });
        crate::merge_patch::apply(&mut whole, &change);
        serde_json::from_value(whole).unwrap()
    }

    #[rstest]
    #[case::the_name_of_its_pod(json!({"metadata": {"annotations": {"agents.x-k8s.io/pod-name": "s"}}}), true)]
    #[case::another_note(json!({"metadata": {"annotations": {"note": "x"}}}), false)]
    #[case::a_label(json!({"metadata": {"labels": {"a": "b"}}}), true)]
    #[case::an_address(json!({"status": {"podIPs": ["10.0.0.2"]}}), true)]
    #[case::a_node(json!({"status": {"nodeName": "n"}}), false)]
    fn an_owner_is_woken_by_what_it_looks_at(#[case] change: Value, #[case] woken: bool) {
        let (before, after) = (sandbox(json!({})), sandbox(change));
        assert_eq!(matters_to_owner(&before, &after), woken);
        assert_eq!(matters_to_owner(&after, &before), woken, "or by its end");
    }
}
