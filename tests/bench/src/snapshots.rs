//! Cost of one tenant's SandboxSnapshots for an agent that has nothing to do with them: small
//! objects that name Pods which do not exist.

use std::time::Duration;

use clap::Args;
use futures::{StreamExt, TryStreamExt, stream};
use serde_json::json;
use torpor_tests::case::Case;

use crate::{
    node,
    setup::{self, AT_ONCE},
    stop::Stop,
};

const NAMESPACE: &str = "torpor-bench-snapshots";
/// Number of objects after which the progress is printed.
const PROGRESS: usize = 500;

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
