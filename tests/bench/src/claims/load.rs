//! The loads, and the arrival of their claims.

use std::{str::FromStr, time::Duration};

/// Time for which a claim is held, once it is Ready.
pub(crate) const DWELL: Duration = Duration::from_secs(5);
/// Seed of the arrivals, which are the same in every run.
const SEED: u64 = 20_261_121;

/// Arrival of claims.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Arrival {
    /// At random (Poisson), this many a second on average; each claim is deleted [`DWELL`] after it
    /// is Ready.
    Rate(f64),
    /// At even distances, this many a second for so long; the claims stay.
    Steady {
        rate: f64,
        seconds: u32,
    },
    AtOnce(usize),
    /// No claims: only the pools.
    Never,
}

/// Pools, each in a namespace of its own, and the claims for them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Load {
    pub name: &'static str,
    pub pools: usize,
    pub members: i32,
    pub arrival: Arrival,
}

/// Loads with the rates and pool sizes of upstream's stress tool (a pool holds what ten seconds ask
/// for), and of its scalability test.
const LOADS: [Load; 7] = [
    Load {
        name: "3",
        pools: 1,
        members: 30,
        arrival: Arrival::Rate(3.0),
    },
    Load {
        name: "10",
        pools: 2,
        members: 50,
        arrival: Arrival::Rate(10.0),
    },
    Load {
        name: "20",
        pools: 2,
        members: 100,
        arrival: Arrival::Rate(20.0),
    },
    Load {
        name: "40",
        pools: 2,
        members: 200,
        arrival: Arrival::Rate(40.0),
    },
    Load {
        name: "burst",
        pools: 1,
        members: 150,
        arrival: Arrival::AtOnce(150),
    },
    Load {
        name: "gate",
        pools: 1,
        members: 1050,
        arrival: Arrival::Steady {
            rate: 75.0,
            seconds: 10,
        },
    },
    Load {
        name: "memory",
        pools: 1,
        members: 5000,
        arrival: Arrival::Never,
    },
];

impl FromStr for Load {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = LOADS.iter().find(|load| load.name == name);
        found.cloned().ok_or_else(|| {
            let names: Vec<&str> = LOADS.iter().map(|load| load.name).collect();
            format!("no such load; there are {}", names.join(", "))
        })
    }
}

impl Arrival {
    /// Returns the time at which each claim comes, counted from the beginning. `seconds` is how
    /// long those at a random rate come.
    pub(crate) fn times(self, seconds: u32) -> Vec<Duration> {
        match self {
            Self::Never => Vec::new(),
            Self::AtOnce(count) => vec![Duration::ZERO; count],
            Self::Steady { rate, seconds } => {
                let mut times = Vec::new();
                let mut at = 0.0;
                while at < f64::from(seconds) - 1e-9 {
                    times.push(Duration::from_secs_f64(at));
                    at += 1.0 / rate;
                }
                times
            }
            Self::Rate(rate) => {
                let mut random = fastrand::Rng::with_seed(SEED);
                let mut times = Vec::new();
                let mut at = 0.0;
                loop {
                    // The number is never 0, which has no logarithm.
                    at -= (1.0 - random.f64()).ln() / rate;
                    if at >= f64::from(seconds) {
                        return times;
                    }
                    times.push(Duration::from_secs_f64(at));
                }
            }
        }
    }

    /// Returns the time after which a Ready claim is deleted, if claims are deleted while others
    /// come.
    pub(crate) fn dwell(self) -> Option<Duration> {
        matches!(self, Self::Rate(_)).then_some(DWELL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_arrivals_have_their_rate_and_are_the_same_each_time() {
        let times = Arrival::Rate(20.0).times(60);
        assert!((1100..1300).contains(&times.len()), "{}", times.len());
        assert!(times.is_sorted());
        assert!(times.last().is_some_and(|last| last.as_secs() < 60));
        assert_eq!(times, Arrival::Rate(20.0).times(60));
    }

    #[test]
    fn steady_arrivals_are_as_many_as_asked_for() {
        let steady = Arrival::Steady {
            rate: 75.0,
            seconds: 10,
        };
        assert_eq!(steady.times(60).len(), 750);
    }

    #[test]
    fn loads_are_found_by_name() {
        assert_eq!("gate".parse::<Load>().unwrap().members, 1050);
        assert!("x".parse::<Load>().unwrap_err().contains("burst"));
    }
}
