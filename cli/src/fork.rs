//! `fork`: copies of a Sandbox that continue from its memory.

use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use kube::ResourceExt;
use kube::api::PostParams;
use tokio::time::Instant;
use torpor_api::conditions::{self, RESTORED};
use torpor_api::reasons::restored;
use torpor_api::{Sandbox, SandboxSnapshot, archive, extensions};

use crate::args::Fork;
use crate::change::{Changed, find};
use crate::connect::{Cluster, call};
use crate::error::Error;
use crate::goal::{Goal, Progress, described};
use crate::snapshot::{take, usable};
use crate::view::conditions_of;
use crate::watching::{Wait, refused};

/// Snapshot, and the result of each copy.
#[derive(Debug)]
pub struct Started {
    pub snapshot: SandboxSnapshot,
    pub copies: Vec<Result<Changed, Error>>,
}

/// Starts copies of a Sandbox from a snapshot of it, which is taken now unless the arguments name
/// one, and waits until they are Ready.
pub async fn fork(
    cluster: &Cluster,
    args: &Fork,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Started, Error> {
    let began = Instant::now();
    let origin = find(cluster, &args.name).await?;
    if let Some(holder) = holder(&origin) {
        let message = format!(
            "{holder} holds it: a copy would belong to no template, whose NetworkPolicy would not apply to it. Create SandboxClaims with the annotation torpor.dev/fork-of instead (docs/how-to/warm-pools.md)"
        );
        return Err(refused(&args.name, &message));
    }
    let snapshot = match &args.from {
        Some(named) => usable(cluster, &args.name, named).await?,
        None => take(cluster, &origin, args.timeout, say).await?,
    };
    let manifest = copy_of(&origin, &snapshot.name_any());
    let copies: FuturesUnordered<_> = (0..args.count)
        .map(|_| start(cluster, &manifest, &args.name, args.timeout, began, say))
        .collect();
    let copies = copies.collect().await;
    Ok(Started { snapshot, copies })
}

/// Returns the claim or warm pool that controls the Sandbox. Pure.
fn holder(sandbox: &Sandbox) -> Option<String> {
    let mut owners = sandbox.owner_references().iter();
    let holder = owners.find(|owner| {
        let group = owner.api_version.split('/').next();
        owner.controller == Some(true) && group == Some(extensions::GROUP)
    })?;
    Some(format!("{} {}", holder.kind, holder.name))
}

/// Returns the manifest of a copy, whose name the apiserver completes. Pure.
fn copy_of(origin: &Sandbox, snapshot: &str) -> Sandbox {
    let mut copy = archive::copy(origin, snapshot);
    copy.metadata.name = None;
    copy.metadata.generate_name = Some(format!("{}-", origin.name_any()));
    copy
}

/// Creates one copy of the Sandbox `of`, and waits until it is Ready.
pub(crate) async fn start(
    cluster: &Cluster,
    manifest: &Sandbox,
    of: &str,
    limit: Duration,
    began: Instant,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Changed, Error> {
    let api = cluster.api();
    let doing = format!("create a copy of Sandbox {of}");
    let created = call(&doing, api.create(&PostParams::default(), manifest)).await?;
    let name = created.name_any();
    let wait = Wait::new(cluster, &name, "started", limit, say);
    let progress = |now: &Sandbox| progress(&created, now);
    wait.until(api, &created, progress).await?;
    Ok(Changed {
        name,
        took: Some(began.elapsed()),
        note: None,
    })
}

/// Returns the progress towards a copy that has the snapshot's memory and is Ready. Pure.
fn progress(created: &Sandbox, now: &Sandbox) -> Progress {
    match conditions::find(conditions_of(now), RESTORED) {
        Some(condition) if condition.status == "False" => match condition.reason.as_str() {
            restored::COLD_STARTED => Progress::Refused(described(condition)),
            // The controller has not seen the snapshot yet.
            restored::SNAPSHOT_NOT_FOUND | restored::SNAPSHOT_NOT_READY => {
                Progress::Waiting(described(condition))
            }
            _ => Goal::Resume.progress(created, now),
        },
        _ => Goal::Resume.progress(created, now),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_sandbox_of_a_claim_or_a_pool_has_a_holder() {
        let holder_of = |api_version: &str, controller| {
            let mut sandbox = Sandbox::default();
            let owner = json!([{
                "apiVersion": api_version, "kind": "SandboxClaim", "name": "c", "uid": "u",
                "controller": controller,
            }]);
            sandbox.metadata.owner_references = serde_json::from_value(owner).unwrap();
            holder(&sandbox)
        };
        let claim = holder_of("extensions.agents.x-k8s.io/v1beta1", true);
        assert_eq!(claim.as_deref(), Some("SandboxClaim c"));
        assert_eq!(holder_of("extensions.agents.x-k8s.io/v1beta1", false), None);
        assert_eq!(holder_of("apps/v1", true), None);
    }

    #[test]
    fn a_copy_has_the_spec_and_settings_of_its_origin_and_nothing_of_its_state() {
        let origin: Sandbox = serde_json::from_value(json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {
                "name": "demo", "namespace": "x", "uid": "u", "resourceVersion": "7",
                "ownerReferences": [{"apiVersion": "v1", "kind": "K", "name": "n", "uid": "o"}],
                "finalizers": ["f"],
                "labels": {
                    "app": "demo", "agents.x-k8s.io/claim-uid": "c",
                    "agents.x-k8s.io/sandbox-template-ref-hash": "t",
                },
                "annotations": {
                    "torpor.dev/doze-after": "30s", "torpor.dev/hibernate": "true",
                    "torpor.dev/restore-from": "before", "torpor.dev/last-pod": "{}",
                    "agents.x-k8s.io/pod-name": "demo", "agents.x-k8s.io/next-wakeup": "never",
                    "agents.x-k8s.io/sandbox-template-ref": "t", "another.tool/state": "s",
                },
            },
            "spec": {
                "operatingMode": "Suspended", "service": true,
                "podTemplate": {"spec": {"containers": [], "fieldOfTomorrow": 1}},
            },
            "status": {"conditions": []},
        }))
        .unwrap();
        let copy = serde_json::to_value(copy_of(&origin, "golden")).unwrap();
        assert_eq!(
            copy,
            json!({
                "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
                "metadata": {
                    "generateName": "demo-",
                    "labels": {"app": "demo"},
                    "annotations": {
                        "torpor.dev/doze-after": "30s", "torpor.dev/restore-from": "golden",
                    },
                },
                "spec": {
                    "operatingMode": "Running", "service": true,
                    "podTemplate": {"spec": {"containers": [], "fieldOfTomorrow": 1}},
                },
            })
        );
    }
}
