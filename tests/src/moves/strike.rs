//! Failures of the S3 server, of objects in it, of agents and of the controller.

use std::path::{Path, PathBuf};

use kube::Api;
use kube::api::{DeleteParams, ListParams};

use super::schedule::{Fault, Strike};
use crate::case::Case;
use crate::machine::{Process, processes_naming};
use crate::two_nodes::{BUCKET, objects, other};

/// Makes something fail, and puts it back. Returns the failure, and whether it had a target.
///
/// `from`: the node that the sandboxes leave.
pub async fn strike(case: &Case, strike: Strike, from: &str) -> anyhow::Result<(Fault, bool)> {
    tokio::time::sleep(strike.after).await;
    let hit = match strike.fault {
        // The development cluster starts it again.
        Fault::StoreKilled => store().is_some_and(|store| store.kill().is_ok()),
        Fault::StoreStopped => match store() {
            Some(store) if store.stop().is_ok() => {
                tokio::time::sleep(strike.lasts).await;
                // It may have been killed meanwhile.
                let _ = store.go_on();
                true
            }
            _ => false,
        },
        Fault::BucketGone => {
            let away = PathBuf::from(format!("{BUCKET}-away"));
            let gone = std::fs::rename(BUCKET, &away).is_ok();
            if gone {
                tokio::time::sleep(strike.lasts).await;
                std::fs::rename(&away, BUCKET)?;
            }
            gone
        }
        Fault::ObjectFlipped => {
            damage(case, strike, |whole| {
                let mut flipped = whole.to_vec();
                flipped[whole.len() / 2] ^= 1;
                flipped
            })
            .await?
        }
        Fault::ObjectCut => damage(case, strike, |whole| whole[..whole.len() / 2].to_vec()).await?,
        Fault::OldAgent => kill(case, "app.kubernetes.io/name=torpor-agent", Some(from)).await?,
        Fault::NewAgent => {
            let to = Some(other(from));
            kill(case, "app.kubernetes.io/name=torpor-agent", to).await?
        }
        Fault::Controller => kill(case, "app=agent-sandbox-controller", None).await?,
    };
    Ok((strike.fault, hit))
}

fn store() -> Option<Process> {
    let found = processes_naming(&["/versitygw --keep-alive".to_owned()]);
    found.into_iter().next()
}

/// Deletes Pods of Torpor without a grace period.
async fn kill(case: &Case, label: &str, node: Option<&str>) -> anyhow::Result<bool> {
    let pods: Api<k8s_openapi::api::core::v1::Pod> =
        Api::namespaced(case.client(), "agent-sandbox-system");
    let mut all = ListParams::default().labels(label);
    if let Some(node) = node {
        all = all.fields(&format!("spec.nodeName={node}"));
    }
    let at_once = DeleteParams::default().grace_period(0);
    pods.delete_collection(&at_once, &all).await?;
    Ok(true)
}

/// Changes an object of an image, and writes the whole one back where it is still the changed one.
async fn damage(
    case: &Case,
    strike: Strike,
    change: impl Fn(&[u8]) -> Vec<u8>,
) -> anyhow::Result<bool> {
    let Some(object) = objects(case, "/chunks/").pop() else {
        return Ok(false);
    };
    let read = |path: &Path| std::fs::read(path).unwrap_or_default();
    let whole = read(&object);
    if whole.is_empty() {
        return Ok(false);
    }
    let changed = change(&whole);
    std::fs::write(&object, &changed)?;
    tokio::time::sleep(strike.lasts).await;
    if read(&object) == changed {
        std::fs::write(&object, &whole)?;
    }
    Ok(true)
}
