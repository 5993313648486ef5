//! `hibernate`, `wake`, `suspend`, `resume`: one patch, then a wait for conditions.

use std::time::Duration;

use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::{Value, json};
use tokio::time::Instant;
use torpor_api::Sandbox;
use torpor_api::annotations::POD_NAME;

use crate::connect::{Cluster, call};
use crate::error::{Error, full_message};
use crate::goal::{Goal, Progress, note};

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

fn sandboxes(cluster: &Cluster) -> Api<Sandbox> {
    Api::namespaced(cluster.client.clone(), &cluster.namespace)
}

async fn find(cluster: &Cluster, name: &str) -> Result<Sandbox, Error> {
    let doing = format!("get Sandbox {name}");
    let found = call(&doing, sandboxes(cluster).get(name)).await;
    found.map_err(|error| match error.is_missing() {
        true => Error::NoSandbox {
            namespace: cluster.namespace.clone(),
            name: name.to_owned(),
        },
        false => error,
    })
}

/// Patches this Sandbox, and no other that got the same name meanwhile.
async fn patch(cluster: &Cluster, known: &Sandbox, mut patch: Value) -> Result<Sandbox, Error> {
    patch["metadata"]["uid"] = json!(known.metadata.uid);
    let name = name_of(known);
    let doing = format!("patch Sandbox {name}");
    let (api, parameters) = (sandboxes(cluster), PatchParams::default());
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
    let annotations = sandbox.metadata.annotations.as_ref();
    let named = annotations.and_then(|all| all.get(POD_NAME));
    let name = named.map_or_else(|| name_of(sandbox), String::as_str);
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let pod = call("get the Pod", pods.get(name)).await.ok()?;
    let mut owners = pod.metadata.owner_references.iter().flatten();
    let owned = owners.any(|owner| Some(&owner.uid) == sandbox.metadata.uid.as_ref());
    owned.then_some(pod)
}

/// Watches the Sandbox until it reaches the goal, cannot reach it, or the time limit passes.
async fn wait(
    cluster: &Cluster,
    goal: Goal,
    before: &Sandbox,
    limit: Duration,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Sandbox, Error> {
    let name = name_of(before);
    let unwatched = |why: &str| Error::Unwatched {
        namespace: cluster.namespace.clone(),
        name: name.to_owned(),
        why: why.to_owned(),
    };
    let deadline = Instant::now() + limit;
    let events = watcher::watch_object(sandboxes(cluster), name);
    let mut events = std::pin::pin!(events.default_backoff());
    let mut last = "its state was not observed".to_owned();
    loop {
        let Ok(event) = tokio::time::timeout_at(deadline, events.next()).await else {
            return Err(Error::Timeout {
                namespace: cluster.namespace.clone(),
                name: name.to_owned(),
                goal: goal.participle(),
                limit,
                last,
            });
        };
        let status = match event {
            Some(Ok(None)) => return Err(refused(name, DELETED)),
            Some(Ok(Some(now))) if now.metadata.uid != before.metadata.uid => {
                return Err(refused(name, RECREATED));
            }
            Some(Ok(Some(now))) => match goal.progress(before, &now) {
                Progress::Done => return Ok(now),
                Progress::Refused(message) => return Err(refused(name, &message)),
                Progress::Waiting(words) => words,
            },
            Some(Err(error)) if is_forbidden(&error) => return Err(unwatched(&cause(&error))),
            // The watch restarts itself after a delay.
            Some(Err(error)) => format!("the watch was interrupted: {}", cause(&error)),
            None => return Err(unwatched("the watch ended")),
        };
        if status != last {
            say(&format!("{name}: {status}"));
            last = status;
        }
    }
}

/// Reports whether the apiserver denies the watch, so that a retry cannot succeed.
fn is_forbidden(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchError, WatchFailed, WatchStartFailed};
    let status = match error {
        InitialListFailed(kube::Error::Api(status))
        | WatchStartFailed(kube::Error::Api(status))
        | WatchFailed(kube::Error::Api(status))
        | WatchError(status) => status,
        _ => return false,
    };
    status.is_forbidden() || status.code == 401
}

/// Returns why a watch failed.
///
/// The text of the error itself repeats the cause in Rust's debug notation.
fn cause(error: &watcher::Error) -> String {
    full_message(std::error::Error::source(error).unwrap_or(error))
}

const DELETED: &str = "deleted meanwhile";
const RECREATED: &str = "deleted meanwhile, and created again";

fn name_of(sandbox: &Sandbox) -> &str {
    sandbox.metadata.name.as_deref().unwrap_or_default()
}

fn refused(name: &str, message: &str) -> Error {
    Error::Refused {
        name: name.to_owned(),
        message: message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(403, "Forbidden", true)]
    #[case(401, "Unauthorized", true)]
    #[case(410, "Expired", false)]
    #[case(500, "InternalError", false)]
    fn a_denied_watch_is_not_retried(
        #[case] code: u16,
        #[case] reason: &str,
        #[case] forbidden: bool,
    ) {
        let status = || Status::failure("words", reason).with_code(code).boxed();
        for error in [
            watcher::Error::InitialListFailed(kube::Error::Api(status())),
            watcher::Error::WatchStartFailed(kube::Error::Api(status())),
            watcher::Error::WatchError(status()),
        ] {
            assert_eq!(is_forbidden(&error), forbidden, "{error}");
            assert!(cause(&error).starts_with("words"), "{error}");
            assert!(!cause(&error).contains("Status"), "{error}");
        }
    }
}
