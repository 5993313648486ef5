//! Publishes Kubernetes Events. A failure to publish is only logged: the status holds the state.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Resource, ResourceExt};
use torpor_api::reasons::event as reasons;

use crate::calls::Apiserver;

/// Reporting controller, with upstream's name.
const REPORTER: &str = "sandbox-controller";
/// Action of an Event for which upstream has no more specific one.
const DEFAULT_ACTION: &str = "Reconciling";
/// Limit of the API for the note of an Event, in bytes.
const LONGEST_NOTE: usize = 1024;
/// Interval at which an Event about a lasting state is repeated. The apiserver keeps an Event for
/// an hour, so that there is always one.
pub const REPEAT_INTERVAL: Duration = Duration::from_secs(55 * 60);

/// Type of an Event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    Normal,
    Warning,
}

/// Returns a message without its digits, to compare refusals of the same kind.
///
/// The message of a quota, for example, contains the used amount.
pub fn without_numbers(words: &str) -> String {
    words.chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// Content of an Event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    pub severity: Severity,
    pub reason: &'static str,
    pub message: String,
}

/// Publishes an Event about an object.
pub async fn publish<K: Resource<DynamicType = ()>>(api: &Apiserver, about: &K, note: Note) {
    let Note {
        severity, reason, ..
    } = &note;
    tracing::info!(
        ?severity,
        reason,
        message = note.message,
        object = about.name_any(),
        "event"
    );
    let event = event(about, note, Timestamp::now());
    if let Err(error) = api.publish(&event).await {
        tracing::warn!(%error, object = about.name_any(), "cannot publish an Event");
    }
}

fn event<K: Resource<DynamicType = ()>>(about: &K, note: Note, now: Timestamp) -> Event {
    let name = about.name_any();
    // A name has at most 253 characters; a dot and 16 hexadecimal digits go after it.
    let stem = name
        .get(..230)
        .unwrap_or(&name)
        .trim_end_matches(['-', '.']);
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{stem}.{:x}", now.as_nanosecond())),
            namespace: Some(about.namespace().unwrap_or_else(|| "default".to_owned())),
            ..ObjectMeta::default()
        },
        action: Some(action(note.reason).to_owned()),
        event_time: Some(MicroTime(now)),
        note: Some(shortened(note.message)),
        reason: Some(note.reason.to_owned()),
        regarding: Some(ObjectReference {
            api_version: Some(K::api_version(&()).into_owned()),
            kind: Some(K::kind(&()).into_owned()),
            name: Some(name.clone()),
            namespace: about.namespace(),
            resource_version: about.resource_version(),
            uid: about.uid(),
            field_path: None,
        }),
        reporting_controller: Some(REPORTER.to_owned()),
        reporting_instance: Some(REPORTER.to_owned()),
        type_: Some(
            match note.severity {
                Severity::Normal => "Normal",
                Severity::Warning => "Warning",
            }
            .to_owned(),
        ),
        ..Event::default()
    }
}

/// Returns the action, which is upstream's (#782, #1532).
fn action(reason: &str) -> &'static str {
    match reason {
        reasons::SANDBOX_POD_CREATED | reasons::SANDBOX_POD_CREATE_FAILED => "PodCreation",
        reasons::SANDBOX_READY => "Ready",
        reasons::SANDBOX_EXPIRED => "Expiry",
        _ => DEFAULT_ACTION,
    }
}

fn shortened(mut text: String) -> String {
    if text.len() > LONGEST_NOTE {
        let cut = (0..LONGEST_NOTE)
            .rev()
            .find(|at| text.is_char_boundary(*at))
            .unwrap_or(0);
        text.truncate(cut);
    }
    text
}

#[cfg(test)]
mod tests {
    use torpor_api::Sandbox;

    use super::*;

    #[test]
    fn an_event_fits_the_api_whatever_the_object_and_the_text_are() {
        let mut sandbox = Sandbox::default();
        sandbox.metadata.name = Some("a".repeat(253));
        sandbox.metadata.namespace = Some("ns".into());
        let note = Note {
            severity: Severity::Warning,
            reason: "X",
            message: "ü".repeat(2000),
        };
        let event = event(&sandbox, note, Timestamp::now());
        assert!(event.name_any().len() <= 253);
        assert!(event.note.unwrap().len() <= LONGEST_NOTE);
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        assert_eq!(event.regarding.unwrap().kind.as_deref(), Some("Sandbox"));
    }
}
