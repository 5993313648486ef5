//! Watches Sandboxes and Pods and updates the [`Directory`].

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

/// Objects in one page of a list. Tenants create the objects; each may exceed one megabyte.
const PAGE: u32 = 50;

/// Watches Sandboxes and their Pods, in one namespace or in all, until dropped.
pub fn follow(
    client: Client,
    namespace: Option<&str>,
    directory: &Directory,
) -> impl Future<Output = ()> + Send + use<> {
    let all = watcher::Config::default().page_size(PAGE);
    let hashed = all.clone().labels(labels::SANDBOX_NAME_HASH);
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

/// Passes each event to `take`.
///
/// Errors of the watch are retried with a growing delay; the directory keeps its content meanwhile.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;
    use torpor_test_apiserver::Apiserver;

    use super::*;
    use crate::address::AddressPolicy;

    #[tokio::test]
    async fn objects_of_tenants_are_listed_in_pages() {
        let api = Apiserver::new();
        for n in 0..PAGE + 10 {
            let metadata = json!({"name": format!("s{n}"), "namespace": "ns"});
            api.create("sandboxes", json!({"metadata": metadata, "spec": {}}));
        }
        let directory = Directory::new(AddressPolicy::default());
        let watching = tokio::spawn(follow(api.client(), None, &directory));
        tokio::time::timeout(Duration::from_secs(20), directory.wait_ready())
            .await
            .expect("all is listed");
        watching.abort();
        for n in 0..PAGE + 10 {
            let found = directory.look_up("ns", &format!("s{n}"));
            assert!(found.is_some(), "s{n}");
        }
        let lists = api.take_lists().into_iter();
        let sizes: Vec<_> = lists.filter(|(kind, _)| kind == "sandboxes").collect();
        let of = |size: usize| ("sandboxes".to_owned(), size);
        assert_eq!(sizes, [of(50), of(10)]);
    }
}
