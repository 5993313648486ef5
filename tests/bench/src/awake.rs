//! Cost of idle detection for a sandbox that is awake: throughput and latency of an HTTP server in
//! it, with idle detection on and off in turns on the same sandbox.
//!
//! Off is without both parts of idle detection: the programs on the Pod's link, which every Pod
//! has, and the agent's looks at a sandbox that may fall asleep by itself.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use serde_json::json;
use torpor_api::annotations::{DOZE_AFTER, HIBERNATE_AFTER};
use torpor_tests::{accounts, agent, case::Case, pods::PYTHON, wait};

use crate::{
    http,
    link::Link,
    setup,
    sleeper::{PORT, Sleeper},
    stats::median,
    stop::Stop,
    wrk::{self, Load, Report},
};

const NAMESPACE: &str = "torpor-bench-awake";
const POD: &str = "web";
/// Port of the agent's metrics.
const METRICS: u16 = 9644;
/// Metric with the number of sandboxes at which the agent looks.
const WATCHED: &str = "torpor_agent_sandboxes_watched";
/// Time for the agent to look twice.
const LOOKS: Duration = Duration::from_secs(30);

const PROGRAM: &str = r#"
import asyncio
class Http(asyncio.Protocol):
  def connection_made(self, transport): self.transport = transport
  def data_received(self, data):
    self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" * data.count(b"\r\n\r\n"))
async def serve(): await (await asyncio.get_running_loop().create_server(Http, "", 8080)).serve_forever()
asyncio.run(serve())"#;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Pairs of runs with idle detection off and on
    #[arg(default_value_t = 8)]
    pairs: usize,
    /// Seconds of a run
    #[arg(default_value_t = 6)]
    seconds: u32,
    /// Connections of wrk
    #[arg(default_value_t = 16)]
    connections: u32,
}

pub(crate) async fn run(options: &Options, stop: &mut Stop) -> anyhow::Result<()> {
    wrk::require().await?;
    setup::namespaced(NAMESPACE, stop, async |case| {
        let probe = json!({"startupProbe": {
            "tcpSocket": {"port": PORT}, "periodSeconds": 1, "failureThreshold": 60,
        }});
        let web = setup::pod(POD, PYTHON, &["python3", "-c", PROGRAM], probe);
        setup::start(case, vec![web]).await?;
        let subject = Subject::of(case).await?;
        subject.one(options, true).await?;
        let mut pairs = Vec::new();
        for pair in 0..options.pairs {
            // Each is first as often as the other.
            let first = pair % 2 == 1;
            let reports = [
                subject.one(options, first).await?,
                subject.one(options, !first).await?,
            ];
            let [one, other] = reports;
            pairs.push(if first { (other, one) } else { (one, other) });
        }
        print(&pairs);
        Ok(())
    })
    .await
}

/// The sandbox, its link, and the agent that looks at it.
#[derive(Debug)]
struct Subject<'a> {
    case: &'a Case,
    url: String,
    link: Link,
    agent: String,
    /// Number of other sandboxes at which the agent looks.
    others: u64,
}

impl<'a> Subject<'a> {
    async fn of(case: &'a Case) -> anyhow::Result<Self> {
        let pod = Sleeper::of(case, POD).await?;
        let network = pod
            .network_namespace
            .context("the Pod has no network namespace")?;
        let label = "app.kubernetes.io/name=torpor-agent";
        let agent = accounts::running(case.client(), agent::NAMESPACE, label).await?;
        let agent = agent
            .status
            .and_then(|status| status.pod_ip)
            .context("no address")?;
        Ok(Self {
            case,
            url: format!("http://{}:{PORT}/", pod.address),
            link: Link::of(&network).await?,
            others: watched(&agent).await?,
            agent,
        })
    }

    /// Measures with idle detection on or off.
    async fn one(&self, options: &Options, on: bool) -> anyhow::Result<Report> {
        self.set(on).await?;
        let load = Load {
            url: &self.url,
            headers: &[],
            threads: 1,
            connections: options.connections,
            seconds: options.seconds,
        };
        load.run().await
    }

    async fn set(&self, on: bool) -> anyhow::Result<()> {
        self.link.set(on).await?;
        let annotations = [(DOZE_AFTER, "30s"), (HIBERNATE_AFTER, "10m")];
        for (key, value) in annotations {
            self.case.annotate(POD, key, on.then_some(value)).await?;
        }
        let words = if on {
            "the agent looks"
        } else {
            "the agent no longer looks"
        };
        wait::until(words, LOOKS, async || {
            let watched = watched(&self.agent).await?;
            wait::holds((watched > self.others) == on, || {
                format!("at {watched} sandboxes")
            })
        })
        .await?;
        let programs = self.link.is_watched().await?;
        ensure!(programs == on, "the link has programs: {programs}");
        Ok(())
    }
}

/// Returns the number of sandboxes at which the agent looks.
async fn watched(agent: &str) -> anyhow::Result<u64> {
    let text = http::get(&format!("{agent}:{METRICS}"), "/metrics").await?;
    let mut lines = text.lines();
    let value = lines.find_map(|line| line.strip_prefix(WATCHED)?.strip_prefix(' '));
    Ok(value.with_context(|| format!("no {WATCHED}"))?.parse()?)
}

/// Prints the pairs of off and on.
fn print(pairs: &[(Report, Report)]) {
    println!(
        "{} pairs; medians, and the median, least and greatest ratio of a pair",
        pairs.len()
    );
    print_row("requests/s", "", pairs, |report| report.per_second);
    print_row("latency p50", " ms", pairs, |report| report.p50);
    print_row("latency p99", " ms", pairs, |report| report.p99);
}

fn print_row(words: &str, unit: &str, pairs: &[(Report, Report)], of: fn(&Report) -> f64) {
    let off: Vec<f64> = pairs.iter().map(|(off, _)| of(off)).collect();
    let on: Vec<f64> = pairs.iter().map(|(_, on)| of(on)).collect();
    let mut ratios: Vec<f64> = off.iter().zip(&on).map(|(off, on)| on / off).collect();
    ratios.sort_by(f64::total_cmp);
    let bound = |ratio: Option<&f64>| ratio.copied().unwrap_or_default();
    println!(
        "{words:<12} off {:9.2}{unit}   on {:9.2}{unit}   on/off {:.3} ({:.3} to {:.3})",
        median(&off),
        median(&on),
        median(&ratios),
        bound(ratios.first()),
        bound(ratios.last()),
    );
}
