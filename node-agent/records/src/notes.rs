//! Notes beside a pod's record: processes in its sandbox, pause and doze, last sleep, wake and
//! restore, packets and probes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::SystemTime;

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use torpor_core::ids::{ClaimUid, ContainerId, ImageId, SandboxId};

use crate::error::Error;
use crate::files::{
    modified, read_if_there, read_json, remove_file, write_error, write_json, write_json_as_of,
};
use crate::locks;
use crate::records::{PodLock, Records};
use crate::runsc::RunscRecord;

/// File names of [`Records::has_execs`] and [`Records::left`].
const EXECS: &str = "execs";
const LEFT: &str = "left.json";
/// File name of [`Records::bound`].
const BOUND: &str = "bound.json";

/// The kubelet's probes of a pod. A probe is not a use of the sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probes {
    /// TCP ports that HTTP, TCP and gRPC probes connect to.
    pub ports: BTreeSet<u16>,
    /// Commands of exec probes.
    pub commands: BTreeSet<Vec<String>>,
}

/// Purpose of a process that exec runs in the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Session {
    /// A user's command.
    Use,
    /// An exec probe of the kubelet.
    Probe,
}

impl Session {
    fn file(self) -> &'static str {
        match self {
            Self::Use => "sessions",
            Self::Probe => "probing",
        }
    }
}

/// Totals of a sandbox's exec probes, without the probes that still run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ProbeNote {
    /// Processor time that the sandbox used while probes ran, in microseconds.
    pub used_micros: u64,
    /// Duration of the probes, in microseconds.
    pub took_micros: u64,
}

impl ProbeNote {
    fn plus(self, other: Self) -> Self {
        Self {
            used_micros: self.used_micros.saturating_add(other.used_micros),
            took_micros: self.took_micros.saturating_add(other.took_micros),
        }
    }
}

/// State of a sandbox's pause. Without this note the sandbox is not paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PauseMark {
    /// A pause or a resume has begun.
    Changing,
    Paused,
}

/// The BPF map that contains the times of a pod's packets: its id in the kernel. The map exists as
/// long as the pod's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrafficMap {
    pub map: u32,
}

/// The BPF map that contains a pod's connections with unacknowledged data: its id in the kernel.
/// The map exists as long as the pod's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnacknowledgedMap {
    pub map: u32,
}

/// Note that a sandbox is paused because it was idle. The note has no meaning without a pause: it
/// is written before the pause and removed after the resume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DozeNote {
    /// True if the sandbox's memory was pushed into swap.
    pub reclaimed: bool,
}

/// A sandbox's last wake in place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WakeNote {
    pub cause: WakeCause,
    /// Depth of the sleep before the wake.
    #[serde(default)]
    pub from: Depth,
    /// End of each stage, in microseconds since the wake's beginning; the key is the stage's name.
    pub stages_end_micros: BTreeMap<String, u64>,
}

/// A sandbox's last restore that began when the last of its containers was started: in a new Pod (a
/// resume), or in a Pod whose processes had died.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RestoreNote {
    pub image: ImageId,
    /// End of each stage, in microseconds since the start of the last container; the key is the
    /// stage's name.
    pub stages_end_micros: BTreeMap<String, u64>,
}

/// A claim that has arrived in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BoundNote {
    pub claim: ClaimUid,
    /// The container whose programs have it. A container that the kubelet made in its place has
    /// not.
    pub container: ContainerId,
}

/// Cause of a wake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WakeCause {
    /// The agent: the API requests a running sandbox.
    Asked,
    /// The agent: the time of a scheduled wake has come.
    Clock,
    /// An exec, including the exec of a container's hook.
    Exec,
    /// A forwarded connection.
    Forward,
    /// A signal that does not end the program.
    Signal,
    /// The start of a new container of the Pod, or of a container whose start was under way when
    /// the sandbox dozed off.
    Container,
    /// Input of a client of `attach`.
    Typed,
    /// A packet that requires an answer.
    Packet,
}

/// Error: no cause of a wake has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a cause of a wake")]
pub struct UnknownCause(String);

impl WakeCause {
    pub const ALL: [Self; 8] = [
        Self::Asked,
        Self::Clock,
        Self::Exec,
        Self::Forward,
        Self::Signal,
        Self::Container,
        Self::Typed,
        Self::Packet,
    ];

    /// Returns the cause's name in records, metrics and arguments.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Asked => "Asked",
            Self::Clock => "Clock",
            Self::Exec => "Exec",
            Self::Forward => "Forward",
            Self::Signal => "Signal",
            Self::Container => "Container",
            Self::Typed => "Typed",
            Self::Packet => "Packet",
        }
    }

    /// Reports whether a caller waits for the sandbox's answer. No caller waits if the API or the
    /// clock is the cause: these wake the sandbox for later use.
    pub fn is_waited_for(self) -> bool {
        !matches!(self, Self::Asked | Self::Clock)
    }
}

impl FromStr for WakeCause {
    type Err = UnknownCause;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        let found = Self::ALL.into_iter().find(|cause| cause.as_str() == word);
        found.ok_or_else(|| UnknownCause(word.to_owned()))
    }
}

/// Depth of a sandbox's sleep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Depth {
    /// The sandbox is paused and its memory is in swap.
    Dozing,
    /// No process of the sandbox is left. The shim stays.
    #[default]
    Hibernated,
}

/// Working set of a pod's cgroup before and after the sandbox last fell asleep, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SleepNote {
    /// Working set while the sandbox was last awake.
    pub bytes_before: u64,
    pub bytes_after: u64,
    /// Memory that this sleep freed. After a doze it is less than `bytes_before - bytes_after`.
    #[serde(default)]
    pub given_back: u64,
}

impl SleepNote {
    /// Makes the note of a sleep that reduced the working set from `before` to `after` bytes.
    /// `doze` is the note of the doze from which a hibernation began.
    pub fn new(before: u64, after: u64, doze: Option<Self>) -> Self {
        Self {
            bytes_before: doze.map_or(before, |doze| doze.bytes_before),
            bytes_after: after,
            given_back: before.saturating_sub(after),
        }
    }
}

impl Records {
    /// Returns the shared lock that stands for a process that exec runs in the sandbox. The caller
    /// holds the lock as long as the process runs.
    pub fn join_sessions(&self, sandbox: &SandboxId, session: Session) -> Result<PodLock, Error> {
        let (path, file) = self.file_to_lock(sandbox, session.file())?;
        // A caller of `has_sessions` may hold the exclusive lock for a moment.
        let locked = Flock::lock(file, FlockArg::LockShared);
        locked
            .map(PodLock)
            .map_err(|(_, source)| Error::Lock { path, source })
    }

    /// Records now as the time at which a process of exec last began or ended in the sandbox.
    pub fn note_session(&self, sandbox: &SandboxId, session: Session) -> Result<(), Error> {
        let (path, file) = self.file_to_lock(sandbox, session.file())?;
        let noted = file.set_modified(SystemTime::now());
        noted.map_err(|source| write_error(&path, source))
    }

    /// Reports whether exec runs a process with this purpose in the sandbox.
    pub fn has_sessions(&self, sandbox: &SandboxId, session: Session) -> Result<bool, Error> {
        let (path, file) = self.file_to_lock(sandbox, session.file())?;
        let free = locks::try_exclusive(file).map_err(|source| Error::Lock { path, source })?;
        Ok(free.is_none())
    }

    /// Returns the time of the last use: the last beginning or end of a user's exec, or the last
    /// wake.
    pub fn last_use(&self, sandbox: &SandboxId) -> Option<SystemTime> {
        let dir = self.pod_dir(sandbox);
        let files = [Session::Use.file(), "called", "wake.json"];
        let times = files
            .into_iter()
            .filter_map(|file| modified(&dir.join(file)));
        times.max()
    }

    /// Records that exec has started a process in the sandbox. The process may leave others behind.
    pub fn note_exec(&self, sandbox: &SandboxId) -> Result<(), Error> {
        let path = self.pod_dir(sandbox).join(EXECS);
        std::fs::write(&path, b"").map_err(|source| write_error(&path, source))
    }

    /// Reports whether exec has started a process since the sandbox's start or restore.
    pub fn has_execs(&self, sandbox: &SandboxId) -> bool {
        self.pod_dir(sandbox).join(EXECS).exists()
    }

    /// Records the names of the processes that exec has left behind.
    pub fn write_left(&self, sandbox: &SandboxId, left: &[String]) -> Result<(), Error> {
        write_json(&self.pod_dir(sandbox).join(LEFT), &left)
    }

    /// Reads the names of the processes that exec had left behind at the last search.
    pub fn left(&self, sandbox: &SandboxId) -> Result<Vec<String>, Error> {
        let noted = read_if_there(&self.pod_dir(sandbox).join(LEFT))?;
        Ok(noted.unwrap_or_default())
    }

    /// Removes the notes about exec. gVisor ends the processes of exec in a restore.
    pub fn forget_execs(&self, sandbox: &SandboxId) -> Result<(), Error> {
        let dir = self.pod_dir(sandbox);
        remove_file(&dir.join(EXECS))?;
        remove_file(&dir.join(LEFT))
    }

    /// Records now as the time of the last call: see [`Self::last_call`].
    pub fn note_call(&self, sandbox: &SandboxId) -> Result<(), Error> {
        let path = self.pod_dir(sandbox).join("called");
        std::fs::write(&path, b"").map_err(|source| write_error(&path, source))
    }

    /// Returns the time of the last call: a wake, or a forwarded connection or packet that needed
    /// the sandbox and found it awake.
    pub fn last_call(&self, sandbox: &SandboxId) -> Option<SystemTime> {
        modified(&self.pod_dir(sandbox).join("called"))
    }

    /// Records that a claim has arrived.
    pub fn write_bound(&self, sandbox: &SandboxId, note: &BoundNote) -> Result<(), Error> {
        write_json(&self.pod_dir(sandbox).join(BOUND), note)
    }

    /// Returns the claim that has arrived in the sandbox, if the container that has it is still
    /// there.
    pub fn bound(&self, sandbox: &SandboxId) -> Result<Option<ClaimUid>, Error> {
        let noted = self.bound_note(sandbox)?;
        let is_there = |note: &BoundNote| self.container_dir(&note.container).exists();
        Ok(noted.filter(is_there).map(|note| note.claim))
    }

    /// Reads the note of the claim that arrived last in the sandbox.
    pub fn bound_note(&self, sandbox: &SandboxId) -> Result<Option<BoundNote>, Error> {
        read_if_there(&self.pod_dir(sandbox).join(BOUND))
    }

    /// Records the last wake with the durations of its stages.
    pub fn write_wake(&self, sandbox: &SandboxId, wake: &WakeNote) -> Result<(), Error> {
        write_json(&self.wake_path(sandbox), wake)
    }

    /// Returns the time of the sandbox's last wake in place; none if it never woke.
    pub fn woke_at(&self, sandbox: &SandboxId) -> Option<SystemTime> {
        modified(&self.wake_path(sandbox))
    }

    /// Reads the note of the sandbox's last wake in place.
    pub fn wake(&self, sandbox: &SandboxId) -> Result<WakeNote, Error> {
        read_json(&self.wake_path(sandbox))
    }

    fn wake_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.pod_dir(sandbox).join("wake.json")
    }

    /// Records the pod's memory before and after it fell asleep.
    pub fn write_sleep(&self, sandbox: &SandboxId, sleep: &SleepNote) -> Result<(), Error> {
        write_json(&self.sleep_path(sandbox), sleep)
    }

    /// Returns the time at which the sandbox last fell asleep in place; none if it never did.
    pub fn slept_at(&self, sandbox: &SandboxId) -> Option<SystemTime> {
        modified(&self.sleep_path(sandbox))
    }

    /// Reads the pod's memory before and after it last fell asleep.
    pub fn sleep(&self, sandbox: &SandboxId) -> Result<SleepNote, Error> {
        read_json(&self.sleep_path(sandbox))
    }

    fn sleep_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.pod_dir(sandbox).join("sleep.json")
    }

    /// Records the last restore with the durations of its stages.
    pub fn write_restore(&self, sandbox: &SandboxId, note: &RestoreNote) -> Result<(), Error> {
        write_json(&self.pod_dir(sandbox).join("restore.json"), note)
    }

    /// Returns the time of the last restore that the containers' starts began; none if there was
    /// none.
    pub fn restored_at(&self, sandbox: &SandboxId) -> Option<SystemTime> {
        modified(&self.pod_dir(sandbox).join("restore.json"))
    }

    /// Reads the note that [`Self::write_restore`] wrote.
    pub fn restore(&self, sandbox: &SandboxId) -> Result<RestoreNote, Error> {
        read_json(&self.pod_dir(sandbox).join("restore.json"))
    }

    /// Adds the processor time and the duration of an exec probe to the totals.
    pub fn note_probe(&self, sandbox: &SandboxId, taken: ProbeNote) -> Result<(), Error> {
        let (path, file) = self.file_to_lock(sandbox, "probed")?;
        // Other probes that end now wait for the time of one small write.
        let _lock = Flock::lock(file, FlockArg::LockExclusive)
            .map_err(|(_, source)| Error::Lock { path, source })?;
        let before = self.probed(sandbox).unwrap_or_default();
        let path = self.pod_dir(sandbox).join("probed.json");
        write_json(&path, &before.plus(taken))
    }

    /// Reads the totals of [`Self::note_probe`].
    pub fn probed(&self, sandbox: &SandboxId) -> Result<ProbeNote, Error> {
        let noted = read_if_there(&self.pod_dir(sandbox).join("probed.json"))?;
        Ok(noted.unwrap_or_default())
    }

    /// Keeps runsc's records of the sandbox. The caller is about to end the sandbox's processes,
    /// and with them runsc's records end.
    pub fn write_runsc(&self, sandbox: &SandboxId, record: &RunscRecord) -> Result<(), Error> {
        write_json(&self.runsc_path(sandbox), record)
    }

    /// Reads the records that [`Self::write_runsc`] kept last.
    pub fn runsc(&self, sandbox: &SandboxId) -> Result<Option<RunscRecord>, Error> {
        read_if_there(&self.runsc_path(sandbox))
    }

    /// Removes the kept records. From now on runsc's command starts the sandbox, until the sandbox
    /// has fallen asleep the next time.
    pub fn remove_runsc(&self, sandbox: &SandboxId) -> Result<(), Error> {
        remove_file(&self.runsc_path(sandbox))
    }

    fn runsc_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.pod_dir(sandbox).join("runsc.json")
    }

    /// Records why connections to the pod's loopback cannot be forwarded.
    pub fn note_not_forwarded(&self, sandbox: &SandboxId, why: &str) -> Result<(), Error> {
        let path = self.pod_dir(sandbox).join("not-forwarded");
        std::fs::write(&path, why).map_err(|source| write_error(&path, source))
    }

    /// Records why packets do not wake the pod.
    pub fn note_not_watched(&self, sandbox: &SandboxId, why: &str) -> Result<(), Error> {
        let path = self.not_watched_path(sandbox);
        std::fs::write(&path, why).map_err(|source| write_error(&path, source))
    }

    /// Reads the reason that [`Self::note_not_watched`] recorded.
    pub fn not_watched(&self, sandbox: &SandboxId) -> Option<String> {
        std::fs::read_to_string(self.not_watched_path(sandbox)).ok()
    }

    /// Removes that reason: from now on packets wake the pod.
    pub fn forget_not_watched(&self, sandbox: &SandboxId) -> Result<(), Error> {
        remove_file(&self.not_watched_path(sandbox))
    }

    fn not_watched_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.pod_dir(sandbox).join("not-watched")
    }

    /// Records the map with the times of the pod's packets, or why there is none.
    pub fn write_traffic(
        &self,
        sandbox: &SandboxId,
        watch: &Result<TrafficMap, String>,
    ) -> Result<(), Error> {
        write_json(&self.pod_dir(sandbox).join("traffic.json"), watch)
    }

    /// Reads the note that [`Self::write_traffic`] wrote.
    pub fn traffic(&self, sandbox: &SandboxId) -> Result<Result<TrafficMap, String>, Error> {
        read_json(&self.pod_dir(sandbox).join("traffic.json"))
    }

    /// Records the map with the pod's connections that have unacknowledged data.
    pub fn write_unacknowledged(
        &self,
        sandbox: &SandboxId,
        noted: UnacknowledgedMap,
    ) -> Result<(), Error> {
        write_json(&self.pod_dir(sandbox).join("unacknowledged.json"), &noted)
    }

    /// Reads the note that [`Self::write_unacknowledged`] wrote; none if the pod has no such map.
    pub fn unacknowledged(&self, sandbox: &SandboxId) -> Result<Option<UnacknowledgedMap>, Error> {
        read_if_there(&self.pod_dir(sandbox).join("unacknowledged.json"))
    }

    /// Records the kubelet's probes, unless the record has them already.
    pub fn write_probes(&self, sandbox: &SandboxId, probes: &Probes) -> Result<(), Error> {
        match self.probes(sandbox) {
            Ok(noted) if noted == *probes => Ok(()),
            _ => write_json(&self.pod_dir(sandbox).join("probes.json"), probes),
        }
    }

    /// Reports whether the agent has recorded the kubelet's probes.
    pub fn has_probes(&self, sandbox: &SandboxId) -> bool {
        self.pod_dir(sandbox).join("probes.json").exists()
    }

    /// Reads the kubelet's probes; none until the agent has recorded them.
    pub fn probes(&self, sandbox: &SandboxId) -> Result<Probes, Error> {
        let noted = read_if_there(&self.pod_dir(sandbox).join("probes.json"))?;
        Ok(noted.unwrap_or_default())
    }

    /// Reads the note of a pause: see [`torpor_runsc::pause`].
    pub fn pause_mark(&self, sandbox: &SandboxId) -> Result<Option<PauseMark>, Error> {
        read_if_there(&self.pause_path(sandbox))
    }

    /// Reports whether the note is [`PauseMark::Paused`], for statistics.
    /// [`torpor_runsc::pause::is_paused`] also settles an interrupted pause.
    pub fn is_noted_paused(&self, sandbox: &SandboxId) -> bool {
        matches!(self.pause_mark(sandbox), Ok(Some(PauseMark::Paused)))
    }

    /// Returns the time since which the note of a pause applies; none without a note.
    pub fn pause_began(&self, sandbox: &SandboxId) -> Option<SystemTime> {
        modified(&self.pause_path(sandbox))
    }

    /// Replaces the note of a pause. The note applies since `since`; `None`: since now.
    pub fn note_pause(
        &self,
        sandbox: &SandboxId,
        mark: PauseMark,
        since: Option<SystemTime>,
    ) -> Result<(), Error> {
        write_json_as_of(&self.pause_path(sandbox), &mark, since)
    }

    /// Removes the note of a pause. A sandbox that was ended or restored is not paused.
    pub fn forget_pause(&self, sandbox: &SandboxId) -> Result<(), Error> {
        remove_file(&self.pause_path(sandbox))
    }

    fn pause_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.pod_dir(sandbox).join("pause.json")
    }

    /// Reads the note of a doze.
    pub fn doze(&self, sandbox: &SandboxId) -> Result<Option<DozeNote>, Error> {
        read_if_there(&self.pod_dir(sandbox).join("doze.json"))
    }

    /// Replaces or removes the note of a doze.
    pub fn write_doze(&self, sandbox: &SandboxId, note: Option<DozeNote>) -> Result<(), Error> {
        let path = self.pod_dir(sandbox).join("doze.json");
        match note {
            Some(note) => write_json(&path, &note),
            None => remove_file(&path),
        }
    }
}

#[cfg(test)]
mod tests;
