//! No client required. Derives the countable transitions of a Sandbox from two consecutive
//! statuses.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use torpor_api::{OperatingMode, Sandbox, SandboxStatus, conditions, reasons::sandbox as reasons};

/// Transition of a Sandbox. The texts are values of upstream's labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    SuspendRequested,
    /// Result: `pod_terminated` is upstream's; `frozen` is Torpor's, where the Pod stays.
    Suspended(&'static str),
    /// A suspended Sandbox is to run again.
    ResumeRequested,
    Resumed,
    /// Reason: `PodSucceeded` or `PodFailed`.
    Finished(&'static str),
    Expired,
}

/// Change in progress when a pass fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Suspend,
    Resume,
}

/// Returns the transitions between two statuses, in order.
///
/// `resumes`: this process has counted the request to resume. The statuses show the request too,
/// but only to the second.
pub fn between(before: &SandboxStatus, after: &SandboxStatus, resumes: bool) -> Vec<Transition> {
    let mut transitions = Vec::new();
    let (was, is) = (suspended(before), suspended(after));
    if !was.is_some_and(wanted) && is.is_some_and(wanted) {
        transitions.push(Transition::SuspendRequested);
    }
    if let Some(now) = is
        && !was.is_some_and(done)
        && done(now)
    {
        transitions.push(Transition::Suspended(
            if now.reason == reasons::POD_TERMINATED {
                "pod_terminated"
            } else {
                "frozen"
            },
        ));
    }
    let asked = was.is_some_and(done) && is.is_some_and(|now| !wanted(now));
    if asked {
        transitions.push(Transition::ResumeRequested);
    }
    if (asked || resumes || resuming(before)) && !ready(before) && ready(after) {
        transitions.push(Transition::Resumed);
    }
    if let (None, Some(why)) = (finished(before), finished(after)) {
        transitions.push(Transition::Finished(why));
    }
    if !expired(before) && expired(after) {
        transitions.push(Transition::Expired);
    }
    transitions
}

/// Returns the change that a failed pass over this Sandbox prevented.
pub fn under_way(sandbox: &Sandbox) -> Option<Change> {
    let status = sandbox.status.as_ref();
    let is = status.and_then(suspended);
    match sandbox.spec.operating_mode {
        OperatingMode::Suspended if !is.is_some_and(done) => Some(Change::Suspend),
        OperatingMode::Suspended => None,
        OperatingMode::Running => {
            let resumes = is.is_some_and(done) || status.is_some_and(resuming);
            resumes.then_some(Change::Resume)
        }
    }
}

fn suspended(status: &SandboxStatus) -> Option<&Condition> {
    conditions::find(&status.conditions, conditions::SUSPENDED)
}

fn wanted(suspended: &Condition) -> bool {
    suspended.reason != reasons::NOT_SUSPENDED
}

fn done(suspended: &Condition) -> bool {
    suspended.status == "True"
}

fn ready(status: &SandboxStatus) -> bool {
    conditions::is_true(&status.conditions, conditions::READY)
}

/// Reports whether the Sandbox is being resumed.
///
/// Then Ready ended with the request to suspend, before Suspended ended. A new Sandbox has both
/// conditions since the same moment; a Sandbox that was Ready in between lost Ready after Suspended
/// ended.
fn resuming(status: &SandboxStatus) -> bool {
    let ready = conditions::find(&status.conditions, conditions::READY);
    let (Some(ready), Some(suspended)) = (ready, suspended(status)) else {
        return false;
    };
    ready.status != "True"
        && suspended.status == "False"
        && !wanted(suspended)
        && ready.last_transition_time < suspended.last_transition_time
}

fn finished(status: &SandboxStatus) -> Option<&'static str> {
    let finished = conditions::find(&status.conditions, conditions::FINISHED)
        .filter(|finished| finished.status == "True")?;
    match finished.reason.as_str() {
        reasons::POD_SUCCEEDED => Some(reasons::POD_SUCCEEDED),
        reasons::POD_FAILED => Some(reasons::POD_FAILED),
        _ => Some("unknown"),
    }
}

fn expired(status: &SandboxStatus) -> bool {
    conditions::find(&status.conditions, conditions::READY)
        .is_some_and(|ready| ready.reason == reasons::SANDBOX_EXPIRED)
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use rstest::rstest;
    use torpor_api::conditions::{Draft, Status, set};

    use super::*;

    /// Builds a status from type, truth, second of the transition and reason of each condition.
    fn status(conditions: &[(&'static str, bool, i64, &'static str)]) -> SandboxStatus {
        let mut status = SandboxStatus::default();
        for (type_, yes, second, reason) in conditions {
            let value = if *yes { Status::True } else { Status::False };
            let now = Timestamp::from_second(*second).unwrap();
            set(
                &mut status.conditions,
                Draft::new(type_, value, *reason, ""),
                None,
                now,
            );
        }
        status
    }

    const S: &str = conditions::SUSPENDED;
    const R: &str = conditions::READY;
    const F: &str = conditions::FINISHED;
    const NEW: &[(&str, bool, i64, &str)] = &[(S, false, 1, "NotSuspended"), (R, false, 1, "r")];
    const UP: &[(&str, bool, i64, &str)] = &[(S, false, 1, "NotSuspended"), (R, true, 2, "r")];
    const FLAPPED: &[(&str, bool, i64, &str)] =
        &[(S, false, 1, "NotSuspended"), (R, false, 3, "r")];
    const GOING: &[(&str, bool, i64, &str)] =
        &[(S, false, 1, "PodTerminating"), (R, false, 4, "r")];
    const OFF: &[(&str, bool, i64, &str)] = &[(S, true, 5, "PodTerminated"), (R, false, 4, "r")];
    const FROZEN: &[(&str, bool, i64, &str)] = &[(S, true, 5, "PodFrozen"), (R, false, 4, "r")];
    const BACK: &[(&str, bool, i64, &str)] = &[(S, false, 6, "NotSuspended"), (R, false, 4, "r")];
    const AGAIN: &[(&str, bool, i64, &str)] = &[(S, false, 6, "NotSuspended"), (R, true, 7, "r")];
    const FAILED: &[(&str, bool, i64, &str)] = &[(F, true, 9, "PodFailed")];
    const OVER: &[(&str, bool, i64, &str)] = &[(R, false, 9, "SandboxExpired")];

    #[rstest]
    #[case(&[], NEW, &[])]
    #[case(NEW, UP, &[])]
    #[case(FLAPPED, UP, &[])]
    #[case(UP, UP, &[])]
    #[case(UP, GOING, &[Transition::SuspendRequested])]
    #[case(GOING, GOING, &[])]
    #[case(GOING, OFF, &[Transition::Suspended("pod_terminated")])]
    #[case(GOING, FROZEN, &[Transition::Suspended("frozen")])]
    #[case(UP, OFF, &[Transition::SuspendRequested, Transition::Suspended("pod_terminated")])]
    // Created suspended.
    #[case(&[], OFF, &[Transition::SuspendRequested, Transition::Suspended("pod_terminated")])]
    // The suspension was cancelled.
    #[case(GOING, BACK, &[])]
    #[case(OFF, BACK, &[Transition::ResumeRequested])]
    #[case(BACK, AGAIN, &[Transition::Resumed])]
    #[case(OFF, AGAIN, &[Transition::ResumeRequested, Transition::Resumed])]
    #[case(UP, FAILED, &[Transition::Finished("PodFailed")])]
    #[case(FAILED, FAILED, &[])]
    #[case(UP, OVER, &[Transition::Expired])]
    #[case(OVER, OVER, &[])]
    fn transitions_are_derived_from_two_statuses(
        #[case] before: &[(&'static str, bool, i64, &'static str)],
        #[case] after: &[(&'static str, bool, i64, &'static str)],
        #[case] transitions: &[Transition],
    ) {
        assert_eq!(between(&status(before), &status(after), false), transitions);
    }

    #[test]
    fn a_resume_within_a_second_is_counted_by_the_process_that_saw_it() {
        let quick = status(&[(S, false, 4, "NotSuspended"), (R, false, 4, "r")]);
        assert_eq!(between(&quick, &status(AGAIN), true), [Transition::Resumed]);
        assert_eq!(between(&quick, &status(AGAIN), false), []);
    }

    #[rstest]
    #[case(OperatingMode::Suspended, UP, Some(Change::Suspend))]
    #[case(OperatingMode::Suspended, GOING, Some(Change::Suspend))]
    #[case(OperatingMode::Suspended, OFF, None)]
    #[case(OperatingMode::Running, OFF, Some(Change::Resume))]
    #[case(OperatingMode::Running, BACK, Some(Change::Resume))]
    #[case(OperatingMode::Running, AGAIN, None)]
    #[case(OperatingMode::Running, NEW, None)]
    fn a_failed_pass_prevents_the_change_in_progress(
        #[case] mode: OperatingMode,
        #[case] conditions: &[(&'static str, bool, i64, &'static str)],
        #[case] change: Option<Change>,
    ) {
        let mut sandbox = Sandbox::default();
        sandbox.spec.operating_mode = mode;
        sandbox.status = Some(status(conditions));
        assert_eq!(under_way(&sandbox), change);
    }
}
