//! Spans of passes, exported by OTLP under upstream's names. A trace goes from the client over the claim to its Sandbox in the annotation [`annotations::TRACE_CONTEXT`], a W3C
//! carrier as JSON: each pass over an object continues the trace that the annotation names, and writes its own where there is none.
//!
//! Without `--enable-tracing` nobody listens to [`TARGET`]: its spans are never made, and the annotation is passed on as it is.

use kube::Resource;
use torpor_api::annotations;
use torpor_daemon::spans::{self, context_in};
use tracing::{Span, field::Empty};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::sandbox::plan::Area;

/// Target of the spans that are exported; the log leaves it out.
pub const TARGET: &str = "torpor_controller::spans";
/// Upstream's name of the service and of the tracer.
pub const SERVICE: &str = "agent-sandbox-controller";

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
    spans::carrier(&Span::current().context())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_no_carrier_where_nothing_is_exported() {
        let span = pass("ReconcileSandbox", &torpor_api::Sandbox::default(), || {
            panic!("nobody asks")
        });
        assert_eq!(span.in_scope(carrier), None);
    }
}
