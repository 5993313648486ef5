//! The controller under load: a process of its own, as its Deployment runs it.

use std::{path::Path, process::Stdio, time::Duration};

use anyhow::Context as _;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::process::{Child, Command};

use super::{counters, objects::until, run::Setup};
use crate::{
    http::{asked, client_of},
    stats::histogram_quantile,
};

const METRICS: &str = "127.0.0.1:18380";
const PROBES: &str = "127.0.0.1:18381";
/// Metric that upstream's gate is on.
const STARTUP: &str = "agent_sandbox_claim_controller_startup_latency_ms";
/// Time for the controller to end, once it is asked to.
const STOP: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) struct Controller {
    process: Child,
    pid: u32,
}

impl Controller {
    /// Starts the controller with the arguments of `deploy/base` and the ServiceAccount's rights.
    pub(crate) async fn start(setup: &Setup) -> anyhow::Result<Self> {
        let log = std::fs::File::create(&setup.controller_log)?;
        let process = Command::new(&setup.controller)
            .args(["--extensions=true", "--leader-elect=true"])
            .arg("--leader-election-namespace=agent-sandbox-system")
            .arg(format!("--metrics-bind-address={METRICS}"))
            .arg(format!("--health-probe-bind-address={PROBES}"))
            .args(setup.controller_args.split_whitespace())
            .env("KUBECONFIG", &setup.controller_kubeconfig)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("start {}", setup.controller.display()))?;
        let pid = process.id().context("the controller has ended")?;
        let controller = Self { process, pid };
        let probes = client_of(PROBES)?;
        until(
            "answer of the controller",
            Duration::from_secs(30),
            || async { Ok(probes.request_text(asked("/readyz")?).await.is_ok()) },
        )
        .await?;
        Ok(controller)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the resident memory in MiB: now, and the most so far.
    pub(crate) fn memory(&self) -> anyhow::Result<(f64, f64)> {
        let path = format!("/proc/{}/status", self.pid);
        let text = std::fs::read_to_string(Path::new(&path)).context(path)?;
        let of = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: f64 = line.split_whitespace().next()?.parse().ok()?;
            Some(kib / 1024.0)
        };
        of("VmRSS:")
            .zip(of("VmHWM:"))
            .context("the kernel does not say how much memory the controller has")
    }

    /// Returns p50, p90 and p99 of the metric that upstream's gate is on; `None` before the first
    /// claim.
    pub(crate) async fn startup_latency(&self) -> anyhow::Result<Option<[f64; 3]>> {
        let metrics = client_of(METRICS)?;
        let text = metrics.request_text(asked("/metrics")?).await?;
        let buckets = counters::buckets(&text, STARTUP);
        let quantile = |q| histogram_quantile(&buckets, q);
        Ok(quantile(0.5)
            .zip(quantile(0.9))
            .zip(quantile(0.99))
            .map(|((p50, p90), p99)| [p50, p90, p99]))
    }

    /// Ends the controller as a Pod is ended.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        let pid = Pid::from_raw(i32::try_from(self.pid)?);
        kill(pid, Signal::SIGTERM).context("end the controller")?;
        let ended = tokio::time::timeout(STOP, self.process.wait()).await;
        let status = ended.context("the controller does not end")??;
        anyhow::ensure!(status.success(), "the controller ended with {status}");
        Ok(())
    }
}
