//! Forks of one sandbox: many Sandboxes that start as copies of a SandboxSnapshot at the same time,
//! beside as many that start cold. Each until its program has answered its first request.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use futures::future::try_join_all;
use kube::api::{DeleteParams, ListParams};
use serde_json::{Value, json};
use torpor_api::annotations::RESTORE_FROM;
use torpor_api::{Sandbox, SandboxSnapshot};
use torpor_tests::case::{Case, uid};
use torpor_tests::pods::PYTHON;
use torpor_tests::{sandboxes, wait};

use crate::{node, pool, setup, sleeper::memory_mib, stats::Times, stop::Stop, table};

const NAMESPACE: &str = "torpor-bench-fork";
/// Time limit of a group of Sandboxes to answer, and of a snapshot.
const LIMIT: Duration = Duration::from_secs(240);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Forks at the same time
    #[arg(default_value_t = 20)]
    forks: usize,
    /// Memory of the sandbox in MiB
    #[arg(long, default_value_t = 100)]
    megabytes: u32,
}

pub(crate) async fn run(options: &Options, stop: &mut Stop) -> anyhow::Result<()> {
    setup::namespaced(NAMESPACE, stop, async |case| {
        println!(
            "{} forks of {} MiB, {}",
            options.forks,
            options.megabytes,
            node::describe()?
        );
        let cold = group(case, "cold", options, None).await?;
        remove(case).await?;
        case.create(sandbox("s", options, None)).await?;
        case.sandbox_ready("s").await?;
        case.create(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": { "name": "s" }, "spec": { "sandboxName": "s" },
        }))
        .await?;
        let words = "the snapshot is committed";
        wait::object(
            case.snapshots(),
            "s",
            words,
            LIMIT,
            |found: Option<SandboxSnapshot>| {
                let found = found.context("it is gone").map_err(|why| why.to_string())?;
                let committed = found.is_committed();
                committed
                    .then_some(())
                    .ok_or_else(|| format!("{:?}", found.status))
            },
        )
        .await?;
        let forked = group(case, "fork", options, Some("s")).await?;
        let base = Times::of(&cold.answered);
        for (words, found) in [("cold starts", &cold), ("forks", &forked)] {
            let words = format!("{words}: first answer");
            println!(
                "{}",
                table::row_to_last(&words, &Times::of(&found.answered), &base)
            );
        }
        let cold = Some(cold.memory);
        println!(
            "{}",
            table::value("memory of all forks", forked.memory, "MiB", cold)
        );
        Ok(())
    })
    .await
}

/// Times of a group of Sandboxes, from the create of the first on, and the memory of all their
/// cgroups in MiB, with the files that they read.
struct Figures {
    answered: Vec<Duration>,
    memory: f64,
}

/// Creates Sandboxes at the same time, and asks each until its program has answered.
async fn group(
    case: &Case,
    name: &str,
    options: &Options,
    snapshot: Option<&str>,
) -> anyhow::Result<Figures> {
    let names: Vec<String> = (0..options.forks)
        .map(|number| format!("{name}-{number}"))
        .collect();
    let began = Instant::now();
    let answered = names.iter().map(async |name| {
        case.create(sandbox(name, options, snapshot)).await?;
        let words = "the Sandbox is Ready";
        let address = wait::object(
            case.sandboxes(),
            name,
            words,
            LIMIT,
            |found: Option<Sandbox>| {
                let status = found.and_then(|found| found.status).unwrap_or_default();
                let ready = torpor_api::conditions::is_true(&status.conditions, "Ready");
                let address = status.pod_ips.first().filter(|_| ready).cloned();
                address.ok_or_else(|| format!("{:?}", status.conditions))
            },
        )
        .await?;
        pool::answer(&address).await.with_context(|| name.clone())?;
        Ok::<_, anyhow::Error>(began.elapsed())
    });
    let answered = try_join_all(answered).await?;
    let mut memory = 0.0;
    for name in &names {
        let pod = case.pods().get(name).await?;
        let record = case.node.sandbox_of(&uid(&pod))?;
        let cgroup = record.cgroup.parent().context("a Pod's cgroup")?;
        memory += memory_mib(cgroup)?;
    }
    Ok(Figures { answered, memory })
}

fn sandbox(name: &str, options: &Options, snapshot: Option<&str>) -> Value {
    let megabytes = options.megabytes.to_string();
    let container = json!({
        "name": setup::MAIN, "image": PYTHON, "imagePullPolicy": "Never",
        "command": ["python3", "-c", pool::PROGRAM, megabytes],
    });
    let container = torpor_tests::pods::with(container, setup::ready_file());
    let mut sandbox = sandboxes::sandbox(name, json!({ "containers": [container] }));
    if let Some(snapshot) = snapshot {
        sandbox["metadata"]["annotations"] = json!({ RESTORE_FROM: snapshot });
    }
    sandbox
}

async fn remove(case: &Case) -> anyhow::Result<()> {
    let (background, all) = (DeleteParams::background(), ListParams::default());
    case.sandboxes()
        .delete_collection(&background, &all)
        .await?;
    wait::none(&case.sandboxes(), "the end of the Sandboxes", LIMIT).await?;
    setup::delete_pods(case).await
}
