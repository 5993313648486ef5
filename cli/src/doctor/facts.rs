//! Objects that `doctor` checks. A failed list leaves its reason in place of the objects.

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
use crate::error::{Error, full_message};
use crate::objects::list;

/// Objects of a kind, or why they could not be listed.
pub type ListResult<T> = Result<Vec<T>, Unseen>;

/// Reason why objects could not be listed.
#[derive(Clone, Debug)]
pub struct Unseen {
    pub text: String,
    pub remedy: String,
}

impl From<Error> for Unseen {
    fn from(error: Error) -> Self {
        let remedy = match error.is_unknown_kind() {
            true => "install the CustomResourceDefinitions (above)",
            false => "run doctor as a user with the right to list them, such as an administrator",
        };
        Self {
            text: full_message(&error),
            remedy: remedy.to_owned(),
        }
    }
}

/// Objects of a cluster that concern Torpor.
#[derive(Debug)]
pub struct Facts {
    pub now: Timestamp,
    /// Namespace in which Torpor is installed, and of the next four fields.
    pub namespace: String,
    pub deployments: ListResult<Deployment>,
    pub daemon_sets: ListResult<DaemonSet>,
    pub pods: ListResult<Pod>,
    pub leases: ListResult<Lease>,
    pub definitions: ListResult<CustomResourceDefinition>,
    pub runtime_classes: ListResult<RuntimeClass>,
    pub nodes: ListResult<Node>,
    pub sandbox_nodes: ListResult<SandboxNode>,
    pub snapshots: ListResult<SandboxSnapshot>,
    pub sandboxes: ListResult<Sandbox>,
    pub templates: ListResult<SandboxTemplate>,
    /// Reasons why objects cannot be parsed, with their names.
    pub unread: Vec<String>,
}

impl Facts {
    /// Lists all objects, concurrently.
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
) -> ListResult<K>
where
    K: Resource + Clone + DeserializeOwned + Debug,
{
    let listed = list(what, &api).await?;
    unread.borrow_mut().extend(listed.unread);
    Ok(listed.items)
}
