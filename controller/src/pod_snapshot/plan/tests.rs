use super::*;

fn object<K: serde::de::DeserializeOwned>(object: Value) -> Arc<K> {
    Arc::new(serde_json::from_value(object).unwrap())
}

fn pod_snapshot(name: &str, created: &str, ready: &str) -> Arc<PodSnapshot> {
    object(json!({
        "metadata": {"name": name, "creationTimestamp": created},
        "spec": {"podUID": "p", "triggerUID": "t"},
        "status": {"conditions": [{
            "type": "Ready", "status": ready, "reason": "R", "message": "",
            "lastTransitionTime": created,
        }]},
    }))
}

#[test]
fn the_newest_ready_pod_snapshot_is_the_one_that_the_sdk_asks_for() {
    let all = [
        pod_snapshot("old", "2026-01-01T00:00:00Z", "True"),
        pod_snapshot("newest", "2026-01-02T00:00:00Z", "True"),
        pod_snapshot("of-the-same-second", "2026-01-02T00:00:00Z", "True"),
        pod_snapshot("gone", "2026-01-03T00:00:00Z", "False"),
    ];
    assert_eq!(newest(&all).map(ResourceExt::name_any).unwrap(), "newest");
    assert_eq!(newest(&all[3..]), None);
}

#[test]
fn the_outcome_of_a_trigger_is_final() {
    let mut asked = PodSnapshotManualTrigger::default();
    asked.metadata.uid = Some("t".into());
    asked.status = serde_json::from_value(json!({"conditions": [{
        "type": "Triggered", "status": "True", "reason": "Complete", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }]}))
    .unwrap();
    let image = object(json!({
        "metadata": {"name": "t", "uid": "i", "ownerReferences": [{
            "apiVersion": "v1", "kind": "K", "name": "t", "uid": "t",
        }]},
        "spec": {"sandboxName": "s"},
    }));
    let observed = Observed {
        image: Some(image),
        ..Observed::default()
    };
    assert_eq!(trigger(&asked, &observed, |_| Ok(())), None);
    let condition = &mut asked.status.as_mut().unwrap().conditions[0];
    (condition.status, condition.reason) = ("False".into(), "Failed".into());
    let drop = Step::DropImage {
        uid: "i".into(),
        resource_version: None,
    };
    assert_eq!(trigger(&asked, &observed, |_| Ok(())), Some(drop));
}

/// Image of a suspension, which the Sandbox owns.
fn image_of_a_suspension() -> Arc<SandboxSnapshot> {
    object(json!({
        "metadata": {"name": "s", "uid": "i", "ownerReferences": [{
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "s", "uid": "sb",
            "controller": true,
        }]},
        "spec": {"sandboxName": "s", "reason": "Suspend"},
    }))
}

#[test]
fn a_forged_pod_snapshot_cannot_take_over_the_image_of_a_suspension() {
    let mut forged = PodSnapshot::default();
    forged.metadata.name = Some("s".into());
    forged.spec.trigger_uid = "sb".into();
    assert_eq!(hand_over(&forged, &image_of_a_suspension()), None);
}

#[test]
fn an_image_that_is_kept_already_is_waited_for() {
    let mut asked = PodSnapshotManualTrigger::default();
    asked.metadata.name = Some("t".into());
    asked.metadata.uid = Some("t".into());
    let kept: Arc<SandboxSnapshot> = object(json!({
        "metadata": {"name": "t", "ownerReferences": [{
            "apiVersion": "podsnapshot.gke.io/v1", "kind": "PodSnapshot", "name": "t", "uid": "p",
        }]},
        "spec": {"sandboxName": "s"},
    }));
    let observed = Observed {
        image: Some(kept),
        ..Observed::default()
    };
    assert_eq!(trigger(&asked, &observed, |_| Ok(())), None);
}
