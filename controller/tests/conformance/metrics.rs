//! Tests of upstream's metrics, as its docs/metrics.md and internal/metrics list them.
//!
//! Every family is exposed under its name, with its type, its labels and at least its buckets. Each
//! event is counted once.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use crate::{
    apiserver::{Fault, FaultAnswer},
    cluster::Cluster,
    objects::{NS, mode},
};

/// Upstream's buckets of the startup latencies of claims, in ms.
const STARTUP_MS: &[f64] = &[
    100.0, 250.0, 500.0, 750.0, 1000.0, 1250.0, 1500.0, 2000.0, 2500.0, 5000.0, 10000.0, 30000.0,
    60000.0, 120_000.0, 240_000.0,
];
/// Upstream's buckets of the latencies of Sandboxes, in ms.
const SANDBOX_MS: &[f64] = &[
    50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0, 30000.0, 60000.0, 120_000.0,
    240_000.0, 300_000.0, 600_000.0,
];

/// Name, type, labels and buckets of a metric.
type Listed = (
    &'static str,
    &'static str,
    &'static [&'static str],
    &'static [f64],
);

const OF_A_CLAIM: &[&str] = &["launch_type", "sandbox_template"];
const OF_A_LIFE: &[&str] = &["namespace", "sandbox_template", "owned_by"];

const UPSTREAMS: &[Listed] = &[
    (
        "agent_sandbox_build_info",
        "gauge",
        &[
            "build_date",
            "compiler",
            "git_commit",
            "git_version",
            "go_version",
            "platform",
        ],
        &[],
    ),
    (
        "agent_sandbox_claim_controller_startup_latency_ms",
        "histogram",
        OF_A_CLAIM,
        STARTUP_MS,
    ),
    (
        "agent_sandbox_claim_creation_total",
        "counter",
        &[
            "namespace",
            "sandbox_template",
            "launch_type",
            "warmpool_name",
            "pod_condition",
            "created_by",
        ],
        &[],
    ),
    (
        "agent_sandbox_claim_startup_latency_ms",
        "histogram",
        OF_A_CLAIM,
        STARTUP_MS,
    ),
    (
        "agent_sandbox_client_claim_startup_latency_ms",
        "histogram",
        OF_A_CLAIM,
        STARTUP_MS,
    ),
    (
        "agent_sandbox_creation_latency_ms",
        "histogram",
        &["namespace", "launch_type", "sandbox_template"],
        SANDBOX_MS,
    ),
    (
        "agent_sandbox_expired_total",
        "counter",
        &[
            "namespace",
            "sandbox_template",
            "owned_by",
            "shutdown_policy",
        ],
        &[],
    ),
    (
        "agent_sandbox_finished_total",
        "counter",
        &["namespace", "sandbox_template", "owned_by", "reason"],
        &[],
    ),
    (
        "agent_sandbox_resume_latency_ms",
        "histogram",
        OF_A_LIFE,
        SANDBOX_MS,
    ),
    (
        "agent_sandbox_resume_total",
        "counter",
        &["namespace", "sandbox_template", "owned_by", "result"],
        &[],
    ),
    (
        "agent_sandbox_suspend_latency_ms",
        "histogram",
        OF_A_LIFE,
        SANDBOX_MS,
    ),
    (
        "agent_sandbox_suspend_total",
        "counter",
        &["namespace", "sandbox_template", "owned_by", "result"],
        &[],
    ),
    (
        "agent_sandbox_warmpool_size",
        "gauge",
        &[
            "namespace",
            "warmpool_name",
            "sandbox_template",
            "sandbox_status",
        ],
        &[],
    ),
    (
        "agent_sandboxes",
        "gauge",
        &[
            "namespace",
            "ready_condition",
            "expired",
            "launch_type",
            "sandbox_template",
            "owned_by",
            "created_by",
            "operating_mode",
        ],
        &[],
    ),
];

/// One exposed metric.
#[derive(Debug, Default)]
struct Exposed {
    type_: String,
    labels: BTreeSet<String>,
    buckets: Vec<f64>,
}

/// Parses the text format into families by the name of their samples.
fn families(text: &str) -> BTreeMap<String, Exposed> {
    let (mut all, mut types) = (BTreeMap::<String, Exposed>::new(), BTreeMap::new());
    for line in text.lines() {
        if let Some(declared) = line.strip_prefix("# TYPE ") {
            let (name, type_) = declared.split_once(' ').unwrap();
            let sample = if type_ == "counter" {
                format!("{name}_total")
            } else {
                name.to_owned()
            };
            types.insert(sample, type_.to_owned());
            continue;
        }
        let Some((sample, rest)) = line.split_once('{') else {
            continue;
        };
        let (labels, _) = rest.rsplit_once('}').unwrap();
        let name = sample.strip_suffix("_bucket").unwrap_or(sample);
        let Some(type_) = types.get(name) else {
            continue;
        };
        let exposed = all.entry(name.to_owned()).or_default();
        exposed.type_.clone_from(type_);
        for label in labels.split(',') {
            let (key, value) = label.split_once('=').unwrap();
            match (key, value.trim_matches('"')) {
                ("le", "+Inf") => {}
                ("le", bound) => exposed.buckets.push(bound.parse().unwrap()),
                (key, _) => drop(exposed.labels.insert(key.to_owned())),
            }
        }
    }
    all
}

/// Runs a pool of one member, a claim that takes it and a claim that starts cold.
///
/// The first claim's Sandbox is suspended, resumed and ends; the second claim's Sandbox expires.
async fn run_lifecycles() -> Cluster {
    let cluster = Cluster::filled(1, json!({})).await;
    let asked = json!({"metadata": {"annotations": {
        "agents.x-k8s.io/client-first-requested-at": "2026-01-01T00:00:00Z",
    }}});
    cluster.claim("warm", asked.clone());
    cluster.claim_pass("warm").await.unwrap();
    cluster.edit("sandboxwarmpools", "p", &json!({"spec": {"replicas": 0}}));
    cluster.claim("cold", asked);
    cluster.settle().await;
    let held = cluster.held_by("warm").unwrap();
    for wanted in ["Suspended", "Running"] {
        cluster.edit("sandboxes", &held, &mode(wanted));
        cluster.settle().await;
    }
    let ended = json!({"status": {"phase": "Succeeded"}});
    cluster.api.edit("pods", NS, &held, &ended);
    let over = json!({"spec": {"shutdownTime": "2020-01-01T00:00:00Z"}});
    cluster.edit("sandboxes", "cold", &over);
    cluster.settle().await;
    cluster
}

#[tokio::test]
async fn every_metric_of_upstream_is_exposed_with_its_labels_and_buckets() {
    let text = run_lifecycles().await.context.metrics_text().unwrap();
    let exposed = families(&text);
    for (name, type_, labels, buckets) in UPSTREAMS {
        let found = exposed
            .get(*name)
            .unwrap_or_else(|| panic!("no {name} in\n{text}"));
        assert_eq!(found.type_, *type_, "{name}");
        let labels: BTreeSet<String> = labels.iter().map(ToString::to_string).collect();
        assert_eq!(found.labels, labels, "{name}");
        for bound in *buckets {
            assert!(found.buckets.contains(bound), "{name}: no bucket {bound}");
        }
        if !buckets.is_empty() {
            let fine = found.buckets.iter().filter(|bound| **bound < 50.0);
            assert!(fine.count() >= 3, "{name}: {:?}", found.buckets);
        }
    }
}

#[tokio::test]
async fn each_lifecycle_event_is_counted_once() {
    let cluster = run_lifecycles().await;
    let text = cluster.context.metrics_text().unwrap();
    let of = r#"namespace="ns",sandbox_template="t",owned_by="SandboxClaim""#;
    for (line, value) in [
        (
            format!("agent_sandbox_suspend_total{{{of},result=\"requested\"}}"),
            1,
        ),
        (
            format!("agent_sandbox_suspend_total{{{of},result=\"pod_terminated\"}}"),
            1,
        ),
        (format!("agent_sandbox_suspend_latency_ms_count{{{of}}}"), 1),
        (
            format!("agent_sandbox_resume_total{{{of},result=\"requested\"}}"),
            1,
        ),
        (
            format!("agent_sandbox_resume_total{{{of},result=\"ready\"}}"),
            1,
        ),
        (format!("agent_sandbox_resume_latency_ms_count{{{of}}}"), 1),
        (
            format!("agent_sandbox_finished_total{{{of},reason=\"PodSucceeded\"}}"),
            1,
        ),
        (
            format!("agent_sandbox_expired_total{{{of},shutdown_policy=\"Retain\"}}"),
            1,
        ),
        // The resume is no creation; those of the pool's member and of the cold Sandbox are.
        (
            r#"agent_sandbox_creation_latency_ms_count{namespace="ns",launch_type="warm",sandbox_template="t"}"#.to_owned(),
            1,
        ),
        (
            r#"agent_sandbox_creation_latency_ms_count{namespace="ns",launch_type="cold",sandbox_template="t"}"#.to_owned(),
            1,
        ),
        (
            r#"agent_sandbox_claim_startup_latency_ms_count{launch_type="cold",sandbox_template="t"}"#.to_owned(),
            1,
        ),
        (
            r#"agent_sandbox_warmpool_size{namespace="ns",warmpool_name="p",sandbox_template="t",sandbox_status="ready"}"#.to_owned(),
            0,
        ),
    ] {
        let line = format!("{line} {value}");
        assert!(text.lines().any(|exposed| exposed == line), "{line}\nnot in\n{text}");
    }
}

#[tokio::test]
async fn pool_members_are_counted_by_their_state() {
    let cluster = Cluster::filled(3, json!({})).await;
    let members = cluster.members();
    let failed = json!({"status": {"phase": "Failed"}});
    cluster.api.edit("pods", NS, &members[0], &failed);
    let unready = json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}});
    cluster.api.edit("pods", NS, &members[1], &unready);
    cluster.sandbox_passes().await;
    cluster.sync();
    let text = cluster.context.metrics_text().unwrap();
    for (state, count) in [
        ("ready", 1),
        ("pending", 1),
        ("failed", 1),
        ("succeeded", 0),
    ] {
        let line = format!(
            r#"agent_sandbox_warmpool_size{{namespace="ns",warmpool_name="p",sandbox_template="t",sandbox_status="{state}"}} {count}"#
        );
        assert!(text.contains(&line), "{line}\nnot in\n{text}");
    }
}

#[tokio::test]
async fn a_suspension_that_the_apiserver_refuses_is_counted_as_an_error() {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.pool(0, json!({}));
    cluster.claim("c", json!({}));
    cluster.settle().await;
    cluster.edit("sandboxes", "c", &mode("Suspended"));
    cluster.api.fail(Fault {
        verb: "delete",
        kind: "pods",
        answer: FaultAnswer::Refuse(403),
    });
    cluster.settle().await;
    let text = cluster.context.metrics_text().unwrap();
    for result in ["requested", "error", "pod_terminated"] {
        let line = format!(
            r#"agent_sandbox_suspend_total{{namespace="ns",sandbox_template="t",owned_by="SandboxClaim",result="{result}"}} 1"#
        );
        assert!(text.contains(&line), "{line}\nnot in\n{text}");
    }
}
