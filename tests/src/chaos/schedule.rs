//! Schedule of the kill test: a pure function of a seed and a number.

use std::fmt;
use std::time::Duration;

/// Kind of a sandbox's sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Depth {
    /// By itself, because the sandbox is idle: paused, saved, its memory in swap.
    Doze,
    /// In place, on request.
    Hibernate,
    /// In place and by itself, because the sandbox is idle.
    Idle,
    /// In place and by itself, out of a doze that has lasted.
    Deepen,
    /// The sandbox's Pod is deleted, and another one continues from its image.
    Suspend,
}

impl Depth {
    /// Reports whether the sandbox falls asleep without a request, after its idle time.
    pub fn is_by_itself(self) -> bool {
        matches!(self, Self::Doze | Self::Idle | Self::Deepen)
    }
}

/// Event that ends a sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Waker {
    /// The client's next question.
    Packet,
    /// `kubectl exec`.
    Exec,
    /// The request to sleep is withdrawn.
    Api,
}

/// Part of a cycle in which something is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Moment {
    FallingAsleep,
    Asleep,
    Waking,
}

/// Process that is killed, with SIGKILL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Victim {
    Agent,
    Containerd,
    /// The Pod's shim, which holds packets and starts wakes.
    Shim,
    /// gVisor's kernel.
    Sentry,
    /// One of gVisor's file servers.
    Gofer,
    /// The shim's command that wakes the sandbox, or that takes the steps of a plan: a save, an
    /// end.
    Program,
    /// The shim's command that creates, starts or deletes a container of the Pod.
    Command,
    /// A command of runsc for a container of the Pod (create, restore, delete).
    Runsc,
}

impl Victim {
    /// Reports whether the victim runs only for moments, so that a kill waits for it a little.
    pub fn is_fleeting(self) -> bool {
        matches!(self, Self::Command | Self::Runsc)
    }
}

/// One kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strike {
    pub moment: Moment,
    pub victim: Victim,
    /// Time since the moment began.
    pub after: Duration,
}

/// One sleep of one sandbox, and its wake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cycle {
    pub depth: Depth,
    pub waker: Waker,
    /// The client goes on asking while the sandbox falls asleep.
    pub busy: bool,
    /// Time, since the first sign, of the one question to a sandbox that falls asleep by itself:
    /// more questions would keep it awake.
    pub question: Option<Duration>,
    /// The client keeps its connection over the sleep, instead of making another one.
    pub same_connection: bool,
    pub strikes: Vec<Strike>,
    /// Afterwards the sandbox is deleted and the node searched for remains.
    pub last: bool,
}

/// Returns the latest time of a kill, in milliseconds since its moment began.
fn longest(depth: Depth, moment: Moment) -> u64 {
    match (moment, depth) {
        // From the first sign: pause, checkpoint, commit and reclaim, each a plan of its own.
        (Moment::FallingAsleep, Depth::Doze) => 600,
        // From the request: until the controller and the agent have seen it, and a save.
        (Moment::FallingAsleep, Depth::Hibernate) => 900,
        // The same, and until the Pod is deleted.
        (Moment::FallingAsleep, Depth::Suspend) => 4000,
        // From the first sign: the same save, without a request.
        (Moment::FallingAsleep, Depth::Idle) => 600,
        // From the ledger entry of the sleep: the image exists, and the sandbox's processes end.
        (Moment::FallingAsleep, Depth::Deepen) => 300,
        (Moment::Asleep, _) => 300,
        (Moment::Waking, Depth::Doze) => 100,
        (Moment::Waking, Depth::Hibernate | Depth::Idle | Depth::Deepen) => 600,
        // A new Pod.
        (Moment::Waking, Depth::Suspend) => 3000,
    }
}

/// Returns the victims that exist in a moment.
pub fn victims(depth: Depth, moment: Moment) -> &'static [Victim] {
    use Victim::{Agent, Command, Containerd, Gofer, Program, Runsc, Sentry, Shim};
    match (depth, moment) {
        (Depth::Suspend, Moment::Asleep) => &[Agent, Containerd],
        (Depth::Hibernate | Depth::Idle | Depth::Deepen, Moment::Asleep) => {
            &[Agent, Containerd, Shim]
        }
        (Depth::Doze, Moment::Asleep) => &[Agent, Containerd, Shim, Sentry, Gofer],
        (Depth::Doze, Moment::FallingAsleep | Moment::Waking) => {
            &[Agent, Containerd, Shim, Sentry, Gofer, Program]
        }
        (
            Depth::Hibernate | Depth::Idle | Depth::Deepen,
            Moment::FallingAsleep | Moment::Waking,
        ) => &[Agent, Containerd, Shim, Sentry, Gofer, Program, Runsc],
        (Depth::Suspend, Moment::FallingAsleep | Moment::Waking) => &[
            Agent, Containerd, Shim, Sentry, Gofer, Program, Runsc, Command,
        ],
    }
}

impl Cycle {
    /// Returns the cycle with this number in the run of this seed.
    pub fn of(seed: u64, number: u64) -> Self {
        let mut random = generator(seed, number);
        let depth = *pick(
            &mut random,
            &[
                Depth::Doze,
                Depth::Doze,
                Depth::Hibernate,
                Depth::Hibernate,
                Depth::Suspend,
                Depth::Suspend,
                Depth::Idle,
                Depth::Deepen,
            ],
        );
        let waker = match depth {
            Depth::Suspend => Waker::Api,
            Depth::Doze | Depth::Hibernate | Depth::Idle | Depth::Deepen => *pick(
                &mut random,
                &[Waker::Packet, Waker::Packet, Waker::Exec, Waker::Api],
            ),
        };
        let busy = !depth.is_by_itself() && random.u8(..3) == 0;
        let asks = depth.is_by_itself() && random.bool();
        let question = asks.then(|| {
            let most = longest(depth, Moment::FallingAsleep);
            Duration::from_millis(random.u64(..=most))
        });
        let same_connection = random.bool();
        let count = *pick(&mut random, &[0, 1, 1, 1, 1, 2, 2]);
        let mut strikes: Vec<Strike> = (0..count).map(|_| strike(&mut random, depth)).collect();
        strikes.sort_by_key(|strike| (strike.moment as u8, strike.after));
        Self {
            depth,
            waker,
            busy,
            question,
            same_connection,
            strikes,
            last: random.u8(..4) == 0,
        }
    }

    /// Returns the kills of one moment, in order.
    pub fn strikes_at(&self, moment: Moment) -> impl Iterator<Item = Strike> {
        self.strikes
            .iter()
            .copied()
            .filter(move |strike| strike.moment == moment)
    }

    /// Reports whether the client must not notice the cycle: no process of the sandbox is killed,
    /// and its Pod stays.
    pub fn is_unnoticeable(&self) -> bool {
        let of_sandbox =
            |strike: &Strike| !matches!(strike.victim, Victim::Agent | Victim::Containerd);
        self.depth != Depth::Suspend && !self.strikes.iter().any(of_sandbox)
    }
}

fn strike(random: &mut fastrand::Rng, depth: Depth) -> Strike {
    let moment = *pick(
        random,
        &[Moment::FallingAsleep, Moment::Asleep, Moment::Waking],
    );
    let victim = *pick(random, victims(depth, moment));
    // Early times, when most happens, are more frequent.
    let longest = longest(depth, moment);
    let after = random.u64(..=longest).min(random.u64(..=longest));
    Strike {
        moment,
        victim,
        after: Duration::from_millis(after),
    }
}

/// Returns the generator of one number of a seed's run.
///
/// Neighbouring numbers must not give neighbouring generators: a Weyl step, as in SplitMix64.
pub(crate) fn generator(seed: u64, number: u64) -> fastrand::Rng {
    let step = number.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    fastrand::Rng::with_seed(seed.wrapping_add(step))
}

pub(crate) fn pick<'a, T>(random: &mut fastrand::Rng, from: &'a [T]) -> &'a T {
    &from[random.usize(..from.len())]
}

impl fmt::Display for Cycle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            depth,
            waker,
            busy,
            question,
            same_connection,
            strikes,
            last,
        } = self;
        write!(f, "{depth:?} until {waker:?}")?;
        if let Some(after) = question {
            write!(f, ", asked at +{}ms", after.as_millis())?;
        }
        for (holds, words) in [(busy, "busy"), (same_connection, "kept"), (last, "last")] {
            if *holds {
                write!(f, ", {words}")?;
            }
        }
        for strike in strikes {
            let Strike {
                moment,
                victim,
                after,
            } = strike;
            write!(f, "; {victim:?} at {moment:?}+{}ms", after.as_millis())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const SEED: u64 = 7;

    fn all() -> impl Iterator<Item = Cycle> {
        (0..5000).map(|number| Cycle::of(SEED, number))
    }

    #[test]
    fn a_cycle_follows_from_its_seed_and_number() {
        for number in 0..100 {
            assert_eq!(Cycle::of(SEED, number), Cycle::of(SEED, number));
        }
        let other: Vec<Cycle> = (0..100).map(|number| Cycle::of(SEED + 1, number)).collect();
        assert_ne!(all().take(100).collect::<Vec<_>>(), other);
        // A cycle in an old report must stay repeatable.
        assert_eq!(
            Cycle::of(1, 0).to_string(),
            "Suspend until Api, busy, kept, last; Command at FallingAsleep+332ms; Agent at FallingAsleep+2845ms"
        );
    }

    #[test]
    fn only_victims_that_exist_are_killed() {
        for cycle in all() {
            for strike in &cycle.strikes {
                assert!(
                    victims(cycle.depth, strike.moment).contains(&strike.victim),
                    "{cycle}"
                );
                let most = longest(cycle.depth, strike.moment);
                assert!(strike.after <= Duration::from_millis(most), "{cycle}");
            }
        }
    }

    #[test]
    fn impossible_cycles_are_never_scheduled() {
        for cycle in all() {
            let suspended = cycle.depth == Depth::Suspend;
            assert!(!suspended || cycle.waker == Waker::Api, "{cycle}");
            // A sandbox that is asked all the time is not idle.
            assert!(!cycle.depth.is_by_itself() || !cycle.busy, "{cycle}");
            let most = longest(cycle.depth, Moment::FallingAsleep);
            let within = |after: Duration| {
                cycle.depth.is_by_itself() && after <= Duration::from_millis(most)
            };
            assert!(cycle.question.is_none_or(within), "{cycle}");
        }
    }

    #[test]
    fn every_kill_at_every_moment_of_every_sleep_comes() {
        let mut missing: HashSet<(Depth, Moment, Victim)> = HashSet::new();
        let depths = [
            Depth::Doze,
            Depth::Hibernate,
            Depth::Suspend,
            Depth::Idle,
            Depth::Deepen,
        ];
        for depth in depths {
            for moment in [Moment::FallingAsleep, Moment::Asleep, Moment::Waking] {
                missing.extend(victims(depth, moment).iter().map(|v| (depth, moment, *v)));
            }
        }
        for cycle in all() {
            for strike in &cycle.strikes {
                missing.remove(&(cycle.depth, strike.moment, strike.victim));
            }
        }
        assert_eq!(missing, HashSet::new());
        assert!(all().any(|cycle| cycle.strikes.len() > 1));
        assert!(all().any(|cycle| cycle.strikes.is_empty() && cycle.busy));
        for depth in depths.into_iter().filter(|depth| depth.is_by_itself()) {
            for kills in [false, true] {
                let asked = |cycle: &Cycle| {
                    cycle.depth == depth
                        && cycle.question.is_some()
                        && kills != cycle.strikes.is_empty()
                };
                assert!(all().any(|cycle| asked(&cycle)), "{depth:?} {kills}");
            }
        }
    }
}
