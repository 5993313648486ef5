//! Tests of tracing: spans of passes reach a collector over OTLP, and a claim's trace reaches its
//! Sandbox and the collector.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use torpor_controller::{
    run,
    trace::{self, SERVICE, TARGET},
};
use torpor_daemon::spans::Exporter;
use torpor_test_monitoring::collector::{Collector, hex};
use tracing_subscriber::{layer::SubscriberExt, registry, util::SubscriberInitExt};

use crate::{
    apiserver::{Apiserver, Fault, FaultAnswer},
    cluster::{Cluster, ready_at},
    objects::{NS, sandbox, torpor_sandbox},
    world::World,
};

const ANNOTATION: &str = "opentelemetry.io/trace-context";

/// Returns the ids of trace and span in a carrier.
fn named_by(carrier: &Value) -> (String, String) {
    let carrier: BTreeMap<String, String> =
        serde_json::from_str(carrier.as_str().expect("there is a carrier")).unwrap();
    let parts: Vec<&str> = carrier["traceparent"].split('-').collect();
    (parts[1].to_owned(), parts[2].to_owned())
}

/// Runs a controller with exported spans on a cluster until `done`, and returns all spans.
async fn traced(cluster: &Cluster, what: &str, done: impl Fn(&Apiserver) -> bool) -> Collector {
    let collector = Collector::default();
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(format!("http://{}", collector.start().await.unwrap()))
        .with_timeout(Duration::from_secs(20))
        .build()
        .unwrap();
    let exporter = Exporter::to(exporter, SERVICE);
    let _guard = registry().with(exporter.layer(TARGET)).set_default();
    let stop = CancellationToken::new();
    let work = tokio::spawn(run::run(Arc::clone(&cluster.context), stop.clone()));
    cluster.api.until(what, done).await;
    stop.cancel();
    work.await.unwrap();
    tokio::task::spawn_blocking(move || exporter.end())
        .await
        .unwrap();
    collector
}

fn is_ready(object: &Value) -> bool {
    crate::cluster::condition_of(object, "Ready").is_some_and(|ready| ready.0 == "True")
}

/// Returns a cluster with a template and an empty pool, so that a claim gets a Sandbox of its own.
fn cluster() -> Cluster {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.pool(0, json!({}));
    cluster
}

/// Starts the claim's Pod, as a kubelet does, and reports whether the claim is Ready and annotated.
fn served(api: &Apiserver) -> bool {
    let pod = api.get("pods", NS, "c");
    if pod.is_some_and(|pod| pod["status"]["phase"] == "Pending") {
        api.edit("pods", NS, "c", &ready_at(1));
    }
    api.get("sandboxclaims", NS, "c").is_some_and(|claim| {
        is_ready(&claim)
            && claim["metadata"]["annotations"]["agents.x-k8s.io/claim-first-ready-at"].is_string()
    })
}

#[tokio::test(flavor = "current_thread")]
async fn a_clients_trace_passes_from_its_claim_to_the_sandbox_and_the_collector() {
    let cluster = cluster();
    let carrier = r#"{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}"#;
    cluster.claim(
        "c",
        json!({"metadata": {"annotations": {ANNOTATION: carrier}}}),
    );
    let collector = traced(&cluster, "the claim is served", served).await;
    let sandbox = cluster.get_sandbox("c");
    assert_eq!(sandbox["metadata"]["annotations"][ANNOTATION], carrier);
    for name in ["ReconcileSandboxClaim", "ReconcileSandbox"] {
        let spans = collector.named(name);
        assert!(
            !spans.is_empty(),
            "no {name} in {:#?}",
            collector.received()
        );
        for span in spans {
            assert_eq!(hex(&span.trace_id), "4bf92f3577b34da6a3ce929d0e0e4736");
            assert_eq!(hex(&span.parent_span_id), "00f067aa0ba902b7");
        }
    }
    // The steps of a pass are its child spans.
    let passes: Vec<_> = collector.named("ReconcileSandbox");
    let steps = collector.named("reconcilePod");
    assert!(!steps.is_empty());
    for step in steps {
        assert!(
            passes
                .iter()
                .any(|pass| pass.span_id == step.parent_span_id)
        );
    }
    let received = collector.received();
    assert!(
        received
            .iter()
            .all(|(service, _)| service.contains("agent-sandbox-controller"))
    );
}

#[tokio::test(flavor = "current_thread")]
async fn a_claim_without_a_trace_gets_one_that_its_sandbox_shares() {
    let cluster = cluster();
    cluster.claim("c", json!({}));
    let collector = traced(&cluster, "the claim is served", served).await;
    let claim = &cluster.get_claim("c")["metadata"]["annotations"][ANNOTATION];
    let sandbox = &cluster.get_sandbox("c")["metadata"]["annotations"][ANNOTATION];
    assert_eq!(claim, sandbox);
    // The carrier names the claim's first pass, which has no parent; all other spans belong to it.
    let (trace, first) = named_by(claim);
    let passes = collector.named("ReconcileSandboxClaim");
    let root = passes.iter().find(|span| hex(&span.span_id) == first);
    assert!(
        root.expect("the first pass was exported")
            .parent_span_id
            .is_empty()
    );
    for span in passes.iter().chain(&collector.named("ReconcileSandbox")) {
        assert_eq!(hex(&span.trace_id), trace, "{span:#?}");
    }
}

#[tokio::test(flavor = "current_thread")]
async fn a_failed_pass_sets_an_error_on_its_span() {
    let cluster = cluster();
    cluster.api.fail(Fault {
        verb: "create",
        kind: "pods",
        answer: FaultAnswer::Refuse(403),
    });
    let bare = json!({
        "metadata": {"name": "c", "namespace": NS},
        "spec": {"podTemplate": {"spec": {"containers": [{"name": "c", "image": "img"}]}}},
    });
    cluster.api.create("sandboxes", bare);
    let there = |api: &Apiserver| api.get("pods", NS, "c").is_some();
    let collector = traced(&cluster, "the Pod is there", there).await;
    let failed: Vec<_> = collector
        .named("ReconcileSandbox")
        .into_iter()
        .filter_map(|span| span.status)
        .filter(|status| status.code == StatusCode::Error as i32)
        .collect();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert!(!failed[0].message.is_empty());
}

#[tokio::test(flavor = "current_thread")]
async fn without_an_exporter_no_trace_annotation_is_written() {
    let cluster = cluster();
    cluster.claim("c", json!({}));
    let stop = CancellationToken::new();
    let work = tokio::spawn(run::run(Arc::clone(&cluster.context), stop.clone()));
    cluster.api.until("the claim is served", served).await;
    stop.cancel();
    work.await.unwrap();
    for object in [cluster.get_claim("c"), cluster.get_sandbox("c")] {
        assert!(object["metadata"]["annotations"][ANNOTATION].is_null());
    }
    assert!(trace::carrier().is_none());
}

#[tokio::test]
async fn only_a_pod_with_a_runtime_class_gets_its_sandboxs_trace() {
    let carrier = r#"{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}"#;
    let traced = |carrier: &str| json!({"metadata": {"annotations": {ANNOTATION: carrier}}});
    let pod_trace = |world: &World| {
        let pod = world.pod().expect("there is a Pod");
        assert_eq!(pod["metadata"]["annotations"].get(ANNOTATION), None);
        pod["metadata"]["annotations"]["torpor.dev/trace-context"].clone()
    };
    let world = World::new();
    world.ready(torpor_sandbox(traced(carrier))).await;
    assert_eq!(pod_trace(&world), carrier);
    // A claim that takes the Sandbox changes its trace.
    let another = carrier.replace("4bf9", "5bf9");
    world.edit_sandbox(&traced(&another));
    world.settle().await;
    assert_eq!(pod_trace(&world), json!(another));
    // No propagator writes such a value.
    world.edit_sandbox(&traced(&"x".repeat(3000)));
    world.settle().await;
    assert_eq!(pod_trace(&world), Value::Null);

    let plain = World::new();
    plain.ready(sandbox(traced(carrier))).await;
    assert_eq!(pod_trace(&plain), Value::Null);
}
