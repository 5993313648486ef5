//! Finding out whether a sandbox is idle; what follows from it is decided in `torpor-core`.
//!
//! Only sandboxes that may fall asleep by themselves are watched: one call on the control socket and a few file times at each look.
//! Before one falls asleep, the keeper is asked for the times of its packets (a process on the host: it takes a right that the agent
//! does not have), and the sandbox for its busy mark.

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

use crate::policy::left;
use crate::reconcile::node::{CALL_LIMIT, Node};
use crate::reconcile::observe::words;

/// The emptyDir in which a program may leave one of these files: while it is there, the sandbox is in use. The second is the sandbox runtime's, for calls of `PUT /v1/busy` (runtime/src/busy.rs).
const BUSY_VOLUME: &str = "torpor";
const BUSY_FILES: [&str; 2] = ["busy", "busy-call"];
/// A file that is there is opened at once; a FIFO in its place would be waited for in vain.
const BUSY_LIMIT: Duration = Duration::from_secs(1);

/// What is known of one sandbox.
#[derive(Debug, Clone)]
pub(crate) struct Watched {
    sandbox: SandboxId,
    watch: IdleWatch,
    began: Instant,
}

impl Watched {
    /// What is known of this sandbox; of another one nothing is.
    pub(crate) fn of(known: Option<Self>, sandbox: &SandboxId, now: Timestamp) -> Self {
        known
            .filter(|known| known.sandbox == *sandbox)
            .unwrap_or_else(|| Self {
                sandbox: sandbox.clone(),
                watch: IdleWatch::new(now),
                began: Instant::now(),
            })
    }

    /// See [`Look::up`].
    pub(crate) fn up(&self) -> Duration {
        self.began.elapsed()
    }

    pub(crate) fn look(&mut self, look: &Look) {
        self.watch.look(look);
    }

    /// Takes note of a use at that time.
    pub(crate) fn used(&mut self, at: Timestamp) {
        self.watch.inquired(&Inquiry {
            at,
            last_packet: Some(at),
            busy: false,
        });
    }

    pub(crate) fn since(&self) -> Timestamp {
        self.watch.since()
    }

    /// Whether it was in use at that time, or nobody has watched it before.
    pub(crate) fn is_of(&self, at: Timestamp) -> bool {
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

/// Looks at a sandbox that may fall asleep by itself, and says in `observed` since when it has been idle. Answers what is to be
/// remembered: nothing of one that sleeps, so that its time begins anew when it is woken.
pub(crate) fn watch(
    sandbox: &Sandbox<'_>,
    desired: &Desired,
    observed: &mut Observed,
    known: Option<Watched>,
    now: Timestamp,
) -> Option<Watched> {
    // One that may sleep for the node's sake only is looked at, and asked when its time has come.
    let for_the_node = desired.pressure.may.then_some(Duration::MAX);
    let after = desired.sleep.first().or(for_the_node)?;
    let id = &sandbox.record.sandbox;
    let mut watched = Watched::of(known, id, now);
    let looked = match observed.live {
        Live::Running => {
            // Its time begins when it is ready, and nobody debugs it any more.
            let is_needed = observed.added.is_some() || !desired.ready;
            sandbox.look(&mut watched, after, now, is_needed)
        }
        // Nothing goes on in it.
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
            left::look(node, self.record);
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
        // First what is over, so that no probe's end is counted without its work.
        let probed = self.node.records.probed(&self.record.sandbox).ok()?;
        // The kubelet limits the Pod.
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

    /// The last packet that was no probe.
    fn last_packet(&self, now: Timestamp) -> Result<Option<Timestamp>, String> {
        let id = &self.record.sandbox;
        let answer = self
            .node
            .ask_keeper(id, self.lock, Verb::Traffic, None, None, CALL_LIMIT)
            .map_err(|error| words(&error))?;
        let ages: Ages = serde_json::from_value(answer.detail).map_err(|error| words(&error))?;
        let probed: Vec<u16> = self
            .probes
            .map(|probes| probes.ports.iter().copied().collect())
            .unwrap_or_default();
        let ago = ages.youngest(&probed);
        Ok(ago.map(|ago| now.checked_sub(ago).unwrap_or(Timestamp::MIN)))
    }

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
                // Something is there that cannot be read as a file: the program has put it there.
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
