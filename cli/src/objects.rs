//! Lists of the API objects that concern sandboxes.

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

/// Number of objects a page, so that the answers of a large cluster stay small.
const PAGE: u32 = 500;

/// Objects of the requested sandboxes.
#[derive(Clone, Debug, Default)]
pub struct Objects {
    pub sandboxes: Vec<Sandbox>,
    pub pods: Vec<Pod>,
    pub snapshots: Vec<SandboxSnapshot>,
    pub nodes: Vec<SandboxNode>,
    /// Reasons why objects could not be read; the rest is shown without them.
    pub unseen: Vec<String>,
}

/// Namespaces of the requested Sandboxes.
#[derive(Clone, Copy, Debug)]
pub enum Scope<'a> {
    Everywhere,
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

/// Objects of a kind.
///
/// A schema allows objects that the Rust types do not (a time with 13 decimals). Such an object
/// does not hide the others.
#[derive(Clone, Debug)]
pub struct Listed<K> {
    pub items: Vec<K>,
    /// Reasons why objects cannot be parsed, with their names.
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
                let unread = format!("cannot parse {name} of the {what}: {error}");
                self.unread.push(unread);
            }
        }
    }
}

/// Lists all objects of a kind, page by page.
pub async fn list<K>(what: &str, api: &Api<DeserializeGuard<K>>) -> Result<Listed<K>, Error>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    list_by(what, api, ListParams::default()).await
}

/// Lists the objects of a kind that these parameters select, page by page.
pub async fn list_by<K>(
    what: &str,
    api: &Api<DeserializeGuard<K>>,
    parameters: ListParams,
) -> Result<Listed<K>, Error>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let doing = format!("list {what}");
    let mut parameters = parameters.limit(PAGE);
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

impl Objects {
    /// Lists the objects of the scope.
    ///
    /// Only a failure to list Sandboxes is an error. A user without the right to list the other
    /// kinds gets a table without their columns.
    pub async fn list(cluster: &Cluster, scope: Scope<'_>) -> Result<Self, Error> {
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
            sandboxes: readable(Ok(sandboxes?), &mut unseen),
            pods: readable(pods, &mut unseen),
            snapshots: readable(snapshots, &mut unseen),
            nodes: readable(nodes, &mut unseen),
            unseen,
        })
    }

    /// Keeps the Sandboxes of these names, in the order of the names; all if there are no names.
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

pub fn readable<K>(listed: Result<Listed<K>, Error>, unseen: &mut Vec<String>) -> Vec<K> {
    match listed {
        Ok(listed) => {
            unseen.extend(listed.unread);
            listed.items
        }
        Err(error) => {
            unseen.push(crate::error::full_message(&error));
            Vec::new()
        }
    }
}
