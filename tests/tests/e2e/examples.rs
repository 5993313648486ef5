//! The examples of `examples/`: each is applied and used as its README says, in a namespace of its
//! own.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, ensure};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::process::Command;
use torpor_api::SandboxWarmPool;
use torpor_api::annotations::{DOZE_AFTER, HIBERNATE, HIBERNATE_AFTER, NEXT_WAKEUP};
use torpor_api::conditions::POD_HIBERNATED;
use torpor_api::install;
use torpor_api::reasons::hibernated::AWAKE;
use torpor_tests::accounts::token;
use torpor_tests::case::{Case, case, condition};
use torpor_tests::http::{self, Request};
use torpor_tests::kubectl::Kubectl;
use torpor_tests::sandboxes::LIMIT;
use torpor_tests::swap::Swap;
use torpor_tests::websocket::WebSocket;
use torpor_tests::witness::address;
use torpor_tests::{repository, sdk, wait};

use crate::kata::kata_class;

/// Path of an example, or of a file in it.
fn example(path: &str) -> String {
    repository()
        .join("examples")
        .join(path)
        .display()
        .to_string()
}

/// Applies an example as its README says.
async fn apply(case: &Case, name: &str) -> anyhow::Result<()> {
    let path = example(name);
    case.kubectl.ok(&["apply", "-k", &path]).await.map(drop)
}

/// Number that a container wrote to a file.
async fn number(case: &Case, pod: &str, container: &str, file: &str) -> anyhow::Result<u64> {
    let text = case.written(pod, container, file).await?;
    text.trim().parse().with_context(|| format!("{text:?}"))
}

/// Header lines by which the router finds a Sandbox.
fn to_sandbox(case: &Case, sandbox: &str, port: u16) -> String {
    format!(
        "X-Sandbox-ID: {sandbox}\r\nX-Sandbox-Namespace: {}\r\nX-Sandbox-Port: {port}\r\n",
        case.namespace
    )
}

#[tokio::test]
async fn example_hello_hibernates_and_continues_after_an_exec() -> anyhow::Result<()> {
    case("ex-hello", async |case| {
        apply(case, "hello").await?;
        case.sandbox_ready("hello").await?;
        let before = number(case, "hello", "main", "/tmp/count").await?;
        let hibernate = json!({ "metadata": { "annotations": { HIBERNATE: "true" } } });
        case.patch("hello", hibernate).await?;
        case.asleep("hello").await?;
        let text = case.sh("hello", "main", "cat /tmp/count").await?;
        let after: u64 = text.trim().parse()?;
        ensure!(
            after >= before,
            "the count went back from {before} to {after}"
        );
        Ok(())
    })
    .await
}

#[tokio::test]
async fn example_notebook_hibernates_when_idle_and_keeps_its_variables() -> anyhow::Result<()> {
    case("ex-notebook", async |case| {
        apply(case, "notebook").await?;
        let pod = case.sandbox_ready("notebook").await?;
        let run = async |cell: &str| {
            let request = Request {
                method: "POST",
                path: "/run",
                body: cell,
                ..Request::default()
            };
            http::ask(&address(&pod)?, 8888, request).await
        };
        ensure!(run("x = 6 * 7").await? == (200, String::new()));
        let sooner = json!({ "metadata": { "annotations": { HIBERNATE_AFTER: "10s" } } });
        case.patch("notebook", sooner).await?;
        case.asleep("notebook").await?;
        let answer = run("print(x)").await?;
        ensure!(answer == (200, "42\n".to_owned()), "{answer:?}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn example_code_interpreter_runs_its_sdk_program_in_a_warm_sandbox() -> anyhow::Result<()> {
    sdk::python().await?;
    case("ex-interpreter", async |case| {
        apply(case, "code-interpreter").await?;
        let pools = case.api::<SandboxWarmPool>();
        wait::object(pools, "python", "the pool is ready", LIMIT, |found| {
            let status = found.and_then(|pool| pool.status).unwrap_or_default();
            let ready = status.ready_replicas == Some(1);
            ready.then_some(()).ok_or_else(|| format!("{status:?}"))
        })
        .await?;
        case.with_sdk(&example("code-interpreter/interpret.py"))
            .await
    })
    .await
}

#[tokio::test]
async fn example_ide_is_resumed_by_a_request_with_its_unsaved_buffer() -> anyhow::Result<()> {
    case("ex-ide", async |case| {
        apply(case, "ide").await?;
        case.sandbox_ready("ide").await?;
        let (router, headers) = (case.router().await?, to_sandbox(case, "ide", 8888));
        let request = Request {
            method: "PUT",
            path: "/buffer",
            headers: &headers,
            body: "unsaved text",
        };
        let put = http::ask(&router, 8080, request).await?;
        ensure!(put.0 == 200, "{put:?}");
        case.suspend("ide").await?;
        let request = Request {
            headers: &headers,
            ..Request::get("/buffer")
        };
        let answer = http::ask(&router, 8080, request).await?;
        ensure!(answer == (200, "unsaved text".to_owned()), "{answer:?}");
        Ok(())
    })
    .await
}

/// Sends a text over a WebSocket and returns the text of the answer.
async fn exchange(socket: &mut WebSocket, text: &str) -> anyhow::Result<String> {
    socket.send(text).await?;
    tokio::time::timeout(wait::scaled(LIMIT), socket.receive()).await?
}

#[tokio::test]
async fn example_websocket_stays_open_while_its_sandbox_hibernates() -> anyhow::Result<()> {
    case("ex-websocket", async |case| {
        apply(case, "websocket").await?;
        let pod = case.sandbox_ready("websocket").await?;
        let stream = TcpStream::connect((address(&pod)?.as_str(), 8080)).await?;
        let mut socket = WebSocket::open(stream, "websocket", "/").await?;
        ensure!(exchange(&mut socket, "before").await? == "1 before");
        let hibernate = json!({ "metadata": { "annotations": { HIBERNATE: "true" } } });
        case.patch("websocket", hibernate).await?;
        case.asleep("websocket").await?;
        ensure!(exchange(&mut socket, "after").await? == "2 after");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn example_scheduled_wake_is_awake_at_its_time() -> anyhow::Result<()> {
    case("ex-scheduled", async |case| {
        apply(case, "scheduled-wake").await?;
        case.sandbox_ready("scheduled").await?;
        let time = Timestamp::now().checked_add(wait::scaled(Duration::from_secs(40)))?;
        let wake = json!({ "metadata": { "annotations": { NEXT_WAKEUP: time.to_string() } } });
        case.patch("scheduled", wake).await?;
        case.asleep("scheduled").await?;
        let awake = |pod: &Pod| condition(pod, POD_HIBERNATED).1 == AWAKE;
        case.pod_until("scheduled", "it is awake", LIMIT, awake)
            .await?;
        ensure!(Timestamp::now() >= time, "awake before its time");
        let gaps = case.written("scheduled", "main", "/tmp/gaps").await?;
        ensure!(gaps.contains("asleep for"), "{gaps}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn example_fork_starts_copies_that_share_the_origins_memory() -> anyhow::Result<()> {
    case("ex-fork", async |case| {
        apply(case, "fork").await?;
        case.sandbox_ready("origin").await?;
        let origin = case.written("origin", "main", "/tmp/secret").await?;
        let snapshot = example("fork/snapshot.yaml");
        case.kubectl.ok(&["apply", "-f", &snapshot]).await?;
        let committed = ["wait", "--for=condition=Committed", "--timeout=30s"];
        let committed = [&committed[..], &["sandboxsnapshot/origin"]].concat();
        case.kubectl.ok(&committed).await?;
        apply(case, "fork/copies").await?;
        let mut generations = BTreeSet::new();
        for copy in ["copy-1", "copy-2"] {
            case.sandbox_ready(copy).await?;
            // The program writes the file again each second, from its memory.
            case.sh(copy, "main", "rm /tmp/secret").await?;
            let secret = case.written(copy, "main", "/tmp/secret").await?;
            ensure!(secret == origin, "{copy} has {secret}, the origin {origin}");
            let generation = case.sh(copy, "main", "cat /run/torpor/generation").await?;
            ensure!(
                generations.insert(generation),
                "{copy} has the other's generation"
            );
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn example_multi_tenant_keeps_its_quota_and_opens_to_its_client_alone() -> anyhow::Result<()>
{
    case("ex-tenant", async |case| {
        let enforce = "pod-security.kubernetes.io/enforce=restricted";
        case.kubectl
            .ok(&["label", "namespace", &case.namespace, enforce])
            .await?;
        apply(case, "multi-tenant").await?;
        case.sandbox_ready("agent").await?;
        let may = async |account: &str| {
            let account = format!("--as=system:serviceaccount:{}:{account}", case.namespace);
            let ask = [
                "auth",
                "can-i",
                "connect",
                "sandboxes.agents.x-k8s.io",
                "--subresource=proxy",
            ];
            case.kubectl.run(&[&ask[..], &[&account]].concat()).await
        };
        ensure!(may("client").await?.code == 0, "its client may not connect");
        ensure!(
            may("default").await?.code == 1,
            "another account may connect"
        );
        // Tokens of the account exist, as the README uses them.
        token(case.client(), &case.namespace, "client", None).await?;
        let manifest = case
            .kubectl
            .ok(&["get", "sandbox", "agent", "-o", "json"])
            .await?;
        let spec = serde_json::from_str::<Value>(&manifest)?["spec"].take();
        let another = |name: &str| {
            json!({
                "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
                "metadata": { "name": name }, "spec": spec,
            })
        };
        case.create(another("second")).await?;
        let refused = case.create(another("third")).await;
        let words = format!("{:#}", refused.err().context("the quota admits a third")?);
        ensure!(words.contains("exceeded quota: tenant"), "{words}");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn example_kata_dozes_where_the_cluster_has_its_runtime_class() -> anyhow::Result<()> {
    case("ex-kata", async |case| {
        if kata_class(case).await?.as_deref() != Some("kata-qemu") {
            let path = example("kata");
            let dry = ["apply", "--dry-run=server", "-k", &path];
            case.kubectl.ok(&dry).await?;
            eprintln!(
                "NOT RUN: this cluster has no RuntimeClass kata-qemu; the API took the manifest"
            );
            return Ok(());
        }
        let _swap = Swap::on()?;
        apply(case, "kata").await?;
        case.sandbox_ready("kata").await?;
        let sooner = json!({ "metadata": { "annotations": { DOZE_AFTER: "10s" } } });
        case.patch("kata", sooner).await?;
        case.dozes("kata").await?;
        case.sh("kata", "main", "uname -r").await.map(drop)
    })
    .await
}

/// Go module with the definitions of the Prometheus operator's kinds, and its checksum.
const OPERATOR: &str = "github.com/prometheus-operator/prometheus-operator@v0.86.1";
const OPERATOR_SUM: &str = "h1:pHUuiRErcFb3nFDox7RxoxpEN0FyT24GtYOkr2GBu04=";

/// Downloads the definitions of the operator's kinds and returns their files.
async fn operator_definitions() -> anyhow::Result<Vec<String>> {
    let download = Command::new("go")
        .args(["mod", "download", "-json", OPERATOR])
        // The checksum is compared here.
        .envs([("GOSUMDB", "off"), ("GOWORK", "off")])
        .current_dir(std::env::temp_dir())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(wait::scaled(LIMIT), download).await??;
    let module: Value = serde_json::from_slice(&output.stdout).context(OPERATOR)?;
    ensure!(module["Sum"] == OPERATOR_SUM, "{OPERATOR}: {module}");
    let folder = module["Dir"].as_str().context("no folder of the module")?;
    let file = |kind| {
        format!("{folder}/example/prometheus-operator-crd/monitoring.coreos.com_{kind}.yaml")
    };
    Ok(vec![file("podmonitors"), file("prometheusrules")])
}

#[tokio::test]
async fn example_monitoring_is_taken_by_the_kinds_of_the_prometheus_operator() -> anyhow::Result<()>
{
    let definitions = operator_definitions().await?;
    case("ex-monitoring", async |case| {
        // The objects are of the installation's namespace; kubectl refuses another one.
        let kubectl = Kubectl {
            namespace: install::NAMESPACE.to_owned(),
            ..case.kubectl.clone()
        };
        let files: Vec<&str> = definitions.iter().flat_map(|file| ["-f", file]).collect();
        kubectl
            .ok(&[&["apply", "--server-side"], &files[..]].concat())
            .await?;
        let established = ["wait", "--for=condition=Established", "--timeout=30s"];
        kubectl.ok(&[&established[..], &files[..]].concat()).await?;
        let path = example("monitoring");
        let applied = async {
            kubectl.ok(&["apply", "-k", &path]).await?;
            let get = ["get", "-o", "name", "podmonitors,prometheusrules"];
            kubectl.ok(&get).await
        };
        let applied = applied.await;
        kubectl
            .ok(&["delete", "-k", &path, "--ignore-not-found"])
            .await?;
        kubectl.ok(&[&["delete"], &files[..]].concat()).await?;
        let applied = applied?;
        let monitors = applied
            .lines()
            .filter(|name| name.starts_with("podmonitor"));
        ensure!(monitors.count() == 3, "{applied}");
        ensure!(applied.contains("prometheusrule"), "{applied}");
        Ok(())
    })
    .await
}
