//! Watches of one kind: a watch for each part of it, read page by page, each event handed on.

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
    scope::{Namespaces, Scope, Seen},
};

/// How many objects are read at once. Tenants make most of them, and each may have more than a
/// megabyte, of which reading makes many.
const PAGE: u32 = 50;
/// The same, of kinds whose objects are read whole and may be large.
const PAGE_OF_LARGE: u32 = 10;

/// How soon it is noticed that a kind of the cluster may be read from now on. Each look is one
/// small request.
const LOOK: Duration = Duration::from_secs(5);

/// A list is read page by page: see [`PAGE`].
pub(super) fn in_pages() -> watcher::Config {
    watcher::Config::default().page_size(PAGE)
}

/// As [`in_pages`]: see [`PAGE_OF_LARGE`].
pub(super) fn in_small_pages() -> watcher::Config {
    watcher::Config::default().page_size(PAGE_OF_LARGE)
}

/// Client and namespaces by which kinds are watched.
#[derive(Clone)]
pub(super) struct Place {
    client: Client,
    namespaces: Namespaces,
}

impl Place {
    pub(super) fn of(context: &Context) -> Self {
        Self {
            client: context.api.client(),
            namespaces: context.settings.namespaces.clone(),
        }
    }

    /// A kind that lives in namespaces, by the parts that are watched.
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

/// Reads the watches of a kind for ever and hands each event on. Faults of a watch are retried with
/// a growing delay.
pub(super) async fn follow<K>(
    place: Place,
    config: watcher::Config,
    trim: fn(&mut K),
    take: impl FnMut(Seen<K>) + Clone + Send + 'static,
) where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + 'static,
{
    let parts = place.parts().into_iter();
    join_all(parts.map(|(scope, api)| follow_part(api, scope, config.clone(), trim, take.clone())))
        .await;
}

/// One watch of a kind.
async fn follow_part<K>(
    api: Api<K>,
    scope: Scope,
    config: watcher::Config,
    trim: fn(&mut K),
    mut take: impl FnMut(Seen<K>) + Send + 'static,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut events = pin!(watcher(api, config).default_backoff());
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => take(Seen {
                scope: scope.clone(),
                event: event.modify(trim),
            }),
            Err(error) => tracing::warn!(kind = %K::kind(&()), %error, "watch interrupted"),
        }
    }
}

/// As [`follow`], for kinds that are checked only by a schema: an object that the schema lets
/// through and our type does not is left out, and stops nothing else. (A time with 13 decimals is
/// one.)
pub(super) async fn follow_guarded<K>(
    place: Place,
    config: watcher::Config,
    trim: fn(&mut K),
    take: impl FnMut(Seen<K>) + Clone + Send + 'static,
) where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Debug
        + Send
        + 'static,
{
    follow::<DeserializeGuard<K>>(place, config, |_| {}, guarded(trim, take)).await;
}

/// As [`follow_guarded`], for kinds of the cluster. A controller that is confined to namespaces may
/// have no right to read them: it works without any until it has.
///
/// What was listed stays known, whatever the apiserver answers later: a node that cannot be seen is
/// there as before, and the memory of its Sandboxes is kept.
pub(super) async fn follow_of_cluster<K>(
    place: Place,
    trim: fn(&mut K),
    take: impl FnMut(Seen<K>) + Clone + Send + 'static,
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let api = Api::all(place.client);
    let mut take = guarded(trim, take);
    if !place.namespaces.is_cluster() {
        wait_for_right(&api, &mut take).await;
    }
    follow_part(api, Scope::default(), in_pages(), |_| {}, take).await;
}

/// Waits until a kind of the cluster may be listed. Where that is forbidden there is none of it.
async fn wait_for_right<K>(
    api: &Api<DeserializeGuard<K>>,
    take: &mut (impl FnMut(Seen<DeserializeGuard<K>>) + Send),
) where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let one = ListParams::default().limit(1);
    while let Err(error) = api.list(&one).await {
        if is_forbidden(&error) {
            tracing::debug!(kind = %K::kind(&()), %error, "not ours to read");
            for event in [Event::Init, Event::InitDone] {
                let scope = Scope::default();
                take(Seen { scope, event });
            }
        } else {
            // It says nothing about what there is.
            tracing::warn!(kind = %K::kind(&()), %error, "cannot be listed");
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Hands on what can be read.
fn guarded<K: Resource<DynamicType = ()>>(
    trim: fn(&mut K),
    mut take: impl FnMut(Seen<K>) + Clone,
) -> impl FnMut(Seen<DeserializeGuard<K>>) + Clone {
    move |Seen { scope, event }| {
        if let Some(event) = unguarded(event) {
            let event = event.modify(trim);
            take(Seen { scope, event });
        }
    }
}

/// The event, unless its object cannot be read.
pub(super) fn unguarded<K: Resource<DynamicType = ()>>(
    event: Event<DeserializeGuard<K>>,
) -> Option<Event<K>> {
    let readable = |object: DeserializeGuard<K>| match object.0 {
        Ok(object) => Some(object),
        Err(InvalidObject { error, metadata }) => {
            let (namespace, name) = (metadata.namespace, metadata.name);
            tracing::warn!(kind = %K::kind(&()), namespace, name, error, "left out: cannot be read");
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
