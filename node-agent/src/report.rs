//! What the agent writes to the API (conditions, Events, SandboxNode), its metrics and spans.

pub(crate) mod metrics;
pub(crate) mod publish;
pub(crate) mod sandbox_node;
pub(crate) mod sandboxes;
pub(crate) mod server;
pub(crate) mod spans;
pub(crate) mod wakes;
