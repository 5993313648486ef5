//! The router: requests reach a Sandbox by its name, and wake one that may be woken so.

use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use torpor_api::annotations::HIBERNATE;
use torpor_tests::case::{Case, case};
use torpor_tests::pods::{PYTHON, shell, with};
use torpor_tests::sandboxes::sandbox;

/// Answers how often it was asked.
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

/// Status and body of a request to the Sandbox `s` through the router's Service.
async fn ask(case: &Case) -> anyhow::Result<(u16, String)> {
    let services: Api<Service> = Api::namespaced(case.client(), "agent-sandbox-system");
    let service = services.get("sandbox-router-svc").await?;
    let address = service.spec.and_then(|spec| spec.cluster_ip);
    let address = address.context("the router's Service has no address")?;
    let answer = async {
        let mut stream = TcpStream::connect((address.as_str(), 8080)).await?;
        let request = format!(
            "GET / HTTP/1.1\r\nHost: router\r\nX-Sandbox-ID: s\r\nX-Sandbox-Namespace: {}\r\nX-Sandbox-Port: 8888\r\n\
             Connection: close\r\n\r\n",
            case.namespace
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        anyhow::Ok(answer)
    };
    let answer = tokio::time::timeout(Duration::from_secs(60), answer);
    let answer = answer.await.context("no answer in time")??;
    let (head, body) = answer.split_once("\r\n\r\n").context("no head")?;
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    Ok((status, body.to_owned()))
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
        // In place, it is the request's first packet that wakes it.
        let sleep = json!({ "metadata": { "annotations": { HIBERNATE: "true" } } });
        case.patch("s", sleep).await?;
        case.sandbox_says("s", "Hibernated", "True", "Hibernated")
            .await?;
        assert_eq!(ask(case).await?, (200, "4".to_owned()));
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_request_to_a_suspended_sandbox_that_may_not_be_resumed_so_says_so() -> anyhow::Result<()>
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
