//! Load on the controller: claims against a control plane with fake nodes. In the same run a bare
//! client makes the same writes without a controller.
//!
//! For each load `hack/cluster bench` starts a control plane from nothing (etcd, apiserver,
//! controller-manager, scheduler, 100 nodes of kwok). All of it shares this machine's processors.

use std::{
    collections::HashMap,
    fs,
    path::PathBuf,
    process::{Command as SyncCommand, Stdio},
};

use anyhow::{Context as _, ensure};
use clap::Args;
use tokio::process::Command;
use torpor_tests::repository;

use crate::{block_on, cargo, stop::Stop};

mod audit;
mod bare;
mod board;
mod controller;
mod counters;
mod load;
mod objects;
mod report;
mod run;

use load::Load;
use run::Setup;

/// Priority of the load and the controller: that of the control plane (`benchNice` in
/// hack/devcluster/bench.go). Other work on this machine is measured as little as possible.
const NICE: i32 = -15;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Loads; each takes about a minute
    ///
    /// 3, 10, 20, 40: that many claims a second, pools as upstream's stress tool has them, each
    /// claim deleted after 5 s, so that refill and deletion go on beside; burst: 150 claims at
    /// once, a pool of 150; gate: upstream's own gate, 75 claims a second for 10 s, a pool of 1050;
    /// memory: a pool of 5000, the controller's resident memory
    #[arg(default_values = ["3", "10", "20", "40", "burst", "gate", "memory"])]
    loads: Vec<Load>,
    /// Seconds during which claims come at random
    #[arg(long, default_value_t = 30)]
    seconds: u32,
    /// Further arguments of the controller, separated by spaces
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    controller_args: String,
    /// Directory that gets a JSON file and the controller's log of each load, and all results in
    /// claims.json [default: bench-claims in cargo's target]
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Runs the loads one after the other and prints a table of their results.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let build = ["build", "-p", "torpor-controller"];
    let controller = block_on(cargo::build(&build, "torpor-controller"))?;
    // Threads that are started from here on inherit the priority.
    raise_priority()?;
    block_on(async {
        let mut stop = Stop::listen()?;
        stop.unless(Box::pin(loads(options, controller))).await
    })
}

async fn loads(options: &Options, controller: PathBuf) -> anyhow::Result<()> {
    let out = options
        .out
        .clone()
        .unwrap_or_else(|| cargo::target().join("bench-claims"));
    fs::create_dir_all(&out)?;
    let _plane = ControlPlane;
    let mut outcomes = Vec::new();
    for load in &options.loads {
        let environment = ControlPlane::up().await?;
        let setup = Setup {
            load: load.clone(),
            seconds: options.seconds,
            controller: controller.clone(),
            controller_args: options.controller_args.clone(),
            controller_log: out.join(format!("{}.controller.log", load.name)),
            kubeconfig: environment.path("KUBECONFIG")?,
            controller_kubeconfig: environment.path("CONTROLLER_KUBECONFIG")?,
            audit_log: environment.path("AUDIT_LOG")?,
            processes: environment.get("PROCESSES")?.to_owned(),
        };
        let outcome = run::run(&setup).await.with_context(|| {
            let log = setup.controller_log.display();
            format!("load {} failed; the controller's log is {log}", load.name)
        })?;
        let text = serde_json::to_string_pretty(&outcome)?;
        fs::write(out.join(format!("{}.json", load.name)), text)?;
        eprintln!("load {} is done", load.name);
        outcomes.push(outcome);
    }
    print!("{}", report::table(&outcomes));
    let all = out.join("claims.json");
    fs::write(&all, serde_json::to_string_pretty(&outcomes)? + "\n")?;
    eprintln!("results: {}", all.display());
    Ok(())
}

/// Raises the priority of this thread, and of this session where the kernel weighs sessions against
/// one another.
fn raise_priority() -> anyhow::Result<()> {
    rustix::process::setpriority_process(None, NICE).context("cannot raise the priority")?;
    let autogroup = "/proc/self/autogroup";
    if fs::exists(autogroup)? {
        fs::write(autogroup, NICE.to_string()).context(autogroup)?;
    }
    Ok(())
}

/// The control plane of `hack/cluster bench`, which ends when this is dropped.
#[derive(Debug)]
struct ControlPlane;

impl ControlPlane {
    /// Starts it from nothing.
    async fn up() -> anyhow::Result<Environment> {
        cluster(&["bench", "up"]).await?;
        Environment::parse(&cluster(&["bench", "env"]).await?)
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        let program = repository().join("hack/cluster");
        let done = SyncCommand::new(program).args(["bench", "down"]).status();
        if !done.as_ref().is_ok_and(|status| status.success()) {
            eprintln!("the control plane may still run: hack/cluster bench down: {done:?}");
        }
    }
}

/// Runs `hack/cluster`; returns its output.
async fn cluster(args: &[&str]) -> anyhow::Result<String> {
    let ran = Command::new(repository().join("hack/cluster"))
        .args(args)
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .output()
        .await?;
    let (out, words) = (String::from_utf8(ran.stdout)?, args.join(" "));
    ensure!(
        ran.status.success(),
        "hack/cluster {words}: {}: {out}",
        ran.status
    );
    Ok(out)
}

/// Variables that `hack/cluster bench env` prints as a shell's `export`.
#[derive(Debug)]
struct Environment(HashMap<String, String>);

impl Environment {
    fn parse(text: &str) -> anyhow::Result<Self> {
        let pairs = text.trim().strip_prefix("export ").context("no export")?;
        let pairs = pairs
            .split_whitespace()
            .filter_map(|pair| pair.split_once('='));
        let pairs = pairs.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Ok(Self(pairs.collect()))
    }

    fn get(&self, name: &str) -> anyhow::Result<&str> {
        let value = self.0.get(name);
        Ok(value.with_context(|| format!("hack/cluster bench env prints no {name}"))?)
    }

    fn path(&self, name: &str) -> anyhow::Result<PathBuf> {
        Ok(self.get(name)?.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_read_from_a_shells_export() {
        let text = "export KUBECONFIG=/a/b PROCESSES=etcd=12,apiserver=34\n";
        let environment = Environment::parse(text).expect("an export");
        assert_eq!(
            environment.path("KUBECONFIG").expect("a path"),
            PathBuf::from("/a/b")
        );
        let processes = environment.get("PROCESSES").expect("processes");
        assert_eq!(processes, "etcd=12,apiserver=34");
        let missing = environment
            .get("AUDIT_LOG")
            .expect_err("a variable that is missing");
        assert!(missing.to_string().contains("AUDIT_LOG"));
    }
}
