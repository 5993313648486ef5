//! Watches of GKE's kinds, where they are served: see [`crate::pod_snapshot`].

use std::{fmt::Debug, pin::pin, sync::Arc, time::Duration};

use futures::{StreamExt, future::join_all};
use kube::{
    Api, Resource,
    api::ListParams,
    core::{DeserializeGuard, NamespaceResourceScope},
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;
use torpor_api::{PodSnapshot, PodSnapshotManualTrigger, SandboxSnapshot};

use super::{WatchSource, in_pages, trim, unguarded};
use crate::{
    cache::{Change, Key, key_of},
    context::Context,
    scope::{Scope, ScopedEvent},
};

/// Interval of the checks whether the kinds are served, for each watched namespace. Each check is
/// one small request, and the checks of one kind are at least this far apart.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Number of refused lists after which the apiserver counts as one without the kinds: half a
/// minute.
const MAX_REFUSALS: u32 = 6;

/// Starts the watches.
pub(super) fn start(context: &Arc<Context>, tasks: &mut JoinSet<()>) {
    let source = WatchSource::of(context);
    let shared = Arc::clone(context);
    tasks.spawn(follow_parts_if_served(
        source.clone(),
        move |event: ScopedEvent<PodSnapshotManualTrigger>| {
            for change in shared.caches.triggers.apply_seen(event) {
                shared.queues.triggers.add(key_of_change(&change));
            }
        },
    ));
    let shared = Arc::clone(context);
    tasks.spawn(follow_parts_if_served(
        source,
        move |event: ScopedEvent<PodSnapshot>| {
            for change in shared.caches.pod_snapshots.apply_seen(event) {
                let key = key_of_change(&change);
                shared.queues.triggers.add(key.clone());
                shared.queues.pod_snapshots.add(key);
            }
        },
    ));
}

/// Queues the objects with the name of a changed SandboxSnapshot.
pub(super) fn image_changed(context: &Context, image: &SandboxSnapshot) {
    let key = key_of(image);
    let (namespace, name) = &key;
    if context.caches.triggers.get(namespace, name).is_some() {
        context.queues.triggers.add(key.clone());
    }
    if context.caches.pod_snapshots.get(namespace, name).is_some() {
        context.queues.pod_snapshots.add(key);
    }
}

fn key_of_change<K: Resource>(change: &Change<K>) -> Key {
    let object = change.after.as_ref().or(change.before.as_ref());
    object.map(|object| key_of(&**object)).unwrap_or_default()
}

/// Runs the watches of a kind that may be missing or forbidden.
async fn follow_parts_if_served<K>(
    source: WatchSource,
    take: impl FnMut(ScopedEvent<K>) + Clone + Send + 'static,
) where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + 'static,
{
    let parts = source.parts().into_iter();
    join_all(parts.map(|(scope, api)| follow_if_served(api, scope, take.clone()))).await;
}

/// Runs one watch of a kind that may be missing or forbidden: this is checked again and is no
/// fault.
async fn follow_if_served<K>(
    all: Api<DeserializeGuard<K>>,
    scope: Scope,
    mut seen: impl FnMut(ScopedEvent<K>) + Send + 'static,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let parts = scope.parts;
    let mut take = move |event: Event<K>| {
        let (scope, event) = (scope.clone(), event.modify(trim));
        seen(ScopedEvent { scope, event });
    };
    let one = ListParams::default().limit(1);
    let (mut refused, mut is_known) = (0, false);
    loop {
        // A watcher logs a warning for each refusal by itself, so that the list comes first.
        match all.list(&one).await {
            Ok(_) => {
                follow_while_served(&all, &mut take).await;
                is_known = true;
            }
            Err(error) if is_not_served(&error) => {
                tracing::debug!(kind = %K::kind(&()), %error, "the kind is not served");
                report_empty(&mut take);
                is_known = true;
            }
            Err(error) => {
                tracing::warn!(kind = %K::kind(&()), %error, "cannot list the kind");
                // Other kinds must not wait for ever for one that may be foreign and out of order.
                if matches!(error, kube::Error::Api(_)) {
                    refused += 1;
                }
                if refused == MAX_REFUSALS {
                    report_empty(&mut take);
                    is_known = true;
                }
            }
        }
        tokio::time::sleep(next_check(parts, is_known)).await;
    }
}

/// Returns the delay until the next check of a part of a kind with `parts` in all. A part without a
/// known state is checked sooner, because other work may wait for it.
fn next_check(parts: usize, is_known: bool) -> Duration {
    match u32::try_from(parts) {
        Ok(parts) if is_known => CHECK_INTERVAL.saturating_mul(parts),
        _ => CHECK_INTERVAL,
    }
}

async fn follow_while_served<K>(
    all: &Api<DeserializeGuard<K>>,
    take: &mut (impl FnMut(Event<K>) + Send),
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut events = pin!(watcher(all.clone(), in_pages()).default_backoff());
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                if let Some(event) = unguarded(event) {
                    take(event);
                }
            }
            Err(
                watcher::Error::InitialListFailed(error) | watcher::Error::WatchStartFailed(error),
            ) if is_not_served(&error) => {
                report_empty(take);
                return;
            }
            Err(error) => tracing::warn!(kind = %K::kind(&()), %error, "watch interrupted"),
        }
    }
}

/// Records an empty list of the kind.
fn report_empty<K>(take: &mut impl FnMut(Event<K>)) {
    take(Event::Init);
    take(Event::InitDone);
}

/// Reports whether the kind is not defined, or the controller has no role for it.
fn is_not_served(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.is_not_found() || status.is_forbidden())
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::of_the_cluster(1, true, 1)]
    #[case::of_namespaces(100, true, 100)]
    #[case::not_known_yet(100, false, 1)]
    fn checks_of_a_missing_kind_do_not_grow_with_the_namespaces(
        #[case] parts: usize,
        #[case] is_known: bool,
        #[case] checks: u32,
    ) {
        assert_eq!(next_check(parts, is_known), CHECK_INTERVAL * checks);
    }

    #[rstest]
    #[case::not_defined(404, "NotFound", true)]
    #[case::no_role(403, "Forbidden", true)]
    #[case::out_of_order(500, "InternalError", false)]
    fn an_undefined_or_forbidden_kind_is_no_fault(
        #[case] code: u16,
        #[case] reason: &str,
        #[case] absent: bool,
    ) {
        let status = Status::failure("", reason).with_code(code).boxed();
        assert_eq!(is_not_served(&kube::Error::Api(status)), absent);
    }
}
