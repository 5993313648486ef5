//! The bare client: makes the three writes that make a claim Ready, and knows all that it needs. No
//! controller can be faster.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures::{StreamExt, TryStreamExt, future::try_join_all, stream};
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use torpor_api::{Sandbox, SandboxClaim};

use super::objects;
use crate::stats::{Times, milliseconds};

const NAMESPACE: &str = "bare";
/// Number of claims that are made one right after the other.
const IN_A_ROW: usize = 200;
/// Number of claims that are made with a pause before each.
const PACED: usize = 30;
/// Number of claims that are made at once.
const AT_ONCE: usize = 150;
/// Rounds of claims at once; the last one counts, when the connections exist.
const ROUNDS: usize = 3;

/// Times of the bare client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Bare {
    /// Time of all three writes, one claim right after the other.
    pub in_a_row: Times,
    /// Time of the first write alone.
    pub create: Times,
    /// Pause before each claim in milliseconds, and the time of all three writes with it: that of
    /// an idle control plane.
    pub paced: Option<(f64, Times)>,
    /// Time of [`AT_ONCE`] claims at once, until the last write of the last one was answered, in
    /// milliseconds.
    pub at_once_ms: f64,
}

/// Measures while no controller runs, and deletes all that it made.
pub(crate) async fn measure(client: &Client, pause: Option<Duration>) -> anyhow::Result<Bare> {
    objects::namespace(client, NAMESPACE).await?;
    let count = IN_A_ROW + PACED + AT_ONCE * ROUNDS;
    let names: Vec<String> = (0..count).map(|number| format!("bare-{number}")).collect();
    stream::iter(&names)
        .map(|name| objects::create::<Sandbox>(client, NAMESPACE, objects::sandbox(name)))
        .buffer_unordered(16)
        .try_collect::<()>()
        .await?;
    let (in_a_row, rest) = names.split_at(IN_A_ROW);
    let (paced, at_once) = rest.split_at(PACED);
    let mut at_once_ms = 0.0;
    for round in at_once.chunks(AT_ONCE) {
        let begin = Instant::now();
        try_join_all(round.iter().map(|name| three_writes(client, name))).await?;
        at_once_ms = milliseconds(begin.elapsed());
    }
    let (mut all, mut creates) = (Vec::new(), Vec::new());
    for name in in_a_row {
        let (create, total) = three_writes(client, name).await?;
        creates.push(create);
        all.push(total);
    }
    let paced = match pause {
        Some(pause) => Some((milliseconds(pause), at_a_pace(client, paced, pause).await?)),
        None => None,
    };
    objects::clear(client, NAMESPACE).await?;
    Ok(Bare {
        in_a_row: Times::of(&all),
        create: Times::of(&creates),
        paced,
        at_once_ms,
    })
}

async fn at_a_pace(client: &Client, names: &[String], pause: Duration) -> anyhow::Result<Times> {
    let mut times = Vec::new();
    for name in names {
        tokio::time::sleep(pause).await;
        times.push(three_writes(client, name).await?.1);
    }
    Ok(Times::of(&times))
}

/// Makes the three writes; returns the time of the first one, and of all.
async fn three_writes(client: &Client, name: &str) -> anyhow::Result<(Duration, Duration)> {
    let claims: Api<SandboxClaim> = Api::namespaced(client.clone(), NAMESPACE);
    let sandboxes: Api<Sandbox> = Api::namespaced(client.clone(), NAMESPACE);
    let begin = Instant::now();
    let claim = claims
        .create(&PostParams::default(), &objects::claim(name))
        .await
        .with_context(|| format!("create claim {name}"))?;
    let created = begin.elapsed();
    let patch = json!({"metadata": {
        "labels": {"agents.x-k8s.io/warm-pool-sandbox": null, "agents.x-k8s.io/claim-uid": claim.uid()},
        "ownerReferences": [{
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
            "name": name, "uid": claim.uid(), "controller": true, "blockOwnerDeletion": true,
        }],
    }});
    let merge = PatchParams::default();
    let patched = sandboxes.patch(name, &merge, &Patch::Merge(&patch)).await;
    patched.with_context(|| format!("patch Sandbox {name}"))?;
    let status = json!({"status": {
        "sandbox": {"name": name, "podIPs": ["10.8.0.1"]},
        "conditions": [{
            "type": "Ready", "status": "True", "reason": "DependenciesReady",
            "message": "Pod is Ready", "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1,
        }],
    }});
    let said = claims
        .patch_status(name, &merge, &Patch::Merge(&status))
        .await;
    said.with_context(|| format!("patch the status of claim {name}"))?;
    Ok((created, begin.elapsed()))
}
