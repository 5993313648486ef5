use std::cell::{Cell, RefCell};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use jiff::Timestamp;
use torpor_core::ids::{Namespace, PodUid};
use torpor_core::steps::{Fence, StepKind};
use torpor_core::store_limit::PerNamespace;
use torpor_records::WakeCause;
use torpor_records::config::Config;
use torpor_runsc::keeper::Rules;
use torpor_snapshots::ManifestDraft;

use super::room::SAVE_LIMIT;
use super::*;

use crate::args::SwapArgs;
use crate::policy::swap::SwapRoom;
use crate::reconcile::node::StoreLimits;

/// Returns a step that was planned for the ledger at this number.
pub(crate) fn step(ledger_seq: u64, action: Action) -> Step {
    Step {
        fence: Fence {
            pod_uid: PodUid::new("pod-a").expect("a uid"),
            sandbox_id: None,
            ledger_seq,
        },
        before: None,
        action,
        after: None,
    }
}

/// Returns an empty node in this directory.
pub(crate) fn node_in(dir: &Path) -> Node {
    let config = Config {
        runsc: dir.join("runsc"),
        runsc_digest: String::new(),
        state_dir: dir.to_owned(),
        store_dir: dir.to_owned(),
        kubelet_root: dir.join("kubelet"),
        kubelet_port: 10250,
        eviction_percent: None,
        platform: String::new(),
        expedite_wakes: false,
        begin_sandboxes: true,
        wakes_at_once: 0,
        revoked_runsc: Vec::new(),
        debug_log_dir: None,
    };
    let off = || "off".parse().expect("no limit");
    let swap = SwapRoom::new(&SwapArgs {
        doze_swap_per_sandbox: off(),
        doze_swap_per_node: off(),
    });
    let limits = StoreLimits {
        reserve: 0,
        per_namespace: PerNamespace::Unlimited,
    };
    Node::new(config, limits, dir, Arc::new(swap)).expect("a node")
}

#[test]
fn a_ledger_that_cannot_be_trusted_stops_what_needs_it_and_nothing_else() {
    let dir = tempfile::tempdir().expect("a directory");
    let node = node_in(dir.path());
    let path = dir.path().join("ledger").join("pod-a");
    std::fs::write(&path, "this is no ledger").expect("written");
    let private = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, private).expect("set");
    let (pod, namespace) = (PodUid::new("pod-a"), Namespace::new("n"));
    let draft = || -> ManifestDraft { panic!("no image is made") };
    let context = Context {
        node: &node,
        pod: &pod.expect("a uid"),
        namespace: &namespace.expect("a name"),
        sandbox: None,
        rules: &Rules::default,
        by_itself: false,
        decided: Timestamp::UNIX_EPOCH,
        cause: WakeCause::Asked,
        limited: true,
        draft: &draft,
        partial: RefCell::default(),
        written: Cell::default(),
    };
    let refused = |step: &Step| match execute(&context, step) {
        Outcome::Failed { reason, .. } => reason,
        other => panic!("{other:?}"),
    };
    let image = ImageId::parse("pod-a.1").expect("an image's name");
    let before = Some(Entry::Waking {
        image: image.clone(),
    });
    let wake = Action::Wake {
        image: image.clone(),
    };
    let noted = Step {
        before,
        ..step(0, wake)
    };
    assert_eq!(refused(&noted), "LedgerCorrupt");
    assert_eq!(refused(&step(1, Action::Resume)), "LedgerCorrupt");
    // The step is tried and finds no sandbox to resume.
    assert_eq!(refused(&step(0, Action::Resume)), "SandboxGone");
    let discard = step(0, Action::DiscardImage { image });
    assert_eq!(execute(&context, &discard), Outcome::Already);
    let forget = step(0, Action::DiscardLedger);
    assert_eq!(execute(&context, &forget), Outcome::Done);
    assert!(!path.exists());
}

#[test]
fn what_comes_before_a_step_is_written_only_into_the_ledger_that_it_was_planned_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let node = node_in(dir.path());
    let pod = PodUid::new("pod-a").expect("a uid");
    let ledger = node.store.ledger(&pod).expect("a ledger");
    let image = ImageId::parse("pod-a.1").expect("an image's name");
    let committed = Entry::Committed {
        image: image.clone(),
    };
    ledger.append(&committed).expect("written");
    let awake = |ledger_seq| Step {
        before: Some(Entry::Awake),
        ..step(ledger_seq, Action::Resume)
    };
    // Planned for the first record; a restore has written a second one since.
    let waking = Entry::Waking { image };
    let state = ledger.append(&waking).expect("written");
    assert_eq!(begin(&ledger, &awake(1)), Err(Outcome::Stale));
    assert_eq!(ledger.read().expect("read"), state, "nothing was written");
    assert_eq!(begin(&ledger, &awake(2)), Ok(3));
    assert_eq!(begin(&ledger, &step(3, Action::Resume)), Ok(3));
}

#[test]
fn a_sandbox_is_not_stopped_for_an_image_that_there_is_no_room_for() {
    let image = ImageId::parse("pod-a.1").expect("an image's name");
    let steps = [Action::Pause, Action::Checkpoint { image }].map(|action| step(0, action));
    let full = || Outcome::Failed {
        reason: "DiskFull".to_owned(),
        message: "no room".to_owned(),
    };
    let refused = vec![(StepKind::Checkpoint, full())];
    let all = [StepKind::Pause, StepKind::Checkpoint].map(|kind| (kind, Outcome::Done));
    for (stops_for, refusal, acts, reports) in [
        (Some(&steps[1]), Some(full()), &[][..], refused),
        (Some(&steps[1]), None, &steps[..], all.to_vec()),
        // The sandbox is paused already.
        (None, Some(full()), &steps[..], all.to_vec()),
    ] {
        let (mut acted, mut reported) = (Vec::new(), Vec::new());
        let act = |step: &Step| {
            acted.push(step.clone());
            Outcome::Done
        };
        let report = |step: &Step, outcome: &Outcome, _took| {
            reported.push((step.action.kind(), outcome.clone()));
        };
        run(&steps, stops_for, || refusal, act, report);
        assert_eq!((acted.as_slice(), reported), (acts, reports));
    }
}

#[test]
fn a_namespace_whose_images_take_its_share_gets_no_image_that_can_wait() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut node = node_in(dir.path());
    let limit = std::num::NonZeroU64::new(100).expect("not zero");
    node.limits.per_namespace = PerNamespace::Bytes(limit);
    let pod = PodUid::new("pod-a").expect("a uid");
    let [full, other] = ["full", "other"].map(|name| Namespace::new(name).expect("a name"));
    let image = ImageId::parse("pod-b.1").expect("an image's name");
    let partial = node.store.begin(&full, &image).expect("begun");
    let file = partial.open_file("pages.img").expect("made");
    std::fs::File::from(file).set_len(80).expect("set");
    let draft = || -> ManifestDraft { panic!("no image is made") };
    let refused = |namespace, limited, expected| {
        let context = Context {
            node: &node,
            pod: &pod,
            namespace,
            sandbox: None,
            rules: &Rules::default,
            by_itself: false,
            decided: Timestamp::UNIX_EPOCH,
            cause: WakeCause::Asked,
            limited,
            draft: &draft,
            partial: RefCell::default(),
            written: Cell::default(),
        };
        no_room_for(&context, Some(expected))
    };
    assert_eq!(refused(&full, true, 20), None);
    assert_eq!(refused(&other, true, 100), None);
    assert_eq!(refused(&full, false, 21), None, "its Pod ends");
    let Some(Outcome::Failed { reason, message }) = refused(&full, true, 21) else {
        panic!("not refused");
    };
    assert_eq!(reason, "NamespaceStoreFull");
    assert!(message.contains("namespace full"), "{message}");
}

#[test]
fn one_that_no_packet_would_wake_sleeps_only_if_somebody_has_asked_for_that() {
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
fn what_comes_after_a_step_that_did_not_succeed_is_left() {
    let steps = [Action::Pause, Action::Resume, Action::Freeze].map(|action| step(0, action));
    let mut acted = Vec::new();
    let act = |step: &Step| {
        acted.push(step.action.kind());
        match step.action {
            Action::Resume => no_sandbox(),
            _ => Outcome::Already,
        }
    };
    let mut reported = 0;
    run(&steps, None, || None, act, |_, _, _| reported += 1);
    assert_eq!(acted, [StepKind::Pause, StepKind::Resume]);
    assert_eq!(reported, 2);
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
