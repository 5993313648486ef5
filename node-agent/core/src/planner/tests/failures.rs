//! The effect of one failure on other work.

use super::*;

fn failed() -> Outcome {
    Outcome::Failed {
        reason: "SaveFailed".into(),
        message: "read-only file system".into(),
    }
}

#[test]
fn a_failed_removal_keeps_no_sandbox_paused() {
    let mut observed = observed(Live::Paused, &[saving(1)], &[1]);
    observed.images[0].state = ImageState::Partial;
    let removals = [
        Action::DiscardPartial { image: image(1) },
        Action::DiscardImage { image: image(1) },
    ];
    for removal in removals.iter().cycle().take(8) {
        observed.failures.note(removal, &failed(), at(999));
    }
    let checkpoint = Action::Checkpoint { image: image(1) };
    observed.failures.note(&checkpoint, &failed(), at(999));
    let plan = planned(&desired(Power::Asleep), &observed);
    assert_eq!(kinds(&plan), [StepKind::Resume], "why: {:?}", plan.why);
    // The reverse holds, too: leftovers are removed, however long a resume has to wait.
    observed.failures = Failures::default();
    for _ in 0..8 {
        observed.failures.note(&Action::Resume, &failed(), at(999));
    }
    assert_steps(
        &desired(Power::Awake),
        &observed,
        &[StepKind::DiscardPartial],
    );
}

#[test]
fn a_failed_wake_is_no_longer_reported_once_another_process_woke_the_sandbox() {
    let mut asleep = hibernated();
    let wake = Action::Wake { image: image(1) };
    asleep.failures.note(&wake, &failed(), at(999));
    let restored = |observed: &Observed| planned(&desired(Power::Asleep), observed).status.restored;
    for live in [Live::None, Live::Unknown] {
        asleep.failures.saw(live);
        assert!(restored(&asleep).is_some(), "it has not woken since");
    }
    asleep.failures.saw(Live::Running);
    assert_eq!(restored(&asleep), None);
    assert_steps(&desired(Power::Awake), &asleep, &[StepKind::Wake]);
}

#[test]
fn a_failed_end_is_forgotten_once_the_sandbox_runs_again() {
    let (end, checkpoint) = (
        Action::End { image: image(1) },
        Action::Checkpoint { image: image(1) },
    );
    for (action, kept) in [(end, false), (checkpoint, true)] {
        let mut failures = Failures::default();
        let unknown = Outcome::Unknown {
            message: "the keeper gave no answer".to_owned(),
        };
        failures.note(&action, &unknown, at(999));
        for live in [Live::None, Live::Unknown, Live::Paused] {
            failures.saw(live);
            assert!(failures.save.is_some(), "it has not run since");
        }
        failures.saw(Live::Running);
        assert_eq!(failures.save.is_some(), kept, "{action:?}");
    }
}
