//! `snapshot`, `fork` and `rollback`: what is written, in which order, and the waits.

use std::time::Duration;

use serde_json::{Value, json};
use torpor_cli::args::{Fork, Rollback};
use torpor_cli::connect::Cluster;
use torpor_cli::error::Error;
use torpor_cli::fork::fork;
use torpor_cli::rollback::{RolledBack, rollback};
use torpor_cli::snapshot::snapshot;
use torpor_test_apiserver::Apiserver;

use crate::support::{cluster, create, set_conditions};

const LIMIT: Duration = Duration::from_secs(60);

fn quiet(_: &str) {}

/// Returns an apiserver with the Sandbox `demo`, its Pod, and its snapshot `golden`.
fn with_golden() -> (Apiserver, Cluster) {
    let server = Apiserver::new();
    create(&server, "demo");
    with_pod(&server, None);
    taken(&server, "golden", "demo");
    let cluster = cluster(&server);
    (server, cluster)
}

async fn roll_back(cluster: &Cluster, to: &str, discard: bool) -> Result<RolledBack, Error> {
    let args = Rollback {
        name: "demo".to_owned(),
        snapshot: to.to_owned(),
        discard,
        timeout: LIMIT,
    };
    Box::pin(rollback(cluster, &args, &quiet)).await
}

fn forking(count: u32, from: Option<&str>) -> Fork {
    Fork {
        name: "demo".to_owned(),
        count,
        from: from.map(str::to_owned),
        timeout: LIMIT,
    }
}

/// Creates a snapshot of the Sandbox `of` as a user would.
fn taken(server: &Apiserver, name: &str, of: &str) {
    let spec = json!({"sandboxName": of});
    server.create(
        "sandboxsnapshots",
        json!({"metadata": {"name": name, "namespace": "x"}, "spec": spec}),
    );
    answer(server, name, "True", "Committed");
}

/// Answers a snapshot as the agent would, and records the Pod of a complete one as the controller
/// would.
fn answer(server: &Apiserver, name: &str, status: &str, reason: &str) {
    let condition = json!({
        "type": "Committed", "status": status, "reason": reason, "message": "words",
        "lastTransitionTime": "2026-11-21T12:00:00Z",
    });
    let image = format!("image-of-{name}");
    let status = json!({"conditions": [condition], "sizeBytes": 7, "imageID": image});
    server.edit("sandboxsnapshots", "x", name, &json!({"status": status}));
    let record = json!({"metadata": {"annotations": {"torpor.dev/saved-pod": "{}"}}});
    server.edit("sandboxsnapshots", "x", name, &record);
}

/// Waits for the snapshot that a command creates, and answers it.
async fn answer_next(server: &Apiserver, status: &str, reason: &str) -> String {
    let is_new = |name: &String| name.starts_with("demo-");
    let found = || names(server, "sandboxsnapshots").into_iter().find(is_new);
    server.until("a snapshot", |_| found().is_some()).await;
    let name = found().unwrap();
    answer(server, &name, status, reason);
    name
}

fn names(server: &Apiserver, kind: &str) -> Vec<String> {
    let all = server.list(kind).into_iter();
    all.map(|object| object["metadata"]["name"].as_str().unwrap().to_owned())
        .collect()
}

/// Creates a Pod of the Sandbox, which starts from an image if one is named.
fn with_pod(server: &Apiserver, image: Option<&str>) {
    let sandbox = server.get("sandboxes", "x", "demo").unwrap();
    let owner = json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "demo",
        "uid": sandbox["metadata"]["uid"], "controller": true,
    });
    let annotations = image
        .map(|image| json!({"torpor.dev/restore-image": image, "torpor.dev/restore-copy": "true"}));
    server.create(
        "pods",
        json!({
            "metadata": {
                "name": "demo", "namespace": "x", "ownerReferences": [owner],
                "annotations": annotations.unwrap_or_default(),
            },
            "spec": {"containers": []},
        }),
    );
}

/// Sets conditions of the Pod, in the form `Type=Status`.
fn set_pod(server: &Apiserver, conditions: &[&str]) {
    let conditions: Vec<Value> = conditions
        .iter()
        .map(|text| {
            let (type_, status) = text.split_once('=').unwrap();
            json!({"type": type_, "status": status, "reason": "R", "message": "words"})
        })
        .collect();
    let patch = json!({"status": {"conditions": conditions}});
    server.edit("pods", "x", "demo", &patch);
}

fn pod_lives(server: &Apiserver) -> bool {
    let pod = server.get("pods", "x", "demo");
    pod.is_some_and(|pod| pod["metadata"]["deletionTimestamp"].is_null())
}

/// Returns the snapshot that the Sandbox names as its origin.
fn origin(server: &Apiserver) -> Value {
    let sandbox = server.get("sandboxes", "x", "demo").unwrap();
    sandbox["metadata"]["annotations"]["torpor.dev/restore-from"].clone()
}

/// Replaces the Pod that a rollback deletes, as the kubelet and the controller would.
async fn replace_pod(server: &Apiserver, image: &str) {
    server.until("the Pod to go", |s| !pod_lives(s)).await;
    assert_eq!(origin(server), "golden", "the next Pod would start cold");
    server.remove("pods", "x", "demo");
    with_pod(server, Some(image));
}

#[tokio::test]
async fn a_snapshot_is_waited_for_and_one_that_cannot_be_taken_is_removed() {
    let server = Apiserver::new();
    create(&server, "demo");
    let cluster = cluster(&server);
    let take = || snapshot(&cluster, "demo", None, LIMIT, &quiet);
    let (taken, name) = tokio::join!(take(), answer_next(&server, "True", "Committed"));
    let taken = taken.unwrap();
    assert_eq!(taken.snapshot.metadata.name, Some(name.clone()));
    assert!(taken.took.is_some());
    server.remove("sandboxsnapshots", "x", &name);

    let refuse = answer_next(&server, "False", "RuntimeNotCapable");
    let (refused, _) = tokio::join!(take(), refuse);
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("RuntimeNotCapable: words"), "{error}");
    assert!(names(&server, "sandboxsnapshots").is_empty());
}

#[tokio::test]
async fn a_suspended_sandbox_has_no_memory_to_save_and_is_not_rolled_back() {
    let server = Apiserver::new();
    create(&server, "demo");
    let suspended = json!({"spec": {"operatingMode": "Suspended"}});
    server.edit("sandboxes", "x", "demo", &suspended);
    taken(&server, "golden", "demo");
    let cluster = cluster(&server);
    let error = snapshot(&cluster, "demo", None, LIMIT, &quiet).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("kubectl torpor resume"), "{error}");
    let error = roll_back(&cluster, "golden", false).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("kubectl torpor resume"), "{error}");
    assert_eq!(names(&server, "sandboxsnapshots"), ["golden"]);
    assert!(origin(&server).is_null());
}

#[tokio::test]
async fn each_copy_starts_from_one_snapshot_and_has_its_own_result() {
    let server = Apiserver::new();
    create(&server, "demo");
    let cluster = cluster(&server);
    let controller = async {
        let snapshot = answer_next(&server, "True", "Committed").await;
        let is_copy = |name: &String| name != "demo";
        let copies = || -> Vec<String> {
            let all = names(&server, "sandboxes").into_iter();
            all.filter(is_copy).collect()
        };
        server.until("two copies", |_| copies().len() == 2).await;
        let copies = copies();
        for copy in &copies {
            let copy = server.get("sandboxes", "x", copy).unwrap();
            let origin = &copy["metadata"]["annotations"]["torpor.dev/restore-from"];
            assert_eq!(*origin, Value::from(snapshot.clone()));
        }
        set_conditions(&server, &copies[0], &[("Ready", "True", "X")]);
        let not_seen_yet = [("Restored", "False", "SnapshotNotReady")];
        set_conditions(&server, &copies[1], &not_seen_yet);
        let cold = [("Restored", "False", "ColdStarted"), ("Ready", "True", "X")];
        set_conditions(&server, &copies[1], &cold);
        snapshot
    };
    let args = forking(2, None);
    let (started, snapshot) = tokio::join!(fork(&cluster, &args, &quiet), controller);
    let started = started.unwrap();
    assert_eq!(started.snapshot.metadata.name, Some(snapshot));
    let failed: Vec<&Error> = (started.copies.iter())
        .filter_map(|copy| copy.as_ref().err())
        .collect();
    assert_eq!((started.copies.len(), failed.len()), (2, 1));
    let error = failed[0].to_string();
    assert!(error.contains("ColdStarted in words"), "{error}");
}

#[tokio::test]
async fn a_snapshot_that_is_named_has_to_be_one_of_the_sandbox() {
    let server = Apiserver::new();
    create(&server, "demo");
    taken(&server, "golden", "demo");
    taken(&server, "theirs", "another");
    taken(&server, "kept", "demo");
    let backup = json!({"metadata": {"labels": {"torpor.dev/backup": "true"}}});
    server.edit("sandboxsnapshots", "x", "kept", &backup);
    let cluster = cluster(&server);
    let mut args = forking(1, Some("golden"));
    args.timeout = Duration::from_millis(1);
    let started = fork(&cluster, &args, &quiet).await.unwrap();
    let late = started.copies[0].as_ref().unwrap_err();
    assert!(late.is_unknown(), "{late}");
    assert_eq!(names(&server, "sandboxes").len(), 2);
    for (named, words) in [
        ("theirs", "is one of Sandbox another"),
        ("gone", "there is no SandboxSnapshot gone"),
        ("kept", "is a backup"),
    ] {
        let error = fork(&cluster, &forking(1, Some(named)), &quiet).await;
        let error = error.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        let error = roll_back(&cluster, named, true).await;
        let error = error.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[tokio::test]
async fn a_sandbox_of_a_claim_is_not_copied() {
    let server = Apiserver::new();
    create(&server, "demo");
    let owner = json!([{
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim", "name": "c",
        "uid": "u", "controller": true,
    }]);
    let owned = json!({"metadata": {"ownerReferences": owner}});
    server.edit("sandboxes", "x", "demo", &owned);
    let cluster = cluster(&server);
    let error = fork(&cluster, &forking(1, None), &quiet).await.unwrap_err();
    assert!(
        error.to_string().contains("SandboxClaim c holds it"),
        "{error}"
    );
    assert!(names(&server, "sandboxsnapshots").is_empty());
}

#[tokio::test]
async fn a_rollback_saves_the_present_memory_before_it_deletes_the_pod() {
    let (server, cluster) = with_golden();
    let controller = async {
        let kept_in = answer_next(&server, "True", "Committed").await;
        replace_pod(&server, "image-of-golden").await;
        set_pod(&server, &["torpor.dev/Restored=True", "Ready=False"]);
        set_pod(&server, &["torpor.dev/Restored=True", "Ready=True"]);
        kept_in
    };
    let rolled = roll_back(&cluster, "golden", false);
    let (done, kept_in) = tokio::join!(rolled, controller);
    assert_eq!(done.unwrap().kept_in, Some(kept_in));
    assert_eq!(origin(&server), "golden");
}

#[tokio::test]
async fn a_rollback_whose_save_fails_changes_nothing() {
    let server = Apiserver::new();
    create(&server, "demo");
    let before = json!({"metadata": {"annotations": {"torpor.dev/restore-from": "earlier"}}});
    server.edit("sandboxes", "x", "demo", &before);
    with_pod(&server, None);
    taken(&server, "golden", "demo");
    let cluster = cluster(&server);
    let controller = async {
        // The named snapshot is in use before another one could push it out of `keepLast`.
        server.until("the origin", |s| origin(s) == "golden").await;
        answer_next(&server, "False", "RuntimeNotCapable").await
    };
    let rolled = roll_back(&cluster, "golden", false);
    let (failed, _) = tokio::join!(rolled, controller);
    let error = failed.unwrap_err().to_string();
    assert!(error.contains("RuntimeNotCapable"), "{error}");
    assert!(pod_lives(&server));
    assert_eq!(origin(&server), "earlier");
    assert_eq!(names(&server, "sandboxsnapshots"), ["golden"]);
}

#[tokio::test]
async fn a_target_that_goes_during_the_save_costs_no_pod() {
    let (server, cluster) = with_golden();
    let controller = async {
        server.until("the origin", |s| origin(s) == "golden").await;
        server.remove("sandboxsnapshots", "x", "golden");
        answer_next(&server, "True", "Committed").await
    };
    let rolled = roll_back(&cluster, "golden", false);
    let (failed, _) = tokio::join!(rolled, controller);
    let error = failed.unwrap_err().to_string();
    assert!(
        error.contains("there is no SandboxSnapshot golden"),
        "{error}"
    );
    assert!(pod_lives(&server) && origin(&server).is_null());
}

#[tokio::test]
async fn memory_of_a_suspension_stands_in_the_way_of_a_rollback() {
    let server = Apiserver::new();
    create(&server, "demo");
    taken(&server, "golden", "demo");
    server.create(
        "sandboxsnapshots",
        json!({
            "metadata": {"name": "newer", "namespace": "x"},
            "spec": {"sandboxName": "demo", "reason": "Suspend"},
        }),
    );
    answer(&server, "newer", "False", "ImageMissing");
    let cluster = cluster(&server);
    let error = roll_back(&cluster, "golden", true).await;
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("kubectl delete sandboxsnapshot newer"),
        "{error}"
    );
    let error = roll_back(&cluster, "newer", true).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("from which the Sandbox resumes"), "{error}");
}

#[tokio::test]
async fn a_new_pod_with_other_memory_is_a_failure() {
    for (image, conditions, words) in [
        (
            "another",
            &["Ready=True"][..],
            "did not start from the snapshot",
        ),
        (
            "image-of-golden",
            &["torpor.dev/Restored=False", "Ready=True"],
            "R: words",
        ),
    ] {
        let (server, cluster) = with_golden();
        let controller = async {
            replace_pod(&server, image).await;
            set_pod(&server, conditions);
        };
        let rolled = roll_back(&cluster, "golden", true);
        let (failed, ()) = tokio::join!(rolled, controller);
        let error = failed.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[tokio::test]
async fn a_rollback_without_a_new_pod_reports_the_condition_and_the_remedy() {
    let server = Apiserver::new();
    create(&server, "demo");
    // The earlier Pod had crashed: that is no answer to the rollback.
    let crashed = [("Restored", "False", "ColdStarted"), ("Ready", "True", "X")];
    set_conditions(&server, "demo", &crashed);
    with_pod(&server, None);
    taken(&server, "golden", "demo");
    let cluster = cluster(&server);
    let controller = async {
        server.until("the Pod to go", |s| !pod_lives(s)).await;
        let failed = [("Restored", "False", "ImageCorrupt")];
        set_conditions(&server, "demo", &failed);
    };
    let rolled = roll_back(&cluster, "golden", true);
    let (failed, ()) = tokio::join!(rolled, controller);
    let error = failed.unwrap_err().to_string();
    assert!(
        error.contains("ImageCorrupt in words") && error.contains("Remedy"),
        "{error}"
    );
}
