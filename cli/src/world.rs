//! One look at what the API has of sandboxes.

use std::fmt::Debug;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use torpor_api::{Sandbox, SandboxNode, SandboxSnapshot};

use crate::connect::{Cluster, call};
use crate::error::Error;

/// Objects of one page: the apiserver need not hold all of a large cluster in one answer.
const PAGE: u32 = 500;

/// What the API has of the sandboxes that were asked for.
#[derive(Clone, Debug, Default)]
pub struct World {
    pub sandboxes: Vec<Sandbox>,
    pub pods: Vec<Pod>,
    pub snapshots: Vec<SandboxSnapshot>,
    pub nodes: Vec<SandboxNode>,
    /// What could not be seen, each with the reason: the rest is shown without it.
    pub unseen: Vec<String>,
}

/// Which Sandboxes.
#[derive(Clone, Copy, Debug)]
pub enum Scope<'a> {
    /// All of the cluster.
    Everywhere,
    /// Those of a namespace.
    Namespace(&'a str),
}

impl Scope<'_> {
    pub fn api<K>(self, client: &Client) -> Api<K>
    where
        K: Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
    {
        match self {
            Self::Everywhere => Api::all(client.clone()),
            Self::Namespace(namespace) => Api::namespaced(client.clone(), namespace),
        }
    }
}

/// The objects of a kind. A schema lets objects through that our types do not (a time with 13 decimals): nobody's shall hide those of
/// others.
#[derive(Clone, Debug)]
pub struct Listed<K> {
    pub items: Vec<K>,
    /// Those that cannot be read, each with the reason.
    pub unread: Vec<String>,
}

impl<K> Listed<K> {
    fn push(&mut self, what: &str, object: DeserializeGuard<K>) {
        match object.0 {
            Ok(object) => self.items.push(object),
            Err(InvalidObject { error, metadata }) => {
                let name = metadata.name.unwrap_or_default();
                let name = match metadata.namespace {
                    Some(namespace) => format!("{namespace}/{name}"),
                    None => name,
                };
                let unread = format!("of the {what}, {name} cannot be read: {error}");
                self.unread.push(unread);
            }
        }
    }
}

/// All objects of a kind, page by page.
pub async fn list<K>(what: &str, api: &Api<DeserializeGuard<K>>) -> Result<Listed<K>, Error>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let doing = format!("list {what}");
    let mut parameters = ListParams::default().limit(PAGE);
    let mut all = Listed {
        items: Vec::new(),
        unread: Vec::new(),
    };
    loop {
        let page = call(&doing, api.list(&parameters)).await?;
        for object in page.items {
            all.push(what, object);
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(all),
        }
    }
}

impl World {
    /// Looks. Only the Sandboxes themselves have to be readable: who may not see nodes gets a table without what they say.
    pub async fn look(cluster: &Cluster, scope: Scope<'_>) -> Result<Self, Error> {
        let client = &cluster.client;
        let sandboxes: Api<DeserializeGuard<Sandbox>> = scope.api(client);
        let pods: Api<DeserializeGuard<Pod>> = scope.api(client);
        let snapshots: Api<DeserializeGuard<SandboxSnapshot>> = scope.api(client);
        let nodes: Api<DeserializeGuard<SandboxNode>> = Api::all(client.clone());
        let (sandboxes, pods, snapshots, nodes) = tokio::join!(
            list("Sandboxes", &sandboxes),
            list("Pods", &pods),
            list("SandboxSnapshots", &snapshots),
            list("SandboxNodes", &nodes),
        );
        let mut unseen = Vec::new();
        Ok(Self {
            sandboxes: kept(Ok(sandboxes?), &mut unseen),
            pods: kept(pods, &mut unseen),
            snapshots: kept(snapshots, &mut unseen),
            nodes: kept(nodes, &mut unseen),
            unseen,
        })
    }

    /// Keeps the Sandboxes of these names, in their order; all if none is named.
    pub fn only(mut self, namespace: &str, names: &[String]) -> Result<Self, Error> {
        if names.is_empty() {
            return Ok(self);
        }
        let found = names.iter().map(|name| {
            let position = self.sandboxes.iter().find(|s| s.name_any() == *name);
            position.cloned().ok_or_else(|| Error::NoSandbox {
                namespace: namespace.to_owned(),
                name: name.clone(),
            })
        });
        self.sandboxes = found.collect::<Result<_, _>>()?;
        Ok(self)
    }
}

fn kept<K>(listed: Result<Listed<K>, Error>, unseen: &mut Vec<String>) -> Vec<K> {
    match listed {
        Ok(listed) => {
            unseen.extend(listed.unread);
            listed.items
        }
        Err(error) => {
            unseen.push(crate::error::words(&error));
            Vec::new()
        }
    }
}
