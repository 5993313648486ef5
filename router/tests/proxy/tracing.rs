//! Export of spans over OTLP, in the client's trace, which continues in the sandbox.

use std::{future::Future, time::Duration};

use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use torpor_daemon::spans::Exporter;
use torpor_router::spans::{SERVICE, TARGET};
use torpor_test_monitoring::collector::{Collector, attribute, hex, number};
use tracing_subscriber::{layer::SubscriberExt, registry, util::SubscriberInitExt};

use crate::{
    backend::Backend,
    client::{nothing, request, send},
    world::{NS, World, until},
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// Runs a future and returns its result and all exported spans.
async fn traced<T>(what: impl Future<Output = T>) -> (T, Collector) {
    let collector = Collector::default();
    let exporter = SpanExporter::builder()
        .with_tonic()
        .with_endpoint(format!("http://{}", collector.start().await.unwrap()))
        .with_timeout(Duration::from_secs(20))
        .build()
        .unwrap();
    let exporter = Exporter::to(exporter, SERVICE);
    let guard = registry().with(exporter.layer(TARGET)).set_default();
    let done = what.await;
    drop(guard);
    tokio::task::spawn_blocking(move || exporter.end())
        .await
        .unwrap();
    (done, collector)
}

#[tokio::test(flavor = "current_thread")]
async fn a_request_is_a_span_of_the_clients_trace_which_goes_on_to_the_sandbox() {
    let (world, backend) = (World::new().await, Backend::echo().await);
    world.running("s", "127.0.0.1").await;
    let asked = async {
        let request = request("s", backend.port)
            .uri("/a?secret=1")
            .header("traceparent", format!("00-{TRACE}-{PARENT}-01"))
            .header("tracestate", "own=1");
        let answer = send(&world, request.body(nothing()).unwrap()).await;
        let ended = || world.metric("sandbox_router_inflight_requests") == 0;
        until("the request ends", ended).await;
        answer
    };
    let (answer, collector) = traced(asked).await;
    let received = collector.received();
    let spans = collector.named("HTTP GET");
    let [span] = spans.as_slice() else {
        panic!("{received:#?}");
    };
    assert!(received[0].0.contains("sandbox-router"), "{received:#?}");
    assert_eq!(hex(&span.trace_id), TRACE);
    assert_eq!(hex(&span.parent_span_id), PARENT);
    for (key, value) in [
        ("http.method", "GET"),
        ("http.target", "/a"),
        ("sandbox.id", "s"),
        ("sandbox.namespace", NS),
    ] {
        assert_eq!(attribute(span, key), Some(value));
    }
    assert_eq!(number(span, "http.status_code"), Some(200));
    let own = hex(&span.span_id);
    let parent = format!("traceparent: 00-{TRACE}-{own}-01\n");
    assert!(answer.body.contains(&parent), "{}", answer.body);
    assert!(
        answer.body.contains("tracestate: own=1\n"),
        "{}",
        answer.body
    );
}

#[tokio::test(flavor = "current_thread")]
async fn a_refusal_is_a_span_and_an_invalid_trace_is_replaced() {
    let world = World::new().await;
    let asked = async {
        let request = request("ghost", 1).header("traceparent", "00-none");
        let answer = send(&world, request.body(nothing()).unwrap()).await;
        let ended = || world.metric("sandbox_router_inflight_requests") == 0;
        until("the request ends", ended).await;
        answer
    };
    let (answer, collector) = traced(asked).await;
    assert_eq!(answer.status, 502);
    let spans = collector.named("HTTP GET");
    assert_eq!(spans.len(), 1, "{spans:#?}");
    assert_eq!(number(&spans[0], "http.status_code"), Some(502));
    assert_eq!(attribute(&spans[0], "sandbox.id"), Some("ghost"));
    assert!(spans[0].parent_span_id.is_empty());
}

#[tokio::test(flavor = "current_thread")]
async fn attributes_of_a_span_are_bounded_in_length() {
    let world = World::new().await;
    let path = format!("/a{}", "%C3%A4".repeat(1000));
    let method = "M".repeat(1000);
    let asked = async {
        let request = request("ghost", 1).method(&*method).uri(&path);
        let answer = send(&world, request.body(nothing()).unwrap()).await;
        let ended = || world.metric("sandbox_router_inflight_requests") == 0;
        until("the request ends", ended).await;
        answer
    };
    let (answer, collector) = traced(asked).await;
    assert_eq!(answer.status, 502);
    let spans = collector.named("HTTP other");
    assert_eq!(spans.len(), 1, "{spans:#?}");
    assert_eq!(attribute(&spans[0], "http.method"), Some("other"));
    assert_eq!(attribute(&spans[0], "http.target"), Some(&path[..1024]));
}

#[tokio::test(flavor = "current_thread")]
async fn without_an_exporter_the_clients_trace_passes_unchanged() {
    let (world, backend) = (World::new().await, Backend::echo().await);
    world.running("s", "127.0.0.1").await;
    let parent = format!("00-{TRACE}-{PARENT}-01");
    let request = request("s", backend.port).header("traceparent", &parent);
    let answer = send(&world, request.body(nothing()).unwrap()).await;
    assert!(answer.body.contains(&format!("traceparent: {parent}\n")));
}
