//! Watches of SandboxClaim, SandboxTemplate, SandboxWarmPool and NetworkPolicy, and the effects of
//! a change of a Sandbox on its claim or its pool.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

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

use super::{
    WatchSource, copied_from, follow, follow_guarded, in_pages, in_small_pages, trim, trim_staged,
};
use crate::{
    cache::{Change, key_of},
    candidates::pool_of,
    claim::{
        binding::{committed_name, owns},
        wake,
    },
    context::Context,
    golden,
    network::default_policy::{self, Isolation},
    staging,
    template::plan::template_of_policy,
};

/// Delay before the pass over a pool after a change of a member. A pass walks over all members;
/// while many change, one pass serves them all.
const POOL_DELAY: Duration = Duration::from_millis(100);

/// Starts the watches.
pub(super) fn start(context: &Arc<Context>, tasks: &mut JoinSet<()>) {
    let source = WatchSource::of(context);
    let shared = Arc::clone(context);
    tasks.spawn(follow_guarded(
        source.clone(),
        in_small_pages(),
        trim,
        move |event| {
            for change in shared.caches.claims.apply_seen(event) {
                claim_changed(&shared, &change);
            }
        },
    ));
    let shared = Arc::clone(context);
    tasks.spawn(follow_guarded(
        source.clone(),
        in_pages(),
        trim,
        move |event| {
            for change in shared.caches.pools.apply_seen(event) {
                pool_changed(&shared, &change);
            }
        },
    ));
    let shared = Arc::clone(context);
    let staged = in_pages().labels(labels::STAGED_IMAGES);
    tasks.spawn(follow(source.clone(), staged, trim_staged, move |event| {
        for change in shared.caches.staged.apply_seen(event) {
            staging::pod_changed(&shared, &change);
        }
    }));
    let shared = Arc::clone(context);
    tasks.spawn(follow_guarded(
        source,
        in_small_pages(),
        trim,
        move |event| {
            for change in shared.caches.templates.apply_seen(event) {
                template_changed(&shared, &change);
            }
        },
    ));
}

/// Starts the watch of NetworkPolicies.
pub(super) fn start_policies(context: &Arc<Context>, tasks: &mut JoinSet<()>) {
    let (source, shared) = (WatchSource::of(context), Arc::clone(context));
    tasks.spawn(follow(source, in_small_pages(), trim, move |event| {
        for change in shared.caches.policies.apply_seen(event) {
            policy_changed(&shared, &change);
        }
    }));
}

/// Returns the controller of an object.
pub fn controller_of<K: Resource>(object: &K) -> Option<&OwnerReference> {
    let owners = object.meta().owner_references.iter().flatten();
    owners
        .into_iter()
        .find(|owner| owner.controller == Some(true))
}

/// Returns the controller if it is of this kind in the extensions' group, in any version.
pub fn controller_of_kind<'a, K: Resource>(
    object: &'a K,
    kind: &str,
) -> Option<&'a OwnerReference> {
    controller_of(object).filter(|owner| {
        let group = owner.api_version.split_once('/').map(|(group, _)| group);
        owner.kind == kind && group == Some(GROUP)
    })
}

/// Returns the pool that a Sandbox is a member of.
pub fn pool_of_member(context: &Context, sandbox: &Sandbox) -> Option<Arc<SandboxWarmPool>> {
    let owner = controller_of_kind(sandbox, &SandboxWarmPool::kind(&()))?;
    let namespace = sandbox.namespace().unwrap_or_default();
    context.caches.pools.get(&namespace, &owner.name)
}

/// Returns the index value of a Sandbox: the UID of its controller, or without one the pool that
/// its label names.
pub fn sandbox_index(sandbox: &Sandbox) -> Option<String> {
    match controller_of(sandbox) {
        Some(owner) => Some(owner.uid.clone()),
        None => {
            let hash = sandbox.labels().get(labels::WARM_POOL_SANDBOX)?;
            Some(orphan_index(hash))
        }
    }
}

/// Returns the index value of the Sandboxes without a controller whose label names the pool with
/// this hash.
pub fn orphan_index(pool_hash: &str) -> String {
    format!("orphan {pool_hash}")
}

/// Updates the members that claims may take, and queues the claim or the pool.
pub(super) fn sandbox_changed(context: &Context, change: &Change<Sandbox>) {
    context.candidates.update(change);
    remember(context, change);
    let (before, after) = (change.before.as_deref(), change.after.as_deref());
    let matters = match (before, after) {
        (Some(before), Some(after)) => {
            resume_pool(context, before, after);
            matters_to_owner(before, after)
        }
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
            context.queues.pools.add_after(key, POOL_DELAY);
        } else if controller_of(sandbox).is_none() {
            queue_pools_of_orphan(context, sandbox, &namespace);
        }
    }
    if let Some(sandbox) = after.or(before) {
        golden::changed(context, sandbox);
    }
    let node = |sandbox: Option<&Sandbox>| Some(sandbox?.status.as_ref()?.node_name.clone());
    if let Some(member) = after.filter(|member| pool_of(member).is_some())
        && node(before) != node(after)
    {
        golden::member_placed(context, member);
    }
}

/// Updates the memory of pools with a change of a member.
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
        if before.is_some_and(wake::is_asleep) {
            let uid = after.uid().unwrap_or_default();
            context.pools.wakes(was, uid, Instant::now());
        }
    }
}

/// Ends the pause of the pool that waited until this Sandbox of a claim runs.
fn resume_pool(context: &Context, before: &Sandbox, after: &Sandbox) {
    if !wake::is_asleep(before) || wake::is_asleep(after) || pool_of(after).is_some() {
        return;
    }
    let waited = context.pools.woke(&after.uid().unwrap_or_default());
    if waited.is_some() {
        for pool in context.caches.pools.filtered(|pool| pool.uid() == waited) {
            context.queues.pools.add(key_of(&*pool));
        }
    }
}

fn queue_pools_of_orphan(context: &Context, sandbox: &Sandbox, namespace: &str) {
    let Some(hash) = sandbox.labels().get(labels::WARM_POOL_SANDBOX) else {
        return;
    };
    let named = context.caches.pools.filtered(|pool| {
        pool.namespace().as_deref() == Some(namespace)
            && torpor_api::name_hash(&pool.name_any()) == *hash
    });
    for pool in named {
        context.queues.pools.add_after(key_of(&*pool), POOL_DELAY);
    }
}

/// Reports whether a change of its Sandbox affects a claim or a pool.
fn matters_to_owner(before: &Sandbox, after: &Sandbox) -> bool {
    let seen = |sandbox: &Sandbox| {
        let status = sandbox.status.clone().unwrap_or_default();
        let shown = [
            conditions::READY,
            conditions::FINISHED,
            conditions::POD_SCHEDULED,
            conditions::BOUND,
        ]
        .map(|type_| {
            find(&status.conditions, type_)
                .map(|c| (c.status.clone(), c.reason.clone(), c.message.clone()))
        });
        // Claims wait for a member that wakes; the messages change for other reasons.
        let woke = [conditions::HIBERNATED, conditions::RESTORED]
            .map(|type_| {
                find(&status.conditions, type_).map(|c| (c.status.clone(), c.reason.clone()))
            })
            .into_iter()
            .filter(|_| pool_of(sandbox).is_none());
        let woke: Vec<_> = woke.collect();
        let meta = &sandbox.metadata;
        (
            shown,
            woke,
            status.pod_ips,
            meta.deletion_timestamp.is_some(),
            meta.owner_references.clone(),
            meta.labels.clone(),
            // A claim is not Ready without it.
            sandbox.annotations().get(annotations::POD_NAME).cloned(),
        )
    };
    seen(before) != seen(after)
}

/// Records the first sight of a claim, and queues it.
pub fn claim_changed(context: &Context, change: &Change<SandboxClaim>) {
    match (&change.before, &change.after) {
        (_, Some(claim)) => context.claims.see(claim, Timestamp::now()),
        (Some(gone), None) => context.claims.forget(gone),
        (None, None) => {}
    }
    if let Some(claim) = change.after.as_ref().or(change.before.as_ref()) {
        context.queues.claims.add(key_of(&**claim));
    }
}

/// Queues a pool, and after its creation or change the claims that may wait for it.
pub fn pool_changed(context: &Context, change: &Change<SandboxWarmPool>) {
    let Some(pool) = change.after.as_ref().or(change.before.as_ref()) else {
        return;
    };
    let key = key_of(&**pool);
    let generation = |pool: &Option<Arc<SandboxWarmPool>>| pool.as_ref()?.metadata.generation;
    if change.after.is_some() && generation(&change.before) != generation(&change.after) {
        queue_unbound_claims(context, &key.0, &key.1);
    }
    staging::pool_changed(context, change);
    if change.after.is_none() {
        context.pools.forget(&pool.uid().unwrap_or_default());
    }
    context.queues.pools.add(key);
}

/// Queues a template and its pools, and after its creation or change the claims that may wait for
/// it.
pub fn template_changed(context: &Context, change: &Change<SandboxTemplate>) {
    let Some(template) = change.after.as_ref().or(change.before.as_ref()) else {
        return;
    };
    let key = key_of(&**template);
    let generation =
        |template: &Option<Arc<SandboxTemplate>>| template.as_ref()?.metadata.generation;
    let other = change.after.is_some() && generation(&change.before) != generation(&change.after);
    if change.after.is_none() {
        let uid = template.uid().unwrap_or_default();
        context.templates.forget(&uid);
        context.templates.forget(&golden::memory_key(&uid));
        context.templates.forget(&staging::memory_key(&uid));
    }
    for template in [&change.before, &change.after].into_iter().flatten() {
        copied_from(context, &key.0, template.spec.pod_template.restore_from());
    }
    for pool in context.caches.pools.indexed(&key.0, &key.1) {
        if other {
            queue_unbound_claims(context, &key.0, &pool.name_any());
        }
        context.queues.pools.add(key_of(&*pool));
    }
    context.queues.templates.add(key);
}

/// Queues the template that controls the policy or whose policy would have its name, and the pools
/// and claims that may wait for it.
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
        queue_isolated(context, &namespace);
    }
    for template in templates {
        for pool in context.caches.pools.indexed(&namespace, &template) {
            queue_unbound_claims(context, &namespace, &pool.name_any());
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

/// Queues the Sandboxes of a namespace that need its default policy: their passes restore the
/// policy, or wait for its name to be free.
fn queue_isolated(context: &Context, namespace: &str) {
    let enabled = context.settings.network.default_policy;
    let isolated = context.caches.sandboxes.filtered(|sandbox| {
        sandbox.namespace().as_deref() == Some(namespace)
            && Isolation::of(sandbox, enabled) == Isolation::Strict
    });
    for sandbox in isolated {
        context.queues.sandboxes.add(key_of(&*sandbox));
    }
}

/// Queues the claims of a pool that have no Sandbox. A claim whose Sandbox is gone waits as a new
/// one does, though its status still has the name.
fn queue_unbound_claims(context: &Context, namespace: &str, pool: &str) {
    for claim in context.caches.claims.indexed(namespace, pool) {
        if !has_sandbox(context, &claim) {
            context.queues.claims.add(key_of(&*claim));
        }
    }
}

/// Reports whether the Sandbox in a claim's status exists.
///
/// The Sandbox itself is looked up: a suspended Sandbox has no address either, and the addresses of
/// a deleted one stay in the status until the next pass has written it.
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
    #[case::another_annotation(json!({"metadata": {"annotations": {"note": "x"}}}), false)]
    #[case::a_label(json!({"metadata": {"labels": {"a": "b"}}}), true)]
    #[case::an_address(json!({"status": {"podIPs": ["10.0.0.2"]}}), true)]
    #[case::a_node(json!({"status": {"nodeName": "n"}}), false)]
    fn an_owner_is_queued_by_changes_that_it_reads(#[case] change: Value, #[case] queued: bool) {
        let (before, after) = (sandbox(json!({})), sandbox(change));
        assert_eq!(matters_to_owner(&before, &after), queued);
        assert_eq!(
            matters_to_owner(&after, &before),
            queued,
            "the reverse change"
        );
    }
}
