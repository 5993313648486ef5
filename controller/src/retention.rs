//! Deletes snapshots made by users according to the rules of their Sandbox's SnapshotClass.
//!
//! The passes are over Sandboxes. A change of a snapshot, a Sandbox, a template or a class starts a
//! pass, and so does a timer when the next snapshot expires.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use jiff::Timestamp;
use kube::ResourceExt;
use torpor_api::{
    Sandbox, SandboxSnapshot, annotations::Settings, reasons::event, retention::Retention,
    snapshot::PROVISIONERS,
};

use crate::{
    calls::{self, Answer},
    context::Context,
    events::{self, Note, Severity},
    pace::Advance,
};

pub mod plan;

use self::plan::{Observed, plan};

/// Failure of a pass.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot delete SandboxSnapshot {0:?}")]
    Delete(String, #[source] calls::Error),
}

impl Error {
    /// Stable name, for metrics and logs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Delete(..) => "DeleteFailed",
        }
    }
}

/// Runs one pass over the snapshots of a Sandbox. Returns the time until the next one expires.
pub async fn reconcile(
    sandbox: Arc<Sandbox>,
    context: Arc<Context>,
) -> Result<Option<Duration>, Error> {
    let Some((class, rules)) = rules(&sandbox, &context) else {
        return Ok(None);
    };
    let namespace = sandbox.namespace().unwrap_or_default();
    let plan = plan(&observe(&sandbox, class, rules, &context), Timestamp::now());
    let api = context.api.in_advance(Advance::Calm);
    for plan::Deletion {
        name,
        uid,
        resource_version,
        why,
    } in plan.deletions
    {
        let version = resource_version.as_deref();
        match api
            .delete::<SandboxSnapshot>(&namespace, &name, &uid, version)
            .await
        {
            Ok(()) => {
                let note = Note {
                    severity: Severity::Normal,
                    reason: event::SNAPSHOT_EXPIRED,
                    message: why,
                };
                events::publish(&api, &*sandbox, note).await;
            }
            // The snapshot's event starts the next pass.
            Err(error) if matches!(error.answer(), Answer::NotFound | Answer::Conflict) => {}
            Err(error) => return Err(Error::Delete(name, error)),
        }
    }
    Ok(plan.next_look)
}

/// Returns the class that a Sandbox names, with its rules, if it has any.
fn rules(sandbox: &Sandbox, context: &Context) -> Option<(String, Retention)> {
    if sandbox.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let settings = Settings::read(
        sandbox.metadata.annotations.as_ref(),
        sandbox.spec.pod_template.annotations(),
    );
    let name = settings.snapshot_class?;
    let class = context.caches.snapshot_classes.get("", &name)?;
    let rules = Retention::of(&class.spec);
    let is_known = PROVISIONERS.contains(&&*class.spec.provisioner);
    (is_known && rules.has_rules()).then_some((name, rules))
}

fn observe(sandbox: &Sandbox, class: String, rules: Retention, context: &Context) -> Observed {
    let caches = &context.caches;
    let (namespace, name) = (sandbox.namespace().unwrap_or_default(), sandbox.name_any());
    let here = |other: Option<String>| other.as_deref() == Some(&*namespace);
    let sandboxes = caches
        .sandboxes
        .filtered(|other| here(other.namespace()) && restored_from(other).is_some());
    let templates = caches.templates.filtered(|template| {
        here(template.namespace()) && template.spec.pod_template.restore_from().is_some()
    });
    let of_templates = templates
        .iter()
        .filter_map(|template| template.spec.pod_template.restore_from());
    let in_use: BTreeSet<String> = sandboxes
        .iter()
        .filter_map(|other| restored_from(other))
        .chain(of_templates)
        .map(str::to_owned)
        .collect();
    Observed {
        class,
        rules,
        snapshots: caches.snapshots.indexed(&namespace, &name),
        in_use,
    }
}

/// Returns the name of the snapshot of which a Sandbox starts as a copy.
pub fn restored_from(sandbox: &Sandbox) -> Option<&str> {
    let own = sandbox
        .annotations()
        .get(torpor_api::annotations::RESTORE_FROM);
    own.map(String::as_str)
        .or_else(|| sandbox.spec.pod_template.restore_from())
}
