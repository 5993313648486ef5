//! Tokens of ServiceAccounts, and clients that authenticate with a token only.

use anyhow::Context;
use k8s_openapi::api::authentication::v1::TokenRequest;
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::api::{ListParams, PostParams};
use kube::{Api, Client, Config, ResourceExt};
use serde_json::json;

/// Requests a token of the ServiceAccount.
///
/// The token is bound to the Pod, as the kubelet's are, or to no object.
pub async fn token(
    client: Client,
    namespace: &str,
    account: &str,
    pod: Option<&Pod>,
) -> anyhow::Result<String> {
    let bound = pod.map(|pod| {
        json!({ "apiVersion": "v1", "kind": "Pod", "name": pod.name_any(), "uid": pod.uid() })
    });
    let request: TokenRequest = serde_json::from_value(json!({
        "spec": { "audiences": [], "boundObjectRef": bound, "expirationSeconds": 600 },
    }))?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client, namespace);
    let made = accounts
        .create_token_request(account, &PostParams::default(), &request)
        .await
        .with_context(|| format!("no token of {namespace}/{account}"))?;
    let token = made.status.and_then(|status| status.token);
    token.context("no token in the answer")
}

/// Returns a client of KUBECONFIG's cluster that authenticates with this token only.
pub async fn client(token: &str) -> anyhow::Result<Client> {
    let mut config = Config::infer().await?;
    config.auth_info = serde_json::from_value(json!({ "token": token }))?;
    Ok(Client::try_from(config)?)
}

/// Returns a running Pod with this label.
pub async fn running(client: Client, namespace: &str, label: &str) -> anyhow::Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(client, namespace);
    let found = pods.list(&ListParams::default().labels(label)).await?;
    let runs = |pod: &Pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_ref());
        phase.is_some_and(|phase| phase == "Running") && pod.metadata.deletion_timestamp.is_none()
    };
    let found = found.items.into_iter().find(runs);
    found.with_context(|| format!("no Pod {label} runs in {namespace}"))
}
