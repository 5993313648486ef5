//! The kubelet's probes of a Pod that sleeps: they are answered for it, and wake nothing.

use std::time::{Duration, Instant};

use anyhow::ensure;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use torpor_api::annotations::DOZE_AFTER;
use torpor_tests::case::{Case, case, uid};
use torpor_tests::pods::{pod, python, with};
use torpor_tests::sleep::{is_ready, restarts};
use torpor_tests::swap::Swap;
use torpor_tests::wait;
use torpor_tests::witness::{self, Connection};

/// Time to fall asleep and to wake once.
const LIMIT: Duration = Duration::from_secs(90);

/// Returns the probe with the kubelet's usual period, and a limit that a busy machine keeps.
///
/// Answers that take a hundredth of a processor keep a sandbox awake. A Python program on a busy
/// machine needs that for an answer in every few seconds.
fn probed(probe: serde_json::Value) -> serde_json::Value {
    let once = json!({ "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 1 });
    with(probe, once)
}

/// Returns a Pod with probes by HTTP, TCP and exec, one of them at the witness's port.
fn probed_pod() -> serde_json::Value {
    let server = "import http.server as h; \
                  h.HTTPServer(('', 8081), h.SimpleHTTPRequestHandler).serve_forever()";
    let web = with(
        python("web", server),
        json!({
            "startupProbe": { "tcpSocket": { "port": 8081 }, "periodSeconds": 1, "failureThreshold": 60 },
            "readinessProbe": probed(json!({ "httpGet": { "path": "/", "port": 8081 } })),
            "livenessProbe": probed(json!({ "tcpSocket": { "port": 8081 } })),
        }),
    );
    let witness = with(
        witness::container(5, &[]),
        json!({
            "readinessProbe": probed(json!({ "tcpSocket": { "port": witness::PORT } })),
            "livenessProbe": probed(json!({ "exec": { "command": ["true"] } })),
        }),
    );
    pod("p", json!({ "containers": [web, witness] }))
}

/// Program that answers every call of an HTTP/2 connection as a server of grpc.health.v1 that is
/// SERVING.
///
/// The kubelet's own client decides whether the answers are valid.
const HEALTH: &str = r"import socketserver
def frame(kind, flags, stream, payload):
    return len(payload).to_bytes(3, 'big') + bytes([kind, flags]) + stream + payload
class Health(socketserver.StreamRequestHandler):
    def handle(self):
        self.rfile.read(24)
        self.wfile.write(frame(4, 0, bytes(4), b''))
        while head := self.rfile.read(9):
            payload = self.rfile.read(int.from_bytes(head[:3], 'big'))
            kind, flags, stream = head[3], head[4], head[5:]
            if kind in (4, 6) and not flags & 1:
                self.wfile.write(frame(kind, 1, stream, payload if kind == 6 else b''))
            if kind in (0, 1) and flags & 1:
                self.wfile.write(
                    frame(1, 4, stream, b'\x88\x0f\x10\x10application/grpc')
                    + frame(0, 0, stream, bytes([0, 0, 0, 0, 2, 8, 1]))
                    + frame(1, 5, stream, b'\x00\x0bgrpc-status\x010'))
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
Server(('', 9000), Health).serve_forever()";

/// Returns a Pod with a program that is probed over gRPC, beside the witness, which is not probed.
fn pod_probed_over_grpc() -> serde_json::Value {
    let check = json!({ "grpc": { "port": 9000 } });
    let patient = json!({ "periodSeconds": 1, "failureThreshold": 60 });
    let health = with(
        python("health", HEALTH),
        json!({
            "startupProbe": with(check.clone(), patient),
            "readinessProbe": probed(check.clone()),
            "livenessProbe": probed(check),
        }),
    );
    pod(
        "p",
        json!({ "containers": [health, witness::container(5, &[])] }),
    )
}

/// Program that serves HTTPS with the certificate in its environment.
const SECURE: &str = "import http.server as h, os, ssl
with open('/server.pem', 'w') as file:
    file.write(os.environ['PEM'])
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain('/server.pem')
server = h.HTTPServer(('', 8443), h.SimpleHTTPRequestHandler)
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()";

/// Returns a Pod with a program that is probed over HTTPS, beside the witness, which is not probed.
fn pod_probed_over_https() -> serde_json::Value {
    let get = json!({ "httpGet": { "path": "/", "port": 8443, "scheme": "HTTPS" } });
    let patient = json!({ "periodSeconds": 1, "failureThreshold": 60 });
    let web = with(
        python("web", SECURE),
        json!({
            "env": [{ "name": "PEM", "value": include_str!("https.pem") }],
            "startupProbe": with(get.clone(), patient),
            "readinessProbe": probed(get),
            "livenessProbe": probed(json!({ "tcpSocket": { "port": 8443 } })),
        }),
    );
    pod(
        "p",
        json!({ "containers": [web, witness::container(5, &[])] }),
    )
}

/// Time in which each probe of [`probed`] comes at least twice.
const PROBED: Duration = Duration::from_secs(21);

/// Checks that the Pod sleeps for that time, and that no probe fails in it: one failure makes the
/// Pod unready or restarts a container.
async fn sleeps_on(
    case: &Case,
    uid: &str,
    long: Duration,
    sleeps: impl Fn() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let end = Instant::now() + long;
    let asleep = async {
        while Instant::now() < end {
            ensure!(
                sleeps()?,
                "a probe has woken the Pod: {}",
                case.node.ledger_words(uid)
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        anyhow::Ok(())
    };
    let well = |pod: &Pod| is_ready(pod) && restarts(pod) == 0;
    let well = case.pod_stays("p", "ready, as its probes say", long, well);
    tokio::try_join!(asleep, well).map(drop)
}

async fn hibernates_on(case: &Case, probed: serde_json::Value) -> anyhow::Result<()> {
    let pod = case.start(probed).await?;
    let before = witness::ask(&pod).await?;
    let uid = uid(&case.hibernate("p").await?);
    let asleep = case.node.ledger_seq(&uid)?;
    sleeps_on(case, &uid, PROBED, || {
        Ok(case.node.ledger_seq(&uid)? == asleep)
    })
    .await?;
    // Any other connection wakes the Pod, also one to a probed port.
    let after = Connection::open(&pod).await?.ask().await?;
    after.goes_on_from(&before)?;
    ensure!(case.node.ledger_seq(&uid)? > asleep, "not woken");
    Ok(())
}

async fn dozes_on(case: &Case, probed: serde_json::Value) -> anyhow::Result<()> {
    let idle = json!({ "metadata": { "annotations": { DOZE_AFTER: "3s" } } });
    let pod = case.start(with(probed, idle)).await?;
    let before = witness::ask(&pod).await?;
    let uid = uid(&pod);
    let dozes = || case.node.dozes(&uid);
    wait::until("it dozes", LIMIT, async || {
        wait::holds(dozes()?, || "awake".to_owned())
    })
    .await?;
    sleeps_on(case, &uid, PROBED, dozes).await?;
    let stopped = case.node.sentry(&uid)?.is_stopped();
    ensure!(stopped, "a probe has let its processes go on");
    let after = Connection::open(&pod).await?.ask().await?;
    after.goes_on_from(&before)
}

#[tokio::test]
async fn probes_neither_wake_a_hibernated_pod_nor_fail() -> anyhow::Result<()> {
    case("probes", async |case| {
        hibernates_on(case, probed_pod()).await
    })
    .await
}

#[tokio::test]
async fn probes_neither_wake_a_dozing_pod_nor_fail() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("dozeprobes", async |case| {
        dozes_on(case, probed_pod()).await
    })
    .await
}

#[tokio::test]
async fn https_probes_neither_wake_a_hibernated_pod_nor_fail() -> anyhow::Result<()> {
    case("httpsprobes", async |case| {
        hibernates_on(case, pod_probed_over_https()).await
    })
    .await
}

#[tokio::test]
async fn grpc_probes_neither_wake_a_hibernated_pod_nor_fail() -> anyhow::Result<()> {
    case("grpcprobes", async |case| {
        hibernates_on(case, pod_probed_over_grpc()).await?;
        // The woken program answers the probes by itself again.
        let awake = case.wake("p").await?;
        ensure!(restarts(&awake) == 0, "a probe has failed");
        sleeps_on(case, &uid(&awake), PROBED, || Ok(true)).await
    })
    .await
}

#[tokio::test]
async fn grpc_probes_neither_wake_a_dozing_pod_nor_fail() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("dozegrpc", async |case| {
        dozes_on(case, pod_probed_over_grpc()).await
    })
    .await
}

/// Program that answers each probe after most of a second, in which it sends nothing.
const SLOW_PROBE: &str = "import http.server as h, time
class Server(h.BaseHTTPRequestHandler):
    def do_GET(self):
        time.sleep(0.6)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *words):
        pass
h.ThreadingHTTPServer(('', 8090), Server).serve_forever()";

/// A probe is under way for three tenths of all time, so that most runs of four dozes meet one.
#[tokio::test]
async fn a_probe_that_is_answered_slowly_is_not_cut_off_by_a_doze() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("dozeslow", async |case| {
        let get = json!({ "httpGet": { "port": 8090 } });
        // A busy machine delays an answer; a probe that was cut off has none.
        let once = json!({ "periodSeconds": 2, "timeoutSeconds": 4, "failureThreshold": 1 });
        let patient = json!({ "periodSeconds": 2, "timeoutSeconds": 4, "failureThreshold": 60 });
        let slow = with(
            python("slow", SLOW_PROBE),
            json!({
                "startupProbe": with(get.clone(), patient),
                "livenessProbe": with(get, once),
            }),
        );
        let containers = json!({ "containers": [slow, witness::container(5, &[])] });
        let idle = json!({ "metadata": { "annotations": { DOZE_AFTER: "2s" } } });
        let pod = case.start(with(pod("p", containers), idle)).await?;
        let uid = uid(&pod);
        for _ in 0..4 {
            let dozes = || case.node.dozes(&uid);
            wait::until("it dozes", LIMIT, async || {
                wait::holds(dozes()?, || "awake".to_owned())
            })
            .await?;
            // Longer than a probe waits that was cut off.
            sleeps_on(case, &uid, Duration::from_secs(5), dozes).await?;
            Connection::open(&pod).await?.ask().await?;
        }
        let restarts = restarts(&case.pods().get("p").await?);
        ensure!(restarts == 0, "a probe has failed");
        Ok(())
    })
    .await
}
