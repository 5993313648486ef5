//! No client required. The turns of a Sandbox's life that are counted, as two of its statuses tell them, one written after the other.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use torpor_api::{OperatingMode, Sandbox, SandboxStatus, conditions, reasons::sandbox as reasons};

/// A turn of a Sandbox's life. The texts are values of upstream's labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    SuspendRequested,
    /// How: `pod_terminated` is upstream's; `frozen` is Torpor's, where the Pod stays.
    Suspended(&'static str),
    /// It was suspended, and is wanted again.
    ResumeRequested,
    Resumed,
    /// Why: `PodSucceeded` or `PodFailed`.
    Finished(&'static str),
    Expired,
}

/// What is under way when a pass fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Suspend,
    Resume,
}

/// The turns between two statuses, in their order. `resumes`: this process has counted that the Sandbox is wanted again. (The statuses tell that too, but to the second.)
pub fn between(before: &SandboxStatus, after: &SandboxStatus, resumes: bool) -> Vec<Turn> {
    let mut turns = Vec::new();
    let (was, is) = (suspended(before), suspended(after));
    if !was.is_some_and(wanted) && is.is_some_and(wanted) {
        turns.push(Turn::SuspendRequested);
    }
    if let Some(now) = is
        && !was.is_some_and(done)
        && done(now)
    {
        turns.push(Turn::Suspended(if now.reason == reasons::POD_TERMINATED {
            "pod_terminated"
        } else {
            "frozen"
        }));
    }
    let asked = was.is_some_and(done) && is.is_some_and(|now| !wanted(now));
    if asked {
        turns.push(Turn::ResumeRequested);
    }
    if (asked || resumes || resuming(before)) && !ready(before) && ready(after) {
        turns.push(Turn::Resumed);
    }
    if let (None, Some(why)) = (finished(before), finished(after)) {
        turns.push(Turn::Finished(why));
    }
    if !expired(before) && expired(after) {
        turns.push(Turn::Expired);
    }
    turns
}

/// What a failed pass over this Sandbox kept from happening.
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

/// Ready ended when the suspension was asked for, which is before the suspension ended. A new Sandbox has both since the same moment, and one that was Ready since lost it later.
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

    /// Type, whether True, since which second, and the reason of each condition.
    fn status(said: &[(&'static str, bool, i64, &'static str)]) -> SandboxStatus {
        let mut status = SandboxStatus::default();
        for (type_, yes, second, reason) in said {
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
    #[case(UP, GOING, &[Turn::SuspendRequested])]
    #[case(GOING, GOING, &[])]
    #[case(GOING, OFF, &[Turn::Suspended("pod_terminated")])]
    #[case(GOING, FROZEN, &[Turn::Suspended("frozen")])]
    #[case(UP, OFF, &[Turn::SuspendRequested, Turn::Suspended("pod_terminated")])]
    // Created suspended.
    #[case(&[], OFF, &[Turn::SuspendRequested, Turn::Suspended("pod_terminated")])]
    // The suspension was called off.
    #[case(GOING, BACK, &[])]
    #[case(OFF, BACK, &[Turn::ResumeRequested])]
    #[case(BACK, AGAIN, &[Turn::Resumed])]
    #[case(OFF, AGAIN, &[Turn::ResumeRequested, Turn::Resumed])]
    #[case(UP, FAILED, &[Turn::Finished("PodFailed")])]
    #[case(FAILED, FAILED, &[])]
    #[case(UP, OVER, &[Turn::Expired])]
    #[case(OVER, OVER, &[])]
    fn turns_are_told_by_two_statuses(
        #[case] before: &[(&'static str, bool, i64, &'static str)],
        #[case] after: &[(&'static str, bool, i64, &'static str)],
        #[case] turns: &[Turn],
    ) {
        assert_eq!(between(&status(before), &status(after), false), turns);
    }

    #[test]
    fn a_resume_within_a_second_is_known_by_this_process() {
        let quick = status(&[(S, false, 4, "NotSuspended"), (R, false, 4, "r")]);
        assert_eq!(between(&quick, &status(AGAIN), true), [Turn::Resumed]);
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
    fn a_failed_pass_keeps_a_change_from_happening(
        #[case] mode: OperatingMode,
        #[case] said: &[(&'static str, bool, i64, &'static str)],
        #[case] change: Option<Change>,
    ) {
        let mut sandbox = Sandbox::default();
        sandbox.spec.operating_mode = mode;
        sandbox.status = Some(status(said));
        assert_eq!(under_way(&sandbox), change);
    }
}
