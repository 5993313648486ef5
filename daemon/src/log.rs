//! Logs: lines on standard error, from where a container runtime collects them.

use tracing_subscriber::{
    EnvFilter, Layer, Registry, filter::Directive, fmt, layer::SubscriberExt,
    util::SubscriberInitExt,
};

/// Starts the log of this process, as JSON if `format` is `json`, otherwise as text.
///
/// The environment variable `RUST_LOG` sets the level; the default is `info`.
pub fn start(format: &str) {
    start_with(format, EnvFilter::DEFAULT_ENV, "info");
}

/// Starts the log of a process that shares its environment and its output with a user's program.
///
/// The environment variable `variable` alone sets the level, so that a `RUST_LOG` of the user's
/// program does not.
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

/// Starts the log of a process that may also export spans by the layer `spans`.
///
/// The log leaves out what `not_logged` excludes, such as `target=off`. The environment variable
/// `RUST_LOG` sets the level; without it `default` does.
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
