//! `hibernate`, `wake`, `suspend`, `resume`: one patch, then waiting for what the conditions say.

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
use crate::error::{Error, words};
use crate::goal::{Goal, Progress, note};

/// What was asked of one Sandbox, done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    pub name: String,
    /// From the patch until the cluster said that it is done; none if nobody waited.
    pub took: Option<Duration>,
    /// What the user should know besides.
    pub note: Option<String>,
}

/// Asks it of one Sandbox, and waits for it. `say` hears every new thing that its conditions say.
pub async fn change(
    cluster: &Cluster,
    goal: Goal,
    name: &str,
    limit: Duration,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Changed, Error> {
    let found = find(cluster, name).await?;
    let began = Instant::now();
    let before = Box::pin(ask(cluster, goal, found)).await?;
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

/// Patches this Sandbox, and not one that has taken its name meanwhile.
async fn patch(cluster: &Cluster, seen: &Sandbox, mut patch: Value) -> Result<Sandbox, Error> {
    patch["metadata"]["uid"] = json!(seen.metadata.uid);
    let name = name_of(seen);
    let doing = format!("patch Sandbox {name}");
    let (api, parameters) = (sandboxes(cluster), PatchParams::default());
    let patched = call(&doing, api.patch(name, &parameters, &Patch::Merge(patch))).await;
    patched.map_err(|error| match error.is_missing() {
        true => refused(name, DELETED),
        false => error,
    })
}

/// Asks it of this Sandbox; answers what it was before. Where the patch holds for what was seen only and somebody was quicker, it is made
/// anew.
async fn ask(cluster: &Cluster, goal: Goal, mut seen: Sandbox) -> Result<Sandbox, Error> {
    let name = name_of(&seen).to_owned();
    loop {
        let wish = goal.patch(&seen, Timestamp::now());
        let wish = wish.map_err(|message| refused(&name, &message))?;
        let error = match Box::pin(patch(cluster, &seen, wish)).await {
            Ok(written) => {
                Box::pin(set_right(cluster, goal, &written)).await?;
                return Ok(seen);
            }
            Err(error) if error.is_conflict() => error,
            Err(error) => return Err(error),
        };
        let now = find(cluster, &name).await?;
        if now.metadata.uid != seen.metadata.uid {
            return Err(refused(&name, MADE_ANEW));
        }
        if now.metadata.resource_version == seen.metadata.resource_version {
            return Err(error);
        }
        seen = now;
    }
}

/// This machine's clock may be wrong, and that of the cluster counts.
async fn set_right(cluster: &Cluster, goal: Goal, written: &Sandbox) -> Result<(), Error> {
    let Some(time) = goal.set_right(written) else {
        return Ok(());
    };
    match Box::pin(patch(cluster, written, time)).await {
        Err(error) if error.is_conflict() => Err(refused(name_of(written), MADE_ANEW)),
        other => other.map(drop),
    }
}

/// Why time was over, where that can be seen.
async fn explained(cluster: &Cluster, goal: Goal, asked: &Sandbox, mut error: Error) -> Error {
    if let Error::Timeout { last, .. } = &mut error
        && goal == Goal::Wake
        && let Some(pod) = pod_of(cluster, asked).await
        && goal.is_not_copied(&pod)
    {
        last.push_str(
            "; its Pod was not told: the controller does not run, or is older than this plugin",
        );
    }
    error
}

/// The Pod of the Sandbox, where it can be read.
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

/// Watches the Sandbox until it is there, or will not get there, or time is over.
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
    let mut last = "nothing was heard of it".to_owned();
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
        let heard = match event {
            Some(Ok(None)) => return Err(refused(name, DELETED)),
            Some(Ok(Some(now))) if now.metadata.uid != before.metadata.uid => {
                return Err(refused(name, MADE_ANEW));
            }
            Some(Ok(Some(now))) => match goal.progress(before, &now) {
                Progress::Done => return Ok(now),
                Progress::Refused(message) => return Err(refused(name, &message)),
                Progress::Waiting(words) => words,
            },
            Some(Err(error)) if is_forbidden(&error) => return Err(unwatched(&cause(&error))),
            // The watch goes on by itself after a wait.
            Some(Err(error)) => format!("the watch was interrupted: {}", cause(&error)),
            None => return Err(unwatched("the watch ended")),
        };
        if heard != last {
            say(&format!("{name}: {heard}"));
            last = heard;
        }
    }
}

/// Whether waiting will not mend what is wrong with the watch.
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

/// Why a watch failed. In its own words it repeats that in Rust's notation.
fn cause(error: &watcher::Error) -> String {
    words(std::error::Error::source(error).unwrap_or(error))
}

const DELETED: &str = "it was deleted";
const MADE_ANEW: &str = "it was deleted, and made anew";

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
    fn a_watch_that_is_not_allowed_is_not_tried_until_time_is_over(
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
