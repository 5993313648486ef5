//! The kill test: sandboxes sleep and wake under load while what they stand on is killed, and a client of each checks that
//! its program is never seen in an older state.
//!
//! | module | subject |
//! |---|---|
//! | [`schedule`] | what happens in which cycle: a pure function of a seed |
//! | [`counting`] | what a client knows, and what an answer tells it (pure) |
//! | [`strike`] | kills, and whether one may cost memory |
//! | [`commands`] | those that run for a moment, by their command lines |
//! | [`client`] | asking |
//! | [`lane`] | one sandbox after another, cycle by cycle |
//! | [`trouble`] | what may happen in a cycle, and what may not |
//! | [`tally`] | what came of all of it |

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use futures::FutureExt;
use tokio::sync::{Mutex, Notify};

use crate::agent::Agent;
use crate::case::Case;
use crate::explain;
use crate::swap::Swap;

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

/// A run.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    /// Number of the first cycle.
    pub from: u64,
    pub cycles: u64,
    /// Sandboxes at the same time.
    pub lanes: usize,
    /// No cycle begins later.
    pub time: Option<Duration>,
    /// Who is never killed. What the others do stays what the seed says.
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

/// Runs the plan's cycles, `lanes` at a time, and tells of each when it is over. An error is one of the test itself: what
/// the sandboxes did wrong is in the tally.
pub async fn run(case: &Case, plan: &Plan, tell: impl Fn(&str)) -> anyhow::Result<Tally> {
    let _swap = Swap::on()?;
    let began = Instant::now();
    let in_time = || plan.time.is_none_or(|time| began.elapsed() < time);
    let left: Mutex<VecDeque<u64>> = Mutex::new((plan.from..plan.from + plan.cycles).collect());
    let tally = Mutex::new(Tally::default());
    let common = Common::default();
    let lane = async |number: usize| -> anyhow::Result<()> {
        let mut lane = Lane::begin(case, number, &common).await?;
        // Taken in a statement of its own: a guard in the loop's head would be held for the whole cycle.
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
            tell(&format!(
                "{number:>5} {:>5.1} s  {:<12} {cycle}: {words}",
                took.as_secs_f64(),
                lane.name()
            ));
            let bad = outcome.is_err();
            tally.lock().await.add(number, &cycle, outcome, took);
            if bad {
                tell(&explain::explain(case).await);
                lane.start_over().await?;
            }
        }
        if let Err(trouble) = lane.end().await {
            tell(&format!("{trouble}"));
            tally.lock().await.left_over(trouble);
        }
        Ok(())
    };
    let lanes = futures::future::try_join_all((0..plan.lanes).map(lane));
    tokio::select! {
        done = lanes => done.map(drop)?,
        failed = keep_agent(case, &common.agent_killed) => failed?,
    }
    // The last one that was killed may still be missing.
    let _ = common.agent_killed.notified().now_or_never();
    Agent::replace(case.client()).await?;
    Ok(tally.into_inner())
}

/// The kubelet would wait longer and longer before it starts an agent again that is killed over and over: the test is about
/// what happens then, not about that. Ends only with an error.
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
    fn who_is_spared_changes_nothing_else() {
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
