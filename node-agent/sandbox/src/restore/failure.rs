//! Handling of a failed restore: the report, and the cold start by the Pod's policy.

use torpor_core::Entry;
use torpor_core::ids::ImageId;
use torpor_messages::keeper::{self, Request};
use torpor_records::{PodRecord, RestoreReport};
use torpor_runsc::spec::Spec;
use torpor_snapshots::LedgerFile;

use super::never_ran;
use super::refusal::Refusal;
use crate::node::{CALL_LIMIT, Node};

/// Exit code of a process that SIGKILL ended.
const KILLED: u8 = 137;

/// Records that the Pod starts cold from now on, and reports the reason.
pub(super) fn give_up(
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

/// Writes the report of a failed restore.
pub(super) fn report(
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

/// Handles a failed restore; returns the error of this call. With policy ColdStart, and where the
/// Pod never ran, the pod's sandbox is ended. Then the kubelet makes a new sandbox, which starts
/// cold from its first init container on. `spec`: of the pause container.
pub(super) fn fail(
    node: &Node,
    pod: &PodRecord,
    spec: &Spec,
    image: &ImageId,
    refusal: Refusal,
) -> anyhow::Result<anyhow::Error> {
    let store = node.store()?;
    let ledger = store.ledger(&pod.pod_uid)?.read()?;
    if !pod.cold_start_on_failure && !never_ran(&store, pod, spec, &ledger, image) {
        report(node, pod, image, &refusal)?;
        return Ok(refusal.into());
    }
    let message = refusal.message.clone();
    start_cold(node, pod, image, refusal)?;
    Ok(anyhow::anyhow!(
        "the Pod starts cold, because its memory could not be restored: {message}"
    ))
}

/// Records that the Pod starts cold, and ends its sandbox, so that the kubelet makes a new one.
pub(super) fn start_cold(
    node: &Node,
    pod: &PodRecord,
    image: &ImageId,
    refusal: Refusal,
) -> anyhow::Result<()> {
    let ledger = node.store()?.ledger(&pod.pod_uid)?;
    give_up(node, pod, &ledger, image, refusal)?;
    let pause = node.records.container_dir(&pod.sandbox.clone().into());
    // A keeper that has ended already has ended the sandbox.
    let _ = keeper::ask(&pause, &Request::Exit { code: KILLED }, &[], CALL_LIMIT);
    Ok(())
}
