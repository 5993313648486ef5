//! Spans from the node's agent to a collector outside of the cluster.

use std::net::IpAddr;
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use serde_json::json;
use torpor_api::annotations::{HIBERNATE, TRACE_CONTEXT};
use torpor_api::conditions::HIBERNATED;
use torpor_api::reasons::hibernated;
use torpor_test_monitoring::collector::{Collector, attribute, hex};
use torpor_tests::agent::Agent;
use torpor_tests::case::case_alone;
use torpor_tests::pods::{shell, with};
use torpor_tests::sandboxes::sandbox;
use torpor_tests::wait;

/// Time for an export: notes of wakes and restores are read every 5 s.
const EXPORT_LIMIT: Duration = Duration::from_secs(40);
/// Trace and span that a client wrote on its Sandbox.
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SPAN: &str = "00f067aa0ba902b7";

#[tokio::test]
async fn spans_of_a_save_a_wake_and_a_resume_come_to_the_collector_as_parts_of_the_clients_trace()
-> anyhow::Result<()> {
    case_alone("tracing", async |case| {
        let carrier = json!({ "traceparent": format!("00-{TRACE}-{SPAN}-01") }).to_string();
        let idle = json!({ "containers": [shell("a", "sleep 1000000")] });
        let traced = json!({ "metadata": { "annotations": { TRACE_CONTEXT: carrier } } });
        case.create(with(sandbox("s", idle), traced)).await?;
        let pod = case.sandbox_ready("s").await?;
        let host = pod
            .status
            .as_ref()
            .and_then(|status| status.host_ip.clone());
        let host: IpAddr = host.context("the Pod's node has no address")?.parse()?;
        let collector = Collector::default();
        let endpoint = format!("http://{}", collector.start_at(host).await?);
        let span_of = async |name: &str, pod: &Pod| {
            wait::until("the span", EXPORT_LIMIT, async || {
                let of_pod = |span: &_| attribute(span, "k8s.pod.uid") == pod.uid().as_deref();
                let found = collector.named(name).into_iter().find(of_pod);
                Ok(found.ok_or_else(|| format!("no {name}: {:#?}", collector.received())))
            })
            .await
        };
        let to_collector = [
            ("TORPOR_ENABLE_TRACING", "true"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
            // Milliseconds; the default is 5 s.
            ("OTEL_BSP_SCHEDULE_DELAY", "500"),
        ];
        Agent::with_environment(case, &to_collector, async || {
            let wish = |value| json!({ "metadata": { "annotations": { HIBERNATE: value } } });
            case.patch("s", wish(json!("true"))).await?;
            case.sandbox_has("s", HIBERNATED, "True", hibernated::HIBERNATED)
                .await?;
            assert_eq!(case.sh("s", "a", "echo awake").await?, "awake");
            case.patch("s", wish(json!(null))).await?;
            let wake = span_of("WakeSandbox", &pod).await?;
            let ids = (hex(&wake.trace_id), hex(&wake.parent_span_id));
            assert_eq!(ids, (TRACE.to_owned(), SPAN.to_owned()));
            for (key, expected) in [
                ("cause", "Exec"),
                ("from", "Hibernated"),
                ("k8s.pod.name", "s"),
                ("k8s.namespace.name", case.namespace.as_str()),
            ] {
                assert_eq!(attribute(&wake, key), Some(expected), "{key}");
            }
            // The wake's stages follow each other below it, and the save's steps stand beside it.
            let all = collector.received();
            let below = all
                .iter()
                .filter(|(_, span)| span.parent_span_id == wake.span_id);
            let mut stages: Vec<_> = below.map(|(_, span)| span).collect();
            stages.sort_by_key(|stage| stage.start_time_unix_nano);
            assert_eq!(
                stages.first().map(|stage| stage.start_time_unix_nano),
                Some(wake.start_time_unix_nano)
            );
            assert_eq!(
                stages.last().map(|stage| stage.end_time_unix_nano),
                Some(wake.end_time_unix_nano)
            );
            assert!(
                stages.iter().any(|stage| stage.name == "restored"),
                "{stages:#?}"
            );
            for step in ["Checkpoint", "Commit", "End"] {
                let mut spans = collector.named(step).into_iter();
                let own = spans.find(|span| hex(&span.trace_id) == TRACE);
                let own = own.with_context(|| format!("no span of {step}: {all:#?}"))?;
                assert_eq!(hex(&own.parent_span_id), SPAN, "{step}");
                assert!(
                    own.end_time_unix_nano <= wake.start_time_unix_nano,
                    "{step} after the wake"
                );
            }
            // The image was saved in another Pod: the span of the restore names the new one.
            case.suspend("s").await?;
            let resumed = case.resume("s").await?;
            let restore = span_of("RestoreSandbox", &resumed).await?;
            let ids = (hex(&restore.trace_id), hex(&restore.parent_span_id));
            assert_eq!(ids, (TRACE.to_owned(), SPAN.to_owned()));
            let image = attribute(&restore, "image").unwrap_or_default();
            assert!(
                pod.uid().is_some_and(|saved| image.starts_with(&saved)),
                "{image} is none of the first Pod's"
            );
            let all = collector.received();
            let mut below = all
                .iter()
                .filter(|(_, span)| span.parent_span_id == restore.span_id);
            assert!(below.any(|(_, span)| span.name == "restored"), "{all:#?}");
            let mut services = all.iter().map(|(service, _)| service);
            assert!(
                services.all(|service| service.contains("torpor-agent")),
                "{all:#?}"
            );
            Ok(())
        })
        .await
    })
    .await
}
