//! The shim's service for the node's agent ([`torpor_messages::service`]).
//!
//! The pause container's keeper accepts the connections; a thread of its own serves each. The agent
//! may be hostile: its requests are bounded in number, size and time, and reach this pod only.

use std::fs::{File, Permissions};
use std::io::{Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, ensure};
use nix::sys::socket::{getsockopt, sockopt};
use rustix::fs::{MemfdFlags, memfd_create};
use torpor_cgroup::limits::Limits;
use torpor_core::ids::SandboxId;
use torpor_core::state::Live;
use torpor_messages::keeper;
use torpor_messages::service::{
    Answer, Envelope, MOST_STEPS, REASON_BUSY, REASON_VERSION, Request, SOCKET, Steps, VERSION,
};
use torpor_messages::wire::{limit_wait, listen, receive};
use torpor_records::{PodRecord, Probes, Rules};
use torpor_sandbox::node::{CALL_LIMIT, Node};
use torpor_sandbox::{exec_leftovers, figures, gofers, idle, limits, log_line, observe, plan};
use torpor_snapshots::AGENT_ID;

use crate::commands;
use crate::task::container::lock;

/// Requests served at the same time. The agent makes one at a time. It may repeat one whose
/// answer was late, and the steps of an agent that has ended may still be under way.
const MOST_AT_ONCE: usize = 4;
/// Limit for the agent to send its request once it is connected.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// The service of one pod.
pub(crate) struct Service {
    node: Arc<Node>,
    sandbox: SandboxId,
    listener: OwnedFd,
    path: PathBuf,
    under_way: AtomicUsize,
    /// The limits that the running sandbox got last.
    limits: Mutex<Option<Limits>>,
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Service {
    /// Begins to listen in the pod's directory.
    pub(crate) fn begin(node: &Arc<Node>, sandbox: &SandboxId) -> anyhow::Result<Arc<Self>> {
        let path = node.records.pod_dir(sandbox).join(SOCKET);
        let listener =
            listen(&path).with_context(|| format!("cannot listen on {}", path.display()))?;
        open_to_agent(&path)?;
        Ok(Arc::new(Self {
            node: Arc::clone(node),
            sandbox: sandbox.clone(),
            listener,
            path,
            under_way: AtomicUsize::new(0),
            limits: Mutex::default(),
        }))
    }

    /// The socket that is readable when a connection waits.
    pub(crate) fn listener(&self) -> &OwnedFd {
        &self.listener
    }

    /// Serves a connection in a thread of its own. A peer that is not the agent gets no answer.
    pub(crate) fn serve(self: &Arc<Self>, peer: OwnedFd) {
        if !is_agent(&peer) {
            return;
        }
        if self.under_way.load(Ordering::Acquire) >= MOST_AT_ONCE {
            let busy = Answer::refused(REASON_BUSY, "other requests are being served");
            return busy.send(&peer);
        }
        self.under_way.fetch_add(1, Ordering::AcqRel);
        let service = Arc::clone(self);
        let serve = move || {
            service.respond(peer);
            service.under_way.fetch_sub(1, Ordering::AcqRel);
        };
        let thread = std::thread::Builder::new().name("agent".to_owned());
        if let Err(error) = thread.spawn(serve) {
            self.under_way.fetch_sub(1, Ordering::AcqRel);
            log_line!("cannot serve the agent: {error}");
        }
    }

    fn respond(&self, peer: OwnedFd) {
        let answered = match request(&peer) {
            Ok(request) => self.answer(request, &peer),
            Err(refused) => Ok(Some(refused)),
        };
        let answer = answered.unwrap_or_else(|error| {
            let reason = torpor_sandbox::restore::reason_or("Failed", &error);
            Some(Answer::refused(reason, format!("{error:#}")))
        });
        if let Some(answer) = answer {
            answer.send(&peer);
        }
    }

    /// Returns the answer; none if a command has sent it.
    fn answer(&self, request: Request, peer: &OwnedFd) -> anyhow::Result<Option<Answer>> {
        let (node, sandbox) = (&self.node, &self.sandbox);
        let answer = match request {
            Request::Steps(steps) => return self.take(&steps, peer).map(|()| None),
            Request::Rules { rules, probes } => {
                self.follow(&rules, &probes)?;
                Answer::Done
            }
            Request::Observe { idle } => {
                let record = node.records.pod(sandbox)?;
                let held = node.records.try_lock(sandbox)?;
                self.observe(&record, held.is_none(), idle)
            }
            Request::Inquire => self.undisturbed(|record| inquire(node, record))?,
            Request::Measure => {
                self.undisturbed(|record| Ok(Answer::Measured(figures::figures(node, record))))?
            }
            Request::Watch => self.undisturbed(|record| watch(node, &record.sandbox))?,
        };
        Ok(Some(answer))
    }

    /// Returns the answer of a function that holds the pod's lock, or a refusal if another process
    /// has the lock.
    fn undisturbed(
        &self,
        answer: impl FnOnce(&PodRecord) -> anyhow::Result<Answer>,
    ) -> anyhow::Result<Answer> {
        let record = self.node.records.pod(&self.sandbox)?;
        match self.node.records.try_lock(&self.sandbox)? {
            Some(_held) => answer(&record),
            None => Ok(Answer::refused(
                REASON_BUSY,
                "another process changes the sandbox",
            )),
        }
    }

    /// Observes the sandbox. A running one is also kept in order: containers without a gofer end,
    /// and its programs see the Pod's limits.
    fn observe(&self, record: &PodRecord, busy: bool, idle: bool) -> Answer {
        let observed = observe::observe(&self.node, record, busy, idle);
        let mut sent = lock(&self.limits);
        match observed.basis.live {
            Live::Running if !busy => {
                gofers::end_containers_without(&self.node, &self.sandbox);
                *sent = limits::send(&self.node, record, sent.take());
            }
            // A sandbox that does not run at the moment keeps its limits.
            Live::Running | Live::Paused | Live::Unknown => {}
            Live::None => *sent = None,
        }
        Answer::Observed(observed)
    }

    /// Follows the rules. A new sandbox that is to sleep waits, under its lock, for the note of the
    /// probes: with the note its keeper has the rules, too.
    fn follow(&self, rules: &Rules, probes: &Probes) -> anyhow::Result<()> {
        let dir = self.node.pause_dir(&self.sandbox);
        keeper::ask(
            &dir,
            &keeper::Request::Rules(rules.clone()),
            &[],
            CALL_LIMIT,
        )?;
        Ok(self.node.records.write_probes(&self.sandbox, probes)?)
    }

    /// Starts the command that takes the steps. Its standard output is the connection.
    fn take(&self, steps: &Steps, peer: &OwnedFd) -> anyhow::Result<()> {
        ensure!(
            steps.steps.len() <= MOST_STEPS,
            "a plan has {MOST_STEPS} steps at most"
        );
        if let Some((rules, probes)) = &steps.rules {
            self.follow(rules, probes)?;
        }
        let mut input: File = memfd_create("torpor-steps", MemfdFlags::CLOEXEC)?.into();
        input.write_all(&serde_json::to_vec(steps)?)?;
        input.rewind()?;
        let mut child = commands::child("steps")
            .arg(self.sandbox.as_str())
            .stdin(input)
            .stdout(peer.try_clone()?)
            .spawn()
            .context("cannot run the command steps")?;
        // The shim's reaper may have waited for it.
        let _ = child.wait();
        Ok(())
    }
}

fn inquire(node: &Node, record: &PodRecord) -> anyhow::Result<Answer> {
    exec_leftovers::note(node, &record.sandbox);
    let age = idle::last_packet(node, &record.sandbox)?;
    Ok(Answer::Inquired {
        packet_millis: age.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
        busy: idle::is_marked_busy(node, record)?,
    })
}

fn watch(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Answer> {
    match plan::watch(node, sandbox) {
        Ok(()) => Ok(Answer::Done),
        Err(keeper::Error::Refused { reason, message }) => Ok(Answer::refused(&reason, message)),
        Err(error) => Err(error.into()),
    }
}

/// Lets the agent, and no other user, connect to the socket.
fn open_to_agent(path: &Path) -> anyhow::Result<()> {
    chown(path, None, Some(AGENT_ID))
        .and_then(|()| std::fs::set_permissions(path, Permissions::from_mode(0o660)))
        .with_context(|| format!("cannot let the agent connect to {}", path.display()))
}

/// Reports whether the peer is the agent. With Kata the agent runs as root.
fn is_agent(peer: &OwnedFd) -> bool {
    let credentials = getsockopt(peer, sockopt::PeerCredentials);
    credentials.is_ok_and(|peer| [0, AGENT_ID].contains(&peer.uid()))
}

/// Receives the request. `Err`: the answer to one that is not served.
fn request(peer: &OwnedFd) -> Result<Request, Answer> {
    let failed = |error: nix::Error| Answer::refused("BadRequest", error.to_string());
    limit_wait(peer, REQUEST_LIMIT).map_err(failed)?;
    let (bytes, _) = receive(peer).map_err(failed)?;
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> Result<Request, Answer> {
    #[derive(serde::Deserialize)]
    struct Version {
        version: u32,
    }
    let bad = |error: serde_json::Error| Answer::refused("BadRequest", error.to_string());
    let Version { version } = serde_json::from_slice(bytes).map_err(bad)?;
    if version != VERSION {
        let message = format!(
            "the Pod's shim serves version {VERSION} and was asked in version {version}: it was started by another version of Torpor; delete the Pod to have it started anew"
        );
        return Err(Answer::refused(REASON_VERSION, message));
    }
    let envelope: Envelope = serde_json::from_slice(bytes).map_err(bad)?;
    Ok(envelope.request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_is_refused_by_name_before_its_request_is_read() {
        let next = br#"{"version":2,"request":{"do":"fly"}}"#;
        let Err(Answer::Refused { reason, message }) = parse(next) else {
            panic!("served");
        };
        assert_eq!(reason, REASON_VERSION);
        assert!(message.contains("delete the Pod"), "{message}");
        let own = br#"{"version":1,"request":{"do":"inquire"}}"#;
        assert_eq!(parse(own), Ok(Request::Inquire));
        let unknown = br#"{"version":1,"request":{"do":"fly"}}"#;
        assert!(
            matches!(parse(unknown), Err(Answer::Refused { reason, .. }) if reason == "BadRequest")
        );
    }
}
