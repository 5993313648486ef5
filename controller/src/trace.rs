//! Spans of passes, exported by OTLP under upstream's names. A trace goes from the client over the claim to its Sandbox in the annotation [`annotations::TRACE_CONTEXT`], a W3C
//! carrier as JSON: each pass over an object continues the trace that the annotation names, and writes its own where there is none.
//!
//! Without `--enable-tracing` nobody listens to [`TARGET`]: its spans are never made, and the annotation is passed on as it is.

use std::collections::HashMap;

use kube::Resource;
use opentelemetry::{
    propagation::TextMapPropagator as _,
    trace::{TraceContextExt as _, TracerProvider as _},
};
use opentelemetry_otlp::ExporterBuildError;
use opentelemetry_sdk::{
    Resource as Origin, propagation::TraceContextPropagator, trace::SdkTracerProvider,
};
use torpor_api::annotations;
use tracing::{Span, field::Empty};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::{Layer, Registry, filter::filter_fn};

use crate::sandbox::plan::Area;

/// Target of the spans that are exported; the log leaves it out.
pub const TARGET: &str = "torpor_controller::spans";
/// Upstream's name of the service and of the tracer.
const SERVICE: &str = "agent-sandbox-controller";
/// More than any carrier that a propagator writes; what is longer is not read.
const LONGEST_CARRIER: usize = 2048;

/// Spans cannot be exported.
#[derive(Debug, thiserror::Error)]
#[error("--enable-tracing: no exporter of spans; look at the variables OTEL_EXPORTER_OTLP_*")]
pub struct StartError(#[from] ExporterBuildError);

/// Exports spans in the background.
#[derive(Debug)]
pub struct Exporter(SdkTracerProvider);

impl Exporter {
    /// Exports to where the variables `OTEL_EXPORTER_OTLP_*` say, `http://localhost:4317` without them. Needs a tokio runtime.
    pub fn start() -> Result<Self, StartError> {
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .build()?;
        Ok(Self::to(exporter))
    }

    /// Exports by `exporter`.
    pub fn to(exporter: opentelemetry_otlp::SpanExporter) -> Self {
        let origin = Origin::builder().with_service_name(SERVICE).build();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(origin);
        Self(provider.build())
    }

    /// Takes the spans in; a part of the process' subscriber.
    pub fn layer(&self) -> Box<dyn Layer<Registry> + Send + Sync> {
        tracing_opentelemetry::layer()
            .with_tracer(self.0.tracer(SERVICE))
            .with_filter(filter_fn(|of| of.is_span() && of.target() == TARGET))
            .boxed()
    }

    /// Sends what is left. What cannot be sent is lost, which the log says.
    pub fn end(self) {
        if let Err(error) = self.0.shutdown() {
            tracing::warn!(%error, "not all spans were exported");
        }
    }
}

/// The carrier that an object's annotation holds.
pub fn carried<K: Resource>(object: &K) -> Option<String> {
    let annotations = object.meta().annotations.as_ref()?;
    annotations.get(annotations::TRACE_CONTEXT).cloned()
}

/// The span of a pass over an object, in the trace that `parent` is asked for.
pub fn pass<K: Resource>(
    name: &'static str,
    object: &K,
    parent: impl FnOnce() -> Option<String>,
) -> Span {
    let span = tracing::info_span!(
        target: TARGET,
        "pass",
        otel.name = name,
        otel.status_code = Empty,
        otel.status_description = Empty,
        namespace = object.meta().namespace,
        object = object.meta().name,
    );
    if !span.is_disabled()
        && let Some(parent) = parent().as_deref().and_then(context_in)
    {
        // It fails only where nobody exports.
        let _ = span.set_parent(parent);
    }
    span
}

/// The span of the calls of one step of a pass over a Sandbox, under upstream's names where it has one.
pub fn step(area: Area) -> Span {
    let name = match area {
        Area::Claims => "reconcilePVCs",
        Area::Pod => "reconcilePod",
        Area::Service => "reconcileService",
    };
    tracing::info_span!(target: TARGET, "step", otel.name = name)
}

/// Says on a pass' span that it failed.
pub fn failed(span: &Span, why: &dyn std::fmt::Display) {
    if !span.is_disabled() {
        span.record("otel.status_code", "ERROR");
        span.record("otel.status_description", why.to_string());
    }
}

/// The carrier of the trace that the current span belongs to; `None` where nothing is exported.
pub fn carrier() -> Option<String> {
    let context = Span::current().context();
    if !context.span().span_context().is_valid() {
        return None;
    }
    let mut carrier = HashMap::new();
    TraceContextPropagator::new().inject_context(&context, &mut carrier);
    // Empty, and Go's propagator leaves it out.
    carrier.retain(|_, value: &mut String| !value.is_empty());
    serde_json::to_string(&carrier).ok()
}

/// What a carrier says. Anybody may have written it: what is no carrier is none.
fn context_in(carrier: &str) -> Option<opentelemetry::Context> {
    if carrier.len() > LONGEST_CARRIER {
        return None;
    }
    let carrier: HashMap<String, String> = serde_json::from_str(carrier).ok()?;
    let context = TraceContextPropagator::new().extract(&carrier);
    let known = context.span().span_context().is_valid();
    known.then_some(context)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(
        r#"{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}"#,
        true
    )]
    #[case(r#"{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01","tracestate":"a=b"}"#, true)]
    #[case(r#"{"traceparent":"00-no-trace-01"}"#, false)]
    #[case(
        r#"{"traceparent":"00-00000000000000000000000000000000-0000000000000000-01"}"#,
        false
    )]
    #[case(r#"{"traceparent":5}"#, false)]
    #[case("{}", false)]
    #[case("", false)]
    #[case("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", false)]
    fn only_a_carrier_is_read(#[case] text: &str, #[case] read: bool) {
        assert_eq!(context_in(text).is_some(), read);
    }

    #[test]
    fn a_carrier_that_is_too_long_is_not_read() {
        let long = format!(
            r#"{{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01","x":"{}"}}"#,
            "x".repeat(LONGEST_CARRIER)
        );
        assert!(context_in(&long).is_none());
    }

    #[test]
    fn there_is_no_carrier_where_nothing_is_exported() {
        let span = pass("ReconcileSandbox", &torpor_api::Sandbox::default(), || {
            panic!("nobody asks")
        });
        assert_eq!(span.in_scope(carrier), None);
    }
}
