//! The facts by which `torpor-core` decides since when a sandbox has been idle.
//!
//! Only sandboxes that may fall asleep by themselves are watched. Each look costs one call on the
//! control socket and a few file times. Before a sandbox falls asleep, the agent also requests the
//! times of its packets from its keeper (which runs a command on the host, with a right that the
//! agent does not have) and reads the busy mark in the sandbox.

use std::time::{Duration, Instant, SystemTime};

use jiff::Timestamp;
use torpor_core::idle::{HostTime, IdleWatch, Inquiry, Look, ProbeTime};
use torpor_core::ids::SandboxId;
use torpor_core::state::{Desired, Live, Observed};
use torpor_link::traffic::Ages;
use torpor_records::{PodLock, PodRecord, Probes, Session};
use torpor_runsc::control::{self, Control};
use torpor_runsc::forward;
use torpor_runsc::keeper::Verb;
use torpor_runsc::spec::PAUSE_VOLUMES;

use crate::policy::exec_leftovers;
use crate::reconcile::node::{CALL_LIMIT, Node};
use crate::reconcile::observe::words;

/// Name of the emptyDir in which a program may make a busy file.
const BUSY_VOLUME: &str = "torpor";
/// The busy files. While one exists, the sandbox is in use. The sandbox runtime makes the
/// second for calls of `PUT /v1/busy` (runtime/src/busy.rs).
const BUSY_FILES: [&str; 2] = ["busy", "busy-call"];
/// Time limit for opening a busy file. A file opens at once, while the open of a FIFO in its place
/// would never return.
const BUSY_LIMIT: Duration = Duration::from_secs(1);

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

/// A sandbox whose lock is held.
pub(crate) struct Sandbox<'a> {
    pub(crate) node: &'a Node,
    pub(crate) record: &'a PodRecord,
    pub(crate) lock: &'a PodLock,
    pub(crate) probes: Option<&'a Probes>,
}

/// Observes a sandbox that may fall asleep by itself, and adds to `observed` since when it has been
/// idle. Returns the idle state for the next look. It is none for a hibernated sandbox, so that the
/// idle time begins anew with a wake.
pub(crate) fn watch(
    sandbox: &Sandbox<'_>,
    desired: &Desired,
    observed: &mut Observed,
    before: Option<Watched>,
    now: Timestamp,
) -> Option<Watched> {
    // A sandbox that may sleep only to relieve the node gets the cheap look. The inquiry
    // follows once the node needs its sleep: then `desired.sleep` has a time.
    let for_the_node = desired.pressure.may.then_some(Duration::MAX);
    let after = desired.sleep.first().or(for_the_node)?;
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
        &self,
        watched: &mut Watched,
        after: Duration,
        now: Timestamp,
        is_needed: bool,
    ) -> Result<(), String> {
        let (node, id) = (self.node, &self.record.sandbox);
        let up = watched.up();
        let watch = &mut watched.watch;
        let mut control = self.connect()?;
        let cpu = control
            .processor_time(id.as_str(), CALL_LIMIT)
            .map_err(|error| words(&error))?;
        let records = &node.records;
        let works = records.has_sessions(id, Session::Use);
        let works = works.map_err(|error| words(&error))?;
        let forwards = forward::any_open(records, id).map_err(|error| words(&error))?;
        watch.look(&Look {
            at: now,
            up,
            cpu,
            host: self.host_time(),
            in_use: works || forwards || is_needed,
            last_use: records.last_use(id).and_then(timestamp),
        });
        if watch.is_due(after, now) {
            exec_leftovers::note(node, self.record);
            watch.inquired(&Inquiry {
                at: now,
                last_packet: self.last_packet(now)?,
                busy: self.is_marked_busy(&mut control)?,
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

    fn connect(&self) -> Result<Control, String> {
        let connected = self.node.connect(&self.record.sandbox);
        connected.map_err(|error| words(&error))
    }

    /// Returns the time of the last packet that was no probe.
    fn last_packet(&self, now: Timestamp) -> Result<Option<Timestamp>, String> {
        let id = &self.record.sandbox;
        let answer = self
            .node
            .ask_keeper(id, self.lock, Verb::Traffic.into(), CALL_LIMIT)
            .map_err(|error| words(&error))?;
        let ages: Ages = serde_json::from_value(answer.detail).map_err(|error| words(&error))?;
        let probed: Vec<u16> = self
            .probes
            .map(|probes| probes.ports.iter().copied().collect())
            .unwrap_or_default();
        let ago = ages.youngest(&probed);
        Ok(ago.map(|ago| now.checked_sub(ago).unwrap_or(Timestamp::MIN)))
    }

    /// Returns whether a busy file exists.
    fn is_marked_busy(&self, control: &mut Control) -> Result<bool, String> {
        let mut volumes = self.record.volumes.iter();
        if !volumes.any(|volume| volume.name == BUSY_VOLUME) {
            return Ok(false);
        }
        for file in BUSY_FILES {
            let path = format!("{PAUSE_VOLUMES}/{BUSY_VOLUME}/{file}");
            match control.has_file(&path, BUSY_LIMIT) {
                Ok(false) => {}
                Ok(true) => return Ok(true),
                // The program has put something there that cannot be opened as a file.
                Err(control::Error::Refused { .. } | control::Error::NoAnswer { .. }) => {
                    return Ok(true);
                }
                Err(error) => return Err(words(&error)),
            }
        }
        Ok(false)
    }
}

fn timestamp(time: SystemTime) -> Option<Timestamp> {
    Timestamp::try_from(time).ok()
}
