//! Hooks for a container's end: the sandbox runs them also if it sleeps when its Pod is deleted.

use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;
use torpor_tests::case::{Case, case};
use torpor_tests::counted::listen;
use torpor_tests::pods::{pod, python, with};
use torpor_tests::sandboxes::sandbox;
use torpor_tests::wait;

/// Time for a wake and the hook, on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// Program that serves HTTP on port 8080 and, when it is asked for /stop, sends its secret from
/// memory to HOST:PORT.
///
/// It ends on SIGTERM: as the first process of its container it would not otherwise, and its Pod
/// would use its whole grace period.
const SERVER: &str = "import http.server, os, signal, socket
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
secret = os.urandom(8).hex()
print(secret, flush=True)
def tell():
    with socket.create_connection((os.environ['HOST'], int(os.environ['PORT']))) as there:
        there.sendall(secret.encode())
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == '/stop': tell()
        self.send_response(200)
        self.send_header('Content-Length', '0')
        self.end_headers()
http.server.ThreadingHTTPServer(('', 8080), Handler).serve_forever()";

/// Returns the program's container, which is probed at the port that takes the hook.
fn server(name: &str, hook: Value, port: u16) -> Value {
    let host = json!({ "fieldRef": { "fieldPath": "status.hostIP" } });
    let get = json!({ "httpGet": { "path": "/", "port": 8080 }, "periodSeconds": 1, "timeoutSeconds": 5 });
    with(
        python(name, SERVER),
        json!({
            "env": [
                { "name": "PORT", "value": port.to_string() },
                { "name": "HOST", "valueFrom": host },
            ],
            "readinessProbe": get,
            "lifecycle": { "preStop": hook },
        }),
    )
}

fn by_http() -> Value {
    json!({ "httpGet": { "path": "/stop", "port": 8080 } })
}

fn by_command() -> Value {
    let ask = "import urllib.request; urllib.request.urlopen('http://localhost:8080/stop')";
    json!({ "exec": { "command": ["python3", "-c", ask] } })
}

/// Puts a Pod with the hook to sleep; returns the secret in its memory.
async fn sleeping(case: &Case, hook: Value, port: u16) -> anyhow::Result<String> {
    let containers = json!({ "containers": [server("a", hook, port)] });
    let grace = json!({ "spec": { "terminationGracePeriodSeconds": 25 } });
    case.start(with(pod("p", containers), grace)).await?;
    let secret = case.log("p", "a").await?;
    case.hibernate("p").await?;
    Ok(first_line(&secret).to_owned())
}

/// Returns the first line; after it the server logs each request.
fn first_line(logs: &str) -> &str {
    logs.lines().next().unwrap_or_default()
}

/// Returns the secret that a hook sends.
async fn told(listener: &TcpListener) -> anyhow::Result<String> {
    let told = async {
        let (mut stream, _) = listener.accept().await?;
        let mut said = String::new();
        stream.read_to_string(&mut said).await?;
        anyhow::Ok(said)
    };
    let told = tokio::time::timeout(wait::scaled(LIMIT), told).await;
    told.context("the hook has not been run")?
}

#[tokio::test]
async fn the_http_hook_of_a_pod_that_is_deleted_asleep_is_run_by_its_program() -> anyhow::Result<()>
{
    case("httphook", async |case| {
        let (listener, port) = listen().await?;
        let secret = sleeping(case, by_http(), port).await?;
        case.delete_pod_at_once("p").await?;
        anyhow::ensure!(told(&listener).await? == secret, "another life");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_command_hook_of_a_pod_that_is_deleted_asleep_is_run_in_it() -> anyhow::Result<()> {
    case("exechook", async |case| {
        let (listener, port) = listen().await?;
        let secret = sleeping(case, by_command(), port).await?;
        case.delete_pod_at_once("p").await?;
        anyhow::ensure!(told(&listener).await? == secret, "another life");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_hooks_of_a_suspended_sandbox_are_not_run() -> anyhow::Result<()> {
    for (name, hook) in [("httpsuspend", by_http()), ("execsuspend", by_command())] {
        case(name, async |case| {
            let (listener, port) = listen().await?;
            let containers = json!({ "containers": [server("a", hook, port)] });
            let grace = json!({ "terminationGracePeriodSeconds": 25 });
            case.create(sandbox("s", with(containers, grace))).await?;
            case.sandbox_ready("s").await?;
            let before = case.log("s", "a").await?;
            case.suspend("s").await?;
            let pod = case.resume("s").await?;
            // The secret comes from the program's memory; no hook has sent it before.
            let get = format!("http://{}:8080/stop", torpor_tests::witness::address(&pod)?);
            let ask = format!("import urllib.request; urllib.request.urlopen('{get}')");
            let command = ["python3", "-c", &ask];
            let asked = case.exec("s", "a", &command);
            let (told, asked) = tokio::join!(told(&listener), asked);
            asked?.ok()?;
            anyhow::ensure!(told? == first_line(&before), "another life");
            let no_more = tokio::time::timeout(Duration::from_secs(1), listener.accept()).await;
            anyhow::ensure!(no_more.is_err(), "the hook was run, too");
            Ok(())
        })
        .await?;
    }
    Ok(())
}
