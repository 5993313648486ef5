//! `hibernate`, `wake`, `suspend`, `resume`: one patch, then a wait for conditions.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::Instant;
use torpor_api::Sandbox;
use torpor_api::annotations::POD_NAME;

use crate::connect::{Cluster, call};
use crate::error::Error;
use crate::goal::{Goal, note};
use crate::watching::{DELETED, RECREATED, Wait, refused};

/// Completed change of one Sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    pub name: String,
    /// Time from the patch until the conditions show the goal; `None` without a wait.
    pub took: Option<Duration>,
    /// Warning for the user.
    pub note: Option<String>,
}

/// Patches one Sandbox and waits for the goal, at most for `limit`; zero does not wait.
///
/// `say` receives a line for each change of the conditions.
pub async fn change(
    cluster: &Cluster,
    goal: Goal,
    name: &str,
    limit: Duration,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Changed, Error> {
    let found = find(cluster, name).await?;
    let began = Instant::now();
    let before = Box::pin(request(cluster, goal, found)).await?;
    let mut done = Changed {
        name: name.to_owned(),
        took: None,
        note: None,
    };
    if !limit.is_zero() {
        let now = match wait(cluster, goal, &before, limit, say).await {
            Ok(now) => now,
            Err(error) => return Err(Box::pin(explained(cluster, goal, &before, error)).await),
        };
        done.took = Some(began.elapsed());
        done.note = note(goal, &now);
    }
    Ok(done)
}

pub(crate) async fn find(cluster: &Cluster, name: &str) -> Result<Sandbox, Error> {
    let doing = format!("get Sandbox {name}");
    let found = call(&doing, cluster.api::<Sandbox>().get(name)).await;
    found.map_err(|error| match error.is_missing() {
        true => Error::NoSandbox {
            namespace: cluster.namespace.clone(),
            name: name.to_owned(),
        },
        false => error,
    })
}

/// Patches this Sandbox, and no other that got the same name meanwhile.
pub(crate) async fn patch(
    cluster: &Cluster,
    known: &Sandbox,
    mut patch: Value,
) -> Result<Sandbox, Error> {
    patch["metadata"]["uid"] = json!(known.metadata.uid);
    let name = name_of(known);
    let doing = format!("patch Sandbox {name}");
    let (api, parameters) = (cluster.api::<Sandbox>(), PatchParams::default());
    let patched = call(&doing, api.patch(name, &parameters, &Patch::Merge(patch))).await;
    patched.map_err(|error| match error.is_missing() {
        true => refused(name, DELETED),
        false => error,
    })
}

/// Patches this Sandbox for the goal, and returns it as it was before the patch.
///
/// After a conflict with another client the patch is computed anew.
async fn request(cluster: &Cluster, goal: Goal, mut known: Sandbox) -> Result<Sandbox, Error> {
    let name = name_of(&known).to_owned();
    loop {
        let change = goal.patch(&known, Timestamp::now());
        let change = change.map_err(|message| refused(&name, &message))?;
        let error = match Box::pin(patch(cluster, &known, change)).await {
            Ok(written) => {
                Box::pin(correct_time(cluster, goal, &written)).await?;
                return Ok(known);
            }
            Err(error) if error.is_conflict() => error,
            Err(error) => return Err(error),
        };
        let now = find(cluster, &name).await?;
        if now.metadata.uid != known.metadata.uid {
            return Err(refused(&name, RECREATED));
        }
        if now.metadata.resource_version == known.metadata.resource_version {
            return Err(error);
        }
        known = now;
    }
}

/// Corrects the time of a wake to the cluster's clock, from which this machine's may differ.
async fn correct_time(cluster: &Cluster, goal: Goal, written: &Sandbox) -> Result<(), Error> {
    let Some(time) = goal.corrected_time(written) else {
        return Ok(());
    };
    match Box::pin(patch(cluster, written, time)).await {
        Err(error) if error.is_conflict() => Err(refused(name_of(written), RECREATED)),
        other => other.map(drop),
    }
}

/// Adds the cause to a timeout, where the Pod shows it.
async fn explained(cluster: &Cluster, goal: Goal, before: &Sandbox, mut error: Error) -> Error {
    if let Error::Timeout { last, .. } = &mut error
        && goal == Goal::Wake
        && let Some(pod) = pod_of(cluster, before).await
        && goal.is_not_copied(&pod)
    {
        last.push_str(
            "; its Pod lacks the request: the controller does not run, or is older than this plugin",
        );
    }
    error
}

/// Returns the Pod of the Sandbox, where it can be read.
async fn pod_of(cluster: &Cluster, sandbox: &Sandbox) -> Option<Pod> {
    find_pod(cluster, sandbox).await.ok()?
}

/// Returns the Pod of the Sandbox, if it has one.
pub(crate) async fn find_pod(cluster: &Cluster, sandbox: &Sandbox) -> Result<Option<Pod>, Error> {
    let annotations = sandbox.metadata.annotations.as_ref();
    let named = annotations.and_then(|all| all.get(POD_NAME));
    let name = named.map_or_else(|| name_of(sandbox), String::as_str);
    let pods = cluster.api::<Pod>();
    let found = call(&format!("get Pod {name}"), pods.get_opt(name)).await?;
    Ok(found.filter(|pod| {
        let mut owners = pod.metadata.owner_references.iter().flatten();
        owners.any(|owner| Some(&owner.uid) == sandbox.metadata.uid.as_ref())
    }))
}

/// Watches the Sandbox until it reaches the goal, cannot reach it, or the time limit passes.
async fn wait(
    cluster: &Cluster,
    goal: Goal,
    before: &Sandbox,
    limit: Duration,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Sandbox, Error> {
    let wait = Wait {
        cluster,
        sandbox: name_of(before),
        goal: goal.participle(),
        limit,
        say,
    };
    let progress = |now: &Sandbox| goal.progress(before, now);
    wait.until(cluster.api::<Sandbox>(), before, progress).await
}

pub(crate) fn name_of(sandbox: &Sandbox) -> &str {
    sandbox.metadata.name.as_deref().unwrap_or_default()
}
