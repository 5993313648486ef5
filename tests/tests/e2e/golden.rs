//! Golden images: members of a pool that start from the memory of a sandbox that was ready, asleep
//! or awake, and what claims get of them.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use anyhow::Context;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use torpor_api::annotations::{GOLDEN, GOLDEN_READY_EXEC, HEAT, HIBERNATE, HIBERNATE_AFTER};
use torpor_api::conditions::{HIBERNATED, POD_HIBERNATED, POD_RESTORED};
use torpor_api::{Sandbox, SandboxSnapshot, SandboxWarmPool, labels};
use torpor_tests::case::{Case, case, condition, uid};
use torpor_tests::pods::{annotated, pod_spec, python};
use torpor_tests::pools::extension;
use torpor_tests::sandboxes::{LIMIT, condition_of};
use torpor_tests::sleep::{is_ready, restarts};
use torpor_tests::wait;

/// Program that draws a number when it starts, which only its copies share, and counts.
const PROGRAM: &str = r#"
import os, time
token = os.urandom(8).hex()
with open("/token", "w") as file:
    file.write(token)
count = 0
while True:
    count += 1
    with open("/count", "w") as file:
        file.write(f"{token} {count}")
    time.sleep(0.1)
"#;

/// Creates a template with golden images, saved once `ready` succeeds, and a pool of it.
async fn pool_of(
    case: &Case,
    replicas: u32,
    heat: &str,
    spec: Value,
    ready: &str,
) -> anyhow::Result<()> {
    let template = json!({ "podTemplate": { "spec": pod_spec(spec) } });
    let template = annotated(extension("SandboxTemplate", "t", template), GOLDEN, "true");
    case.create(annotated(template, GOLDEN_READY_EXEC, ready))
        .await?;
    let pool = json!({ "replicas": replicas, "sandboxTemplateRef": { "name": "t" } });
    let pool = extension("SandboxWarmPool", "w", pool);
    case.create(annotated(pool, HEAT, heat)).await
}

async fn pool(case: &Case, replicas: u32, heat: &str) -> anyhow::Result<()> {
    let ready = r#"["test","-s","/count"]"#;
    pool_of(case, replicas, heat, counting(), ready).await
}

fn counting() -> Value {
    json!({ "containers": [python("a", PROGRAM)] })
}

/// Waits until this many members sleep, and the others are awake.
async fn members_sleep(case: &Case, asleep: usize) -> anyhow::Result<Vec<Sandbox>> {
    wait::until("the members that are to sleep do", LIMIT, async || {
        let (members, mut sleeping) = (case.members().await?, Vec::new());
        for member in members {
            let pod = case.pods().get_opt(&member.name_any()).await?;
            if pod.is_some_and(|pod| condition(&pod, POD_HIBERNATED).0 == "True") {
                sleeping.push(member);
            }
        }
        Ok(match sleeping.len() == asleep {
            true => Ok(sleeping),
            false => Err(format!("{} sleep", sleeping.len())),
        })
    })
    .await
}

/// Waits until the golden Sandbox is gone; returns its snapshot.
async fn golden_snapshot(case: &Case) -> anyhow::Result<SandboxSnapshot> {
    let golden = kube::api::ListParams::default().labels(labels::GOLDEN);
    wait::until("the golden image is made", LIMIT, async || {
        let left = case.sandboxes().list(&golden).await?.items;
        let mut made = case.snapshots().list(&golden).await?.items;
        made.retain(SandboxSnapshot::is_committed);
        Ok(match (left.is_empty(), made.pop()) {
            (true, Some(made)) => Ok(made),
            (_, made) => Err(format!("{} golden Sandboxes, {made:?}", left.len())),
        })
    })
    .await
}

#[tokio::test]
async fn members_sleep_in_the_golden_image_and_each_claim_gets_one_with_an_identity_of_its_own()
-> anyhow::Result<()> {
    case("golden", async |case| {
        pool(case, 3, "hot=1,asleep=rest").await?;
        case.pool_is_ready("w", 3).await?;
        let sleeping = members_sleep(case, 2).await?;
        golden_snapshot(case).await?;
        for member in &sleeping {
            let pod = case.ready(&member.name_any()).await?;
            // It has no process, and no bytes of its own.
            assert!(case.node.sandbox_processes(&uid(&pod))?.is_empty());
            let image = case.node.image_of(&case.namespace, &uid(&pod))?;
            for file in std::fs::read_dir(image)? {
                let file = file?;
                let (links, name) = (file.metadata()?.nlink(), file.file_name());
                assert!(
                    links >= 3 || name == "manifest.json",
                    "{name:?} has {links} links"
                );
            }
        }
        let (mut names, mut tokens) = (BTreeSet::new(), BTreeSet::new());
        let mut generations = BTreeSet::new();
        for claim in ["one", "two", "three"] {
            let name = case.claim("w", claim).await?;
            let said = case.written(&name, "a", "/token").await?;
            generations.insert(case.sh(&name, "a", "cat /run/torpor/generation").await?);
            let seen = case.sh(&name, "a", "uname -n; cat /etc/hostname").await?;
            assert_eq!(seen, format!("{name}\n{name}"));
            let sandbox = case.sandboxes().get(&name).await?;
            assert!(!sandbox.annotations().contains_key(HIBERNATE));
            let awake = |pod: &_| condition(pod, POD_HIBERNATED).0 != "True";
            let pod = case.pod_until(&name, "it is awake", LIMIT, awake).await?;
            assert_eq!(restarts(&pod), 0);
            tokens.insert(said);
            names.insert(name);
            case.pool_is_ready("w", 3).await?;
        }
        assert_eq!(names.len(), 3, "each claim has a Sandbox of its own");
        assert_eq!(generations.len(), 3, "each has a generation of its own");
        // The first member may have started before there was an image.
        assert!(
            tokens.len() <= 2,
            "the others continue from one start: {tokens:?}"
        );
        Ok(())
    })
    .await
}

#[tokio::test]
async fn changes_of_a_claim_in_a_member_that_slept_outlive_its_sleep_and_its_suspension()
-> anyhow::Result<()> {
    case("goldenkept", async |case| {
        pool(case, 1, "hot=0,asleep=rest").await?;
        case.pool_is_ready("w", 1).await?;
        members_sleep(case, 1).await?;
        let name = case.claim("w", "c").await?;
        let token = case.written(&name, "a", "/token").await?;
        case.sh(&name, "a", "echo mine > /mark").await?;
        // The pool was without a member for a moment: no other claim has touched this one.
        case.patch(
            &name,
            json!({ "metadata": { "annotations": { HIBERNATE: "true" } } }),
        )
        .await?;
        case.asleep(&name).await?;
        let read = "cat /mark /token";
        assert_eq!(case.sh(&name, "a", read).await?, format!("mine\n{token}"));
        case.patch(
            &name,
            json!({ "metadata": { "annotations": { HIBERNATE: null } } }),
        )
        .await?;
        case.suspend(&name).await?;
        case.resume(&name).await?;
        assert_eq!(case.sh(&name, "a", read).await?, format!("mine\n{token}"));
        // The next member has nothing of it.
        case.pool_is_ready("w", 1).await?;
        let next = case.claim("w", "d").await?;
        assert_eq!(case.written(&next, "a", "/token").await?, token);
        assert_eq!(
            case.sh(&next, "a", "ls /mark 2>&1 | tail -n 1 | grep -c 'No such'")
                .await?,
            "1"
        );
        Ok(())
    })
    .await
}

/// Program that is ready a while after its start, and notes when.
const SLOW: &str = r#"
import time
time.sleep(3)
open("/warm", "w").close()
while True:
    time.sleep(1)
"#;

#[tokio::test]
async fn a_golden_sandbox_is_saved_only_after_its_command_has_succeeded() -> anyhow::Result<()> {
    case("goldenready", async |case| {
        let spec = json!({ "containers": [python("a", SLOW)] });
        let warm = r#"["test","-e","/warm"]"#;
        pool_of(case, 1, "hot=0,asleep=rest", spec, warm).await?;
        case.pool_is_ready("w", 1).await?;
        let name = case.claim("w", "c").await?;
        // One look: a member that started cold would need three seconds.
        case.sh(&name, "a", "test -e /warm").await?;
        let pod = case.ready(&name).await?;
        assert_eq!(condition(&pod, POD_RESTORED).0, "True");
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_member_that_was_idle_and_slept_runs_when_its_claim_is_ready() -> anyhow::Result<()> {
    case("idlemember", async |case| {
        let sleeper = python("a", "import time\nwhile True: time.sleep(1000)");
        let spec =
            json!({ "podTemplate": { "spec": pod_spec(json!({ "containers": [sleeper] })) } });
        let template = extension("SandboxTemplate", "t", spec);
        case.create(annotated(template, HIBERNATE_AFTER, "10s"))
            .await?;
        let pool = json!({ "replicas": 1, "sandboxTemplateRef": { "name": "t" } });
        case.create(extension("SandboxWarmPool", "w", pool)).await?;
        case.pool_is_ready("w", 1).await?;
        let member = case.members().await?.pop().context("a member")?.name_any();
        let words = "the Sandbox' status says that it sleeps";
        wait::object(case.sandboxes(), &member, words, LIMIT, |found| {
            let asleep = found.is_some_and(|one| condition_of(&one, HIBERNATED).0 == "True");
            asleep.then_some(()).ok_or_else(String::new)
        })
        .await?;
        let name = case.claim("w", "c").await?;
        assert_eq!(name, member);
        // One look: it is Ready once it runs, and runs for ten seconds.
        let pod = case.ready(&name).await?;
        assert_eq!(condition(&pod, POD_HIBERNATED).1, "Awake");
        Ok(())
    })
    .await
}

/// Damages the memory in an image of a member, and with it in all images that share its files.
async fn damage(case: &Case, member: &str) -> anyhow::Result<()> {
    let pages = pages_of(case, member).await?;
    let size = std::fs::metadata(&pages)?.len();
    let file = std::fs::OpenOptions::new().write(true).open(&pages)?;
    std::os::unix::fs::FileExt::write_all_at(&file, b"damaged", size / 2)?;
    Ok(())
}

/// Returns the file with the memory in the image of a member.
async fn pages_of(case: &Case, member: &str) -> anyhow::Result<PathBuf> {
    let pod = case.ready(member).await?;
    let image = case.node.image_of(&case.namespace, &uid(&pod))?;
    Ok(image.join("pages.img"))
}

#[tokio::test]
async fn a_claim_works_where_the_golden_image_is_damaged() -> anyhow::Result<()> {
    case("goldenhurt", async |case| {
        pool(case, 1, "hot=0,asleep=rest").await?;
        case.pool_is_ready("w", 1).await?;
        let sleeping = members_sleep(case, 1).await?;
        let member = sleeping.first().context("a member")?.name_any();
        damage(case, &member).await?;
        let name = case.claim("w", "c").await?;
        let cold = |pod: &_| {
            let restored = condition(pod, POD_RESTORED).1;
            restored == "ColdStarted" && restarts(pod) > 0 && is_ready(pod)
        };
        case.pod_until(&name, "it starts cold", LIMIT, cold).await?;
        case.written(&name, "a", "/token").await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_claim_gets_another_member_where_one_cannot_wake() -> anyhow::Result<()> {
    case("goldenother", async |case| {
        pool(case, 2, "hot=0,asleep=rest").await?;
        case.pool_is_ready("w", 2).await?;
        let mut sleeping = members_sleep(case, 2).await?;
        // A claim takes the oldest first.
        sleeping.sort_by_key(|one| (one.metadata.creation_timestamp.clone(), one.name_any()));
        let first = &sleeping.first().context("a member")?.name_any();
        let pages = pages_of(case, first).await?;
        let copy = pages.with_extension("copy");
        std::fs::copy(&pages, &copy)?;
        std::fs::rename(&copy, &pages)?;
        damage(case, first).await?;
        let name = case.claim("w", "c").await?;
        assert_ne!(&name, first);
        let pod = case.ready(&name).await?;
        assert_eq!(
            (restarts(&pod), condition(&pod, POD_RESTORED).0),
            (0, "True")
        );
        case.written(&name, "a", "/token").await?;
        let words = "the end of the member that could not wake";
        wait::object(case.sandboxes(), first, words, LIMIT, |left| {
            left.map_or(Ok(()), |left| Err(format!("{:?}", left.metadata)))
        })
        .await
    })
    .await
}

#[tokio::test]
async fn a_pools_heat_follows_its_annotation_and_a_new_template_gets_a_new_image()
-> anyhow::Result<()> {
    case("goldenheat", async |case| {
        pool(case, 2, "hot=0,asleep=rest").await?;
        case.pool_is_ready("w", 2).await?;
        members_sleep(case, 2).await?;
        let first = golden_snapshot(case).await?;
        let heat = |heat: &str| json!({ "metadata": { "annotations": { HEAT: heat } } });
        let change = async |patch: Value| {
            let pools = case.api::<SandboxWarmPool>();
            let parameters = PatchParams::default();
            pools.patch("w", &parameters, &Patch::Merge(patch)).await
        };
        change(heat("hot=rest")).await?;
        members_sleep(case, 0).await?;
        change(heat("hot=1,asleep=rest")).await?;
        members_sleep(case, 1).await?;
        let newer = json!({ "spec": { "podTemplate": { "spec": {
            "containers": [with_variable(python("a", PROGRAM))],
        } } } });
        let templates = case.api::<torpor_api::SandboxTemplate>();
        let parameters = PatchParams::default();
        templates
            .patch("t", &parameters, &Patch::Merge(newer))
            .await?;
        wait::until("the older image is gone", LIMIT, async || {
            let newer = golden_snapshot(case).await?;
            let gone = case.snapshots().get_opt(&first.name_any()).await?.is_none();
            wait::holds(gone && newer.name_any() != first.name_any(), || {
                format!("{:?}", newer.metadata.name)
            })
        })
        .await?;
        // Members that sleep do not need the image that they were made from.
        let name = case.claim("w", "c").await?;
        case.written(&name, "a", "/token").await?;
        let name = case.claim("w", "d").await?;
        case.written(&name, "a", "/token").await.map(drop)
    })
    .await
}

fn with_variable(mut container: Value) -> Value {
    container["env"] = json!([{ "name": "VERSION", "value": "2" }]);
    container
}
