//! Logs: lines on standard error, which is where a container runtime looks for them.

use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

/// Starts the log of this process: `json`, anything else is text. `RUST_LOG` sets what is told, `info` without it.
pub fn start(format: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
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
