//! No client required. Derives Events from a change of the status.

use torpor_api::{
    SandboxStatus,
    conditions::{self, find},
    reasons::{archived, event, hibernated, restored, sandbox as reasons},
};

use super::plan::Plan;
use crate::events::{Note, Severity};

/// Returns the Events for the changes between two statuses. An unchanged condition causes none.
pub fn between(before: &SandboxStatus, after: &SandboxStatus, plan: &Plan) -> Vec<Note> {
    let mut notes = Vec::new();
    let changed = |type_: &str| {
        let (old, new) = (
            find(&before.conditions, type_),
            find(&after.conditions, type_)?,
        );
        let same = old.is_some_and(|old| old.status == new.status && old.reason == new.reason);
        let message_matters = matches!(
            new.reason.as_str(),
            hibernated::INVALID_ANNOTATION | hibernated::SNAPSHOT_CLASS_NOT_SUPPORTED
        );
        let same_words = old.is_some_and(|old| old.message == new.message);
        (!same || (message_matters && !same_words)).then(|| new.clone())
    };
    let mut note = |severity, reason, message: &str| {
        notes.push(Note {
            severity,
            reason,
            message: message.to_owned(),
        });
    };
    if let Some(ready) = changed(conditions::READY)
        && ready.reason == reasons::MULTIPLE_PODS
    {
        note(Severity::Warning, event::MULTIPLE_PODS, &ready.message);
    }
    let is_suspended = find(&after.conditions, conditions::SUSPENDED)
        .is_some_and(|suspended| suspended.reason != reasons::NOT_SUSPENDED);
    if let Some(condition) = changed(conditions::HIBERNATED) {
        match condition.reason.as_str() {
            hibernated::INVALID_ANNOTATION | hibernated::SNAPSHOT_CLASS_NOT_SUPPORTED => {
                note(
                    Severity::Warning,
                    event::INVALID_ANNOTATION,
                    &condition.message,
                );
            }
            hibernated::RUNTIME_NOT_CAPABLE if is_suspended => {
                note(
                    Severity::Warning,
                    event::MEMORY_NOT_KEPT,
                    &condition.message,
                );
            }
            hibernated::SAVE_FAILED if plan.is_evicted() || is_suspended && plan.loses_memory() => {
                note(
                    Severity::Warning,
                    event::MEMORY_NOT_KEPT,
                    &condition.message,
                );
            }
            hibernated::SAVE_FAILED => {
                note(
                    Severity::Warning,
                    event::SNAPSHOT_FAILED,
                    &condition.message,
                );
            }
            // For a hibernation in place the agent publishes the Event on the Pod.
            hibernated::HIBERNATED if is_suspended || plan.is_evicted() => {
                note(
                    Severity::Normal,
                    event::SNAPSHOT_COMMITTED,
                    &condition.message,
                );
            }
            _ => {}
        }
    }
    if let Some(condition) = changed(conditions::ARCHIVED)
        && !matches!(
            condition.reason.as_str(),
            archived::WAITING | archived::UPLOADING | archived::ARCHIVING
        )
    {
        note(Severity::Warning, event::NOT_ARCHIVED, &condition.message);
    }
    if let Some(why) = &plan.memory.given_up {
        note(Severity::Warning, event::MEMORY_NOT_KEPT, why);
    }
    if let Some(condition) = changed(conditions::RESTORED) {
        match condition.reason.as_str() {
            // This is no failure yet.
            restored::ASKING_NODE => {}
            restored::RESTORED => note(Severity::Normal, event::RESUMED, &condition.message),
            restored::ROLLED_BACK => note(Severity::Warning, event::RESUMED, &condition.message),
            restored::COLD_STARTED => {
                note(Severity::Warning, event::COLD_STARTED, &condition.message);
            }
            _ if condition.status == "False" => {
                note(Severity::Warning, event::RESTORE_FAILED, &condition.message);
            }
            _ => {}
        }
    }
    notes
}
