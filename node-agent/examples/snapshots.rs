//! A measurement of what one tenant's SandboxSnapshots cost the agent of a node that they do not
//! concern.
//!
//! `cargo run --release -p torpor-agent --example snapshots [NUMBER]` measures the agent's index:
//! the time to apply a list and an event, and the time of the queries that a sweep and a turn of a
//! Pod make. It measures without snapshots and with NUMBER of them (default 20,000) that name
//! unknown Pods. It exits with 1 if the sum reaches 2 % of a core.

#![allow(clippy::print_stdout)] // a program whose output is its purpose

#[allow(dead_code)] // the agent uses more than is measured here
#[path = "../src/reconcile/references.rs"]
mod references;
#[allow(dead_code)]
#[path = "../src/reconcile/snapshot_index.rs"]
mod snapshot_index;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use kube::runtime::watcher::Event;
use serde_json::json;
use torpor_api::snapshot::SandboxSnapshot;
use torpor_core::ids::PodUid;

use snapshot_index::SnapshotIndex;

const NODE: &str = "node-a";
const DEFAULT_NUMBER: u32 = 20_000;
/// Sandboxes of a full node. The task of each awake sandbox has a turn every [`LOOK`].
const SANDBOXES: u32 = 250;
const LOOK: Duration = Duration::from_secs(5);
const SWEEP: Duration = Duration::from_secs(10);
/// Changes of snapshots per second in the whole cluster.
const EVENTS: u32 = 50;
/// Limit of the sum, in percent of a core.
const LIMIT: f64 = 2.0;

/// The node that the tenant's snapshots name.
#[derive(Debug, Clone, Copy)]
enum Names {
    Nobody,
    /// This node, which has not answered yet.
    ThisNode,
}

fn snapshot(number: u32, version: u32, names: Names) -> SandboxSnapshot {
    let node = match names {
        Names::Nobody => None,
        Names::ThisNode => Some(NODE),
    };
    serde_json::from_value(json!({
        "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
        "metadata": {
            "name": format!("snapshot-{number}"), "namespace": "tenant",
            "uid": format!("snapshot-{number}"), "resourceVersion": version.to_string(),
        },
        "spec": { "sandboxName": "s", "podUID": format!("unknown-{number}"), "nodeName": node },
    }))
    .expect("a SandboxSnapshot")
}

/// Returns the average time of one of `times` calls.
fn each(times: u32, mut act: impl FnMut(u32)) -> Duration {
    let began = Instant::now();
    (0..times).for_each(&mut act);
    began.elapsed() / times
}

/// Returns the share of a core, in percent, of a call that takes `takes` once in `every`.
fn share(takes: Duration, every: Duration) -> f64 {
    100.0 * takes.as_secs_f64() / every.as_secs_f64()
}

fn measure(number: u32, names: Names) -> f64 {
    let shown = SnapshotIndex::new(NODE.to_owned());
    let listed: Vec<_> = (0..number).map(|n| snapshot(n, 1, names)).collect();
    let began = Instant::now();
    shown.take(Event::Init);
    for one in listed {
        shown.take(Event::InitApply(one));
    }
    shown.take(Event::InitDone);
    let list = began.elapsed();
    // 1000 events, because the first find nothing in the processor's caches.
    let changed: Vec<_> = (0..1000)
        .map(|n| snapshot(n % number.max(1), 2, names))
        .collect();
    let mut changed = changed.into_iter();
    let event = each(1000, |_| {
        shown.take(Event::Apply(changed.next().expect("one for each")));
    });
    let sweep = each(20, |_| drop(shown.to_answer()));
    let pods: Vec<_> = (0..SANDBOXES)
        .map(|n| PodUid::new(format!("own-{n}")).expect("a UID"))
        .collect();
    let mut own = pods.iter().cycle();
    let turn = each(100_000, |_| {
        let pod = own.next().expect("there are some");
        drop(shown.of_pod(pod, Some("another")));
    });
    let all = share(event, Duration::from_secs(1) / EVENTS)
        + share(sweep, SWEEP)
        + share(turn, LOOK / SANDBOXES);
    println!(
        "{number:>6} {names:<10} list {list:>10.1?}  event {event:>9.1?}  sweep {sweep:>9.1?}  turn {turn:>9.1?}  share of a core {all:.4} %",
        names = format!("{names:?}"),
    );
    all
}

fn main() -> ExitCode {
    let number = std::env::args().nth(1).and_then(|text| text.parse().ok());
    let number = number.unwrap_or(DEFAULT_NUMBER);
    println!("{SANDBOXES} sandboxes, {EVENTS} changes of snapshots a second");
    let runs = [
        (0, Names::Nobody),
        (number, Names::Nobody),
        (number, Names::ThisNode),
    ];
    let most = runs.map(|(number, names)| measure(number, names));
    match most.into_iter().fold(0.0, f64::max) < LIMIT {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
