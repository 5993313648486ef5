//! The agent with the driver of Kata, from idleness to the packet that wakes.
//!
//! A RuntimeClass of runc stands for Kata's, which this cluster may not have: containerd pauses its
//! containers by the same calls. The agent is patched with the file that users put in place.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use torpor_api::annotations::{DOZE_AFTER, HIBERNATE};
use torpor_api::conditions::POD_HIBERNATED;
use torpor_api::node::SandboxNode;
use torpor_api::reasons::hibernated::{AWAKE, DOZING, RUNTIME_NOT_CAPABLE};
use torpor_tests::agent::Agent;
use torpor_tests::case::{Case, case_alone, condition};
use torpor_tests::pods::{pod, python, with};
use torpor_tests::sleep::{SLEEP_LIMIT, restarts};
use torpor_tests::swap::Swap;
use torpor_tests::wait;

const CLASS: &str = "torpor-e2e-stands-for-kata";
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// Program that answers each line with a number that only grows, from memory.
const COUNTS: &str = "import socketserver\nn = 0\nclass H(socketserver.StreamRequestHandler):\n    def handle(self):\n        global n\n        for line in self.rfile:\n            n += 1\n            self.wfile.write(b'%d\\n' % n)\nsocketserver.ThreadingTCPServer(('', 8080), H).serve_forever()\n";

async fn until_reason(case: &Case, reason: &str) -> anyhow::Result<String> {
    let words = format!("its condition has the reason {reason}");
    let has_reason =
        |pod: &k8s_openapi::api::core::v1::Pod| condition(pod, POD_HIBERNATED).1 == reason;
    let pod = case.pod_until("p", &words, SLEEP_LIMIT, has_reason).await?;
    assert_eq!(restarts(&pod), 0);
    Ok(condition(&pod, POD_HIBERNATED).2.to_owned())
}

/// Waits until the doze is complete and the memory is out; returns since when.
async fn dozes(case: &Case, node: &str) -> anyhow::Result<Option<Time>> {
    wait::object(
        kube::Api::<SandboxNode>::all(case.client()),
        node,
        "the doze is reported",
        SLEEP_LIMIT,
        |node| {
            let status = node.and_then(|node| node.status).unwrap_or_default();
            let report = status
                .sandboxes
                .into_iter()
                .find(|report| report.pod_name == "p" && report.namespace == case.namespace);
            match report {
                Some(report)
                    if report.asleep_since.is_some() && report.memory_asleep_bytes.is_some() =>
                {
                    Ok(report.asleep_since)
                }
                report => Err(format!("{report:?}")),
            }
        },
    )
    .await
}

async fn asked(stream: &mut TcpStream) -> anyhow::Result<u64> {
    stream.write_all(b"?\n").await?;
    let mut answer = [0; 32];
    let read = stream.read(&mut answer);
    let length = tokio::time::timeout(wait::scaled(ANSWER_LIMIT), read).await??;
    let text = String::from_utf8_lossy(answer.get(..length).unwrap_or_default())
        .trim()
        .to_owned();
    Ok(text.parse()?)
}

#[tokio::test]
async fn an_idle_sandbox_of_another_runtime_dozes_and_wakes_on_a_packet_also_after_the_agents_death()
-> anyhow::Result<()> {
    case_alone("kata", async |case| {
        with_stand_in(case, async || goes_through(case).await).await
    })
    .await
}

/// Runs the body with swap, the RuntimeClass, and an agent that treats its Pods as Kata's.
async fn with_stand_in(
    case: &Case,
    body: impl AsyncFnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    let class = json!({
        "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": { "name": CLASS }, "handler": "runc",
    });
    let input = class.to_string();
    let applied = case
        .kubectl
        .run_with(&["apply", "-f", "-"], Some(input.as_bytes()));
    applied.await?.ok()?;
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kata/agent.yaml");
    let patch = std::fs::read_to_string(here)?
        .replace("path: /run/containerd,", "path: /run/torpor-dev/node-0,")
        .replace(
            "kata-qemu,kata-qemu-runtime-rs,kata-clh,kata-clh-runtime-rs,kata-fc,kata-dragonball",
            "runc",
        );
    let done = Agent::with_patch(case, &patch, body).await;
    case.kubectl.ok(&["delete", "runtimeclass", CLASS]).await?;
    done
}

async fn goes_through(case: &Case) -> anyhow::Result<()> {
    let base = pod("p", json!({ "containers": [python("a", COUNTS)] }));
    let manifest = with(
        base,
        json!({
            "metadata": { "annotations": { DOZE_AFTER: "2s" } },
            "spec": { "runtimeClassName": CLASS },
        }),
    );
    let pod = case.start(manifest).await?;
    let address = pod
        .status
        .as_ref()
        .and_then(|status| status.pod_ip.clone())
        .unwrap_or_default();
    let node = pod.spec.and_then(|spec| spec.node_name).unwrap_or_default();
    let mut stream = wait::until("the program listens", ANSWER_LIMIT, async || {
        let connected = TcpStream::connect((address.as_str(), 8080)).await;
        Ok(connected.map_err(|error| error.to_string()))
    })
    .await?;
    assert_eq!(asked(&mut stream).await?, 1);
    let message = until_reason(case, DOZING).await?;
    assert!(message.contains("The sandbox has no image"), "{message}");
    dozes(case, &node).await?;
    // A connection that existed before wakes the sandbox, and so does a new one.
    assert_eq!(asked(&mut stream).await?, 2);
    until_reason(case, AWAKE).await?;
    dozes(case, &node).await?;
    let mut another = TcpStream::connect((address.as_str(), 8080)).await?;
    assert_eq!(asked(&mut another).await?, 3);
    // The runtime cannot hibernate: the sandbox dozes, and its memory is not reported as safe.
    case.annotate("p", HIBERNATE, Some("true")).await?;
    let message = until_reason(case, RUNTIME_NOT_CAPABLE).await?;
    dozes(case, &node).await?;
    assert!(
        message.contains("cannot hibernate") || message.contains("cannot save"),
        "{message}"
    );
    case.annotate("p", HIBERNATE, None).await?;
    dozes(case, &node).await?;
    // While there is no agent, no packet wakes the sandbox. The kernel of the guest (here: of the
    // host) keeps the data.
    let agent = Agent::find()?;
    agent.process.kill()?;
    another.write_all(b"?\n").await?;
    Agent::replace(case.client()).await?;
    let mut answer = [0; 8];
    let length =
        tokio::time::timeout(wait::scaled(SLEEP_LIMIT), another.read(&mut answer)).await??;
    assert_eq!(answer.get(..length), Some(&b"4\n"[..]));
    // The sandbox is idle again, and its Pod may go while it dozes.
    dozes(case, &node).await?;
    case.delete_pod("p", SLEEP_LIMIT).await
}
