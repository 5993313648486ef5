//! Spans of the agent's steps, and of wakes and restores by other processes.
//!
//! Shims wake and restore sandboxes without the agent, and leave a note with the time of each stage
//! (`wake.json`, `restore.json`). The agent makes the spans from this note afterwards. A
//! wake itself therefore does no work for spans, whether they are exported or not.
//!
//! A span belongs to the trace of the Pod's Sandbox, which the controller writes into an annotation
//! of the Pod. Without the annotation each span is a trace of its own.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use opentelemetry::trace::{Span as _, SpanBuilder, Status, TraceContextExt as _, Tracer as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::SdkTracer;
use torpor_api::annotations;
use torpor_core::ids::PodUid;
use torpor_core::steps::{Outcome, StepKind};
use torpor_daemon::spans::{LONGEST_CARRIER, context_in};
use torpor_records::{PodRecord, RestoreNote, WakeNote};

/// Name of the service in the exported spans.
pub(crate) const SERVICE: &str = "torpor-agent";
/// Name of the span of a wake in place. The spans of its stages are its children.
const WAKE: &str = "WakeSandbox";
/// Name of the span of a restore that is no wake in place: a new Pod continues from the memory of
/// another Pod. The spans of its stages are its children.
const RESTORE: &str = "RestoreSandbox";

/// The export of spans.
#[derive(Debug, Default)]
pub(crate) struct Spans {
    /// None: the agent exports no spans.
    tracer: Option<SdkTracer>,
    /// Trace contexts of the Sandboxes of this node's Pods, from the Pods' annotations.
    carriers: Mutex<HashMap<PodUid, String>>,
}

impl Spans {
    pub(crate) fn new(tracer: Option<SdkTracer>) -> Self {
        Self {
            tracer,
            carriers: Mutex::default(),
        }
    }

    /// Keeps the trace context of a Pod's annotation for the Pod's later spans. Removes the context
    /// if there is no Pod or no annotation.
    pub(crate) fn note(&self, uid: &PodUid, pod: Option<&Pod>) {
        if self.tracer.is_none() {
            return;
        }
        let carrier = pod
            .and_then(|pod| pod.annotations().get(annotations::POD_TRACE_CONTEXT))
            .filter(|carrier| carrier.len() <= LONGEST_CARRIER);
        let mut carriers = self.carriers.lock().unwrap_or_else(PoisonError::into_inner);
        match carrier {
            Some(carrier) if carriers.get(uid) == Some(carrier) => {}
            Some(carrier) => drop(carriers.insert(uid.clone(), carrier.clone())),
            None => drop(carriers.remove(uid)),
        }
    }

    fn parent(&self, uid: &PodUid) -> Context {
        let carriers = self.carriers.lock().unwrap_or_else(PoisonError::into_inner);
        let carrier = carriers.get(uid);
        carrier
            .and_then(|carrier| context_in(carrier))
            .unwrap_or_default()
    }

    /// Exports the span of a wake that ended at `at`. `stages` has the stages in their order, each
    /// with its duration.
    pub(crate) fn woke(
        &self,
        pod: &PodRecord,
        note: &WakeNote,
        at: SystemTime,
        stages: &[(String, Duration)],
    ) {
        let own = [
            KeyValue::new("cause", note.cause.as_str()),
            KeyValue::new("from", format!("{:?}", note.from)),
        ];
        self.export(WAKE, pod, own, at, stages);
    }

    /// Exports the span of a restore by a container's start, which ended at `at`. `stages` has the
    /// stages in their order, each with its duration.
    pub(crate) fn restored(
        &self,
        pod: &PodRecord,
        note: &RestoreNote,
        at: SystemTime,
        stages: &[(String, Duration)],
    ) {
        let own = [KeyValue::new("image", note.image.to_string())];
        self.export(RESTORE, pod, own, at, stages);
    }

    /// Exports a span that ended at `at`, with the attributes `own` and those of its Pod, and one
    /// child span for each stage.
    fn export(
        &self,
        name: &'static str,
        pod: &PodRecord,
        own: impl IntoIterator<Item = KeyValue>,
        at: SystemTime,
        stages: &[(String, Duration)],
    ) {
        let Some(tracer) = &self.tracer else { return };
        let whole = stages.iter().map(|(_, took)| *took).sum();
        let Some(began) = at.checked_sub(whole) else {
            return;
        };
        let of_pod = [
            KeyValue::new("k8s.namespace.name", pod.namespace.to_string()),
            KeyValue::new("k8s.pod.name", pod.name.clone()),
            KeyValue::new("k8s.pod.uid", pod.pod_uid.to_string()),
        ];
        let parent = self.parent(&pod.pod_uid);
        let span = SpanBuilder::from_name(name)
            .with_start_time(began)
            .with_attributes(own.into_iter().chain(of_pod));
        let span = tracer.build_with_context(span, &parent);
        let below = parent.with_span(span);
        let mut begin = began;
        for (stage, took) in stages {
            let span = SpanBuilder::from_name(stage.clone()).with_start_time(begin);
            begin += *took;
            tracer
                .build_with_context(span, &below)
                .end_with_timestamp(begin);
        }
        below.span().end_with_timestamp(at);
    }

    /// Exports the span of a step that has just ended.
    pub(crate) fn stepped(&self, uid: &PodUid, kind: StepKind, outcome: &Outcome, took: Duration) {
        let Some(tracer) = &self.tracer else { return };
        let now = SystemTime::now();
        let Some(began) = now.checked_sub(took) else {
            return;
        };
        let step = SpanBuilder::from_name(format!("{kind:?}"))
            .with_start_time(began)
            .with_attributes([KeyValue::new("k8s.pod.uid", uid.to_string())]);
        let mut step = tracer.build_with_context(step, &self.parent(uid));
        if let Outcome::Failed { message, .. } | Outcome::Unknown { message } = outcome {
            step.set_status(Status::error(message.clone()));
        }
        step.end_with_timestamp(now);
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry_otlp::{SpanExporter, WithExportConfig};
    use serde_json::json;
    use torpor_core::ids::ImageId;
    use torpor_daemon::spans::Exporter;
    use torpor_records::Addresses;
    use torpor_records::{Depth, WakeCause};
    use torpor_test_monitoring::collector::{Collector, attribute, hex};

    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    fn record() -> PodRecord {
        serde_json::from_value(json!({
            "sandbox": "a".repeat(64), "pod_uid": "pod-a", "namespace": "n", "name": "p",
            "runsc": "/runsc", "runsc_digest": "", "network_namespace": null,
            "addresses": Addresses::default(), "cgroup": "c", "volumes": [], "cold_start_on_failure": false,
        }))
        .expect("a record")
    }

    fn pod(carrier: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": { "annotations": { "torpor.dev/trace-context": carrier } },
        }))
        .expect("a Pod")
    }

    fn wake() -> WakeNote {
        let ends = [("prepared", 10_000), ("restored", 90_000)];
        WakeNote {
            cause: WakeCause::Packet,
            from: Depth::Hibernated,
            stages_end_micros: ends.map(|(stage, end)| (stage.to_owned(), end)).into(),
        }
    }

    fn stages() -> [(String, Duration); 2] {
        [("prepared", 10), ("restored", 80)]
            .map(|(stage, millis)| (stage.to_owned(), Duration::from_millis(millis)))
    }

    /// Runs `export`, and returns the collector that has received its spans.
    async fn exported(export: impl FnOnce(&Spans)) -> Collector {
        let collector = Collector::default();
        let address = collector.start().await.expect("a port");
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(format!("http://{address}"))
            .with_timeout(Duration::from_secs(20))
            .build()
            .expect("an exporter");
        let exporter = Exporter::to(exporter, SERVICE);
        export(&Spans::new(Some(exporter.tracer())));
        tokio::task::spawn_blocking(move || exporter.end())
            .await
            .expect("exported");
        collector
    }

    #[tokio::test]
    async fn a_wake_is_a_span_of_its_sandboxs_trace_with_its_stages_below_it() {
        let record = record();
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        let collector = exported(|spans| {
            let carrier = format!(r#"{{"traceparent":"00-{TRACE}-00f067aa0ba902b7-01"}}"#);
            spans.note(&record.pod_uid, Some(&pod(&carrier)));
            spans.woke(&record, &wake(), at, &stages());
        })
        .await;
        let wakes = collector.named(WAKE);
        assert_eq!(wakes.len(), 1, "{:#?}", collector.received());
        let wake = &wakes[0];
        assert_eq!(
            (hex(&wake.trace_id), hex(&wake.parent_span_id)),
            (TRACE.to_owned(), "00f067aa0ba902b7".to_owned())
        );
        let second = 1_000_000_000;
        assert_eq!(wake.end_time_unix_nano, 1_000 * second);
        assert_eq!(
            wake.end_time_unix_nano - wake.start_time_unix_nano,
            90_000_000
        );
        // The stages follow one another, from the beginning of the wake to its end.
        let mut begin = wake.start_time_unix_nano;
        for (stage, took) in stages() {
            let below = collector.named(&stage);
            assert_eq!(below[0].parent_span_id, wake.span_id);
            assert_eq!(below[0].start_time_unix_nano, begin);
            begin = below[0].end_time_unix_nano;
            assert_eq!(
                u128::from(begin - below[0].start_time_unix_nano),
                took.as_nanos()
            );
        }
        assert_eq!(begin, wake.end_time_unix_nano);
        let received = collector.received();
        assert!(
            received
                .iter()
                .all(|(service, _)| service.contains(SERVICE))
        );
    }

    #[tokio::test]
    async fn a_restore_is_a_span_of_its_sandboxs_trace_with_its_stages_below_it() {
        let record = record();
        let note = RestoreNote {
            image: ImageId::parse("pod-b.1").expect("an image's name"),
            stages_end_micros: wake().stages_end_micros,
        };
        let collector = exported(|spans| {
            let carrier = format!(r#"{{"traceparent":"00-{TRACE}-00f067aa0ba902b7-01"}}"#);
            spans.note(&record.pod_uid, Some(&pod(&carrier)));
            spans.restored(&record, &note, SystemTime::now(), &stages());
        })
        .await;
        let restores = collector.named(RESTORE);
        assert_eq!(restores.len(), 1, "{:#?}", collector.received());
        let restore = &restores[0];
        assert_eq!(hex(&restore.trace_id), TRACE);
        assert_eq!(attribute(restore, "image"), Some("pod-b.1"));
        assert_eq!(attribute(restore, "k8s.pod.uid"), Some("pod-a"));
        for (stage, _) in stages() {
            let below = collector.named(&stage);
            assert_eq!(below[0].parent_span_id, restore.span_id, "{stage}");
        }
    }

    #[tokio::test]
    async fn a_failed_steps_span_has_the_reason_and_an_invalid_carrier_begins_a_trace() {
        let uid = record().pod_uid;
        let collector = exported(|spans| {
            spans.note(&uid, Some(&pod("none")));
            let failed = Outcome::Failed {
                reason: "DiskFull".to_owned(),
                message: "no room".to_owned(),
            };
            spans.stepped(&uid, StepKind::Commit, &failed, Duration::from_millis(5));
            spans.stepped(&uid, StepKind::Pause, &Outcome::Done, Duration::ZERO);
        })
        .await;
        let failed = &collector.named("Commit")[0];
        assert!(failed.parent_span_id.is_empty());
        let status = failed.status.as_ref();
        assert_eq!(
            status.map(|status| status.message.as_str()),
            Some("no room")
        );
        let done = &collector.named("Pause")[0];
        assert!(done.status.as_ref().is_none_or(|status| status.code == 0));
    }

    #[test]
    fn without_an_exporter_no_carrier_is_remembered() {
        let spans = Spans::default();
        spans.note(&record().pod_uid, Some(&pod("{}")));
        assert!(spans.carriers.lock().expect("nobody panicked").is_empty());
    }
}
