//! Limits: the sandbox lives in its Pod's cgroup, and the limits that are set there hold.

use std::time::Duration;

use serde_json::json;
use torpor_tests::case::{Case, START_LIMIT, case, uid};
use torpor_tests::machine;
use torpor_tests::pods::{COUNT, mounts, pod, python, shell, with};
use torpor_tests::sleep::{is_ready, restarts};
use torpor_tests::wait;

/// Time until the limit is set back: the restored sentry keeps memory without further use for a
/// while.
const LIMIT_IS_BACK: Duration = Duration::from_secs(90);

#[tokio::test]
async fn every_process_of_a_sandbox_is_in_its_pods_cgroup() -> anyhow::Result<()> {
    case("cgroup", async |case| {
        // The pause container has a gofer only for what is mounted in it.
        let volume = json!([{ "name": "work", "emptyDir": {} }]);
        for (name, volumes, at, gofers) in [
            ("p", json!([]), mounts(&[]), 2),
            ("with-volume", volume, mounts(&[("work", "/work")]), 3),
        ] {
            let mounting = json!({ "volumeMounts": at });
            let containers = ["a", "b"].map(|name| with(shell(name, COUNT), mounting.clone()));
            let spec = json!({ "containers": containers, "volumes": volumes });
            let pod = case.start(pod(name, spec)).await?;
            every_process_is_in_its_place(case, &uid(&pod), gofers)?;
        }
        Ok(())
    })
    .await
}

fn every_process_is_in_its_place(case: &Case, uid: &str, gofers: usize) -> anyhow::Result<()> {
    let record = case.node.sandbox_of(uid)?;
    let cgroup = record.cgroup.display().to_string();
    assert!(cgroup.contains(&format!("pod{uid}/torpor-")), "{cgroup}");
    let inside = machine::processes_in(&record.cgroup);
    let containers = case.node.records.containers_of(&record.sandbox)?;
    let ids: Vec<String> = containers
        .iter()
        .map(|container| container.id.to_string())
        .collect();
    let named = machine::processes_naming(&ids);
    let of_gvisor: Vec<_> = named
        .iter()
        .filter(|p| p.command.starts_with("runsc-"))
        .collect();
    assert_eq!(
        of_gvisor.len(),
        1 + gofers,
        "a sentry, and a gofer for each container that needs one: {named:?}"
    );
    for process in of_gvisor {
        assert!(
            inside.contains(process),
            "{process:?} is outside of {cgroup}"
        );
    }
    Ok(())
}

#[tokio::test]
async fn a_container_above_its_memory_limit_is_ended_and_its_status_reports_this()
-> anyhow::Result<()> {
    case("oom", async |case| {
        let program = "kept = []\nwhile True: kept.append(b'x' * (1 << 20))";
        let limits = json!({ "resources": { "limits": { "memory": "64Mi" } } });
        let spec =
            json!({ "restartPolicy": "Never", "containers": [with(python("a", program), limits)] });
        case.create(pod("p", spec)).await?;
        let pod = case
            .pod_until("p", "it is ended", START_LIMIT, |pod| {
                pod.status
                    .as_ref()
                    .and_then(|status| status.phase.as_deref())
                    == Some("Failed")
            })
            .await?;
        let status = pod
            .status
            .unwrap_or_default()
            .container_statuses
            .unwrap_or_default()
            .remove(0);
        let end = status
            .state
            .and_then(|state| state.terminated)
            .unwrap_or_default();
        assert_eq!(
            (end.exit_code, end.reason.as_deref()),
            (137, Some("OOMKilled"))
        );
        Ok(())
    })
    .await
}

/// A wake needs memory too, in the Pod's cgroup.
#[tokio::test]
async fn a_sandbox_near_its_memory_limit_wakes_and_gets_its_limit_back() -> anyhow::Result<()> {
    case("nearlimit", async |case| {
        // With the sentry's own memory this is 117 of 128 MiB.
        let program = "import os, time\nkept = os.urandom(88 << 20)\nprint('full', flush=True)\nwhile True: time.sleep(1)";
        let limits = json!({ "resources": { "limits": { "memory": "128Mi" } } });
        let spec = json!({ "containers": [with(python("a", program), limits)] });
        let pod = case.start(pod("p", spec)).await?;
        wait::until("its memory is full", START_LIMIT, async || {
            let log = case.log("p", "a").await?;
            wait::holds(log.contains("full"), || log)
        })
        .await?;
        let cgroup = case.node.sandbox_of(&uid(&pod))?.cgroup;
        let pod_cgroup = cgroup.parent().unwrap_or(&cgroup);
        let of = |name| machine::cgroup_file(pod_cgroup, name);
        let limit = || [of("memory.limit_in_bytes"), of("memory.max")].concat();
        let before = limit();
        assert!(before.contains(&"134217728".to_owned()), "{before:?}");
        case.hibernate("p").await?;
        case.wake("p").await?;
        wait::until("its limit is back", LIMIT_IS_BACK, async || {
            let now = limit();
            wait::holds(now == before, || format!("{before:?} → {now:?}"))
        })
        .await?;
        let most = [of("memory.max_usage_in_bytes"), of("memory.peak")].concat();
        let most = most.iter().filter_map(|text| text.parse::<u64>().ok()).max();
        assert!(most > Some(128 << 20), "the wake needed no more memory: {most:?}");
        let pod = case.pods().get("p").await?;
        assert!(is_ready(&pod) && restarts(&pod) == 0, "{:?}", pod.status);
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_cpu_limit_holds_for_the_program() -> anyhow::Result<()> {
    case("cpu", async |case| {
        let limits = json!({ "resources": { "limits": { "cpu": "200m", "memory": "64Mi" } } });
        let spin = with(shell("a", "while true; do :; done"), limits);
        let pod = case
            .start(pod("p", json!({ "containers": [spin] })))
            .await?;
        let cgroup = case.node.sandbox_of(&uid(&pod))?.cgroup;
        let pod_cgroup = cgroup.parent().unwrap_or(&cgroup);
        let of = |name| machine::cgroup_file(pod_cgroup, name);
        let quota = [of("cpu.cfs_quota_us"), of("cpu.max")].concat();
        assert!(
            quota.iter().any(|line| line.starts_with("20000")),
            "a fifth of 100 ms: {quota:?}"
        );
        // A program that spins is throttled repeatedly.
        let throttled = || {
            let lines = of("cpu.stat");
            let numbers = lines
                .iter()
                .filter_map(|line| line.strip_prefix("nr_throttled "));
            numbers
                .filter_map(|number| number.parse::<u64>().ok())
                .max()
                .unwrap_or(0)
        };
        let before = throttled();
        wait::until(
            "the quota holds the program back",
            START_LIMIT,
            async || {
                let now = throttled();
                wait::holds(now >= before + 2, || format!("{before} → {now}"))
            },
        )
        .await
    })
    .await
}
