use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher::Event;
use rstest::rstest;
use serde_json::json;
use torpor_api::{
    SandboxTemplate, SandboxWarmPool,
    conditions::{Draft, Status, set},
};

use super::*;
use crate::cache::Cache;

fn status(entries: &[(&'static str, Status, i64)]) -> SandboxStatus {
    let mut status = SandboxStatus::default();
    for (type_, value, second) in entries {
        let now = Timestamp::from_second(*second).unwrap();
        set(
            &mut status.conditions,
            Draft::new(type_, *value, "R", ""),
            None,
            now,
        );
    }
    status
}

#[test]
fn only_the_first_ready_counts_as_creation() {
    use conditions::{READY, SUSPENDED};
    let ready = status(&[(SUSPENDED, Status::False, 1), (READY, Status::True, 9)]);
    let new = status(&[(SUSPENDED, Status::False, 1), (READY, Status::False, 1)]);
    let flapped = status(&[(SUSPENDED, Status::False, 1), (READY, Status::False, 5)]);
    let resumed = status(&[(SUSPENDED, Status::False, 7), (READY, Status::False, 3)]);
    assert!(became_ready_first(&SandboxStatus::default(), &ready));
    assert!(became_ready_first(&new, &ready));
    assert!(!became_ready_first(&flapped, &ready));
    assert!(!became_ready_first(&resumed, &ready));
    assert!(!became_ready_first(&ready, &ready));
}

fn claim() -> SandboxClaim {
    serde_json::from_value(serde_json::json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
        "metadata": {
            "name": "c", "namespace": "ns", "creationTimestamp": "1970-01-01T00:00:00Z",
            "annotations": {"agents.x-k8s.io/client-first-requested-at": "1970-01-01T00:00:00.1Z"},
        },
        "spec": {"warmPoolRef": {"name": "p"}},
    }))
    .unwrap()
}

#[test]
fn the_three_latencies_of_a_claim_have_upstreams_names_and_finer_buckets() {
    let metrics = Metrics::default();
    let at = |millisecond| Timestamp::from_millisecond(millisecond).unwrap();
    let mut sandbox = Sandbox::default();
    sandbox
        .labels_mut()
        .insert(labels::LAUNCH_TYPE.to_owned(), "warm".to_owned());
    metrics.observe_claim_ready(&claim(), &sandbox, at(104), at(112));
    let text = metrics.text().unwrap();
    let of = r#"launch_type="warm",sandbox_template="__unknown__""#;
    for line in [
        format!("agent_sandbox_claim_startup_latency_ms_bucket{{le=\"100.0\",{of}}} 0"),
        format!("agent_sandbox_claim_startup_latency_ms_bucket{{le=\"250.0\",{of}}} 1"),
        format!("agent_sandbox_claim_controller_startup_latency_ms_bucket{{le=\"7.5\",{of}}} 0"),
        format!("agent_sandbox_claim_controller_startup_latency_ms_bucket{{le=\"10.0\",{of}}} 1"),
        format!("agent_sandbox_client_claim_startup_latency_ms_bucket{{le=\"10.0\",{of}}} 0"),
        format!("agent_sandbox_client_claim_startup_latency_ms_bucket{{le=\"15.0\",{of}}} 1"),
    ] {
        assert!(text.contains(&line), "{line}\nnot in\n{text}");
    }
    for bound in [
        100, 250, 500, 750, 1000, 1250, 1500, 2000, 2500, 5000, 10_000, 30_000, 60_000, 120_000,
        240_000,
    ] {
        assert!(STARTUP_BUCKETS_MS.contains(&f64::from(bound)), "{bound}");
    }
}

#[test]
fn names_and_buckets_are_upstreams() {
    let metrics = Metrics::default();
    let mut sandbox = Sandbox::default();
    let created = Timestamp::from_second(0).unwrap();
    sandbox.metadata.creation_timestamp = Some(
        k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(created),
    );
    let ready = status(&[(conditions::READY, Status::True, 1)]);
    let now = Timestamp::from_millisecond(120).unwrap();
    metrics.observe_sandbox(&sandbox, &SandboxStatus::default(), &ready, now);
    metrics.observe_pass("sandbox", Duration::from_millis(2), Some("Refused"), false);
    let text = metrics.text().unwrap();
    for line in [
        r#"agent_sandbox_creation_latency_ms_bucket{le="100.0",namespace="",launch_type="cold",sandbox_template="__unknown__"} 0"#,
        r#"agent_sandbox_creation_latency_ms_bucket{le="250.0",namespace="",launch_type="cold",sandbox_template="__unknown__"} 1"#,
        r#"controller_runtime_reconcile_total{controller="sandbox",result="error"} 1"#,
        r#"controller_runtime_reconcile_errors_total{controller="sandbox",reason="Refused"} 1"#,
    ] {
        assert!(text.contains(line), "{line}\nnot in\n{text}");
    }
    assert!(
        text.contains("agent_sandbox_build_info{git_version=\"v"),
        "{text}"
    );
}

/// Returns a cache with one template, named t.
fn templates() -> Cache<SandboxTemplate> {
    let template = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "metadata": {"name": "t", "namespace": "ns", "resourceVersion": "1"},
        "spec": {"podTemplate": {"spec": {"containers": []}}},
    });
    let templates = Cache::new(|_: &SandboxTemplate| None);
    templates.apply(Event::Apply(serde_json::from_value(template).unwrap()));
    templates
}

/// Returns a Sandbox that names this template.
fn sandbox_of(template: &str) -> Sandbox {
    serde_json::from_value(json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {
            "name": "s", "namespace": "ns", "uid": "u", "resourceVersion": "1",
            "creationTimestamp": "1970-01-01T00:00:00Z",
            "annotations": {"agents.x-k8s.io/sandbox-template-ref": template},
        },
        "spec": {"podTemplate": {"spec": {"containers": []}}},
    }))
    .unwrap()
}

/// Returns the metrics after a Sandbox and a pool that name this template.
fn metrics_of(template: &str) -> Metrics {
    let sandbox = sandbox_of(template);
    let pool: SandboxWarmPool = serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
        "metadata": {"name": "p", "namespace": "ns", "uid": "v", "resourceVersion": "1"},
        "spec": {"replicas": 1, "sandboxTemplateRef": {"name": template}},
    }))
    .unwrap();
    let (sandboxes, pools) = (
        Cache::new(|_: &Sandbox| None),
        Cache::new(|_: &SandboxWarmPool| None),
    );
    sandboxes.apply(Event::Apply(sandbox.clone()));
    pools.apply(Event::Apply(pool));
    let metrics = Metrics::default();
    metrics.count(Counted {
        sandboxes,
        pools,
        templates: templates(),
        staged: Cache::new(|_| None),
    });
    let now = Timestamp::from_millisecond(120).unwrap();
    let ready = status(&[(conditions::READY, Status::True, 1)]);
    metrics.observe_sandbox(&sandbox, &SandboxStatus::default(), &ready, now);
    metrics.observe_claim_ready(&claim(), &sandbox, now, now);
    metrics.count_claim(&claim(), &sandbox);
    metrics.count_transition(&sandbox, "u", Transition::Expired, now);
    metrics
}

#[test]
fn reference_of_metrics_is_current() {
    let (metrics, sandbox) = (metrics_of("t"), sandbox_of("t"));
    let now = Timestamp::from_millisecond(120).unwrap();
    for transition in [
        Transition::SuspendRequested,
        Transition::Suspended("pod_terminated"),
        Transition::ResumeRequested,
        Transition::Resumed,
        Transition::Finished(torpor_api::reasons::sandbox::POD_SUCCEEDED),
    ] {
        metrics.count_transition(&sandbox, "u", transition, now);
    }
    metrics.observe_pass("sandbox", Duration::from_millis(2), Some("Refused"), false);
    metrics.set_depth("sandbox", 1);
    metrics.set_leading(true);
    metrics.set_listed("ns", true);
    metrics.set_older_key("far", "first", 1);
    let (text, source) = (metrics.text().unwrap(), include_str!("../metrics.rs"));
    let title = "Metrics of the controller";
    torpor_test_reference::assert_metrics_page("metrics-controller.md", title, &text, source);
}

#[rstest]
#[case::an_existing_template("t", "t", "t")]
#[case::a_missing_template("u", "unknown", "__unknown__")]
#[case::no_template("", "unknown", "__unknown__")]
#[case::arbitrary_text("TTT, and more", "unknown", "__unknown__")]
fn only_an_existing_template_makes_a_series(
    #[case] named: &str,
    #[case] of_a_life: &str,
    #[case] of_a_claim: &str,
) {
    let text = metrics_of(named).text().unwrap();
    for (family, template) in [
        ("agent_sandbox_creation_latency_ms_count", of_a_claim),
        ("agent_sandbox_claim_startup_latency_ms_count", of_a_claim),
        ("agent_sandbox_claim_creation_total", of_a_claim),
        ("agent_sandbox_expired_total", of_a_life),
        ("agent_sandboxes", of_a_life),
    ] {
        let label = format!("sandbox_template=\"{template}\"");
        let shown = |line: &str| line.starts_with(&format!("{family}{{")) && line.contains(&label);
        assert!(text.lines().any(shown), "{family} {label}\nnot in\n{text}");
    }
    assert!(!text.contains("TTT"), "{text}");
}

#[test]
fn dashboards_and_alerts_name_metrics_and_labels_that_the_controller_has() {
    let metrics = Metrics::default();
    let member: Sandbox = serde_json::from_value(serde_json::json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": "s", "namespace": "ns", "uid": "u", "resourceVersion": "1", "ownerReferences": [{
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
            "name": "p", "uid": "v", "controller": true,
        }]},
        "spec": {"podTemplate": {"spec": {"containers": []}}},
    }))
    .unwrap();
    let sandboxes = Cache::new(|_: &Sandbox| None);
    sandboxes.apply(kube::runtime::watcher::Event::Apply(member.clone()));
    let pool: SandboxWarmPool = serde_json::from_value(serde_json::json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
        "metadata": {"name": "p", "namespace": "ns", "uid": "v", "resourceVersion": "1"},
        "spec": {"replicas": 1, "sandboxTemplateRef": {"name": "t"}},
    }))
    .unwrap();
    let pools = Cache::new(|_: &SandboxWarmPool| None);
    pools.apply(kube::runtime::watcher::Event::Apply(pool));
    let pod: Pod = serde_json::from_value(serde_json::json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "t-images-1", "namespace": "ns", "resourceVersion": "1"},
        "status": {"phase": "Succeeded"},
    }))
    .unwrap();
    let staged = Cache::new(|_: &Pod| None);
    staged.apply(kube::runtime::watcher::Event::Apply(pod));
    metrics.count(Counted {
        sandboxes,
        pools,
        templates: templates(),
        staged,
    });
    let now = Timestamp::from_millisecond(120).unwrap();
    metrics.observe_claim_ready(&claim(), &member, now, now);
    metrics.count_claim(&claim(), &member);
    metrics.observe_pass("sandbox", Duration::from_millis(2), Some("Refused"), false);
    let text = metrics.text().unwrap();
    for prefix in [
        "agent_sandbox",
        "controller_runtime_",
        "leader_election_",
        "torpor_warmpool",
        "torpor_image_staging",
    ] {
        torpor_test_monitoring::check(prefix, &text);
    }
}
