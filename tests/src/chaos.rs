//! The kill test: kills the processes below sandboxes that sleep and wake under load.
//!
//! A client of each sandbox checks that it never sees an older state of the sandbox's program.
//!
//! | module | subject |
//! |---|---|
//! | [`schedule`] | events of each cycle: a pure function of a seed |
//! | [`counting`] | state of a client, and its check of an answer (pure) |
//! | [`strike`] | kills, and whether a kill may cost memory |
//! | [`commands`] | commands of short duration, found by their command lines |
//! | [`client`] | requests to a sandbox |
//! | [`lane`] | a sequence of sandboxes, cycle by cycle |
//! | [`trouble`] | results and faults of a cycle |
//! | [`tally`] | results of a run |

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use futures::FutureExt;
use tokio::sync::{Mutex, Notify};

use crate::agent::Agent;
use crate::case::Case;
use crate::explain;
use crate::swap::Swap;
use crate::wait;

pub mod client;
pub mod commands;
pub mod counting;
mod excuses;
pub mod lane;
pub mod schedule;
pub mod strike;
pub mod tally;
pub mod trouble;

use lane::{Common, Lane};
use schedule::{Cycle, Strike, Victim};
use tally::Tally;
use trouble::Trouble;

/// Time in which a shim that containerd has forgotten ends.
const LONE_SHIM_LIMIT: Duration = Duration::from_secs(150);

/// Parameters of a run.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    /// Number of the first cycle.
    pub from: u64,
    pub cycles: u64,
    /// Number of sandboxes at the same time.
    pub lanes: usize,
    /// Time after which no cycle begins.
    pub time: Option<Duration>,
    /// Victims that are never killed. All else stays as the seed determines it.
    pub spared: Vec<Victim>,
}

impl Plan {
    fn cycle(&self, number: u64) -> Cycle {
        let mut cycle = Cycle::of(self.seed, number);
        let is_spared = |strike: &Strike| self.spared.contains(&strike.victim);
        cycle.strikes.retain(|strike| !is_spared(strike));
        cycle
    }
}

/// Runs the plan's cycles, `lanes` at a time, and passes a line about each to `report`.
///
/// An error is a fault of the test itself. Faults of the sandboxes are in the tally.
pub async fn run(case: &Case, plan: &Plan, report: impl Fn(&str)) -> anyhow::Result<Tally> {
    let _swap = Swap::on()?;
    let began = Instant::now();
    let in_time = || plan.time.is_none_or(|time| began.elapsed() < time);
    let left: Mutex<VecDeque<u64>> = Mutex::new((plan.from..plan.from + plan.cycles).collect());
    let tally = Mutex::new(Tally::default());
    let common = Common::default();
    let lane = async |number: usize| -> anyhow::Result<()> {
        let mut lane = Lane::begin(case, number, &common).await?;
        // The guard is taken in its own statement: in the loop's head it would be held for the
        // cycle.
        let next = async || {
            let number = left.lock().await.pop_front();
            number.filter(|_| in_time())
        };
        while let Some(number) = next().await {
            let cycle = plan.cycle(number);
            let at = Instant::now();
            let outcome = lane.cycle(&cycle).await;
            let took = at.elapsed();
            let words = match &outcome {
                Ok(done) => format!("{done}"),
                Err(trouble) => trouble.to_string(),
            };
            report(&format!(
                "{number:>5} {:>5.1} s  {:<12} {cycle}: {words}",
                took.as_secs_f64(),
                lane.name()
            ));
            let bad = outcome.is_err();
            tally.lock().await.add(number, &cycle, outcome, took);
            if bad {
                report(&explain::explain(case).await);
                println!("{}", explain::pod(case, lane.name()).await);
                lane.start_over().await?;
            }
        }
        if let Err(trouble) = lane.end().await {
            report(&format!("{trouble}"));
            tally.lock().await.left_over(trouble);
        }
        Ok(())
    };
    let lanes = futures::future::try_join_all((0..plan.lanes).map(lane));
    tokio::select! {
        done = lanes => done.map(drop)?,
        failed = keep_agent(case, &common.agent_killed) => failed?,
    }
    // The last agent that was killed may still be missing.
    let _ = common.agent_killed.notified().now_or_never();
    Agent::replace(case.client()).await?;
    let mut tally = tally.into_inner();
    if let Err(trouble) = no_shim_without_sandbox(case).await {
        report(&format!("{trouble}"));
        tally.left_over(trouble);
    }
    Ok(tally)
}

/// Checks that no shim stays for which there is no sandbox.
///
/// containerd that is killed at the start of a shim forgets it. Such a shim ends by itself within a
/// minute.
async fn no_shim_without_sandbox(case: &Case) -> Result<(), Trouble> {
    let none = async || {
        let left = case.node.shims_without_sandbox()?;
        wait::holds(left.is_empty(), || format!("{left:?}"))
    };
    wait::until("each shim has a sandbox", LONE_SHIM_LIMIT, none)
        .await
        .map_err(|left| Trouble::LeftOver(format!("{left:#}")))
}

/// Replaces the agent after each kill; ends only with an error.
///
/// The kubelet would restart an agent that is killed repeatedly with a growing back-off, which is
/// not a subject of the test.
async fn keep_agent(case: &Case, killed: &Notify) -> anyhow::Result<()> {
    loop {
        killed.notified().await;
        Agent::replace(case.client()).await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spared_victim_changes_nothing_else() {
        let (seed, from, cycles, lanes, time) = (3, 0, 500, 1, None);
        let spared = vec![Victim::Containerd];
        let plan = Plan {
            seed,
            from,
            cycles,
            lanes,
            time,
            spared,
        };
        let mut left_out = 0;
        for number in 0..cycles {
            let (all, mut some) = (Cycle::of(seed, number), plan.cycle(number));
            let others = all
                .strikes
                .iter()
                .filter(|s| s.victim != Victim::Containerd);
            assert!(some.strikes.iter().eq(others), "{all}");
            left_out += all.strikes.len() - some.strikes.len();
            some.strikes.clone_from(&all.strikes);
            assert_eq!(some, all);
        }
        assert!(left_out > 0);
    }
}
