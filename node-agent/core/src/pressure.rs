//! The choice of the sandbox that sleeps when the node is short of memory or swap.
//!
//! One sandbox at a time is requested to sleep ([`Ask`]): the one that has been idle longest. It
//! falls asleep, or turns out to be in use. After a pause in which the node's figures can follow,
//! the next sandbox is chosen. A request only shortens the idle time of the sandbox
//! ([`Ask::shorten`]): the planner determines as ever whether the sandbox is in use, so that work
//! in progress is not cut off.
//!
//! Node short of memory: an awake sandbox dozes where it may and while there is swap left; else it
//! hibernates. If no awake sandbox is left to choose, a dozing sandbox hibernates, because its
//! pages may be in compressed memory. Node short of swap: a dozing sandbox hibernates.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;

use crate::ids::PodUid;
pub use crate::shortage::{Pressure, Resource};
use crate::state::{Desired, Live, Observed, PodPresence, Power, SleepAfter};
use crate::time::later;

/// Figures of the node's memory and swap.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Readings {
    /// Bytes.
    pub memory_total: u64,
    /// Bytes that programs could receive without other memory being pushed out.
    pub memory_available: u64,
    /// Bytes; 0: the node has no swap.
    pub swap_total: u64,
    /// Bytes.
    pub swap_free: u64,
    /// Percent of the last ten seconds in which some program waited for memory (pressure stall
    /// information); `None`: the kernel has no such figure.
    pub stalled: Option<f64>,
}

/// The limits at which a node is short, in percent, and the times of the requests. `None`: that
/// figure is not checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The node is short while less memory than this is available.
    pub available: Option<u8>,
    /// The node is short while more of the time than this is stalled.
    pub stalled: Option<u8>,
    /// The node is short while less swap than this is free.
    pub swap_free: Option<u8>,
    /// Shortest idle time of a sandbox that is requested to sleep.
    pub idle: Duration,
    /// Pause between two requests.
    pub settle: Duration,
    /// Time that a sandbox has to fall asleep. Afterwards the next sandbox is requested, and this
    /// one again after ten times as long.
    pub answer: Duration,
}

/// A request to one sandbox to sleep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    pub pod: PodUid,
    pub short_of: Resource,
    /// The sandbox is to doze; else to hibernate.
    pub doze: bool,
    at: Timestamp,
}

impl Ask {
    /// Returns `desired` with this request: the sandbox sleeps once it has been idle for `idle`.
    pub fn shorten(&self, desired: Desired, idle: Duration) -> Desired {
        let earlier = |own: Option<Duration>| Some(own.map_or(idle, |own| own.min(idle)));
        let SleepAfter { doze, hibernate } = desired.sleep;
        let sleep = match self.doze {
            true if desired.pressure.never_dozes => desired.sleep,
            false if desired.pressure.never_hibernates => desired.sleep,
            true => SleepAfter {
                doze: earlier(doze),
                hibernate,
            },
            false => SleepAfter {
                doze,
                hibernate: earlier(hibernate),
            },
        };
        let pressure = Pressure {
            short_of: Some(self.short_of),
            ..desired.pressure
        };
        Desired {
            sleep,
            pressure,
            ..desired
        }
    }
}

/// A sandbox that could sleep, or sleep deeper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    pub pod: PodUid,
    pub idle_since: Timestamp,
    pub dozes: bool,
    /// The sandbox may doze and the node can push memory out.
    pub may_doze: bool,
    /// No annotation switches hibernation off for the sandbox.
    pub may_hibernate: bool,
}

/// Returns the sandbox as a candidate for sleep, if its request and its observation allow it.
pub fn candidate(desired: &Desired, observed: &Observed) -> Option<Candidate> {
    let is_to_run = desired.pod == PodPresence::Present && desired.target() == Power::Awake;
    let unsaved = observed.dozes_unsaved && observed.capable.is_err();
    let able = (observed.capable.is_ok() || unsaved && observed.can_doze.is_ok())
        && observed.ledger.is_ok()
        && observed.idle_known.is_ok()
        && observed.sessions == 0
        && !observed.busy;
    let dozes = observed.live == Live::Paused && observed.doze.is_some_and(|doze| doze.reclaimed);
    let may_doze = (desired.sleep.doze.is_some() || unsaved && !desired.pressure.never_dozes)
        && observed.can_doze.is_ok();
    let may_hibernate = desired.pressure.may_hibernate();
    // A sandbox that dozes as deep as its runtime or its annotations permit can free no more.
    let gives = match dozes {
        true => may_hibernate && !unsaved,
        false => (may_doze || may_hibernate) && observed.live == Live::Running && desired.ready,
    };
    let fits = desired.pressure.may && is_to_run && able && gives;
    fits.then_some(Candidate {
        pod: desired.pod_uid.clone(),
        idle_since: observed.idle_since?,
        dozes,
        may_doze,
        may_hibernate,
    })
}

/// The state that is kept between the readings.
#[derive(Debug, Clone, Default)]
pub struct Watch {
    /// The resources that the node is short of, each with the figures of the moment in which the
    /// shortage began, in words.
    short: BTreeMap<Resource, String>,
    asked: Option<Ask>,
    /// Time at which the last request ended: its sandbox slept, or was given up.
    settled: Option<Timestamp>,
    /// Sandboxes that did not fall asleep when requested, with the end of their request.
    refused: BTreeMap<PodUid, Timestamp>,
}

impl Watch {
    /// Records the node's figures. A shortage lasts until there is half as much again as the limit,
    /// or until half as much time is stalled.
    pub fn read(&mut self, readings: &Readings, limits: &Limits) {
        let available = percent(readings.memory_available, readings.memory_total);
        let free = percent(readings.swap_free, readings.swap_total);
        let memory = self.short.contains_key(&Resource::Memory);
        let swap = self.short.contains_key(&Resource::Swap);
        let below = |found: Option<f64>, limit: Option<u8>, already: bool| {
            let (found, limit) = found.zip(limit)?;
            let limit = f64::from(limit);
            let until = if already { limit * 1.5 } else { limit };
            (found < until).then_some((found, limit))
        };
        let stalled = |already: bool| {
            let (found, limit) = readings.stalled.zip(limits.stalled)?;
            let limit = f64::from(limit);
            let until = if already { limit / 2.0 } else { limit };
            (found > until).then_some((found, limit))
        };
        let words = below(available, limits.available, memory)
            .map(|(found, limit)| format!("{found:.0} % of the node's memory is available; the limit is {limit:.0} %"))
            .or_else(|| {
                let (found, limit) = stalled(memory)?;
                Some(format!("programs of the node waited for memory {found:.0} % of the time; the limit is {limit:.0} %"))
            });
        self.set(Resource::Memory, words);
        let words = below(free, limits.swap_free, swap).map(|(found, limit)| {
            format!("{found:.0} % of the node's swap is free; the limit is {limit:.0} %")
        });
        self.set(Resource::Swap, words);
    }

    fn set(&mut self, resource: Resource, words: Option<String>) {
        match words {
            // The first figures stay for as long as the shortage lasts.
            Some(words) => drop(self.short.entry(resource).or_insert(words)),
            None => drop(self.short.remove(&resource)),
        }
    }

    /// Returns the resources that the node is short of, each with its figures in words.
    pub fn short(&self) -> &BTreeMap<Resource, String> {
        &self.short
    }

    /// Returns the current request.
    pub fn asked(&self) -> Option<&Ask> {
        self.asked.as_ref()
    }

    /// Chooses the sandbox that is requested to sleep from now on. `candidates`: all candidates,
    /// each once.
    pub fn choose(&mut self, candidates: &[Candidate], limits: &Limits, now: Timestamp) {
        self.refused
            .retain(|_, at| later(*at, limits.answer.saturating_mul(10)) > now);
        if self.short.is_empty() {
            self.asked = None;
            return;
        }
        if let Some(ask) = &self.asked {
            let waits = candidates
                .iter()
                .any(|candidate| candidate.pod == ask.pod && !(ask.doze && candidate.dozes));
            let refuses = waits && later(ask.at, limits.answer) <= now;
            if waits && !refuses {
                return;
            }
            if refuses {
                self.refused.insert(ask.pod.clone(), now);
            }
            self.asked = None;
            self.settled = Some(now);
        }
        if self
            .settled
            .is_some_and(|at| later(at, limits.settle) > now)
        {
            return;
        }
        self.asked = self.next(candidates, limits, now);
    }

    fn next(&self, candidates: &[Candidate], limits: &Limits, now: Timestamp) -> Option<Ask> {
        let idle = |candidate: &&Candidate| {
            later(candidate.idle_since, limits.idle) <= now
                && !self.refused.contains_key(&candidate.pod)
        };
        let (memory, swap) = (
            self.short.contains_key(&Resource::Memory),
            self.short.contains_key(&Resource::Swap),
        );
        let to_doze = |candidate: &Candidate| candidate.may_doze && !candidate.dozes && !swap;
        let longest = |dozes: bool| {
            let idle = candidates.iter().filter(idle);
            idle.filter(|candidate| candidate.dozes == dozes)
                .filter(|candidate| candidate.may_hibernate || to_doze(candidate))
                .min_by_key(|candidate| (candidate.idle_since, &candidate.pod))
        };
        let ask = |candidate: &Candidate, short_of, doze| Ask {
            pod: candidate.pod.clone(),
            short_of,
            doze,
            at: now,
        };
        if swap && let Some(candidate) = longest(true) {
            return Some(ask(candidate, Resource::Swap, false));
        }
        if !memory {
            return None;
        }
        let awake =
            longest(false).map(|candidate| ask(candidate, Resource::Memory, to_doze(candidate)));
        awake.or_else(|| Some(ask(longest(true)?, Resource::Memory, false)))
    }
}

fn percent(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 * 100.0 / whole as f64)
}

#[cfg(test)]
mod tests;
