//! The agent's writes to the API (conditions, Events, SandboxNode), its metrics and its spans.

pub(crate) mod bytes;
pub(crate) mod metrics;
pub(crate) mod publish;
pub(crate) mod sandbox_node;
pub(crate) mod sandboxes;
pub(crate) mod server;
pub(crate) mod spans;
pub(crate) mod wakes;
