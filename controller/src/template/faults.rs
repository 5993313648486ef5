//! Events about a template's lasting faults: a template has no status.

use std::time::Instant;

use torpor_api::SandboxTemplate;

use crate::{
    context::Context,
    events::{self, Note, Severity},
    pace::Advance,
};

/// Publishes a warning about a template, again after about an hour while the fault lasts. `key`:
/// the fault in [`Context::templates`].
pub async fn warn(
    template: &SandboxTemplate,
    key: &str,
    reason: &'static str,
    message: String,
    context: &Context,
) {
    if !context.templates.is_due(key, Instant::now()) {
        return;
    }
    let severity = Severity::Warning;
    let note = Note {
        severity,
        reason,
        message,
    };
    events::publish(&context.api.in_advance(Advance::Calm), template, note).await;
}
