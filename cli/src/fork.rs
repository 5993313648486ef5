//! `fork`: copies of a Sandbox that continue from its memory.

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use kube::ResourceExt;
use kube::api::{ObjectMeta, PostParams};
use tokio::time::Instant;
use torpor_api::annotations::{HIBERNATE, NEXT_WAKEUP, OF_USERS, RESTORE_FROM, WAKE_AT};
use torpor_api::conditions::{self, RESTORED};
use torpor_api::reasons::restored;
use torpor_api::{OperatingMode, Sandbox, SandboxSnapshot, extensions, labels};

use crate::args::Fork;
use crate::change::{Changed, find};
use crate::connect::{Cluster, call};
use crate::error::Error;
use crate::goal::{Goal, Progress, described};
use crate::snapshot::{take, usable};
use crate::view::conditions_of;
use crate::watching::{Wait, refused};

/// Annotations about the present state of one Sandbox, which its copies do not have.
const OF_STATE: [&str; 2] = [NEXT_WAKEUP, WAKE_AT];

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
        .map(|_| start(cluster, &manifest, args, began, say))
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

/// Returns the manifest of a copy: the Sandbox' spec, running, with its settings and its own
/// labels. Pure.
fn copy_of(origin: &Sandbox, snapshot: &str) -> Sandbox {
    let is_setting = |key: &str, value: &str| {
        let is_users = OF_USERS.iter().any(|entry| entry.value == key);
        // A request to sleep is one to the original. The word "false" overrides the pod template.
        let is_sleep = key == HIBERNATE && value == "true";
        is_users && !is_sleep && !OF_STATE.contains(&key)
    };
    let mut annotations = origin.annotations().clone();
    annotations.retain(|key, value| is_setting(key, value));
    annotations.insert(RESTORE_FROM.to_owned(), snapshot.to_owned());
    let mut labels = origin.labels().clone();
    labels.retain(|key, _| !labels::is_system(key));
    let mut copy = Sandbox::new("", origin.spec.clone());
    copy.metadata = ObjectMeta {
        generate_name: Some(format!("{}-", origin.name_any())),
        annotations: Some(annotations),
        labels: Some(labels),
        ..ObjectMeta::default()
    };
    copy.spec.operating_mode = OperatingMode::Running;
    copy
}

/// Creates one copy and waits until it is Ready.
async fn start(
    cluster: &Cluster,
    manifest: &Sandbox,
    args: &Fork,
    began: Instant,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Changed, Error> {
    let api = cluster.api();
    let doing = format!("create a copy of Sandbox {}", args.name);
    let created = call(&doing, api.create(&PostParams::default(), manifest)).await?;
    let name = created.name_any();
    let wait = Wait {
        cluster,
        sandbox: &name,
        goal: "started",
        limit: args.timeout,
        say,
    };
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
