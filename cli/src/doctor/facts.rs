//! What `doctor` looks at. A look that failed leaves its words in the place of what it was for.

use std::cell::RefCell;
use std::fmt::Debug;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Resource;
use kube::api::Api;
use kube::core::DeserializeGuard;
use serde::de::DeserializeOwned;
use torpor_api::{Sandbox, SandboxNode, SandboxSnapshot, SandboxTemplate};

use crate::connect::Cluster;
use crate::error::{Error, words};
use crate::world::list;

/// What was seen, or why not.
pub type Look<T> = Result<Vec<T>, Unseen>;

/// Why something could not be looked at.
#[derive(Clone, Debug)]
pub struct Unseen {
    pub text: String,
    pub remedy: String,
}

impl From<Error> for Unseen {
    fn from(error: Error) -> Self {
        let remedy = match error.is_unknown_kind() {
            true => "install the definitions (above)",
            false => "run doctor as somebody who may list them, an administrator for example",
        };
        Self {
            text: words(&error),
            remedy: remedy.to_owned(),
        }
    }
}

/// A cluster, as far as Torpor is concerned.
#[derive(Debug)]
pub struct Facts {
    pub now: Timestamp,
    /// Where Torpor is installed; the next four are of this namespace.
    pub namespace: String,
    pub deployments: Look<Deployment>,
    pub daemon_sets: Look<DaemonSet>,
    pub pods: Look<Pod>,
    pub leases: Look<Lease>,
    pub definitions: Look<CustomResourceDefinition>,
    pub runtime_classes: Look<RuntimeClass>,
    pub nodes: Look<Node>,
    pub sandbox_nodes: Look<SandboxNode>,
    pub snapshots: Look<SandboxSnapshot>,
    pub sandboxes: Look<Sandbox>,
    pub templates: Look<SandboxTemplate>,
    /// Objects that cannot be read, each with the reason.
    pub unread: Vec<String>,
}

impl Facts {
    /// Looks at everything at once.
    pub async fn gather(cluster: &Cluster, namespace: &str, now: Timestamp) -> Self {
        let client = || cluster.client.clone();
        let unread = &RefCell::new(Vec::new());
        let (deployments, daemon_sets, pods, leases, definitions) = tokio::join!(
            look("Deployments", Api::namespaced(client(), namespace), unread),
            look("DaemonSets", Api::namespaced(client(), namespace), unread),
            look("Pods", Api::namespaced(client(), namespace), unread),
            look("Leases", Api::namespaced(client(), namespace), unread),
            look("CustomResourceDefinitions", Api::all(client()), unread),
        );
        let (runtime_classes, nodes, sandbox_nodes, snapshots, sandboxes, templates) = tokio::join!(
            look("RuntimeClasses", Api::all(client()), unread),
            look("Nodes", Api::all(client()), unread),
            look("SandboxNodes", Api::all(client()), unread),
            look("SandboxSnapshots", Api::all(client()), unread),
            look("Sandboxes", Api::all(client()), unread),
            look("SandboxTemplates", Api::all(client()), unread),
        );
        Self {
            now,
            namespace: namespace.to_owned(),
            deployments,
            daemon_sets,
            pods,
            leases,
            definitions,
            runtime_classes,
            nodes,
            sandbox_nodes,
            snapshots,
            sandboxes,
            templates,
            unread: unread.take(),
        }
    }
}

async fn look<K>(
    what: &str,
    api: Api<DeserializeGuard<K>>,
    unread: &RefCell<Vec<String>>,
) -> Look<K>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let listed = list(what, &api).await?;
    unread.borrow_mut().extend(listed.unread);
    Ok(listed.items)
}
