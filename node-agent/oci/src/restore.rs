//! Bringing a pod back from an image: in place (a wake), in a new Pod (a resume), after a reboot.
//!
//! A restored gVisor sandbox starts when its last container is there, and the kubelet brings containers one after the
//! other. So a pod that continues an image collects them: its containers get keepers and records, and nothing of gVisor,
//! until the last one is started. Then everything is done at once, by the same code as a wake in place.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use jiff::Timestamp;
use torpor_core::ids::{ImageId, SandboxId};
use torpor_core::ledger::Memory;
use torpor_core::{Entry, RolledBack};
use torpor_records::Role;
use torpor_records::config::Revoked;
use torpor_records::{
    ContainerRecord, Depth, PodRecord, RestoreReport, SandboxState, SleepNote, WakeCause,
};
use torpor_runsc::held_open::keeper_lives;
use torpor_runsc::keeper::{self, Answer, Request};
use torpor_runsc::probe;
use torpor_runsc::spec::Spec;
use torpor_snapshots::{Image, LedgerFile, Manifest, Mismatch, Store};

use crate::node::{CALL_LIMIT, Node};

mod begin;
mod known;
mod memory;
mod others;
mod recorded;
mod renew;
pub(crate) mod room;
mod sandbox;
mod source;

use known::saved_name;
pub(crate) use known::{completed, is_new, saved_pause};
pub(crate) use memory::{
    AboutToRun, about_to_run, memory_image, restored, resume, run_on, sleep_on, stands_in,
};
use recorded::{Restored, wake_recorded};
pub(crate) use sandbox::{end_processes, kill_processes, put_quotas_back};
use source::{Source, last_image, source};

/// Annotations of the Pod, set by the controller.
const RESTORE_IMAGE: &str = "torpor.dev/restore-image";
const RESTORE_COPY: &str = "torpor.dev/restore-copy";
const ON_RESTORE_EXEC: &str = "torpor.dev/on-restore-exec";
const ON_RESTORE_EXEC_CONTAINER: &str = "torpor.dev/on-restore-exec-container";
/// The same, of the Sandbox' user: what a sandbox that crashed while it was awake starts from.
const ON_CRASH: &str = "torpor.dev/on-crash";

/// Why an image was not restored: a reason for conditions, and words.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Refusal {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

impl From<torpor_snapshots::ImageError> for Refusal {
    fn from(error: torpor_snapshots::ImageError) -> Self {
        let reason = error.reason();
        Self {
            reason,
            message: format!("{:#}", anyhow::Error::new(error)),
        }
    }
}

impl From<Mismatch> for Refusal {
    fn from(mismatch: Mismatch) -> Self {
        Self {
            reason: mismatch.reason(),
            message: mismatch.to_string(),
        }
    }
}

impl From<Revoked> for Refusal {
    fn from(revoked: Revoked) -> Self {
        Self {
            reason: Revoked::REASON,
            message: revoked.to_string(),
        }
    }
}

/// The reason of a restore that failed: its own where it was refused.
fn reason_of(error: &anyhow::Error) -> &'static str {
    let refusal = error.downcast_ref::<Refusal>();
    refusal.map_or("RestoreFailed", |refusal| refusal.reason)
}

fn store(node: &Node) -> anyhow::Result<Store> {
    Ok(Store::open(&node.config.store_dir)?)
}

/// Decides how a new sandbox begins and records it. Verifies the image, so that what can be known to fail fails before
/// anything was done. That is much work, and the pod's: the caller is in its cgroup.
pub(crate) fn begin(node: &Node, pod: &PodRecord, spec: &Spec) -> anyhow::Result<SandboxState> {
    let given = spec
        .annotation(RESTORE_IMAGE)
        .map(ImageId::parse)
        .transpose()?;
    let was_restored = given.is_some();
    let copy = spec.annotation(RESTORE_COPY) == Some("true");
    let store = store(node)?;
    let ledger = store.ledger(&pod.pod_uid)?;
    let held = |image: &ImageId| store.image(&pod.namespace, image).is_ok();
    let goes_back = spec.annotation(ON_CRASH) == Some("LastImage");
    let last = match goes_back {
        true => last_image(&store, pod)?,
        false => None,
    };
    let known = ledger.read()?;
    // For a cold start; an image brings the build that made it.
    let own_build = node.config.admit_runsc(&pod.runsc_digest);
    let state = match source(&known, held, given, copy, last) {
        Source::Cold => {
            own_build?;
            if known.seq > 0 {
                report_cold_start(node, pod, goes_back, was_restored)?;
            }
            SandboxState::Running
        }
        Source::Image { image, copy } => {
            // Whatever the policy is: it only takes a moment.
            if let Err(refusal) = is_given_back(&store, pod, &image, copy) {
                report_failure(node, pod, &image, &refusal)?;
                return Err(refusal.into());
            }
            // All processors hash it.
            let fits = || admit(node, &store, pod, &image, copy);
            match sandbox::without_quotas(node, pod, fits)? {
                Ok(build) => {
                    node.records.write_pod(&build.of(pod))?;
                    SandboxState::Restoring {
                        image,
                        started: Vec::new(),
                    }
                }
                Err(refusal) if pod.cold_start_on_failure => {
                    own_build?;
                    give_up(node, pod, &ledger, &image, refusal)?;
                    SandboxState::Running
                }
                Err(refusal) => {
                    report_failure(node, pod, &image, &refusal)?;
                    return Err(refusal.into());
                }
            }
        }
    };
    node.records.write_state(&pod.sandbox, &state)?;
    Ok(state)
}

/// A Pod that has run starts anew: that there is no memory is told where somebody wished for it, or where the last report
/// says that there is some. Of a Pod that `was_restored` the report may be gone (a reboot takes it), and who waits for its word waits on.
fn report_cold_start(
    node: &Node,
    pod: &PodRecord,
    goes_back: bool,
    was_restored: bool,
) -> anyhow::Result<()> {
    let told = node.records.report(&pod.pod_uid)?;
    let is_news = match told {
        Some(RestoreReport::Restored { .. }) => true,
        Some(RestoreReport::ColdStarted { .. }) => false,
        Some(RestoreReport::Failed { .. }) | None => was_restored,
    };
    if !goes_back && !is_news {
        return Ok(());
    }
    let message = match goes_back {
        true => {
            "The sandbox ended while it was awake, and its Pod has made no image to roll back to: the sandbox started cold."
        }
        false => "The sandbox ended while it was awake: it started cold, as Kubernetes starts it.",
    };
    let report = RestoreReport::ColdStarted {
        image: None,
        reason: "Crashed".to_owned(),
        message: message.to_owned(),
    };
    Ok(node.records.write_report(&pod.pod_uid, &report)?)
}

/// A build of runsc.
struct Build {
    path: PathBuf,
    digest: String,
}

impl Build {
    /// The pod, run by this build.
    fn of(self, pod: &PodRecord) -> PodRecord {
        PodRecord {
            runsc: self.path,
            runsc_digest: self.digest,
            ..pod.clone()
        }
    }
}

/// A Pod that took the image and never ran has it until the node's agent has seen that Pod gone.
fn is_given_back(
    store: &Store,
    pod: &PodRecord,
    image: &ImageId,
    copy: bool,
) -> Result<(), Refusal> {
    let taken_by = match store.image(&pod.namespace, image) {
        Ok(found) if !copy => found.consumed_by()?,
        // What is wrong with it is said by who admits it.
        _ => None,
    };
    let Some(other) = taken_by.filter(|other| *other != pod.pod_uid) else {
        return Ok(());
    };
    let theirs = store.ledger(&other).and_then(|ledger| ledger.read());
    if theirs.is_ok_and(|state| state.memory.image() == Some(image)) {
        return Err(Refusal {
            reason: "RestoreFailed",
            message: format!(
                "Pod {other} has taken image {image} and never ran; the node's agent gives the image back once that Pod is gone, and the restore of this Pod is then tried again"
            ),
        });
    }
    Ok(())
}

/// Whether the image may and can be restored here; answers the build of runsc that it takes.
fn admit(
    node: &Node,
    store: &Store,
    pod: &PodRecord,
    image_id: &ImageId,
    copy: bool,
) -> Result<Build, Refusal> {
    let image = store.image(&pod.namespace, image_id)?;
    if !copy
        && let Some(other) = image.consumed_by()?
        && other != pod.pod_uid
    {
        return Err(Refusal {
            reason: "ImageStale",
            message: format!(
                "image {image_id} is stale, because Pod {other} was restored from it before; \
                 to start from it anyway, annotate the Sandbox with torpor.dev/restore-from"
            ),
        });
    }
    refuse_outdated(store, pod, image_id, copy)?;
    let mut here = probe::fingerprint(&node.config, String::new()).map_err(|error| Refusal {
        reason: "RestoreFailed",
        message: format!("{:#}", anyhow::Error::new(error)),
    })?;
    let made_by = &image.manifest().fingerprint.runsc_digest;
    node.config.admit_runsc(made_by)?;
    let build = node.config.runsc_build(made_by);
    if build.is_some() {
        here.runsc_digest.clone_from(made_by);
    }
    image.manifest().fingerprint.fits(&here)?;
    image.verify()?;
    let path = build.unwrap_or_else(|| node.config.runsc.clone());
    Ok(Build {
        path,
        digest: here.runsc_digest,
    })
}

/// The Pod that was saved may have run on since: its ledger, as long as it is there, says so.
fn refuse_outdated(
    store: &Store,
    pod: &PodRecord,
    image: &ImageId,
    copy: bool,
) -> Result<(), Refusal> {
    if copy || image.pod() == &pod.pod_uid {
        return Ok(());
    }
    let state = store.ledger(image.pod()).and_then(|ledger| ledger.read());
    let state = state.map_err(|error| Refusal {
        reason: error.reason(),
        message: format!("{:#}", anyhow::Error::new(error)),
    })?;
    if state.seq > 0 && state.is_stale(image) {
        return Err(Refusal {
            reason: "ImageStale",
            message: format!(
                "image {image} is stale, because Pod {} ran on after the image was made; \
                 to start from it anyway, annotate the Sandbox with torpor.dev/restore-from",
                image.pod()
            ),
        });
    }
    Ok(())
}

/// From now on this Pod starts cold, and says why.
fn give_up(
    node: &Node,
    pod: &PodRecord,
    ledger: &LedgerFile,
    image: &ImageId,
    refusal: Refusal,
) -> anyhow::Result<()> {
    ledger.append(&Entry::Awake)?;
    let report = RestoreReport::ColdStarted {
        image: Some(image.clone()),
        reason: refusal.reason.to_owned(),
        message: refusal.message,
    };
    Ok(node.records.write_report(&pod.pod_uid, &report)?)
}

fn report_failure(
    node: &Node,
    pod: &PodRecord,
    image: &ImageId,
    refusal: &Refusal,
) -> anyhow::Result<()> {
    let report = RestoreReport::Failed {
        image: image.clone(),
        reason: refusal.reason.to_owned(),
        message: refusal.message.clone(),
    };
    Ok(node.records.write_report(&pod.pod_uid, &report)?)
}

/// The kubelet brings back what was killed of a Pod, and somebody may want to exec in it, but the sandbox goes on in another one: what it did in this one would be lost, and
/// its image would be stale. A Pod that has not run yet and is to be suspended all the same is restored first, and saved.
fn ensure_goes_on(node: &Node, pod: &PodRecord) -> anyhow::Result<()> {
    let ledger = store(node)?.ledger(&pod.pod_uid)?.read()?;
    ensure!(
        ledger.memory.image().is_none() || !node.records.suspends(&pod.pod_uid),
        "the Sandbox is being suspended, and its memory stays in its image: this Pod is about to be deleted"
    );
    Ok(())
}

/// A container joins its pod: the pod's state, where a hibernated pod that gets a container back becomes one that is
/// being restored (the kubelet brings a container back whose keeper was killed).
pub(crate) fn join(node: &Node, sandbox: &SandboxId) -> anyhow::Result<SandboxState> {
    let state = node.records.state(sandbox)?;
    let SandboxState::Hibernated { image } = state else {
        return Ok(state);
    };
    ensure_goes_on(node, &node.records.pod(sandbox)?)?;
    let started = node
        .records
        .containers_of(sandbox)?
        .into_iter()
        .filter(|container| container.role == Role::Container && container.completed.is_none())
        // One that has lost its keeper comes back too.
        .filter(keeper_lives)
        .map(|container| container.id)
        .collect();
    let state = SandboxState::Restoring { image, started };
    node.records.write_state(sandbox, &state)?;
    Ok(state)
}

/// A restore has failed. With policy ColdStart the pod's sandbox is ended, so that the kubelet makes a new one, which
/// starts cold from its first init container on. Answers the error for this call in any case.
fn fail(
    node: &Node,
    pod: &PodRecord,
    image: &ImageId,
    refusal: Refusal,
) -> anyhow::Result<anyhow::Error> {
    if !pod.cold_start_on_failure {
        report_failure(node, pod, image, &refusal)?;
        return Ok(refusal.into());
    }
    let message = refusal.message.clone();
    give_up(
        node,
        pod,
        &store(node)?.ledger(&pod.pod_uid)?,
        image,
        refusal,
    )?;
    let pause = node.records.container_dir(&pod.sandbox.clone().into());
    // A keeper that is gone has ended the sandbox already.
    let _ = keeper::ask(&pause, &Request::Exit { code: 137 }, &[], CALL_LIMIT);
    Ok(anyhow::anyhow!(
        "the Pod starts cold, because its memory could not be restored: {message}"
    ))
}

/// A container of the image is there. Restores the pod when it is the last one.
pub(crate) fn arrive(
    node: &Node,
    pod: &PodRecord,
    image: &ImageId,
    mut started: Vec<torpor_core::ids::ContainerId>,
    record: &ContainerRecord,
) -> anyhow::Result<()> {
    ensure_goes_on(node, pod)?;
    if record.role == Role::Container && !started.contains(&record.id) {
        started.push(record.id.clone());
    }
    let store = store(node)?;
    let opened = store.image(&pod.namespace, image).map_err(Refusal::from)?;
    let parts: Vec<ContainerRecord> = node
        .records
        .containers_of(&pod.sandbox)?
        .into_iter()
        // One that has lost its keeper since is brought back by the kubelet.
        .filter(|part| {
            part.role == Role::Sandbox || started.contains(&part.id) && keeper_lives(&part)
        })
        .collect();
    if !is_complete(opened.manifest(), &parts) {
        let state = SandboxState::Restoring {
            image: image.clone(),
            started,
        };
        return Ok(node.records.write_state(&pod.sandbox, &state)?);
    }
    let ledger = store.ledger(&pod.pod_uid)?;
    let goes_back = ledger.read()?.was_left(image);
    let takes = image.pod() != &pod.pod_uid && !is_copy(node, pod)?;
    let pause = node.records.container_dir(&pod.sandbox.clone().into());
    sandbox::hold_packets(pod, &pause);
    let report = RestoreReport::Restored {
        image: image.clone(),
        rolled_back: goes_back.then(|| rolled_back(opened.manifest())),
    };
    let anew = Restored::Anew {
        takes,
        report: &report,
    };
    match wake_recorded(node, pod, &opened, &parts, &ledger, &anew) {
        Ok(stages) => {
            // It runs: that nobody learns where the time went is no reason to end it.
            let note = stages.restore_note(image);
            let _ = node.records.write_restore(&pod.sandbox, &note);
            Ok(())
        }
        Err(error) => {
            // A keeper that is gone holds nothing.
            let _ = keeper::ask(&pause, &Request::Release, &[], CALL_LIMIT);
            let refusal = Refusal {
                reason: reason_of(&error),
                message: format!("{error:#}; the restore is tried again"),
            };
            Err(fail(node, pod, image, refusal)?)
        }
    }
}

fn rolled_back(manifest: &Manifest) -> RolledBack {
    let age = Timestamp::now().duration_since(manifest.created_at);
    RolledBack {
        made: manifest.created_at,
        // A clock that was set back makes nothing older.
        age: age.try_into().unwrap_or_default(),
    }
}

/// Whether the user asked for the image by name; the pause container's spec says so.
fn is_copy(node: &Node, pod: &PodRecord) -> anyhow::Result<bool> {
    let spec = node.records.spec(&pod.sandbox.clone().into())?;
    Ok(Spec(spec).annotation(RESTORE_COPY) == Some("true"))
}

fn is_complete(manifest: &Manifest, parts: &[ContainerRecord]) -> bool {
    manifest.containers.iter().all(|saved| {
        parts
            .iter()
            .any(|part| saved_name(part).is_ok_and(|name| name == saved.name))
    })
}

/// Wakes a hibernated sandbox for an exec, a signal or a packet: the agent is not needed. The caller holds the lock.
pub(crate) fn wake_locked(
    node: &Node,
    sandbox: &SandboxId,
    cause: WakeCause,
) -> anyhow::Result<()> {
    let id = match settled(node, sandbox)? {
        SandboxState::Hibernated { image } => image,
        SandboxState::Running => return Ok(()),
        SandboxState::Restoring { .. } => bail!("the sandbox is not hibernated"),
    };
    let pod = node.records.pod(sandbox)?;
    ensure_goes_on(node, &pod)?;
    memory::ensure_held_open(node, sandbox)?;
    let store = store(node)?;
    let ledger = store.ledger(&pod.pod_uid)?;
    let image = store.image(&pod.namespace, &id)?;
    let parts = parts_of(node, sandbox, &image)?;
    let in_place = Restored::InPlace(cause);
    let stages = wake_recorded(node, &pod, &image, &parts, &ledger, &in_place)
        .context("cannot wake the hibernated sandbox")?;
    node.records.note_call(sandbox)?;
    node.records
        .write_wake(sandbox, &stages.note(cause, Depth::Hibernated))?;
    Ok(())
}

/// The sandbox' state, where a wake that was cut off after its point of no return is a wake. The caller holds the lock.
pub(crate) fn settled(node: &Node, sandbox: &SandboxId) -> anyhow::Result<SandboxState> {
    let state = node.records.state(sandbox)?;
    let SandboxState::Hibernated { .. } = state else {
        return Ok(state);
    };
    let pod = node.records.pod(sandbox)?;
    if store(node)?.ledger(&pod.pod_uid)?.read()?.memory != Memory::Live {
        return Ok(state);
    }
    catch_up(node, sandbox)?;
    Ok(SandboxState::Running)
}

/// Whoever woke it died before it could say so: the image is stale, and the sandbox runs, or has died awake.
fn catch_up(node: &Node, sandbox: &SandboxId) -> anyhow::Result<()> {
    put_quotas_back(node, sandbox);
    room::give_back(node, sandbox);
    node.records.write_state(sandbox, &SandboxState::Running)?;
    for part in node.records.containers_of(sandbox)? {
        // A keeper that finds no sandbox ends, and one that is gone has.
        let dir = node.records.container_dir(&part.id);
        let _ = keeper::ask(&dir, &Request::Attach, &[], CALL_LIMIT);
    }
    Ok(())
}

fn parts_of(
    node: &Node,
    sandbox: &SandboxId,
    image: &Image,
) -> anyhow::Result<Vec<ContainerRecord>> {
    let mut parts = node.records.containers_of(sandbox)?;
    parts.retain(|part| part.completed.is_none());
    if !is_complete(image.manifest(), &parts) {
        bail!("not all containers of the image exist; the kubelet is recreating them");
    }
    Ok(parts)
}

/// Verb of the agent: restore in place. The agent writes the ledger but for `Awake`, which must be there before anybody hears
/// the sandbox; standard input holds the lock.
pub(crate) fn wake(
    node: &Node,
    sandbox: &SandboxId,
    id: &ImageId,
    cause: WakeCause,
) -> anyhow::Result<Answer> {
    memory::ensure_held_open(node, sandbox)?;
    let pod = node.records.pod(sandbox)?;
    let store = store(node)?;
    let image = store.image(&pod.namespace, id)?;
    let parts = parts_of(node, sandbox, &image)?;
    let ledger = store.ledger(&pod.pod_uid)?;
    let waking = ledger.read()?;
    let awake = |_: &dyn Fn()| Ok(ledger.append_at(waking.seq, &Entry::Awake).map(drop)?);
    let stages = sandbox::restore(node, &pod, &image, &parts, cause, awake)?;
    let note = stages.note(cause, Depth::Hibernated);
    node.records.write_wake(sandbox, &note)?;
    Ok(Answer::ok(serde_json::to_value(note)?))
}

/// Verb of the agent: the image is committed, end the sandbox' processes. Twice does no harm.
pub(crate) fn end(node: &Node, sandbox: &SandboxId, id: &ImageId) -> anyhow::Result<Answer> {
    let pod = node.records.pod(sandbox)?;
    // Before the first process ends: the keepers read it to tell sleep from death.
    node.records.write_hibernated(sandbox, id)?;
    let working_set = || node.cgroups.working_set(pod.cgroup.parent()?);
    let lived = !node.cgroups.pids(&pod.cgroup)?.is_empty();
    let before = working_set().filter(|_| lived);
    sandbox::end(node, &pod)?;
    room::give_back(node, sandbox);
    if let (Some(bytes_before), Some(bytes_after)) = (before, working_set()) {
        let dozed = node
            .records
            .doze(sandbox)?
            .is_some_and(|note| note.reclaimed);
        let doze = dozed.then(|| node.records.sleep(sandbox).ok()).flatten();
        let note = SleepNote::new(bytes_before, bytes_after, doze);
        node.records.write_sleep(sandbox, &note)?;
    }
    node.records.write_doze(sandbox, None)?;
    Ok(Answer::ok(serde_json::Value::Null))
}

/// Prints the answer of a verb: standard output is the connection to who asked. `failed`: why it was refused, where the error has no reason of
/// its own.
pub(crate) fn answer(failed: &str, result: anyhow::Result<Answer>) -> ExitCode {
    let answer = result.unwrap_or_else(|error| {
        let reason = error
            .downcast_ref::<Refusal>()
            .map_or(failed, |refusal| refusal.reason);
        Answer::refused(reason, format!("{error:#}"))
    });
    let code = if answer.ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    };
    match serde_json::to_string(&answer) {
        Ok(text) => print!("{text}"),
        Err(_) => return ExitCode::FAILURE,
    }
    code
}

#[cfg(test)]
mod tests;
