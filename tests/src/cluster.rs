//! The cluster that the tests run on, named by KUBECONFIG.

use std::path::PathBuf;

use anyhow::Context;
use kube::Client;

/// Environment variable: path of the administrator's kubeconfig.
const KUBECONFIG: &str = "KUBECONFIG";
/// Environment variable: driver of a development cluster (`hack/cluster`), for its logs.
const TORPOR_DEV: &str = "TORPOR_DEV";

/// Connection to the cluster.
#[derive(Clone)]
pub struct Cluster {
    pub client: Client,
    /// kubectl of the cluster's version where there is one, else the one in PATH.
    pub kubectl: PathBuf,
    /// `hack/cluster`, if the cluster is a development cluster.
    pub driver: Option<PathBuf>,
}

impl Cluster {
    /// Connects to the cluster.
    ///
    /// A missing KUBECONFIG is an error: tests that were not run must not look like tests that
    /// passed.
    pub async fn from_env() -> anyhow::Result<Self> {
        let kubeconfig = std::env::var_os(KUBECONFIG).filter(|path| !path.is_empty()).context(
            "KUBECONFIG is not set: the end-to-end tests need a cluster (hack/cluster up; export KUBECONFIG=$(hack/cluster kubeconfig))",
        )?;
        // A second test in this process finds the provider installed.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let client = Client::try_default()
            .await
            .context("cannot reach the cluster of KUBECONFIG")?;
        let beside = PathBuf::from(&kubeconfig)
            .with_file_name("bin")
            .join("kubectl");
        let kubectl = if beside.exists() {
            beside
        } else {
            "kubectl".into()
        };
        let driver = std::env::var_os(TORPOR_DEV)
            .filter(|path| !path.is_empty())
            .map(PathBuf::from);
        Ok(Self {
            client,
            kubectl,
            driver,
        })
    }
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            client: _,
            kubectl,
            driver,
        } = self;
        f.debug_struct("Cluster")
            .field("kubectl", kubectl)
            .field("driver", driver)
            .finish_non_exhaustive()
    }
}
