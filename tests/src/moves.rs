//! The kill test of moves: all sandboxes of a node move to the other one and back, through an S3
//! server, while the server, objects in it, agents and the controller fail.
//!
//! Each sandbox holds random memory and a counter. After each move it must continue from the state
//! that it had before.
//!
//! | module | subject |
//! |---|---|
//! | [`schedule`] | failures of each round: a pure function of a seed |
//! | [`strike`] | the failures themselves |

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{EvictParams, ListParams};
use serde_json::json;
use torpor_api::annotations::{HIBERNATE, SNAPSHOT_CLASS};

use crate::case::{Case, node_of};
use crate::sandboxes::sandbox;
use crate::two_nodes::{NODES, gone_from, nothing_fetched, other};
use crate::{wait, witness};

pub mod schedule;
pub mod strike;

use schedule::{Fault, Moment, Round, Way};

/// Time for the sandboxes to move, with failures meanwhile. An upload or a fetch that has failed
/// waits for up to half a minute.
const MOVED: Duration = Duration::from_secs(180);
/// Memory of each sandbox that zstd cannot compress.
const MEGABYTES: u32 = 20;

/// Results of a run.
#[derive(Debug, Default)]
pub struct Tally {
    rounds: Vec<Duration>,
    moves: usize,
    faults: Vec<(Fault, bool)>,
}

impl Tally {
    /// Reports whether this failure came, and had a target.
    pub fn has_had(&self, fault: Fault) -> bool {
        self.faults.contains(&(fault, true))
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hits = self.faults.iter().filter(|(_, hit)| *hit).count();
        let longest = self.rounds.iter().max().copied().unwrap_or_default();
        write!(
            f,
            "{} rounds, {} moves, {hits} failures ({} more had no target), the longest round {:.0} s; nothing lost, stuck or left over",
            self.rounds.len(),
            self.moves,
            self.faults.len() - hits,
            longest.as_secs_f64(),
        )
    }
}

/// Moves this number of sandboxes in each of the numbered rounds, and passes a line about each
/// round to `report`. Needs both nodes and a SnapshotClass of the namespace's name
/// ([`crate::two_nodes::on_both`]).
///
/// An error is the first sandbox that lost memory, did not move in time, or left something over.
pub async fn run(
    case: &Case,
    sandboxes: usize,
    rounds: impl IntoIterator<Item = (u64, Round)>,
    report: impl Fn(&str),
) -> anyhow::Result<Tally> {
    ensure!(strike::store().is_some(), "no S3 server runs");
    let names: Vec<String> = (0..sandboxes).map(|n| format!("m{n}")).collect();
    case.cordon(NODES[1], true).await?;
    for name in &names {
        let container = witness::container(MEGABYTES, &[]);
        let mut manifest = sandbox(name, json!({ "containers": [container] }));
        manifest["metadata"]["annotations"] = json!({ SNAPSHOT_CLASS: case.namespace });
        case.create(manifest).await?;
    }
    try_join_all(names.iter().map(|name| case.sandbox_ready(name))).await?;
    case.cordon(NODES[1], false).await?;
    let mut tally = Tally::default();
    let mut node = NODES[0];
    for (number, round) in rounds {
        let began = Instant::now();
        let moved = one(case, &round, &names, node, &mut tally).await;
        moved.with_context(|| format!("round {number} from {node}: {round}"))?;
        let took = began.elapsed();
        report(&format!(
            "{number:>5} {:>5.1} s  {round}: ok",
            took.as_secs_f64()
        ));
        tally.rounds.push(took);
        tally.moves += names.len();
        node = other(node);
    }
    Ok(tally)
}

/// Moves all sandboxes to the other node.
async fn one(
    case: &Case,
    round: &Round,
    names: &[String],
    from: &str,
    tally: &mut Tally,
) -> anyhow::Result<()> {
    let to = other(from);
    let pods = try_join_all(names.iter().map(|name| case.sandbox_ready(name))).await?;
    let before = try_join_all(pods.iter().map(witness::ask)).await?;
    let strikes = async |moment| {
        let strikes = round.strikes_at(moment);
        try_join_all(strikes.map(|strike| strike::strike(case, strike, from))).await
    };
    let leave = async {
        match round.way {
            Way::Suspend => suspend(case, names).await,
            Way::Drain => hibernate(case, names).await,
        }
    };
    let (left, struck) = futures::join!(leave, strikes(Moment::Leaving));
    tally.faults.extend(struck?);
    left?;
    case.cordon(from, true).await?;
    let come = async {
        match round.way {
            Way::Suspend => {
                try_join_all(names.iter().map(|name| case.set_mode(name, "Running"))).await?;
            }
            Way::Drain => {
                try_join_all(pods.iter().map(|pod| evict(case, pod))).await?;
                let awake = json!({ "metadata": { "annotations": { HIBERNATE: null } } });
                try_join_all(names.iter().map(|name| case.patch(name, awake.clone()))).await?;
            }
        }
        try_join_all(pods.iter().map(|pod| case.next_pod(pod, MOVED))).await
    };
    let (next, struck) = futures::join!(come, strikes(Moment::Coming));
    tally.faults.extend(struck?);
    let next = next?;
    for (pod, before) in next.iter().zip(&before) {
        ensure!(node_of(pod) == to, "it runs on {}", node_of(pod));
        let now = witness::ask(pod).await?;
        let continues = now.goes_on_from(before);
        continues.with_context(|| format!("{} has lost memory", pod.name_any()))?;
    }
    case.cordon(from, false).await?;
    nothing_left(case, from, to).await
}

/// Suspends the Sandboxes, and waits until their images are uploaded.
async fn suspend(case: &Case, names: &[String]) -> anyhow::Result<()> {
    try_join_all(names.iter().map(|name| case.set_mode(name, "Suspended"))).await?;
    wait::until("all images are uploaded", MOVED, async || {
        let all = case.snapshots().list(&ListParams::default()).await?;
        let done = all.items.iter().filter(|one| one.is_uploaded()).count();
        let words = || {
            let states = all.items.iter().map(|one| one.conditions());
            format!(
                "{done} of {}: {:?}",
                names.len(),
                states.collect::<Vec<_>>()
            )
        };
        wait::holds(done == names.len(), words)
    })
    .await
}

/// Hibernates the Sandboxes in place.
async fn hibernate(case: &Case, names: &[String]) -> anyhow::Result<()> {
    let asleep = json!({ "metadata": { "annotations": { HIBERNATE: "true" } } });
    try_join_all(names.iter().map(|name| case.patch(name, asleep.clone()))).await?;
    let sleeps = |name| case.sandbox_has(name, "Hibernated", "True", "Hibernated");
    try_join_all(names.iter().map(|name| sleeps(name))).await?;
    Ok(())
}

/// Evicts the Pod, as `kubectl drain` does: again until it is gone or another one.
async fn evict(case: &Case, pod: &Pod) -> anyhow::Result<()> {
    let name = pod.name_any();
    wait::until("the Pod is evicted", MOVED, async || {
        let now = case.pods().get_opt(&name).await?;
        if now.is_none_or(|now| now.uid() != pod.uid() || now.metadata.deletion_timestamp.is_some())
        {
            return Ok(Ok(()));
        }
        let asked = case.pods().evict(&name, &EvictParams::default()).await;
        Ok(Err(format!("{asked:?}")))
    })
    .await
}

/// Waits until no snapshot, no fetched image and no image of the old node is left.
async fn nothing_left(case: &Case, from: &str, to: &str) -> anyhow::Result<()> {
    wait::none(&case.snapshots(), "no snapshot is left", MOVED).await?;
    nothing_fetched(case, to).await?;
    let folder = format!("/var/lib/torpor/images/{}", case.namespace);
    gone_from(case, from, &folder).await
}
