//! Registry with one small image, by the OCI distribution specification (1.1): the two requests of
//! a pull, and 404 for everything else. containerd speaks plain HTTP with a registry on 127.0.0.1.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::Context;
use aws_lc_rs::digest::{SHA256, digest};
use axum::Router;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header::CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Content by digest, each with its media type.
type Blobs = Arc<HashMap<String, (&'static str, Vec<u8>)>>;

/// Registry that serves until it is dropped.
#[derive(Debug)]
pub struct Registry {
    address: String,
    repository: String,
    server: JoinHandle<()>,
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Registry {
    /// Starts a registry whose image has one file with this content.
    pub async fn start(content: &str) -> anyhow::Result<Self> {
        let (blobs, manifest) = image(content)?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let repository = "torpor-test/staged".to_owned();
        let routes = Router::new()
            .route("/v2/", get(async || "{}"))
            .route("/v2/torpor-test/staged/{kind}/{name}", get(serve))
            .with_state((blobs, manifest));
        let server = tokio::spawn(async move {
            drop(axum::serve(listener, routes).await);
        });
        Ok(Self {
            address,
            repository,
            server,
        })
    }

    /// Returns the name of the image.
    pub fn image(&self) -> String {
        format!("{}/{}:1", self.address, self.repository)
    }

    /// Returns the name of an image that the registry does not have.
    pub fn missing(&self) -> String {
        format!("{}/torpor-test/missing:1", self.address)
    }
}

async fn serve(
    State((blobs, manifest)): State<(Blobs, String)>,
    Path((kind, name)): Path<(String, String)>,
) -> Response {
    let digest = match (kind.as_str(), name.as_str()) {
        ("manifests", "1") => &manifest,
        ("manifests" | "blobs", digest) => digest,
        _ => return StatusCode::NOT_FOUND.into_response(),
    };
    match blobs.get(digest) {
        Some((media_type, content)) => {
            let headers = [
                (CONTENT_TYPE.as_str(), *media_type),
                ("docker-content-digest", digest),
            ];
            (headers, content.clone()).into_response()
        }
        None => StatusCode::NOT_FOUND.into_response(),
    }
}

fn named(content: &[u8]) -> String {
    let hash = digest(&SHA256, content);
    let hex: String = hash
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("sha256:{hex}")
}

/// Returns the blobs of an image, and the digest of its manifest.
fn image(content: &str) -> anyhow::Result<(Blobs, String)> {
    let mut layer = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    layer.append_data(&mut header, "staged", content.as_bytes())?;
    let layer = layer.into_inner()?;
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let config = json!({
        "architecture": architecture, "os": "linux", "config": {},
        "rootfs": { "type": "layers", "diff_ids": [named(&layer)] },
    });
    let config = serde_json::to_vec(&config).context("the image's configuration")?;
    let part = |media_type: &str, content: &[u8]| {
        json!({
            "mediaType": media_type, "digest": named(content), "size": content.len(),
        })
    };
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": part(CONFIG, &config), "layers": [part(LAYER, &layer)],
    });
    let manifest = serde_json::to_vec(&manifest).context("the image's manifest")?;
    let (name, mut blobs) = (named(&manifest), HashMap::new());
    for (media_type, content) in [(MANIFEST, manifest), (CONFIG, config), (LAYER, layer)] {
        blobs.insert(named(&content), (media_type, content));
    }
    Ok((Arc::new(blobs), name))
}
