use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::merge_patch;

fn template(change: Value) -> SandboxTemplate {
    let mut whole = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "metadata": {
            "name": "t", "namespace": "ns", "uid": "u-t",
            "annotations": {annotations::STAGE_IMAGES: "true"},
        },
        "spec": {"podTemplate": {"spec": {
            "runtimeClassName": "torpor",
            "nodeSelector": {"pool": "a"},
            "containers": [{"name": "c", "image": "registry.example/a:1"}],
        }}},
    });
    merge_patch::apply(&mut whole, &change);
    serde_json::from_value(whole).unwrap()
}

fn node(name: &str, pool: &str) -> NodeFacts {
    NodeFacts {
        name: name.to_owned(),
        labels: BTreeMap::from([("pool".to_owned(), pool.to_owned())]),
        ..NodeFacts::default()
    }
}

fn agent(node: &str) -> Arc<SandboxNode> {
    let node = json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxNode",
        "metadata": {"name": node}, "spec": {},
        "status": {"runtimes": [{"handler": "torpor", "kind": "gVisor"}]},
    });
    Arc::new(serde_json::from_value(node).unwrap())
}

/// Returns two nodes of the template's pool with an agent, one without, and one of another pool.
fn observed(template: SandboxTemplate) -> Observed {
    let class = json!({
        "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass",
        "metadata": {"name": "torpor"}, "handler": "torpor",
    });
    let nodes = [("n1", "a"), ("n2", "a"), ("n3", "a"), ("n4", "b")];
    Observed {
        template: Arc::new(template),
        has_pool: true,
        runtime: Some("runtime:1".into()),
        class: Some(Arc::new(serde_json::from_value(class).unwrap())),
        nodes: Some(nodes.map(|(name, pool)| node(name, pool)).into()),
        agents: vec![agent("n1"), agent("n2"), agent("n4")],
        pods: Vec::new(),
        room: 10,
    }
}

fn now() -> Timestamp {
    "2026-01-01T00:10:00Z".parse().unwrap()
}

/// Returns the Pod for a node, made ten minutes ago.
fn staging(template: &SandboxTemplate, node: &str, status: Value) -> Arc<Pod> {
    let name = pod::name(template, &pod::version(template), node);
    let mut pod = pod::pod(template, &name, node, "runtime:1");
    pod["metadata"]["uid"] = format!("u-{node}").into();
    pod["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z".into();
    pod["status"] = status;
    Arc::new(serde_json::from_value(pod).unwrap())
}

fn pulling(reason: &str, message: &str) -> Value {
    let waiting = json!({"reason": reason, "message": message});
    json!({"phase": "Pending", "containerStatuses": [{
        "name": "image-0", "image": "registry.example/a:1", "imageID": "", "ready": false,
        "restartCount": 0, "state": {"waiting": waiting},
    }]})
}

/// Returns the steps as short texts, each with its node.
fn steps(plan: &Plan) -> Vec<String> {
    let text = |step: &Action| match step {
        Action::Create { node, .. } => format!("create on {node}"),
        Action::Delete { uid, .. } => format!("delete {uid}"),
    };
    let mut all: Vec<String> = plan.steps.iter().map(text).collect();
    all.sort();
    all
}

#[test]
fn images_are_staged_on_the_nodes_that_the_template_selects_and_that_have_its_runtime() {
    let plan = plan(&observed(template(json!({}))), now());
    assert_eq!(steps(&plan), ["create on n1", "create on n2"]);
    assert_eq!((plan.problem, plan.requeue), (None, Some(LOOK_SOON)));
}

#[rstest]
#[case::not_asked(json!({"metadata": {"annotations": null}}), |_: &mut Observed| {})]
#[case::another_value(json!({"metadata": {"annotations": {annotations::STAGE_IMAGES: "yes"}}}), |_: &mut Observed| {})]
#[case::no_pool(json!({}), |o: &mut Observed| o.has_pool = false)]
#[case::it_is_deleted(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), |_: &mut Observed| {})]
fn without_need_the_pods_go(#[case] change: Value, #[case] edit: fn(&mut Observed)) {
    let template = template(change);
    let pods = vec![staging(&template, "n1", json!({"phase": "Succeeded"}))];
    let mut observed = Observed {
        pods,
        ..observed(template)
    };
    edit(&mut observed);
    let plan = plan(&observed, now());
    assert_eq!(
        (steps(&plan), plan.requeue),
        (vec!["delete u-n1".to_owned()], None)
    );
}

#[test]
fn staged_images_stay_and_those_of_another_version_or_node_go() {
    let template = template(json!({}));
    let mut older = template.clone();
    older.spec.pod_template.spec = serde_json::from_value(json!({
        "containers": [{"name": "c", "image": "registry.example/a:0"}],
    }))
    .unwrap();
    let done = json!({"phase": "Succeeded"});
    let pods = vec![
        staging(&template, "n1", done.clone()),
        staging(&older, "n2", done.clone()),
        staging(&template, "n4", done.clone()),
        // Its agent is gone, and the images may still be there.
        staging(&template, "n3", done),
    ];
    let observed = Observed {
        pods,
        ..observed(template)
    };
    let plan = plan(&observed, now());
    assert_eq!(steps(&plan), ["create on n2", "delete u-n2", "delete u-n4"]);
}

#[test]
fn all_staged_is_settled() {
    let template = template(json!({}));
    let done = json!({"phase": "Succeeded"});
    let pods = ["n1", "n2"].map(|node| staging(&template, node, done.clone()));
    let observed = Observed {
        pods: pods.to_vec(),
        ..observed(template)
    };
    let settled = Plan {
        is_settled: true,
        requeue: Some(LOOK),
        ..Plan::default()
    };
    assert_eq!(plan(&observed, now()), settled);
}

#[test]
fn few_pods_pull_at_the_same_time() {
    let observed = Observed {
        room: 1,
        ..observed(template(json!({})))
    };
    assert_eq!(plan(&observed, now()).steps.len(), 1);
}

#[test]
fn a_failed_pull_is_reported_with_the_registrys_message_and_left_to_the_kubelet() {
    let template = template(json!({}));
    let words = "failed to pull and unpack image: not found";
    let pods = vec![
        staging(&template, "n1", pulling("ErrImagePull", words)),
        staging(&template, "n2", pulling("ContainerCreating", "")),
    ];
    let observed = Observed {
        pods,
        ..observed(template)
    };
    let plan = plan(&observed, now());
    assert_eq!((steps(&plan), plan.requeue), (vec![], Some(LOOK_SOON)));
    assert_eq!(
        plan.problem.unwrap(),
        format!(
            "images are missing on 1 of 3 nodes. n1: image registry.example/a:1: ErrImagePull: {words}"
        )
    );
}

#[rstest]
#[case::at_once("2026-01-01T00:01:00Z", &[])]
#[case::after_a_while("2026-01-01T00:05:00Z", &["delete u-n1"])]
fn a_pod_that_ended_without_the_images_is_replaced(#[case] now: &str, #[case] expected: &[&str]) {
    let template = template(json!({}));
    let failed = json!({"phase": "Failed", "reason": "Evicted", "message": "low on disk"});
    let pods = vec![
        staging(&template, "n1", failed),
        staging(&template, "n2", json!({"phase": "Succeeded"})),
    ];
    let observed = Observed {
        pods,
        ..observed(template)
    };
    let plan = plan(&observed, now.parse().unwrap());
    assert_eq!(steps(&plan), expected);
    assert!(plan.problem.unwrap().ends_with("n1: Evicted: low on disk"));
}

#[rstest]
#[case::images_that_nobody_pulls(json!({"spec": {"podTemplate": {"spec": {"containers": [{"name": "c", "image": "a", "imagePullPolicy": "Never"}]}}}}), |_: &mut Observed| {}, "imagePullPolicy: Never")]
#[case::no_runtime_image(json!({}), |o: &mut Observed| o.runtime = None, "--runtime-image")]
#[case::no_right(json!({}), |o: &mut Observed| o.nodes = None, "may not list nodes")]
#[case::no_class(json!({}), |o: &mut Observed| o.class = None, "RuntimeClass \"torpor\" does not exist")]
#[case::no_runtime(json!({}), |o: &mut Observed| o.agents.clear(), "none of the 3 nodes that the template selects has the runtime \"torpor\"")]
#[case::no_pod_spec(json!({"spec": {"podTemplate": {"spec": {"nodeSelector": 1}}}}), |_: &mut Observed| {}, "is not valid")]
fn a_template_whose_images_cannot_be_staged_reports_why(
    #[case] change: Value,
    #[case] edit: fn(&mut Observed),
    #[case] expected: &str,
) {
    let mut observed = observed(template(change));
    edit(&mut observed);
    let plan = plan(&observed, now());
    let problem = plan.problem.unwrap();
    assert!(problem.contains(expected), "{problem}");
    assert!(plan.steps.is_empty());
}

#[test]
fn a_full_or_cordoned_node_gets_no_pod_and_keeps_its_own() {
    let template = template(json!({}));
    let mut observed = observed(template.clone());
    observed.nodes = Some(
        [NodeFacts {
            is_cordoned: true,
            ..node("n1", "a")
        }]
        .into(),
    );
    assert_eq!(steps(&plan(&observed, now())), [""; 0]);
    observed.pods = vec![staging(&template, "n1", json!({"phase": "Succeeded"}))];
    assert_eq!(steps(&plan(&observed, now())), [""; 0]);
    observed.pods = vec![staging(
        &template,
        "n1",
        json!({
            "phase": "Pending",
            "conditions": [{
                "type": "PodScheduled", "status": "False",
                "reason": "Unschedulable", "message": "0/1 nodes are available",
            }],
        }),
    )];
    let problem = plan(&observed, now()).problem.unwrap();
    assert!(
        problem.ends_with("n1: Unschedulable: 0/1 nodes are available"),
        "{problem}"
    );
}
