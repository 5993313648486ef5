//! `snapshot`: a SandboxSnapshot of a Sandbox, which runs on, and the wait for its image.

use std::time::Duration;

use kube::ResourceExt;
use kube::api::{ObjectMeta, PostParams};
use tokio::time::Instant;
use torpor_api::annotations::{SAVED_POD, Settings};
use torpor_api::conditions::{self, COMMITTED};
use torpor_api::reasons::snapshot as reasons;
use torpor_api::snapshot::SandboxSnapshotSpec;
use torpor_api::{OperatingMode, Sandbox, SandboxSnapshot, SnapshotReason, labels};

use crate::change::{find, name_of};
use crate::connect::{Cluster, call};
use crate::error::Error;
use crate::goal::{Progress, described};
use crate::watching::{Wait, refused};

/// Snapshot that a command has requested.
#[derive(Clone, Debug)]
pub struct Taken {
    pub snapshot: SandboxSnapshot,
    /// Time until the image was complete; `None` without a wait.
    pub took: Option<Duration>,
}

/// Takes a snapshot of the Sandbox of this name and waits for it, at most for `limit`; zero does
/// not wait. Without a name for the snapshot the apiserver generates one.
pub async fn snapshot(
    cluster: &Cluster,
    name: &str,
    snapshot_name: Option<&str>,
    limit: Duration,
    say: &(dyn Fn(&str) + Sync),
) -> Result<Taken, Error> {
    let sandbox = find(cluster, name).await?;
    let began = Instant::now();
    let requested = request(cluster, &sandbox, snapshot_name).await?;
    if limit.is_zero() {
        let (snapshot, took) = (requested, None);
        return Ok(Taken { snapshot, took });
    }
    let wait = Wait::new(cluster, name, "saved", limit, say);
    match wait
        .until(cluster.api::<SandboxSnapshot>(), &requested, saved)
        .await
    {
        Ok(snapshot) => Ok(Taken {
            snapshot,
            took: Some(began.elapsed()),
        }),
        Err(error) => {
            if matches!(error, Error::Refused { .. }) {
                remove(cluster, &requested).await;
            }
            Err(error)
        }
    }
}

/// Takes a snapshot for a further step of a command, which can start once the controller has
/// recorded the snapshot's Pod. A snapshot that is not complete within `limit` is removed.
pub(crate) async fn take(
    cluster: &Cluster,
    sandbox: &Sandbox,
    limit: Duration,
    say: &(dyn Fn(&str) + Sync),
) -> Result<SandboxSnapshot, Error> {
    let name = name_of(sandbox);
    let requested = request(cluster, sandbox, None).await?;
    let wait = Wait::new(cluster, name, "saved", limit, say);
    let taken = wait
        .until(cluster.api::<SandboxSnapshot>(), &requested, recorded)
        .await;
    if taken.is_err() {
        remove(cluster, &requested).await;
    }
    taken.map_err(|error| match error {
        Error::Timeout { limit, last, .. } => {
            let limit = crate::units::span(limit);
            refused(
                name,
                &format!("its memory was not saved within {limit} ({last}); nothing was changed"),
            )
        }
        other => other,
    })
}

/// Returns the complete snapshot of this name that a user took of the Sandbox.
pub(crate) async fn usable(
    cluster: &Cluster,
    sandbox: &str,
    snapshot: &str,
) -> Result<SandboxSnapshot, Error> {
    let doing = format!("get SandboxSnapshot {snapshot}");
    let found = call(&doing, cluster.api::<SandboxSnapshot>().get(snapshot)).await;
    let list = format!("to list: `kubectl torpor snapshots {sandbox}`");
    let missing = format!("there is no SandboxSnapshot {snapshot}; {list}");
    let found = found.map_err(|error| match error.is_missing() {
        true => refused(sandbox, &missing),
        false => error,
    })?;
    match unusable(&found, sandbox) {
        Some(why) => Err(refused(
            sandbox,
            &format!("SandboxSnapshot {snapshot} {why}; {list}"),
        )),
        None => Ok(found),
    }
}

/// Returns why no copy and no rollback can start from the snapshot; none if they can. Pure.
fn unusable(snapshot: &SandboxSnapshot, sandbox: &str) -> Option<String> {
    let of = &snapshot.spec.sandbox_name;
    if of != sandbox {
        return Some(format!("is one of Sandbox {of}"));
    }
    // The controller deletes it once the Sandbox has resumed.
    if snapshot.spec.reason == SnapshotReason::Suspend {
        return Some("is the memory from which the Sandbox resumes".to_owned());
    }
    if snapshot.labels().contains_key(labels::BACKUP) {
        return Some("is a backup, which goes when the sandbox has run on".to_owned());
    }
    if snapshot.metadata.deletion_timestamp.is_some() {
        return Some("is being deleted".to_owned());
    }
    match snapshot.is_committed() {
        true => None,
        false => Some("has no complete image".to_owned()),
    }
}

/// Creates a snapshot of a Sandbox that has memory to save.
async fn request(
    cluster: &Cluster,
    sandbox: &Sandbox,
    snapshot_name: Option<&str>,
) -> Result<SandboxSnapshot, Error> {
    let name = name_of(sandbox);
    if sandbox.spec.operating_mode == OperatingMode::Suspended {
        let message =
            "suspended: no program runs whose memory could be saved; first `kubectl torpor resume`";
        return Err(refused(name, message));
    }
    let spec = SandboxSnapshotSpec {
        sandbox_name: name.to_owned(),
        snapshot_class_name: class_of(sandbox),
        ..SandboxSnapshotSpec::default()
    };
    let mut wanted = SandboxSnapshot::new("", spec);
    wanted.metadata = ObjectMeta {
        name: snapshot_name.map(str::to_owned),
        generate_name: snapshot_name.is_none().then(|| format!("{name}-")),
        ..ObjectMeta::default()
    };
    let doing = format!("create a SandboxSnapshot of Sandbox {name}");
    let parameters = PostParams::default();
    call(
        &doing,
        cluster
            .api::<SandboxSnapshot>()
            .create(&parameters, &wanted),
    )
    .await
}

/// Returns the SnapshotClass that the Sandbox names. Pure.
fn class_of(sandbox: &Sandbox) -> Option<String> {
    let own = sandbox.metadata.annotations.as_ref();
    Settings::read(own, sandbox.spec.pod_template.annotations()).snapshot_class
}

/// Deletes a snapshot that the command has requested. If the deletion fails, the snapshot stays,
/// and `kubectl torpor snapshots` lists it.
async fn remove(cluster: &Cluster, requested: &SandboxSnapshot) {
    let _ = cluster.delete(requested).await;
}

/// Returns the progress of a snapshot towards a complete image. Pure.
fn saved(snapshot: &SandboxSnapshot) -> Progress {
    if snapshot.metadata.deletion_timestamp.is_some() {
        return Progress::Refused("its SandboxSnapshot is being deleted".to_owned());
    }
    match conditions::find(snapshot.conditions(), COMMITTED) {
        Some(condition) if condition.status == "True" => Progress::Done,
        Some(condition) => match condition.reason.as_str() {
            // The agent retries every other failure.
            reasons::RUNTIME_NOT_CAPABLE | reasons::SANDBOX_NOT_FOUND => {
                Progress::Refused(described(condition))
            }
            _ => Progress::Waiting(described(condition)),
        },
        None => Progress::Waiting("no node agent has answered yet".to_owned()),
    }
}

/// Returns the progress towards a complete image whose Pod the controller has recorded. Without the
/// record no Pod starts from the image once the saved Pod is gone. Pure.
fn recorded(snapshot: &SandboxSnapshot) -> Progress {
    match saved(snapshot) {
        Progress::Done if !snapshot.annotations().contains_key(SAVED_POD) => {
            Progress::Waiting("the controller has not recorded the saved Pod yet".to_owned())
        }
        other => other,
    }
}
