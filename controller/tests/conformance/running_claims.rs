//! Tests of running controllers with claims and pools: watches, caches, queues and all reconcilers
//! against the apiserver in memory.

use std::{
    cell::Cell,
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use kube::ResourceExt;
use rstest::rstest;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use torpor_controller::run;

use crate::{
    apiserver::{Fault, FaultAnswer},
    cluster::{Cluster, name},
    fairness,
    objects::NS,
};

struct RunningCluster {
    cluster: Cluster,
    stop: CancellationToken,
    work: Vec<JoinHandle<()>>,
}

impl RunningCluster {
    /// Starts a number of controllers.
    fn start(controllers: usize) -> Self {
        let cluster = Cluster::new();
        let stop = CancellationToken::new();
        let mut work = vec![tokio::spawn(run::run(
            Arc::clone(&cluster.context),
            stop.clone(),
        ))];
        for _ in 1..controllers {
            let context = cluster.another().context;
            work.push(tokio::spawn(run::run(context, stop.clone())));
        }
        Self {
            cluster,
            stop,
            work,
        }
    }

    /// Waits for a state of the cluster while kubelets start Pods.
    async fn until(&self, what: &str, wish: impl Fn(&Cluster) -> bool) {
        let cluster = &self.cluster;
        let wish = |_: &_| {
            cluster.kubelets();
            wish(cluster)
        };
        cluster.api.until(what, wish).await;
    }

    /// Waits until the first controller's caches show the present pool and template, or their
    /// absence.
    async fn pool_and_template_are_seen(&self) {
        let Cluster { api, context } = &self.cluster;
        let there = |kind: &str, name: &str| {
            let found = api.get(kind, NS, name)?;
            Some(found["metadata"]["resourceVersion"].as_str()?.to_owned())
        };
        let seen = || {
            let pool = context.caches.pools.get(NS, "p");
            let template = context.caches.templates.get(NS, "t");
            pool.and_then(|pool| pool.resource_version()) == there("sandboxwarmpools", "p")
                && template.and_then(|template| template.resource_version())
                    == there("sandboxtemplates", "t")
        };
        fairness::until("pool and template are seen", seen).await;
    }

    /// Waits until no pass over a claim is queued or running for 100 ms, so that the next pass
    /// follows from the test's next step.
    async fn claims_rest(&self) {
        let claims = &self.cluster.context.queues.claims;
        let since = Cell::new(Instant::now());
        let rest = || {
            if claims.is_busy() {
                since.set(Instant::now());
            }
            since.get().elapsed() >= Duration::from_millis(100)
        };
        fairness::until("claims rest", rest).await;
    }

    async fn end(self) {
        self.stop.cancel();
        for work in self.work {
            tokio::time::timeout(Duration::from_secs(20), work)
                .await
                .unwrap()
                .unwrap();
        }
    }
}

fn pool_is_ready(cluster: &Cluster, members: usize) -> bool {
    cluster.get_pool("p")["status"]["readyReplicas"] == members
        && cluster.members().len() == members
}

fn all_ready(cluster: &Cluster) -> bool {
    let claims = cluster.api.list("sandboxclaims");
    claims.iter().all(|claim| {
        let ready = cluster.claim_condition(name(claim), "Ready");
        ready.is_some_and(|ready| ready.0 == "True")
    })
}

async fn claims_are_served(controllers: usize) {
    let running = RunningCluster::start(controllers);
    running.cluster.template(json!({}));
    running.cluster.pool(10, json!({}));
    running
        .until("the pool is full", |cluster| pool_is_ready(cluster, 10))
        .await;
    for number in 0..16 {
        running.cluster.claim(&format!("c{number}"), json!({}));
    }
    running.until("all claims are Ready", all_ready).await;
    running
        .until("the pool is full again", |cluster| {
            pool_is_ready(cluster, 10) && cluster.api.list("sandboxes").len() == 26
        })
        .await;
    let claims = running.cluster.api.list("sandboxclaims");
    let held: BTreeSet<String> = claims
        .iter()
        .map(|claim| {
            let held = running.cluster.held_by(name(claim)).unwrap();
            assert_eq!(
                running.cluster.controlled_by(claim),
                [held.clone()].as_slice()
            );
            held
        })
        .collect();
    assert_eq!(held.len(), 16);
    running.end().await;
}

#[tokio::test]
async fn a_burst_larger_than_the_pool_is_served_and_the_pool_is_filled_again() {
    claims_are_served(1).await;
}

#[tokio::test]
async fn two_running_controllers_serve_a_burst_larger_than_the_pool() {
    claims_are_served(2).await;
}

#[tokio::test]
async fn a_claim_created_first_continues_when_its_pool_and_template_are_created() {
    let running = RunningCluster::start(1);
    let has_reason = |reason: &'static str| {
        move |cluster: &Cluster| {
            let ready = cluster.claim_condition("c", "Ready");
            ready.is_some_and(|ready| ready.1 == reason)
        }
    };
    running.cluster.claim("c", json!({}));
    running
        .until("no pool", has_reason("WarmPoolNotFound"))
        .await;
    running.cluster.pool(0, json!({}));
    running
        .until("no template", has_reason("TemplateNotFound"))
        .await;
    running.cluster.template(json!({}));
    running
        .until("Ready", has_reason("DependenciesReady"))
        .await;
    let policies = |cluster: &Cluster| !cluster.api.list("networkpolicies").is_empty();
    running.until("the policy is there", policies).await;
    running.end().await;
}

#[tokio::test]
async fn a_claim_refused_by_its_template_continues_when_the_template_is_corrected() {
    let running = RunningCluster::start(1);
    let volume = json!({"metadata": {"name": "v"}, "spec": {"accessModes": ["ReadWriteOnce"]}});
    let volumes = |volumes: Value| json!({"spec": {"volumeClaimTemplates": volumes}});
    let cluster = &running.cluster;
    cluster.template(volumes(json!([volume, volume])));
    cluster.pool(0, json!({}));
    cluster.claim("c", json!({}));
    let refused = |cluster: &Cluster| {
        let ready = cluster.claim_condition("c", "Ready");
        ready.is_some_and(|ready| {
            (&*ready.1, &*ready.2)
                == (
                    "VolumeClaimTemplatesError",
                    "volumeClaimTemplate \"v\" is in the template twice",
                )
        })
    };
    running.until("refused", refused).await;
    cluster.edit("sandboxtemplates", "t", &volumes(json!([volume])));
    running.until("Ready", all_ready).await;
    let made = cluster.api.list("persistentvolumeclaims");
    assert_eq!(made.iter().map(name).collect::<Vec<_>>(), ["v-c"]);
    running.end().await;
}

fn env_policy(policy: &str) -> Value {
    json!({"spec": {"envVarsInjectionPolicy": policy}})
}

#[rstest]
#[case::the_template_forbids_it(
    "EnvVarsInjectionRejected",
    |cluster: &Cluster| cluster.edit("sandboxtemplates", "t", &env_policy("Disallowed")),
    |cluster: &Cluster| cluster.edit("sandboxtemplates", "t", &env_policy("Allowed"))
)]
#[case::the_template_is_missing(
    "TemplateNotFound",
    |cluster: &Cluster| cluster.api.delete("sandboxtemplates", NS, "t"),
    |cluster: &Cluster| cluster.template(env_policy("Allowed"))
)]
#[case::the_pool_is_missing(
    "WarmPoolNotFound",
    |cluster: &Cluster| cluster.api.delete("sandboxwarmpools", NS, "p"),
    |cluster: &Cluster| cluster.pool(0, json!({}))
)]
#[tokio::test]
async fn a_claim_without_its_sandbox_continues_when_the_obstacle_is_removed(
    #[case] reason: &str,
    #[case] hinder: fn(&Cluster),
    #[case] mend: fn(&Cluster),
) {
    let running = RunningCluster::start(1);
    let cluster = &running.cluster;
    cluster.template(env_policy("Allowed"));
    cluster.pool(0, json!({}));
    // A claim with a variable takes no pool member, so its next Sandbox is created cold.
    let env = json!({"spec": {"env": [{"name": "A", "value": "1"}]}});
    cluster.claim("c", env);
    running.until("Ready", all_ready).await;
    let first = cluster.get_sandbox("c")["metadata"]["uid"].clone();
    hinder(cluster);
    running.pool_and_template_are_seen().await;
    cluster.api.delete("sandboxes", NS, "c");
    let refused = |cluster: &Cluster| {
        let ready = cluster.claim_condition("c", "Ready");
        ready.is_some_and(|ready| ready.1 == reason)
    };
    running.until("refused", refused).await;
    assert_eq!(cluster.held_by("c").as_deref(), Some("c"), "as it was");
    running.claims_rest().await;
    mend(cluster);
    running.until("Ready again", all_ready).await;
    assert_ne!(cluster.get_sandbox("c")["metadata"]["uid"], first);
    running.end().await;
}

#[tokio::test]
async fn a_claim_reports_that_its_pod_is_no_longer_ready() {
    let running = RunningCluster::start(1);
    running.cluster.template(json!({}));
    running.cluster.pool(1, json!({}));
    running
        .until("the pool is full", |cluster| pool_is_ready(cluster, 1))
        .await;
    running.cluster.claim("c", json!({}));
    running.until("Ready", all_ready).await;
    let held = running.cluster.held_by("c").unwrap();
    let pod = json!({"status": {"conditions": []}});
    running.cluster.api.edit("pods", NS, &held, &pod);
    let unready = |cluster: &Cluster| {
        let ready = cluster.claim_condition("c", "Ready");
        ready.is_some_and(|ready| ready.2 == "Pod is Running but not Ready")
    };
    running.until("not Ready", unready).await;
    running.end().await;
}

#[tokio::test]
async fn failed_passes_over_claims_and_pools_are_retried() {
    let running = RunningCluster::start(1);
    for (verb, kind) in [
        ("create", "sandboxes"),
        ("patch", "sandboxes"),
        ("patch status", "sandboxclaims"),
        ("patch status", "sandboxwarmpools"),
        ("patch", "sandboxclaims"),
        ("create", "networkpolicies"),
    ] {
        let answer = FaultAnswer::Refuse(500);
        running.cluster.api.fail(Fault { verb, kind, answer });
    }
    running.cluster.template(json!({}));
    running.cluster.pool(2, json!({}));
    running
        .until("the pool is full", |cluster| pool_is_ready(cluster, 2))
        .await;
    running.cluster.claim("c", json!({}));
    running.until("Ready", all_ready).await;
    running.end().await;
}
