use std::sync::LazyLock;

use jiff::Timestamp;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::args::Format;
use crate::output::rendered;

fn now() -> Timestamp {
    "2026-11-21T12:00:00Z".parse().unwrap()
}

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// Returns all definitions of this version, established.
fn definitions() -> Vec<Value> {
    let all = install::DEFINITIONS.iter().cloned();
    all.map(|mut crd| {
        crd["status"] = json!({"conditions": [
            {"type": "Established", "status": "True", "reason": "InitialNamesAccepted", "message": ""},
        ]});
        crd
    })
    .collect()
}

static SERVED: LazyLock<Vec<CustomResourceDefinition>> =
    LazyLock::new(|| definitions().into_iter().map(read).collect());

fn node(name: &str, kernel: &str, runtime: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "status": {"nodeInfo": {
            "kernelVersion": kernel, "containerRuntimeVersion": runtime, "operatingSystem": "linux",
            "architecture": "amd64", "bootID": "", "kubeProxyVersion": "", "kubeletVersion": "v1.36.0",
            "machineID": "", "osImage": "", "systemUUID": "",
        }},
    })
}

fn sandbox_node(name: &str) -> Value {
    json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxNode", "metadata": {"name": name}, "spec": {},
        "status": {
            "agentVersion": "0.1.0", "heartbeatTime": "2026-11-21T11:59:40Z",
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "AgentRunning", "message": "",
                "lastTransitionTime": "2026-11-21T11:00:00Z",
            }],
            "fingerprint": {"platform": "systrap", "runscDigest": "abc"},
            "runscBuilds": ["blake3:0123456789ab"],
            "runtimes": [{
                "handler": "torpor", "kind": "gVisor",
                "capabilities": {"doze": true, "hibernate": true, "restore": true, "freeze": true},
            }],
            "storage": {
                "availableBytes": 50_000_000_000_i64, "capacityBytes": 100_000_000_000_i64, "bytes": 1000, "images": 1,
            },
        },
    })
}

fn snapshot(name: &str, status: Value) -> Value {
    json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
        "metadata": {"name": name, "namespace": "x", "creationTimestamp": "2026-11-21T11:59:50Z"},
        "spec": {"sandboxName": "demo", "reason": "Suspend"},
        "status": status,
    })
}

fn condition(type_: &str, status: &str, reason: &str, since: &str) -> Value {
    json!({
        "type": type_, "status": status, "reason": reason, "message": "Words.", "lastTransitionTime": since,
    })
}

fn committed() -> Value {
    json!({
        "nodeName": "node-0", "sizeBytes": 100,
        "conditions": [condition("Committed", "True", "Committed", "2026-11-21T11:00:00Z")],
        "fingerprint": {"platform": "systrap", "runscDigest": "abc"},
    })
}

/// Status of an image on a node that is gone, which is in a repository, too.
fn uploaded(runsc: &str) -> Value {
    let since = "2026-11-21T11:00:00Z";
    let conditions = ["Committed", "Uploaded"].map(|kind| condition(kind, "True", kind, since));
    json!({
        "nodeName": "gone", "conditions": conditions,
        "fingerprint": {"platform": "systrap", "runscDigest": runsc},
    })
}

fn sandbox(mode: &str, conditions: Vec<Value>) -> Value {
    json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": "demo", "namespace": "x"},
        "spec": {"operatingMode": mode, "podTemplate": {"spec": {"runtimeClassName": "torpor", "containers": []}}},
        "status": {"conditions": conditions},
    })
}

fn deployment(name: &str, wanted: i32, ready: i32) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "agent-sandbox-system"},
        "spec": {"replicas": wanted, "selector": {}, "template": {}},
        "status": {"readyReplicas": ready},
    })
}

fn agents(wanted: i32, ready: i32) -> Value {
    daemon_set("torpor-agent", wanted, ready)
}

fn installers(wanted: i32, ready: i32) -> Value {
    daemon_set("torpor-installer", wanted, ready)
}

fn daemon_set(name: &str, wanted: i32, ready: i32) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "agent-sandbox-system"},
        "spec": {"selector": {}, "template": {}},
        "status": {
            "desiredNumberScheduled": wanted, "numberReady": ready, "currentNumberScheduled": wanted, "numberMisscheduled": 0,
        },
    })
}

fn lease(renewed: Option<&str>) -> Value {
    json!({
        "metadata": {"name": torpor_api::install::CONTROLLER_LEASE, "namespace": "agent-sandbox-system"},
        "spec": {"holderIdentity": "controller-a", "leaseDurationSeconds": 15, "renewTime": renewed},
    })
}

/// Returns a cluster without faults.
fn healthy() -> Facts {
    Facts {
        now: now(),
        namespace: "agent-sandbox-system".to_owned(),
        unread: Vec::new(),
        deployments: Ok(vec![
            read(deployment("agent-sandbox-controller", 1, 1)),
            read(deployment("sandbox-router", 2, 2)),
        ]),
        daemon_sets: Ok(vec![read(installers(1, 1)), read(agents(1, 1))]),
        pods: Ok(Vec::new()),
        leases: Ok(vec![read(lease(Some("2026-11-21T11:59:55.000000Z")))]),
        definitions: Ok(SERVED.clone()),
        runtime_classes: Ok(vec![read(
            json!({"metadata": {"name": "torpor"}, "handler": "torpor"}),
        )]),
        nodes: Ok(vec![read(node(
            "node-0",
            "6.1.0-18-amd64",
            "containerd://2.2.0",
        ))]),
        sandbox_nodes: Ok(vec![read(sandbox_node("node-0"))]),
        snapshots: Ok(vec![read(snapshot("demo-1", committed()))]),
        sandboxes: Ok(vec![read(sandbox(
            "Running",
            vec![condition(
                "Ready",
                "True",
                "DependenciesReady",
                "2026-11-21T11:00:00Z",
            )],
        ))]),
        templates: Ok(vec![read(template("fine", json!("torpor"), json!({})))]),
    }
}

fn template(name: &str, class: Value, annotations: Value) -> Value {
    json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "metadata": {"name": name, "namespace": "x"},
        "spec": {"podTemplate": {
            "metadata": {"annotations": annotations}, "spec": {"runtimeClassName": class, "containers": []},
        }},
    })
}

/// Returns a Sandbox without a RuntimeClass.
fn plain(name: &str, annotations: Value) -> Value {
    let mut plain = sandbox("Running", Vec::new());
    plain["metadata"]["name"] = name.into();
    plain["metadata"]["annotations"] = annotations;
    plain["spec"]["podTemplate"]["spec"] = json!({"containers": []});
    plain
}

fn all(facts: &Facts) -> Vec<Finding> {
    let checks = diagnose(facts).checks;
    checks
        .into_iter()
        .flat_map(|check| check.findings)
        .collect()
}

/// Returns the only finding.
fn only(facts: &Facts) -> Finding {
    let mut found = all(facts);
    assert_eq!(found.len(), 1, "{found:#?}");
    found.remove(0)
}

#[test]
fn a_healthy_cluster_has_no_findings() {
    let diagnosis = diagnose(&healthy());
    assert_eq!(
        (diagnosis.problems, diagnosis.warnings),
        (0, 0),
        "{diagnosis:#?}"
    );
    insta::assert_snapshot!(rendered(&diagnosis, Format::Table).unwrap());
}

#[test]
fn a_cluster_without_torpor_lists_the_missing_parts() {
    let nothing = Facts {
        deployments: Ok(Vec::new()),
        daemon_sets: Ok(Vec::new()),
        leases: Ok(Vec::new()),
        definitions: Ok(Vec::new()),
        runtime_classes: Ok(Vec::new()),
        sandbox_nodes: Ok(Vec::new()),
        snapshots: Err(Unseen {
            text: "cannot list SandboxSnapshots: 404 page not found".to_owned(),
            remedy: "install the CustomResourceDefinitions (above)".to_owned(),
        }),
        sandboxes: Ok(Vec::new()),
        ..healthy()
    };
    insta::assert_snapshot!(rendered(&diagnose(&nothing), Format::Table).unwrap());
}

#[test]
fn an_older_definition_is_reported_with_the_fields_that_it_lacks() {
    let mut facts = healthy();
    let mut all = definitions();
    let crd = all
        .iter_mut()
        .find(|crd| crd["spec"]["names"]["kind"] == "SandboxNode");
    let version = &mut crd.unwrap()["spec"]["versions"][0];
    let status = &mut version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"];
    status.as_object_mut().unwrap().remove("sandboxes");
    facts.definitions = Ok(all.into_iter().map(read).collect());
    let found = only(&facts);
    assert_eq!(found.severity, Severity::Warning);
    assert!(found.text.contains("status.sandboxes"), "{}", found.text);
    // After an installation by Helm the apiserver refuses a plain apply by kubectl.
    let remedy = found.remedy;
    assert!(remedy.contains("--force-conflicts"), "{remedy}");
}

#[rstest]
#[case(
    Some("2026-11-21T11:59:00.000000Z"),
    "was not renewed for 60s: its last holder is controller-a"
)]
#[case(None, "was released")]
fn a_lease_that_is_not_renewed_is_a_problem(#[case] renewed: Option<&str>, #[case] text: &str) {
    let mut facts = healthy();
    facts.leases = Ok(vec![read(lease(renewed))]);
    let found = only(&facts);
    assert_eq!(found.severity, Severity::Problem);
    assert!(found.text.contains(text), "{}", found.text);
}

#[test]
fn a_failing_installer_is_reported_with_its_node_and_reason() {
    let mut facts = healthy();
    facts.daemon_sets = Ok(vec![read(installers(2, 1)), read(agents(2, 2))]);
    facts.pods = Ok(vec![read(json!({
        "metadata": {"name": "torpor-installer-x", "labels": {"app.kubernetes.io/name": "torpor-installer"}},
        "spec": {"nodeName": "node-1", "containers": []},
        "status": {
            "initContainerStatuses": [{
                "name": "install", "image": "", "imageID": "", "ready": false, "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            }],
            "containerStatuses": [{
                "name": "installed", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"waiting": {"reason": "PodInitializing"}},
            }],
        },
    }))]);
    let found = only(&facts);
    assert_eq!(
        found.text,
        "1 of 2 nodes are installed; node-1: install: CrashLoopBackOff"
    );
}

#[rstest]
#[case::installer(vec![agents(1, 1)], "DaemonSet agent-sandbox-system/torpor-installer", "nodes get no runtime")]
#[case::agent(vec![installers(1, 1)], "DaemonSet agent-sandbox-system/torpor-agent", "nothing hibernates")]
#[case::waits(vec![installers(1, 1), agents(2, 1)], "DaemonSet agent-sandbox-system/torpor-agent", "1 of 2 agents are ready")]
fn a_daemon_set_that_is_missing_or_not_ready_is_a_problem(
    #[case] sets: Vec<Value>,
    #[case] subject: &str,
    #[case] text: &str,
) {
    let mut facts = healthy();
    facts.daemon_sets = Ok(sets.into_iter().map(read).collect());
    let found = only(&facts);
    assert_eq!(found.severity, Severity::Problem);
    assert_eq!(found.subject, subject);
    assert!(found.text.contains(text), "{}", found.text);
}

#[test]
fn a_runtime_class_whose_handler_no_node_has_is_a_problem() {
    let mut facts = healthy();
    facts.runtime_classes = Ok(vec![read(
        json!({"metadata": {"name": "torpor"}, "handler": "runsc"}),
    )]);
    assert!(
        only(&facts)
            .text
            .contains("names the handler runsc, but the nodes have torpor")
    );
}

#[rstest]
#[case("/status/heartbeatTime", json!("2026-11-21T11:50:00Z"), "last reported 10m ago")]
#[case(
    "/status/conditions/0",
    condition("Ready", "False", "ProbeFailed", "2026-11-21T11:00:00Z"),
    "ProbeFailed: Words."
)]
#[case("/status/runtimes/0/capabilities/hibernate", json!(false), "cannot hibernate: its runsc does not support it")]
#[case("/status/runtimes/0/capabilities/restore", json!(false), "cannot restore")]
#[case("/status/storage/availableBytes", json!(1_000_000), "977Ki of 93Gi free")]
fn a_node_with_a_fault_is_reported_with_the_reason(
    #[case] place: &str,
    #[case] value: Value,
    #[case] text: &str,
) {
    let mut report = sandbox_node("node-0");
    *report.pointer_mut(place).unwrap() = value;
    let mut facts = healthy();
    facts.sandbox_nodes = Ok(vec![read(report)]);
    let found = only(&facts);
    assert_eq!(found.subject, "Node node-0");
    assert!(found.text.contains(text), "{}", found.text);
}

#[rstest]
#[case("cannot doze: there is no swap", "there is no swap")]
#[case("", "its agent gives no reason")]
fn a_node_that_cannot_doze_is_reported_with_the_reason(#[case] message: &str, #[case] why: &str) {
    let mut report = sandbox_node("node-0");
    let runtime = report.pointer_mut("/status/runtimes/0").unwrap();
    runtime["capabilities"]["doze"] = json!(false);
    runtime["message"] = json!(message);
    let mut facts = healthy();
    facts.sandbox_nodes = Ok(vec![read(report)]);
    let found = only(&facts);
    assert_eq!(found.severity, Severity::Warning);
    assert_eq!(found.text, format!("the handler torpor cannot doze: {why}"));
}

#[rstest]
#[case("True", Some("MemoryShort: Words."))]
#[case("False", None)]
fn a_node_that_is_short_of_memory_is_reported(#[case] status: &str, #[case] text: Option<&str>) {
    let mut report = sandbox_node("node-0");
    let conditions = report.pointer_mut("/status/conditions").unwrap();
    let pressure = condition("Pressure", status, "MemoryShort", "2026-11-21T11:00:00Z");
    conditions.as_array_mut().unwrap().push(pressure);
    let mut facts = healthy();
    facts.sandbox_nodes = Ok(vec![read(report)]);
    let found = all(&facts);
    let texts: Vec<&str> = found.iter().map(|found| found.text.as_str()).collect();
    assert_eq!(texts, Vec::from_iter(text));
}

#[rstest]
#[case("True", "InstalledBuild", Some(Severity::Problem))]
#[case("True", "OtherBuild", Some(Severity::Warning))]
#[case("False", "NoneRevoked", None)]
fn a_revoked_build_of_runsc_is_reported(
    #[case] status: &str,
    #[case] reason: &str,
    #[case] severity: Option<Severity>,
) {
    let mut report = sandbox_node("node-0");
    let conditions = report.pointer_mut("/status/conditions").unwrap();
    let revoked = condition("RunscRevoked", status, reason, "2026-11-21T11:00:00Z");
    conditions.as_array_mut().unwrap().push(revoked);
    let mut facts = healthy();
    facts.sandbox_nodes = Ok(vec![read(report)]);
    let found = all(&facts);
    let severities: Vec<Severity> = found.iter().map(|found| found.severity).collect();
    assert_eq!(severities, Vec::from_iter(severity));
}

#[test]
fn kata_without_images_is_no_problem_of_the_node() {
    let mut report = sandbox_node("node-0");
    let runtimes = report.pointer_mut("/status/runtimes").unwrap();
    let kata = json!({"handler": "kata-qemu", "kind": "Kata", "capabilities": {"doze": true, "freeze": true}});
    runtimes.as_array_mut().unwrap().push(kata);
    let mut facts = healthy();
    facts.sandbox_nodes = Ok(vec![read(report)]);
    assert_eq!(all(&facts), all(&healthy()));
}

#[rstest]
#[case("5.4.0-100-generic", "containerd://1.7.0", Some(Severity::Warning))]
#[case("5.10.0", "containerd://1.7.0", None)]
#[case("6.1.0", "cri-o://1.30", Some(Severity::Problem))]
fn kernel_and_container_runtime_are_checked(
    #[case] kernel: &str,
    #[case] runtime: &str,
    #[case] expected: Option<Severity>,
) {
    let mut facts = healthy();
    facts.nodes = Ok(vec![read(node("node-0", kernel, runtime))]);
    let found: Vec<Severity> = all(&facts).iter().map(|found| found.severity).collect();
    assert_eq!(found, Vec::from_iter(expected));
}

#[test]
fn a_node_without_agent_and_an_agent_without_node_are_reported() {
    let mut facts = healthy();
    facts.sandbox_nodes = Ok(vec![
        read(sandbox_node("node-0")),
        read(sandbox_node("old")),
    ]);
    let nodes = facts.nodes.as_mut().unwrap();
    nodes.push(read(node("node-1", "6.1.0", "containerd://2.2.0")));
    let subjects: Vec<String> = all(&facts).into_iter().map(|found| found.subject).collect();
    assert_eq!(subjects, ["Node node-1", "SandboxNode old"]);
}

#[test]
fn nodes_that_exchange_no_images_are_reported_where_others_do() {
    let with = |servers: [bool; 2]| {
        let mut facts = healthy();
        let mut reports = facts.sandbox_nodes.clone().expect("reports");
        let mut second = reports[0].clone();
        second.metadata.name = Some("second".to_owned());
        reports.push(second);
        for (report, serves) in reports.iter_mut().zip(servers) {
            let status = report.status.get_or_insert_default();
            status.image_server = serves.then(Default::default);
        }
        facts.sandbox_nodes = Ok(reports);
        let found = diagnose(&facts)
            .checks
            .into_iter()
            .flat_map(|check| check.findings);
        let found = found.map(|finding| finding.text);
        found
            .filter(|text| text.contains("exchange no images"))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        with([true, false]),
        ["nodes that exchange no images with others: second"]
    );
    assert!(with([true, true]).is_empty() && with([false, false]).is_empty());
}

#[test]
fn agents_of_two_versions_are_reported() {
    let mut facts = healthy();
    let mut other = sandbox_node("node-1");
    other["status"]["agentVersion"] = json!("0.2.0");
    facts.sandbox_nodes.as_mut().unwrap().push(read(other));
    let nodes = facts.nodes.as_mut().unwrap();
    nodes.push(read(node("node-1", "6.1.0", "containerd://2.2.0")));
    assert!(only(&facts).text.contains("0.1.0 on 1, 0.2.0 on 1"));
}

/// Returns a snapshot that was deleted at `when` and has the agent's finalizer.
fn being_deleted(when: &str, status: Value) -> Value {
    let mut deleted = snapshot("demo-1", status);
    deleted["metadata"]["deletionTimestamp"] = json!(when);
    deleted["metadata"]["finalizers"] = json!(["torpor.dev/image"]);
    deleted
}

#[rstest]
#[case(being_deleted("2026-11-21T11:59:30Z", committed()), None)]
#[case(
    being_deleted("2026-11-21T11:30:00Z", committed()),
    Some("node node-0 still has its image")
)]
#[case(being_deleted("2026-11-21T11:30:00Z", json!({})), Some("no node reports its image"))]
#[case(being_deleted("2026-11-21T11:30:00Z", json!({"nodeName": "gone"})), Some("node gone is gone"))]
#[case(snapshot("s", json!({})), None)]
#[case(snapshot("s", json!({"nodeName": "gone", "conditions": committed()["conditions"]})), Some("its image is on node gone"))]
#[case(snapshot("s", uploaded("abc")), None)]
#[case(snapshot("s", uploaded("older")), Some("its image is on node gone"))]
#[case(
    snapshot("s", json!({
        "nodeName": "node-0", "conditions": committed()["conditions"],
        "fingerprint": {"platform": "systrap", "runscDigest": "older"},
    })),
    Some("node node-0, which lacks what it was made with: build older of runsc")
)]
fn a_snapshot_that_is_stuck_or_useless_is_reported(
    #[case] seen: Value,
    #[case] text: Option<&str>,
) {
    let mut facts = healthy();
    facts.snapshots = Ok(vec![read(seen)]);
    let found = all(&facts);
    match text {
        None => assert_eq!(found, []),
        Some(text) => assert!(only(&facts).text.contains(text), "{found:#?}"),
    }
}

#[test]
fn a_deletion_that_waits_for_a_silent_agent_names_the_agent() {
    let mut facts = healthy();
    let mut silent = sandbox_node("node-0");
    silent["status"]["heartbeatTime"] = json!("2026-11-21T11:00:00Z");
    facts.sandbox_nodes = Ok(vec![read(silent)]);
    facts.snapshots = Ok(vec![read(being_deleted(
        "2026-11-21T11:30:00Z",
        committed(),
    ))]);
    let found = all(&facts);
    assert!(
        found[1]
            .text
            .contains("the agent of node node-0, which has its image, does not report"),
        "{found:#?}"
    );
}

#[rstest]
#[case(sandbox("Running", vec![condition("Restored", "False", "NodeUnavailable", "2026-11-21T11:00:00Z")]), "NodeUnavailable: Words.")]
#[case(sandbox("Suspended", vec![condition("Hibernated", "False", "Saving", "2026-11-21T11:00:00Z")]), "Suspending for 1h: Saving: Words.")]
#[case(
    sandbox("Running", vec![
        condition("Ready", "True", "R", "2026-11-21T11:00:00Z"),
        condition("Hibernated", "False", "SaveFailed", "2026-11-21T11:00:00Z"),
    ]),
    "SaveFailed: Words."
)]
fn a_sandbox_that_is_stuck_is_reported(#[case] seen: Value, #[case] text: &str) {
    let mut facts = healthy();
    facts.sandboxes = Ok(vec![read(seen)]);
    assert_eq!(only(&facts).text, text);
}

#[test]
fn a_sandbox_of_a_missing_runtime_class_is_reported() {
    let mut facts = healthy();
    let mut seen = sandbox("Running", Vec::new());
    seen["spec"]["podTemplate"]["spec"]["runtimeClassName"] = json!("kata");
    facts.sandboxes = Ok(vec![read(seen)]);
    assert!(only(&facts).text.contains("RuntimeClass kata"));
}

#[test]
fn sandboxes_without_a_runtime_class_are_reported_with_the_class_to_name() {
    let mut facts = healthy();
    let strategy = json!({"torpor.dev/suspension-strategy": "Stop"});
    let of = json!({"agents.x-k8s.io/sandbox-template-ref": "plain"});
    facts.templates = Ok(vec![
        read(template("plain", Value::Null, json!({}))),
        read(template("stops", Value::Null, strategy.clone())),
    ]);
    facts.sandboxes = Ok(vec![
        read(plain("a", json!({}))),
        read(plain("stops", strategy)),
        read(plain("of-the-template", of)),
    ]);
    let found = all(&facts);
    let subjects: Vec<&str> = found.iter().map(|f| f.subject.as_str()).collect();
    assert_eq!(subjects, ["SandboxTemplate x/plain", "Sandbox x/a"]);
    for finding in &found {
        assert_eq!(finding.severity, Severity::Warning);
        assert!(finding.remedy.contains("runtimeClassName to torpor"));
    }
    let many = ["a", "b", "c", "d"].map(|name| read(plain(name, json!({}))));
    facts.sandboxes = Ok(many.into());
    facts.templates = Ok(Vec::new());
    let one = only(&facts);
    assert_eq!(one.subject, "4 Sandboxes");
    assert!(one.text.ends_with("x/a, x/b, x/c, …"), "{}", one.text);
}

#[test]
fn a_missing_runtime_class_is_not_reported_if_no_node_keeps_memory() {
    let mut facts = healthy();
    facts.sandboxes = Ok(vec![read(plain("a", json!({})))]);
    facts.runtime_classes = Ok(vec![read(
        json!({"metadata": {"name": "torpor"}, "handler": "another"}),
    )]);
    let found = all(&facts);
    assert!(
        found.iter().all(|f| !f.text.contains("loses the memory")),
        "{found:#?}"
    );
}
