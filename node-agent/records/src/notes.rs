//! Notes beside a pod's record: who uses its sandbox, that it dozes, how it last fell asleep and woke, and what is seen of its packets and probes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::str::FromStr;

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use torpor_core::ids::{ImageId, SandboxId};

use super::RunscRecord;
use super::files::{modified, read_if_there, read_json, remove_file, write_error, write_json};
use super::{Error, PodLock, Records};
use crate::locks;

/// See [`Records::has_execs`] and [`Records::left`].
const EXECS: &str = "execs";
const LEFT: &str = "left.json";

/// The kubelet's probes of a pod: what they do is nobody's use of the sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probes {
    /// TCP ports that HTTP, TCP and gRPC probes connect to.
    pub ports: BTreeSet<u16>,
    /// Commands of exec probes.
    pub commands: BTreeSet<Vec<String>>,
}

/// What a process in the sandbox is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Session {
    /// Somebody works in the sandbox.
    Use,
    /// The kubelet asks how it is.
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

/// What the exec probes of a sandbox have taken, all together, those that still run not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ProbeNote {
    /// Processor time of the sandbox while they ran.
    pub used_micros: u64,
    /// How long they ran.
    pub took_micros: u64,
}

impl ProbeNote {
    fn and(self, other: Self) -> Self {
        Self {
            used_micros: self.used_micros.saturating_add(other.used_micros),
            took_micros: self.took_micros.saturating_add(other.took_micros),
        }
    }
}

/// A step of a pause that is noted beside a pod's record. No note: the sandbox is not paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PauseMark {
    /// A pause or a resume has begun.
    Changing,
    Paused,
}

/// The BPF map that holds the times of a pod's packets: the kernel's number of it. The map lives as
/// long as the pod's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrafficMap {
    pub map: u32,
}

/// The BPF map that holds a pod's connections with unacknowledged data: the kernel's number of it.
/// The map lives as long as the pod's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnacknowledgedMap {
    pub map: u32,
}

/// That a sandbox is paused because it was idle. Without a pause it says nothing: it is written before, and removed after.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DozeNote {
    /// Its memory was pushed out.
    pub reclaimed: bool,
}

/// How a sandbox woke in place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WakeNote {
    pub cause: WakeCause,
    /// How deep it slept.
    #[serde(default)]
    pub from: Depth,
    /// When each stage was over, in microseconds since the beginning.
    pub stages_end_micros: BTreeMap<String, u64>,
}

/// How a sandbox came back from an image when the last of its containers was started: in a new Pod (a resume), or in one whose processes
/// had died.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RestoreNote {
    pub image: ImageId,
    /// When each stage was over, in microseconds since that start.
    pub stages_end_micros: BTreeMap<String, u64>,
}

/// Who woke a sandbox. `Asked`, `Called` and `Packet` are also the words of older versions, whose keepers live on over an upgrade.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum WakeCause {
    /// The agent, because the API asks for a sandbox that runs.
    Asked,
    /// The agent, because a time has come that was set.
    Clock,
    /// An exec, that of a container's hook included.
    Exec,
    /// A forwarded connection.
    Forward,
    /// A signal that does not end the program.
    Signal,
    /// A container that the Pod has not had before, or one whose start was under way when the others dozed off.
    Container,
    /// What a client of `attach` has typed.
    Typed,
    /// A packet that wants an answer.
    Packet,
    /// An exec, a forwarded connection or a signal, as an older version tells it.
    Called,
}

/// No cause of a wake has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a cause of a wake")]
pub struct UnknownCause(String);

impl WakeCause {
    pub const ALL: [Self; 9] = [
        Self::Asked,
        Self::Clock,
        Self::Exec,
        Self::Forward,
        Self::Signal,
        Self::Container,
        Self::Typed,
        Self::Packet,
        Self::Called,
    ];

    /// The word in records, metrics and arguments.
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
            Self::Called => "Called",
        }
    }

    /// Whether somebody waits for the sandbox' answer: everybody but the API and the clock, which want it to run from now on.
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

/// How deep a sandbox slept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Depth {
    /// Paused, its memory in swap.
    Dozing,
    /// No process left but the keepers.
    #[default]
    Hibernated,
}

/// Working set of a pod's cgroup in bytes, around the moment in which it fell asleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SleepNote {
    /// When it was last awake.
    pub bytes_before: u64,
    pub bytes_after: u64,
    /// What this sleep gave back: less than the difference for one that had dozed before.
    #[serde(default)]
    pub given_back: u64,
}

impl SleepNote {
    /// The note of a sleep that took the working set from `before` to `after`; `doze`: the note of the doze that it became deeper from.
    pub fn new(before: u64, after: u64, doze: Option<Self>) -> Self {
        Self {
            bytes_before: doze.map_or(before, |doze| doze.bytes_before),
            bytes_after: after,
            given_back: before.saturating_sub(after),
        }
    }
}

impl Records {
    /// Held by a process that somebody runs in the sandbox (exec), for as long as it runs.
    pub fn join_sessions(&self, sandbox: &SandboxId, session: Session) -> Result<PodLock, Error> {
        let (path, file) = self.file_to_lock(sandbox, session.file())?;
        // Who looks whether there is any has it for a moment.
        let locked = Flock::lock(file, FlockArg::LockShared);
        locked
            .map(PodLock)
            .map_err(|(_, source)| Error::Lock { path, source })
    }

    /// Notes that a process has begun or ended in the sandbox.
    pub fn note_session(&self, sandbox: &SandboxId, session: Session) -> Result<(), Error> {
        let (path, file) = self.file_to_lock(sandbox, session.file())?;
        let noted = file.set_modified(std::time::SystemTime::now());
        noted.map_err(|source| write_error(&path, source))
    }

    /// Whether anybody runs a process of this kind in the sandbox.
    pub fn has_sessions(&self, sandbox: &SandboxId, session: Session) -> Result<bool, Error> {
        let (path, file) = self.file_to_lock(sandbox, session.file())?;
        let free = locks::try_exclusive(file).map_err(|source| Error::Lock { path, source })?;
        Ok(free.is_none())
    }

    /// When somebody last began or ended to work in the sandbox, or it was last woken.
    pub fn last_use(&self, sandbox: &SandboxId) -> Option<std::time::SystemTime> {
        let dir = self.pod_dir(sandbox);
        let files = [Session::Use.file(), "called", "wake.json"];
        let times = files
            .into_iter()
            .filter_map(|file| modified(&dir.join(file)));
        times.max()
    }

    /// Notes that exec has started a process in the sandbox, which may leave others behind.
    pub fn note_exec(&self, sandbox: &SandboxId) -> Result<(), Error> {
        let path = self.pod_dir(sandbox).join(EXECS);
        std::fs::write(&path, b"").map_err(|source| write_error(&path, source))
    }

    /// Whether exec has started a process since the sandbox began, or was restored.
    pub fn has_execs(&self, sandbox: &SandboxId) -> bool {
        self.pod_dir(sandbox).join(EXECS).exists()
    }

    /// Notes what exec has left behind.
    pub fn write_left(&self, sandbox: &SandboxId, left: &[String]) -> Result<(), Error> {
        write_json(&self.pod_dir(sandbox).join(LEFT), &left)
    }

    /// What exec had left behind when somebody last looked.
    pub fn left(&self, sandbox: &SandboxId) -> Result<Vec<String>, Error> {
        let noted = read_if_there(&self.pod_dir(sandbox).join(LEFT))?;
        Ok(noted.unwrap_or_default())
    }

    /// A sandbox that was restored has nothing that exec left behind.
    pub fn forget_execs(&self, sandbox: &SandboxId) -> Result<(), Error> {
        let dir = self.pod_dir(sandbox);
        remove_file(&dir.join(EXECS))?;
        remove_file(&dir.join(LEFT))
    }

    /// Notes that somebody needed the sandbox now.
    pub fn note_call(&self, sandbox: &SandboxId) -> Result<(), Error> {
        let path = self.pod_dir(sandbox).join("called");
        std::fs::write(&path, b"").map_err(|source| write_error(&path, source))
    }

    /// When somebody last needed the sandbox enough to wake it.
    pub fn last_call(&self, sandbox: &SandboxId) -> Option<std::time::SystemTime> {
        modified(&self.pod_dir(sandbox).join("called"))
    }

    /// Notes how long the last wake took, stage by stage.
    pub fn write_wake(&self, sandbox: &SandboxId, wake: &WakeNote) -> Result<(), Error> {
        write_json(&self.wake_path(sandbox), wake)
    }

    /// When the sandbox last woke in place; none if never.
    pub fn woke_at(&self, sandbox: &SandboxId) -> Option<std::time::SystemTime> {
        modified(&self.wake_path(sandbox))
    }

    /// How it last woke in place.
    pub fn wake(&self, sandbox: &SandboxId) -> Result<WakeNote, Error> {
        read_json(&self.wake_path(sandbox))
    }

    fn wake_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.pod_dir(sandbox).join("wake.json")
    }

    /// Notes what the pod's memory was before and after it fell asleep.
    pub fn write_sleep(&self, sandbox: &SandboxId, sleep: &SleepNote) -> Result<(), Error> {
        write_json(&self.sleep_path(sandbox), sleep)
    }

    /// When the sandbox last fell asleep in place; none if never.
    pub fn slept_at(&self, sandbox: &SandboxId) -> Option<std::time::SystemTime> {
        modified(&self.sleep_path(sandbox))
    }

    /// What the pod's memory was when it last fell asleep.
    pub fn sleep(&self, sandbox: &SandboxId) -> Result<SleepNote, Error> {
        read_json(&self.sleep_path(sandbox))
    }

    fn sleep_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.pod_dir(sandbox).join("sleep.json")
    }

    /// Notes how long the restore of the sandbox took, stage by stage.
    pub fn write_restore(&self, sandbox: &SandboxId, note: &RestoreNote) -> Result<(), Error> {
        write_json(&self.pod_dir(sandbox).join("restore.json"), note)
    }

    /// When the sandbox last came back by its containers' starts; none if never.
    pub fn restored_at(&self, sandbox: &SandboxId) -> Option<std::time::SystemTime> {
        modified(&self.pod_dir(sandbox).join("restore.json"))
    }

    /// What [`Self::write_restore`] noted.
    pub fn restore(&self, sandbox: &SandboxId) -> Result<RestoreNote, Error> {
        read_json(&self.pod_dir(sandbox).join("restore.json"))
    }

    /// Adds what an exec probe has taken.
    pub fn note_probe(&self, sandbox: &SandboxId, taken: ProbeNote) -> Result<(), Error> {
        let (path, file) = self.file_to_lock(sandbox, "probed")?;
        // Others that end now wait for as long as it takes to write a line.
        let _alone = Flock::lock(file, FlockArg::LockExclusive)
            .map_err(|(_, source)| Error::Lock { path, source })?;
        let known = self.probed(sandbox).unwrap_or_default();
        let path = self.pod_dir(sandbox).join("probed.json");
        write_json(&path, &known.and(taken))
    }

    /// What [`Self::note_probe`] has added up.
    pub fn probed(&self, sandbox: &SandboxId) -> Result<ProbeNote, Error> {
        let noted = read_if_there(&self.pod_dir(sandbox).join("probed.json"))?;
        Ok(noted.unwrap_or_default())
    }

    /// Keeps what runsc recorded of the sandbox, which is about to lose its processes and with them runsc's record.
    pub fn keep(&self, sandbox: &SandboxId, kept: &RunscRecord) -> Result<(), Error> {
        write_json(&self.kept_path(sandbox), kept)
    }

    /// What [`Self::keep`] keeps, from the last time.
    pub fn kept(&self, sandbox: &SandboxId) -> Result<Option<RunscRecord>, Error> {
        read_if_there(&self.kept_path(sandbox))
    }

    /// From now on runsc begins the sandbox, until it has fallen asleep the next time.
    pub fn forget_kept(&self, sandbox: &SandboxId) -> Result<(), Error> {
        remove_file(&self.kept_path(sandbox))
    }

    fn kept_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.pod_dir(sandbox).join("runsc.json")
    }

    /// Notes that runsc's records of the pod lie in the root directory of its beginning: see [`torpor_runsc::command::NodeRunsc::root_of`].
    pub fn note_spread(&self, sandbox: &SandboxId) -> Result<(), Error> {
        let path = self.spread_path(sandbox);
        std::fs::write(&path, "").map_err(|source| write_error(&path, source))
    }

    /// What [`Self::note_spread`] noted.
    pub fn is_spread(&self, sandbox: &SandboxId) -> bool {
        self.spread_path(sandbox).exists()
    }

    fn spread_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.pod_dir(sandbox).join("spread")
    }

    /// Notes why the pod's loopback cannot be forwarded.
    pub fn note_not_forwarded(&self, sandbox: &SandboxId, why: &str) -> Result<(), Error> {
        let path = self.pod_dir(sandbox).join("not-forwarded");
        std::fs::write(&path, why).map_err(|source| write_error(&path, source))
    }

    /// Notes why packets do not wake the pod.
    pub fn note_not_watched(&self, sandbox: &SandboxId, why: &str) -> Result<(), Error> {
        let path = self.not_watched_path(sandbox);
        std::fs::write(&path, why).map_err(|source| write_error(&path, source))
    }

    /// What [`Self::note_not_watched`] noted.
    pub fn not_watched(&self, sandbox: &SandboxId) -> Option<String> {
        std::fs::read_to_string(self.not_watched_path(sandbox)).ok()
    }

    /// From now on they do.
    pub fn forget_not_watched(&self, sandbox: &SandboxId) -> Result<(), Error> {
        remove_file(&self.not_watched_path(sandbox))
    }

    fn not_watched_path(&self, sandbox: &SandboxId) -> PathBuf {
        self.pod_dir(sandbox).join("not-watched")
    }

    /// Notes where the times of the pod's packets are, or why there are none.
    pub fn write_traffic(
        &self,
        sandbox: &SandboxId,
        watch: &Result<TrafficMap, String>,
    ) -> Result<(), Error> {
        write_json(&self.pod_dir(sandbox).join("traffic.json"), watch)
    }

    /// What [`Self::write_traffic`] wrote.
    pub fn traffic(&self, sandbox: &SandboxId) -> Result<Result<TrafficMap, String>, Error> {
        read_json(&self.pod_dir(sandbox).join("traffic.json"))
    }

    /// Notes where the pod's connections with something on its way are.
    pub fn write_unacknowledged(
        &self,
        sandbox: &SandboxId,
        noted: UnacknowledgedMap,
    ) -> Result<(), Error> {
        write_json(&self.pod_dir(sandbox).join("unacknowledged.json"), &noted)
    }

    /// What [`Self::write_unacknowledged`] wrote; none: nobody knows of them.
    pub fn unacknowledged(&self, sandbox: &SandboxId) -> Result<Option<UnacknowledgedMap>, Error> {
        read_if_there(&self.pod_dir(sandbox).join("unacknowledged.json"))
    }

    /// Notes what the kubelet probes, unless that is noted already.
    pub fn write_probes(&self, sandbox: &SandboxId, probes: &Probes) -> Result<(), Error> {
        match self.probes(sandbox) {
            Ok(noted) if noted == *probes => Ok(()),
            _ => write_json(&self.pod_dir(sandbox).join("probes.json"), probes),
        }
    }

    /// What the kubelet probes; nothing as long as the agent has not said.
    pub fn probes(&self, sandbox: &SandboxId) -> Result<Probes, Error> {
        let noted = read_if_there(&self.pod_dir(sandbox).join("probes.json"))?;
        Ok(noted.unwrap_or_default())
    }

    /// The note that the sandbox dozes; see [`DozeNote`].
    pub fn doze(&self, sandbox: &SandboxId) -> Result<Option<DozeNote>, Error> {
        read_if_there(&self.pod_dir(sandbox).join("doze.json"))
    }

    /// Replaces or removes that note.
    pub fn write_doze(&self, sandbox: &SandboxId, note: Option<DozeNote>) -> Result<(), Error> {
        let path = self.pod_dir(sandbox).join("doze.json");
        match note {
            Some(note) => write_json(&path, &note),
            None => remove_file(&path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::one_pod;

    #[test]
    fn a_cause_is_called_the_same_in_records_and_arguments_and_those_of_older_versions_are_known() {
        for cause in WakeCause::ALL {
            assert_eq!(cause.as_str().parse(), Ok(cause));
            let written = serde_json::to_string(&cause).expect("a word");
            assert_eq!(written, format!("\"{}\"", cause.as_str()));
            assert_eq!(format!("{cause:?}"), cause.as_str());
        }
        let unknown = "Moonlight".parse::<WakeCause>();
        assert_eq!(unknown, Err(UnknownCause("Moonlight".to_owned())));
        for (word, cause) in [
            ("Asked", WakeCause::Asked),
            ("Called", WakeCause::Called),
            ("Packet", WakeCause::Packet),
        ] {
            let written = format!(r#"{{"cause":"{word}","stagesEndMicros":{{"resumed":5}}}}"#);
            let note: WakeNote = serde_json::from_str(&written).expect(word);
            assert_eq!(note.cause, cause);
        }
    }

    #[test]
    fn a_session_that_begins_while_somebody_looks_for_some_is_one() {
        let (_dir, records, sandbox) = one_pod();
        let (_, file) = records
            .file_to_lock(&sandbox, Session::Use.file())
            .expect("a file");
        let looks = locks::try_exclusive(file).expect("tried");
        std::thread::scope(|scope| {
            let joins = scope.spawn(|| records.join_sessions(&sandbox, Session::Use));
            std::thread::sleep(std::time::Duration::from_millis(20));
            drop(looks);
            let session = joins.join().expect("no panic").expect("joined");
            let has_some = || records.has_sessions(&sandbox, Session::Use);
            assert!(has_some().expect("looked"));
            drop(session);
            assert!(!has_some().expect("looked"));
        });
    }

    #[test]
    fn of_a_restore_is_told_what_was_noted_and_when() {
        let (_dir, records, sandbox) = one_pod();
        assert_eq!(records.restored_at(&sandbox), None);
        let note = RestoreNote {
            image: ImageId::parse("pod-a.1").expect("an image's name"),
            stages_end_micros: [("prepared".to_owned(), 10)].into(),
        };
        records.write_restore(&sandbox, &note).expect("noted");
        assert_eq!(records.restore(&sandbox).expect("noted"), note);
        assert!(records.restored_at(&sandbox).is_some());
    }

    #[test]
    fn why_packets_do_not_wake_a_pod_is_noted_as_long_as_it_is_so() {
        let (_dir, records, sandbox) = one_pod();
        assert_eq!(records.not_watched(&sandbox), None);
        records
            .note_not_watched(&sandbox, "no veth pair")
            .expect("noted");
        assert_eq!(
            records.not_watched(&sandbox).as_deref(),
            Some("no veth pair")
        );
        for _ in 0..2 {
            records.forget_not_watched(&sandbox).expect("forgotten");
            assert_eq!(records.not_watched(&sandbox), None);
        }
    }

    #[test]
    fn what_probes_take_adds_up_also_when_they_end_together() {
        let (_dir, records, sandbox) = one_pod();
        assert_eq!(
            records.probed(&sandbox).expect("none"),
            ProbeNote::default()
        );
        let taken = |used_micros, took_micros| ProbeNote {
            used_micros,
            took_micros,
        };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| records.note_probe(&sandbox, taken(3, 5)).expect("noted"));
            }
        });
        assert_eq!(records.probed(&sandbox).expect("noted"), taken(24, 40));
        records
            .note_probe(&sandbox, taken(u64::MAX, 1))
            .expect("noted");
        assert_eq!(
            records.probed(&sandbox).expect("noted"),
            taken(u64::MAX, 41)
        );
    }
}
