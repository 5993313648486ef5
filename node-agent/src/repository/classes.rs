//! Repositories of SnapshotClasses.

use std::path::PathBuf;

use k8s_openapi::api::core::v1::Namespace;
use kube::api::Api;
use kube::runtime::reflector::{ObjectRef, Store as Cache};
use kube::{Client, ResourceExt};
use tokio::sync::OnceCell;
use torpor_api::SnapshotClass;
use torpor_api::snapshot::{NODE_PROVISIONER, REPOSITORY_PROVISIONER};
use torpor_repository::{InvalidSettings, KeyFile, Repository, Settings};

use crate::args::RepositoryArgs;
use crate::report::publish::API_LIMIT;

/// Namespace whose UID identifies the cluster, as Kubernetes' own documentation advises.
const CLUSTER_NAMESPACE: &str = "kube-system";

/// Error: a SnapshotClass gives no repository.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("SnapshotClass {0:?} does not exist")]
    NoClass(String),
    #[error(
        "SnapshotClass {class:?} has provisioner {provisioner:?}; known: {NODE_PROVISIONER}, {REPOSITORY_PROVISIONER}"
    )]
    Provisioner { class: String, provisioner: String },
    #[error("SnapshotClass {class:?}: {source}")]
    Settings {
        class: String,
        source: InvalidSettings,
    },
    #[error(
        "SnapshotClass {class:?} does not allow archives of cluster {cluster}: add it to the parameter archivesOf"
    )]
    OtherCluster { class: String, cluster: String },
    #[error(
        "cannot read the UID of namespace {CLUSTER_NAMESPACE}, which identifies the cluster: {0}"
    )]
    Cluster(String),
}

impl Error {
    /// Reports whether only a change of the SnapshotClass or of the Secret helps.
    pub(crate) fn is_about_class(&self) -> bool {
        !matches!(self, Self::Cluster(_))
    }
}

/// The cluster's repositories.
pub(crate) struct Repositories {
    client: Client,
    classes: Cache<SnapshotClass>,
    /// Directory of the Secret's files.
    credentials: PathBuf,
    keys: KeyFile,
    cluster: OnceCell<String>,
}

impl Repositories {
    pub(crate) fn new(
        client: Client,
        classes: Cache<SnapshotClass>,
        args: &RepositoryArgs,
    ) -> Self {
        Self {
            client,
            classes,
            credentials: args.repository_credentials.clone(),
            keys: KeyFile::new(&args.repository_keys, args.repository_kms.as_deref()),
            cluster: OnceCell::new(),
        }
    }

    /// Reports whether images of this class are uploaded. A class that does not exist counts, so
    /// that its absence is reported.
    pub(crate) fn uploads(&self, class: &str) -> bool {
        let found = self.classes.get(&ObjectRef::new(class));
        found.is_none_or(|class| class.spec.provisioner != NODE_PROVISIONER)
    }

    /// Returns the repository of a class with the images of this cluster, or those that another
    /// one archived, if the class allows that. Reads class and credentials anew, because both may
    /// change at any time.
    pub(crate) async fn of(
        &self,
        name: &str,
        archived_by: Option<&str>,
    ) -> Result<Repository, Error> {
        let class = self.classes.get(&ObjectRef::new(name));
        let class = class.ok_or_else(|| Error::NoClass(name.to_owned()))?;
        if class.spec.provisioner != REPOSITORY_PROVISIONER {
            return Err(Error::Provisioner {
                class: name.to_owned(),
                provisioner: class.spec.provisioner.clone(),
            });
        }
        let invalid = |source| Error::Settings {
            class: class.name_any(),
            source,
        };
        let settings = Settings::parse(&class.spec.parameters).map_err(invalid)?;
        let own = self.cluster.get_or_try_init(|| self.cluster_uid()).await?;
        let cluster = archived_by.unwrap_or(own);
        if cluster != own && !settings.reads_archives_of(cluster) {
            return Err(Error::OtherCluster {
                class: name.to_owned(),
                cluster: cluster.to_owned(),
            });
        }
        let keys = self.keys.read().await;
        let keys = keys.map_err(|error| invalid(error.into()))?;
        Repository::open(&settings, &self.credentials, keys, cluster).map_err(invalid)
    }

    async fn cluster_uid(&self) -> Result<String, Error> {
        let api: Api<Namespace> = Api::all(self.client.clone());
        match tokio::time::timeout(API_LIMIT, api.get(CLUSTER_NAMESPACE)).await {
            Err(_) => Err(Error::Cluster(
                "the apiserver did not answer in time".to_owned(),
            )),
            Ok(Err(error)) => Err(Error::Cluster(error.to_string())),
            Ok(Ok(found)) => found
                .uid()
                .ok_or_else(|| Error::Cluster("it has none".to_owned())),
        }
    }
}
