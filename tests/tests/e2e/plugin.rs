//! `kubectl torpor` as a user runs it; each command is checked by what it did to the sandbox.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use torpor_api::SandboxNode;
use torpor_api::annotations::DOZE_AFTER;
use torpor_tests::case::{Case, case, uid};
use torpor_tests::kubectl::Ran;
use torpor_tests::pods::{shell, with};
use torpor_tests::sandboxes::{LIMIT, sandbox};
use torpor_tests::sleep::restarts;
use torpor_tests::swap::Swap;
use torpor_tests::wait;
use torpor_tests::witness::{self, Connection, State};

fn witness_sandbox() -> Value {
    let container = witness::container(5, &[]);
    sandbox("s", json!({ "containers": [container] }))
}

/// Returns the versions of all objects that `get` reads.
async fn versions(case: &Case) -> anyhow::Result<Vec<Option<String>>> {
    let nodes: Api<SandboxNode> = Api::all(case.client());
    let (sandboxes, pods, all) = (case.sandboxes(), case.pods(), ListParams::default());
    let (nodes, sandboxes, pods) = tokio::try_join!(
        nodes.list_metadata(&all),
        sandboxes.list_metadata(&all),
        pods.list_metadata(&all),
    )?;
    let nodes = nodes.items.iter().map(ResourceExt::resource_version);
    let sandboxes = sandboxes.items.iter().map(ResourceExt::resource_version);
    let pods = pods.items.iter().map(ResourceExt::resource_version);
    Ok(nodes.chain(sandboxes).chain(pods).collect())
}

/// Waits until `get` shows what is expected; figures come with the node's next report.
///
/// The plugin runs again whenever one of the objects has changed.
async fn shown(case: &Case, words: &str, wish: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
    let (mut seen, mut view) = (Vec::new(), Value::Null);
    wait::until(words, LIMIT, async || {
        let now = versions(case).await?;
        if now != seen {
            seen = now;
            view = case.torpor_view("s").await?;
        }
        Ok(match wish(&view) {
            true => Ok(view.clone()),
            false => Err(view.to_string()),
        })
    })
    .await
}

fn failed(ran: &Ran, code: i32, words: &str) -> anyhow::Result<()> {
    anyhow::ensure!(ran.code == code && ran.err.contains(words), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn the_plugin_puts_a_sandbox_to_sleep_and_wakes_it_and_reports_what_it_did()
-> anyhow::Result<()> {
    case("plugin", async |case| {
        case.create(witness_sandbox()).await?;
        let pod = case.sandbox_ready("s").await?;
        let before = witness::ask(&pod).await?;
        shown(case, "it is awake", |view| view["state"] == "Awake").await?;

        let said = case.torpor_output(&["hibernate", "s"]).await?;
        assert!(
            said.starts_with("sandbox.agents.x-k8s.io/s hibernated ("),
            "{said}"
        );
        assert_eq!(case.node.sandbox_processes(&uid(&pod))?, []);
        let asleep = shown(case, "the sizes of its sleep", |view| {
            view["imageBytes"].is_number() && view["memoryAsleepBytes"].is_number()
        })
        .await?;
        assert_eq!(asleep["state"], "Hibernated");
        let bytes = |key: &str| asleep[key].as_u64();
        assert!(
            bytes("memoryAwakeBytes") > bytes("memoryAsleepBytes"),
            "{asleep}"
        );
        let yaml = case.torpor_output(&["get", "s", "-o", "yaml"]).await?;
        assert!(yaml.contains("state: Hibernated"), "{yaml}");
        let wide = case.torpor_output(&["get", "-o", "wide"]).await?;
        let (headings, row) = wide.split_once('\n').unwrap_or_default();
        assert!(
            headings.contains("MEMORY AWAKE") && headings.contains("MESSAGE"),
            "{wide}"
        );
        assert!(row.contains("Hibernated"), "{wide}");
        assert_eq!(
            case.torpor_output(&["get", "-o", "name"]).await?,
            "sandbox.agents.x-k8s.io/s"
        );
        let why = case.torpor_output(&["why", "s"]).await?;
        assert!(
            why.contains("to hibernate in place") && why.contains("Sleeping: "),
            "{why}"
        );
        let top = case.torpor_output(&["top"]).await?;
        assert!(top.contains("1 asleep, 0 awake"), "{top}");

        // A packet wakes the sandbox before the plugin is asked to.
        Connection::open(&pod)
            .await?
            .ask()
            .await?
            .goes_on_from(&before)?;
        let woken = shown(case, "the cause of its wake", |view| {
            view["lastWake"].is_object()
        })
        .await?;
        assert_eq!(woken["lastWake"]["cause"], "Packet", "{woken}");
        assert_eq!(woken["lastWake"]["from"], "Hibernated", "{woken}");
        let said = case.torpor_output(&["wake", "s"]).await?;
        assert!(
            said.starts_with("sandbox.agents.x-k8s.io/s awake ("),
            "{said}"
        );
        let same = case.sandbox_ready("s").await?;
        assert_eq!((uid(&same), restarts(&same)), (uid(&pod), 0));
        witness::ask(&same).await?.goes_on_from(&before)?;
        // The request to sleep is withdrawn.
        assert_ne!(case.node.sandbox_processes(&uid(&pod))?, []);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_plugin_suspends_and_resumes_and_refuses_commands_that_do_not_apply()
-> anyhow::Result<()> {
    case("pluginsuspend", async |case| {
        case.create(witness_sandbox()).await?;
        let pod = case.sandbox_ready("s").await?;
        let before = witness::ask(&pod).await?;
        let said = case.torpor_output(&["suspend", "s"]).await?;
        assert!(said.contains("/s suspended ("), "{said}");
        assert_eq!(case.pods().get_opt("s").await?, None);
        let view = case.torpor_view("s").await?;
        assert_eq!(
            (&view["state"], &view["memoryAsleepBytes"]),
            (&json!("Suspended"), &json!(0))
        );
        assert!(view["imageBytes"].as_u64() > Some(0), "{view}");
        failed(
            &case.torpor(&["wake", "s"]).await?,
            1,
            "kubectl torpor resume",
        )?;
        failed(&case.torpor(&["why", "nobody"]).await?, 1, "nobody")?;
        assert_eq!(case.torpor(&["sleep", "s"]).await?.code, 2);

        let said = case.torpor_output(&["resume", "s"]).await?;
        assert!(said.contains("/s resumed ("), "{said}");
        let resumed = case.sandbox_ready("s").await?;
        assert_ne!(uid(&resumed), uid(&pod));
        witness::ask(&resumed).await?.goes_on_from(&before)?;
        // Without a wait the plugin reports that the change is requested, not that it is done.
        let said = case
            .torpor_output(&["suspend", "s", "--timeout", "0"])
            .await?;
        assert_eq!(said, "sandbox.agents.x-k8s.io/s patched");
        case.sandbox_has("s", "Suspended", "True", "PodTerminated")
            .await?;
        Ok(())
    })
    .await
}

/// Starts the Sandbox `s`, takes the snapshot `golden` of it, and leaves a mark in it that came
/// later: changes of the root file system are a part of the memory. Returns its Pod, and its state
/// before the snapshot.
async fn with_snapshot(case: &Case) -> anyhow::Result<(Pod, State)> {
    case.create(witness_sandbox()).await?;
    let pod = case.sandbox_ready("s").await?;
    let before = witness::ask(&pod).await?;
    let take = ["snapshot", "s", "--to", "golden"];
    let said = case.torpor_output(&take).await?;
    anyhow::ensure!(
        said.starts_with("sandboxsnapshot.torpor.dev/golden saved ("),
        "{said}"
    );
    case.sh("s", "witness", "echo later >/mark").await?;
    Ok((pod, before))
}

async fn is_marked(case: &Case, pod: &str) -> anyhow::Result<bool> {
    let read = case.exec(pod, "witness", &["cat", "/mark"]).await?;
    Ok(read.code == 0)
}

#[tokio::test]
async fn the_plugin_starts_copies_from_a_snapshot_and_their_original_runs_on() -> anyhow::Result<()>
{
    case("pluginfork", async |case| {
        let (pod, before) = with_snapshot(case).await?;
        let fork = ["fork", "s", "--from", "golden", "--count", "2"];
        let said = case.torpor_output(&fork).await?;
        let started = said
            .lines()
            .filter(|line| line.contains(" started as a copy ("));
        let names = started.filter_map(|line| line.split(['/', ' ']).nth(1));
        let names: Vec<&str> = names.collect();
        assert_eq!(names.len(), 2, "{said}");
        for name in names {
            let copy = witness::ask(&case.sandbox_ready(name).await?).await?;
            // A copy has a hostname of its own.
            let hostname = copy.hostname.clone();
            copy.goes_on_from(&State {
                hostname,
                ..before.clone()
            })?;
            assert!(
                !is_marked(case, name).await?,
                "the copy has what came later"
            );
        }
        let origin = case.sandbox_ready("s").await?;
        assert_eq!((uid(&origin), restarts(&origin)), (uid(&pod), 0));
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_plugin_rolls_a_sandbox_back_and_back_again() -> anyhow::Result<()> {
    case("pluginrollback", async |case| {
        let (pod, before) = with_snapshot(case).await?;
        let ran = case.torpor(&["rollback", "s", "golden"]).await?;
        assert!(ran.out.contains("/s continues from golden ("), "{ran:?}");
        let kept_in = ran.err.trim().rsplit(' ').next().unwrap_or_default();
        let earlier = case.sandbox_ready("s").await?;
        assert_ne!(uid(&earlier), uid(&pod));
        witness::ask(&earlier).await?.goes_on_from(&before)?;
        assert!(!is_marked(case, "s").await?, "it has what came later");

        // The snapshot of the rollback has what the rollback took away. Asleep, too, the Sandbox
        // goes back to it.
        case.torpor_output(&["hibernate", "s"]).await?;
        let discard = ["rollback", "s", kept_in, "--discard"];
        case.torpor_output(&discard).await?;
        let later = case.sandbox_ready("s").await?;
        witness::ask(&later).await?.goes_on_from(&before)?;
        assert!(is_marked(case, "s").await?);
        let list = ["snapshots", "s", "-o", "name"];
        let listed = case.torpor_output(&list).await?;
        let listed: BTreeSet<String> = listed.lines().map(str::to_owned).collect();
        let kind = "sandboxsnapshot.torpor.dev";
        let expected = ["golden", kept_in].map(|name| format!("{kind}/{name}"));
        assert_eq!(listed, BTreeSet::from(expected));
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_plugin_reports_a_doze_and_what_ends_it() -> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case("plugindoze", async |case| {
        let annotations = json!({ "metadata": { "annotations": { DOZE_AFTER: "3s" } } });
        let idle = json!({ "containers": [shell("a", "echo kept >/mem; sleep 1000000")] });
        case.create(with(sandbox("s", idle), annotations)).await?;
        case.sandbox_ready("s").await?;
        let dozing = shown(case, "it dozes, with the sizes of its sleep", |view| {
            view["state"] == "Dozing"
                && view["imageBytes"].is_number()
                && view["memoryAsleepBytes"].is_number()
        })
        .await?;
        assert!(
            dozing["memoryAwakeBytes"].as_u64() > dozing["memoryAsleepBytes"].as_u64(),
            "{dozing}"
        );
        let why = case.torpor_output(&["why", "s"]).await?;
        assert!(why.contains("to doze after 3s without use"), "{why}");
        assert_eq!(case.sh("s", "a", "cat /mem").await?, "kept");
        let woken = shown(case, "the cause of its wake", |view| {
            view["lastWake"].is_object()
        })
        .await?;
        assert_eq!(woken["lastWake"]["cause"], "Exec", "{woken}");
        assert_eq!(woken["lastWake"]["from"], "Dozing", "{woken}");

        shown(case, "it dozes again", |view| {
            view["asleepSince"].is_string()
        })
        .await?;
        let said = case.torpor_output(&["wake", "s"]).await?;
        assert!(
            said.starts_with("sandbox.agents.x-k8s.io/s awake ("),
            "{said}"
        );
        shown(case, "the agent woke it", |view| {
            view["lastWake"]["cause"] == "Asked"
        })
        .await?;
        Ok(())
    })
    .await
}

#[tokio::test]
async fn the_plugin_diagnoses_the_cluster_and_completes_names() -> anyhow::Result<()> {
    case("plugindoctor", async |case| {
        case.create(witness_sandbox()).await?;
        case.sandbox_ready("s").await?;
        let ran = case.torpor(&["doctor", "-o", "json"]).await?;
        let diagnosis: Value = serde_json::from_str(&ran.out)?;
        let checks = diagnosis["checks"]
            .as_array()
            .map_or(&[][..], Vec::as_slice);
        let of = |name: &str| checks.iter().find(|check| check["name"] == name).cloned();
        for name in [
            "definitions",
            "controller",
            "leader",
            "router",
            "runtime class",
            "agents",
        ] {
            let check = of(name).unwrap_or_default();
            assert_eq!(check["findings"], json!([]), "{name}: {check}");
        }
        // Sandboxes of other tests may be stuck right now. This test requires only that all were
        // looked at.
        assert!(
            of("sandboxes").is_some() && diagnosis["unseen"] == 0,
            "{diagnosis}"
        );
        assert!([0, 3].contains(&ran.code), "{ran:?}");

        // kubectl's own completion runs this command.
        let line = ["__complete", "torpor", "wake", "-n", &case.namespace, ""];
        let completed = case.run_plugin(&line).await?.ok()?;
        assert!(completed.lines().any(|line| line == "s"), "{completed}");
        let script = case.torpor_output(&["completion", "bash"]).await?;
        assert!(script.contains("complete -F"), "{script}");
        Ok(())
    })
    .await
}
