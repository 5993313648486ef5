//! One look at what the API has of sandboxes.

use std::fmt::Debug;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};
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
    /// What could not be read, each with the reason: the rest is shown without it.
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

/// All objects of a kind, page by page.
pub async fn list<K>(what: &str, api: &Api<K>) -> Result<Vec<K>, Error>
where
    K: Clone + DeserializeOwned + Debug,
{
    let doing = format!("list {what}");
    let mut parameters = ListParams::default().limit(PAGE);
    let mut all = Vec::new();
    loop {
        let page = call(&doing, api.list(&parameters)).await?;
        all.extend(page.items);
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
        let sandboxes: Api<Sandbox> = scope.api(client);
        let pods: Api<Pod> = scope.api(client);
        let snapshots: Api<SandboxSnapshot> = scope.api(client);
        let nodes: Api<SandboxNode> = Api::all(client.clone());
        let (sandboxes, pods, snapshots, nodes) = tokio::join!(
            list("Sandboxes", &sandboxes),
            list("Pods", &pods),
            list("SandboxSnapshots", &snapshots),
            list("SandboxNodes", &nodes),
        );
        let mut unseen = Vec::new();
        Ok(Self {
            sandboxes: sandboxes?,
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

fn kept<K>(listed: Result<Vec<K>, Error>, unseen: &mut Vec<String>) -> Vec<K> {
    listed.unwrap_or_else(|error| {
        unseen.push(crate::error::words(&error));
        Vec::new()
    })
}
