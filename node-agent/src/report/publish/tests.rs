use std::collections::BTreeSet;

use torpor_api::reasons as api;
use torpor_core::status::reasons as core;
use torpor_test_apiserver::Apiserver;

use super::*;

#[test]
fn a_doze_and_its_end_are_events_and_name_no_image() {
    let condition = |reason: &str, message: &str| PodCondition {
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        ..PodCondition::default()
    };
    for reason in [core::DOZING, core::AWAKE] {
        let (type_, _) = event_of(reason).expect("an Event");
        assert_eq!(type_, EventType::Normal, "{reason}");
    }
    let note = |image: &str| note_of(&condition(core::DOZING, image)).expect("words");
    assert_eq!(note("image pod.1"), note("image pod.2"));
    let awake = note_of(&condition(core::AWAKE, "The sandbox is awake."));
    assert_eq!(awake.as_deref(), Some("The sandbox is awake."));
}

#[test]
fn an_image_that_was_given_back_names_no_pod_any_more() {
    let image = torpor_core::ImageId::parse("pod-a.1").expect("an id");
    let next = |current: &SandboxSnapshotStatus, consumed_by: Option<&str>| {
        let consumed_by = consumed_by.map(|uid| torpor_core::PodUid::new(uid).expect("a UID"));
        let draft = SnapshotDraft {
            uid: torpor_core::SnapshotUid::new("s-1").expect("a UID"),
            name: "n/s".to_owned(),
            state: SnapshotState::Committed {
                image: image.clone(),
                consumed_by,
                stale: false,
            },
        };
        snapshot_status(current, &draft, None, "node", None, Timestamp::UNIX_EPOCH)
    };
    let taken = next(&SandboxSnapshotStatus::default(), Some("pod-b"));
    assert!(conditions::is_true(&taken.conditions, conditions::CONSUMED));
    let back = next(&taken, None);
    assert!(conditions::find(&back.conditions, conditions::CONSUMED).is_none());
    let patch = replacing(&taken, &back);
    assert_eq!(
        patch.get("consumedByPodUID"),
        Some(&serde_json::Value::Null)
    );
    assert_eq!(replacing(&back, &taken)["consumedByPodUID"], "pod-b");
    assert_eq!(replacing(&back, &back).get("consumedByPodUID"), None);
}

fn committed() -> SnapshotDraft {
    SnapshotDraft {
        uid: torpor_core::SnapshotUid::new("s-1").expect("a UID"),
        name: "n/x".to_owned(),
        state: SnapshotState::Committed {
            image: torpor_core::ImageId::parse("pod-a.1").expect("an id"),
            consumed_by: None,
            stale: false,
        },
    }
}

#[tokio::test]
async fn a_late_status_takes_away_nothing_that_was_written_since() {
    let server = Apiserver::new();
    let read = |object| serde_json::from_value::<SandboxSnapshot>(object).expect("a snapshot");
    let seen = read(server.create(
        "sandboxsnapshots",
        json!({ "metadata": { "name": "x", "namespace": "n" }, "spec": { "sandboxName": "s" } }),
    ));
    // The controller writes that the sandbox continues without the image.
    let left_behind = json!({ "status": { "conditions": [{
        "type": "Consumed", "status": "True", "reason": "Superseded", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }] } });
    let now = read(server.edit("sandboxsnapshots", "n", "x", &left_behind));
    let publisher = Publisher::new(server.client(), "node".to_owned());

    let late = publisher.snapshot(&seen, &committed(), None).await;
    assert!(matches!(late, Err(Error::Conflict { .. })), "{late:?}");
    let written = publisher.snapshot(&now, &committed(), None).await;
    let written = written.expect("no conflict").expect("it is written");
    assert!(written.is_committed() && written.is_consumed());

    server.take_writes();
    let again = publisher.snapshot(&written, &committed(), None).await;
    assert_eq!(again.expect("no conflict"), None);
    assert!(server.take_writes().is_empty(), "it is said already");
}

#[tokio::test]
async fn one_write_sets_all_conditions_of_a_restored_pod_and_keeps_the_kubelets_conditions() {
    let server = Apiserver::new();
    server.create(
        "pods",
        json!({
            "metadata": { "name": "p", "namespace": "n", "annotations": { "torpor.dev/pod-snapshot": "t" } },
            "spec": { "containers": [], "readinessGates": [{ "conditionType": "torpor.dev/RestoreSettled" }] },
        }),
    );
    let by_kubelet =
        json!({ "status": { "conditions": [{ "type": "ContainersReady", "status": "True" }] } });
    let pod = server.edit("pods", "n", "p", &by_kubelet);
    let read = |object| serde_json::from_value::<Pod>(object).expect("a Pod");
    let publisher = Publisher::new(server.client(), "node".to_owned());
    let draft = ConditionDraft::new(
        torpor_core::status::Truth::True,
        core::RESTORED,
        "The Pod continues from image i.",
    );
    let status = StatusDraft {
        phase: torpor_core::status::Phase::Running,
        hibernated: None,
        bound: None,
        restored: Some(draft),
        snapshots: Vec::new(),
        left: None,
    };
    server.take_writes();
    publisher.pod(&read(pod), &status).await.expect("told");
    assert_eq!(server.take_writes().len(), 1);
    let written = read(server.get("pods", "n", "p").expect("the Pod"));
    for kind in [
        "ContainersReady",
        "torpor.dev/Restored",
        "PodRestored",
        "torpor.dev/RestoreSettled",
    ] {
        let condition = condition(&written, kind);
        let status = condition.map(|condition| condition.status.as_str());
        assert_eq!(status, Some("True"), "{kind}");
    }
    publisher.pod(&written, &status).await.expect("told");
    assert!(server.take_writes().is_empty(), "it is said already");
}

/// The planner is independent of Kubernetes and defines reasons of its own. Each of them must be a
/// reason of the API.
#[test]
fn every_reason_of_the_planner_is_one_of_the_api() {
    let known: BTreeSet<&str> = api::hibernated::ALL
        .iter()
        .chain(api::restored::ALL)
        .chain(api::snapshot::ALL)
        .copied()
        .collect();
    for reason in [
        core::HIBERNATED,
        core::AWAKE,
        core::WAKING,
        core::SAVING,
        core::SAVE_FAILED,
        core::DOZING,
        core::FROZEN,
        core::RUNTIME_NOT_CAPABLE,
        core::RESTORED,
        core::ROLLED_BACK,
        core::COLD_STARTED,
        core::IMAGE_MISSING,
        core::RESTORE_FAILED,
        core::PENDING,
        core::COMMITTED,
        core::SANDBOX_NOT_FOUND,
    ] {
        assert!(known.contains(reason), "{reason}");
    }
}

#[test]
fn an_error_of_one_object_is_distinguished_from_a_failing_apiserver() {
    let what = || "x".to_owned();
    let answered = |code| {
        let status = kube::core::Status::failure("words", "Reason").with_code(code);
        let source = kube::Error::Api(status.boxed());
        Error::Api {
            what: what(),
            source,
        }
    };
    for one in [
        Error::Conflict { what: what() },
        answered(400),
        answered(422),
    ] {
        assert!(one.is_of_one_object(), "{one:?}");
    }
    for all in [
        Error::Timeout { what: what() },
        answered(429),
        answered(500),
        answered(504),
    ] {
        assert!(!all.is_of_one_object(), "{all:?}");
    }
}
