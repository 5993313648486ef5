//! Tests of archives: a suspended Sandbox moves into a repository, here a directory, and comes back
//! in this cluster or in another one.

use std::{path::Path, sync::Arc};

use rstest::rstest;
use serde_json::{Value, json};
use torpor_controller::{settings::Settings, snapshot};
use torpor_repository::{ImageName, Keys, LocalFile, Pace, Progress, Repository};

use crate::{
    objects::{NS, committed, condition, mode, torpor_sandbox},
    world::World,
};

const CLUSTER: &str = "cluster-a";
/// Image that has been committed long ago.
const IMAGE: &str = "i.1";

/// Puts an image with this digest into the repository in `dir`, as an agent does.
async fn put_image(dir: &Path, digest: &str) {
    let parameters = [
        ("url".to_owned(), format!("file://{}", dir.display())),
        ("encryption".to_owned(), "none".to_owned()),
    ];
    let settings = torpor_repository::Settings::parse(&parameters.into()).expect("settings");
    let repository = Repository::open_for_sweeps(&settings, dir, Keys::default(), CLUSTER)
        .expect("a repository");
    let mut file = tempfile::tempfile().expect("a file");
    std::io::Write::write_all(&mut file, b"memory").expect("written");
    let files = vec![LocalFile {
        name: "pages.img".to_owned(),
        file,
    }];
    let manifest = json!({"digest": digest, "manifest": {}}).to_string();
    let name = ImageName::new(NS, IMAGE).expect("a name");
    let (progress, pace) = (Progress::default(), Pace::new(None));
    let uploaded = repository.upload(&name, manifest.into_bytes(), files, &progress, &pace);
    uploaded.await.expect("uploaded");
}

/// Returns a world of a cluster with this UID, and a SnapshotClass with a repository in `dir`.
fn world(dir: &Path, uid: &str, parameters: Value) -> World {
    let world = World::with_settings(Settings::default());
    let system = json!({"metadata": {"name": "kube-system"}});
    world.api.create("namespaces", system);
    let uid = json!({"metadata": {"uid": uid}});
    world.api.edit("namespaces", "", "kube-system", &uid);
    let mut class = json!({
        "metadata": {"name": "far"},
        "spec": {
            "provisioner": "repository.torpor.dev", "deletionPolicy": "Delete",
            "parameters": {"url": format!("file://{}", dir.display()), "encryption": "none"},
        },
    });
    let more = parameters.as_object().expect("parameters").clone();
    let all = class["spec"]["parameters"].as_object_mut();
    all.expect("parameters").extend(more);
    world.api.create("snapshotclasses", class);
    world
}

fn annotations(annotations: Value) -> Value {
    json!({"metadata": {"annotations": annotations}})
}

fn archive_now() -> Value {
    annotations(json!({"torpor.dev/archive-after": "now"}))
}

/// Brings up the Sandbox "s" with class "far", and suspends it. Its image is uploaded.
async fn suspended(world: &World, dir: &Path, change: Value) {
    put_image(dir, "blake3:1").await;
    suspended_alone(world, dir, change).await;
}

/// Suspends the Sandbox "s", and writes its archive.
async fn archived(world: &World, dir: &Path) {
    suspended(world, dir, archive_now()).await;
    world.settle().await;
    pass(world).await;
}

/// Suspends the Sandbox as [`suspended`] does, without the image in the repository.
async fn suspended_alone(world: &World, dir: &Path, change: Value) {
    let mut sandbox = torpor_sandbox(change);
    sandbox["metadata"]["annotations"]["torpor.dev/snapshot-class"] = json!("far");
    world.ready(sandbox).await;
    world.edit_sandbox(&mode("Suspended"));
    world.settle().await;
    let name = world.image_of_suspension().expect("a snapshot");
    world.edit_snapshot(&name, &committed(IMAGE, "n1"));
    let url = format!("file://{}", dir.display());
    let uploaded = json!({"status": {"digest": "blake3:1", "sizeBytes": 7, "upload": {"url": url}, "conditions": [
        condition("Committed", "True", "Committed", ""), condition("Uploaded", "True", "Uploaded", ""),
    ]}});
    world.edit_snapshot(&name, &uploaded);
    world.settle().await;
    world.pod_ends();
    world.settle().await;
}

fn archive(world: &World) -> Option<Value> {
    let all = world.snapshots();
    all.into_iter()
        .find(|one| one["spec"]["reason"] == "Archive")
}

/// Runs a pass over the archive with refreshed caches.
async fn pass(world: &World) {
    world.sync();
    let found = archive(world).expect("an archive");
    let found = serde_json::from_value(found).expect("a SandboxSnapshot");
    let passed = snapshot::reconcile(Arc::new(found), Arc::clone(&world.context));
    // The condition has the error of a pass.
    let _ = passed.await;
}

fn committed_of(archive: &Value) -> &Value {
    let all = archive["status"]["conditions"]
        .as_array()
        .expect("conditions");
    let found = all.iter().find(|one| one["type"] == "Committed");
    found.expect("the condition Committed")
}

fn record(dir: &Path) -> std::path::PathBuf {
    dir.join("torpor-v2")
        .join(CLUSTER)
        .join(NS)
        .join("archives")
        .join(IMAGE)
}

fn exists(world: &World) -> bool {
    world.api.get("sandboxes", NS, "s").is_some()
}

#[tokio::test]
async fn a_sandbox_is_deleted_after_its_record_is_written_and_its_archive_is_on_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path(), CLUSTER, json!({}));
    suspended(
        &world,
        dir.path(),
        json!({"metadata": {"labels": {"team": "a"}}}),
    )
    .await;
    assert_eq!(archive(&world), None);

    world.edit_sandbox(&archive_now());
    world.settle().await;
    let made = archive(&world).expect("an archive");
    assert_eq!(
        made["spec"]["archive"],
        json!({"cluster": CLUSTER, "imageID": IMAGE})
    );
    assert_eq!(made["spec"]["snapshotClassName"], "far");
    assert_eq!(made["metadata"]["ownerReferences"][0]["name"], "s");
    let archived = world.condition("Archived").expect("a condition");
    assert_eq!((&*archived.0, &*archived.1), ("False", "Archiving"));
    assert!(!record(dir.path()).exists() && exists(&world));

    pass(&world).await;
    assert!(record(dir.path()).exists());
    let whole = archive(&world).expect("an archive");
    assert_eq!(committed_of(&whole)["status"], "True");
    assert_eq!(whole["status"]["digest"], "blake3:1");
    assert_eq!(whole["status"]["imageID"], IMAGE);
    assert_eq!(whole["status"]["nodeName"], Value::Null);
    let on_archive = &whole["metadata"]["annotations"];
    let manifest = on_archive["torpor.dev/archived-sandbox"]
        .as_str()
        .expect("a manifest");
    let manifest: Value = serde_json::from_str(manifest).expect("JSON");
    assert_eq!(manifest["metadata"]["labels"], json!({"team": "a"}));
    assert_eq!(
        manifest["metadata"]["annotations"],
        json!({"torpor.dev/snapshot-class": "far"})
    );
    world.api.take_writes();
    pass(&world).await;
    assert_eq!(
        world.api.take_writes(),
        [],
        "a second pass has nothing to do"
    );

    assert_eq!(world.writes_of_a_pass().await[0], "patch sandboxsnapshots");
    assert!(exists(&world));
    let alone = archive(&world).expect("an archive");
    assert_eq!(alone["metadata"]["ownerReferences"], json!([]));
    assert_eq!(world.writes_of_a_pass().await, ["delete sandboxes"]);
    assert!(!exists(&world) && archive(&world).is_some());
}

#[rstest]
#[case::without_a_repository(json!({}), json!({}), "NoRepository")]
#[case::with_volumes(
    json!({"spec": {"volumeClaimTemplates": [
        {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"]}},
    ]}}),
    json!({"torpor.dev/snapshot-class": "far"}),
    "HasVolumes"
)]
#[case::of_a_claim(
    json!({"metadata": {"ownerReferences": [{
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim", "name": "c",
        "uid": "claim-uid", "controller": true,
    }]}}),
    json!({"torpor.dev/snapshot-class": "far"}),
    "Held"
)]
#[tokio::test]
async fn a_sandbox_that_an_archive_cannot_keep_is_refused_with_the_reason(
    #[case] change: Value,
    #[case] settings: Value,
    #[case] reason: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path(), CLUSTER, json!({}));
    let mut sandbox = torpor_sandbox(change);
    sandbox["metadata"]["annotations"] = settings;
    world.ready(sandbox).await;
    world.edit_sandbox(&mode("Suspended"));
    world.edit_sandbox(&archive_now());
    world.settle().await;
    let name = world.image_of_suspension().expect("a snapshot");
    world.edit_snapshot(&name, &committed(IMAGE, "n1"));
    world.settle().await;
    world.pod_ends();
    world.settle().await;
    let archived = world.condition("Archived").expect("a condition");
    assert_eq!(
        (&*archived.0, &*archived.1),
        ("False", reason),
        "{}",
        archived.2
    );
    assert_eq!(archive(&world), None);
    assert!(
        world
            .events()
            .iter()
            .any(|event| event.contains("NotArchived")),
        "{:?}",
        world.events()
    );
}

#[tokio::test]
async fn a_sandbox_is_archived_only_after_its_time() {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path(), CLUSTER, json!({}));
    suspended(&world, dir.path(), json!({})).await;
    let name = world.image_of_suspension().expect("a snapshot");
    let now = jiff::Timestamp::now().to_string();
    world.edit_snapshot(&name, &json!({"status": {"committedAt": now}}));
    world.edit_sandbox(&annotations(json!({"torpor.dev/archive-after": "7d"})));
    world.settle().await;
    assert_eq!(
        world.condition("Archived").expect("a condition").1,
        "Waiting"
    );
    let wait = world.pass().await.unwrap().expect("another pass");
    let week = 7 * 86_400;
    assert!((week - 60..=week).contains(&wait.as_secs()), "{wait:?}");
    world.edit_snapshot(
        &name,
        &json!({"status": {"committedAt": "2026-01-01T00:00:00Z"}}),
    );
    world.settle().await;
    assert!(archive(&world).is_some());
}

#[tokio::test]
async fn a_sandbox_that_is_resumed_before_its_deletion_stays_and_its_archive_goes() {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path(), CLUSTER, json!({}));
    archived(&world, dir.path()).await;
    assert_eq!(world.writes_of_a_pass().await[0], "patch sandboxsnapshots");
    world.sync();
    // The controller has not seen this yet.
    world.edit_sandbox(&mode("Running"));
    let running = world.sandbox();
    world.edit_sandbox(&mode("Suspended"));
    let suspended: torpor_api::Sandbox = serde_json::from_value(world.sandbox()).unwrap();
    world.edit_sandbox(&json!({"spec": running["spec"]}));
    let stale =
        torpor_controller::sandbox::reconcile(Arc::new(suspended), Arc::clone(&world.context));
    stale.await.expect_err("the Sandbox has changed");
    assert!(exists(&world));
    world.settle().await;
    assert_eq!(archive(&world), None, "the memory has run on");
    assert!(world.pod().is_some());
}

#[tokio::test]
async fn an_image_that_is_missing_in_its_repository_is_reported_and_its_archive_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path(), CLUSTER, json!({}));
    archived(&world, dir.path()).await;
    let index = dir
        .path()
        .join("torpor-v2")
        .join(CLUSTER)
        .join(NS)
        .join("images")
        .join(IMAGE);
    std::fs::remove_file(index).unwrap();
    world.sync();
    let class = world
        .api
        .get("snapshotclasses", "", "far")
        .expect("a class");
    let class = serde_json::from_value(class).expect("a SnapshotClass");
    torpor_controller::sweep::sweep(&world.context, &class)
        .await
        .expect("swept");
    let uploaded = |object: &Value| {
        let all = object["status"]["conditions"]
            .as_array()
            .expect("conditions");
        let found = all
            .iter()
            .find(|one| one["type"] == "Uploaded")
            .expect("Uploaded");
        (
            found["status"].clone(),
            found["reason"].clone(),
            found["message"].to_string(),
        )
    };
    for snapshot in world.snapshots() {
        let (status, reason, message) = uploaded(&snapshot);
        assert_eq!(
            (status, reason),
            (json!("False"), json!("Damaged")),
            "{snapshot:#}"
        );
        assert!(message.contains("the index of image i.1"), "{message}");
    }
    let events = world.events();
    assert!(
        events.iter().any(|event| event.contains("Damaged")),
        "{events:?}"
    );

    let mut copy = torpor_sandbox(json!({"metadata": {"name": "t"}}));
    let archive = archive(&world).expect("an archive");
    copy["metadata"]["annotations"]["torpor.dev/restore-from"] =
        archive["metadata"]["name"].clone();
    let made = world.api.create("sandboxes", copy);
    world.sync();
    let made = serde_json::from_value(made).expect("a Sandbox");
    let passed = torpor_controller::sandbox::reconcile(Arc::new(made), Arc::clone(&world.context));
    passed.await.expect("a pass");
    let copy = world.api.get("sandboxes", NS, "t").expect("the copy");
    let all = copy["status"]["conditions"].as_array().expect("conditions");
    let restored = all
        .iter()
        .find(|one| one["type"] == "Restored")
        .expect("Restored");
    assert_eq!(restored["reason"], "ImageMissing", "{restored}");
    assert_eq!(world.api.get("pods", NS, "t"), None);
}

#[rstest]
#[case::no_index(None, "does not exist")]
#[case::another_image(Some("blake3:2"), "another image")]
#[tokio::test]
async fn a_sandbox_whose_image_is_not_whole_in_the_repository_is_not_archived(
    #[case] digest: Option<&str>,
    #[case] words: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path(), CLUSTER, json!({}));
    suspended_alone(&world, dir.path(), archive_now()).await;
    if let Some(digest) = digest {
        put_image(dir.path(), digest).await;
    }
    world.settle().await;
    pass(&world).await;
    let refused = archive(&world).expect("an archive");
    let condition = committed_of(&refused);
    assert_eq!(condition["reason"], "Damaged", "{condition}");
    assert!(
        condition["message"].as_str().unwrap().contains(words),
        "{condition}"
    );
    assert!(!record(dir.path()).exists());
    world.settle().await;
    assert!(exists(&world));
    world.api.take_writes();
    pass(&world).await;
    assert_eq!(
        world.api.take_writes(),
        [],
        "the same failure is written once"
    );

    std::fs::remove_dir_all(dir.path().join("torpor-v2")).ok();
    put_image(dir.path(), "blake3:1").await;
    pass(&world).await;
    assert_eq!(
        committed_of(&archive(&world).expect("an archive"))["status"],
        "True"
    );
}

#[tokio::test]
async fn a_sandbox_that_is_changed_is_archived_anew() {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path(), CLUSTER, json!({}));
    archived(&world, dir.path()).await;
    world.edit_sandbox(&json!({"metadata": {"labels": {"team": "b"}}}));
    assert_eq!(world.writes_of_a_pass().await[0], "delete sandboxsnapshots");
    assert!(exists(&world));
    world.settle().await;
    pass(&world).await;
    world.pass().await.unwrap();
    world.pass().await.unwrap();
    assert!(!exists(&world));
    let whole = archive(&world).expect("an archive");
    let manifest = whole["metadata"]["annotations"]["torpor.dev/archived-sandbox"].to_string();
    assert!(manifest.contains("team"), "{manifest}");
}

#[rstest]
#[case::another_class(json!({"snapshotClassName": "near"}))]
#[case::another_image(json!({"archive": {"imageID": "i.2"}}))]
#[tokio::test]
async fn an_archive_of_another_image_or_class_is_not_taken_for_the_sandboxs_own(
    #[case] change: Value,
) {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path(), CLUSTER, json!({}));
    archived(&world, dir.path()).await;
    let name = archive(&world).expect("an archive")["metadata"]["name"].clone();
    world.edit_snapshot(name.as_str().unwrap(), &json!({"spec": change}));
    world.settle().await;
    assert!(exists(&world));
    let archived = world.condition("Archived").expect("a condition");
    assert_eq!(archived.1, "ArchiveFailed", "{}", archived.2);
}

#[tokio::test]
async fn memory_that_may_have_continued_elsewhere_is_not_archived() {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path(), CLUSTER, json!({}));
    suspended(&world, dir.path(), json!({})).await;
    let name = world.image_of_suspension().expect("a snapshot");
    let taker = json!({"nodeName": "n2", "uid": "pod-before"}).to_string();
    world.edit_snapshot(&name, &annotations(json!({"torpor.dev/taken-by": taker})));
    world.edit_sandbox(&archive_now());
    world.settle().await;
    assert_eq!(archive(&world), None);
    let archived = world.condition("Archived").expect("a condition");
    assert!(archived.2.contains("pod-before"), "{}", archived.2);
}

#[tokio::test]
async fn a_request_to_archive_at_once_ends_with_the_next_resume() {
    let dir = tempfile::tempdir().unwrap();
    let world = world(dir.path(), CLUSTER, json!({}));
    suspended(&world, dir.path(), json!({})).await;
    world.edit_sandbox(&mode("Running"));
    world.edit_sandbox(&archive_now());
    world.settle().await;
    let sandbox = world.sandbox();
    assert_eq!(
        sandbox["metadata"]["annotations"]["torpor.dev/archive-after"],
        Value::Null
    );
    world.edit_sandbox(&annotations(json!({"torpor.dev/archive-after": "7d"})));
    world.settle().await;
    let sandbox = world.sandbox();
    assert_eq!(
        sandbox["metadata"]["annotations"]["torpor.dev/archive-after"],
        "7d"
    );
}

/// Archives the Sandbox "s" in a cluster that is gone afterwards.
async fn archived_elsewhere(dir: &Path) {
    let first = world(dir, CLUSTER, json!({}));
    archived(&first, dir).await;
    assert!(record(dir).exists());
}

fn import(world: &World) {
    world.api.create(
        "sandboxsnapshots",
        json!({
            "metadata": {"name": "imported", "namespace": NS},
            "spec": {
                "sandboxName": "s", "reason": "Archive", "snapshotClassName": "far",
                "archive": {"cluster": CLUSTER, "imageID": IMAGE},
            },
        }),
    );
}

#[tokio::test]
async fn another_cluster_restores_an_archive_where_its_class_allows_that() {
    let dir = tempfile::tempdir().unwrap();
    archived_elsewhere(dir.path()).await;
    let second = world(dir.path(), "cluster-b", json!({"archivesOf": CLUSTER}));
    import(&second);
    pass(&second).await;
    let whole = archive(&second).expect("an archive");
    assert_eq!(committed_of(&whole)["status"], "True", "{whole:#}");

    let mut manifest: Value = serde_json::from_str(
        whole["metadata"]["annotations"]["torpor.dev/archived-sandbox"]
            .as_str()
            .expect("text"),
    )
    .expect("JSON");
    manifest["metadata"]["namespace"] = json!(NS);
    manifest["metadata"]["annotations"]["torpor.dev/restore-from"] = json!("imported");
    manifest["spec"]["operatingMode"] = json!("Running");
    second.api.create("sandboxes", manifest);
    second.settle().await;
    let pod = second.pod().expect("a Pod");
    let on_pod = &pod["metadata"]["annotations"];
    assert_eq!(on_pod["torpor.dev/restore-image"], IMAGE);
    assert_eq!(on_pod["torpor.dev/restore-copy"], "true");
    assert_eq!(on_pod["torpor.dev/restore-class"], "far");
    assert_eq!(on_pod["torpor.dev/restore-digest"], "blake3:1");
    assert_eq!(on_pod["torpor.dev/restore-cluster"], CLUSTER);
    assert!(pod["spec"]["affinity"].to_string().contains("\"n1\""));
    assert!(archive(&second).is_some(), "a copy leaves its archive");
}

#[rstest]
#[case::not_allowed(json!({}), "ClusterNotAllowed", "archivesOf")]
#[case::another_repository(json!({"archivesOf": CLUSTER, "elsewhere": "true"}), "ArchiveMissing", "has no archive")]
#[case::no_key(json!({"archivesOf": CLUSTER, "encryption": "required"}), "InvalidClass", "torpor-repository-keys")]
#[case::damaged(json!({"archivesOf": CLUSTER, "damaged": "true"}), "ArchiveCorrupt", "damaged")]
#[tokio::test]
async fn an_archive_that_cannot_be_read_reports_why_and_is_read_later(
    #[case] parameters: Value,
    #[case] reason: &str,
    #[case] words: &str,
) {
    let dir = tempfile::tempdir().unwrap();
    archived_elsewhere(dir.path()).await;
    let whole = std::fs::read(record(dir.path())).unwrap();
    let mut spoilt = parameters.clone();
    if spoilt.get("damaged").is_some() {
        std::fs::write(record(dir.path()), &whole[..whole.len() - 9]).unwrap();
    }
    if spoilt.get("elsewhere").is_some() {
        std::fs::remove_file(record(dir.path())).unwrap();
    }
    for mark in ["damaged", "elsewhere"] {
        spoilt.as_object_mut().unwrap().remove(mark);
    }
    let second = world(dir.path(), "cluster-b", spoilt);
    import(&second);
    pass(&second).await;
    let read = archive(&second).expect("an archive");
    let condition = committed_of(&read);
    assert_eq!(condition["reason"], reason, "{condition}");
    let message = condition["message"].as_str().unwrap();
    assert!(message.contains(words), "{message}");

    std::fs::write(record(dir.path()), whole).unwrap();
    let good = json!({"spec": {"parameters": {"archivesOf": CLUSTER, "encryption": "none"}}});
    second.api.edit("snapshotclasses", "", "far", &good);
    pass(&second).await;
    let read = archive(&second).expect("an archive");
    assert_eq!(committed_of(&read)["status"], "True", "{read:#}");
}
