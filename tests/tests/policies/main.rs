//! NetworkPolicies of sandboxes that an enforcer applies.
//!
//! `hack/vm` runs this test target in a machine with kube-network-policies: the development
//! cluster's own network enforces none, and this machine's kernel may lack what an enforcer needs.
//!
//! Run as root, with KUBECONFIG and TORPOR_DEV of such a cluster: `cargo test -p torpor-tests
//! --test policies`.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use torpor_api::annotations::{HIBERNATE, NETWORK_POLICY};
use torpor_records::SandboxState;
use torpor_tests::case::{Case, case, uid};
use torpor_tests::pods::{annotated, shell_pod, with};
use torpor_tests::sandboxes::sandbox;
use torpor_tests::{wait, witness};

/// Time for an enforcer to see a new Pod or policy, which takes seconds.
const LIMIT: Duration = Duration::from_secs(30);
/// Time for which a connection without an answer is tried.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);

fn client(name: &str) -> Value {
    let labels = json!({ "metadata": { "labels": { "client": name } } });
    with(shell_pod(name, "sleep 1000000"), labels)
}

fn admits_friends() -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": { "name": "friends" },
        "spec": {
            "podSelector": { "matchLabels": { NETWORK_POLICY: "default" } },
            "ingress": [{ "from": [{ "podSelector": { "matchLabels": { "client": "friend" } } }] }],
        },
    })
}

/// Reports whether the program of a sandbox answers the Pod of a client.
async fn answers(case: &Case, client: &str, sandbox: &Pod) -> anyhow::Result<bool> {
    let (address, port) = (witness::address(sandbox)?, witness::PORT);
    let seconds = wait::scaled(CONNECT_LIMIT).as_secs();
    let line = format!("echo | nc -w {seconds} {address} {port} | head -n 1");
    Ok(case.sh(client, "a", &line).await?.contains("secret"))
}

async fn until_answered(
    case: &Case,
    client: &str,
    pod: &Pod,
    expected: bool,
) -> anyhow::Result<()> {
    let words = format!("{client} is answered: {expected}");
    wait::until(&words, LIMIT, async || {
        let is = answers(case, client, pod).await?;
        wait::holds(is == expected, || format!("it is answered: {is}"))
    })
    .await
}

#[tokio::test]
async fn packets_that_a_policy_forbids_neither_reach_nor_wake_a_sandbox() -> anyhow::Result<()> {
    case("enforced", async |case| {
        let spec = json!({ "containers": [witness::container(1, &[])] });
        case.create(sandbox("s", spec.clone())).await?;
        case.create(annotated(sandbox("open", spec), NETWORK_POLICY, "none"))
            .await?;
        case.create(admits_friends()).await?;
        let (closed, open) = (
            case.sandbox_ready("s").await?,
            case.sandbox_ready("open").await?,
        );
        for name in ["stranger", "friend"] {
            case.start(client(name)).await?;
        }
        until_answered(case, "stranger", &open, true).await?;
        until_answered(case, "friend", &closed, true).await?;
        until_answered(case, "stranger", &closed, false).await?;

        let asleep = json!({ "metadata": { "annotations": { HIBERNATE: "true" } } });
        case.patch("s", asleep).await?;
        case.sandbox_has("s", "Hibernated", "True", "Hibernated")
            .await?;
        assert!(!answers(case, "stranger", &closed).await?);
        let state = case.node.state_of(&uid(&closed))?;
        assert!(
            matches!(state, SandboxState::Hibernated { .. }),
            "{state:?}"
        );
        until_answered(case, "friend", &closed, true).await?;
        Ok(())
    })
    .await
}
