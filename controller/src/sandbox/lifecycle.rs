//! No client required. Upstream's Events about the life of a Sandbox (since 1.0.4, #1532): reason,
//! type and moment are upstream's. Each tells a transition, once its status is written.

use torpor_api::{
    Sandbox, SandboxStatus, ShutdownPolicy,
    conditions::{self, find},
    reasons::{event, sandbox as reasons},
};

use super::apply::Failure;
use crate::events::{Note, Severity, without_numbers};

/// A Pod was made for the Sandbox.
pub fn pod_created(name: &str) -> Note {
    Note {
        severity: Severity::Normal,
        reason: event::SANDBOX_POD_CREATED,
        message: format!("Created Pod {name:?}"),
    }
}

/// Changes for the Sandbox' user between two statuses: its condition Ready, and whether its
/// Pod can be made. `failures` are those of the pass that led to `after`.
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

/// Told once as long as the Sandbox says that it fails in the same words, but for the numbers.
fn pod_not_created(before: &SandboxStatus, failure: &Failure) -> Option<Note> {
    let told = find(&before.conditions, conditions::READY).is_some_and(|ready| {
        let errors = [reasons::RECONCILER_ERROR, reasons::INVALID_CONFIGURATION];
        let (said, why) = (&ready.message, &failure.message);
        errors.contains(&&*ready.reason) && without_numbers(said).contains(&without_numbers(why))
    });
    (!told).then(|| Note {
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
        // With policy Delete the Sandbox goes, and its Events with it.
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

    fn says(status: &str, reason: &str, message: &str) -> SandboxStatus {
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
    #[case::on_its_way("False", "DependenciesNotReady", None)]
    #[case::told_elsewhere("False", "MultiplePods", None)]
    fn a_transition_is_told_once_and_in_the_words_of_the_condition(
        #[case] status: &str,
        #[case] reason: &str,
        #[case] expected: Option<(Severity, &str)>,
    ) {
        let sandbox = sandbox(None);
        let before = says("False", "ReconcilerError", "x");
        let after = says(status, reason, "words");
        for before in [&before, &SandboxStatus::default()] {
            let notes = between(&sandbox, before, &after, &[]);
            let told = notes.iter().map(|n| (n.severity, n.reason, &*n.message));
            let expected = expected.map(|(severity, reason)| (severity, reason, "words"));
            assert_eq!(told.collect::<Vec<_>>(), Vec::from_iter(expected));
        }
        let other_words = says(status, reason, "others");
        assert_eq!(between(&sandbox, &after, &other_words, &[]), []);
    }

    #[rstest]
    #[case(None, true)]
    #[case(Some(ShutdownPolicy::Retain), true)]
    #[case(Some(ShutdownPolicy::Delete), false)]
    fn that_a_sandbox_expired_is_told_only_where_it_stays(
        #[case] policy: Option<ShutdownPolicy>,
        #[case] expected: bool,
    ) {
        let after = says("False", "SandboxExpired", "");
        let notes = between(&sandbox(policy), &SandboxStatus::default(), &after, &[]);
        assert_eq!(!notes.is_empty(), expected);
    }

    #[rstest]
    #[case::at_first(Value::Null, true)]
    #[case::told("ReconcilerError", false)]
    #[case::told_of_a_lasting_one("InvalidConfiguration", false)]
    #[case::other_words(json!(["ReconcilerError", "Error seen: another"]), true)]
    #[case::other_numbers(json!(["ReconcilerError", "Error seen: full, used: 12"]), false)]
    #[case::it_went_on_meanwhile("DependenciesReady", true)]
    fn that_a_pod_cannot_be_made_is_told_once_in_the_same_words(
        #[case] before: impl Into<Value>,
        #[case] expected: bool,
    ) {
        let before = match before.into() {
            Value::Null => SandboxStatus::default(),
            Value::Array(said) => says(
                "False",
                said[0].as_str().unwrap(),
                said[1].as_str().unwrap(),
            ),
            reason => says(
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
        let after = says("False", "ReconcilerError", "Error seen: full, used: 3");
        let sandbox = sandbox(None);
        let notes = between(&sandbox, &before, &after, &[failure(true)]);
        let told = notes.iter().map(|n| (n.severity, n.reason, &*n.message));
        let note = (Severity::Warning, "SandboxPodCreateFailed", "full, used: 3");
        assert_eq!(
            told.collect::<Vec<_>>(),
            Vec::from_iter(expected.then_some(note))
        );
        assert_eq!(between(&sandbox, &before, &after, &[failure(false)]), []);
    }
}
