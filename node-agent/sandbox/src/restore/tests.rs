use torpor_core::Entry;
use torpor_core::ledger::Memory;
use torpor_core::transition::Delivery;

use super::*;
use crate::node::tests::one_pod;
use crate::restore::annotations::RESTORE_IMAGE;

fn image(number: u32) -> ImageId {
    ImageId::parse(&format!("uid.{number}")).expect("an id")
}

fn asleep() -> Vec<Entry> {
    vec![
        Entry::Saving {
            image: image(1),
            snapshots: Default::default(),
        },
        Entry::Committed { image: image(1) },
        Entry::Asleep {
            image: image(1),
            by_itself: false,
        },
    ]
}

fn other() -> ImageId {
    ImageId::parse("other.7").expect("an id")
}

#[test]
fn a_sandbox_that_is_being_suspended_is_woken_by_no_signal() {
    let (_dir, node, pod) = one_pod();
    let store = node.store().expect("a store");
    let ledger = store.ledger(&pod.pod_uid).expect("a ledger");
    for entry in asleep() {
        ledger.append(&entry).expect("written");
    }
    let hibernated = SandboxState::Hibernated {
        image: image(1),
        unstarted: None,
    };
    let state = node.records.write_state(&pod.sandbox, &hibernated);
    state.expect("written");
    for (ends, suspends, remains) in [
        (true, false, true),
        (false, false, false),
        (false, true, true),
    ] {
        let noted = node.records.note_suspends(&pod.pod_uid, suspends);
        noted.expect("noted");
        // There is no keeper here, so a wake fails.
        let delivery = transitions::before_signal(&node, &pod.sandbox, ends, || false);
        let found = delivery.is_ok_and(|delivery| delivery == Delivery::Remains);
        assert_eq!(found, remains, "{ends} {suspends}");
    }
}

#[test]
fn a_sandbox_that_is_being_suspended_is_woken_by_no_caller() {
    let (_dir, node, pod) = one_pod();
    let ledger = node
        .store()
        .and_then(|store| Ok(store.ledger(&pod.pod_uid)?));
    let ledger = ledger.expect("a ledger");
    for entry in asleep() {
        ledger.append(&entry).expect("written");
    }
    let hibernated = SandboxState::Hibernated {
        image: image(1),
        unstarted: None,
    };
    let state = node.records.write_state(&pod.sandbox, &hibernated);
    state.expect("written");
    for suspends in [false, true, false] {
        let noted = node.records.note_suspends(&pod.pod_uid, suspends);
        noted.expect("noted");
        // The sandbox has no keepers here, so no wake succeeds.
        let refused = transitions::wake_hibernated(&node, &pod.sandbox, WakeCause::Exec)
            .expect_err("refused");
        let message = format!("{refused:#}");
        assert_eq!(
            message.contains("is being suspended"),
            suspends,
            "{message}"
        );
        let memory = ledger.read().expect("read").memory;
        assert!(matches!(memory, Memory::Asleep { .. }), "{memory:?}");
    }
}

/// The Pod before was on its way back to its last image when it was deleted.
#[test]
fn a_pod_that_continues_from_an_image_from_before_a_crash_is_rolled_back() {
    let crashed_on_its_way = [
        Entry::Committed { image: other() },
        Entry::Awake,
        Entry::Waking { image: other() },
    ];
    for (known, rolled) in [(1, false), (2, false), (3, true)] {
        let (_dir, node, pod) = one_pod();
        let store = node.store().expect("a store");
        let before = store.ledger(other().pod()).expect("a ledger");
        for entry in &crashed_on_its_way[..known] {
            before.append(entry).expect("written");
        }
        let found = rolls_back(&store, &LedgerState::default(), &pod, &other());
        assert_eq!(found, rolled, "{known} entries");
    }
}

/// A user may wait for the result of the restore of such a Pod.
#[test]
fn a_restored_pod_reports_that_it_starts_anew_even_if_its_report_is_gone() {
    let restored = || RestoreReport::Restored {
        image: other(),
        rolled_back: None,
    };
    let failed = || RestoreReport::Failed {
        image: other(),
        reason: "RestoreFailed".to_owned(),
        message: "no room".to_owned(),
    };
    for (was_restored, last, is_reported) in [
        (true, None, true),
        (true, Some(failed()), true),
        (true, Some(restored()), true),
        (false, Some(restored()), true),
        (false, None, false),
    ] {
        let (_dir, node, pod) = one_pod();
        let ledger = node
            .store()
            .and_then(|store| Ok(store.ledger(&pod.pod_uid)?));
        let ledger = ledger.expect("a ledger");
        for entry in [Entry::Waking { image: other() }, Entry::Awake] {
            ledger.append(&entry).expect("written");
        }
        if let Some(last) = &last {
            let written = node.records.write_report(&pod.pod_uid, last);
            written.expect("written");
        }
        let annotations = match was_restored {
            true => serde_json::json!({ RESTORE_IMAGE: other().to_string() }),
            false => serde_json::json!({}),
        };
        let spec = Spec(serde_json::json!({ "annotations": annotations }));
        let state = begin(&node, &pod, &spec).expect("it begins");
        assert_eq!(state, SandboxState::Running);
        let report = node.records.report(&pod.pod_uid).expect("read");
        let reported = matches!(report, Some(RestoreReport::ColdStarted { .. }));
        assert_eq!(reported, is_reported, "{was_restored}, {last:?}");
    }
}

/// Makes a node whose runsc build has this digest, with one pod of that build and a committed image
/// of the pod.
fn pod_with_image(digest: &str) -> (tempfile::TempDir, Node, PodRecord, ImageId) {
    let (dir, mut node, mut pod) = one_pod();
    node.config.runsc_digest = digest.to_owned();
    pod.runsc_digest = digest.to_owned();
    let image = ImageId::parse(&format!("{}.1", pod.pod_uid.as_str())).expect("an id");
    let store = node.store().expect("a store");
    let partial = store.begin(&pod.namespace, &image).expect("begun");
    for name in ["checkpoint.img", "pages.img", "pages_meta.img"] {
        partial.open_file(name).expect("a file");
    }
    let draft = torpor_snapshots::ManifestDraft {
        pod_name: "a".into(),
        sandbox_name: "a".into(),
        reason: torpor_snapshots::SaveReason::Hibernate,
        created_at: Timestamp::UNIX_EPOCH,
        fingerprint: probe::fingerprint(&node.config, String::new()).expect("a fingerprint"),
        containers: vec![torpor_snapshots::SavedContainer {
            name: torpor_snapshots::SavedName::Root,
            image_id: "sha256:aa".into(),
            spec_digest: torpor_snapshots::Digest::of(b"spec"),
        }],
        completed: Vec::new(),
        parent: None,
    };
    partial.commit(draft).expect("committed");
    (dir, node, pod, image)
}

const REVOKED: &str = "blake3:77";

#[test]
fn an_image_of_a_revoked_build_is_refused_and_kept_until_the_revocation_is_lifted() {
    let (_dir, mut node, pod, image) = pod_with_image(REVOKED);
    node.config.revoked_runsc = vec![REVOKED.to_owned()];
    let ledger = node
        .store()
        .and_then(|store| Ok(store.ledger(&pod.pod_uid)?));
    let ledger = ledger.expect("a ledger");
    for entry in [
        Entry::Committed {
            image: image.clone(),
        },
        Entry::Asleep {
            image: image.clone(),
            by_itself: false,
        },
    ] {
        ledger.append(&entry).expect("written");
    }
    let spec = Spec(serde_json::json!({}));
    let refused = begin(&node, &pod, &spec).expect_err("refused");
    assert!(format!("{refused:#}").contains(REVOKED), "{refused:#}");
    let report = node.records.report(&pod.pod_uid).expect("read");
    let is_reported =
        matches!(&report, Some(RestoreReport::Failed { reason, .. }) if reason == "RunscRevoked");
    assert!(is_reported, "{report:?}");
    let memory = ledger.read().expect("read").memory;
    assert!(matches!(memory, Memory::Asleep { .. }), "{memory:?}");

    node.config.revoked_runsc.clear();
    let restoring = SandboxState::Restoring {
        image,
        started: Vec::new(),
    };
    assert_eq!(begin(&node, &pod, &spec).expect("it begins"), restoring);
}

#[test]
fn a_wake_by_a_revoked_build_fails_with_that_reason_before_anything_runs() {
    let (_dir, mut node, pod, id) = pod_with_image(REVOKED);
    node.config.revoked_runsc = vec!["blake3:00".to_owned(), REVOKED.to_owned()];
    let store = node.store().expect("a store");
    let image = store.image(&pod.namespace, &id).expect("the image");
    let ledger = store.ledger(&pod.pod_uid).expect("a ledger");
    let report = RestoreReport::Restored {
        image: id.clone(),
        rolled_back: None,
    };
    let sandbox = NodeSandbox::anew(&node, &pod, image, Vec::new(), report);
    let refused = transition::restore(&sandbox, &id, Place::Here).expect_err("refused");
    assert_eq!(reason_of(&refused), "RunscRevoked");
    let failed = Memory::WakeFailed {
        image: id,
        reason: "RunscRevoked".to_owned(),
    };
    assert_eq!(ledger.read().expect("read").memory, failed);
}

#[test]
fn no_sandbox_starts_cold_with_a_revoked_build() {
    let (_dir, mut node, pod) = one_pod();
    let pod = PodRecord {
        runsc_digest: REVOKED.to_owned(),
        ..pod
    };
    let spec = Spec(serde_json::json!({}));
    node.config.revoked_runsc = vec![REVOKED.to_owned()];
    let refused = begin(&node, &pod, &spec).expect_err("refused");
    assert!(format!("{refused:#}").contains("--revoked-runsc"));
    node.config.revoked_runsc.clear();
    let state = begin(&node, &pod, &spec).expect("it begins");
    assert_eq!(state, SandboxState::Running);
}

/// Returns the pause container's spec with these annotations.
fn annotated(annotations: serde_json::Value) -> Spec {
    Spec(serde_json::json!({ "annotations": annotations }))
}

/// Makes a node as [`pod_with_image`] does, and another Pod on it that has no image.
fn golden_and_member() -> (tempfile::TempDir, Node, ImageId, PodRecord) {
    let (dir, node, golden, image) = pod_with_image("blake3:11");
    let member = PodRecord {
        pod_uid: "member".to_owned().try_into().expect("a UID"),
        ..golden
    };
    (dir, node, image, member)
}

#[test]
fn a_pod_starts_from_the_golden_image_of_this_node_and_cold_without_one() {
    let (_dir, node, image, member) = golden_and_member();
    let listed =
        |images: &str| annotated(serde_json::json!({ "torpor.dev/golden-images": images }));
    let begun = |spec: &Spec| begin(&node, &member, spec).expect("it begins");
    for elsewhere in ["other.1,another.2", "", "../../etc.1"] {
        assert_eq!(begun(&listed(elsewhere)), SandboxState::Running);
    }
    let spec = listed(&format!("other.1,{image}"));
    let restoring = SandboxState::Restoring {
        image: image.clone(),
        started: Vec::new(),
    };
    assert_eq!(begun(&spec), restoring);
    let store = node.store().expect("a store");
    let taken = store.image(&member.namespace, &image).expect("an image");
    assert_eq!(taken.consumed_by().expect("read"), None);
    assert!(annotations::is_copy(&spec, &image) && annotations::is_golden(&spec, &image));
}

#[test]
fn a_golden_image_that_cannot_be_restored_is_a_cold_start_with_its_reason() {
    let (_dir, mut node, image, mut member) = golden_and_member();
    // The node has got another build since, and keeps the old one no longer.
    node.config.runsc_digest = "blake3:22".to_owned();
    member.runsc_digest = node.config.runsc_digest.clone();
    let listed = annotated(serde_json::json!({ "torpor.dev/golden-images": image.to_string() }));
    let state = begin(&node, &member, &listed).expect("it begins");
    assert_eq!(state, SandboxState::Running);
    let report = node.records.report(&member.pod_uid).expect("read");
    let Some(RestoreReport::ColdStarted { reason, .. }) = report else {
        panic!("{report:?}");
    };
    assert_eq!(reason, "FingerprintMismatch");
}

#[test]
fn a_pause_container_that_does_not_fit_is_reported_before_anything_of_it_is_recorded() {
    let (_dir, node, golden, member) = golden_and_member();
    let pause = ContainerRecord {
        id: member.sandbox.clone().into(),
        sandbox: member.sandbox.clone(),
        role: Role::Sandbox,
        name: String::new(),
        terminal: false,
        cgroup: member.cgroup.clone(),
        spec_digest: torpor_snapshots::Digest::of(b"another spec"),
        keeper_pid: 0,
        in_shim: false,
        completed: None,
    };
    let plain = annotated(serde_json::json!({}));
    let of_pool = annotated(serde_json::json!({ "torpor.dev/golden-images": golden.to_string() }));
    for (spec, cold) in [(&plain, false), (&of_pool, true)] {
        completed(&node, &member, spec, &golden, &pause).expect_err("another spec");
        let report = node.records.report(&member.pod_uid).expect("read");
        let (reason, is_cold) = match report {
            Some(RestoreReport::Failed { reason, .. }) => (reason, false),
            Some(RestoreReport::ColdStarted { reason, .. }) => (reason, true),
            other => panic!("{other:?}"),
        };
        assert_eq!((reason.as_str(), is_cold), ("SpecMismatch", cold));
    }
}
