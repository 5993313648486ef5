use std::os::unix::fs::PermissionsExt;

use torpor_core::steps::Fence;

use super::*;

fn pod() -> PodUid {
    PodUid::new("pod-a").expect("a uid")
}

fn image() -> ImageId {
    ImageId::parse("pod-a.1").expect("an image's name")
}

/// Returns a step that was planned for the ledger at this number.
fn step(ledger_seq: u64, action: Action) -> Step {
    Step {
        fence: Fence {
            pod_uid: pod(),
            sandbox_id: None,
            ledger_seq,
        },
        before: None,
        action,
        after: None,
    }
}

#[test]
fn an_untrusted_ledger_stops_the_steps_that_need_it_and_no_others() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(dir.path()).expect("a store");
    let path = dir.path().join("ledger").join("pod-a");
    std::fs::write(&path, "this is no ledger").expect("written");
    let private = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, private).expect("set");
    let (pod, namespace) = (pod(), Namespace::new("n").expect("a name"));
    let place = Place {
        store: &store,
        namespace: &namespace,
        pod: &pod,
        sandbox: None,
    };
    let refused = |step: &Step| match take(&place, step, &mut OnStore(&place)) {
        Outcome::Failed { reason, .. } => reason,
        other => panic!("{other:?}"),
    };
    let noted = Step {
        before: Some(Entry::Waking { image: image() }),
        ..step(0, Action::Wake { image: image() })
    };
    assert_eq!(refused(&noted), "LedgerCorrupt");
    assert_eq!(refused(&step(1, Action::Resume)), "LedgerCorrupt");
    // The step is tried and finds no sandbox to resume.
    assert_eq!(refused(&step(0, Action::Resume)), "SandboxGone");
    let taken = |action| take(&place, &step(0, action), &mut OnStore(&place));
    assert_eq!(
        taken(Action::DiscardImage { image: image() }),
        Outcome::Already
    );
    assert_eq!(taken(Action::DiscardLedger), Outcome::Done);
    assert!(!path.exists());
}

#[test]
fn the_entry_before_a_step_is_written_only_to_the_ledger_that_the_step_was_planned_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(dir.path()).expect("a store");
    let ledger = store.ledger(&pod()).expect("a ledger");
    let committed = Entry::Committed { image: image() };
    ledger.append(&committed).expect("written");
    let awake = |ledger_seq| Step {
        before: Some(Entry::Awake),
        ..step(ledger_seq, Action::Resume)
    };
    // Planned for the first record; a restore has written a second one since.
    let waking = Entry::Waking { image: image() };
    let state = ledger.append(&waking).expect("written");
    assert_eq!(begin(&ledger, &awake(1)), Err(Outcome::Stale));
    assert_eq!(ledger.read().expect("read"), state, "nothing was written");
    assert_eq!(begin(&ledger, &awake(2)), Ok(3));
    assert_eq!(begin(&ledger, &step(3, Action::Resume)), Ok(3));
}

#[test]
fn a_step_for_another_pod_or_another_sandbox_is_stale() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(dir.path()).expect("a store");
    let (pod, namespace) = (pod(), Namespace::new("n").expect("a name"));
    let sandbox = SandboxId::new("a".repeat(64)).expect("an id");
    let with = |sandbox, step: &Step| {
        let place = Place {
            store: &store,
            namespace: &namespace,
            pod: &pod,
            sandbox,
        };
        take(&place, step, &mut OnStore(&place))
    };
    let record = step(0, Action::Record);
    assert_eq!(with(None, &record), Outcome::Done);
    assert_eq!(with(Some(&sandbox), &record), Outcome::Stale);
    let mut other = record;
    other.fence.pod_uid = PodUid::new("pod-b").expect("a uid");
    assert_eq!(with(None, &other), Outcome::Stale);
}
