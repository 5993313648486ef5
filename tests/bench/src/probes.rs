//! Cost of a kubelet's probe while a sandbox dozes: answered for it, beside resuming it for the
//! probe and the probe of a sandbox that is awake.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Args;
use serde_json::{Value, json};
use torpor_api::annotations::DOZE_AFTER;
use torpor_tests::{
    case::Case,
    machine::Process,
    pods::{PYTHON, annotated, with},
};

use crate::{
    http, node, setup,
    sleeper::{PORT, Sleep, Sleeper, processor_time},
    stop::Stop,
    swap::{Kind, Swap},
    table,
};

const NAMESPACE: &str = "torpor-bench-probes";
/// Size of the swap in MiB.
const SWAP: u64 = 1024;
/// Time for the sandboxes to doze.
const DOZE: Duration = Duration::from_secs(90);
/// Time that all doze before they are measured: part of the measurement.
const REST: Duration = Duration::from_secs(2);
/// Probes of a Pod each second: one of readiness, one of liveness.
const PROBES: f64 = 2.0;

const PROGRAM: &str = r#"
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
  def log_message(self, *words): pass
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()"#;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Seconds of probes
    #[arg(default_value_t = 60)]
    seconds: u32,
}

pub(crate) async fn run(options: &Options, stop: &mut Stop) -> anyhow::Result<()> {
    let _swap = Swap::on(Kind::File, SWAP)?;
    setup::namespaced(NAMESPACE, stop, async |case| {
        let doze = |pod| annotated(pod, DOZE_AFTER, "1s");
        let pods = vec![
            doze(pod("probed", true)),
            doze(pod("resumed", false)),
            doze(pod("silent", false)),
            pod("awake", true),
        ];
        setup::start(case, pods).await?;
        println!("{} s each, {}", options.seconds, node::describe()?);
        measure(case, options.seconds).await
    })
    .await
}

fn pod(name: &str, probed: bool) -> Value {
    let probe = json!({
        "httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1, "timeoutSeconds": 1,
    });
    let mut container =
        json!({"startupProbe": with(probe.clone(), json!({"failureThreshold": 60}))});
    if probed {
        container = with(
            container,
            json!({"readinessProbe": probe, "livenessProbe": probe}),
        );
    }
    setup::pod(name, PYTHON, &["python3", "-c", PROGRAM], container)
}

/// The sandboxes that are compared.
#[derive(Debug)]
struct Subjects {
    /// Dozes, and is probed by the kubelet.
    probed: Sleeper,
    /// Dozes, and is resumed by requests.
    resumed: Sleeper,
    /// Dozes undisturbed.
    silent: Sleeper,
    /// Never sleeps, and is probed by the kubelet.
    awake: Sleeper,
    /// The shims of all, by the UIDs of their Pods.
    shims: HashMap<String, Process>,
}

/// Seconds of processor time.
#[derive(Clone, Copy, Debug)]
struct Used {
    probed: f64,
    resumed: f64,
    silent: f64,
    awake: f64,
    agent: f64,
}

impl Subjects {
    async fn of(case: &Case) -> anyhow::Result<Self> {
        let mut all = Sleeper::all(case).await?;
        let mut of = |name: &str| all.remove(name).with_context(|| format!("no Pod {name}"));
        let mut subjects = Self {
            probed: of("probed")?,
            resumed: of("resumed")?,
            silent: of("silent")?,
            awake: of("awake")?,
            shims: HashMap::new(),
        };
        let Self {
            probed,
            resumed,
            silent,
            awake,
            ..
        } = &subjects;
        for uid in [probed, resumed, silent, awake].map(|pod| pod.uid.clone()) {
            let shim = case.node.shim(&uid)?;
            subjects.shims.insert(uid, shim);
        }
        Ok(subjects)
    }

    /// Returns what each Pod, its shim included, and the agent have used so far.
    fn used(&self) -> anyhow::Result<Used> {
        let of = |pod: &Sleeper| {
            let shim = self.shims.get(&pod.uid).map(std::slice::from_ref);
            let shim = shim.map_or(Duration::ZERO, node::processor_time);
            anyhow::Ok((processor_time(pod.pod_cgroup())? + shim).as_secs_f64())
        };
        Ok(Used {
            probed: of(&self.probed)?,
            resumed: of(&self.resumed)?,
            silent: of(&self.silent)?,
            awake: of(&self.awake)?,
            agent: node::processor_time(&[node::agent()?]).as_secs_f64(),
        })
    }

    /// Returns what each uses while `work` runs, and how long that takes.
    async fn during(
        &self,
        work: impl Future<Output = anyhow::Result<()>>,
    ) -> anyhow::Result<(Used, f64)> {
        let (begin, before) = (Instant::now(), self.used()?);
        work.await?;
        let after = self.used()?;
        let used = Used {
            probed: after.probed - before.probed,
            resumed: after.resumed - before.resumed,
            silent: after.silent - before.silent,
            awake: after.awake - before.awake,
            agent: after.agent - before.agent,
        };
        Ok((used, begin.elapsed().as_secs_f64()))
    }

    /// Resumes a sandbox by a request and waits until it dozes again, this many times.
    async fn resume(&self, rounds: u32) -> anyhow::Result<()> {
        let pod = std::slice::from_ref(&self.resumed);
        for _ in 0..rounds {
            http::get(&format!("{}:{PORT}", self.resumed.address), "/").await?;
            Sleep::Dozing.until(pod, DOZE).await?;
        }
        Ok(())
    }
}

async fn measure(case: &Case, seconds: u32) -> anyhow::Result<()> {
    let subjects = Subjects::of(case).await?;
    let Subjects {
        probed,
        resumed,
        silent,
        ..
    } = &subjects;
    let dozing = [probed.clone(), resumed.clone(), silent.clone()];
    Sleep::Dozing.until(&dozing, DOZE).await?;
    tokio::time::sleep(REST).await;
    let time = Duration::from_secs(u64::from(seconds));
    let probing = async {
        tokio::time::sleep(time).await;
        Ok(())
    };
    let (quiet, quiet_took) = subjects.during(probing).await?;
    ensure!(
        probed.sleeps(Sleep::Dozing),
        "a probe has woken the sandbox"
    );
    let rounds = (seconds / 4).max(5);
    let (busy, took) = subjects.during(subjects.resume(rounds)).await?;
    print(&quiet, quiet_took, &busy, took, rounds);
    Ok(())
}

/// Prints the cost of a probe in milliseconds of processor time.
fn print(quiet: &Used, quiet_took: f64, busy: &Used, took: f64, rounds: u32) {
    let probes = PROBES * quiet_took;
    let answered = (quiet.probed - quiet.silent) / probes * 1000.0;
    let by_itself = quiet.awake / probes * 1000.0;
    // Without what a dozing sandbox and the agent use anyway.
    let each = |used: f64, otherwise: f64| {
        (used - otherwise * took / quiet_took) / f64::from(rounds) * 1000.0
    };
    let own = each(busy.resumed, quiet.silent);
    let agent = each(busy.agent, quiet.agent);
    let row = |words: &str, figure: f64| {
        let unit = "ms of processor time";
        println!("{}", table::value(words, figure, unit, Some(answered)));
    };
    row("a probe that is answered for a dozing sandbox", answered);
    row(
        "a probe of an awake sandbox, its other work included",
        by_itself,
    );
    row(
        "a probe for which the sandbox is resumed, until it dozes again",
        own + agent,
    );
    println!("    of that: sandbox and shim {own:.1}, agent {agent:.1}");
}
