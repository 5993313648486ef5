//! A node with more requests than it can serve at once, and a node with too little memory.

use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Api;
use kube::api::ListParams;
use serde_json::json;
use torpor_api::annotations::{DOZE_AFTER, HIBERNATE, HIBERNATE_AFTER};
use torpor_api::conditions::{self, POD_HIBERNATED};
use torpor_api::node::SandboxNode;
use torpor_api::reasons::{event, plan};
use torpor_core::ids::Namespace;
use torpor_records::WakeCause;
use torpor_runsc::wake_slots::WakeSlots;
use torpor_tests::agent::Agent;
use torpor_tests::case::{Case, case_alone, condition, uid};
use torpor_tests::pods::{COUNT, WORK, annotated, pod, python, shell_pod, with};
use torpor_tests::sleep::{SLEEP_LIMIT, restarts};
use torpor_tests::swap::Swap;
use torpor_tests::wait;

/// Shell line of an idle program.
const IDLE: &str = "sleep 1000000";

fn turns(case: &Case) -> WakeSlots {
    WakeSlots::new(&case.node.config.state_dir, case.node.config.wakes_at_once)
}

/// Returns the planner's reasons from the SandboxNode.
async fn reasons(case: &Case, pod: &Pod) -> anyhow::Result<Vec<String>> {
    let node = sandbox_node(case, pod).await?;
    let told = node.sandbox(&uid(pod)).cloned().unwrap_or_default();
    Ok(told.reasons.into_iter().map(|why| why.reason).collect())
}

async fn sandbox_node(case: &Case, pod: &Pod) -> anyhow::Result<SandboxNode> {
    let name = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
    let nodes: Api<SandboxNode> = Api::all(case.client());
    Ok(nodes.get(&name.unwrap_or_default()).await?)
}

/// Returns the node's pressure condition, which is set before the first sandbox sleeps for it.
async fn pressure(case: &Case, pod: &Pod) -> anyhow::Result<Option<Condition>> {
    let status = sandbox_node(case, pod).await?.status.unwrap_or_default();
    Ok(conditions::find(&status.conditions, conditions::PRESSURE).cloned())
}

#[tokio::test]
async fn an_idle_timer_waits_for_a_pending_wake_and_a_requested_sleep_does_not()
-> anyhow::Result<()> {
    case_alone("courtesy", async |case| {
        case.start(shell_pod("asked", IDLE)).await?;
        let namespace = Namespace::new(case.namespace.clone())?;
        let called = turns(case).take(WakeCause::Exec, &namespace);
        let sleepy = annotated(shell_pod("idle", IDLE), HIBERNATE_AFTER, "3s");
        let pod = case.start(sleepy).await?;
        wait::until("it waits for its turn", SLEEP_LIMIT, async || {
            let reasons = reasons(case, &pod).await?;
            wait::holds(reasons.iter().any(|why| why == plan::AWAITING_TURN), || {
                format!("{reasons:?}")
            })
        })
        .await?;
        case.hibernate("asked").await?;
        let awake = case.pods().get("idle").await?;
        anyhow::ensure!(
            condition(&awake, POD_HIBERNATED).0 != "True",
            "asleep out of turn"
        );
        drop(called);
        case.asleep("idle").await.map(drop)
    })
    .await
}

/// Bytes a second: a small image takes some thirteen seconds of it, and the SandboxNode reports
/// within five seconds that a sandbox waits.
const BANDWIDTH: i64 = 45_000;
const BANDWIDTH_LIMIT: Duration = Duration::from_secs(100);

#[tokio::test]
async fn images_of_idle_sandboxes_keep_to_the_bandwidth_and_a_requested_sleep_does_not_wait()
-> anyhow::Result<()> {
    case_alone("bandwidth", async |case| {
        case.start(shell_pod("asked", IDLE)).await?;
        let limit = BANDWIDTH.to_string();
        let limited = [("TORPOR_SAVE_BANDWIDTH", limit.as_str())];
        Agent::with_environment(case, &limited, async || {
            let names = ["idle-0", "idle-1"];
            let mut pods = Vec::new();
            for name in names {
                let sleepy = annotated(shell_pod(name, IDLE), HIBERNATE_AFTER, "3s");
                pods.push(case.start(sleepy).await?);
            }
            let waits = wait::until("one waits for bandwidth", SLEEP_LIMIT, async || {
                for (name, pod) in names.iter().zip(&pods) {
                    let reasons = reasons(case, pod).await?;
                    if reasons.iter().any(|why| why == plan::AWAITING_BANDWIDTH) {
                        return Ok(Ok(*name));
                    }
                }
                Ok(Err("none waits".to_owned()))
            })
            .await?;
            let asked = case.hibernate("asked").await?;
            let still = case.pods().get(waits).await?;
            anyhow::ensure!(
                condition(&still, POD_HIBERNATED).0 != "True",
                "{waits} sleeps before its time"
            );
            let first = names.into_iter().find(|name| *name != waits);
            let first = case.asleep(first.unwrap_or_default()).await?;
            let asleep = |pod: &Pod| condition(pod, POD_HIBERNATED).0 == "True";
            let words = "it sleeps when the disk is free";
            let last = case
                .pod_until(waits, words, BANDWIDTH_LIMIT, asleep)
                .await?;
            let (began, bytes) = image_of(case, &first).await?;
            let (_, asked) = image_of(case, &asked).await?;
            let (ended, _) = image_of(case, &last).await?;
            // Times are reported in whole seconds, and are those of the ends.
            let owed = (bytes + asked) / BANDWIDTH;
            let passed = ended.duration_since(began).as_secs();
            anyhow::ensure!(passed >= owed - 2, "{passed} s, where {owed} were owed");
            Ok(())
        })
        .await
    })
    .await
}

/// Returns the time since which a Pod sleeps, and the bytes of its image.
async fn image_of(case: &Case, pod: &Pod) -> anyhow::Result<(jiff::Timestamp, i64)> {
    wait::until("its node reports its image", SLEEP_LIMIT, async || {
        let node = sandbox_node(case, pod).await?;
        let told = node.sandbox(&uid(pod)).cloned().unwrap_or_default();
        let image = told
            .asleep_since
            .as_ref()
            .map(|since| since.0)
            .zip(told.image_bytes);
        Ok(image.ok_or_else(|| format!("{told:?}")))
    })
    .await
}

async fn events(case: &Case, reason: &str) -> anyhow::Result<Vec<Event>> {
    let events: Api<Event> = case.api();
    let params = ListParams::default().fields(&format!("reason={reason}"));
    Ok(events.list(&params).await?.items)
}

#[tokio::test]
async fn a_node_short_of_memory_hibernates_only_idle_sandboxes_that_allow_it() -> anyhow::Result<()>
{
    case_alone("pressure", async |case| {
        let patient = |name| annotated(shell_pod(name, IDLE), HIBERNATE_AFTER, "10h");
        let works = annotated(shell_pod("works", WORK), HIBERNATE_AFTER, "10h");
        let off = annotated(shell_pod("off", IDLE), HIBERNATE_AFTER, "off");
        for pod in [
            patient("p0"),
            patient("p1"),
            works,
            off,
            shell_pod("plain", IDLE),
        ] {
            case.create(pod).await?;
        }
        for pod in ["p0", "p1", "works", "off", "plain"] {
            case.ready(pod).await?;
        }
        let short = [
            ("TORPOR_MEMORY_PRESSURE_AVAILABLE", "99"),
            ("TORPOR_PRESSURE_IDLE", "5"),
        ];
        Agent::with_environment(case, &short, async || {
            for name in ["p0", "p1"] {
                let pod = case.asleep(name).await?;
                assert_eq!(restarts(&pod), 0);
            }
            let pod = case.pods().get("p0").await?;
            let told = pressure(case, &pod).await?;
            anyhow::ensure!(
                told.as_ref().is_some_and(
                    |told| told.reason == "MemoryShort" && told.message.contains("available")
                ),
                "{told:?}"
            );
            let said = events(case, event::NODE_PRESSURE).await?;
            let mut about: Vec<_> = said
                .iter()
                .filter_map(|event| event.involved_object.name.clone())
                .collect();
            about.sort();
            about.dedup();
            assert_eq!(about, ["p0", "p1"]);
            // Others would have had their turns by now: a turn comes every two seconds.
            let awake = |pod: &Pod| condition(pod, POD_HIBERNATED).0 != "True";
            let long = Duration::from_secs(6);
            let others = ["works", "off", "plain"];
            let stay = others.map(|name| case.pod_stays(name, "awake", long, awake));
            futures::future::try_join_all(stay).await.map(drop)
        })
        .await?;
        // There is enough memory again: sleeping sandboxes sleep on until they are needed.
        let pod = case.asleep("p0").await?;
        assert_eq!(case.sh("p0", "a", "echo here").await?, "here");
        assert_eq!(restarts(&pod), 0);
        Ok(())
    })
    .await
}

/// Returns the bytes of the node's swap: total and free.
fn swap() -> anyhow::Result<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let bytes = |name: &str| {
        let mut lines = text.lines();
        let line = lines.find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kib.map(|kib| kib << 10).context("/proc/meminfo")
    };
    Ok((bytes("SwapTotal:")?, bytes("SwapFree:")?))
}

#[tokio::test]
async fn a_node_short_of_swap_hibernates_only_dozing_sandboxes_the_longest_idle_first()
-> anyhow::Result<()> {
    let _swap = Swap::on()?;
    case_alone("swap", async |case| {
        let (total, _) = swap()?;
        // One sandbox takes more than the hundredth of swap that may be taken.
        let megabytes = ((total / 100 * 3 / 2) >> 20).max(24);
        let holds = |name: &str, key: &str, after: &str| {
            let program = format!("import os, time\nkept = os.urandom({megabytes} << 20)\nopen('/ready', 'w').close()\nwhile True: time.sleep(1000)");
            let ready = json!({ "startupProbe": { "exec": { "command": ["test", "-e", "/ready"] }, "periodSeconds": 1 } });
            let spec = json!({ "containers": [with(python("a", &program), ready)] });
            annotated(pod(name, spec), key, after)
        };
        case.start(holds("awake", HIBERNATE_AFTER, "10h")).await?;
        let short = [
            ("TORPOR_SWAP_PRESSURE_FREE", "99"),
            ("TORPOR_PRESSURE_IDLE", "10"),
        ];
        Agent::with_environment(case, &short, async || {
            case.start(holds("d0", DOZE_AFTER, "2s")).await?;
            case.dozes("d0").await?;
            let held = megabytes << 20;
            wait::until("its memory is in swap", SLEEP_LIMIT, async || {
                let (total, free) = swap()?;
                wait::holds(total - free >= held, || format!("{free} of {total} bytes are free"))
            })
            .await?;
            let (_, free) = swap()?;
            case.start(holds("d1", DOZE_AFTER, "2s")).await?;
            let first = case.asleep("d0").await?;
            let told = pressure(case, &first).await?;
            anyhow::ensure!(
                told.as_ref().is_some_and(|told| told.reason == "SwapShort" && told.message.contains("swap")),
                "{told:?}"
            );
            let second = case.pods().get("d1").await?;
            let told = condition(&second, POD_HIBERNATED);
            anyhow::ensure!(told.0 != "True", "d1, which was idle for less, sleeps: {told:?}");
            let last = case.asleep("d1").await?;
            for pod in [&first, &last] {
                assert_eq!(restarts(pod), 0);
                assert_eq!(case.node.sandbox_processes(&uid(pod))?, []);
            }
            let said = events(case, event::NODE_PRESSURE).await?;
            let about = |name: &str| said.iter().any(|event| event.involved_object.name.as_deref() == Some(name));
            assert!(about("d0") && about("d1") && !about("awake"), "{said:?}");
            let (total, now) = swap()?;
            anyhow::ensure!(now >= free + held / 2, "{now} of {total} bytes of swap are free, {free} were while d0 dozed");
            let awake = case.pods().get("awake").await?;
            let told = condition(&awake, POD_HIBERNATED);
            anyhow::ensure!(told.0 != "True", "the sandbox that does not doze sleeps: {told:?}");
            Ok(())
        })
        .await?;
        assert_eq!(case.sh("d0", "a", "ls /ready").await?, "/ready");
        Ok(())
    })
    .await
}

/// Number of rollouts of the DaemonSet while Pods fall asleep and wake.
const ROLLS: u32 = 2;

#[tokio::test]
async fn an_upgrade_of_the_agent_under_load_loses_nothing() -> anyhow::Result<()> {
    case_alone("upgrade", async |case| {
        const PODS: [&str; 3] = ["p0", "p1", "p2"];
        for name in PODS {
            case.create(shell_pod(name, COUNT)).await?;
        }
        for name in PODS {
            case.ready(name).await?;
        }
        let rolling = async {
            for _ in 0..ROLLS {
                Agent::roll(case).await?;
            }
            anyhow::Ok(())
        };
        let mut rolling = std::pin::pin!(rolling);
        let mut counts = [0_u64; PODS.len()];
        let (mut rolled, mut round) = (false, 0_u32);
        // Each Pod is asked to sleep at least once, also where the machine is slow.
        while !rolled || round < 3 {
            let turn = async {
                // The Pods are asked to sleep and woken in turns, by an exec or by the API.
                for (n, name) in (0_u32..).zip(PODS) {
                    let wish = (round + n).is_multiple_of(3).then_some("true");
                    case.annotate(name, HIBERNATE, wish).await?;
                }
                for (name, before) in PODS.iter().zip(&mut counts) {
                    let now = case.counted(name).await?;
                    anyhow::ensure!(now >= *before, "{name} in round {round}: {before} → {now}");
                    *before = now;
                }
                anyhow::Ok(())
            };
            tokio::select! {
                done = &mut rolling, if !rolled => {
                    done?;
                    rolled = true;
                    continue;
                }
                turned = turn => turned?,
            }
            round += 1;
        }
        for (name, before) in PODS.iter().zip(counts) {
            // The Pod may not have slept yet, if no agent ran that could see the request.
            case.hibernate(name).await?;
            let awake = case.wake(name).await?;
            assert_eq!(restarts(&awake), 0, "{name} was restarted");
            let now = case.counted(name).await?;
            anyhow::ensure!(now >= before, "{name}: {before} → {now}");
            case.no_image_left(&uid(&awake)).await?;
        }
        Ok(())
    })
    .await
}
