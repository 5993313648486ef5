//! Golden images of pools whose members are on both nodes.

use std::collections::BTreeSet;

use anyhow::{Context, ensure};
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use torpor_api::annotations::{GOLDEN, GOLDEN_READY_EXEC, HEAT, NODE_PREFERENCE, SNAPSHOT_CLASS};
use torpor_api::{Sandbox, SandboxWarmPool, conditions, labels};
use torpor_tests::case::{Case, condition, node_of, uid};
use torpor_tests::pods::{annotated, pod_spec, python};
use torpor_tests::pools::extension;
use torpor_tests::{wait, witness};

use super::{LIMIT, case};

/// Creates a template with these annotations for golden images, and a pool with two sleeping
/// members on each node.
async fn pool(case: &Case, container: Value, golden: &[(&str, &str)]) -> anyhow::Result<()> {
    let spread = json!([{
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": { "matchLabels": { "app": "spread" } },
    }]);
    let spec = pod_spec(json!({
        "containers": [container], "topologySpreadConstraints": spread,
    }));
    let pod = json!({ "metadata": { "labels": { "app": "spread" } }, "spec": spec });
    let mut template = extension("SandboxTemplate", "t", json!({ "podTemplate": pod }));
    for (key, value) in golden {
        template = annotated(template, key, value);
    }
    case.create(template).await?;
    let pool = json!({ "replicas": 4, "sandboxTemplateRef": { "name": "t" } });
    let pool = extension("SandboxWarmPool", "w", pool);
    case.create(annotated(pool, HEAT, "hot=0,asleep=rest"))
        .await?;
    case.pool_is_ready("w", 4).await
}

async fn both_have_an_image(case: &Case) -> anyhow::Result<()> {
    let golden = ListParams::default().labels(labels::GOLDEN);
    wait::until("both nodes have an image", LIMIT, async || {
        let images = case.snapshots().list(&golden).await?.items;
        let nodes: BTreeSet<_> = images
            .iter()
            .filter(|image| image.is_committed())
            .filter_map(|image| image.status.as_ref()?.node_name.clone())
            .collect();
        let left = case.sandboxes().list(&golden).await?.items.len();
        wait::holds(nodes.len() == 2 && left == 0, || {
            format!("images on {nodes:?}, {left} golden Sandboxes")
        })
    })
    .await
}

/// Program that draws a number when it starts, which only its copies share.
const DRAWING: &str = r#"
import os, time
with open("/token", "w") as file:
    file.write(os.urandom(8).hex())
while True:
    time.sleep(1)
"#;

/// Annotation that delays the save until the program has drawn.
const DRAWN: (&str, &str) = (GOLDEN_READY_EXEC, r#"["test","-s","/token"]"#);

/// Creates a pool whose golden sandboxes share the memory of the first one.
pub(super) async fn shared_pool(case: &Case) -> anyhow::Result<()> {
    pool(case, python("a", DRAWING), &[(GOLDEN, "shared"), DRAWN]).await
}

#[tokio::test]
async fn the_golden_image_of_one_node_reaches_the_other_through_the_repository()
-> anyhow::Result<()> {
    case("goldencopied", async |case| {
        let of_class = [
            (GOLDEN, "true"),
            (SNAPSHOT_CLASS, case.namespace.as_str()),
            DRAWN,
        ];
        pool(case, python("a", DRAWING), &of_class).await?;
        the_program_starts_once(case).await
    })
    .await
}

/// Checks that members on both nodes continue from memory in which the program drew one number.
pub(super) async fn the_program_starts_once(case: &Case) -> anyhow::Result<()> {
    both_have_an_image(case).await?;
    // The first members of the other node are older than its image.
    let older = ListParams::default().labels(labels::WARM_POOL_SANDBOX);
    let ending = DeleteParams::default();
    case.sandboxes().delete_collection(&ending, &older).await?;
    let mut drawn = BTreeSet::new();
    for node in ["node-0", "node-1"] {
        wait::until("a new member sleeps on the node", LIMIT, async || {
            let sleeps = |one: &Sandbox| {
                let status = one.status.clone().unwrap_or_default();
                status.node_name == node
                    && conditions::is_true(&status.conditions, conditions::HIBERNATED)
            };
            let members = case.members().await?;
            let sleeping = members.iter().filter(|one| sleeps(one)).count();
            wait::holds(sleeping > 0, || {
                format!("none of {} members", members.len())
            })
        })
        .await?;
        let spec = json!({ "warmPoolRef": { "name": "w" } });
        let claim = extension("SandboxClaim", node, spec);
        case.create(annotated(claim, NODE_PREFERENCE, node)).await?;
        let name = case.claimed(node).await?;
        let pod = case.ready(&name).await?;
        ensure!(node_of(&pod) == node, "it is on {}", node_of(&pod));
        drawn.insert(
            case.kubectl
                .ok(&["exec", &name, "--", "cat", "/token"])
                .await?,
        );
    }
    ensure!(
        drawn.len() == 1,
        "each node has started the program: {drawn:?}"
    );
    Ok(())
}

#[tokio::test]
async fn each_node_with_members_gets_a_golden_image_from_which_later_members_start()
-> anyhow::Result<()> {
    case("golden", async |case| {
        pool(case, witness::container(1, &["/file"]), &[(GOLDEN, "true")]).await?;
        both_have_an_image(case).await?;
        let before: BTreeSet<_> = case.members().await?.iter().map(uid).collect();
        let scale = Patch::Merge(json!({ "spec": { "replicas": 8 } }));
        let pools = case.api::<SandboxWarmPool>();
        pools.patch("w", &PatchParams::default(), &scale).await?;
        case.pool_is_ready("w", 8).await?;
        let mut nodes = BTreeSet::new();
        for member in case.members().await? {
            if !before.contains(&uid(&member)) {
                let pod = case.ready(&member.name_any()).await?;
                let restored = condition(&pod, conditions::POD_RESTORED);
                ensure!(restored.0 == "True", "{}: {restored:?}", member.name_any());
                nodes.insert(node_of(&pod));
            }
        }
        ensure!(nodes.len() == 2, "the new members are on {nodes:?}");
        // All members sleep, so that the claim's preference decides.
        let preferred = nodes.last().context("a node")?;
        let spec = json!({ "warmPoolRef": { "name": "w" } });
        let claim = extension("SandboxClaim", "c", spec);
        case.create(annotated(claim, NODE_PREFERENCE, preferred))
            .await?;
        let name = case.claimed("c").await?;
        let pod = case.ready(&name).await?;
        ensure!(node_of(&pod) == *preferred, "it is on {}", node_of(&pod));
        witness::ask(&pod).await.map(drop)
    })
    .await
}
