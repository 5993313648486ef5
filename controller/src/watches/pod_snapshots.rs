//! The watches of GKE's kinds, where they are served: see [`crate::pod_snapshot`].

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

use super::{Place, in_pages, trim, unguarded};
use crate::{
    cache::{Change, Key, key_of},
    context::Context,
    scope::{Scope, Seen},
};

/// How soon it is noticed that the kinds are served from now on, for each namespace that is
/// watched. Each look is one small request, and those of a kind are never more than one in this
/// time.
const LOOK: Duration = Duration::from_secs(5);

/// How often in all an apiserver may refuse a list before it is taken for one without the kinds: half a minute.
const PATIENCE: u32 = 6;

/// Starts the watches.
pub(super) fn start(context: &Arc<Context>, tasks: &mut JoinSet<()>) {
    let place = Place::of(context);
    let known = Arc::clone(context);
    tasks.spawn(follow_parts_if_served(
        place.clone(),
        move |event: Seen<PodSnapshotManualTrigger>| {
            for change in known.caches.triggers.apply_seen(event) {
                known.queues.triggers.add(key_of_change(&change));
            }
        },
    ));
    let known = Arc::clone(context);
    tasks.spawn(follow_parts_if_served(
        place,
        move |event: Seen<PodSnapshot>| {
            for change in known.caches.pod_snapshots.apply_seen(event) {
                let key = key_of_change(&change);
                known.queues.triggers.add(key.clone());
                known.queues.pod_snapshots.add(key);
            }
        },
    ));
}

/// What a change of a SandboxSnapshot means here: what has its name is looked at.
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

/// As [`super::follow_guarded`], of a kind that need not be there, or not be ours.
async fn follow_parts_if_served<K>(place: Place, take: impl FnMut(Seen<K>) + Clone + Send + 'static)
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + 'static,
{
    let parts = place.parts().into_iter();
    join_all(parts.map(|(scope, api)| follow_if_served(api, scope, take.clone()))).await;
}

/// One watch of a kind that need not be there, or not be ours: that is looked at again, and is no
/// fault.
async fn follow_if_served<K>(
    all: Api<DeserializeGuard<K>>,
    scope: Scope,
    mut seen: impl FnMut(Seen<K>) + Send + 'static,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let parts = scope.parts;
    let mut take = move |event: Event<K>| {
        let (scope, event) = (scope.clone(), event.modify(trim));
        seen(Seen { scope, event });
    };
    let one = ListParams::default().limit(1);
    let (mut refused, mut is_known) = (0, false);
    loop {
        // A watcher warns of each refusal by itself.
        match all.list(&one).await {
            Ok(_) => {
                follow_while_served(&all, &mut take).await;
                is_known = true;
            }
            Err(error) if is_not_served(&error) => {
                tracing::debug!(kind = %K::kind(&()), %error, "not served here");
                there_is_none(&mut take);
                is_known = true;
            }
            Err(error) => {
                tracing::warn!(kind = %K::kind(&()), %error, "cannot be listed");
                // All else that is served need not wait for ever for a kind that may be somebody
                // else's and does not work.
                if matches!(error, kube::Error::Api(_)) {
                    refused += 1;
                }
                if refused == PATIENCE {
                    there_is_none(&mut take);
                    is_known = true;
                }
            }
        }
        tokio::time::sleep(next_look(parts, is_known)).await;
    }
}

/// When a part of a kind is looked at again that has `parts` in all. What is not known yet may be
/// waited for.
fn next_look(parts: usize, is_known: bool) -> Duration {
    match u32::try_from(parts) {
        Ok(parts) if is_known => LOOK.saturating_mul(parts),
        _ => LOOK,
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
                there_is_none(take);
                return;
            }
            Err(error) => tracing::warn!(kind = %K::kind(&()), %error, "watch interrupted"),
        }
    }
}

/// Known as well as if they had been listed.
fn there_is_none<K>(take: &mut impl FnMut(Event<K>)) {
    take(Event::Init);
    take(Event::InitDone);
}

/// Whether the kind is not defined, or the controller has no role for it.
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
    fn looks_at_a_kind_that_is_not_served_are_as_frequent_however_many_namespaces_there_are(
        #[case] parts: usize,
        #[case] is_known: bool,
        #[case] looks: u32,
    ) {
        assert_eq!(next_look(parts, is_known), LOOK * looks);
    }

    #[rstest]
    #[case::not_defined(404, "NotFound", true)]
    #[case::no_role(403, "Forbidden", true)]
    #[case::out_of_order(500, "InternalError", false)]
    fn a_kind_that_is_not_defined_or_not_ours_is_no_fault(
        #[case] code: u16,
        #[case] reason: &str,
        #[case] absent: bool,
    ) {
        let status = Status::failure("", reason).with_code(code).boxed();
        assert_eq!(is_not_served(&kube::Error::Api(status)), absent);
    }
}
