//! Spans of passes, exported by OTLP under upstream's names.
//!
//! A trace goes from the client over the claim to its Sandbox in the annotation
//! [`annotations::TRACE_CONTEXT`], a W3C carrier as JSON. Each pass over an object continues the
//! trace in the annotation, or writes its own trace there when the object has none.
//!
//! Without `--enable-tracing` no subscriber enables [`TARGET`]: its spans are never created, and
//! the annotation is passed on unchanged.

use kube::Resource;
use torpor_api::annotations;
use torpor_daemon::spans::{self, context_in};
use tracing::{Span, field::Empty};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::sandbox::plan::Area;

/// Target of the exported spans; the log excludes it.
pub const TARGET: &str = "torpor_controller::spans";
/// Upstream's name of the service and of the tracer.
pub const SERVICE: &str = "agent-sandbox-controller";

/// Returns the carrier in an object's annotation.
pub fn carried<K: Resource>(object: &K) -> Option<String> {
    let annotations = object.meta().annotations.as_ref()?;
    annotations.get(annotations::TRACE_CONTEXT).cloned()
}

/// Returns the span of a pass over an object, in the trace that `parent` returns.
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
        // An error means that spans are not exported.
        let _ = span.set_parent(parent);
    }
    span
}

/// Returns the span of the calls of one step of a pass over a Sandbox, under upstream's name where
/// it has one.
pub fn step(area: Area) -> Span {
    let name = match area {
        Area::Claims => "reconcilePVCs",
        Area::Pod => "reconcilePod",
        Area::Service => "reconcileService",
    };
    tracing::info_span!(target: TARGET, "step", otel.name = name)
}

/// Marks a pass's span as failed.
pub fn failed(span: &Span, why: &dyn std::fmt::Display) {
    if !span.is_disabled() {
        span.record("otel.status_code", "ERROR");
        span.record("otel.status_description", why.to_string());
    }
}

/// Returns the carrier of the current span's trace; `None` where spans are not exported.
pub fn carrier() -> Option<String> {
    spans::carrier(&Span::current().context())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_no_carrier_where_nothing_is_exported() {
        let span = pass("ReconcileSandbox", &torpor_api::Sandbox::default(), || {
            panic!("the parent is not needed")
        });
        assert_eq!(span.in_scope(carrier), None);
    }
}
