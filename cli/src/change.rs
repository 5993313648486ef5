//! `hibernate`, `wake`, `suspend`, `resume`: one patch, then waiting for what the conditions say. A wake that took the place of somebody
//! else's time puts that back in the end.

use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::json;
use tokio::time::Instant;
use torpor_api::Sandbox;
use torpor_api::annotations::NEXT_WAKEUP;

use crate::args::Change;
use crate::connect::{Cluster, call};
use crate::error::{Error, words};
use crate::goal::{Goal, Progress, note};
use crate::wakeup::Displaced;

/// What was asked of one Sandbox, done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    pub name: String,
    /// From the patch until the cluster said that it is done; none if nobody waited.
    pub took: Option<Duration>,
    /// What the user should know besides.
    pub note: Option<String>,
}

/// Asks it of each Sandbox, all at once, and waits for all of them. `say` hears every new thing that their conditions say.
pub async fn change(
    cluster: &Cluster,
    goal: Goal,
    change: &Change,
    say: &(dyn Fn(&str) + Sync),
) -> Vec<Result<Changed, Error>> {
    let each = change
        .names
        .iter()
        .map(|name| change_one(cluster, goal, name, change.timeout, say));
    join_all(each).await
}

async fn change_one(
    cluster: &Cluster,
    goal: Goal,
    name: &str,
    limit: Duration,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Changed, Error> {
    let api: Api<Sandbox> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let doing = format!("get Sandbox {name}");
    let before = call(&doing, api.get_opt(name)).await?;
    let before = before.ok_or_else(|| Error::NoSandbox {
        namespace: cluster.namespace.clone(),
        name: name.to_owned(),
    })?;
    let now = Timestamp::now();
    let patch = goal
        .patch(&before, now)
        .map_err(|message| refused(name, &message))?;
    let displaced = Displaced::by(&patch, &before, now);
    if let Some(displaced) = displaced.as_ref().filter(|_| limit.is_zero()) {
        return Err(refused(name, &unattended(displaced)));
    }
    let began = Instant::now();
    ask(&api, &before, patch).await?;
    if limit.is_zero() {
        return Ok(Changed {
            name: name.to_owned(),
            took: None,
            note: None,
        });
    }
    let waited = wait(&api, goal, &before, limit, say).await;
    if let Some(displaced) = displaced.as_ref().filter(|_| waited.is_err()) {
        say(&format!("{name}: {}", missing(displaced)));
    }
    let now = waited?;
    let took = Some(began.elapsed());
    let mut note = note(goal, &now);
    if let Some(displaced) = &displaced
        && let Err(error) = Box::pin(put_back(&api, now, displaced)).await
    {
        note = Some(format!("{}: {}", missing(displaced), words(&error)));
    }
    Ok(Changed {
        name: name.to_owned(),
        took,
        note,
    })
}

/// Why nobody is woken who would have to be watched, and is not.
fn unattended(displaced: &Displaced) -> String {
    let time = displaced.as_str();
    format!(
        "it is to be awake at {time} ({NEXT_WAKEUP}), which a wake takes the place of until it is done. Remedy: leave out --timeout 0, then that time is put back"
    )
}

fn missing(displaced: &Displaced) -> String {
    let time = displaced.as_str();
    format!("{NEXT_WAKEUP} was {time}: set it again once the sandbox is awake")
}

/// Puts back the time that the wake has taken the place of. `now`: the Sandbox as it was seen last.
async fn put_back(
    api: &Api<Sandbox>,
    mut now: Sandbox,
    displaced: &Displaced,
) -> Result<(), Error> {
    while let Some(patch) = displaced.patch(&now, Timestamp::now()) {
        match ask(api, &now, patch).await {
            // Somebody has got on with it meanwhile: perhaps with the time.
            Err(error) if error.is_conflict() => {}
            done => return done,
        }
        let name = now.metadata.name.as_deref().unwrap_or_default();
        let found = call(&format!("get Sandbox {name}"), api.get_opt(name)).await?;
        match found.filter(|found| found.metadata.uid == now.metadata.uid) {
            Some(found) => now = found,
            None => break,
        }
    }
    Ok(())
}

/// Patches this Sandbox, and not one that has taken its name meanwhile.
async fn ask(
    api: &Api<Sandbox>,
    before: &Sandbox,
    mut patch: serde_json::Value,
) -> Result<(), Error> {
    let name = before.metadata.name.as_deref().unwrap_or_default();
    patch["metadata"]["uid"] = json!(before.metadata.uid);
    let doing = format!("patch Sandbox {name}");
    let parameters = PatchParams::default();
    call(&doing, api.patch(name, &parameters, &Patch::Merge(patch))).await?;
    Ok(())
}

/// Watches the Sandbox until it is there, or will not get there, or time is over.
async fn wait(
    api: &Api<Sandbox>,
    goal: Goal,
    before: &Sandbox,
    limit: Duration,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Sandbox, Error> {
    let name = before.metadata.name.as_deref().unwrap_or_default();
    let deadline = Instant::now() + limit;
    let events = watcher::watch_object(api.clone(), name);
    let mut events = std::pin::pin!(events.default_backoff());
    let mut last = "nothing was heard of it".to_owned();
    loop {
        let Ok(event) = tokio::time::timeout_at(deadline, events.next()).await else {
            return Err(Error::Timeout {
                name: name.to_owned(),
                goal: goal.participle(),
                limit,
                last,
            });
        };
        let heard = match event {
            Some(Ok(None)) => return Err(refused(name, "it was deleted")),
            Some(Ok(Some(now))) if now.metadata.uid != before.metadata.uid => {
                return Err(refused(name, "it was deleted, and made anew"));
            }
            Some(Ok(Some(now))) => match goal.progress(before, &now) {
                Progress::Done => return Ok(now),
                Progress::Refused(message) => return Err(refused(name, &message)),
                Progress::Waiting(words) => words,
            },
            // The watch goes on by itself after a wait.
            Some(Err(error)) => format!("the watch was interrupted: {}", words(&error)),
            None => {
                return Err(Error::WatchEnded {
                    name: name.to_owned(),
                });
            }
        };
        if heard != last {
            say(&format!("{name}: {heard}"));
            last = heard;
        }
    }
}

fn refused(name: &str, message: &str) -> Error {
    Error::Refused {
        name: name.to_owned(),
        message: message.to_owned(),
    }
}
