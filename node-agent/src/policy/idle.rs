//! The facts by which `torpor-core` decides since when a sandbox has been idle.
//!
//! Only sandboxes that may fall asleep by themselves are watched. Each look costs a few file times
//! beside the shim's observation. Before a sandbox falls asleep, the agent also asks the shim for
//! the times of its packets and the busy mark in the sandbox.

use std::time::{Duration, Instant, SystemTime};

use jiff::Timestamp;
use torpor_core::idle::{HostTime, IdleWatch, Inquiry, Look, ProbeTime};
use torpor_core::ids::SandboxId;
use torpor_core::state::{Desired, Live, Observed};
use torpor_messages::service::Use;
use torpor_records::PodRecord;

use crate::reconcile::node::Node;
use crate::reconcile::shim::Shim;

/// The cause of an idle time that is not known: the state of the sandbox changed while it was read.
const NOT_REPORTED: &str = "the Pod's shim has not reported the use of the sandbox";

/// The idle state of one sandbox.
#[derive(Debug, Clone)]
pub(crate) struct Watched {
    sandbox: SandboxId,
    watch: IdleWatch,
    /// The start of the clock that [`Self::up`] returns.
    began: Instant,
}

impl Watched {
    /// Returns `before` if it is about this sandbox, else a new state that begins `now`.
    pub(crate) fn of(before: Option<Self>, sandbox: &SandboxId, now: Timestamp) -> Self {
        before
            .filter(|before| before.sandbox == *sandbox)
            .unwrap_or_else(|| Self {
                sandbox: sandbox.clone(),
                watch: IdleWatch::new(now),
                began: Instant::now(),
            })
    }

    /// Returns the time for [`Look::up`].
    pub(crate) fn up(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn look(&mut self, look: &Look) {
        self.watch.look(look);
    }

    /// Records a use at that time.
    pub(crate) fn used(&mut self, at: Timestamp) {
        self.watch.inquired(&Inquiry {
            at,
            last_packet: Some(at),
            busy: false,
        });
    }

    /// Returns since when the sandbox has been idle.
    pub(crate) fn since(&self) -> Timestamp {
        self.watch.since()
    }

    /// Returns whether the idle time begins at that time or later: the sandbox was in use then, or
    /// was not watched before.
    pub(crate) fn begins_at(&self, at: Timestamp) -> bool {
        self.since() >= at
    }
}

/// A sandbox that its shim has observed.
pub(crate) struct Sandbox<'a> {
    pub(crate) node: &'a Node,
    pub(crate) record: &'a PodRecord,
    /// The figures of its use, if it runs.
    pub(crate) used: Option<Result<Use, String>>,
}

/// Returns the shortest idle time after which a sandbox may fall asleep by itself; none if it may
/// not. A sandbox that may sleep only to relieve the node gets the cheap look. The inquiry follows
/// once the node needs its sleep: then `desired.sleep` has a time.
pub(crate) fn after(desired: &Desired) -> Option<Duration> {
    let for_the_node = desired.pressure.may.then_some(Duration::MAX);
    desired.sleep.first().or(for_the_node)
}

/// Adds to `observed` since when a sandbox that may fall asleep by itself has been idle. Returns
/// the idle state for the next look. It is none for a hibernated sandbox, so that the idle time
/// begins anew with a wake.
pub(crate) fn watch(
    sandbox: Sandbox<'_>,
    desired: &Desired,
    observed: &mut Observed,
    before: Option<Watched>,
    now: Timestamp,
) -> Option<Watched> {
    let after = after(desired)?;
    let id = &sandbox.record.sandbox;
    let mut watched = Watched::of(before, id, now);
    let looked = match observed.live {
        Live::Running => {
            // The idle time begins when the sandbox is ready and no debug container runs any more.
            let is_needed = observed.added.is_some() || !desired.ready;
            sandbox.look(&mut watched, after, now, is_needed)
        }
        // No program of a paused sandbox works.
        Live::Paused => {
            let up = watched.up();
            watched.watch.stood_still(now, up);
            Ok(())
        }
        Live::None => return None,
        Live::Unknown => return Some(watched),
    };
    match looked {
        Ok(()) => observed.idle_since = Some(watched.watch.since()),
        Err(why) => observed.idle_known = Err(why),
    }
    Some(watched)
}

impl Sandbox<'_> {
    fn look(
        self,
        watched: &mut Watched,
        after: Duration,
        now: Timestamp,
        is_needed: bool,
    ) -> Result<(), String> {
        let (node, id) = (self.node, &self.record.sandbox);
        let host = self.host_time();
        let used = self.used.unwrap_or_else(|| Err(NOT_REPORTED.to_owned()))?;
        let up = watched.up();
        let watch = &mut watched.watch;
        watch.look(&Look {
            at: now,
            up,
            cpu: used.cpu,
            host,
            in_use: used.in_use || is_needed,
            last_use: node.records.last_use(id).and_then(timestamp),
        });
        if watch.is_due(after, now) {
            let (ago, busy) = Shim::of(&node.records, id).inquire()?;
            let at = |ago| now.checked_sub(ago).unwrap_or(Timestamp::MIN);
            watch.inquired(&Inquiry {
                at: now,
                last_packet: ago.map(at),
                busy,
            });
        }
        Ok(())
    }

    fn host_time(&self) -> Option<HostTime> {
        let cgroups = self.node.cgroups.as_ref()?;
        // The probes are read before the cgroup, so that each ended probe counts with its work.
        let probed = self.node.records.probed(&self.record.sandbox).ok()?;
        // The kubelet sets the limit on the Pod's cgroup, above the sandbox's.
        let pod = self.record.cgroup.parent();
        Some(HostTime {
            used: cgroups.processor_time(&self.record.cgroup)?,
            limit: pod.and_then(|pod| cgroups.processor_limit(pod)),
            probes: ProbeTime {
                used: Duration::from_micros(probed.used_micros),
                took: Duration::from_micros(probed.took_micros),
            },
        })
    }
}

fn timestamp(time: SystemTime) -> Option<Timestamp> {
    Timestamp::try_from(time).ok()
}
