//! Watches of one kind: one for each of its parts, read page by page.

use std::{fmt::Debug, pin::pin, time::Duration};

use futures::{StreamExt, future::join_all};
use kube::{
    Api, Client, Resource,
    api::ListParams,
    core::{DeserializeGuard, NamespaceResourceScope, error_boundary::InvalidObject},
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;

use crate::{
    calls::is_forbidden,
    context::Context,
    scope::{Namespaces, Scope, ScopedEvent},
};

/// Number of objects in a page of a list. Tenants create most of them; each may exceed a megabyte,
/// and takes several times as much to deserialize.
const PAGE: u32 = 50;
/// Page size for kinds whose objects are read whole and may be large.
const PAGE_OF_LARGE: u32 = 10;

/// Interval of the checks whether a cluster-scoped kind has become readable. Each check is one
/// small request.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Returns the configuration of a watch that lists in pages of [`PAGE`].
pub(super) fn in_pages() -> watcher::Config {
    watcher::Config::default().page_size(PAGE)
}

/// Returns the configuration of a watch that lists in pages of [`PAGE_OF_LARGE`].
pub(super) fn in_small_pages() -> watcher::Config {
    watcher::Config::default().page_size(PAGE_OF_LARGE)
}

/// Client and namespaces for the watches.
#[derive(Clone)]
pub(super) struct WatchSource {
    client: Client,
    namespaces: Namespaces,
}

impl WatchSource {
    pub(super) fn of(context: &Context) -> Self {
        Self {
            client: context.api.client(),
            namespaces: context.settings.namespaces.clone(),
        }
    }

    /// Returns the parts of a namespaced kind that are watched.
    pub(super) fn parts<K>(&self) -> Vec<(Scope, Api<K>)>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        let api = |scope: Scope| {
            let client = self.client.clone();
            let api = match scope.namespace.as_deref() {
                Some(namespace) => Api::namespaced(client, namespace),
                None => Api::all(client),
            };
            (scope, api)
        };
        self.namespaces.scopes().into_iter().map(api).collect()
    }
}

/// Runs the watches of a kind for ever and passes each event on. Faults of a watch are retried with
/// a growing delay.
pub(super) async fn follow<K>(
    source: WatchSource,
    config: watcher::Config,
    trim: fn(&mut K),
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
    join_all(parts.map(|(scope, api)| follow_part(api, scope, config.clone(), trim, take.clone())))
        .await;
}

/// Runs one watch of a kind.
async fn follow_part<K>(
    api: Api<K>,
    scope: Scope,
    config: watcher::Config,
    trim: fn(&mut K),
    mut take: impl FnMut(ScopedEvent<K>) + Send + 'static,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut events = pin!(watcher(api, config).default_backoff());
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => take(ScopedEvent {
                scope: scope.clone(),
                event: event.modify(trim),
            }),
            Err(error) => tracing::warn!(kind = %K::kind(&()), %error, "watch interrupted"),
        }
    }
}

/// Runs the watches of a kind that is validated only by a schema.
///
/// An object that the schema accepts and this crate's type does not (for example a time with 13
/// decimals) is left out and affects no other.
pub(super) async fn follow_guarded<K>(
    source: WatchSource,
    config: watcher::Config,
    trim: fn(&mut K),
    take: impl FnMut(ScopedEvent<K>) + Clone + Send + 'static,
) where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + 'static,
{
    follow::<DeserializeGuard<K>>(source, config, |_| {}, guarded(trim, take)).await;
}

/// Runs the watch of a cluster-scoped kind.
///
/// A controller confined to namespaces may lack the permission to read it, and then works without
/// any object of the kind until it has the permission.
///
/// Listed objects stay in the cache whatever the apiserver answers later: a node that cannot be
/// read counts as before, and the memory of its Sandboxes is kept.
pub(super) async fn follow_of_cluster<K>(
    source: WatchSource,
    trim: fn(&mut K),
    take: impl FnMut(ScopedEvent<K>) + Clone + Send + 'static,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let api = Api::all(source.client);
    let mut take = guarded(trim, take);
    if !source.namespaces.is_cluster() {
        wait_for_right(&api, &mut take).await;
    }
    follow_part(api, Scope::default(), in_pages(), |_| {}, take).await;
}

/// Waits for the permission to list a cluster-scoped kind. Until then the kind counts as empty.
async fn wait_for_right<K>(
    api: &Api<DeserializeGuard<K>>,
    take: &mut (impl FnMut(ScopedEvent<DeserializeGuard<K>>) + Send),
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let one = ListParams::default().limit(1);
    while let Err(error) = api.list(&one).await {
        if is_forbidden(&error) {
            tracing::debug!(kind = %K::kind(&()), %error, "no permission to list the kind");
            for event in [Event::Init, Event::InitDone] {
                let scope = Scope::default();
                take(ScopedEvent { scope, event });
            }
        } else {
            // Such an error proves nothing about the objects.
            tracing::warn!(kind = %K::kind(&()), %error, "cannot list the kind");
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

/// Passes on the events with readable objects.
fn guarded<K: Resource<DynamicType = ()>>(
    trim: fn(&mut K),
    mut take: impl FnMut(ScopedEvent<K>) + Clone,
) -> impl FnMut(ScopedEvent<DeserializeGuard<K>>) + Clone {
    move |ScopedEvent { scope, event }| {
        if let Some(event) = unguarded(event) {
            let event = event.modify(trim);
            take(ScopedEvent { scope, event });
        }
    }
}

/// Returns the event, unless its object cannot be deserialized.
pub(super) fn unguarded<K: Resource<DynamicType = ()>>(
    event: Event<DeserializeGuard<K>>,
) -> Option<Event<K>> {
    let readable = |object: DeserializeGuard<K>| match object.0 {
        Ok(object) => Some(object),
        Err(InvalidObject { error, metadata }) => {
            let (namespace, name) = (metadata.namespace, metadata.name);
            tracing::warn!(kind = %K::kind(&()), namespace, name, error, "object ignored: it cannot be deserialized");
            None
        }
    };
    Some(match event {
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
        Event::InitApply(object) => Event::InitApply(readable(object)?),
        Event::Apply(object) => Event::Apply(readable(object)?),
        Event::Delete(object) => Event::Delete(readable(object)?),
    })
}
