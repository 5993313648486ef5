//! Logs: lines on standard error, which is where a container runtime looks for them.

use tracing_subscriber::{
    EnvFilter, Layer, Registry, filter::Directive, fmt, layer::SubscriberExt,
    util::SubscriberInitExt,
};

/// Starts the log of this process: `json`, anything else is text. `RUST_LOG` sets what is told, `info` without it.
pub fn start(format: &str) {
    start_with(format, EnvFilter::DEFAULT_ENV, "info");
}

/// Starts the log of a process that has its environment and its output in common with a user's program: only the environment variable `variable` sets what is told.
pub fn start_with(format: &str, variable: &str, default: &str) {
    let filter = EnvFilter::try_from_env(variable).unwrap_or_else(|_| EnvFilter::new(default));
    let registry = tracing_subscriber::registry().with(filter);
    if format == "json" {
        registry
            .with(fmt::layer().json().with_writer(std::io::stderr))
            .init();
    } else {
        registry
            .with(fmt::layer().with_ansi(false).with_writer(std::io::stderr))
            .init();
    }
}

/// Starts the log of a process that may export spans as well: `spans` takes what it wants, and the log leaves out what `not_logged` says, such as `target=off`.
/// `RUST_LOG` sets what is told, `default` without it.
pub fn start_with_spans(
    format: &str,
    default: &str,
    not_logged: Directive,
    spans: Option<Box<dyn Layer<Registry> + Send + Sync>>,
) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let filter = filter.add_directive(not_logged);
    let registry = tracing_subscriber::registry().with(spans);
    if format == "json" {
        let log = fmt::layer().json().with_writer(std::io::stderr);
        registry.with(log.with_filter(filter)).init();
    } else {
        let log = fmt::layer().with_ansi(false).with_writer(std::io::stderr);
        registry.with(log.with_filter(filter)).init();
    }
}
