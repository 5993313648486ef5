//! Cost of one tenant's SandboxSnapshots for an agent that has nothing to do with them: small
//! objects that name Pods which do not exist.

use std::time::Duration;

use clap::Args;
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::json;
use torpor_tests::{case::Case, wait};

use crate::{
    node,
    setup::{self, AT_ONCE},
    stop::Stop,
};

const NAMESPACE: &str = "torpor-bench-snapshots";
/// Number of objects after which the progress is printed.
const PROGRESS: usize = 500;
/// Time for the controller's status of each snapshot: 200 a second on two cores.
const REPORT_LIMIT: Duration = Duration::from_secs(600);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// SandboxSnapshots
    #[arg(default_value_t = 20_000)]
    number: usize,
    /// Seconds for which the agent is measured, without the objects and with them
    #[arg(default_value_t = 60)]
    seconds: u64,
}

pub(crate) async fn run(options: &Options, stop: &mut Stop) -> anyhow::Result<()> {
    setup::namespaced(NAMESPACE, stop, async |case| {
        let time = Duration::from_secs(options.seconds);
        print_share("without", time).await?;
        create(case, options.number).await?;
        reported(case, options.number).await?;
        print_share(&format!("with {}", options.number), time).await
    })
    .await
}

async fn create(case: &Case, number: usize) -> anyhow::Result<()> {
    let numbers: Vec<usize> = (0..number).collect();
    for some in numbers.chunks(PROGRESS) {
        let objects = some.iter().map(|n| {
            json!({
                "apiVersion": "torpor.dev/v1alpha1",
                "kind": "SandboxSnapshot",
                "metadata": {"name": format!("s-{n}")},
                "spec": {"sandboxName": "s", "podUID": format!("unknown-{n}")},
            })
        });
        stream::iter(objects)
            .map(|object| case.create(object))
            .buffer_unordered(AT_ONCE)
            .try_collect::<()>()
            .await?;
        eprintln!(
            "    {} of {number} snapshots",
            some.last().map_or(0, |last| last + 1)
        );
    }
    Ok(())
}

/// Waits until the controller has written a status to the last snapshot, and so to all.
///
/// Each of these writes is an event for the agent.
async fn reported(case: &Case, number: usize) -> anyhow::Result<()> {
    let name = format!("s-{}", number.saturating_sub(1));
    let words = "the controller has reported on all snapshots";
    wait::object(case.snapshots(), &name, words, REPORT_LIMIT, |found| {
        let status = found.and_then(|snapshot| snapshot.status);
        let is_reported = status.is_some_and(|status| !status.conditions.is_empty());
        is_reported
            .then_some(())
            .ok_or_else(|| "it has no condition".to_owned())
    })
    .await
}

/// Prints the agent's share of a processor from now on, and its memory.
async fn print_share(words: &str, time: Duration) -> anyhow::Result<()> {
    let agent = [node::agent()?];
    let before = node::processor_time(&agent);
    tokio::time::sleep(time).await;
    let used = node::processor_time(&agent) - before;
    println!(
        "{words}: {:.2} % of a core, {:.1} MB",
        node::percent(used, time),
        node::resident_mib(agent[0].pid)?
    );
    Ok(())
}
