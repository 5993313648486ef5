//! A second node and an S3 server beside the first node: `hack/cluster up --nodes 2`,
//! `hack/cluster store up`, `hack/repository.yaml`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use serde_json::json;
use torpor_api::node::SandboxNode;
use torpor_api::snapshot::SnapshotClass;

use crate::case::Case;
use crate::wait;

/// Names of the nodes.
pub const NODES: [&str; 2] = ["node-0", "node-1"];
/// Address of the S3 server.
pub const ENDPOINT: &str = "http://10.245.0.1:17070";
/// Folder in which the S3 server keeps the bucket.
pub const BUCKET: &str = "/var/lib/torpor-dev/store/data/torpor";

const LIMIT: Duration = Duration::from_secs(120);

/// Runs `body` with both nodes and a SnapshotClass (see [`with_class`]), and lets Pods onto both
/// nodes afterwards.
pub async fn on_both(
    case: &Case,
    body: impl AsyncFnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for node in NODES {
        let ready = Api::<Node>::all(case.client()).get(node).await;
        ready.context("needs two nodes and an S3 server: hack/cluster up --nodes 2, hack/cluster store up, kubectl apply -f hack/repository.yaml")?;
    }
    let done = with_class(case, body).await;
    let uncordoned = NODES.map(|node| case.cordon(node, false));
    let uncordoned = futures::future::join_all(uncordoned).await;
    let uncordoned: anyhow::Result<()> = uncordoned.into_iter().collect();
    done.and(uncordoned)
}

/// Returns whether nodes give images to others.
pub async fn nodes_serve_images(case: &Case) -> anyhow::Result<bool> {
    let nodes: Api<SandboxNode> = Api::all(case.client());
    let all = nodes.list(&ListParams::default()).await?;
    Ok(all.iter().any(SandboxNode::serves_images))
}

/// Checks that no node gives images to others, so that all come from a repository.
pub async fn no_image_servers(case: &Case) -> anyhow::Result<()> {
    ensure!(
        !nodes_serve_images(case).await?,
        "needs agents without image servers: kubectl -n agent-sandbox-system set env daemonset/torpor-agent TORPOR_IMAGES_ADDRESS-"
    );
    Ok(())
}

/// Runs `body` while there is a SnapshotClass of the namespace's name, with a folder of that name
/// in the bucket.
pub async fn with_class(
    case: &Case,
    body: impl AsyncFnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let name = &case.namespace;
    let class: SnapshotClass = serde_json::from_value(json!({
        "metadata": { "name": name },
        "spec": {
            "provisioner": "repository.torpor.dev",
            "parameters": {
                "url": format!("s3://torpor/{name}"), "endpoint": ENDPOINT,
                "region": "us-east-1", "allowHTTP": "true",
            },
        },
    }))?;
    let classes: Api<SnapshotClass> = Api::all(case.client());
    classes.create(&PostParams::default(), &class).await?;
    let done = body().await;
    let deleted = classes.delete(name, &DeleteParams::default()).await;
    done?;
    deleted?;
    Ok(())
}

/// Returns the name of the other node.
pub fn other(node: &str) -> &'static str {
    match node {
        "node-0" => NODES[1],
        _ => NODES[0],
    }
}

/// Runs `hack/cluster` with these arguments.
pub async fn cluster(case: &Case, args: &[&str]) -> anyhow::Result<()> {
    let driver = case.cluster.driver.as_ref();
    let driver = driver.context("TORPOR_DEV names no hack/cluster")?;
    let ran = tokio::process::Command::new(driver).args(args).output();
    let ran = tokio::time::timeout(LIMIT, ran).await??;
    let words = String::from_utf8_lossy(&ran.stderr);
    ensure!(
        ran.status.success(),
        "hack/cluster {}: {words}",
        args.join(" ")
    );
    Ok(())
}

/// Waits until neither the node's disk nor its SandboxNode has a fetched image of the namespace.
pub async fn nothing_fetched(case: &Case, node: &str) -> anyhow::Result<()> {
    let nodes: Api<SandboxNode> = Api::all(case.client());
    wait::object(nodes, node, "no image is claimed", LIMIT, |node| {
        let fetched = node
            .and_then(|node| node.status)
            .unwrap_or_default()
            .fetched;
        match fetched.is_empty() {
            true => Ok(()),
            false => Err(format!("{fetched:?}")),
        }
    })
    .await?;
    let folder = format!("/var/lib/torpor/fetched/images/{}", case.namespace);
    gone_from(case, node, &folder).await
}

/// Waits until the node has no such file or folder.
pub async fn gone_from(case: &Case, node: &str, path: &str) -> anyhow::Result<()> {
    let words = format!("{path} is gone from {node}");
    wait::until(&words, LIMIT, async || {
        let gone = cluster(case, &["on", node, "test", "!", "-e", path]).await;
        Ok(gone.map_err(|error| error.to_string()))
    })
    .await
}

/// Returns the objects of the test's namespace whose path has this part.
pub fn objects(case: &Case, part: &str) -> Vec<PathBuf> {
    fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            match path.is_dir() {
                true => walk(&path, found),
                false => found.push(path),
            }
        }
    }
    let mut found = Vec::new();
    walk(&Path::new(BUCKET).join(&case.namespace), &mut found);
    found.retain(|path| path.to_string_lossy().contains(part));
    found
}
