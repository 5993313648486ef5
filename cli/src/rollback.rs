//! `rollback`: a Sandbox continues from an earlier snapshot of its own, in a new Pod.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::ResourceExt;
use serde_json::json;
use tokio::time::Instant;
use torpor_api::annotations::{RESTORE_COPY, RESTORE_FROM, RESTORE_IMAGE};
use torpor_api::conditions::{self, FINISHED, POD_RESTORED, RESTORED};
use torpor_api::reasons::restored;
use torpor_api::{OperatingMode, Sandbox, SandboxSnapshot, SnapshotReason};

use crate::args::Rollback;
use crate::change::{find, find_pod, name_of, patch};
use crate::connect::Cluster;
use crate::error::{Error, full_message};
use crate::goal::{Progress, described, has_changed, refusal};
use crate::objects::list;
use crate::snapshot::{take, usable};
use crate::view::conditions_of;
use crate::watching::{Wait, refused};

/// Result of a rollback.
#[derive(Clone, Debug)]
pub struct RolledBack {
    pub took: Duration,
    /// Snapshot of the memory before the rollback; `None` if it was given up.
    pub kept_in: Option<String>,
}

/// Has the Sandbox continue from the snapshot of the arguments. Its present memory is saved in a
/// snapshot first, unless the arguments give it up.
pub async fn rollback(
    cluster: &Cluster,
    args: &Rollback,
    say: &(dyn Fn(&str) + Sync),
) -> Result<RolledBack, Error> {
    let began = Instant::now();
    usable(cluster, &args.name, &args.snapshot).await?;
    let sandbox = find(cluster, &args.name).await?;
    if let Some(why) = obstacle(&sandbox) {
        return Err(refused(&args.name, why));
    }
    no_newer_image(cluster, &args.name).await?;
    let pod = find_pod(cluster, &sandbox).await?;
    // From now on no rule of a SnapshotClass deletes the snapshot. The annotation has no effect on
    // the present Pod.
    let before = sandbox.annotations().get(RESTORE_FROM).cloned();
    let sandbox = name_origin(cluster, &sandbox, Some(&args.snapshot)).await?;
    let replaced = Box::pin(replace(cluster, args, &sandbox, pod.as_ref(), say)).await;
    let kept = match replaced {
        Ok(kept) => kept,
        Err(error) => {
            // The Pod lives, and a later one is to start as it would have.
            let restored = name_origin(cluster, &sandbox, before.as_deref()).await;
            return Err(match restored {
                Ok(_) => error,
                Err(also) => refused(
                    &args.name,
                    &format!(
                        "{}; and {RESTORE_FROM} still names {}: {}",
                        full_message(&error),
                        args.snapshot,
                        full_message(&also)
                    ),
                ),
            });
        }
    };
    let (snapshot, kept_in) = kept;
    let new_pod = until_replaced(cluster, args, (&sandbox, pod.as_ref()), &snapshot, say);
    new_pod.await?;
    Ok(RolledBack {
        took: began.elapsed(),
        kept_in,
    })
}

/// Saves the present memory and deletes the Pod. Returns the snapshot to continue from, and the
/// name of the one that has the present memory.
async fn replace(
    cluster: &Cluster,
    args: &Rollback,
    sandbox: &Sandbox,
    pod: Option<&Pod>,
    say: &(dyn Fn(&str) + Sync),
) -> Result<(SandboxSnapshot, Option<String>), Error> {
    let kept_in = match (args.discard, pod) {
        (true, _) => None,
        (false, None) => {
            let message =
                "it has no Pod whose memory could be saved; --discard rolls it back without";
            return Err(refused(&args.name, message));
        }
        (false, Some(_)) => {
            let taken = take(cluster, sandbox, args.timeout, say).await?;
            let name = taken.name_any();
            say(&format!(
                "{}: its present memory is in SandboxSnapshot {name}",
                args.name
            ));
            Some(name)
        }
    };
    // The save may have taken minutes.
    let snapshot = usable(cluster, &args.name, &args.snapshot).await?;
    if let Some(pod) = pod {
        end(cluster, pod).await?;
    }
    Ok((snapshot, kept_in))
}

/// Returns why the Sandbox cannot be rolled back; none if it can. Pure.
fn obstacle(sandbox: &Sandbox) -> Option<&'static str> {
    if sandbox.metadata.deletion_timestamp.is_some() {
        return Some("being deleted");
    }
    if sandbox.spec.operating_mode == OperatingMode::Suspended {
        return Some(
            "suspended: it would resume from its last memory; first `kubectl torpor resume`",
        );
    }
    let finished = conditions::is_true(conditions_of(sandbox), FINISHED);
    finished.then_some("its program has ended, and no Pod follows")
}

/// Refuses a Sandbox whose next Pod would continue from memory of a suspension.
async fn no_newer_image(cluster: &Cluster, name: &str) -> Result<(), Error> {
    let all = list::<SandboxSnapshot>("SandboxSnapshots", &cluster.api()).await?;
    match all.items.iter().find(|one| is_newer(one, name)) {
        Some(newer) => {
            let newer = newer.name_any();
            let message = format!(
                "its next Pod continues from SandboxSnapshot {newer}, the memory of its suspension; to give that up: `kubectl delete sandboxsnapshot {newer}`"
            );
            Err(refused(name, &message))
        }
        None => Ok(()),
    }
}

/// Reports whether the Sandbox resumes from the snapshot, also while its image is missing. Pure.
fn is_newer(snapshot: &SandboxSnapshot, sandbox: &str) -> bool {
    snapshot.spec.sandbox_name == sandbox
        && snapshot.spec.reason == SnapshotReason::Suspend
        && (snapshot.is_committed() || snapshot.is_missing())
        && !snapshot.is_consumed()
        && snapshot.metadata.deletion_timestamp.is_none()
}

/// Writes the snapshot from which a Pod without newer memory starts.
async fn name_origin(
    cluster: &Cluster,
    sandbox: &Sandbox,
    snapshot: Option<&str>,
) -> Result<Sandbox, Error> {
    let wanted = json!({"metadata": {"annotations": {RESTORE_FROM: snapshot}}});
    Box::pin(patch(cluster, sandbox, wanted)).await
}

/// Deletes the Pod.
async fn end(cluster: &Cluster, pod: &Pod) -> Result<(), Error> {
    match cluster.delete(pod).await {
        // The Pod has gone by itself.
        Err(error) if error.is_missing() || error.is_conflict() => Ok(()),
        other => other,
    }
}

/// Waits for a new Pod that has continued from the snapshot.
async fn until_replaced(
    cluster: &Cluster,
    args: &Rollback,
    (before, pod): (&Sandbox, Option<&Pod>),
    snapshot: &SandboxSnapshot,
    say: &(dyn Fn(&str) + Sync),
) -> Result<(), Error> {
    let wait = Wait {
        cluster,
        sandbox: name_of(before),
        goal: "rolled back",
        limit: args.timeout,
        say,
    };
    let pod_name = pod.map_or_else(|| name_of(before).to_owned(), ResourceExt::name_any);
    let image = snapshot.status.as_ref().and_then(|s| s.image_id.as_deref());
    let continues = wait.until_named(cluster.api(), &pod_name, |now| of_pod(pod, now, image));
    let fails = wait.until(cluster.api(), before, |now| of_sandbox(before, now));
    tokio::select! {
        pod = continues => pod.map(drop),
        failed = fails => failed.map(drop),
    }
}

/// Returns the progress towards a new Pod that has continued from `image`. `before`: the Pod that
/// was deleted. Pure.
fn of_pod(before: Option<&Pod>, now: Option<&Pod>, image: Option<&str>) -> Progress {
    let Some(now) = now else {
        return Progress::Waiting("its new Pod is not there yet".to_owned());
    };
    if before.is_some_and(|before| before.uid() == now.uid()) {
        return Progress::Waiting("its Pod is being deleted".to_owned());
    }
    let annotation = |key| now.annotations().get(key).map(String::as_str);
    if annotation(RESTORE_IMAGE) != image || annotation(RESTORE_COPY) != Some("true") {
        let message = "its new Pod did not start from the snapshot; `kubectl torpor why` has more";
        return Progress::Refused(message.to_owned());
    }
    let find = |type_: &str| condition(now, type_);
    match (find(POD_RESTORED), find("Ready")) {
        (Some(restored), _) if restored.status == "False" => {
            let message = restored.message.clone().unwrap_or_default();
            let reason = restored.reason.clone().unwrap_or_default();
            Progress::Refused(format!("{reason}: {message}"))
        }
        (Some(_), Some(ready)) if ready.status == "True" => Progress::Done,
        _ => Progress::Waiting("its new Pod is not Ready yet".to_owned()),
    }
}

fn condition<'a>(pod: &'a Pod, type_: &str) -> Option<&'a PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|condition| condition.type_ == type_)
}

/// Returns a refusal once the Sandbox shows that no Pod can continue from the snapshot. Pure.
fn of_sandbox(before: &Sandbox, now: &Sandbox) -> Progress {
    if now.metadata.deletion_timestamp.is_some() {
        return Progress::Refused("being deleted".to_owned());
    }
    match conditions::find(conditions_of(now), RESTORED) {
        Some(condition)
            if condition.status == "False"
                && condition.reason != restored::ASKING_NODE
                && has_changed(condition, before) =>
        {
            Progress::Refused(refusal(condition))
        }
        Some(condition) => Progress::Waiting(described(condition)),
        None => Progress::Waiting("its new Pod is not there yet".to_owned()),
    }
}
