//! Records of the pods on this node, under the state directory (a tmpfs: the records last until the
//! node's reboot).
//!
//! ```text
//! pods/<sandbox id>/            one directory per pod:
//!   pod.json             the pod ([`PodRecord`]), written once
//!   state.json           state of the sandbox ([`SandboxState`]);
//!                        while it is hibernated, the file's time is the beginning of its sleep
//!   pause.json           state of a pause ([`PauseMark`]); its time: the beginning of the pause
//!   doze.json            doze ([`DozeNote`]): exists while an idle sandbox is paused;
//!                        a caller that needs the sandbox resumes it
//!   quotas.json          limits of processor time that are lifted during a wake
//!   room.json            limits of memory that are raised during a wake
//!   wake.json            durations of the last wake ([`WakeNote`]); its time: the wake
//!   restore.json         durations of the last restore that the containers' starts began
//!                        ([`RestoreNote`]); its time: the restore
//!   sleep.json           memory of the pod before and after it last fell asleep ([`SleepNote`])
//!   runsc.json           runsc's records of the sandbox from its last run ([`RunscRecord`]);
//!                        exists if Torpor may start the sandbox without runsc's command
//!   lock                 lock for changes of the sandbox ([`PodLock`])
//!   sessions             locked (shared) once for each process that exec runs in the sandbox;
//!                        its time: the last beginning or end of such a process
//!   forwards             pipe; each forwarded connection holds it open for reading
//!                        (`torpor_runsc::forward`)
//!   not-forwarded        reason why connections to the pod's loopback are not forwarded
//!   not-watched          reason why packets do not wake the pod
//!   traffic.json         BPF map with the times of the pod's packets (`torpor_link::traffic`),
//!                        or the reason why there is none
//!   unacknowledged.json  BPF map with the pod's connections that have unacknowledged data
//!                        (`torpor_link::unacknowledged`); may be missing
//!   probes.json          the kubelet's probes, which the agent read from the Pod ([`Probes`])
//!   probing              locked (shared) once for each process that a probe runs in the sandbox
//!   probed.json          processor time and duration of exec probes so far ([`ProbeNote`])
//!   probed               lock for additions to probed.json
//!   execs                exists if exec has started a process since the sandbox's start or restore
//!   left.json            names of the processes that exec has left behind, from the last search
//!                        ([`torpor_runsc::left`])
//!   called               its time: the last wake, forwarded connection or packet that needed the
//!                        sandbox
//!   containers/          an empty file per container of the pod, named by the container's id
//!                        ([`Records::containers_of`])
//! reports/<pod UID>.json           result of the Pod's last restore ([`RestoreReport`])
//! reports/<pod UID>.suspends       exists while the Pod is being suspended
//! containers/<id>/container.json   the container ([`ContainerRecord`]), written once
//! containers/<id>/config.json      its OCI spec for runsc; the directory is runsc's bundle
//! containers/<id>/keeper.sock      socket of its keeper
//! ```
//!
//! Files are replaced by rename, so that a reader sees the old file or the new one.

pub mod config;
mod error;
mod files;
pub mod locks;
mod members;
mod notes;
mod pod;
mod records;
mod reports;
mod rules;
mod runsc;
mod volumes;

pub use error::Error;
pub use notes::{
    BoundNote, Depth, DozeNote, PauseMark, ProbeNote, Probes, RestoreNote, Session, SleepNote,
    TrafficMap, UnacknowledgedMap, UnknownCause, WakeCause, WakeNote,
};
pub use pod::{
    Addresses, ContainerRecord, FetchFailure, PodRecord, RestoreReport, Role, SandboxState,
};
pub use records::{PodLock, Records};
pub use rules::Rules;
pub use runsc::RunscRecord;
pub use volumes::{SandboxVolume, VolumeDirectory};

#[cfg(test)]
pub(crate) mod tests;
