//! The last use of a sandbox by packets, and its program's busy mark. The caller holds the lock.

use std::time::Duration;

use anyhow::bail;
use torpor_core::ids::SandboxId;
use torpor_link::traffic::{self, Ages};
use torpor_records::PodRecord;
use torpor_runsc::control;
use torpor_runsc::spec::PAUSE_VOLUMES;

use crate::node::Node;

/// Name of the emptyDir in which a program may make a busy file.
const BUSY_VOLUME: &str = "torpor";
/// The busy files. While one exists, the sandbox is in use. The sandbox runtime makes the
/// second for calls of `PUT /v1/busy` (runtime/src/busy.rs).
const BUSY_FILES: [&str; 2] = ["busy", "busy-call"];
/// Time limit for opening a busy file. A file opens at once, while the open of a FIFO in its place
/// would never return.
const BUSY_LIMIT: Duration = Duration::from_secs(1);

/// Returns when the pod's links last carried traffic that is not noise.
pub(crate) fn packets(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Ages> {
    match node.records.traffic(sandbox)? {
        Ok(watch) => Ok(traffic::last(watch)?),
        Err(why) => bail!(why),
    }
}

/// Returns the age of the last packet that was no probe of the kubelet; none without one.
pub fn last_packet(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Option<Duration>> {
    let probed = node.records.probes(sandbox)?.ports;
    let probed: Vec<u16> = probed.into_iter().collect();
    Ok(packets(node, sandbox)?.youngest(&probed))
}

/// Returns whether a busy file exists.
pub fn is_marked_busy(node: &Node, record: &PodRecord) -> anyhow::Result<bool> {
    let mut volumes = record.volumes.iter();
    if !volumes.any(|volume| volume.name == BUSY_VOLUME) {
        return Ok(false);
    }
    let mut control = node.runsc.connect(&record.sandbox)?;
    for file in BUSY_FILES {
        let path = format!("{PAUSE_VOLUMES}/{BUSY_VOLUME}/{file}");
        match control.has_file(&path, BUSY_LIMIT) {
            Ok(false) => {}
            // The program may have put something there that cannot be opened as a file.
            Ok(true) | Err(control::Error::Refused { .. } | control::Error::NoAnswer { .. }) => {
                return Ok(true);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(false)
}
