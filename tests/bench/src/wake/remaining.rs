//! Cost of hibernated Pods: memory and processor time of their shims.

use std::{collections::HashSet, time::Duration};

use anyhow::Context as _;
use torpor_tests::{
    case::Case,
    machine::{Process, processes_naming},
};

use crate::{node, setup, sleeper::Sleeper, table};

/// Time over which processor time is measured.
const SHARE: Duration = Duration::from_secs(30);

/// Hibernates the Pod `small`, then others beside it, and prints the cost of each.
///
/// PSS divides a page among the processes that have it, so the first Pod alone bears the text of
/// the programs.
pub(super) async fn measure(case: &Case, sleepers: usize) -> anyhow::Result<()> {
    case.hibernate("small").await?;
    let alone = remaining(case, &["small".to_owned()]).await?;
    println!(
        "one hibernated Pod on the node, its shim: {} KiB PSS in {} processes",
        node::pss_kib(&alone),
        alone.len()
    );
    let others: Vec<String> = (1..=sleepers).map(|n| format!("sleeper-{n}")).collect();
    setup::start(case, others.iter().map(|name| super::idle(name)).collect()).await?;
    for name in &others {
        case.hibernate(name).await?;
    }
    let names = [&["small".to_owned()], &others[..]].concat();
    let own = remaining(case, &names).await?;
    let shims = other_shims(case)?;
    let (before, shims_before) = (node::processor_time(&own), node::processor_time(&shims));
    tokio::time::sleep(SHARE).await;
    let used = node::processor_time(&own) - before;
    let shims_used = node::processor_time(&shims) - shims_before;
    println!(
        "{} hibernated Pods, their shims: {} KiB PSS each",
        names.len(),
        node::pss_kib(&own) / names.len() as u64
    );
    let each = |used, count: usize| node::percent(used, SHARE) / count.max(1) as f64;
    let (base, share) = (each(shims_used, shims.len()), each(used, names.len()));
    let unit = format!("% of a processor each over {} s", SHARE.as_secs());
    let words = format!("shims of {} Pods that runc runs", shims.len());
    println!("{}", table::value(&words, base, &unit, Some(base)));
    let words = "shims of the hibernated Pods";
    println!("{}", table::value(words, share, &unit, Some(base)));
    setup::delete_pods(case).await
}

/// Returns the processes that remain of hibernated Pods: their shims.
async fn remaining(case: &Case, names: &[String]) -> anyhow::Result<Vec<Process>> {
    let pods = Sleeper::all(case).await?;
    let mut found = Vec::new();
    for name in names {
        let pod = pods
            .get(name)
            .with_context(|| format!("no record of Pod {name}"))?;
        found.push(case.node.shim(&pod.uid)?);
    }
    Ok(found)
}

/// Returns the shims of the node's Pods that Torpor does not run, which the kubelet asks as it asks
/// Torpor's.
fn other_shims(case: &Case) -> anyhow::Result<Vec<Process>> {
    let records = case.node.records.pods()?;
    let own: HashSet<String> = records.iter().map(|pod| pod.sandbox.to_string()).collect();
    let shims = processes_naming(&["containerd-shim-runc-v2".to_owned()]);
    let is_other = |shim: &Process| {
        let mut words = shim.command.split(' ').skip_while(|word| *word != "-id");
        words.nth(1).is_some_and(|id| !own.contains(id))
    };
    Ok(shims.into_iter().filter(is_other).collect())
}
