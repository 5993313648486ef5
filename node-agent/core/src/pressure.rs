//! Which sandbox sleeps when the node is short of memory or swap.
//!
//! The longest idle one, one at a time: it is asked ([`Ask`]), it sleeps or turns out to be in use, and after a moment in which the
//! node's figures can follow, the next. To be asked means no more than a shorter idle time ([`Ask::shorten`]): the planner finds out
//! as ever whether anybody uses the sandbox, so that work in progress is not cut off.
//!
//! Short of memory: who is awake dozes where it may and there is swap left, else hibernates; when nobody awake is left to ask, who
//! dozes hibernates (its pages may be in compressed memory). Short of swap: who dozes hibernates.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::ids::PodUid;
use crate::state::{Desired, Live, Observed, PodPresence, Power, SleepAfter, later};

/// What a node can be short of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Resource {
    Memory,
    Swap,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Resource::Memory => "memory",
            Resource::Swap => "swap",
        })
    }
}

/// What pressure has to do with one sandbox: a part of [`Desired`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Pressure {
    /// It may be put to sleep for the node's sake.
    pub may: bool,
    /// It is said that it does not doze by itself: so it does not for the node's sake either.
    pub never_dozes: bool,
    /// The same of hibernation.
    pub never_hibernates: bool,
    /// It is asked to, because of this.
    pub short_of: Option<Resource>,
}

impl Pressure {
    /// Whether it may be hibernated for the node's sake.
    pub fn may_hibernate(&self) -> bool {
        self.may && !self.never_hibernates
    }
}

/// The node's figures.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Readings {
    /// Bytes.
    pub memory_total: u64,
    /// Bytes that programs could have without anything being pushed out.
    pub memory_available: u64,
    /// Bytes; 0: the node has no swap.
    pub swap_total: u64,
    /// Bytes.
    pub swap_free: u64,
    /// Percent of the last ten seconds in which some program waited for memory (pressure stall information), where the kernel tells.
    pub stalled: Option<f64>,
}

/// When a node is short of something, in percent; none: that is not looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Of memory available, less is short.
    pub available: Option<u8>,
    /// Of time stalled, more is short.
    pub stalled: Option<u8>,
    /// Of swap free, less is short.
    pub swap_free: Option<u8>,
    /// Who has been idle for less is not asked.
    pub idle: Duration,
    /// Between two that are asked.
    pub settle: Duration,
    /// How long one that was asked has to fall asleep; then the next is asked, and this one after ten times as long.
    pub answer: Duration,
}

/// What one sandbox is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    pub pod: PodUid,
    pub short_of: Resource,
    /// To doze; else to hibernate.
    pub doze: bool,
    at: Timestamp,
}

impl Ask {
    /// What is wanted of a sandbox that is asked: to sleep once it has been idle for `idle`.
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
    /// It may doze and the node can.
    pub may_doze: bool,
    /// Nobody has said that it does not hibernate.
    pub may_hibernate: bool,
}

/// Whether this one could, by what its task has seen.
pub fn candidate(desired: &Desired, observed: &Observed) -> Option<Candidate> {
    let asked_for_nothing = desired.pod == PodPresence::Present && desired.target() == Power::Awake;
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
    // One that dozes as deep as its runtime or its user lets it has given what it has.
    let gives = match dozes {
        true => may_hibernate && !unsaved,
        false => (may_doze || may_hibernate) && observed.live == Live::Running && desired.ready,
    };
    let fits = desired.pressure.may && asked_for_nothing && able && gives;
    fits.then_some(Candidate {
        pod: desired.pod_uid.clone(),
        idle_since: observed.idle_since?,
        dozes,
        may_doze,
        may_hibernate,
    })
}

/// What is remembered from reading to reading.
#[derive(Debug, Clone, Default)]
pub struct Watch {
    /// What the node is short of and how it was when that began, in words.
    short: BTreeMap<Resource, String>,
    asked: Option<Ask>,
    /// When the last one that was asked slept, or was let go.
    settled: Option<Timestamp>,
    /// Who was asked in vain, and when.
    refused: BTreeMap<PodUid, Timestamp>,
}

impl Watch {
    /// Takes note of the node's figures. Short is short until there is half as much again as the limit (half as much time stalled).
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
            // The figures of the moment in which it began are told for as long as it lasts.
            Some(words) => drop(self.short.entry(resource).or_insert(words)),
            None => drop(self.short.remove(&resource)),
        }
    }

    /// What the node is short of, in words.
    pub fn short(&self) -> &BTreeMap<Resource, String> {
        &self.short
    }

    /// Who is asked to sleep.
    pub fn asked(&self) -> Option<&Ask> {
        self.asked.as_ref()
    }

    /// Decides who is asked from now on. `candidates`: all there are, each once.
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
            let of = candidates.iter().filter(idle);
            of.filter(|candidate| candidate.dozes == dozes)
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
