//! Failures of the S3 server, of objects in it, of agents and of the controller. Each is put back
//! when its time is over, and also when its future is dropped.

use std::path::PathBuf;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use tokio::sync::Mutex;

use super::schedule::{Fault, Strike};
use crate::agent::{AGENT, NAMESPACE, delete_pods};
use crate::case::Case;
use crate::machine::{Process, processes_naming};
use crate::two_nodes::{BUCKET, objects, other};

/// Held by a failure of the bucket's files: two that overlap would put back each other's state.
static FILES: Mutex<()> = Mutex::const_new(());

/// Does its work when it is dropped.
struct PutBack<F: FnMut()>(F);

impl<F: FnMut()> Drop for PutBack<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Makes something fail, and puts it back. Returns the failure, and whether it had a target.
///
/// `from`: the node that the sandboxes leave.
pub async fn strike(case: &Case, strike: Strike, from: &str) -> anyhow::Result<(Fault, bool)> {
    tokio::time::sleep(strike.after).await;
    let hit = match strike.fault {
        // The development cluster starts it again.
        Fault::StoreKilled => store().is_some_and(|store| store.kill().is_ok()),
        Fault::StoreStopped => stop_store(strike).await,
        Fault::BucketGone => hide_bucket(strike).await?,
        Fault::ObjectFlipped => {
            let flip = |whole: &mut Vec<u8>| {
                let middle = whole.len() / 2;
                whole[middle] ^= 1;
            };
            damage(case, strike, flip).await?
        }
        Fault::ObjectCut => {
            let cut = |whole: &mut Vec<u8>| whole.truncate(whole.len() / 2);
            damage(case, strike, cut).await?
        }
        Fault::OldAgent => kill(case, AGENT, Some(from)).await?,
        Fault::NewAgent => kill(case, AGENT, Some(other(from))).await?,
        Fault::Controller => kill(case, "app=agent-sandbox-controller", None).await?,
    };
    Ok((strike.fault, hit))
}

/// Returns the S3 server's process.
pub fn store() -> Option<Process> {
    let found = processes_naming(&["/versitygw ".to_owned()]);
    found.into_iter().next()
}

async fn stop_store(strike: Strike) -> bool {
    let Some(store) = store().filter(|store| store.stop().is_ok()) else {
        return false;
    };
    // It may be killed meanwhile.
    let _back = PutBack(|| drop(store.go_on()));
    tokio::time::sleep(strike.lasts).await;
    true
}

/// Puts a plain file in the bucket's place, so that the S3 server cannot make the bucket again.
async fn hide_bucket(strike: Strike) -> anyhow::Result<bool> {
    let _files = FILES.lock().await;
    let away = PathBuf::from(format!("{BUCKET}-away"));
    std::fs::write(&away, "")?;
    renameat_with(CWD, BUCKET, CWD, &away, RenameFlags::EXCHANGE)?;
    let _back = PutBack(|| {
        let back = renameat_with(CWD, &away, CWD, BUCKET, RenameFlags::EXCHANGE);
        back.expect("the bucket is back in its place");
        std::fs::remove_file(&away).expect("the file is removed");
    });
    tokio::time::sleep(strike.lasts).await;
    Ok(true)
}

/// Changes an object of an image, and writes the whole one back where it is still the changed one.
async fn damage(
    case: &Case,
    strike: Strike,
    change: impl Fn(&mut Vec<u8>),
) -> anyhow::Result<bool> {
    let _files = FILES.lock().await;
    let Some(object) = objects(case, "/chunks/").pop() else {
        return Ok(false);
    };
    let Ok(whole) = std::fs::read(&object) else {
        return Ok(false);
    };
    let mut changed = whole.clone();
    change(&mut changed);
    std::fs::write(&object, &changed)?;
    let _back = PutBack(|| {
        // The object may have been deleted, or uploaded again.
        if std::fs::read(&object).is_ok_and(|now| now == changed) {
            std::fs::write(&object, &whole).expect("the object is whole again");
        }
    });
    tokio::time::sleep(strike.lasts).await;
    Ok(true)
}

/// Deletes Pods of Torpor without a grace period. Returns whether there were any.
async fn kill(case: &Case, label: &str, node: Option<&str>) -> anyhow::Result<bool> {
    let pods: Api<Pod> = Api::namespaced(case.client(), NAMESPACE);
    let mut all = ListParams::default().labels(label);
    if let Some(node) = node {
        all = all.fields(&format!("spec.nodeName={node}"));
    }
    let found = pods.list(&all).await?;
    delete_pods(case.client(), &all).await?;
    Ok(!found.items.is_empty())
}
