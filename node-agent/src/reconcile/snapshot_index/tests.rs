use serde_json::json;

use super::*;
use crate::reconcile::desired::tests::{pod, snapshot, uid};

const NODE: &str = "node-a";

fn named(name: &str, namespace: &str, version: u32, spec: serde_json::Value) -> SandboxSnapshot {
    let mut named = snapshot(spec, &[]);
    named.metadata.name = Some(name.to_owned());
    named.metadata.namespace = Some(namespace.to_owned());
    named.metadata.resource_version = Some(version.to_string());
    named
}

fn of_pod_1(name: &str, version: u32) -> SandboxSnapshot {
    let spec = json!({ "sandboxName": "s", "podUID": "pod-1" });
    named(name, "n", version, spec)
}

fn names(snapshots: &[Arc<SandboxSnapshot>]) -> Vec<String> {
    let mut names: Vec<_> = snapshots.iter().map(|one| one.name_any()).collect();
    names.sort();
    names
}

fn about(shown: &SnapshotIndex) -> Vec<String> {
    names(&shown.of_pod(&uid(), Some("n")))
}

#[test]
fn snapshots_are_found_by_their_pod_until_they_are_gone() {
    let shown = SnapshotIndex::new(NODE.to_owned());
    shown.take(Event::Apply(of_pod_1("a", 1)));
    let other = json!({ "sandboxName": "s", "podUID": "pod-2" });
    shown.take(Event::Apply(named("b", "n", 2, other)));
    shown.take(Event::Apply(of_pod_1("c", 3)));
    assert_eq!(about(&shown), ["a", "c"]);
    // An accepted snapshot names the Pod in its status from then on.
    let unnamed = named("d", "n", 4, json!({ "sandboxName": "s" }));
    shown.take(Event::Apply(unnamed.clone()));
    assert_eq!(names(&shown.of_sandbox_of(&pod(json!({})))), ["d"]);
    let mut accepted = unnamed;
    accepted.status.get_or_insert_default().pod_uid = Some("pod-1".to_owned());
    shown.take(Event::Apply(accepted));
    assert_eq!(about(&shown), ["a", "c", "d"]);
    assert_eq!(names(&shown.of_sandbox_of(&pod(json!({})))), [""; 0]);
    let changed = shown.take(Event::Delete(of_pod_1("a", 9)));
    assert_eq!(names(&changed), ["a"]);
    assert_eq!(about(&shown), ["c", "d"]);
}

#[test]
fn uploaded_images_of_a_namespace_and_class_count_once_each() {
    let shown = SnapshotIndex::new(NODE.to_owned());
    let put = |name: &str, namespace: &str, class: &str, image: &str, uploaded: &str| {
        let spec = json!({ "sandboxName": "s", "snapshotClassName": class });
        let mut snapshot = named(name, namespace, 1, spec);
        snapshot.status = serde_json::from_value(json!({
            "imageID": image, "sizeBytes": 10,
            "conditions": [{
                "type": "Uploaded", "status": uploaded, "reason": "x", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        }))
        .expect("a status");
        shown.take(Event::Apply(snapshot.clone()));
        snapshot
    };
    put("a", "n", "far", "pod-1.1", "True");
    put("the-same-image", "n", "far", "pod-1.1", "True");
    put("b", "n", "far", "pod-2.1", "True");
    put("not-yet", "n", "far", "pod-3.1", "False");
    put("another-class", "n", "near", "pod-4.1", "True");
    put("another-namespace", "m", "far", "pod-5.1", "True");
    let new = put("new", "n", "far", "pod-6.1", "False");
    assert_eq!(shown.uploaded_bytes(&new), 20);
    let again = put("c", "n", "far", "pod-2.1", "False");
    assert_eq!(shown.uploaded_bytes(&again), 10, "its own image");
}

#[test]
fn the_image_of_a_manual_snapshot_is_uploaded_although_its_sandbox_runs_on() {
    let shown = SnapshotIndex::new(NODE.to_owned());
    let put = |name: &str, reason: &str, conditions: &[&str]| {
        let spec = json!({
            "sandboxName": "s", "snapshotClassName": "far", "reason": reason,
            "podUID": "pod-1", "nodeName": NODE,
        });
        let mut snapshot = named(name, "n", 1, spec);
        let conditions: Vec<_> = conditions
            .iter()
            .map(|kind| {
                json!({
                    "type": kind, "status": "True", "reason": "x", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                })
            })
            .collect();
        snapshot.status = serde_json::from_value(json!({
            "imageID": "pod-1.1", "nodeName": NODE, "podUID": "pod-1", "conditions": conditions,
        }))
        .expect("a status");
        snapshot.metadata.finalizers =
            Some(vec![torpor_api::annotations::IMAGE_FINALIZER.to_owned()]);
        shown.take(Event::Apply(snapshot));
    };
    put("manual", "Manual", &["Committed", "Consumed"]);
    put("uploaded", "Manual", &["Committed", "Consumed", "Uploaded"]);
    put("saving", "Manual", &[]);
    put("suspended", "Suspend", &["Committed"]);
    put("resumed", "Suspend", &["Committed", "Consumed"]);
    assert_eq!(names(&shown.to_upload()), ["manual", "suspended"]);
}

#[test]
fn an_archive_is_about_no_pod_and_its_image_is_named() {
    let shown = SnapshotIndex::new(NODE.to_owned());
    let spec = json!({
        "sandboxName": "s", "reason": "Archive", "snapshotClassName": "far",
        "archive": { "cluster": "c", "imageID": "pod-1.1" },
    });
    let mut archive = named("a", "n", 1, spec);
    shown.take(Event::Apply(archive.clone()));
    assert_eq!(names(&shown.of_sandbox_of(&pod(json!({})))), [""; 0]);
    let status = archive.status.get_or_insert_default();
    status.pod_uid = Some("pod-1".to_owned());
    status.image_id = Some("pod-1.1".to_owned());
    shown.take(Event::Apply(archive));
    assert_eq!(about(&shown), [""; 0]);
    assert!(shown.to_answer().is_empty() && shown.to_upload().is_empty());
    let image = ImageId::parse("pod-1.1").expect("an image");
    assert!(shown.is_named("n", &image));
    assert!(!shown.is_named("m", &image));
}

#[test]
fn a_snapshot_in_one_namespace_does_not_affect_pods_of_another_namespace() {
    let spec = json!({ "sandboxName": "s", "podUID": "pod-1", "reason": "Suspend" });
    for by_status in [false, true] {
        let mut other = named("other", "of-somebody-else", 1, spec.clone());
        if by_status {
            other.spec.pod_uid = None;
            other.status.get_or_insert_default().pod_uid = Some("pod-1".to_owned());
        }
        let shown = SnapshotIndex::new(NODE.to_owned());
        shown.take(Event::Apply(other));
        shown.take(Event::Apply(named("own", "n", 2, spec.clone())));
        assert_eq!(about(&shown), ["own"], "by status: {by_status}");
        assert_eq!(names(&shown.of_pod(&uid(), None)), ["other", "own"]);
    }
}

#[test]
fn a_snapshot_that_names_another_node_means_no_pod_of_this_one() {
    let shown = SnapshotIndex::new(NODE.to_owned());
    let of_node = |name, node| {
        let spec = json!({ "sandboxName": "s", "podUID": "pod-1", "nodeName": node });
        named(name, "n", 1, spec)
    };
    shown.take(Event::Apply(of_node("a", NODE)));
    let mut foreign = of_node("b", "node-b");
    // A status that names this node does not change that.
    foreign.status.get_or_insert_default().node_name = Some(NODE.to_owned());
    shown.take(Event::Apply(foreign));
    assert_eq!(about(&shown), ["a"]);
}

#[test]
fn a_list_counts_once_it_is_whole_and_returns_the_changed_snapshots() {
    let shown = SnapshotIndex::new(NODE.to_owned());
    for (name, version) in [("a", 1), ("b", 2), ("c", 3)] {
        shown.take(Event::Apply(of_pod_1(name, version)));
    }
    let before = shown.of_pod(&uid(), None);
    shown.take(Event::Init);
    for (name, version) in [("a", 1), ("b", 5), ("d", 6)] {
        let changed = shown.take(Event::InitApply(of_pod_1(name, version)));
        assert_eq!(names(&changed), [""; 0]);
    }
    assert_eq!(about(&shown), ["a", "b", "c"]);
    let changed = shown.take(Event::InitDone);
    assert_eq!(names(&changed), ["b", "c", "d"]);
    assert_eq!(about(&shown), ["a", "b", "d"]);
    let same = &shown.of_pod(&uid(), None)[0];
    assert!(
        before.iter().any(|one| Arc::ptr_eq(one, same)),
        "a is as it was"
    );
}

#[tokio::test]
async fn the_first_list_is_waited_for() {
    use futures::FutureExt;
    let shown = SnapshotIndex::new(NODE.to_owned());
    shown.take(Event::Init);
    shown.take(Event::InitApply(of_pod_1("a", 1)));
    assert!(shown.wait_until_whole().now_or_never().is_none());
    shown.take(Event::InitDone);
    shown.wait_until_whole().await;
    assert_eq!(about(&shown), ["a"]);
}

#[test]
fn a_node_answers_for_a_snapshot_that_names_it_until_it_has_answered() {
    let shown = SnapshotIndex::new(NODE.to_owned());
    let asked = |node: Option<&str>, change: &dyn Fn(&mut SandboxSnapshot)| {
        let spec = json!({ "sandboxName": "s", "podUID": "pod-1", "nodeName": node });
        let mut asked = named("a", "n", 1, spec);
        change(&mut asked);
        shown.take(Event::Apply(asked));
        shown.is_to_answer(&uid())
    };
    let adopt = |one: &mut SandboxSnapshot| {
        one.metadata.finalizers = Some(vec![torpor_api::annotations::IMAGE_FINALIZER.to_owned()]);
    };
    let status = |reason: &str| {
        let condition = json!([{ "type": "Committed", "status": "False", "reason": reason,
            "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" }]);
        serde_json::from_value(json!({ "nodeName": NODE, "conditions": condition })).ok()
    };
    assert!(asked(Some(NODE), &|_| {}));
    assert!(!asked(Some("node-b"), &|_| {}));
    assert!(!asked(None, &|_| {}), "nobody says that it is on this node");
    assert!(asked(Some(NODE), &adopt));
    let answered = |one: &mut SandboxSnapshot| {
        adopt(one);
        one.status = status("SandboxNotFound");
    };
    assert!(!asked(Some(NODE), &answered));
    let going = |one: &mut SandboxSnapshot| {
        answered(one);
        one.metadata.deletion_timestamp =
            serde_json::from_value(json!("2026-01-01T00:00:00Z")).ok();
    };
    assert!(asked(Some(NODE), &going), "its finalizer is to go");
    let kept = |one: &mut SandboxSnapshot| {
        adopt(one);
        one.status = status("ImageMissing");
    };
    assert!(asked(None, &kept));
    assert_eq!(shown.to_answer(), [uid()].into());
    shown.take(Event::Delete(of_pod_1("a", 2)));
    assert_eq!(shown.to_answer(), BTreeSet::new());
}
