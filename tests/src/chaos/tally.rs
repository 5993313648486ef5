//! Results of a run.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::schedule::Cycle;
use super::trouble::{Done, Trouble};

/// Results of all cycles of a run.
#[derive(Debug, Default)]
pub struct Tally {
    cycles: Vec<Duration>,
    /// Kills by victim: those that found it, and those for which it did not run.
    kills: BTreeMap<String, (u64, u64)>,
    depths: BTreeMap<String, u64>,
    /// Number of programs that were killed awake and started anew.
    started_anew: u64,
    troubles: Vec<(Option<u64>, Trouble)>,
}

impl Tally {
    /// Adds a cycle.
    pub fn add(
        &mut self,
        number: u64,
        cycle: &Cycle,
        outcome: Result<Done, Trouble>,
        took: Duration,
    ) {
        self.cycles.push(took);
        *self.depths.entry(format!("{:?}", cycle.depth)).or_default() += 1;
        match outcome {
            Ok(done) => {
                for (victim, hit) in done.kills {
                    let (hits, misses) = self.kills.entry(format!("{victim:?}")).or_default();
                    *(if hit { hits } else { misses }) += 1;
                }
                self.started_anew += done.started_anew;
            }
            Err(trouble) => self.troubles.push((Some(number), trouble)),
        }
    }

    /// Adds what was left over at the end of the run.
    pub fn left_over(&mut self, trouble: Trouble) {
        self.troubles.push((None, trouble));
    }

    /// Returns the number of cycles that were run.
    pub fn cycles(&self) -> usize {
        self.cycles.len()
    }

    /// Returns the number of kills that found their victim.
    pub fn kills(&self) -> u64 {
        self.kills.values().map(|(hits, _)| hits).sum()
    }

    /// Reports whether there was no trouble.
    pub fn is_clean(&self) -> bool {
        self.troubles.is_empty()
    }

    fn count(&self, kind: impl Fn(&Trouble) -> bool) -> usize {
        self.troubles.iter().filter(|(_, t)| kind(t)).count()
    }

    fn percentile(&self, percent: usize) -> f64 {
        let mut sorted = self.cycles.clone();
        sorted.sort();
        let at = sorted.len().saturating_sub(1) * percent / 100;
        sorted.get(at).map_or(0.0, Duration::as_secs_f64)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let depths: Vec<String> = self
            .depths
            .iter()
            .map(|(depth, n)| format!("{n} {depth}"))
            .collect();
        writeln!(
            f,
            "{} cycles ({}), each {:.1} s in the middle, {:.1} s at 99 %, {:.1} s at most",
            self.cycles.len(),
            depths.join(", "),
            self.percentile(50),
            self.percentile(99),
            self.percentile(100),
        )?;
        let kills: Vec<String> = (self.kills.iter())
            .map(|(victim, (hits, misses))| format!("{victim} {hits} (+{misses} not there)"))
            .collect();
        writeln!(f, "{} kills: {}", self.kills(), kills.join(", "))?;
        writeln!(
            f,
            "{} times the program was killed awake and started anew",
            self.started_anew
        )?;
        for (number, trouble) in &self.troubles {
            let number = number.map_or_else(|| "at the end".to_owned(), |n| format!("cycle {n}"));
            writeln!(f, "{number}: {trouble}")?;
        }
        write!(
            f,
            "{} lost, {} cut off, {} stuck, {} left over, {} other",
            self.count(|t| matches!(t, Trouble::Lost(_))),
            self.count(|t| matches!(t, Trouble::CutOff(_))),
            self.count(|t| matches!(t, Trouble::Stuck(_))),
            self.count(|t| matches!(t, Trouble::LeftOver(_))),
            self.count(|t| matches!(t, Trouble::Broken(_))),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chaos::schedule::Victim;

    #[test]
    fn a_tally_is_clean_until_something_was_wrong() {
        let mut tally = Tally::default();
        let cycle = Cycle::of(1, 0);
        let done = Done {
            kills: vec![(Victim::Agent, true), (Victim::Agent, false)],
            started_anew: 1,
        };
        tally.add(0, &cycle, Ok(done), Duration::from_secs(2));
        assert!(tally.is_clean());
        assert_eq!((tally.cycles(), tally.kills()), (1, 1));
        let stuck = Trouble::Stuck("no answer".to_owned());
        tally.add(1, &cycle, Err(stuck), Duration::from_secs(9));
        assert!(!tally.is_clean());
        let words = tally.to_string();
        for expected in [
            "2 cycles",
            "Agent 1 (+1 not there)",
            "cycle 1: stuck: no answer",
            "0 lost, 0 cut off, 1 stuck, 0 left over, 0 other",
        ] {
            assert!(words.contains(expected), "{expected:?} in {words}");
        }
    }
}
