//! Schedule of the kill test of moves: a pure function of a seed and a number.

use std::fmt;
use std::time::Duration;

use crate::chaos::schedule::{generator, pick};

/// How the sandboxes leave their node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// They are suspended, and resumed where the scheduler may put them.
    Suspend,
    /// They hibernate in place, and their Pods are evicted.
    Drain,
}

/// Part of a move in which something fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Moment {
    /// The sandboxes are saved, and their images uploaded.
    Leaving,
    /// The other node fetches the images.
    Coming,
}

/// Kind of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The S3 server is killed with SIGKILL, and started again.
    StoreKilled,
    /// The S3 server accepts connections and answers nothing (SIGSTOP).
    StoreStopped,
    /// The bucket does not exist.
    BucketGone,
    /// One bit of an object is another one.
    ObjectFlipped,
    /// An object has lost its second half.
    ObjectCut,
    /// The agent of the node that the sandboxes leave.
    OldAgent,
    /// The agent of the node to which they move.
    NewAgent,
    /// All replicas of the controller.
    Controller,
}

impl Fault {
    /// Reports whether the failure lasts until it is put back. The others end by themselves.
    fn lasts(self) -> bool {
        use Fault::{BucketGone, ObjectCut, ObjectFlipped, StoreStopped};
        matches!(self, StoreStopped | BucketGone | ObjectFlipped | ObjectCut)
    }
}

/// One failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strike {
    pub moment: Moment,
    pub fault: Fault,
    /// Time since the moment began.
    pub after: Duration,
    /// Time until what failed is put back, where it does not end by itself.
    pub lasts: Duration,
}

/// One move of all sandboxes from one node to the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Round {
    pub way: Way,
    pub strikes: Vec<Strike>,
}

/// All faults of a moment. An object can be damaged only once the images are uploaded.
pub fn faults(moment: Moment) -> &'static [Fault] {
    use Fault::{
        BucketGone, Controller, NewAgent, ObjectCut, ObjectFlipped, OldAgent, StoreKilled,
        StoreStopped,
    };
    match moment {
        Moment::Leaving => &[StoreKilled, StoreStopped, BucketGone, OldAgent, Controller],
        Moment::Coming => &[
            StoreKilled,
            StoreStopped,
            BucketGone,
            ObjectFlipped,
            ObjectCut,
            NewAgent,
            OldAgent,
            Controller,
        ],
    }
}

/// Latest time of a failure since its moment began, in milliseconds: images of 20 MiB are saved and
/// uploaded, and fetched, in that time.
const LATEST: u64 = 4000;
/// Longest failure in milliseconds.
const LONGEST: u64 = 6000;

impl Round {
    /// Returns the round with this number in the run of this seed.
    pub fn of(seed: u64, number: u64) -> Self {
        let mut random = generator(seed, number);
        let way = match random.u8(..3) {
            0 => Way::Drain,
            _ => Way::Suspend,
        };
        let count = random.usize(1..=3);
        let mut strikes: Vec<Strike> = (0..count)
            .map(|_| {
                let moment = match random.bool() {
                    true => Moment::Leaving,
                    false => Moment::Coming,
                };
                Strike {
                    moment,
                    fault: *pick(&mut random, faults(moment)),
                    after: Duration::from_millis(random.u64(..=LATEST)),
                    lasts: Duration::from_millis(random.u64(..=LONGEST)),
                }
            })
            .collect();
        strikes.sort_by_key(|strike| (strike.moment as u8, strike.after));
        Self { way, strikes }
    }

    /// Returns the failures of one moment, in order.
    pub fn strikes_at(&self, moment: Moment) -> impl Iterator<Item = Strike> {
        let all = self.strikes.iter().copied();
        all.filter(move |strike| strike.moment == moment)
    }
}

impl fmt::Display for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.way)?;
        for Strike {
            moment,
            fault,
            after,
            lasts,
        } in &self.strikes
        {
            write!(f, "; {fault:?} at {moment:?}+{}ms", after.as_millis())?;
            if fault.lasts() {
                write!(f, " for {}ms", lasts.as_millis())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_round_follows_from_its_seed_and_number() {
        let rounds = |seed| (0..50).map(|number| Round::of(seed, number)).collect();
        let (one, again, other): (Vec<Round>, Vec<Round>, Vec<Round>) =
            (rounds(1), rounds(1), rounds(2));
        assert_eq!(one, again);
        assert_ne!(one, other);
    }

    #[test]
    fn every_fault_of_every_moment_comes() {
        let mut missing: HashSet<(Moment, Fault)> = HashSet::new();
        for moment in [Moment::Leaving, Moment::Coming] {
            missing.extend(faults(moment).iter().map(|fault| (moment, *fault)));
        }
        let mut ways = HashSet::new();
        for round in (0..200).map(|number| Round::of(3, number)) {
            ways.insert(round.way);
            for strike in &round.strikes {
                missing.remove(&(strike.moment, strike.fault));
                assert!(faults(strike.moment).contains(&strike.fault), "{round}");
            }
        }
        assert!(missing.is_empty(), "{missing:?}");
        assert_eq!(ways.len(), 2);
    }
}
