//! Refreshes the caches of a controller, as its watches would, when a test asks for it.

use std::fmt::Debug;

use kube::{Resource, runtime::watcher::Event};
use serde::de::DeserializeOwned;
use serde_json::Value;
use torpor_controller::{
    cache::{Cache, Change},
    context::Context,
    watches::{self, Caches, extensions},
};

use crate::apiserver::Apiserver;

/// Refreshes every cache.
pub(crate) fn all(api: &Apiserver, context: &Context) {
    let Caches {
        sandboxes: _,
        pods,
        staged,
        volume_claims,
        services,
        snapshots,
        nodes,
        runtime_classes,
        snapshot_classes,
        claims,
        pools,
        templates,
        policies,
        triggers,
        pod_snapshots,
    } = &context.caches;
    sandboxes(api, context);
    let hashed = |object: &Value| {
        object["metadata"]["labels"]
            .get("agents.x-k8s.io/sandbox-name-hash")
            .is_some()
    };
    fill_trimmed(api, pods, "pods", hashed, watches::trim_pod);
    let is_staged = |object: &Value| {
        let labels = &object["metadata"]["labels"];
        labels.get("torpor.dev/staged-images").is_some()
    };
    fill_trimmed(api, staged, "pods", is_staged, watches::trim_staged);
    fill(api, volume_claims, "persistentvolumeclaims", hashed);
    fill(api, services, "services", |_| true);
    fill(api, snapshots, "sandboxsnapshots", |_| true);
    fill_trimmed(api, nodes, "sandboxnodes", |_| true, watches::trim_node);
    fill(api, runtime_classes, "runtimeclasses", |_| true);
    fill(api, snapshot_classes, "snapshotclasses", |_| true);
    fill(api, pools, "sandboxwarmpools", |_| true);
    fill(api, templates, "sandboxtemplates", |_| true);
    for change in fill(api, policies, "networkpolicies", |_| true) {
        extensions::policy_changed(context, &change);
    }
    fill(api, triggers, "podsnapshotmanualtriggers", |_| true);
    fill(api, pod_snapshots, "podsnapshots", |_| true);
    for change in fill(api, claims, "sandboxclaims", |_| true) {
        extensions::claim_changed(context, &change);
    }
}

/// Refreshes only the cache of Sandboxes.
pub(crate) fn sandboxes(api: &Apiserver, context: &Context) {
    for change in fill(api, &context.caches.sandboxes, "sandboxes", |_| true) {
        watches::sandbox_changed(context, &change);
    }
}

fn fill<K>(
    api: &Apiserver,
    cache: &Cache<K>,
    kind: &str,
    shown: impl Fn(&Value) -> bool,
) -> Vec<Change<K>>
where
    K: Resource + DeserializeOwned + Debug,
{
    fill_trimmed(api, cache, kind, shown, |_| {})
}

/// Refreshes a cache with the part of each object that the watch keeps.
fn fill_trimmed<K>(
    api: &Apiserver,
    cache: &Cache<K>,
    kind: &str,
    shown: impl Fn(&Value) -> bool,
    trim: fn(&mut K),
) -> Vec<Change<K>>
where
    K: Resource + DeserializeOwned + Debug,
{
    cache.apply(Event::Init);
    for object in api.list(kind).into_iter().filter(|object| shown(object)) {
        // The watch skips objects that cannot be deserialized, too.
        if let Ok(mut object) = serde_json::from_value(object) {
            trim(&mut object);
            cache.apply(Event::InitApply(object));
        }
    }
    cache.apply(Event::InitDone)
}
