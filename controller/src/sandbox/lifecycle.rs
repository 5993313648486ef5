//! No client required. Derives upstream's Events about the life of a Sandbox (since 1.0.4, #1532).
//! Reason, type and moment are upstream's. Each Event reports one transition, after its status was
//! written.

use torpor_api::{
    Sandbox, SandboxStatus, ShutdownPolicy,
    conditions::{self, find},
    reasons::{event, sandbox as reasons},
};

use super::apply::Failure;
use crate::events::{Note, Severity, without_numbers};

/// Returns the Event for a created Pod.
pub fn pod_created(name: &str) -> Note {
    Note {
        severity: Severity::Normal,
        reason: event::SANDBOX_POD_CREATED,
        message: format!("Created Pod {name:?}"),
    }
}

/// Returns the Events for changes between two statuses: of the condition Ready, and of whether the
/// Pod can be created.
///
/// `failures` are those of the pass that led to `after`.
pub fn between(
    sandbox: &Sandbox,
    before: &SandboxStatus,
    after: &SandboxStatus,
    failures: &[Failure],
) -> Vec<Note> {
    let failed = failures.iter().find(|failure| failure.makes_pod);
    let failed = failed.and_then(|failure| pod_not_created(before, failure));
    failed
        .into_iter()
        .chain(of_ready(sandbox, before, after))
        .collect()
}

/// Returns the Event for a Pod that cannot be created.
///
/// There is none if the status already has this failure, apart from its numbers.
fn pod_not_created(before: &SandboxStatus, failure: &Failure) -> Option<Note> {
    let is_reported = find(&before.conditions, conditions::READY).is_some_and(|ready| {
        let errors = [reasons::RECONCILER_ERROR, reasons::INVALID_CONFIGURATION];
        let (message, why) = (&ready.message, &failure.message);
        errors.contains(&&*ready.reason) && without_numbers(message).contains(&without_numbers(why))
    });
    (!is_reported).then(|| Note {
        severity: Severity::Warning,
        reason: event::SANDBOX_POD_CREATE_FAILED,
        message: failure.message.clone(),
    })
}

fn of_ready(sandbox: &Sandbox, before: &SandboxStatus, after: &SandboxStatus) -> Option<Note> {
    let (old, new) = (
        find(&before.conditions, conditions::READY),
        find(&after.conditions, conditions::READY)?,
    );
    if old.is_some_and(|old| old.status == new.status && old.reason == new.reason) {
        return None;
    }
    let (severity, reason) = match &*new.reason {
        _ if new.status == "True" => (Severity::Normal, event::SANDBOX_READY),
        reasons::SANDBOX_SUSPENDED => (Severity::Normal, event::SANDBOX_SUSPENDED),
        // With policy Delete the Sandbox and its Events are deleted.
        reasons::SANDBOX_EXPIRED
            if sandbox.spec.shutdown_policy != Some(ShutdownPolicy::Delete) =>
        {
            (Severity::Normal, event::SANDBOX_EXPIRED)
        }
        reasons::POD_SUCCEEDED => (Severity::Normal, event::POD_SUCCEEDED),
        reasons::POD_FAILED => (Severity::Warning, event::POD_FAILED),
        _ => return None,
    };
    Some(Note {
        severity,
        reason,
        message: new.message.clone(),
    })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;
    use crate::sandbox::plan::Area;

    fn status_with(status: &str, reason: &str, message: &str) -> SandboxStatus {
        let ready = json!({
            "type": "Ready", "status": status, "reason": reason, "message": message,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        serde_json::from_value(json!({"conditions": [ready]})).unwrap()
    }

    fn sandbox(policy: Option<ShutdownPolicy>) -> Sandbox {
        let mut sandbox = Sandbox::default();
        sandbox.spec.shutdown_policy = policy;
        sandbox
    }

    #[rstest]
    #[case::ready("True", "DependenciesReady", Some((Severity::Normal, "SandboxReady")))]
    #[case::suspended("False", "SandboxSuspended", Some((Severity::Normal, "SandboxSuspended")))]
    #[case::expired("False", "SandboxExpired", Some((Severity::Normal, "SandboxExpired")))]
    #[case::ended_well("False", "PodSucceeded", Some((Severity::Normal, "PodSucceeded")))]
    #[case::ended_badly("False", "PodFailed", Some((Severity::Warning, "PodFailed")))]
    #[case::starting("False", "DependenciesNotReady", None)]
    #[case::reported_elsewhere("False", "MultiplePods", None)]
    fn a_transition_is_one_event_with_the_message_of_the_condition(
        #[case] status: &str,
        #[case] reason: &str,
        #[case] expected: Option<(Severity, &str)>,
    ) {
        let sandbox = sandbox(None);
        let before = status_with("False", "ReconcilerError", "x");
        let after = status_with(status, reason, "words");
        for before in [&before, &SandboxStatus::default()] {
            let notes = between(&sandbox, before, &after, &[]);
            let found = notes.iter().map(|n| (n.severity, n.reason, &*n.message));
            let expected = expected.map(|(severity, reason)| (severity, reason, "words"));
            assert_eq!(found.collect::<Vec<_>>(), Vec::from_iter(expected));
        }
        let other_words = status_with(status, reason, "others");
        assert_eq!(between(&sandbox, &after, &other_words, &[]), []);
    }

    #[rstest]
    #[case(None, true)]
    #[case(Some(ShutdownPolicy::Retain), true)]
    #[case(Some(ShutdownPolicy::Delete), false)]
    fn an_expiry_is_an_event_only_where_the_sandbox_stays(
        #[case] policy: Option<ShutdownPolicy>,
        #[case] expected: bool,
    ) {
        let after = status_with("False", "SandboxExpired", "");
        let notes = between(&sandbox(policy), &SandboxStatus::default(), &after, &[]);
        assert_eq!(!notes.is_empty(), expected);
    }

    #[rstest]
    #[case::at_first(Value::Null, true)]
    #[case::reported("ReconcilerError", false)]
    #[case::reported_as_a_lasting_one("InvalidConfiguration", false)]
    #[case::other_words(json!(["ReconcilerError", "Error seen: another"]), true)]
    #[case::other_numbers(json!(["ReconcilerError", "Error seen: full, used: 12"]), false)]
    #[case::it_went_on_meanwhile("DependenciesReady", true)]
    fn a_pod_that_cannot_be_created_is_one_event_for_each_message(
        #[case] before: impl Into<Value>,
        #[case] expected: bool,
    ) {
        let before = match before.into() {
            Value::Null => SandboxStatus::default(),
            Value::Array(parts) => status_with(
                "False",
                parts[0].as_str().unwrap(),
                parts[1].as_str().unwrap(),
            ),
            reason => status_with(
                "False",
                reason.as_str().unwrap(),
                "Error seen: full, used: 3\nothers",
            ),
        };
        let failure = |makes_pod| Failure {
            area: Area::Pod,
            message: "full, used: 3".to_owned(),
            pod_stays: false,
            makes_pod,
            lasts: false,
        };
        let after = status_with("False", "ReconcilerError", "Error seen: full, used: 3");
        let sandbox = sandbox(None);
        let notes = between(&sandbox, &before, &after, &[failure(true)]);
        let found = notes.iter().map(|n| (n.severity, n.reason, &*n.message));
        let note = (Severity::Warning, "SandboxPodCreateFailed", "full, used: 3");
        assert_eq!(
            found.collect::<Vec<_>>(),
            Vec::from_iter(expected.then_some(note))
        );
        assert_eq!(between(&sandbox, &before, &after, &[failure(false)]), []);
    }
}
