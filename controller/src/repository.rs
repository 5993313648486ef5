//! Repositories of SnapshotClasses.

use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use torpor_api::{SnapshotClass, snapshot::REPOSITORY_PROVISIONER};
use torpor_repository::{InvalidSettings, Keys, Repository, Settings};

use crate::{calls, context::Context};

/// Namespace whose UID identifies the cluster in a repository.
const CLUSTER_NAMESPACE: &str = "kube-system";

/// Error: a repository cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("SnapshotClass {0:?} does not exist")]
    NoClass(String),
    #[error("SnapshotClass {0:?} has no provisioner {REPOSITORY_PROVISIONER}")]
    Provisioner(String),
    #[error("SnapshotClass {class:?}: {source}")]
    Settings {
        class: String,
        source: InvalidSettings,
    },
    #[error(
        "SnapshotClass {class:?} does not allow archives of cluster {cluster}: add it to the parameter archivesOf"
    )]
    OtherCluster { class: String, cluster: String },
    #[error("cannot read the UID of namespace {CLUSTER_NAMESPACE}, which identifies the cluster")]
    Cluster(#[source] calls::Error),
    #[error("namespace {CLUSTER_NAMESPACE}, whose UID identifies the cluster, does not exist")]
    NoCluster,
}

/// Opens the repository of a class for sweeps, which need no keys, and for the rotation of `keys`.
pub async fn for_sweeps(
    context: &Context,
    class: &SnapshotClass,
    keys: Keys,
) -> Result<Repository, Error> {
    let own = own_cluster(context).await?;
    let settings = settings(class)?;
    let credentials = &context.settings.repositories.credentials;
    Repository::open_for_sweeps(&settings, credentials, keys, own).map_err(invalid(class))
}

/// Opens the repository of a class for the archives of a cluster. The class must name another
/// cluster than this one in its parameter `archivesOf`.
pub async fn of_cluster(
    context: &Context,
    class: &str,
    cluster: &str,
) -> Result<Repository, Error> {
    let found = context.caches.snapshot_classes.get("", class);
    let found = found.ok_or_else(|| Error::NoClass(class.to_owned()))?;
    if found.spec.provisioner != REPOSITORY_PROVISIONER {
        return Err(Error::Provisioner(class.to_owned()));
    }
    let own = own_cluster(context).await?;
    let settings = settings(&found)?;
    if cluster != own && !settings.reads_archives_of(cluster) {
        return Err(Error::OtherCluster {
            class: class.to_owned(),
            cluster: cluster.to_owned(),
        });
    }
    let invalid = invalid(&found);
    let keys = context.keys.read().await;
    let keys = keys.map_err(|error| invalid(error.into()))?;
    let credentials = &context.settings.repositories.credentials;
    Repository::open(&settings, credentials, keys, cluster).map_err(invalid)
}

fn settings(class: &SnapshotClass) -> Result<Settings, Error> {
    Settings::parse(&class.spec.parameters).map_err(invalid(class))
}

fn invalid(class: &SnapshotClass) -> impl Fn(InvalidSettings) -> Error {
    let class = class.name_any();
    move |source| Error::Settings {
        class: class.clone(),
        source,
    }
}

/// Returns the UID that identifies this cluster.
pub async fn own_cluster(context: &Context) -> Result<&str, Error> {
    let uid = context.cluster_uid.get_or_try_init(|| async {
        let found = context.api.get_cluster::<Namespace>(CLUSTER_NAMESPACE);
        let found = found.await.map_err(Error::Cluster)?;
        found.and_then(|found| found.uid()).ok_or(Error::NoCluster)
    });
    uid.await.map(String::as_str)
}
