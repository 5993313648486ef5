//! Tests of pools that share a worker and an apiserver, and of the order between them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use rstest::rstest;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use torpor_api::SandboxWarmPool;
use torpor_controller::{pool::plan, run, settings::Settings};

use crate::{
    apiserver::{Apiserver, Fault, FaultAnswer},
    claims::waiting,
    cluster::{Cluster, settings},
    objects::NS,
};

/// Runs passes over the pool and checks its number of members.
///
/// The pool may have queued itself again, and a pass ends for that, too; each pass makes or deletes
/// at least one member.
async fn assert_passes_reach(cluster: &Cluster, count: usize) {
    for _ in 0..8 {
        cluster.pool_pass("p").await.unwrap();
    }
    assert_eq!(cluster.members().len(), count);
}

/// Waits for a state within this process.
pub(crate) async fn until(what: &str, wish: impl Fn() -> bool) {
    let wished = async {
        while !wish() {
            tokio::task::yield_now().await;
        }
    };
    let in_time = tokio::time::timeout(Duration::from_secs(20), wished).await;
    assert!(in_time.is_ok(), "in vain: {what}");
}

/// Returns settings under which a pass ends after one member.
fn without_turns() -> Settings {
    let mut settings = settings();
    settings.pools.turn = Duration::ZERO;
    settings
}

/// Checks that one pass over the pool leaves this number of members and yields to another pool.
async fn assert_pass_yields(cluster: &Cluster, members: usize) {
    let other = ("other".to_owned(), "q".to_owned());
    let queue = &cluster.context.queues.pools;
    queue.add(other.clone());
    let again = cluster.pool_pass("p").await.unwrap().unwrap();
    assert_eq!(cluster.members().len(), members);
    assert!(again.as_millis() <= 1, "{again:?}");
    // The pool may have queued itself meanwhile.
    while queue.next().await != other {}
}

#[tokio::test]
async fn a_pass_over_a_large_pool_yields_to_others_and_continues_later() {
    let cluster = Cluster::with(without_turns());
    cluster.template(json!({}));
    cluster.pool(8, json!({}));
    assert_pass_yields(&cluster, 1).await;
    assert_passes_reach(&cluster, 8).await;
}

#[tokio::test]
async fn a_pass_that_only_deletes_yields_too() {
    let cluster = Cluster::with(without_turns());
    cluster.template(json!({}));
    cluster.pool(8, json!({}));
    cluster.settle().await;
    cluster.edit("sandboxwarmpools", "p", &json!({"spec": {"replicas": 0}}));
    assert_pass_yields(&cluster, 7).await;
    assert_passes_reach(&cluster, 0).await;
}

#[tokio::test]
async fn a_large_pool_does_not_keep_one_of_another_namespace_empty() {
    let cluster = Cluster::with(without_turns());
    let gate = Arc::new(Semaphore::new(1000));
    let gated = cluster.gated(&gate);
    let pools = &gated.context.queues.pools;
    for namespace in [NS, "other"] {
        cluster.template(json!({"metadata": {"namespace": namespace}}));
    }
    let stop = CancellationToken::new();
    let work = tokio::spawn(run::run(Arc::clone(&gated.context), stop.clone()));
    let run_until_blocked = |api: &Apiserver| api.list("networkpolicies").len() == 2;
    cluster
        .api
        .until("the controller is at work", run_until_blocked)
        .await;
    gate.forget_permits(1000);
    cluster.pool(40, json!({}));
    let at_work = || pools.is_busy() && pools.depth() == 0;
    until("the large pool has the only worker", at_work).await;
    cluster.pool(2, json!({"metadata": {"namespace": "other"}}));
    until("the small one waits", || pools.depth() == 1).await;
    gate.add_permits(1000);
    let full = |api: &Apiserver| api.list("sandboxes").len() == 42;
    cluster.api.until("both pools are full", full).await;
    stop.cancel();
    work.await.unwrap();
    let mut made = cluster.api.list("sandboxes");
    // The apiserver of the tests numbers new objects in their order.
    made.sort_by_key(|sandbox| sandbox["metadata"]["uid"].as_str().unwrap().to_owned());
    let last_of_small = made
        .iter()
        .rposition(|sandbox| sandbox["metadata"]["namespace"] == "other");
    assert!(last_of_small < Some(41), "the large pool was filled first");
}

fn busy(verb: &'static str, kind: &'static str, seconds: u32) -> Fault {
    let answer = FaultAnswer::Busy(seconds);
    Fault { verb, kind, answer }
}

async fn wait_until_pressed(cluster: &Cluster) {
    until("the apiserver asks for less", || {
        cluster.context.api.is_pressed()
    })
    .await;
}

#[tokio::test]
async fn a_member_refused_by_a_busy_apiserver_is_created_after_its_delay_and_other_passes_wait() {
    let cluster = Cluster::new();
    cluster.template(json!({}));
    cluster.pool(7, json!({}));
    cluster.pool(1, json!({"metadata": {"name": "q"}}));
    let gate = Arc::new(Semaphore::new(1));
    let gated = cluster.gated(&gate);
    gated.sync();
    // No other pool is queued.
    waiting(&gated.context.queues.pools).await;
    let meanwhile = async {
        let begun = |api: &Apiserver| api.list("sandboxes").len() == 1;
        cluster.api.until("the pass is under way", begun).await;
        cluster.api.fail(busy("create", "sandboxes", 1));
        let refused = Instant::now();
        gate.add_permits(100);
        wait_until_pressed(&gated).await;
        let again = gated.stale_pool_pass("q").await.unwrap();
        assert_eq!(again, Some(plan::PRESSED_RETRY));
        // The first member, and the other create that was running.
        assert!(cluster.members().len() <= 2);
        refused
    };
    let (pass, refused) = tokio::join!(gated.stale_pool_pass("p"), meanwhile);
    pass.unwrap();
    assert!(refused.elapsed() >= Duration::from_secs(1));
    assert_eq!(cluster.members().len(), 7);
    assert!(cluster.controlled_by(&cluster.get_pool("q")).is_empty());
    let codes: Vec<u16> = cluster.api.take_writes().iter().map(|w| w.code).collect();
    assert_eq!(codes.iter().filter(|code| **code == 429).count(), 1);
}

#[rstest]
#[case::while_it_makes_members(0, 7, 1)]
#[case::while_it_deletes_members(7, 0, 6)]
#[tokio::test]
async fn a_pass_ends_when_the_apiserver_throttles_another_call(
    #[case] before: usize,
    #[case] wanted: usize,
    #[case] after: usize,
) {
    let cluster = Cluster::filled(before, json!({})).await;
    let replicas = json!({"spec": {"replicas": wanted}});
    cluster.edit("sandboxwarmpools", "p", &replicas);
    let gate = Arc::new(Semaphore::new(0));
    let gated = cluster.gated(&gate);
    gated.sync();
    cluster
        .api
        .fail(busy("patch status", "sandboxwarmpools", 30));
    let (api, nothing) = (&gated.context.api, json!({"status": {}}));
    let others = api.patch_status::<SandboxWarmPool>(NS, "p", &nothing);
    let pass = async {
        let opened = async {
            gate.add_permits(1);
            wait_until_pressed(&gated).await;
            gate.add_permits(100);
        };
        tokio::join!(gated.stale_pool_pass("p"), opened).0
    };
    // The foreign call reaches the gate first and is answered while the pass's first create waits
    // there.
    let pass = tokio::select! {
        biased;
        done = others => panic!("it was to wait: {done:?}"),
        pass = pass => pass.unwrap(),
    };
    assert_eq!(pass, Some(plan::PRESSED_RETRY));
    let left = cluster.members().len();
    assert_eq!(left, after, "the one that was under way");
    assert!(gated.context.api.is_pressed(), "for as long as it says");
}
