//! The whole thing for claims and pools: watches, caches, queues and all reconcilers, against the apiserver in memory.

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
    objects::NS,
    turns,
};

struct AtWork {
    cluster: Cluster,
    stop: CancellationToken,
    work: Vec<JoinHandle<()>>,
}

impl AtWork {
    /// As many controllers at once.
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

    /// Waits, while kubelets start what is there to be started.
    async fn until(&self, what: &str, wish: impl Fn(&Cluster) -> bool) {
        let cluster = &self.cluster;
        let wish = |_: &_| {
            cluster.kubelets();
            wish(cluster)
        };
        cluster.api.until(what, wish).await;
    }

    /// Waits until the first controller has been shown pool and template as they are, or that they are gone.
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
        turns::until("pool and template are seen", seen).await;
    }

    /// Waits until nobody has asked for a pass over a claim for a while: the next one follows from what the test does next.
    async fn claims_rest(&self) {
        let claims = &self.cluster.context.queues.claims;
        let since = Cell::new(Instant::now());
        let rest = || {
            if claims.is_busy() {
                since.set(Instant::now());
            }
            since.get().elapsed() >= Duration::from_millis(100)
        };
        turns::until("claims rest", rest).await;
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
        let ready = cluster.claim_says(name(claim), "Ready");
        ready.is_some_and(|ready| ready.0 == "True")
    })
}

async fn claims_are_served(controllers: usize) {
    let at_work = AtWork::start(controllers);
    at_work.cluster.template(json!({}));
    at_work.cluster.pool(10, json!({}));
    at_work
        .until("the pool is full", |cluster| pool_is_ready(cluster, 10))
        .await;
    for number in 0..16 {
        at_work.cluster.claim(&format!("c{number}"), json!({}));
    }
    at_work.until("all claims are Ready", all_ready).await;
    at_work
        .until("the pool is full again", |cluster| {
            pool_is_ready(cluster, 10) && cluster.api.list("sandboxes").len() == 26
        })
        .await;
    let claims = at_work.cluster.api.list("sandboxclaims");
    let held: BTreeSet<String> = claims
        .iter()
        .map(|claim| {
            let held = at_work.cluster.held_by(name(claim)).unwrap();
            assert_eq!(
                at_work.cluster.controlled_by(claim),
                [held.clone()].as_slice()
            );
            held
        })
        .collect();
    assert_eq!(held.len(), 16);
    at_work.end().await;
}

#[tokio::test]
async fn a_burst_larger_than_the_pool_is_served_and_the_pool_is_filled_again() {
    claims_are_served(1).await;
}

#[tokio::test]
async fn two_controllers_at_work_serve_it_too() {
    claims_are_served(2).await;
}

#[tokio::test]
async fn a_claim_that_came_first_goes_on_when_pool_and_template_come() {
    let at_work = AtWork::start(1);
    let says = |reason: &'static str| {
        move |cluster: &Cluster| {
            let said = cluster.claim_says("c", "Ready");
            said.is_some_and(|said| said.1 == reason)
        }
    };
    at_work.cluster.claim("c", json!({}));
    at_work.until("no pool", says("WarmPoolNotFound")).await;
    at_work.cluster.pool(0, json!({}));
    at_work.until("no template", says("TemplateNotFound")).await;
    at_work.cluster.template(json!({}));
    at_work.until("Ready", says("DependenciesReady")).await;
    let policies = |cluster: &Cluster| !cluster.api.list("networkpolicies").is_empty();
    at_work.until("the policy is there", policies).await;
    at_work.end().await;
}

#[tokio::test]
async fn a_claim_that_the_template_keeps_from_a_sandbox_goes_on_when_it_is_mended() {
    let at_work = AtWork::start(1);
    let volume = json!({"metadata": {"name": "v"}, "spec": {"accessModes": ["ReadWriteOnce"]}});
    let volumes = |volumes: Value| json!({"spec": {"volumeClaimTemplates": volumes}});
    let cluster = &at_work.cluster;
    cluster.template(volumes(json!([volume, volume])));
    cluster.pool(0, json!({}));
    cluster.claim("c", json!({}));
    let refused = |cluster: &Cluster| {
        let said = cluster.claim_says("c", "Ready");
        said.is_some_and(|said| {
            (&*said.1, &*said.2)
                == (
                    "VolumeClaimTemplatesError",
                    "volumeClaimTemplate \"v\" is in the template twice",
                )
        })
    };
    at_work.until("refused", refused).await;
    cluster.edit("sandboxtemplates", "t", &volumes(json!([volume])));
    at_work.until("Ready", all_ready).await;
    let made = cluster.api.list("persistentvolumeclaims");
    assert_eq!(made.iter().map(name).collect::<Vec<_>>(), ["v-c"]);
    at_work.end().await;
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
async fn a_claim_whose_sandbox_is_gone_goes_on_when_what_keeps_it_from_another_is_mended(
    #[case] reason: &str,
    #[case] hinder: fn(&Cluster),
    #[case] mend: fn(&Cluster),
) {
    let at_work = AtWork::start(1);
    let cluster = &at_work.cluster;
    cluster.template(env_policy("Allowed"));
    cluster.pool(0, json!({}));
    // With a variable of its own it takes no member of a pool, and its next Sandbox is made anew.
    let env = json!({"spec": {"env": [{"name": "A", "value": "1"}]}});
    cluster.claim("c", env);
    at_work.until("Ready", all_ready).await;
    let first = cluster.get_sandbox("c")["metadata"]["uid"].clone();
    hinder(cluster);
    at_work.pool_and_template_are_seen().await;
    cluster.api.delete("sandboxes", NS, "c");
    let refused = |cluster: &Cluster| {
        let said = cluster.claim_says("c", "Ready");
        said.is_some_and(|said| said.1 == reason)
    };
    at_work.until("refused", refused).await;
    assert_eq!(cluster.held_by("c").as_deref(), Some("c"), "as it was");
    at_work.claims_rest().await;
    mend(cluster);
    at_work.until("Ready again", all_ready).await;
    assert_ne!(cluster.get_sandbox("c")["metadata"]["uid"], first);
    at_work.end().await;
}

#[tokio::test]
async fn a_pod_that_goes_is_told_by_the_claim() {
    let at_work = AtWork::start(1);
    at_work.cluster.template(json!({}));
    at_work.cluster.pool(1, json!({}));
    at_work
        .until("the pool is full", |cluster| pool_is_ready(cluster, 1))
        .await;
    at_work.cluster.claim("c", json!({}));
    at_work.until("Ready", all_ready).await;
    let held = at_work.cluster.held_by("c").unwrap();
    let pod = json!({"status": {"conditions": []}});
    at_work.cluster.api.edit("pods", NS, &held, &pod);
    let unready = |cluster: &Cluster| {
        let said = cluster.claim_says("c", "Ready");
        said.is_some_and(|said| said.2 == "Pod is Running but not Ready")
    };
    at_work.until("not Ready", unready).await;
    at_work.end().await;
}

#[tokio::test]
async fn passes_over_claims_and_pools_that_fail_are_tried_again_by_themselves() {
    let at_work = AtWork::start(1);
    for (verb, kind) in [
        ("create", "sandboxes"),
        ("patch", "sandboxes"),
        ("patch status", "sandboxclaims"),
        ("patch status", "sandboxwarmpools"),
        ("patch", "sandboxclaims"),
        ("create", "networkpolicies"),
    ] {
        let answer = FaultAnswer::Refuse(500);
        at_work.cluster.api.fail(Fault { verb, kind, answer });
    }
    at_work.cluster.template(json!({}));
    at_work.cluster.pool(2, json!({}));
    at_work
        .until("the pool is full", |cluster| pool_is_ready(cluster, 2))
        .await;
    at_work.cluster.claim("c", json!({}));
    at_work.until("Ready", all_ready).await;
    at_work.end().await;
}
