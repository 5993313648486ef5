//! wrk, the load generator of HTTP requests, and its report.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::process::Command;

/// Time that wrk may take beside its load.
const BESIDE: Duration = Duration::from_secs(30);

/// Load of a run.
#[derive(Clone, Debug)]
pub(crate) struct Load<'a> {
    pub url: &'a str,
    pub headers: &'a [String],
    pub threads: u32,
    pub connections: u32,
    pub seconds: u32,
}

/// Results of a run; latencies are in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Report {
    pub requests: f64,
    pub per_second: f64,
    pub p50: f64,
    pub p99: f64,
}

/// Returns an error that names the Debian package if wrk is missing.
pub(crate) async fn require() -> anyhow::Result<()> {
    // wrk without arguments prints its usage and fails.
    let ran = Command::new("wrk").output().await;
    ran.map(drop).context("wrk is missing (Debian package wrk)")
}

impl Load<'_> {
    /// Runs wrk; an error unless every request succeeded.
    pub(crate) async fn run(&self) -> anyhow::Result<Report> {
        let mut command = Command::new("wrk");
        command
            .arg("--latency")
            .arg(format!("-t{}", self.threads))
            .arg(format!("-c{}", self.connections))
            .arg(format!("-d{}s", self.seconds))
            .args(self.headers.iter().flat_map(|header| ["-H", header]))
            .arg(self.url)
            .kill_on_drop(true);
        let limit = Duration::from_secs(u64::from(self.seconds)) + BESIDE;
        let ran = tokio::time::timeout(limit, command.output()).await;
        let ran = ran.context("wrk did not end")?.context("wrk")?;
        let text = String::from_utf8_lossy(&ran.stdout);
        let failed = text.contains("Non-2xx") || text.contains("Socket errors");
        ensure!(
            ran.status.success() && !failed,
            "not all requests succeeded: {text}"
        );
        parse(&text).with_context(|| format!("not a report of wrk: {text}"))
    }
}

fn parse(text: &str) -> Option<Report> {
    let lines = || text.lines().map(str::trim);
    let after = |name: &str| {
        lines()
            .find_map(|line| line.strip_prefix(name))
            .map(str::trim)
    };
    let requests = lines().find_map(|line| line.split_once(" requests in "))?.0;
    Some(Report {
        requests: requests.parse().ok()?,
        per_second: after("Requests/sec:")?.parse().ok()?,
        p50: milliseconds(after("50%")?)?,
        p99: milliseconds(after("99%")?)?,
    })
}

/// Parses a time of wrk: `612.00us`, `1.27ms`, `1.02s`.
fn milliseconds(text: &str) -> Option<f64> {
    let unit = text.find(|letter: char| letter.is_ascii_alphabetic())?;
    let (number, unit) = text.split_at(unit);
    let factor = match unit {
        "us" => 1e-3,
        "ms" => 1.0,
        "s" => 1e3,
        "m" => 6e4,
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "Running 6s test @ http://10.246.0.9:8080/
  1 threads and 16 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.52ms  612.00us  17.10ms   93.08%
    Req/Sec    10.64k   600.33    11.62k    80.00%
  Latency Distribution
     50%  620.00us
     75%    1.60ms
     90%    1.92ms
     99%    1.03s
  63520 requests in 6.00s, 3.57MB read
Requests/sec:  10583.71
Transfer/sec:    609.02KB
";

    #[test]
    fn a_report_has_requests_and_latencies_in_milliseconds() {
        let expected = Report {
            requests: 63520.0,
            per_second: 10583.71,
            p50: 0.62,
            p99: 1030.0,
        };
        assert_eq!(parse(TEXT), Some(expected));
        assert_eq!(parse("unable to connect to 10.246.0.9:8080"), None);
    }
}
