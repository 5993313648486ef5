//! The router: requests reach a Sandbox by its name, and wake a Sandbox that allows it.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};
use torpor_api::annotations::HIBERNATE;
use torpor_api::install;
use torpor_tests::accounts::token;
use torpor_tests::case::{Case, START_LIMIT, case, condition};
use torpor_tests::http::{self, Request};
use torpor_tests::pods::{PYTHON, shell, with};
use torpor_tests::sandboxes::sandbox;
use torpor_tests::wait;

/// Program that answers with the number of its requests.
const COUNTING_SERVER: &str = "
import http.server
asked = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global asked
        asked += 1
        body = str(asked).encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(('', 8888), Handler).serve_forever()
";

fn server(annotations: Value) -> Value {
    let python = json!({ "image": PYTHON, "command": ["python3", "-c", COUNTING_SERVER] });
    let probe = json!({ "readinessProbe": { "tcpSocket": { "port": 8888 }, "periodSeconds": 1 } });
    let container = with(with(shell("a", ""), python), probe);
    let mut manifest = sandbox("s", json!({ "containers": [container] }));
    manifest["metadata"]["annotations"] = annotations;
    manifest
}

/// Sends a request to the Sandbox `s` through the router's Service; returns status and body.
async fn ask(case: &Case) -> anyhow::Result<(u16, String)> {
    ask_at(&case.router().await?, &case.namespace, None).await
}

/// Sends a request to a Sandbox `s` of this namespace through the router at this address.
async fn ask_at(
    address: &str,
    namespace: &str,
    token: Option<&str>,
) -> anyhow::Result<(u16, String)> {
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n"));
    let headers = format!(
        "X-Sandbox-ID: s\r\nX-Sandbox-Namespace: {namespace}\r\nX-Sandbox-Port: 8888\r\n{}",
        token.unwrap_or_default()
    );
    get(address, "/", &headers).await
}

/// Sends a request with these headers; returns status and body.
async fn get(address: &str, path: &str, headers: &str) -> anyhow::Result<(u16, String)> {
    let request = Request {
        headers,
        ..Request::get(path)
    };
    http::ask(address, 8080, request).await
}

/// Runs the body with the address of a router that has these arguments and is otherwise the
/// cluster's own.
async fn with_router(
    case: &Case,
    arguments: &[&str],
    body: impl AsyncFnOnce(&str) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let deployments: Api<Deployment> = Api::namespaced(case.client(), install::NAMESPACE);
    let own = deployments.get(install::ROUTER).await?;
    let mut spec = json!(own.spec.template.spec);
    spec["containers"][0]["args"] = json!(arguments);
    spec["topologySpreadConstraints"] = Value::Null;
    // The Pod has no label of the router's Service: no other requests come here.
    let name = format!("router-{}", case.namespace);
    let pod: Pod = serde_json::from_value(json!({
        "metadata": { "name": name, "labels": { "torpor.dev/e2e": "true" } }, "spec": spec,
    }))?;
    let pods: Api<Pod> = Api::namespaced(case.client(), install::NAMESPACE);
    pods.create(&PostParams::default(), &pod).await?;
    let words = "the router of the test is ready";
    let address = wait::object(pods.clone(), &name, words, START_LIMIT, |found| {
        let pod = found.ok_or("there is no such Pod")?;
        let (ready, ..) = condition(&pod, "Ready");
        let status = pod.status.as_ref();
        let address = status.and_then(|status| status.pod_ip.clone());
        let address = address.filter(|_| ready == "True");
        address.ok_or_else(|| format!("{status:?}"))
    })
    .await;
    let done = match address {
        Ok(address) => body(&address).await,
        Err(error) => Err(error),
    };
    let at_once = DeleteParams::default().grace_period(0);
    pods.delete(&name, &at_once).await?;
    done
}

#[tokio::test]
async fn a_closed_router_admits_only_clients_that_may_connect_to_the_sandbox() -> anyhow::Result<()>
{
    case("routershut", async |case| {
        case.create(server(json!({}))).await?;
        for name in ["client", "other"] {
            let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": name } });
            case.create(account).await?;
        }
        let granted = ["create", "rolebinding", "clients", "--clusterrole=sandbox-client"];
        let subject = format!("--serviceaccount={}:client", case.namespace);
        case.kubectl.ok(&[&granted[..], &[&subject]].concat()).await?;
        let of = async |account| token(case.client(), &case.namespace, account, None).await;
        let (client, other) = (of("client").await?, of("other").await?);
        case.sandbox_ready("s").await?;
        with_router(case, &["--authz-mode=subjectaccessreview"], async |router| {
            let ask = async |namespace: &str, token: Option<&str>| -> anyhow::Result<u16> {
                Ok(ask_at(router, namespace, token).await?.0)
            };
            let own = case.namespace.as_str();
            assert_eq!(ask(own, None).await?, 401);
            assert_eq!(ask(own, Some("invented")).await?, 401);
            assert_eq!(ask(own, Some(&other)).await?, 403);
            assert_eq!(ask("default", Some(&client)).await?, 403);
            let (status, body) = ask_at(router, own, Some(&client)).await?;
            assert_eq!((status, body.as_str()), (200, "1"), "no other request came through");
            Ok(())
        })
        .await
    })
    .await
}

#[tokio::test]
async fn a_request_reaches_a_sandbox_by_its_path() -> anyhow::Result<()> {
    case("routerpath", async |case| {
        case.create(server(json!({}))).await?;
        case.sandbox_ready("s").await?;
        let arguments = ["--authz-mode=allow-all", "--path-routing-prefix=/router"];
        with_router(case, &arguments, async |router| {
            let path = format!("/router/{}/s/8888/any/path", case.namespace);
            assert_eq!(get(router, &path, "").await?, (200, "1".to_owned()));
            let (status, body) = get(router, "/router/s/8888/", "").await?;
            assert_eq!(status, 400, "{body}");
            Ok(())
        })
        .await
    })
    .await
}

#[tokio::test]
async fn a_request_reaches_a_sandbox_by_its_name_and_resumes_it_with_its_memory()
-> anyhow::Result<()> {
    case("router", async |case| {
        let allowed = json!({ "torpor.dev/resume-on-request": "true" });
        case.create(server(allowed)).await?;
        case.sandbox_ready("s").await?;
        assert_eq!(ask(case).await?, (200, "1".to_owned()));
        assert_eq!(ask(case).await?, (200, "2".to_owned()));
        case.suspend("s").await?;
        assert_eq!(ask(case).await?, (200, "3".to_owned()));
        // The request's first packet wakes a sandbox that hibernates in place.
        let sleep = json!({ "metadata": { "annotations": { HIBERNATE: "true" } } });
        case.patch("s", sleep).await?;
        case.sandbox_has("s", "Hibernated", "True", "Hibernated")
            .await?;
        assert_eq!(ask(case).await?, (200, "4".to_owned()));
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_request_to_a_suspended_sandbox_that_it_may_not_resume_is_refused() -> anyhow::Result<()>
{
    case("routerno", async |case| {
        case.create(server(json!({}))).await?;
        case.sandbox_ready("s").await?;
        assert_eq!(ask(case).await?, (200, "1".to_owned()));
        case.suspend("s").await?;
        let (status, body) = ask(case).await?;
        assert!(status >= 400, "{status}: {body}");
        assert!(
            body.to_lowercase().contains("suspended"),
            "{status}: {body}"
        );
        case.resume("s").await?;
        assert_eq!(ask(case).await?, (200, "2".to_owned()));
        Ok(())
    })
    .await
}
