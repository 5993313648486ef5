//! Limits of a Pod as its programs see them, read by language runtimes that size themselves by
//! them.

use std::time::Duration;

use anyhow::Context;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use torpor_tests::case::{Case, case};
use torpor_tests::pods::{RUNTIMES, pod, shell, with};
use torpor_tests::sandboxes::sandbox;
use torpor_tests::wait;

const MIB: u64 = 1 << 20;
/// Time for a resize: the kubelet resizes a Pod within seconds, and the agent sees it then.
const SOON: Duration = Duration::from_secs(60);
/// Shell line that runs what is written to /ask as a program of the container's own.
///
/// A command of `kubectl exec` is in no cgroup of a sandbox that was resumed.
const RUN: &str = "while true; do if [ -e /ask ]; then sh /ask >/said 2>&1; mv /said /answer; rm /ask; fi; sleep 0.1; done";

/// Returns a container whose Pod may use `mib` MiB and one processor.
fn limited(mib: u64) -> Value {
    let memory = format!("{mib}Mi");
    let all = json!({ "memory": memory, "cpu": "1" });
    with(
        shell("a", RUN),
        json!({ "image": RUNTIMES, "resources": { "limits": all, "requests": { "memory": memory, "cpu": "10m" } } }),
    )
}

/// Script that prints the bytes of memory that Python's psutil, Node and the kernel's own files
/// see; the last of these is the cgroup's limit.
const MEMORY: &str = r#"python3 -c 'import psutil; print(psutil.virtual_memory().total)'
node -p 'require("os").totalmem()'
python3 -c 'import os; print(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))'
cat /sys/fs/cgroup/memory/memory.limit_in_bytes"#;

/// Script that prints the processors that Python, Node and nproc see, and the cgroup's quota and
/// period.
const PROCESSORS: &str = r#"python3 -c 'import os; print(os.cpu_count())'
node -p 'require("os").cpus().length'
nproc
cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu/cpu.cfs_period_us"#;

/// Script that prints the JVM's largest heap, which is a quarter of the memory, and its processors.
const JVM: &str = r#"java=$(echo /usr/lib/jvm/java-17-openjdk-*/bin/java)
$java -XX:+PrintFlagsFinal -version 2>/dev/null
$java -XshowSettings:system -version 2>&1"#;

async fn lines(case: &Case, pod: &str, script: &str) -> anyhow::Result<Vec<String>> {
    let ask = format!("cat >/asked <<'EOF'\n{script}\nEOF\nrm -f /answer; mv /asked /ask");
    case.sh(pod, "a", &ask).await?;
    wait::until("it answers", SOON, async || {
        let ran = case.exec(pod, "a", &["cat", "/answer"]).await?;
        Ok(match ran.code {
            0 => Ok(ran.out.lines().map(str::to_owned).collect()),
            _ => Err(ran.err),
        })
    })
    .await
}

async fn programs_see(case: &Case, pod: &str, mib: u64) -> anyhow::Result<()> {
    let bytes = (mib * MIB).to_string();
    assert_eq!(lines(case, pod, MEMORY).await?, [bytes.as_str(); 4]);
    // gVisor makes two processors of a fraction of one, and a machine may have no more.
    let processors = lines(case, pod, PROCESSORS).await?;
    assert_eq!(processors, ["2", "2", "2", "100000", "100000"]);
    let jvm = lines(case, pod, JVM).await?;
    let word_after = |name: &str, skipped: usize| {
        let line = jvm.iter().find(|line| line.contains(name));
        let words = line.and_then(|line| line.split(name).nth(1));
        let word = words.and_then(|words| words.split_whitespace().nth(skipped));
        word.map(str::to_owned)
            .with_context(|| format!("{name} is not in {jvm:?}"))
    };
    let heap: u64 = word_after(" MaxHeapSize", 1)?.parse()?;
    assert_eq!(heap, mib * MIB / 4);
    assert_eq!(word_after("Effective CPU Count:", 0)?, "1");
    Ok(())
}

#[tokio::test]
async fn language_runtimes_see_the_limits_of_their_pod() -> anyhow::Result<()> {
    case("limits", async |case| {
        case.start(pod("p", json!({ "containers": [limited(512)] })))
            .await?;
        programs_see(case, "p", 512).await?;
        case.hibernate("p").await?;
        case.wake("p").await?;
        programs_see(case, "p", 512).await
    })
    .await
}

async fn cgroup_says(case: &Case, pod: &str, mib: u64) -> anyhow::Result<()> {
    wait::until("its cgroup has the new limit", SOON, async || {
        let seen = lines(case, pod, MEMORY).await?.pop();
        wait::holds(seen == Some((mib * MIB).to_string()), || {
            format!("{seen:?}")
        })
    })
    .await
}

/// The sandbox's kernel keeps the memory size of its start; its cgroups get the new limit at once.
#[tokio::test]
async fn a_resized_pod_sees_its_new_limit_in_its_cgroup_and_everywhere_after_a_wake()
-> anyhow::Result<()> {
    case("resize", async |case| {
        case.start(pod("p", json!({ "containers": [limited(512)] }))).await?;
        for mib in [768, 640] {
            let memory = format!("{mib}Mi");
            let limits = json!({ "limits": { "memory": memory, "cpu": "1" }, "requests": { "memory": memory, "cpu": "10m" } });
            let change = json!({ "spec": { "containers": [{ "name": "a", "resources": limits }] } });
            let parameters = PatchParams::default();
            let patch = Patch::Strategic(change);
            case.pods().patch_subresource("resize", "p", &parameters, &patch).await?;
            cgroup_says(case, "p", mib).await?;
            case.hibernate("p").await?;
            case.wake("p").await?;
            programs_see(case, "p", mib).await?;
        }
        Ok(())
    })
    .await
}

#[tokio::test]
async fn a_sandbox_that_is_resumed_with_other_limits_sees_those() -> anyhow::Result<()> {
    case("relimited", async |case| {
        case.create(sandbox("s", json!({ "containers": [limited(512)] })))
            .await?;
        case.sandbox_ready("s").await?;
        case.suspend("s").await?;
        let spec = json!({ "podTemplate": { "spec": { "containers": [limited(640)] } } });
        case.patch("s", json!({ "spec": spec })).await?;
        case.resume("s").await?;
        cgroup_says(case, "s", 640).await?;
        programs_see(case, "s", 640).await
    })
    .await
}
