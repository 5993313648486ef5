//! Figures of this machine and of its processes.

use std::{fs, time::Duration};

use anyhow::Context as _;
use torpor_tests::{agent::Agent, machine::Process};

/// Ticks per second in /proc, on every architecture that matters here.
const TICKS: u64 = 100;

/// Describes the machine: kernel and processors.
pub(crate) fn describe() -> anyhow::Result<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let processors = std::thread::available_parallelism()?;
    Ok(format!(
        "Linux {} {}, {processors} processors",
        release.trim(),
        std::env::consts::ARCH
    ))
}

/// Returns the memory of the machine in GiB.
pub(crate) fn memory_gib() -> anyhow::Result<f64> {
    Ok(number(&fs::read_to_string("/proc/meminfo")?, "MemTotal:")? / f64::from(1 << 20))
}

/// Returns the processor time that the whole machine has used so far.
pub(crate) fn busy() -> anyhow::Result<Duration> {
    let text = fs::read_to_string("/proc/stat")?;
    busy_in(&text).context("/proc/stat has no line of all processors")
}

fn busy_in(stat: &str) -> Option<Duration> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let fields: Vec<u64> = line
        .split_whitespace()
        .map_while(|field| field.parse().ok())
        .collect();
    // The fourth and fifth are idle time and time that waits for I/O.
    let [user, nice, system, _, _, irq, softirq, ..] = fields[..] else {
        return None;
    };
    Some(of_ticks(user + nice + system + irq + softirq))
}

fn of_ticks(ticks: u64) -> Duration {
    Duration::from_millis(ticks * 1000 / TICKS)
}

/// Returns the processor time of all of the processes so far; one that has ended counts nothing.
pub(crate) fn processor_time(processes: &[Process]) -> Duration {
    of_ticks(processes.iter().filter_map(Process::cpu_ticks).sum())
}

/// Returns the proportional set size of all of the processes, in KiB.
pub(crate) fn pss_kib(processes: &[Process]) -> u64 {
    processes.iter().filter_map(Process::pss_kib).sum()
}

/// Returns the resident memory of a process, in MiB.
pub(crate) fn resident_mib(pid: i32) -> anyhow::Result<f64> {
    memory_mib(pid, "VmRSS:")
}

/// Returns the most resident memory that a process has had, in MiB.
pub(crate) fn peak_mib(pid: i32) -> anyhow::Result<f64> {
    memory_mib(pid, "VmHWM:")
}

fn memory_mib(pid: i32, field: &str) -> anyhow::Result<f64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).context(path)?;
    Ok(number(&text, field)? / 1024.0)
}

fn number(text: &str, name: &str) -> anyhow::Result<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let word = line.and_then(|line| line.split_whitespace().next());
    Ok(word.with_context(|| format!("no {name}"))?.parse()?)
}

/// Returns the process of the agent.
pub(crate) fn agent() -> anyhow::Result<Process> {
    Ok(Agent::find()?.process)
}

/// Returns percent of a processor.
pub(crate) fn percent(used: Duration, of: Duration) -> f64 {
    100.0 * used.as_secs_f64() / of.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_no_processor_time() {
        let stat = "cpu  100 20 30 9999 9999 4 6 0 0 0\ncpu0 1 1 1 1 1 1 1 0 0 0\n";
        assert_eq!(busy_in(stat), Some(Duration::from_millis(1600)));
        assert_eq!(busy_in("cpu0 1 2 3"), None);
    }

    #[test]
    fn a_percent_is_of_one_processor() {
        let half = percent(Duration::from_secs(3), Duration::from_secs(6));
        assert_eq!(half, 50.0);
    }
}
