//! A storm of claims while controller, agent and containerd are killed: each claim gets one sandbox
//! that no other claim has touched, with its own variables, and nothing is left behind.
//!
//! `TORPOR_STORM=200` makes that many claims.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use serde_json::json;
use torpor_api::annotations::{GOLDEN, HEAT, LATE_BIND, ON_CLAIM_EXEC};
use torpor_api::conditions::find;
use torpor_api::{SandboxClaim, SandboxTemplate, SandboxWarmPool};
use torpor_records::PodRecord;
use torpor_tests::agent::{Agent, NAMESPACE};
use torpor_tests::case::{Case, alone_within, uid};
use torpor_tests::node::containerd;
use torpor_tests::pods::{annotated, pod_spec, shell};
use torpor_tests::pools::extension;
use torpor_tests::wait;

/// Claims of a run that nobody asked to be longer.
const CLAIMS: u32 = 40;
/// Claims at the same time.
const AT_ONCE: u32 = 8;
const MEMBERS: u32 = 10;
/// Time between two kills.
const BETWEEN: Duration = Duration::from_secs(6);
/// Time limit of a claim, and of the end of all. The kubelet asks a containerd that was killed
/// again after minutes.
const CLAIM_LIMIT: Duration = Duration::from_secs(240);
const LIMIT: Duration = Duration::from_secs(1500);
/// Command of each claim: the sandbox may have been no other claim's.
const TAKE: &str = r#"["sh","-c","cat /taken >>/others 2>/dev/null; echo $TORPOR_CLAIM >/taken"]"#;

fn claims() -> u32 {
    let asked = std::env::var("TORPOR_STORM").ok();
    asked
        .and_then(|number| number.parse().ok())
        .unwrap_or(CLAIMS)
}

async fn pool(case: &Case) -> anyhow::Result<()> {
    let container = shell("a", "while :; do sleep 1; done");
    let spec = json!({
        "envVarsInjectionPolicy": "Allowed",
        "podTemplate": { "spec": pod_spec(json!({ "containers": [container] })) },
    });
    let mut template = extension("SandboxTemplate", "t", spec);
    for (key, value) in [(GOLDEN, "true"), (LATE_BIND, "env"), (ON_CLAIM_EXEC, TAKE)] {
        template = annotated(template, key, value);
    }
    case.create(template).await?;
    let pool = json!({ "replicas": MEMBERS, "sandboxTemplateRef": { "name": "t" } });
    let pool = extension("SandboxWarmPool", "w", pool);
    case.create(annotated(pool, HEAT, "hot=2,asleep=rest"))
        .await?;
    case.pool_is_ready("w", MEMBERS).await
}

/// Kills controller, agent and containerd in turn until the storm is over; returns how often.
async fn kill(case: &Case, over: &AtomicBool) -> anyhow::Result<u32> {
    let mut kills = 0;
    loop {
        // The pauses are the subject: the programs work between two kills.
        tokio::time::sleep(BETWEEN).await;
        if over.load(Ordering::Relaxed) {
            return Ok(kills);
        }
        match kills % 3 {
            0 => {
                let pods: Api<Pod> = Api::namespaced(case.client(), NAMESPACE);
                let of_controller = ListParams::default().labels("app=agent-sandbox-controller");
                let at_once = DeleteParams::default().grace_period(0);
                pods.delete_collection(&at_once, &of_controller).await?;
            }
            1 => drop(
                Agent::running()
                    .await?
                    .kill_and_replace(case.client())
                    .await?,
            ),
            _ => containerd()?.kill()?,
        }
        kills += 1;
    }
}

/// Makes one claim, checks its sandbox, and deletes the claim. Returns the Sandbox' UID.
async fn claim(case: &Case, number: u32) -> anyhow::Result<String> {
    let name = format!("c{number}");
    let task = format!("task {number}");
    let env = json!({ "env": [{ "name": "TASK", "value": task }] });
    case.begin_claim("w", &name, env).await?;
    let claims = case.api::<SandboxClaim>();
    let words = format!("claim {name} is Ready");
    let sandbox = wait::object(claims.clone(), &name, &words, CLAIM_LIMIT, |found| {
        let status = found.and_then(|claim| claim.status).unwrap_or_default();
        let ready = find(&status.conditions, "Ready").is_some_and(|c| c.status == "True");
        match status.sandbox {
            Some(sandbox) if ready => Ok(sandbox.name),
            _ => Err(format!("{:?}", status.conditions)),
        }
    })
    .await?;
    let owner = uid(&claims.get(&name).await?);
    let held = case.sandboxes().get(&sandbox).await?;
    let line = "echo \"$TASK|$(cat /run/torpor/claim)|$(cat /taken)|$(cat /others 2>/dev/null)\"";
    // containerd may be dead at this moment.
    let seen = wait::until("an exec in the sandbox", CLAIM_LIMIT, async || {
        let ran = case.exec(&sandbox, "a", &["sh", "-c", line]).await?;
        Ok(match ran.code {
            0 => Ok(ran.out.trim().to_owned()),
            _ => Err(ran.err),
        })
    })
    .await?;
    let own = format!("{task}|{owner}|{owner}|");
    // A command that ran twice, for the same claim, has found itself.
    let again = format!("{own}{owner}");
    ensure!(seen == own || seen == again, "claim {name}: {seen:?}");
    claims.delete(&name, &DeleteParams::background()).await?;
    Ok(uid(&held))
}

#[tokio::test]
async fn a_storm_of_claims_with_kills_leaves_none_stuck_none_doubled_and_nothing_behind()
-> anyhow::Result<()> {
    alone_within(LIMIT, "storm", async |case| {
        pool(case).await?;
        let (all, next) = (claims(), AtomicU32::new(0));
        let (over, sandboxes) = (AtomicBool::new(false), Mutex::new(BTreeSet::new()));
        let worker = async |_: u32| -> anyhow::Result<()> {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= all {
                    return Ok(());
                }
                let held = claim(case, number).await?;
                let is_new = sandboxes.lock().expect("no panic").insert(held);
                ensure!(is_new, "claim {number} got the sandbox of another");
            }
        };
        let storm = async {
            let stormed = futures::future::try_join_all((0..AT_ONCE).map(worker)).await;
            over.store(true, Ordering::Relaxed);
            stormed
        };
        let (stormed, kills) = tokio::join!(storm, kill(case, &over));
        stormed?;
        println!("{all} claims, {} kills", kills?);
        // The programs that were killed last are back.
        let parameters = DeleteParams::background();
        case.pool_is_ready("w", MEMBERS).await?;
        case.api::<SandboxWarmPool>()
            .delete("w", &parameters)
            .await?;
        case.api::<SandboxTemplate>()
            .delete("t", &parameters)
            .await?;
        wait::none(&case.sandboxes(), "the Sandboxes are gone", CLAIM_LIMIT).await?;
        wait::none(&case.snapshots(), "the snapshots are gone", CLAIM_LIMIT).await?;
        wait::none(&case.pods(), "the Pods are gone", CLAIM_LIMIT).await?;
        nothing_left(case).await
    })
    .await
}

/// Waits until the node has neither records nor images of the namespace.
async fn nothing_left(case: &Case) -> anyhow::Result<()> {
    wait::until("nothing is left on the node", CLAIM_LIMIT, async || {
        let records = case.node.records.pods();
        let records = records.context("cannot read the records")?;
        let is_own = |pod: &&PodRecord| *pod.namespace.as_str() == *case.namespace;
        let records = records.iter().filter(is_own).count();
        let images = std::fs::read_dir(case.node.images_dir(&case.namespace));
        let images = images.into_iter().flatten().flatten();
        let images: Vec<_> = images.map(|image| image.file_name()).collect();
        let is_empty = records == 0 && images.is_empty();
        wait::holds(is_empty, || format!("{records} records, images {images:?}"))
    })
    .await
}
