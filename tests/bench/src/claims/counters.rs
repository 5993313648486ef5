//! Counts of the API server and the kernel: requests by verb and resource, and processor time by
//! process.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Context as _;
use kube::Client;

use crate::http::asked;

/// Verbs that write, as the apiserver's metric names them.
const WRITES: [&str; 6] = [
    "POST",
    "PUT",
    "PATCH",
    "APPLY",
    "DELETE",
    "DELETECOLLECTION",
];
/// Ticks per second in /proc, on every architecture that matters here.
const TICKS: f64 = 100.0;
/// Number of writes a second below which a control plane is at rest.
const REST: f64 = 25.0;

/// Returns labels and value of each sample of one metric in the Prometheus text format.
pub(crate) fn samples(text: &str, metric: &str) -> Vec<(BTreeMap<String, String>, f64)> {
    let of_line = |line: &str| {
        let rest = line.strip_prefix(metric)?;
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => rest.rsplit_once("} ")?,
            None => ("", rest.strip_prefix(' ')?),
        };
        let value = value.split_whitespace().next()?.parse().ok()?;
        Some((labels_of(labels), value))
    };
    text.lines().filter_map(of_line).collect()
}

/// Parses `a="x",b="y"`. Values of the metrics that are read here have no quotes in them.
fn labels_of(text: &str) -> BTreeMap<String, String> {
    let pairs = text.split("\",").filter_map(|pair| pair.split_once("=\""));
    pairs
        .map(|(key, value)| (key.to_owned(), value.trim_end_matches('"').to_owned()))
        .collect()
}

/// Returns the buckets of a histogram, all its label sets together: upper bounds in order, and the
/// counts at or below each.
pub(crate) fn buckets(text: &str, metric: &str) -> Vec<(f64, f64)> {
    let mut sums: Vec<(f64, f64)> = Vec::new();
    for (labels, count) in samples(text, &format!("{metric}_bucket")) {
        let Some(bound) = labels.get("le").and_then(|le| le.parse().ok()) else {
            continue;
        };
        match sums.iter_mut().find(|(known, _)| *known == bound) {
            Some((_, sum)) => *sum += count,
            None => sums.push((bound, count)),
        }
    }
    sums.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    sums
}

/// Returns the number of writes to the API server since it began, by verb and resource.
pub(crate) async fn writes(client: &Client) -> anyhow::Result<BTreeMap<String, f64>> {
    let text = client.request_text(asked("/metrics")?).await;
    let text = text.context("the apiserver's metrics")?;
    let mut all = BTreeMap::new();
    for (labels, count) in samples(&text, "apiserver_request_total") {
        let label = |name| labels.get(name).map(String::as_str).unwrap_or_default();
        let verb = label("verb");
        if !WRITES.contains(&verb) {
            continue;
        }
        let slash = if label("subresource").is_empty() {
            ""
        } else {
            "/"
        };
        let what = format!(
            "{} {}{slash}{}",
            verb.to_lowercase(),
            label("resource"),
            label("subresource")
        );
        *all.entry(what).or_default() += count;
    }
    Ok(all)
}

/// Returns the increase between two counts, without what stayed the same.
pub(crate) fn added(
    before: &BTreeMap<String, f64>,
    after: &BTreeMap<String, f64>,
) -> BTreeMap<String, f64> {
    let more = after.iter().map(|(what, count)| {
        let known = before.get(what).copied().unwrap_or_default();
        (what.clone(), count - known)
    });
    more.filter(|(_, count)| *count > 0.0).collect()
}

/// Waits until hardly anything is written any more.
pub(crate) async fn at_rest(client: &Client, limit: Duration) -> anyhow::Result<()> {
    let mut last: f64 = writes(client).await?.values().sum();
    let rests = async {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let now: f64 = writes(client).await?.values().sum();
            if now - last < REST {
                return anyhow::Ok(());
            }
            last = now;
        }
    };
    tokio::time::timeout(limit, rests)
        .await
        .with_context(|| format!("the control plane is not at rest after {limit:?}"))?
}

/// Returns the seconds of processor time of each process since it began.
pub(crate) fn processor_time(
    processes: &BTreeMap<String, u32>,
) -> anyhow::Result<BTreeMap<String, f64>> {
    let of = |(name, pid): (&String, &u32)| {
        let path = format!("/proc/{pid}/stat");
        let text = std::fs::read_to_string(&path).context(path)?;
        // The second field is a name in parentheses. After it, user and system time are the 12th
        // and 13th.
        let (_, rest) = text.rsplit_once(") ").context("no such line")?;
        let ticks: f64 = rest
            .split_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|field| field.parse::<f64>().ok())
            .sum();
        Ok((name.clone(), ticks / TICKS))
    };
    processes.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP x y
apiserver_request_total{code=\"200\",resource=\"pods\",subresource=\"status\",verb=\"PATCH\"} 7
apiserver_request_total_other{code=\"200\"} 9
plain 3
h_bucket{le=\"5.0\",a=\"1\"} 1
h_bucket{le=\"+Inf\",a=\"1\"} 2
h_bucket{le=\"5.0\",a=\"2\"} 10
h_bucket{le=\"+Inf\",a=\"2\"} 20
";

    #[test]
    fn samples_are_those_of_the_metric_alone() {
        let found = samples(TEXT, "apiserver_request_total");
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].0["verb"].as_str(), found[0].1), ("PATCH", 7.0));
        assert_eq!(samples(TEXT, "plain"), [(BTreeMap::new(), 3.0)]);
    }

    #[test]
    fn buckets_of_all_labels_are_added() {
        assert_eq!(buckets(TEXT, "h"), [(5.0, 11.0), (f64::INFINITY, 22.0)]);
    }

    #[test]
    fn only_counts_that_increased_are_shown() {
        let count = |pods: f64| BTreeMap::from([("a".to_owned(), 1.0), ("b".to_owned(), pods)]);
        let expected = BTreeMap::from([("b".to_owned(), 2.0)]);
        assert_eq!(added(&count(3.0), &count(5.0)), expected);
    }
}
