//! How far a Sandbox is on its way to what was asked of it. Pure.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::{Value, json};
use torpor_api::annotations::{self, HIBERNATE, NEXT_WAKEUP, Settings, WAKE_AT};
use torpor_api::conditions::{self, FINISHED, HIBERNATED, READY, RESTORED, SUSPENDED};
use torpor_api::reasons::{hibernated, restored};
use torpor_api::{OperatingMode, Sandbox};

use crate::view::conditions_of;
use crate::words;

/// How far a time that was set by this machine's clock may be ahead of the apiserver's.
const AHEAD: SignedDuration = SignedDuration::from_secs(2);

/// What is said of one that was asked to suspend, and that somebody has resumed since.
pub const RESUMED: &str = "it was resumed meanwhile, and runs on";

/// What a command asks of a Sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    Hibernate,
    Wake,
    Suspend,
    Resume,
}

/// How far it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// On its way; the words say where.
    Waiting(String),
    Done,
    /// It will not get there without somebody doing something; what and why.
    Refused(String),
}

impl Goal {
    /// `hibernated`, behind "is" and "not yet".
    pub fn participle(self) -> &'static str {
        match self {
            Self::Hibernate => "hibernated",
            Self::Wake => "awake",
            Self::Suspend => "suspended",
            Self::Resume => "resumed",
        }
    }

    /// The merge patch that asks for it; `Err`: why it makes no sense for this Sandbox.
    pub fn patch(self, sandbox: &Sandbox, now: Timestamp) -> Result<Value, String> {
        let suspended = sandbox.spec.operating_mode == OperatingMode::Suspended;
        match self {
            Self::Hibernate if suspended => {
                Err("it is suspended: it has no Pod, its memory is on disk already".to_owned())
            }
            Self::Wake if suspended => {
                Err("it is suspended: `kubectl torpor resume` makes it run again".to_owned())
            }
            Self::Hibernate => {
                // Also a time of an earlier wake that is still to come would wake it.
                let annotations = json!({HIBERNATE: "true", WAKE_AT: null});
                Ok(json!({"metadata": {"annotations": annotations}}))
            }
            Self::Wake => {
                // A wish in the pod template holds until the Sandbox itself says otherwise.
                let template = sandbox.spec.pod_template.annotations();
                let by_template = template.is_some_and(|all| all.contains_key(HIBERNATE));
                let value = by_template.then_some("false");
                // Of one that fell asleep by itself there is no wish to take back. It may do so again as after any use.
                let annotations = json!({HIBERNATE: value, WAKE_AT: now.to_string()});
                Ok(json!({"metadata": {"annotations": annotations}}))
            }
            Self::Suspend => {
                let mut patch = json!({"spec": {"operatingMode": "Suspended"}});
                // A time that is over would resume it at once; one that is still to come stays, also if somebody is just setting it.
                if was_to_be_awake(sandbox, now) {
                    patch["metadata"] = json!({
                        "annotations": {NEXT_WAKEUP: null},
                        "resourceVersion": sandbox.metadata.resource_version,
                    });
                }
                Ok(patch)
            }
            Self::Resume => Ok(json!({"spec": {"operatingMode": "Running"}})),
        }
    }

    /// The patch that sets the time right that was asked for, by the apiserver's clock, as far as `written` tells it; none where it is right. A sandbox sleeps and wakes by the
    /// cluster's clock: a time that is behind may be before it fell asleep, which wakes nobody, and one that is ahead is waited for.
    pub fn set_right(self, written: &Sandbox) -> Option<Value> {
        if self != Self::Wake {
            return None;
        }
        let metadata = &written.metadata;
        let asked = metadata.annotations.as_ref()?.get(WAKE_AT)?;
        let asked = asked.parse::<Timestamp>().ok()?;
        let writes = metadata.managed_fields.iter().flatten();
        // In whole seconds.
        let theirs = writes
            .filter_map(|write| Some(write.time.as_ref()?.0))
            .max()?;
        if (SignedDuration::ZERO..=AHEAD).contains(&asked.duration_since(theirs)) {
            return None;
        }
        let next = theirs.checked_add(SignedDuration::from_secs(1)).ok()?;
        let annotations = json!({WAKE_AT: next.to_string()});
        Some(json!({"metadata": {"annotations": annotations}}))
    }

    /// Whether the Sandbox' Pod lacks what the controller is to copy to it.
    pub fn is_not_copied(self, pod: &Pod) -> bool {
        let annotations = pod.metadata.annotations.as_ref();
        self == Self::Wake && annotations.is_none_or(|all| !all.contains_key(WAKE_AT))
    }

    /// How far `now` is, where `before` is the Sandbox as it was when the patch was sent: what stood there then is no answer to it.
    pub fn progress(self, before: &Sandbox, now: &Sandbox) -> Progress {
        if now.metadata.deletion_timestamp.is_some() {
            return Progress::Refused("it is being deleted".to_owned());
        }
        if self.is_reached(now) {
            return Progress::Done;
        }
        if self == Self::Suspend && now.spec.operating_mode == OperatingMode::Running {
            return Progress::Refused(RESUMED.to_owned());
        }
        if let Some(ended) = self.ended(now) {
            return Progress::Refused(format!("its program has ended ({})", said(ended)));
        }
        match self.telling(now) {
            Some(condition)
                if self.is_final(condition)
                    && is_news(condition, before)
                    && !starts_cold_soon(condition, now) =>
            {
                Progress::Refused(refusal(condition))
            }
            Some(condition) => Progress::Waiting(said(condition)),
            None => Progress::Waiting("the controller has not said anything yet".to_owned()),
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

    /// The condition that says that there is nothing left to sleep or to wake.
    fn ended(self, sandbox: &Sandbox) -> Option<&Condition> {
        let in_place = matches!(self, Self::Hibernate | Self::Wake);
        let finished = conditions::find(conditions_of(sandbox), FINISHED);
        finished.filter(|c| in_place && c.status == "True")
    }

    /// The condition that has most to say of the way there.
    fn telling(self, sandbox: &Sandbox) -> Option<&Condition> {
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

    /// Whether waiting alone will not mend what the condition says.
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
            // A suspension goes on without the memory; RuntimeNotCapable is what was lost, not that it failed.
            Self::Suspend => false,
            // The agent tries a wake in place again by itself.
            Self::Wake => matches!(
                reason,
                restored::IMAGE_MISSING
                    | restored::IMAGE_CORRUPT
                    | restored::FINGERPRINT_MISMATCH
                    | restored::RUNSC_REVOKED
            ),
            // The node that is asked for the memory answers within seconds.
            Self::Resume => {
                let goes_on = [restored::COLD_STARTED, restored::ASKING_NODE];
                restored::ALL.contains(&reason) && !goes_on.contains(&reason)
            }
        }
    }
}

/// Whether a time at which it is to be awake stands there and is over. The controller tells of a wrong one.
fn was_to_be_awake(sandbox: &Sandbox, now: Timestamp) -> bool {
    let settings = Settings::read(sandbox.metadata.annotations.as_ref(), None);
    settings.next_wakeup.is_some_and(|at| at <= now)
}

/// Whether the node of its memory is waited for, and only for a while.
fn starts_cold_soon(condition: &Condition, sandbox: &Sandbox) -> bool {
    let template = sandbox.spec.pod_template.annotations();
    let settings = Settings::read(sandbox.metadata.annotations.as_ref(), template);
    let gives_up = settings.restore_policy() == annotations::OnRestoreFailure::ColdStart;
    gives_up && condition.reason == restored::NODE_UNAVAILABLE
}

/// Whether the condition says something else than before the patch.
fn is_news(condition: &Condition, before: &Sandbox) -> bool {
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

fn said(condition: &Condition) -> String {
    match condition.message.is_empty() {
        true => condition.reason.clone(),
        false => format!("{}: {}", condition.reason, condition.message),
    }
}

fn refusal(condition: &Condition) -> String {
    match words::remedy(&condition.reason) {
        Some(remedy) => format!(
            "{}. Remedy: {remedy}",
            said(condition).trim_end_matches('.')
        ),
        None => said(condition),
    }
}

/// What the user should know once it is done: what was lost, what will happen next.
pub fn note(goal: Goal, now: &Sandbox) -> Option<String> {
    let all = conditions_of(now);
    match goal {
        Goal::Suspend if !conditions::is_true(all, HIBERNATED) => {
            let why = conditions::find(all, HIBERNATED).map(said);
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
            .map(said),
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
    fn on_the_way_the_conditions_words_are_told(
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
    fn a_suspension_that_somebody_has_taken_back_is_not_waited_for() {
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
    fn what_waiting_does_not_mend_is_a_refusal_with_a_remedy_unless_it_stood_there_before(
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
    fn where_the_memory_is_given_up_in_a_while_that_is_waited_for() {
        let mut now = sandbox("Running", &[("Restored", "False", "NodeUnavailable")]);
        let cold = ("torpor.dev/on-restore-failure", "ColdStart");
        now.metadata.annotations = Some([(cold.0.to_owned(), cold.1.to_owned())].into());
        let progress = Goal::Resume.progress(&sandbox("Running", &[]), &now);
        let words = "NodeUnavailable: words".to_owned();
        assert_eq!(progress, Progress::Waiting(words));
    }

    #[test]
    fn nobody_waits_for_a_program_that_has_ended() {
        let ended = [
            ("Finished", "True", "PodSucceeded"),
            ("Ready", "False", "X"),
        ];
        let now = sandbox("Running", &ended);
        for goal in [Goal::Hibernate, Goal::Wake] {
            let refused = Progress::Refused("its program has ended (PodSucceeded: words)".into());
            assert_eq!(goal.progress(&now, &now), refused);
        }
        // That ends with a new Pod.
        assert!(matches!(
            Goal::Resume.progress(&now, &now),
            Progress::Waiting(_)
        ));
    }

    #[test]
    fn a_condition_of_an_older_spec_reaches_nothing() {
        let mut now = sandbox("Suspended", &[("Suspended", "True", "PodTerminated")]);
        now.metadata.generation = Some(3);
        assert!(matches!(
            Goal::Suspend.progress(&now, &now),
            Progress::Waiting(_)
        ));
    }

    #[test]
    fn waking_takes_the_wish_back_also_that_of_the_pod_template() {
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
    // What it says of its sleep is hidden behind a wrong annotation.
    #[case("False", "InvalidAnnotation")]
    fn whatever_made_it_sleep_it_is_woken_and_no_time_but_the_plugins_own_is_touched(
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
    fn a_suspension_takes_a_time_off_that_is_over_and_that_one_only(
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
    fn who_hibernates_it_takes_the_time_of_an_earlier_wake_off() {
        let patch = Goal::Hibernate.patch(&sandbox("Running", &[]), Timestamp::UNIX_EPOCH);
        let annotations = &patch.unwrap()["metadata"]["annotations"];
        assert_eq!(*annotations, json!({HIBERNATE: "true", WAKE_AT: null}));
    }

    #[rstest]
    #[case::in_step("2026-01-01T12:00:00.9Z", None)]
    #[case::hardly_ahead("2026-01-01T12:00:02Z", None)]
    #[case::ahead("2026-01-01T13:00:00Z", Some("2026-01-01T12:00:01Z"))]
    #[case::behind("2026-01-01T11:59:30Z", Some("2026-01-01T12:00:01Z"))]
    fn a_time_to_wake_is_one_of_the_clusters_clock(
        #[case] asked: &str,
        #[case] right: Option<&str>,
    ) {
        let mut written = sandbox("Running", &[]);
        written.metadata.annotations = Some([(WAKE_AT.to_owned(), asked.to_owned())].into());
        assert_eq!(
            Goal::Wake.set_right(&written),
            None,
            "nobody tells the time"
        );
        written.metadata.managed_fields = serde_json::from_value(json!([
            {"manager": "torpor-controller", "time": "2026-01-01T11:00:00Z"},
            {"manager": "kubectl-torpor", "time": "2026-01-01T12:00:00Z"},
        ]))
        .unwrap();
        let right = right.map(|right| json!({"metadata": {"annotations": {WAKE_AT: right}}}));
        assert_eq!(Goal::Wake.set_right(&written), right);
        assert_eq!(Goal::Resume.set_right(&written), None);
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
    fn what_was_lost_is_told() {
        let lost = sandbox(
            "Suspended",
            &[
                ("Suspended", "True", "PodTerminated"),
                ("Hibernated", "False", "RuntimeNotCapable"),
            ],
        );
        let told = note(Goal::Suspend, &lost).unwrap();
        assert_eq!(told, "memory was not kept (RuntimeNotCapable: words)");
        let kept = sandbox("Suspended", &[("Hibernated", "True", "Hibernated")]);
        assert_eq!(note(Goal::Suspend, &kept), None);
        let cold = sandbox("Running", &[("Restored", "False", "ColdStarted")]);
        assert_eq!(note(Goal::Resume, &cold).unwrap(), "ColdStarted: words");
    }
}
