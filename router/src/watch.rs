//! Keeps the [`Directory`] up to date.

use std::{fmt::Debug, future::Future, pin::pin};

use futures::StreamExt;
use kube::{
    Api, Client, Resource,
    core::NamespaceResourceScope,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;
use torpor_api::labels;

use crate::directory::Directory;

/// Watches Sandboxes and their Pods, in one namespace or in all, until dropped.
pub fn follow(
    client: Client,
    namespace: Option<&str>,
    directory: &Directory,
) -> impl Future<Output = ()> + Send + use<> {
    let all = watcher::Config::default();
    let hashed = watcher::Config::default().labels(labels::SANDBOX_NAME_HASH);
    let (of_sandboxes, of_pods) = (directory.clone(), directory.clone());
    let sandboxes = each(api(&client, namespace), all, move |event| {
        of_sandboxes.apply_sandbox(event);
    });
    let pods = each(api(&client, namespace), hashed, move |event| {
        of_pods.apply_pod(event)
    });
    async move {
        tokio::join!(sandboxes, pods);
    }
}

fn api<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Hands on each event. Faults of the watch are retried with a growing delay; meanwhile the directory serves what it has.
async fn each<K>(api: Api<K>, config: watcher::Config, take: impl Fn(Event<K>))
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut events = pin!(watcher(api, config).default_backoff());
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => take(event),
            Err(error) => tracing::warn!(kind = %K::kind(&()), %error, "watch interrupted"),
        }
    }
}
