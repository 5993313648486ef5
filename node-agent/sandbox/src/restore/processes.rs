//! The end of the processes in a cgroup.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use torpor_runsc::process::is_zombie;

use crate::node::Node;

/// Limit for killed processes to end. A process ends within milliseconds, unless it is stuck in the
/// kernel.
const KILL_LIMIT: Duration = Duration::from_secs(10);
/// Limit for ended processes to be reaped. The shim is the parent of the sandbox' processes and
/// reaps them at once. If the shim has died, the machine's first process inherits them, and some
/// init programs reap only every two seconds.
const REAP_LIMIT: Duration = Duration::from_secs(3);

/// Kills every process of a cgroup but this one, and waits until each has been reaped: runsc takes
/// an ended process that is not reaped for a running one. The wait has a limit, because Torpor
/// cannot repair a parent that never reaps.
pub fn kill_processes(node: &Node, cgroup: &Path) -> anyhow::Result<()> {
    let killed = end_processes(node, cgroup)?;
    let began = Instant::now();
    // Newer kernels remove an ended process from its cgroup's list before it is reaped.
    while killed.iter().any(|pid| is_zombie(*pid)) && began.elapsed() < REAP_LIMIT {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Kills every process of a cgroup but this one, and waits until they have ended; returns their
/// pids.
pub fn end_processes(node: &Node, cgroup: &Path) -> anyhow::Result<BTreeSet<i32>> {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let began = Instant::now();
    let mut killed = BTreeSet::new();
    loop {
        let mut pids = node.cgroups.pids(cgroup)?;
        // 0 stands for a process of another pid namespace, which this process cannot signal.
        pids.retain(|pid| *pid != own && *pid > 0 && !is_zombie(*pid));
        if pids.is_empty() {
            return Ok(killed);
        }
        if began.elapsed() > KILL_LIMIT {
            bail!(
                "processes {pids:?} in cgroup {} do not end",
                cgroup.display()
            );
        }
        for pid in pids {
            let Some(process) = Pid::from_raw(pid) else {
                continue;
            };
            match kill_process(process, Signal::KILL) {
                Ok(()) | Err(Errno::SRCH) => killed.insert(pid),
                Err(error) => return Err(error).context("cannot kill a process of the sandbox"),
            };
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
