//! Logs: lines on standard error, which is where a container runtime looks for them.

use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

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
