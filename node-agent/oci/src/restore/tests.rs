use torpor_core::LedgerState;

use super::*;
use crate::node::tests::one_pod;

fn image(number: u32) -> ImageId {
    ImageId::parse(&format!("uid.{number}")).expect("an id")
}

fn ledger_of(entries: &[Entry]) -> LedgerState {
    LedgerState::fold(entries)
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
fn a_pod_that_was_given_an_image_starts_from_it_once() {
    let given = Some(other());
    let fresh = source(&ledger_of(&[]), |_| true, given.clone(), false, None);
    assert_eq!(
        fresh,
        Source::Image {
            image: other(),
            copy: false
        }
    );
    let resumed = ledger_of(&[Entry::Waking { image: other() }, Entry::Awake]);
    assert_eq!(source(&resumed, |_| true, given, false, None), Source::Cold);
}

#[test]
fn a_pod_whose_sandbox_was_taken_away_while_it_slept_goes_on_from_its_image() {
    let expected = Source::Image {
        image: image(1),
        copy: false,
    };
    assert_eq!(
        source(&ledger_of(&asleep()), |_| true, None, false, None),
        expected
    );
    // Also when it once came from another image.
    assert_eq!(
        source(&ledger_of(&asleep()), |_| true, Some(other()), true, None),
        expected
    );
}

#[test]
fn a_pod_that_crashed_awake_does_not_go_back_in_time() {
    let mut entries = asleep();
    entries.extend([Entry::Waking { image: image(1) }, Entry::Awake]);
    assert_eq!(
        source(&ledger_of(&entries), |_| true, None, false, None),
        Source::Cold
    );
}

#[test]
fn a_pod_that_crashed_goes_back_to_its_last_image_only_if_its_user_wishes_that() {
    let back = |entries: &[Entry], held| {
        let last = Some(image(1));
        source(&ledger_of(entries), |_| held, None, false, last)
    };
    let mut entries = asleep();
    let asleep_in_it = Source::Image {
        image: image(1),
        copy: false,
    };
    assert_eq!(back(&entries, true), asleep_in_it);
    entries.extend([Entry::Waking { image: image(1) }, Entry::Awake]);
    let expected = Source::Image {
        image: image(1),
        copy: true,
    };
    assert_eq!(back(&entries, true), expected);
    // It crashed while it was being saved once more.
    entries.push(Entry::Saving {
        image: image(2),
        snapshots: Default::default(),
    });
    assert_eq!(back(&entries, false), expected);
    // That the image was left behind is known until it is gone, so that the way back can be told when it is tried twice.
    assert!(ledger_of(&entries).was_left(&image(1)));
    entries.push(Entry::Waking { image: image(1) });
    assert!(ledger_of(&entries).was_left(&image(1)));
    assert!(!ledger_of(&asleep()).was_left(&image(1)));
}

#[test]
fn a_wake_that_was_cut_off_is_tried_again() {
    let mut entries = asleep();
    entries.push(Entry::Waking { image: image(1) });
    let expected = Source::Image {
        image: image(1),
        copy: false,
    };
    assert_eq!(
        source(&ledger_of(&entries), |_| true, None, false, None),
        expected
    );
    entries.push(Entry::WakeFailed {
        image: image(1),
        reason: "RestoreFailed".into(),
    });
    assert_eq!(
        source(&ledger_of(&entries), |_| true, None, false, None),
        expected
    );
}

#[test]
fn an_image_that_is_missing_is_not_taken_for_a_cold_start() {
    let expected = Source::Image {
        image: image(1),
        copy: false,
    };
    assert_eq!(
        source(&ledger_of(&asleep()), |_| false, None, false, None),
        expected
    );
}

#[test]
fn a_save_that_was_cut_off_leaves_a_cold_start_unless_it_was_whole() {
    let saving = [Entry::Saving {
        image: image(1),
        snapshots: Default::default(),
    }];
    assert_eq!(
        source(&ledger_of(&saving), |_| false, None, false, None),
        Source::Cold
    );
    let whole = Source::Image {
        image: image(1),
        copy: false,
    };
    assert_eq!(
        source(&ledger_of(&saving), |_| true, None, false, None),
        whole
    );
}

#[test]
fn a_sandbox_that_is_being_suspended_is_woken_by_nobody() {
    let (_dir, node, pod) = one_pod();
    let ledger = store(&node).and_then(|store| Ok(store.ledger(&pod.pod_uid)?));
    let ledger = ledger.expect("a ledger");
    for entry in asleep() {
        ledger.append(&entry).expect("written");
    }
    let hibernated = SandboxState::Hibernated { image: image(1) };
    let state = node.records.write_state(&pod.sandbox, &hibernated);
    state.expect("written");
    for suspends in [false, true, false] {
        let noted = node.records.note_suspends(&pod.pod_uid, suspends);
        noted.expect("noted");
        // It has no keepers here, and is not woken in any case.
        let refused = wake_locked(&node, &pod.sandbox, WakeCause::Exec).expect_err("refused");
        let words = format!("{refused:#}");
        assert_eq!(words.contains("is being suspended"), suspends, "{words}");
        let memory = ledger.read().expect("read").memory;
        assert!(matches!(memory, Memory::Asleep { .. }), "{memory:?}");
    }
}

/// Somebody may wait for the word on how the restore of such a Pod went.
#[test]
fn a_pod_that_was_restored_says_that_it_starts_anew_also_where_its_report_is_gone() {
    let restored = || RestoreReport::Restored {
        image: other(),
        rolled_back: None,
    };
    let failed = || RestoreReport::Failed {
        image: other(),
        reason: "RestoreFailed".to_owned(),
        message: "no room".to_owned(),
    };
    for (was_restored, last, is_told) in [
        (true, None, true),
        (true, Some(failed()), true),
        (true, Some(restored()), true),
        (false, Some(restored()), true),
        (false, None, false),
    ] {
        let (_dir, node, pod) = one_pod();
        let ledger = store(&node).and_then(|store| Ok(store.ledger(&pod.pod_uid)?));
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
        let told = matches!(report, Some(RestoreReport::ColdStarted { .. }));
        assert_eq!(told, is_told, "{was_restored}, {last:?}");
    }
}

/// A node whose runsc is a build with this digest, with one pod that it runs and a committed image of that pod.
fn pod_with_image(digest: &str) -> (tempfile::TempDir, Node, PodRecord, ImageId) {
    let (dir, mut node, mut pod) = one_pod();
    node.config.runsc_digest = digest.to_owned();
    pod.runsc_digest = digest.to_owned();
    let image = ImageId::parse(&format!("{}.1", pod.pod_uid.as_str())).expect("an id");
    let store = store(&node).expect("a store");
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
    let ledger = store(&node).and_then(|store| Ok(store.ledger(&pod.pod_uid)?));
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
    let is_told =
        matches!(&report, Some(RestoreReport::Failed { reason, .. }) if reason == "RunscRevoked");
    assert!(is_told, "{report:?}");
    let memory = ledger.read().expect("read").memory;
    assert!(matches!(memory, Memory::Asleep { .. }), "{memory:?}");

    node.config.revoked_runsc.clear();
    let goes_on = SandboxState::Restoring {
        image,
        started: Vec::new(),
    };
    assert_eq!(begin(&node, &pod, &spec).expect("it begins"), goes_on);
}

#[test]
fn a_wake_by_a_revoked_build_fails_with_that_reason_before_anything_runs() {
    let (_dir, mut node, pod, id) = pod_with_image(REVOKED);
    node.config.revoked_runsc = vec!["blake3:00".to_owned(), REVOKED.to_owned()];
    let store = store(&node).expect("a store");
    let image = store.image(&pod.namespace, &id).expect("the image");
    let ledger = store.ledger(&pod.pod_uid).expect("a ledger");
    let in_place = Restored::InPlace(WakeCause::Exec);
    let refused = wake_recorded(&node, &pod, &image, &[], &ledger, &in_place);
    let refused = refused.expect_err("refused");
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
