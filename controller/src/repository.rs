//! Repositories of SnapshotClasses.

use std::path::Path;

use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use torpor_api::{SnapshotClass, snapshot::REPOSITORY_PROVISIONER};
use torpor_repository::{InvalidSettings, Repository, Settings};

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

/// Opens the repository of a class for sweeps, which need no encryption keys.
pub async fn without_keys(context: &Context, class: &SnapshotClass) -> Result<Repository, Error> {
    let own = own_cluster(context).await?;
    open(context, class, None, |_| Ok(own.to_owned()))
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
    let keys = Some(&*context.settings.repositories.keys);
    open(context, &found, keys, |settings| {
        match cluster == own || settings.reads_archives_of(cluster) {
            true => Ok(cluster.to_owned()),
            false => Err(Error::OtherCluster {
                class: class.to_owned(),
                cluster: cluster.to_owned(),
            }),
        }
    })
}

fn open(
    context: &Context,
    class: &SnapshotClass,
    keys: Option<&Path>,
    cluster: impl FnOnce(&Settings) -> Result<String, Error>,
) -> Result<Repository, Error> {
    let invalid = |source| Error::Settings {
        class: class.name_any(),
        source,
    };
    let settings = Settings::parse(&class.spec.parameters).map_err(invalid)?;
    let cluster = cluster(&settings)?;
    let credentials = &context.settings.repositories.credentials;
    Repository::open(&settings, credentials, keys, &cluster).map_err(invalid)
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
