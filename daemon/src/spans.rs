//! Export of spans by OTLP over gRPC, and the W3C carrier that takes a trace from one program to
//! the next.
//!
//! OpenTelemetry's environment variables name the collector.

use std::collections::HashMap;

use hyper::{HeaderMap, header::HeaderName, header::HeaderValue};
use opentelemetry::{
    Context,
    propagation::{Extractor, Injector, TextMapPropagator as _},
    trace::{SpanContext, TraceContextExt as _, TracerProvider as _},
};
use opentelemetry_otlp::ExporterBuildError;
use opentelemetry_sdk::{
    Resource,
    propagation::TraceContextPropagator,
    trace::{SdkTracer, SdkTracerProvider},
};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;
use tracing_subscriber::{Layer, Registry, filter::filter_fn};

/// Size limit of a carrier that is read, in bytes; carriers that a propagator writes are shorter.
pub const LONGEST_CARRIER: usize = 2048;

/// Failure to start the export of spans.
#[derive(Debug, thiserror::Error)]
#[error(
    "--enable-tracing: cannot create the exporter of spans; check the environment variables OTEL_EXPORTER_OTLP_*"
)]
pub struct StartError(#[from] ExporterBuildError);

/// Exporter of spans in the background.
///
/// The end of a span waits for nothing. Spans that no collector accepts are dropped.
#[derive(Debug)]
pub struct Exporter {
    provider: SdkTracerProvider,
    service: &'static str,
}

impl Exporter {
    /// Starts the export to the collector that the environment variables `OTEL_EXPORTER_OTLP_*`
    /// name, by default `http://localhost:4317`.
    ///
    /// Needs a tokio runtime.
    pub fn start(service: &'static str) -> Result<Self, StartError> {
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .build()?;
        Ok(Self::to(exporter, service))
    }

    /// Starts the export by `exporter`, as spans of `service`.
    pub fn to(exporter: opentelemetry_otlp::SpanExporter, service: &'static str) -> Self {
        let origin = Resource::builder().with_service_name(service).build();
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(origin);
        Self {
            provider: provider.build(),
            service,
        }
    }

    /// Returns the layer of the process' subscriber that collects the spans of one target.
    pub fn layer(&self, target: &'static str) -> Box<dyn Layer<Registry> + Send + Sync> {
        tracing_opentelemetry::layer()
            .with_tracer(self.tracer())
            .with_filter(filter_fn(move |of| of.is_span() && of.target() == target))
            .boxed()
    }

    /// Returns a tracer for spans that are recorded after they ended.
    pub fn tracer(&self) -> SdkTracer {
        self.provider.tracer(self.service)
    }

    /// Exports the remaining spans and blocks meanwhile.
    ///
    /// Spans that cannot be exported are lost; the log says so.
    pub fn end(self) {
        if let Err(error) = self.provider.shutdown() {
            tracing::warn!(%error, "not all spans were exported");
        }
    }
}

/// Returns the carrier of a context's trace, a JSON object; `None` where spans are not exported.
pub fn carrier(context: &Context) -> Option<String> {
    if !context.span().span_context().is_valid() {
        return None;
    }
    let mut carrier = HashMap::new();
    TraceContextPropagator::new().inject_context(context, &mut carrier);
    // Go's propagator leaves out empty entries.
    carrier.retain(|_, value: &mut String| !value.is_empty());
    serde_json::to_string(&carrier).ok()
}

/// Returns the context in a carrier, a JSON object as W3C's propagator fills it.
///
/// The carrier is not trusted: for text that is no carrier the result is `None`.
pub fn context_in(carrier: &str) -> Option<Context> {
    if carrier.len() > LONGEST_CARRIER {
        return None;
    }
    let carrier: HashMap<String, String> = serde_json::from_str(carrier).ok()?;
    let context = TraceContextPropagator::new().extract(&carrier);
    let known = context.span().span_context().is_valid();
    known.then_some(context)
}

/// Puts a span into the trace that a request's headers name (`traceparent`, `tracestate`; W3C).
///
/// The span stays as it is where the headers name no trace or the span is not exported.
pub fn continue_from(span: &Span, headers: &HeaderMap) {
    if span.is_disabled() {
        return;
    }
    let context = TraceContextPropagator::new().extract(&In(headers));
    if context.span().span_context().is_valid() {
        // This fails only where the span is not exported.
        let _ = span.set_parent(context);
    }
}

/// Writes a span's trace into a request's headers.
///
/// The headers stay as they are where the span is not exported.
pub fn hand_on(span: &Span, headers: &mut HeaderMap) {
    if span.is_disabled() {
        return;
    }
    let context = span.context();
    if context.span().span_context().is_valid() {
        for name in TRACE {
            headers.remove(name);
        }
        TraceContextPropagator::new().inject_context(&context, &mut Out(headers));
    }
}

/// Returns the ids of a span's trace and of the span in hexadecimal digits, for logs; `None` where
/// the span is not exported.
pub fn ids(span: &Span) -> Option<(String, String)> {
    if span.is_disabled() {
        return None;
    }
    let of: SpanContext = span.context().span().span_context().clone();
    let ids = || (of.trace_id().to_string(), of.span_id().to_string());
    of.is_valid().then(ids)
}

const TRACE: [&str; 2] = ["traceparent", "tracestate"];

/// Extractor of a client's headers.
///
/// A header that occurs twice or is longer than [`LONGEST_CARRIER`] is ignored.
struct In<'a>(&'a HeaderMap);

impl Extractor for In<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        let mut all = self.0.get_all(key).iter();
        let value = all.next().filter(|_| all.next().is_none())?;
        let text = value.to_str().ok()?;
        (text.len() <= LONGEST_CARRIER).then_some(text)
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

struct Out<'a>(&'a mut HeaderMap);

impl Injector for Out<'_> {
    fn set(&mut self, key: &str, value: String) {
        let name = HeaderName::from_bytes(key.as_bytes());
        // The propagator writes an empty `tracestate` where there is no state.
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_str(&value))
            && !value.is_empty()
        {
            self.0.insert(name, value);
        }
    }
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
    fn a_carrier_is_read_and_written_back(#[case] text: &str, #[case] read: bool) {
        let context = context_in(text);
        assert_eq!(context.is_some(), read);
        if let Some(context) = context {
            assert_eq!(context_in(&carrier(&context).unwrap()).is_some(), read);
        }
    }

    #[test]
    fn a_carrier_that_is_too_long_is_not_read() {
        let long = format!(
            r#"{{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01","x":"{}"}}"#,
            "x".repeat(LONGEST_CARRIER)
        );
        assert!(context_in(&long).is_none());
    }
}
