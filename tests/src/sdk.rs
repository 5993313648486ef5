//! Upstream's Python SDK from PyPI: runs the programs of `tests/e2e/sdk` with it.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use tokio::process::Command;
use tokio::sync::OnceCell;

use crate::case::Case;
use crate::kubectl::LIGHT;
use crate::repository;

/// Time to download and install the SDK, once.
const INSTALL_LIMIT: Duration = Duration::from_secs(300);
/// Time for a program: less than a test's, so that the program's output is reported.
const LIMIT: Duration = Duration::from_secs(130);

/// Manifests of GKE's kinds, which the SDK's extension for snapshots uses.
const POD_SNAPSHOTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/podsnapshots");
const POD_SNAPSHOT_DEFINITIONS: [&str; 2] = [
    "customresourcedefinition/podsnapshots.podsnapshot.gke.io",
    "customresourcedefinition/podsnapshotmanualtriggers.podsnapshot.gke.io",
];

static PYTHON: OnceCell<PathBuf> = OnceCell::const_new();

/// Returns the interpreter that has the SDK, and installs it where it is missing.
///
/// To be called before a test's time runs.
pub async fn python() -> anyhow::Result<&'static PathBuf> {
    PYTHON.get_or_try_init(install).await
}

async fn install() -> anyhow::Result<PathBuf> {
    let script = repository().join("hack/python-sdk");
    let installed = Command::new(&script)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(INSTALL_LIMIT, installed)
        .await
        .with_context(|| format!("{} did not end within {INSTALL_LIMIT:?}", script.display()))?
        .with_context(|| script.display().to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{}: {said}", script.display());
    let path = String::from_utf8(output.stdout).context("the interpreter's path")?;
    Ok(path.trim().into())
}

impl Case {
    /// Returns the router's address for clients that reach the cluster's network.
    pub async fn router(&self) -> anyhow::Result<String> {
        let services: Api<Service> = Api::namespaced(self.client(), "agent-sandbox-system");
        let service = services.get("sandbox-router-svc").await?;
        let address = service.spec.and_then(|spec| spec.cluster_ip);
        address.context("the router's Service has no address")
    }

    /// Applies `deploy/podsnapshots` as users do while the body runs; all other tests run without
    /// it.
    pub async fn with_pod_snapshots(
        &self,
        body: impl AsyncFnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let kubectl = &self.kubectl;
        kubectl.ok(&["apply", "-k", POD_SNAPSHOTS]).await?;
        let mut established = vec!["wait", "--for=condition=Established", "--timeout=30s"];
        established.extend(POD_SNAPSHOT_DEFINITIONS);
        let done = match kubectl.ok(&established).await {
            Ok(_) => body().await,
            Err(error) => Err(error),
        };
        let removed = kubectl.ok(&["delete", "-k", POD_SNAPSHOTS]).await;
        done.and_then(|()| removed.map(drop))
    }

    /// Runs a program of `tests/e2e/sdk` in the test's namespace; the program must succeed.
    pub async fn with_sdk(&self, program: &str) -> anyhow::Result<()> {
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/e2e/sdk")
            .join(program);
        // The SDK starts kubectl for its tunnels.
        let own = self.cluster.kubectl.parent().map(PathBuf::from);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(own.into_iter().chain(std::env::split_paths(&path)))?;
        let child = Command::new(python().await?)
            .arg(&file)
            .arg(&self.namespace)
            .arg(format!("http://{}:8080", self.router().await?))
            .env("PATH", path)
            .envs(LIGHT)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot run {program}"))?;
        let output = tokio::time::timeout(LIMIT, child.wait_with_output())
            .await
            .with_context(|| format!("{program} did not end within {LIMIT:?}"))??;
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        anyhow::ensure!(
            output.status.success(),
            "{program}: {}\n{said}",
            output.status
        );
        eprintln!("{program}: {}", said.trim_end());
        Ok(())
    }
}
