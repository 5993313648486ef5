use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rstest::rstest;
use serde_json::json;
use torpor_api::node::ImageServer;

use super::*;
use crate::merge_patch;

const NAME: &str = "t-golden-1";

fn now() -> Timestamp {
    "2026-01-01T01:00:00Z".parse().unwrap()
}

fn object<K: serde::de::DeserializeOwned>(mut whole: Value, change: &Value) -> Arc<K> {
    merge_patch::apply(&mut whole, change);
    Arc::new(serde_json::from_value(whole).unwrap())
}

fn template(change: Value) -> Arc<SandboxTemplate> {
    let whole = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "metadata": {
            "name": "t", "namespace": "ns", "uid": "u-t",
            "annotations": {"torpor.dev/golden": "true"},
        },
        "spec": {"podTemplate": {"spec": {
            "runtimeClassName": "torpor", "containers": [{"name": "c", "image": "img"}],
        }}},
    });
    object(whole, &change)
}

fn record(node: &str) -> PodRecord {
    PodRecord {
        images: [("c".to_owned(), "r@sha256:1".to_owned())].into(),
        name: NAME.to_owned(),
        node_name: node.to_owned(),
        sandbox_uid: "u-s".to_owned(),
        uid: format!("pod-on-{node}"),
    }
}

/// Returns the committed snapshot of the golden Pod that ran on a node.
fn snapshot(node: &str, change: Value) -> Arc<SandboxSnapshot> {
    let record = record(node);
    let mut whole = sandbox::snapshot(&template(json!({})), NAME, &record, true);
    let rest = json!({
        "metadata": {
            "uid": format!("u-{node}"), "creationTimestamp": "2026-01-01T00:29:00Z",
        },
        "status": {
            "nodeName": node, "podUID": record.uid, "imageID": format!("{}.1", record.uid),
            "committedAt": "2026-01-01T00:30:00Z",
            "fingerprint": {"runscDigest": "sha256:1"},
            "conditions": [{
                "type": "Committed", "status": "True", "reason": "Committed", "message": "",
                "lastTransitionTime": "2026-01-01T00:30:00Z",
            }],
        },
    });
    merge_patch::apply(&mut whole, &rest);
    object(whole, &change)
}

fn uncommitted() -> Value {
    json!({"status": {"imageID": null, "committedAt": null, "conditions": [{
        "type": "Committed", "status": "False", "reason": "Saving", "message": "no room",
        "lastTransitionTime": "2026-01-01T00:30:00Z",
    }]}})
}

/// Returns the golden Sandbox, created `minutes` ago.
fn golden(ready: bool, minutes: i64) -> Arc<Sandbox> {
    let whole = sandbox::sandbox(&template(json!({})), NAME, None, None);
    let created = now() - jiff::SignedDuration::from_mins(minutes);
    let status = if ready { "True" } else { "False" };
    let rest = json!({
        "metadata": {"uid": "u-s", "creationTimestamp": created.to_string()},
        "status": {"conditions": [{
            "type": "Ready", "status": status, "reason": "R", "message": "Pod is Pending",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }]},
    });
    object(whole, &rest)
}

fn pod(node: &str) -> Arc<Pod> {
    let record = record(node);
    let whole = json!({
        "metadata": {"name": NAME, "uid": record.uid, "ownerReferences": [{
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": NAME,
            "uid": "u-s", "controller": true,
        }]},
        "spec": {"nodeName": node, "containers": [{"name": "c"}]},
        "status": {"containerStatuses": [{
            "name": "c", "image": "i", "imageID": "r@sha256:1", "ready": true, "restartCount": 0,
        }]},
    });
    object(whole, &json!({}))
}

fn node(name: &str, digest: &str) -> Arc<SandboxNode> {
    let whole = json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxNode", "metadata": {"name": name},
        "spec": {}, "status": {"fingerprint": {"runscDigest": digest}},
    });
    object(whole, &json!({}))
}

fn observed() -> Observed {
    Observed {
        template: template(json!({})),
        name: NAME.to_owned(),
        nodes: vec![node("a", "sha256:1"), node("b", "sha256:1")],
        isolated: true,
        ..Observed::default()
    }
}

fn steps(observed: &Observed) -> Vec<String> {
    let plan = plan(observed, now());
    let steps = plan.steps.iter().map(|step| match step {
        Action::CreateSandbox { node, copied } => {
            let node = node.as_deref().unwrap_or("any");
            let from = copied.as_ref().map(|name| format!(" from {name}"));
            format!("golden on {node}{}", from.unwrap_or_default())
        }
        Action::CreateSnapshot { pod, uploads } => {
            let kept = if *uploads { "" } else { " on its node alone" };
            format!("save {}{kept}", pod.uid)
        }
        Action::DeleteSandbox { name, .. } => format!("end {name}"),
        Action::DeleteSnapshot { name, .. } => format!("remove {name}"),
    });
    steps.collect()
}

#[test]
fn a_golden_sandbox_is_started_saved_once_it_is_ready_and_ended_once_it_is_saved() {
    let mut world = observed();
    assert_eq!(steps(&world), ["golden on any"]);
    world.sandboxes = vec![golden(false, 1)];
    world.pod = Some(pod("a"));
    assert!(steps(&world).is_empty());
    world.sandboxes = vec![golden(true, 1)];
    assert_eq!(steps(&world), ["save pod-on-a"]);
    world.snapshots = vec![snapshot("a", uncommitted())];
    assert!(steps(&world).is_empty());
    world.snapshots = vec![snapshot("a", json!({}))];
    assert_eq!(steps(&world), [format!("end {NAME}")]);
    world.sandboxes.clear();
    world.pod = None;
    assert!(steps(&world).is_empty());
}

#[test]
fn each_node_with_members_gets_an_image_one_after_the_other() {
    let mut world = observed();
    world.member_nodes = ["a".to_owned(), "b".to_owned()].into();
    // The scheduler finds the node for the first one.
    assert_eq!(steps(&world), ["golden on any"]);
    world.snapshots = vec![snapshot("a", json!({}))];
    assert_eq!(steps(&world), ["golden on b"]);
    world.snapshots.push(snapshot("b", json!({})));
    assert!(steps(&world).is_empty());
    // A node has got another build of runsc, and keeps the one that made its image.
    let mut upgraded = SandboxNode::clone(&node("a", "blake3:2222222222220"));
    let status = upgraded.status.as_mut().expect("a report");
    status.runsc_builds = vec!["sha256:1".to_owned()];
    world.nodes[0] = Arc::new(upgraded);
    let remade = steps(&world);
    assert_eq!(remade[0], format!("remove {NAME}-pod-on-a"));
    assert_eq!(remade[1], "golden on a");
    // A node on which none can start does not hold up the others.
    world.member_nodes.insert("c".to_owned());
    let nodes: BTreeSet<String> = (0..4)
        .flat_map(|turn| plan(&world, now() + LIMIT * turn).steps)
        .filter_map(|step| match step {
            Action::CreateSandbox { node, .. } => node,
            _ => None,
        })
        .collect();
    assert_eq!(nodes, ["a".to_owned(), "c".to_owned()].into());
    // A node whose agent does not report may come back.
    world.member_nodes.remove("c");
    world.nodes.clear();
    assert!(steps(&world).is_empty());
}

#[test]
fn the_next_node_continues_from_an_image_in_a_repository() {
    let mut world = observed();
    world.member_nodes = ["a".to_owned(), "b".to_owned()].into();
    world.uploads = true;
    let image = |uploaded: &str, minute: u8| {
        let condition = |type_: &str, status: &str| {
            json!({
                "type": type_, "status": status, "reason": "R", "message": "",
                "lastTransitionTime": "2026-01-01T00:30:00Z",
            })
        };
        let conditions = [
            condition("Committed", "True"),
            condition("Uploaded", uploaded),
        ];
        let status = json!({
            "conditions": conditions, "committedAt": format!("2026-01-01T00:{minute}:30Z"),
        });
        snapshot(
            "a",
            json!({"spec": {"snapshotClassName": "far"}, "status": status}),
        )
    };
    world.snapshots = vec![image("True", 59)];
    let from = format!("golden on b from {NAME}-pod-on-a");
    assert_eq!(steps(&world), [from]);
    // Its own image need not be there, too.
    let mut other = world.clone();
    other.sandboxes = vec![golden(true, 1)];
    other.pod = Some(pod("b"));
    assert_eq!(steps(&other), ["save pod-on-b on its node alone"]);
    // It waits for the upload, and not for ever.
    world.snapshots = vec![image("False", 59)];
    let waits = plan(&world, now());
    assert_eq!(
        (waits.steps, waits.requeue),
        (vec![], Some(Duration::from_secs(90)))
    );
    world.snapshots = vec![image("False", 50)];
    assert_eq!(steps(&world), ["golden on b"]);
    // A node with another runtime cannot continue from it.
    world.snapshots = vec![image("True", 59)];
    world.nodes = vec![node("a", "sha256:1"), node("b", "sha256:2")];
    assert_eq!(steps(&world), ["golden on b"]);
}

#[test]
fn the_next_node_continues_from_an_image_that_its_node_shares() {
    let serving = |name: &str, serves: bool| {
        let mut serving = SandboxNode::clone(&node(name, "sha256:1"));
        let status = serving.status.get_or_insert_default();
        status.heartbeat_time = Some(Time(now()));
        status.image_server = serves.then(ImageServer::default);
        Arc::new(serving)
    };
    let mut world = observed();
    world.member_nodes = ["a".to_owned(), "b".to_owned()].into();
    world.snapshots = vec![snapshot("a", json!({}))];
    world.nodes = vec![serving("a", true), serving("b", true)];
    assert_eq!(steps(&world), ["golden on b"], "nobody asked for that");
    let shared = json!({"metadata": {"annotations": {"torpor.dev/golden": "shared"}}});
    world.template = template(shared);
    let from = format!("golden on b from {NAME}-pod-on-a");
    assert_eq!(steps(&world), [from]);
    for (first, next) in [(false, true), (true, false)] {
        world.nodes = vec![serving("a", first), serving("b", next)];
        assert_eq!(steps(&world), ["golden on b"]);
    }
    let mut silent = SandboxNode::clone(&serving("a", true));
    let long_ago = "2026-01-01T00:00:00Z".parse().unwrap();
    silent.status.get_or_insert_default().heartbeat_time = Some(Time(long_ago));
    world.nodes = vec![Arc::new(silent), serving("b", true)];
    assert_eq!(steps(&world), ["golden on b"], "the first node is silent");
}

#[test]
fn leftovers_of_an_older_version_or_a_former_annotation_are_removed() {
    let mut world = observed();
    world.sandboxes = vec![golden(true, 1)];
    world.snapshots = vec![snapshot("a", json!({}))];
    let removed = [format!("end {NAME}"), format!("remove {NAME}-pod-on-a")];
    world.name = "t-golden-2".to_owned();
    assert_eq!(steps(&world)[..2], removed);
    assert_eq!(steps(&world)[2..], ["golden on any"]);
    world.name = NAME.to_owned();
    world.template = template(json!({"metadata": {"annotations": {"torpor.dev/golden": null}}}));
    assert_eq!(steps(&world), removed);
    // The garbage collector removes what a deleted template owns.
    world.template = template(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    assert!(steps(&world).is_empty());
}

#[test]
fn a_snapshot_that_was_not_committed_before_its_pod_went_is_removed() {
    let mut world = observed();
    world.snapshots = vec![snapshot("a", uncommitted())];
    world.pod = Some(pod("a"));
    world.sandboxes = vec![golden(true, 1)];
    assert!(steps(&world).is_empty());
    world.pod = Some(pod("b"));
    assert_eq!(steps(&world)[0], format!("remove {NAME}-pod-on-a"));
}

#[test]
fn no_golden_sandbox_runs_without_the_rules_of_its_template() {
    let mut world = observed();
    world.isolated = false;
    assert!(steps(&world).is_empty());
}

#[test]
fn a_golden_sandbox_not_saved_in_time_is_replaced_and_the_cause_is_reported() {
    for (saved, ready, cause) in [
        (None, false, "Pod is Pending"),
        (Some(snapshot("a", uncommitted())), true, "no room"),
    ] {
        let mut world = observed();
        world.pod = Some(pod("a"));
        world.snapshots = saved.into_iter().collect();
        world.sandboxes = vec![golden(ready, 9)];
        let waits = plan(&world, now());
        assert_eq!(waits.requeue, Some(Duration::from_secs(60)));
        assert!(waits.steps.is_empty() && waits.problem.is_none());
        world.sandboxes = vec![golden(ready, 11)];
        let replaced = plan(&world, now());
        assert_eq!(steps(&world), [format!("end {NAME}")]);
        let problem = replaced.problem.unwrap();
        assert!(problem.contains(cause), "{problem}");
    }
}

#[rstest]
#[case::no_runtime(json!({"spec": {"podTemplate": {"spec": {"runtimeClassName": null}}}}), "RuntimeClass")]
#[case::claim_templates(
    json!({"spec": {"volumeClaimTemplates": [{"metadata": {"name": "v"}, "spec": {}}]}}),
    "PersistentVolumeClaim"
)]
#[case::a_claim(
    json!({"spec": {"podTemplate": {"spec": {"volumes": [
        {"name": "v", "persistentVolumeClaim": {"claimName": "v"}},
    ]}}}}),
    "PersistentVolumeClaim"
)]
#[case::an_ephemeral_claim(
    json!({"spec": {"podTemplate": {"spec": {"volumes": [{"name": "v", "ephemeral": {}}]}}}}),
    "PersistentVolumeClaim"
)]
#[case::no_restart(
    json!({"spec": {"podTemplate": {"spec": {"restartPolicy": "Never"}}}}),
    "never restarted"
)]
#[case::a_hook(
    json!({"spec": {"podTemplate": {"spec": {"containers": [
        {"name": "c", "lifecycle": {"postStart": {"exec": {"command": ["x"]}}}},
    ]}}}}),
    "postStart"
)]
#[case::a_slow_sidecar(
    json!({"spec": {"podTemplate": {"spec": {"initContainers": [
        {"name": "s", "restartPolicy": "Always", "startupProbe": {"exec": {"command": ["x"]}}},
    ]}}}}),
    "startup probe"
)]
#[case::a_command_that_is_none(
    json!({"metadata": {"annotations": {"torpor.dev/golden-ready-exec": "test -e /x"}}}),
    "torpor.dev/golden-ready-exec"
)]
fn a_template_that_cannot_have_a_golden_image_reports_why(
    #[case] change: Value,
    #[case] why: &str,
) {
    let mut world = observed();
    world.template = template(change);
    let plan = plan(&world, now());
    assert!(plan.steps.is_empty());
    let problem = plan.problem.unwrap();
    assert!(problem.contains(why), "{problem}");
}

#[test]
fn a_golden_sandbox_has_the_rules_of_its_template_and_is_no_member() {
    let command = json!({"metadata": {"annotations": {
        "torpor.dev/golden-ready-exec": r#"["test","-e","/ready"]"#,
        "torpor.dev/inject-runtime": "true",
    }}});
    let template = template(command);
    let made = sandbox::sandbox(&template, NAME, Some("a"), None);
    let made: Sandbox = serde_json::from_value(made).unwrap();
    assert!(!crate::candidates::is_member(&made));
    assert_eq!(crate::candidates::pool_of(&made), None);
    let (labels, annotations) = crate::sandbox::metadata::for_new_pod(&made);
    let hash = torpor_api::name_hash("t");
    let label = torpor_api::labels::SANDBOX_TEMPLATE_REF_HASH;
    assert_eq!(labels.get(label), Some(&hash));
    assert!(!labels.contains_key(torpor_api::labels::WARM_POOL_SANDBOX));
    assert!(annotations.is_empty(), "{annotations:?}");
    assert_eq!(made.annotations()["torpor.dev/inject-runtime"], "true");
    assert_eq!(made.spec.service, Some(false));
    let spec = json!(made.spec.pod_template.spec);
    let probe = &spec["containers"][0]["startupProbe"];
    assert_eq!(probe["exec"]["command"], json!(["test", "-e", "/ready"]));
    assert!(spec["affinity"].to_string().contains("\"a\""));
}

#[test]
fn members_start_from_committed_images_of_golden_pods_alone() {
    let of = |snapshots: &[Arc<SandboxSnapshot>]| images::of(snapshots).map(|images| images.ids);
    let good = snapshot("a", json!({}));
    let id = |node: &str| format!("pod-on-{node}.1");
    assert_eq!(of(&[Arc::clone(&good)]), Some(vec![id("a")]));
    for bad in [
        uncommitted(),
        json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}),
        // An agent names the image of another Pod, or claims to be another node.
        json!({"status": {"imageID": "another.1"}}),
        json!({"status": {"nodeName": "c"}}),
        json!({"metadata": {"annotations": {"torpor.dev/saved-pod": null}}}),
    ] {
        let bad = snapshot("b", bad);
        assert_eq!(of(std::slice::from_ref(&bad)), None, "{bad:?}");
        assert_eq!(of(&[bad, Arc::clone(&good)]), Some(vec![id("a")]));
    }
    // The tag has moved since: the newest image counts, by the time that the apiserver wrote.
    let mut moved = record("b");
    moved.images.insert("c".to_owned(), "r@sha256:2".to_owned());
    let newer = json!({
        "metadata": {
            "annotations": crate::saved_pod::annotation(&moved),
            "creationTimestamp": "2026-01-01T00:45:00Z",
        },
    });
    let newest = images::of(&[good, snapshot("b", newer)]).unwrap();
    assert_eq!(newest.nodes, ["b"]);
    assert_eq!(newest.containers["c"], "r@sha256:2");
}
