//! Restore of a pod from an image: in place (a wake), in a new Pod (a resume), after a reboot.
//!
//! A restored gVisor sandbox starts when its last container exists, and the kubelet starts
//! containers one after the other. So the containers of a pod that continues an image get only
//! keepers and records at first, and no gVisor container. The start of the last one restores the
//! whole pod, by the same code as a wake in place.

use std::path::PathBuf;
use std::process::ExitCode;

use jiff::Timestamp;
use torpor_core::ids::{ContainerId, ImageId, SandboxId};
use torpor_core::transition::{self, Place, Source, source};
use torpor_core::{ImageState, LedgerState, RolledBack};
use torpor_messages::keeper::{self, Answer, Request};
use torpor_records::Role;
use torpor_records::{ContainerRecord, PodRecord, RestoreReport, SandboxState, WakeCause};
use torpor_runsc::held_open::keeper_lives;
use torpor_runsc::probe;
use torpor_runsc::spec::Spec;
use torpor_snapshots::{Manifest, Store};

use crate::node::{CALL_LIMIT, Node};

mod annotations;
mod begin;
mod direct;
mod end;
mod failure;
mod fetched;
mod known;
mod processes;
mod quotas;
mod refusal;
mod remains;
mod renew;
pub mod room;
mod sandbox;
pub mod transitions;
mod via_runsc;

use annotations::{Given, ON_CRASH, RESTORE_DIGEST};
pub use end::end;
use failure::{fail, give_up};
use known::is_complete;
pub use known::{completed, is_new, saved_pause};
pub use processes::{end_processes, kill_processes};
pub use quotas::put_quotas_back;
pub use refusal::Refusal;
use refusal::reason_of;
use transitions::{NodeSandbox, ensure_stays};

/// Returns the newest committed image of the Pod in the store.
fn last_image(store: &Store, pod: &PodRecord) -> anyhow::Result<Option<ImageId>> {
    let images = store.list_pod(&pod.pod_uid)?.into_iter();
    let whole = images.filter(|image| image.state == ImageState::Committed);
    // A cold start loses nothing of a copy of a golden image, so that copy is no last image.
    let own = whole.filter(|image| !is_golden_copy(store, pod, &image.id));
    Ok(own.map(|image| image.id).max_by_key(|image| image.number()))
}

/// Reports whether an image of the Pod is a copy of a golden one: the Pod has not run in it.
fn is_golden_copy(store: &Store, pod: &PodRecord, image: &ImageId) -> bool {
    let found = store.image(&pod.namespace, image);
    found.is_ok_and(|image| image.manifest().parent.is_some())
}

/// Reports whether the Pod loses nothing by a cold start: the image is a golden one, or a copy of
/// one from which the Pod has not run. `spec`: of the pause container.
fn never_ran(
    store: &Store,
    pod: &PodRecord,
    spec: &Spec,
    ledger: &LedgerState,
    image: &ImageId,
) -> bool {
    match image.pod() == &pod.pod_uid {
        true => !ledger.was_left(image) && is_golden_copy(store, pod, image),
        false => annotations::is_golden(spec, image),
    }
}

/// Decides how a new sandbox begins, and records the decision. Verifies the image, so that a
/// restore that cannot succeed fails before it has begun. The verification takes much processor
/// time, which counts for the pod: the caller is in the pod's cgroup.
pub fn begin(node: &Node, pod: &PodRecord, spec: &Spec) -> anyhow::Result<SandboxState> {
    let store = node.store()?;
    let given = Given::of(spec, &store, pod)?;
    let was_restored = given.image.is_some();
    let ledger = store.ledger(&pod.pod_uid)?;
    let digest = spec.annotation(RESTORE_DIGEST);
    let not_fetched = match given.image.as_ref().zip(digest) {
        // A Pod that has a ledger has begun before, with the image or without it.
        Some((image, _)) if ledger.read()?.seq == 0 => fetched::wait(node, &store, pod, image)?,
        _ => None,
    };
    let is_held = |image: &ImageId| store.image(&pod.namespace, image).is_ok();
    let rolls_back = spec.annotation(ON_CRASH) == Some("LastImage");
    let last = match rolls_back {
        true => last_image(&store, pod)?,
        false => None,
    };
    let ledger_state = ledger.read()?;
    // The node's own build is for a cold start. An image is restored by the build that made it.
    let own_build = node.config.admit_runsc(&pod.runsc_digest);
    let state = match source(&ledger_state, is_held, given.image, given.copy, last) {
        Source::Cold => {
            own_build?;
            if ledger_state.seq > 0 {
                report_cold_start(node, pod, rolls_back, was_restored)?;
            }
            SandboxState::Running
        }
        Source::Image { image, copy } => {
            // With either policy the Pod waits for the image: the agent gives it back in a moment.
            if let Err(refusal) = ensure_given_back(&store, pod, &image, copy) {
                failure::report(node, pod, &image, &refusal)?;
                return Err(refusal.into());
            }
            // The verification hashes the image on all processors.
            let own = image.pod() == &pod.pod_uid;
            let asleep = annotations::is_to_sleep(spec);
            let golden = never_ran(&store, pod, spec, &ledger_state, &image);
            let sleeps = transition::rests(&ledger_state, &image, own, golden, asleep).is_some();
            let fits = || match not_fetched {
                Some(refusal) => Err(refusal),
                None => admit(node, &store, pod, &image, copy, sleeps),
            };
            match quotas::without_quotas(node, pod, fits)? {
                Ok(build) => {
                    node.records.write_pod(&build.of(pod))?;
                    SandboxState::Restoring {
                        image,
                        started: Vec::new(),
                    }
                }
                Err(refusal) if pod.cold_start_on_failure || golden => {
                    own_build?;
                    give_up(node, pod, &ledger, &image, refusal)?;
                    SandboxState::Running
                }
                Err(refusal) => {
                    failure::report(node, pod, &image, &refusal)?;
                    return Err(refusal.into());
                }
            }
        }
    };
    node.records.write_state(&pod.sandbox, &state)?;
    Ok(state)
}

/// Reports the cold start of a Pod that has run before.
///
/// The report is written if the user requested a roll back (`rolls_back`), or if the last report is
/// that of a restore. A reboot removes the last report. So the report is also written for a Pod
/// that `was_restored` and has no report of a cold start: a user may wait for the result of that
/// restore.
fn report_cold_start(
    node: &Node,
    pod: &PodRecord,
    rolls_back: bool,
    was_restored: bool,
) -> anyhow::Result<()> {
    let last_report = node.records.report(&pod.pod_uid)?;
    let is_new = match last_report {
        Some(RestoreReport::Restored { .. }) => true,
        Some(RestoreReport::ColdStarted { .. }) => false,
        Some(RestoreReport::Failed { .. }) | None => was_restored,
    };
    if !rolls_back && !is_new {
        return Ok(());
    }
    let message = match rolls_back {
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
    /// Returns the pod's record with this build.
    fn of(self, pod: &PodRecord) -> PodRecord {
        PodRecord {
            runsc: self.path,
            runsc_digest: self.digest,
            ..pod.clone()
        }
    }
}

/// Fails where another Pod has taken the image and never ran. The node's agent gives the image back
/// when that Pod is gone.
fn ensure_given_back(
    store: &Store,
    pod: &PodRecord,
    image: &ImageId,
    copy: bool,
) -> Result<(), Refusal> {
    let taken_by = match store.image(&pod.namespace, image) {
        Ok(found) if !copy => found.consumed_by()?,
        // [`admit`] returns the error of an unreadable image.
        _ => None,
    };
    let Some(other) = taken_by.filter(|other| *other != pod.pod_uid) else {
        return Ok(());
    };
    let other_state = store.ledger(&other).and_then(|ledger| ledger.read());
    if other_state.is_ok_and(|state| state.memory.image() == Some(image)) {
        return Err(Refusal {
            reason: "RestoreFailed",
            message: format!(
                "Pod {other} has taken image {image} and never ran; the node's agent gives the image back once that Pod is gone, and the restore of this Pod is then tried again"
            ),
        });
    }
    Ok(())
}

/// Checks that the image may and can be restored here; returns the build of runsc that restores it.
/// `sleeps`: the sandbox sleeps on in the image, whose bytes are verified when it wakes.
fn admit(
    node: &Node,
    store: &Store,
    pod: &PodRecord,
    image_id: &ImageId,
    copy: bool,
    sleeps: bool,
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
    match sleeps {
        true => image.verify_sizes()?,
        false => image.verify()?,
    }
    let path = build.unwrap_or_else(|| node.config.runsc.clone());
    Ok(Build {
        path,
        digest: here.runsc_digest,
    })
}

/// Fails where the Pod that was saved has run on after the image was made. The Pod's ledger records
/// that, as long as the ledger exists.
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

/// Adds a container to its pod; returns the pod's state. A hibernated pod becomes a pod that is
/// being restored: the kubelet recreates a container whose keeper has ended.
pub fn join(node: &Node, sandbox: &SandboxId) -> anyhow::Result<SandboxState> {
    let state = node.records.state(sandbox)?;
    let SandboxState::Hibernated { image, .. } = state else {
        return Ok(state);
    };
    ensure_stays(node, sandbox)?;
    let started = node
        .records
        .containers_of(sandbox)?
        .into_iter()
        .filter(|container| container.role == Role::Container && container.completed.is_none())
        // The kubelet recreates a container without a keeper, too.
        .filter(|container| keeper_lives(&node.records, container))
        .map(|container| container.id)
        .collect();
    let state = SandboxState::Restoring { image, started };
    node.records.write_state(sandbox, &state)?;
    Ok(state)
}

/// Records the start of a container of the image. Restores the pod when it is the last one.
/// `started`: ids of the containers that were started before.
pub fn container_started(
    node: &Node,
    pod: &PodRecord,
    image: &ImageId,
    mut started: Vec<ContainerId>,
    record: &ContainerRecord,
) -> anyhow::Result<()> {
    ensure_stays(node, &pod.sandbox)?;
    if record.role == Role::Container && !started.contains(&record.id) {
        started.push(record.id.clone());
    }
    let store = node.store()?;
    let opened = store.image(&pod.namespace, image).map_err(Refusal::from)?;
    let parts: Vec<ContainerRecord> = node
        .records
        .containers_of(&pod.sandbox)?
        .into_iter()
        // The kubelet recreates a container that has lost its keeper meanwhile.
        .filter(|part| {
            part.role == Role::Sandbox
                || started.contains(&part.id) && keeper_lives(&node.records, part)
        })
        .collect();
    if !is_complete(opened.manifest(), &parts) {
        let state = SandboxState::Restoring {
            image: image.clone(),
            started,
        };
        return Ok(node.records.write_state(&pod.sandbox, &state)?);
    }
    let ledger = store.ledger(&pod.pod_uid)?.read()?;
    let rolls_back = rolls_back(&store, &ledger, pod, image);
    let spec = Spec(node.records.spec(&pod.sandbox.clone().into())?);
    let own = image.pod() == &pod.pod_uid;
    let golden = never_ran(&store, pod, &spec, &ledger, image);
    let pause = node.records.container_dir(&pod.sandbox.clone().into());
    let report = RestoreReport::Restored {
        image: image.clone(),
        rolled_back: rolls_back.then(|| rolled_back(opened.manifest())),
    };
    let sandbox = NodeSandbox::anew(node, pod, opened, parts, report);
    let asleep = annotations::is_to_sleep(&spec);
    if let Some(origin) = transition::rests(&ledger, image, own, golden, asleep) {
        return match transition::rest(&sandbox, image, origin, own) {
            Ok(()) => Ok(()),
            Err(error) => Err(fail(node, pod, &spec, image, refusal_of(&error))?),
        };
    }
    sandbox::hold_packets(pod, &pause);
    let place = Place::Anew {
        takes: !own && !annotations::is_copy(&spec, image),
        tries_again: !pod.cold_start_on_failure,
        // [`fail`] has the Pod start cold.
        never_ran: false,
    };
    match transition::restore(&sandbox, image, place) {
        Ok(()) => {
            // The sandbox runs. A failure to record its stages is no failure of the restore.
            let note = sandbox.stages().restore_note(image);
            let _ = node.records.write_restore(&pod.sandbox, &note);
            Ok(())
        }
        Err(error) => {
            // A keeper that has ended holds no packets.
            let _ = keeper::ask(&pause, &Request::Release, &[], CALL_LIMIT);
            Err(fail(node, pod, &spec, image, refusal_of(&error))?)
        }
    }
}

fn refusal_of(error: &anyhow::Error) -> Refusal {
    Refusal {
        reason: reason_of(error),
        message: format!("{error:#}; the restore is tried again"),
    }
}

/// Reports whether a restore of `image` goes back in time without a request by name. `ledger`: of
/// `pod`. Another Pod's ledger is there if that Pod was on this node.
fn rolls_back(store: &Store, ledger: &LedgerState, pod: &PodRecord, image: &ImageId) -> bool {
    if image.pod() == &pod.pod_uid {
        return ledger.was_left(image);
    }
    let other = store.ledger(image.pod()).and_then(|other| other.read());
    other.is_ok_and(|other| other.has_gone_back_to(image))
}

fn rolled_back(manifest: &Manifest) -> RolledBack {
    let age = Timestamp::now().duration_since(manifest.created_at);
    RolledBack {
        made: manifest.created_at,
        // The age is 0 after a clock that was set back.
        age: age.try_into().unwrap_or_default(),
    }
}

/// Restores a hibernated sandbox in place, for a step of a plan. The step appends the ledger's
/// entries, except `Awake`, which is appended here before a peer receives anything from the
/// sandbox.
pub(crate) fn wake(
    node: &Node,
    sandbox: &SandboxId,
    id: &ImageId,
    cause: WakeCause,
) -> anyhow::Result<()> {
    let note = transitions::restore_planned(node, sandbox, id, cause)?;
    Ok(node.records.write_wake(sandbox, &note)?)
}

/// Returns the reason of an error; `failed` for an error that has none of its own.
pub fn reason_or<'a>(failed: &'a str, error: &anyhow::Error) -> &'a str {
    let refusal = error.downcast_ref::<Refusal>();
    refusal.map_or(failed, |refusal| refusal.reason)
}

/// Returns the answer of a command that has failed. `failed`: the reason of an error that has no
/// reason of its own.
pub fn refused(failed: &str, error: &anyhow::Error) -> Answer {
    Answer::refused(reason_or(failed, error), format!("{error:#}"))
}

/// Prints the answer of a command to standard output, the connection to the caller. `failed`: the
/// reason of a refusal whose error has no reason of its own.
pub fn answer(failed: &str, result: anyhow::Result<Answer>) -> ExitCode {
    let answer = result.unwrap_or_else(|error| refused(failed, &error));
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
