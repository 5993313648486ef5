use jiff::Timestamp;
use torpor_core::ids::{Namespace, PodUid};
use torpor_core::state::Live;
use torpor_core::steps::{Fence, StepKind};
use torpor_messages::service::Basis;
use torpor_records::WakeCause;
use torpor_snapshots::{Digest, Store};

use super::room::SAVE_LIMIT;
use super::*;
use crate::node::tests::one_pod;

fn image(name: &str) -> ImageId {
    ImageId::parse(name).expect("an image's name")
}

/// Returns a step that was planned for a sandbox of the Pod and an empty ledger.
fn step(sandbox: Option<&SandboxId>, action: Action) -> Step {
    Step {
        fence: Fence {
            pod_uid: PodUid::new("pod-a").expect("a uid"),
            sandbox_id: sandbox.cloned(),
            ledger_seq: 0,
        },
        before: None,
        action,
        after: None,
    }
}

fn request(steps: Vec<Step>, basis: Basis) -> Steps {
    Steps {
        steps,
        stops_for: None,
        basis,
        by_itself: false,
        decided: Timestamp::UNIX_EPOCH,
        cause: WakeCause::Asked,
        reserve: 0,
        namespace_limit: None,
        rules: None,
        pod: None,
    }
}

/// Returns the state of a sandbox without processes and containers.
fn gone() -> Basis {
    Basis {
        live: Live::None,
        dozes: false,
        in_session: false,
        containers: Digest::of(b""),
    }
}

#[test]
fn steps_are_taken_only_in_the_state_that_they_were_planned_for() {
    let (_dir, node, pod) = one_pod();
    let record = || vec![step(Some(&pod.sandbox), Action::Record)];
    let outcomes = |basis| {
        let mut outcomes = Vec::new();
        let request = request(record(), basis);
        let report = |_, outcome, _| outcomes.push(outcome);
        take(&node, &pod.sandbox, &request, report).expect("answered");
        outcomes
    };
    assert_eq!(outcomes(gone()), [Outcome::Done]);
    for other in [
        Basis {
            live: Live::Paused,
            ..gone()
        },
        Basis {
            dozes: true,
            ..gone()
        },
        Basis {
            in_session: true,
            ..gone()
        },
        Basis {
            containers: Digest::of(b"one more"),
            ..gone()
        },
    ] {
        assert_eq!(outcomes(other), [Outcome::Stale], "{other:?}");
    }
    let _held = node.records.lock(&pod.sandbox).expect("locked");
    assert_eq!(outcomes(gone()), [Outcome::Stale], "another has the lock");
}

#[test]
fn a_sandbox_is_not_stopped_for_an_image_that_there_is_no_room_for() {
    let steps = [
        Action::Pause,
        Action::Checkpoint {
            image: image("pod-a.1"),
        },
    ]
    .map(|action| step(None, action));
    let full = || Outcome::Failed {
        reason: "DiskFull".to_owned(),
        message: "no room".to_owned(),
    };
    for (stops_for, refusal, acts, reports) in [
        (Some(1), Some(full()), 0, vec![(1, full())]),
        (
            Some(1),
            None,
            2,
            vec![(0, Outcome::Done), (1, Outcome::Done)],
        ),
        // The sandbox is paused already.
        (
            None,
            Some(full()),
            2,
            vec![(0, Outcome::Done), (1, Outcome::Done)],
        ),
    ] {
        let (mut acted, mut reported) = (0, Vec::new());
        let act = |acted: &mut usize, _: &Step| {
            *acted += 1;
            Outcome::Done
        };
        let report = |index, outcome, _| reported.push((index, outcome));
        take_each(&steps, stops_for, &mut acted, |_| refusal, act, report);
        assert_eq!((acted, reported), (acts, reports));
    }
}

#[test]
fn the_steps_after_one_that_did_not_succeed_are_not_taken() {
    let steps = [Action::Pause, Action::Resume, Action::Freeze].map(|action| step(None, action));
    let mut acted = Vec::new();
    let act = |acted: &mut Vec<StepKind>, step: &Step| {
        acted.push(step.action.kind());
        match step.action {
            Action::Resume => without_image(),
            _ => Outcome::Already,
        }
    };
    let mut reported = 0;
    take_each(
        &steps,
        None,
        &mut acted,
        |_| None,
        act,
        |_, _, _| reported += 1,
    );
    assert_eq!(acted, [StepKind::Pause, StepKind::Resume]);
    assert_eq!(reported, 2);
}

#[test]
fn a_namespace_at_its_limit_gets_no_image_that_can_wait() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(dir.path()).expect("a store");
    let pod = PodUid::new("pod-a").expect("a uid");
    let [full, other] = ["full", "other"].map(|name| Namespace::new(name).expect("a name"));
    let partial = store.begin(&full, &image("pod-b.1")).expect("begun");
    let file = partial.open_file("pages.img").expect("made");
    std::fs::File::from(file).set_len(80).expect("set");
    let refused = |namespace, limit, expected| {
        let place = Place {
            store: &store,
            namespace,
            pod: &pod,
            sandbox: None,
        };
        no_room_for(&place, Some(expected), 0, limit)
    };
    assert_eq!(refused(&full, Some(100), 20), None);
    assert_eq!(refused(&other, Some(100), 100), None);
    assert_eq!(refused(&full, None, 21), None, "its Pod ends");
    let Some(Outcome::Failed { reason, message }) = refused(&full, Some(100), 21) else {
        panic!("not refused");
    };
    assert_eq!(reason, "NamespaceStoreFull");
    assert!(message.contains("namespace full"), "{message}");
}

#[test]
fn a_sandbox_that_no_packet_would_wake_sleeps_only_on_request() {
    let refused = |reason: &str| keeper::Error::Refused {
        reason: reason.to_owned(),
        message: "packets will not wake the Pod: no veth pair".to_owned(),
    };
    let failure = unwatched(true, Some(&refused(NOT_WATCHED)));
    let Some(Outcome::Failed { reason, message }) = failure else {
        panic!("{failure:?}");
    };
    assert_eq!(reason, NOT_WATCHED);
    assert!(message.contains("no veth pair"), "{message}");
    assert_eq!(unwatched(false, Some(&refused(NOT_WATCHED))), None);
    assert_eq!(unwatched(true, Some(&refused("NoRecord"))), None);
    assert_eq!(unwatched(true, None), None);
}

#[test]
fn a_large_sandbox_has_the_time_that_a_slow_disk_takes() {
    const SLOW_DISK: u64 = 60_000_000;
    for gibibytes in [0_u64, 1, 18, 64, 512] {
        let memory = gibibytes << 30;
        let takes = Duration::from_secs(memory / SLOW_DISK);
        assert!(save_limit(Some(memory)) > takes, "{gibibytes} GiB");
    }
    assert_eq!(save_limit(None), SAVE_LIMIT);
}

#[test]
fn a_sandbox_that_was_used_after_the_look_does_not_fall_asleep_by_itself() {
    let (_dir, node, pod) = one_pod();
    let outcomes = |by_itself, decided: Timestamp| {
        let record = step(Some(&pod.sandbox), Action::Record);
        let request = Steps {
            by_itself,
            decided,
            ..request(vec![record], gone())
        };
        let mut outcomes = Vec::new();
        let report = |_, outcome, _| outcomes.push(outcome);
        take(&node, &pod.sandbox, &request, report).expect("answered");
        outcomes
    };
    node.records.note_call(&pod.sandbox).expect("noted");
    // The first look makes the file whose time is that of the last exec.
    outcomes(false, Timestamp::now());
    let used = node.records.last_use(&pod.sandbox).expect("used");
    let used = Timestamp::try_from(used).expect("a time");
    let second = Duration::from_secs(1);
    assert_eq!(outcomes(true, used - second), [Outcome::Stale]);
    assert_eq!(outcomes(true, used + second), [Outcome::Done]);
    assert_eq!(
        outcomes(false, used - second),
        [Outcome::Done],
        "on request"
    );
}
