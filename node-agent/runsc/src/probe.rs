//! The capabilities of this node's runsc, and the fingerprint of this node's images.

use std::collections::BTreeSet;
use std::time::Duration;

use torpor_snapshots::{Digest, Fingerprint};

use crate::command::{self, NodeRunsc, SANDBOX_FLAGS};
use torpor_records::config::Config;

const LIMIT: Duration = Duration::from_secs(20);

/// Why a node could not be probed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {0}")]
    Read(&'static str, #[source] std::io::Error),
    #[error("cannot determine runsc's capabilities")]
    Runsc(#[from] command::Error),
}

/// Capabilities of runsc on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Saving in the safe order: a checkpoint of a paused sandbox that stays and keeps its
    /// connections.
    pub hibernate: bool,
    pub restore: bool,
    /// Pausing and resuming.
    pub freeze: bool,
    /// Restoring a sandbox that runs before all pages are loaded.
    pub background_restore: bool,
}

/// Reads the capabilities from runsc's help texts (gVisor offers no other way).
pub fn capabilities(runsc: &NodeRunsc) -> Result<Capabilities, Error> {
    let checkpoint = runsc.capture("help", &["checkpoint"], LIMIT)?;
    let restore = runsc.capture("help", &["restore"], LIMIT)?;
    let commands = runsc.capture("help", &[], LIMIT)?;
    let flags = runsc.capture("flags", &[], LIMIT)?;
    Ok(from_help(&checkpoint, &restore, &commands, &flags))
}

fn from_help(checkpoint: &str, restore: &str, commands: &str, flags: &str) -> Capabilities {
    Capabilities {
        hibernate: [
            "-leave-running",
            "-compression",
            "-exclude-committed-zero-pages",
        ]
        .iter()
        .all(|flag| checkpoint.contains(flag))
            && flags.contains("-allow-connected-on-save"),
        restore: restore.contains("-image-path") && restore.contains("-detach"),
        freeze: commands.contains("pause") && commands.contains("resume"),
        background_restore: restore.contains("-background"),
    }
}

/// Returns the fingerprint of this node. `runsc_version` is for people: a restore, which only
/// compares fingerprints, leaves it empty.
pub fn fingerprint(config: &Config, runsc_version: String) -> Result<Fingerprint, Error> {
    let info = read("/proc/cpuinfo")?;
    let kernel = read("/proc/sys/kernel/osrelease")?.trim().to_owned();
    let cpu_features = cpu_features(&info);
    Ok(Fingerprint {
        runsc_digest: config.runsc_digest.clone(),
        runsc_version,
        platform: config.platform.clone(),
        flags: SANDBOX_FLAGS
            .iter()
            .map(|flag| (*flag).to_owned())
            .collect(),
        cpu_features_digest: Digest::of(cpu_features.join(" ").as_bytes()).to_string(),
        cpu_features,
        kernel,
    })
}

fn read(path: &'static str) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::Read(path, source))
}

/// Returns the features that every processor of the machine has (`flags` on x86, `Features` on
/// arm64), sorted.
fn cpu_features(cpuinfo: &str) -> Vec<String> {
    let of_line = |line: &str| -> Option<BTreeSet<String>> {
        let (key, value) = line.split_once(':')?;
        matches!(key.trim(), "flags" | "Features")
            .then(|| value.split_whitespace().map(str::to_owned).collect())
    };
    cpuinfo
        .lines()
        .filter_map(of_line)
        .reduce(|a, b| a.intersection(&b).cloned().collect())
        .unwrap_or_default()
        .into_iter()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_those_that_every_processor_has() {
        let info = "processor : 0\nflags\t\t: sse2 avx fpu\n\nprocessor : 1\nflags : fpu sse2\n";
        assert_eq!(cpu_features(info), ["fpu", "sse2"]);
        assert_eq!(cpu_features("Features : asimd\n"), ["asimd"]);
    }

    #[test]
    fn a_runsc_without_the_safe_order_cannot_hibernate() {
        let new = "-leave-running -compression -exclude-committed-zero-pages";
        let restore = "-image-path -detach -background";
        let commands = "pause resume";
        let all = from_help(new, restore, commands, "-allow-connected-on-save");
        assert!(all.hibernate && all.restore && all.freeze && all.background_restore);
        // gVisor of 2024, as Debian ships it.
        let old = from_help(new, "-image-path -detach", commands, "-net-disconnect-ok");
        assert!(!old.hibernate && old.restore && old.freeze && !old.background_restore);
    }
}
