//! Figures of use of a container, in the form of containerd's metrics.

use std::path::Path;
use std::time::Duration;

use containerd_shim::Error;
use containerd_shim::protos::protobuf::MessageField;
use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::{cgroups, cgroups_v2};
use torpor_cgroup::Hierarchies;

use super::events::to_any;

/// Reads the figures of a container's cgroup. The processes of the sandbox are in the pod's cgroup
/// and do not count for one container.
pub(crate) fn read(cgroups: &Hierarchies, cgroup: &Path) -> Result<Any, Error> {
    let memory = cgroups.working_set(cgroup).unwrap_or(0);
    let used = cgroups.processor_time(cgroup).unwrap_or(Duration::ZERO);
    match cgroups.is_unified() {
        true => to_any("io.containerd.cgroups.v2", &unified(memory, used)),
        false => to_any("io.containerd.cgroups.v1", &split(memory, used)),
    }
}

fn split(memory: u64, used: Duration) -> cgroups::metrics::Metrics {
    use cgroups::metrics::{CPUStat, CPUUsage, MemoryEntry, MemoryStat, Metrics};
    Metrics {
        cpu: MessageField::some(CPUStat {
            usage: MessageField::some(CPUUsage {
                total: u64::try_from(used.as_nanos()).unwrap_or(u64::MAX),
                ..CPUUsage::default()
            }),
            ..CPUStat::default()
        }),
        memory: MessageField::some(MemoryStat {
            usage: MessageField::some(MemoryEntry {
                usage: memory,
                ..MemoryEntry::default()
            }),
            ..MemoryStat::default()
        }),
        ..Metrics::default()
    }
}

fn unified(memory: u64, used: Duration) -> cgroups_v2::metrics::Metrics {
    use cgroups_v2::metrics::{CPUStat, MemoryStat, Metrics};
    Metrics {
        cpu: MessageField::some(CPUStat {
            usage_usec: u64::try_from(used.as_micros()).unwrap_or(u64::MAX),
            ..CPUStat::default()
        }),
        memory: MessageField::some(MemoryStat {
            usage: memory,
            ..MemoryStat::default()
        }),
        ..Metrics::default()
    }
}
