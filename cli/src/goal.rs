//! Patches for the requested change of a Sandbox, and its progress. Pure.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::{Value, json};
use torpor_api::annotations::{
    self, ARCHIVE_AFTER, ArchiveAfter, HIBERNATE, NEXT_WAKEUP, Settings, WAKE_AT,
};
use torpor_api::conditions::{self, FINISHED, HIBERNATED, READY, RESTORED, SUSPENDED};
use torpor_api::reasons::{hibernated, restored};
use torpor_api::{OperatingMode, Sandbox};

use crate::texts;
use crate::view::conditions_of;

/// Maximum by which a time of this machine's clock may be ahead of the apiserver's clock.
const AHEAD: SignedDuration = SignedDuration::from_secs(2);

/// Message for a Sandbox that was resumed by another client while it was being suspended.
pub const RESUMED: &str = "resumed meanwhile; it keeps running";

/// State that a command requests of a Sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    Hibernate,
    Wake,
    Suspend,
    Resume,
}

/// Progress of a Sandbox towards a goal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Under way; the text describes the condition.
    Waiting(String),
    Done,
    /// Waiting does not lead to the goal; the text has the reason and the remedy.
    Refused(String),
}

impl Goal {
    /// Returns the word for the reached goal, to follow "is" and "not yet".
    pub fn participle(self) -> &'static str {
        match self {
            Self::Hibernate => "hibernated",
            Self::Wake => "awake",
            Self::Suspend => "suspended",
            Self::Resume => "resumed",
        }
    }

    /// Returns the merge patch that requests the goal; `Err`: why this Sandbox cannot reach it.
    pub fn patch(self, sandbox: &Sandbox, now: Timestamp) -> Result<Value, String> {
        let suspended = sandbox.spec.operating_mode == OperatingMode::Suspended;
        match self {
            Self::Hibernate if suspended => {
                Err("suspended already: it has no Pod, and its memory is on disk".to_owned())
            }
            Self::Wake if suspended => {
                Err("suspended: to make it run again, use `kubectl torpor resume`".to_owned())
            }
            Self::Hibernate => {
                // The time of an earlier wake may still be in the future and would end the sleep.
                let annotations = json!({HIBERNATE: "true", WAKE_AT: null});
                Ok(json!({"metadata": {"annotations": annotations}}))
            }
            Self::Wake => {
                // An annotation of the pod template holds until the Sandbox overrides it.
                let template = sandbox.spec.pod_template.annotations();
                let by_template = template.is_some_and(|all| all.contains_key(HIBERNATE));
                let value = by_template.then_some("false");
                // A sandbox that sleeps because it was idle has no annotation to remove. After the
                // wake it may sleep again when it has been idle.
                let annotations = json!({HIBERNATE: value, WAKE_AT: now.to_string()});
                Ok(json!({"metadata": {"annotations": annotations}}))
            }
            Self::Suspend => {
                let mut patch = json!({"spec": {"operatingMode": "Suspended"}});
                // A `next-wakeup` in the past would resume the Sandbox at once. One in the future
                // stays, also if another client sets it now: hence the resource version.
                if is_wakeup_past(sandbox, now) {
                    patch["metadata"] = json!({
                        "annotations": {NEXT_WAKEUP: null},
                        "resourceVersion": sandbox.metadata.resource_version,
                    });
                }
                Ok(patch)
            }
            Self::Resume => {
                let mut patch = json!({"spec": {"operatingMode": "Running"}});
                // A request to archive the Sandbox is one to this suspension.
                let own = sandbox.metadata.annotations.as_ref();
                let after = own.and_then(|all| all.get(ARCHIVE_AFTER));
                if after.is_some_and(|after| after == ArchiveAfter::NOW) {
                    patch["metadata"]["annotations"] = json!({ARCHIVE_AFTER: null});
                }
                Ok(patch)
            }
        }
    }

    /// Returns the patch that corrects `wake-at` to the apiserver's clock; `None` where the time is
    /// right or the clock is unknown.
    ///
    /// `written` is the Sandbox after the patch; its managed fields have the apiserver's time. A
    /// sandbox sleeps and wakes by the cluster's clock. A time that is behind may be before the
    /// start of the sleep and would not end it; a time that is ahead would delay the wake.
    pub fn corrected_time(self, written: &Sandbox) -> Option<Value> {
        if self != Self::Wake {
            return None;
        }
        let metadata = &written.metadata;
        let requested = metadata.annotations.as_ref()?.get(WAKE_AT)?;
        let requested = requested.parse::<Timestamp>().ok()?;
        let writes = metadata.managed_fields.iter().flatten();
        // The apiserver writes whole seconds.
        let theirs = writes
            .filter_map(|write| Some(write.time.as_ref()?.0))
            .max()?;
        if (SignedDuration::ZERO..=AHEAD).contains(&requested.duration_since(theirs)) {
            return None;
        }
        let next = theirs.checked_add(SignedDuration::from_secs(1)).ok()?;
        let annotations = json!({WAKE_AT: next.to_string()});
        Some(json!({"metadata": {"annotations": annotations}}))
    }

    /// Reports whether the Pod lacks the annotation that the controller copies from the Sandbox.
    pub fn is_not_copied(self, pod: &Pod) -> bool {
        let annotations = pod.metadata.annotations.as_ref();
        self == Self::Wake && annotations.is_none_or(|all| !all.contains_key(WAKE_AT))
    }

    /// Returns the progress of `now`, where `before` is the Sandbox before the patch.
    ///
    /// Conditions that are the same in `before` do not answer the patch.
    pub fn progress(self, before: &Sandbox, now: &Sandbox) -> Progress {
        if now.metadata.deletion_timestamp.is_some() {
            return Progress::Refused("being deleted".to_owned());
        }
        if self.is_reached(now) {
            return Progress::Done;
        }
        if self == Self::Suspend && now.spec.operating_mode == OperatingMode::Running {
            return Progress::Refused(RESUMED.to_owned());
        }
        if let Some(ended) = self.ended(now) {
            return Progress::Refused(format!("its program has ended ({})", described(ended)));
        }
        match self.leading_condition(now) {
            Some(condition)
                if self.is_final(condition)
                    && has_changed(condition, before)
                    && !starts_cold_soon(condition, now) =>
            {
                Progress::Refused(refusal(condition))
            }
            Some(condition) => Progress::Waiting(described(condition)),
            None => Progress::Waiting("the controller has not set a condition yet".to_owned()),
        }
    }

    fn is_reached(self, sandbox: &Sandbox) -> bool {
        let all = conditions_of(sandbox);
        let of_this_spec =
            |condition: &Condition| condition.observed_generation >= sandbox.metadata.generation;
        let is_true = |type_| {
            conditions::find(all, type_).is_some_and(|c| c.status == "True" && of_this_spec(c))
        };
        match self {
            Self::Hibernate => conditions::is_true(all, HIBERNATED),
            Self::Wake => {
                let asleep = conditions::find(all, HIBERNATED).is_some_and(|c| {
                    let on_its_way = [hibernated::WAKING, hibernated::DOZING, hibernated::SAVING];
                    c.status == "True" || on_its_way.contains(&c.reason.as_str())
                });
                conditions::is_true(all, READY) && !asleep
            }
            Self::Suspend => is_true(SUSPENDED),
            Self::Resume => is_true(READY),
        }
    }

    /// Returns the condition `Finished` where the sandbox can neither sleep nor wake any more.
    fn ended(self, sandbox: &Sandbox) -> Option<&Condition> {
        let in_place = matches!(self, Self::Hibernate | Self::Wake);
        let finished = conditions::find(conditions_of(sandbox), FINISHED);
        finished.filter(|c| in_place && c.status == "True")
    }

    /// Returns the condition that describes the progress best.
    fn leading_condition(self, sandbox: &Sandbox) -> Option<&Condition> {
        let all = conditions_of(sandbox);
        let find = |type_| conditions::find(all, type_);
        match self {
            Self::Hibernate | Self::Suspend => find(HIBERNATED).or_else(|| find(SUSPENDED)),
            Self::Wake | Self::Resume => find(RESTORED)
                .filter(|c| c.status == "False")
                .or_else(|| find(HIBERNATED).filter(|_| self == Self::Wake))
                .or_else(|| find(READY)),
        }
    }

    /// Reports whether the fault in the condition does not end by waiting.
    fn is_final(self, condition: &Condition) -> bool {
        if condition.status != "False" {
            return false;
        }
        let reason = condition.reason.as_str();
        match self {
            Self::Hibernate => matches!(
                reason,
                hibernated::RUNTIME_NOT_CAPABLE | hibernated::INVALID_ANNOTATION
            ),
            // A suspension continues without the memory: RuntimeNotCapable means that the memory is
            // lost, not that the suspension failed.
            Self::Suspend => false,
            // The agent retries a wake in place.
            Self::Wake => matches!(
                reason,
                restored::IMAGE_MISSING
                    | restored::IMAGE_CORRUPT
                    | restored::FINGERPRINT_MISMATCH
                    | restored::RUNSC_REVOKED
            ),
            Self::Resume => {
                let goes_on = [
                    restored::COLD_STARTED,
                    // The node answers a request for the memory within seconds.
                    restored::ASKING_NODE,
                    restored::FETCHING,
                    restored::UPLOADING,
                    restored::IMAGE_CLAIMED,
                    // The fetch is retried.
                    restored::REPOSITORY_UNAVAILABLE,
                    restored::SOURCE_NODE_UNAVAILABLE,
                ];
                restored::ALL.contains(&reason) && !goes_on.contains(&reason)
            }
        }
    }
}

/// Reports whether the Sandbox has a `next-wakeup` in the past.
///
/// The controller reports an invalid one.
fn is_wakeup_past(sandbox: &Sandbox, now: Timestamp) -> bool {
    let settings = Settings::read(sandbox.metadata.annotations.as_ref(), None);
    settings.next_wakeup.is_some_and(|at| at <= now)
}

/// Reports whether the wait for the node that has the memory ends with a cold start.
fn starts_cold_soon(condition: &Condition, sandbox: &Sandbox) -> bool {
    let template = sandbox.spec.pod_template.annotations();
    let settings = Settings::read(sandbox.metadata.annotations.as_ref(), template);
    let gives_up = settings.restore_policy() == annotations::OnRestoreFailure::ColdStart;
    gives_up && condition.reason == restored::NODE_UNAVAILABLE
}

/// Reports whether the condition differs from that before the patch.
pub(crate) fn has_changed(condition: &Condition, before: &Sandbox) -> bool {
    let old = conditions::find(conditions_of(before), &condition.type_);
    old.is_none_or(|old| {
        (&old.reason, &old.message, &old.last_transition_time)
            != (
                &condition.reason,
                &condition.message,
                &condition.last_transition_time,
            )
    })
}

/// Returns reason and message of a condition.
pub(crate) fn described(condition: &Condition) -> String {
    match condition.message.is_empty() {
        true => condition.reason.clone(),
        false => format!("{}: {}", condition.reason, condition.message),
    }
}

/// Returns a condition with the remedy of its reason.
pub(crate) fn refusal(condition: &Condition) -> String {
    match texts::remedy(&condition.reason) {
        Some(remedy) => format!(
            "{}. Remedy: {remedy}",
            described(condition).trim_end_matches('.')
        ),
        None => described(condition),
    }
}

/// Returns a warning for a goal that was reached without the memory; `None` if all went well.
pub fn note(goal: Goal, now: &Sandbox) -> Option<String> {
    let all = conditions_of(now);
    match goal {
        Goal::Suspend if !conditions::is_true(all, HIBERNATED) => {
            let why = conditions::find(all, HIBERNATED).map(described);
            let strategy = Settings::read(
                now.metadata.annotations.as_ref(),
                now.spec.pod_template.annotations(),
            );
            match (why, strategy.strategy()) {
                (_, annotations::SuspensionStrategy::Freeze) => None,
                (Some(why), _) => Some(format!("memory was not kept ({why})")),
                (None, _) => Some("memory was not kept".to_owned()),
            }
        }
        Goal::Resume => conditions::find(all, RESTORED)
            .filter(|c| c.status == "False")
            .map(described),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn sandbox(mode: &str, conditions: &[(&str, &str, &str)]) -> Sandbox {
        let conditions: Vec<Value> = conditions
            .iter()
            .map(|(type_, status, reason)| {
                json!({
                    "type": type_, "status": status, "reason": reason, "message": "words",
                    "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 2,
                })
            })
            .collect();
        serde_json::from_value(json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {"name": "demo", "namespace": "x", "generation": 2, "resourceVersion": "7"},
            "spec": {"operatingMode": mode, "podTemplate": {"spec": {"containers": []}}},
            "status": {"conditions": conditions},
        }))
        .unwrap()
    }

    #[rstest]
    #[case(Goal::Hibernate, "Running", &[("Hibernated", "True", "Hibernated")])]
    #[case(Goal::Wake, "Running", &[("Hibernated", "False", "Awake"), ("Ready", "True", "X")])]
    #[case(Goal::Wake, "Running", &[("Ready", "True", "X")])]
    #[case(Goal::Suspend, "Suspended", &[("Suspended", "True", "PodTerminated")])]
    #[case(Goal::Resume, "Running", &[("Ready", "True", "DependenciesReady")])]
    fn a_goal_is_reached(
        #[case] goal: Goal,
        #[case] mode: &str,
        #[case] conditions: &[(&str, &str, &str)],
    ) {
        let now = sandbox(mode, conditions);
        assert_eq!(goal.progress(&now, &now), Progress::Done);
    }

    #[rstest]
    #[case(Goal::Hibernate, &[("Hibernated", "False", "Saving")])]
    #[case(Goal::Hibernate, &[("Hibernated", "False", "SaveFailed")])]
    #[case(Goal::Hibernate, &[("Hibernated", "False", "Dozing")])]
    #[case(Goal::Hibernate, &[])]
    #[case(Goal::Wake, &[("Hibernated", "True", "Hibernated"), ("Ready", "True", "X")])]
    #[case(Goal::Wake, &[("Hibernated", "False", "Waking"), ("Ready", "True", "X")])]
    #[case(Goal::Wake, &[("Hibernated", "False", "Dozing"), ("Ready", "True", "X")])]
    #[case(Goal::Wake, &[("Hibernated", "False", "Saving"), ("Ready", "True", "X")])]
    #[case(Goal::Wake, &[("Restored", "False", "RestoreFailed"), ("Hibernated", "True", "Hibernated")])]
    #[case(Goal::Suspend, &[("Hibernated", "False", "RuntimeNotCapable"), ("Suspended", "False", "X")])]
    #[case(Goal::Resume, &[("Ready", "False", "DependenciesNotReady")])]
    #[case(Goal::Resume, &[("Restored", "False", "ColdStarted"), ("Ready", "False", "X")])]
    #[case(Goal::Resume, &[("Restored", "False", "AskingNode"), ("Ready", "False", "X")])]
    #[case(Goal::Resume, &[("Restored", "False", "Fetching"), ("Ready", "False", "X")])]
    #[case(Goal::Resume, &[("Restored", "False", "RepositoryUnavailable"), ("Ready", "False", "X")])]
    #[case(Goal::Resume, &[("Restored", "False", "SourceNodeUnavailable"), ("Ready", "False", "X")])]
    fn a_condition_that_is_not_final_is_waited_for(
        #[case] goal: Goal,
        #[case] conditions: &[(&str, &str, &str)],
    ) {
        let mode = match goal {
            Goal::Suspend => "Suspended",
            _ => "Running",
        };
        let now = sandbox(mode, conditions);
        let before = sandbox("Running", &[]);
        assert!(matches!(goal.progress(&before, &now), Progress::Waiting(_)));
    }

    #[test]
    fn a_suspension_that_was_undone_meanwhile_is_refused() {
        let now = sandbox("Running", &[("Hibernated", "False", "Saving")]);
        let refused = Progress::Refused(RESUMED.to_owned());
        assert_eq!(Goal::Suspend.progress(&now, &now), refused);
    }

    #[rstest]
    #[case(Goal::Hibernate, ("Hibernated", "False", "RuntimeNotCapable"))]
    #[case(Goal::Hibernate, ("Hibernated", "False", "InvalidAnnotation"))]
    #[case(Goal::Wake, ("Restored", "False", "ImageCorrupt"))]
    #[case(Goal::Resume, ("Restored", "False", "NodeUnavailable"))]
    #[case(Goal::Resume, ("Restored", "False", "NodeMismatch"))]
    fn a_new_final_condition_is_a_refusal_with_a_remedy(
        #[case] goal: Goal,
        #[case] condition: (&str, &str, &str),
    ) {
        let now = sandbox("Running", &[condition]);
        let Progress::Refused(message) = goal.progress(&sandbox("Running", &[]), &now) else {
            panic!("not refused");
        };
        assert!(message.contains("words. Remedy: "), "{message}");
        assert!(matches!(goal.progress(&now, &now), Progress::Waiting(_)));
    }

    #[test]
    fn a_cold_start_to_come_is_waited_for() {
        let mut now = sandbox("Running", &[("Restored", "False", "NodeUnavailable")]);
        let cold = ("torpor.dev/on-restore-failure", "ColdStart");
        now.metadata.annotations = Some([(cold.0.to_owned(), cold.1.to_owned())].into());
        let progress = Goal::Resume.progress(&sandbox("Running", &[]), &now);
        let words = "NodeUnavailable: words".to_owned();
        assert_eq!(progress, Progress::Waiting(words));
    }

    #[test]
    fn a_program_that_has_ended_is_a_refusal() {
        let ended = [
            ("Finished", "True", "PodSucceeded"),
            ("Ready", "False", "X"),
        ];
        let now = sandbox("Running", &ended);
        for goal in [Goal::Hibernate, Goal::Wake] {
            let refused = Progress::Refused("its program has ended (PodSucceeded: words)".into());
            assert_eq!(goal.progress(&now, &now), refused);
        }
        // A resume ends with a new Pod.
        assert!(matches!(
            Goal::Resume.progress(&now, &now),
            Progress::Waiting(_)
        ));
    }

    #[test]
    fn a_condition_of_an_older_generation_does_not_count() {
        let mut now = sandbox("Suspended", &[("Suspended", "True", "PodTerminated")]);
        now.metadata.generation = Some(3);
        assert!(matches!(
            Goal::Suspend.progress(&now, &now),
            Progress::Waiting(_)
        ));
    }

    #[test]
    fn a_wake_overrides_the_annotations_of_sandbox_and_pod_template() {
        let now = "2026-01-01T12:00:00.2Z";
        let woken = |sandbox: &Sandbox| {
            let patch = Goal::Wake.patch(sandbox, now.parse().unwrap());
            patch.unwrap()["metadata"]["annotations"].clone()
        };
        let mut asleep = sandbox("Running", &[]);
        asleep.metadata.annotations = Some([(HIBERNATE.to_owned(), "true".to_owned())].into());
        assert_eq!(woken(&asleep), json!({HIBERNATE: null, WAKE_AT: now}));
        asleep.spec.pod_template.metadata = serde_json::from_value(json!({
            "annotations": {HIBERNATE: "true"},
        }))
        .unwrap();
        assert_eq!(woken(&asleep), json!({HIBERNATE: "false", WAKE_AT: now}));
    }

    #[rstest]
    #[case("True", "Hibernated")]
    #[case("False", "Dozing")]
    // The invalid annotation hides the state of the sleep.
    #[case("False", "InvalidAnnotation")]
    fn a_wake_sets_wake_at_whatever_made_the_sandbox_sleep_and_keeps_next_wakeup(
        #[case] status: &str,
        #[case] reason: &str,
    ) {
        let mut idle = sandbox("Running", &[("Hibernated", status, reason)]);
        let theirs = (NEXT_WAKEUP.to_owned(), "2026-01-02T07:00:00Z".to_owned());
        idle.metadata.annotations = Some([theirs].into());
        let patch = Goal::Wake.patch(&idle, "2026-01-01T12:00:00Z".parse().unwrap());
        let annotations = &patch.unwrap()["metadata"]["annotations"];
        assert_eq!(annotations[WAKE_AT], "2026-01-01T12:00:00Z");
        assert_eq!(annotations.get(NEXT_WAKEUP), None);
    }

    #[rstest]
    #[case(None, false)]
    #[case(Some("2026-01-01T11:59:59Z"), true)]
    #[case(Some("2026-01-01T12:00:01Z"), false)]
    #[case(Some("tomorrow"), false)]
    fn a_suspension_removes_a_next_wakeup_in_the_past_only(
        #[case] written: Option<&str>,
        #[case] over: bool,
    ) {
        let mut running = sandbox("Running", &[]);
        let time = |time: &str| [(NEXT_WAKEUP.to_owned(), time.to_owned())].into();
        running.metadata.annotations = written.map(time);
        let now = "2026-01-01T12:00:00Z".parse().unwrap();
        let patch = Goal::Suspend.patch(&running, now).unwrap();
        assert_eq!(patch["spec"], json!({"operatingMode": "Suspended"}));
        let off = json!({"annotations": {NEXT_WAKEUP: null}, "resourceVersion": "7"});
        assert_eq!(patch.get("metadata"), over.then_some(&off));
    }

    #[test]
    fn a_hibernation_removes_the_time_of_an_earlier_wake() {
        let patch = Goal::Hibernate.patch(&sandbox("Running", &[]), Timestamp::UNIX_EPOCH);
        let annotations = &patch.unwrap()["metadata"]["annotations"];
        assert_eq!(*annotations, json!({HIBERNATE: "true", WAKE_AT: null}));
    }

    #[rstest]
    #[case::in_step("2026-01-01T12:00:00.9Z", None)]
    #[case::hardly_ahead("2026-01-01T12:00:02Z", None)]
    #[case::ahead("2026-01-01T13:00:00Z", Some("2026-01-01T12:00:01Z"))]
    #[case::behind("2026-01-01T11:59:30Z", Some("2026-01-01T12:00:01Z"))]
    fn a_time_to_wake_is_corrected_to_the_clusters_clock(
        #[case] requested: &str,
        #[case] right: Option<&str>,
    ) {
        let mut written = sandbox("Running", &[]);
        written.metadata.annotations = Some([(WAKE_AT.to_owned(), requested.to_owned())].into());
        assert_eq!(
            Goal::Wake.corrected_time(&written),
            None,
            "the apiserver's time is unknown"
        );
        written.metadata.managed_fields = serde_json::from_value(json!([
            {"manager": "torpor-controller", "time": "2026-01-01T11:00:00Z"},
            {"manager": "kubectl-torpor", "time": "2026-01-01T12:00:00Z"},
        ]))
        .unwrap();
        let right = right.map(|right| json!({"metadata": {"annotations": {WAKE_AT: right}}}));
        assert_eq!(Goal::Wake.corrected_time(&written), right);
        assert_eq!(Goal::Resume.corrected_time(&written), None);
    }

    #[test]
    fn a_suspended_sandbox_is_resumed_and_not_woken() {
        let suspended = sandbox("Suspended", &[]);
        assert!(
            Goal::Wake
                .patch(&suspended, Timestamp::UNIX_EPOCH)
                .unwrap_err()
                .contains("resume")
        );
        Goal::Hibernate
            .patch(&suspended, Timestamp::UNIX_EPOCH)
            .unwrap_err();
    }

    #[test]
    fn lost_memory_is_a_warning() {
        let lost = sandbox(
            "Suspended",
            &[
                ("Suspended", "True", "PodTerminated"),
                ("Hibernated", "False", "RuntimeNotCapable"),
            ],
        );
        let warning = note(Goal::Suspend, &lost).unwrap();
        assert_eq!(warning, "memory was not kept (RuntimeNotCapable: words)");
        let kept = sandbox("Suspended", &[("Hibernated", "True", "Hibernated")]);
        assert_eq!(note(Goal::Suspend, &kept), None);
        let cold = sandbox("Running", &[("Restored", "False", "ColdStarted")]);
        assert_eq!(note(Goal::Resume, &cold).unwrap(), "ColdStarted: words");
    }
}
