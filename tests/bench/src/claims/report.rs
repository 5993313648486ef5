//! Results as a table: beside each time its ratio to the bare client of the same run, its goal, and
//! the time of upstream's controller.

use std::{collections::BTreeMap, fmt::Write as _};

use super::run::Outcome;

/// Number of kinds of writes that are shown, the most frequent first.
const KINDS: usize = 14;

/// Times of upstream's controller under the same load, by its own load tool on a machine of the
/// same kind, in milliseconds.
const UPSTREAM: [(&str, &str); 6] = [
    ("3", "p50 33, p90 58, p99 121"),
    ("10", "p50 114, p90 281, p99 374"),
    ("20", "p50 1015, p90 2376, p99 2921, 18.3 Ready/s"),
    ("40", "p50 10600, p90 30300, p99 30700, 15.8 Ready/s"),
    ("burst", "all Ready after 3200 and 5000; 4.5 to 7 x bare"),
    ("gate", "thresholds 300, 300, 500 by the metric"),
];

/// Goal of a load.
#[derive(Clone, Debug, PartialEq)]
struct Bar {
    what: &'static str,
    limit: f64,
    value: f64,
}

impl Bar {
    fn holds(&self) -> bool {
        self.value <= self.limit
    }
}

/// Returns the table of all results.
pub(crate) fn table(all: &[Outcome]) -> String {
    let mut text = String::from(
        "load     claims  warm      p50   x bare      p90      p99      max   Ready/s  backlog   (create to Ready, ms)\n",
    );
    for outcome in all.iter().filter(|outcome| outcome.all.count > 0) {
        row(&mut text, outcome);
    }
    for outcome in all {
        details(&mut text, outcome);
    }
    text
}

// Writing into a String does not fail.
fn row(text: &mut String, outcome: &Outcome) {
    let Outcome {
        load, all, warm, ..
    } = outcome;
    let bare = outcome.bare.as_ref().map(|bare| bare.in_a_row.p50);
    let ratio = bare.map_or_else(String::new, |bare| format!("{:.2}", all.p50 / bare));
    let _ = writeln!(
        text,
        "{load:8} {:6} {:5} {:8.1} {ratio:>8} {:8.1} {:8.1} {:8.1} {:9.1} {:8}",
        all.count,
        warm.count,
        all.p50,
        all.p90,
        all.p99,
        all.max,
        outcome.ready_per_second,
        outcome.backlog,
    );
}

fn details(text: &mut String, outcome: &Outcome) {
    let load = &outcome.load;
    let _ = writeln!(
        text,
        "\n== {load}: {} x {} members, full after {:.1} s; load average before: {}",
        outcome.pools, outcome.members, outcome.fill_seconds, outcome.load_average_before
    );
    if let Some((_, figures)) = UPSTREAM.iter().find(|(name, _)| name == load) {
        let _ = writeln!(text, "upstream     {figures}");
    }
    if let Some(bare) = &outcome.bare {
        let each = &bare.in_a_row;
        let _ = write!(
            text,
            "bare         p50 {:.1} p90 {:.1} p99 {:.1} (create alone {:.1}); 150 at once: all after {:.0}",
            each.p50, each.p90, each.p99, bare.create.p50, bare.at_once_ms
        );
        match &bare.paced {
            Some((pause, each)) => {
                let _ = writeln!(text, "; every {pause:.0} ms: p50 {:.1}", each.p50);
            }
            None => text.push('\n'),
        }
    }
    if outcome.cold.count > 0 {
        let (warm, cold) = (&outcome.warm, &outcome.cold);
        let _ = writeln!(
            text,
            "warm         {}: p50 {:.1} p90 {:.1} p99 {:.1}; made for the claim: {}: p50 {:.1} p90 {:.1} p99 {:.1}",
            warm.count, warm.p50, warm.p90, warm.p99, cold.count, cold.p50, cold.p90, cold.p99
        );
    }
    if let Some([p50, p90, p99]) = outcome.startup_metric {
        let _ = writeln!(
            text,
            "metric       p50 {p50:.1} p90 {p90:.1} p99 {p99:.1} (controller_startup_latency_ms)"
        );
    }
    if outcome.each_second.len() > 1 {
        let each = outcome.each_second.iter();
        let each: Vec<_> = each
            .map(|second| format!("{:.0}/{:.0}", second.p50, second.p90))
            .collect();
        let _ = writeln!(text, "each second  p50/p90 {}", each.join(" "));
    }
    for bar in bars(outcome) {
        let verdict = if bar.holds() { "holds" } else { "MISSED" };
        let Bar { what, limit, value } = bar;
        let _ = writeln!(
            text,
            "to reach     {what:34} {value:9.2} of {limit:7.2}  {verdict}"
        );
    }
    let writes = &outcome.writes;
    if writes.claims > 0 {
        let _ = writeln!(text, "a claim's    {}", kinds(&writes.per_claim, 1.0, 2));
    }
    let total: f64 = outcome.apiserver.values().sum();
    let claims = if outcome.all.count == 0 {
        1
    } else {
        outcome.all.count
    };
    let _ = writeln!(
        text,
        "all writes   {total:.0}, {:.1} a claim: {}",
        total / claims as f64,
        kinds(&outcome.apiserver, claims as f64, 2)
    );
    let _ = writeln!(text, "processors   {}", kinds(&outcome.processors, 1.0, 2));
    let (now, most) = outcome.memory;
    let _ = writeln!(
        text,
        "controller   {now:.0} MiB resident, at most {most:.0}; writes refused: {}",
        writes.refused
    );
}

/// Lists counts, the most frequent first.
fn kinds(counts: &BTreeMap<String, f64>, divisor: f64, decimals: usize) -> String {
    let mut sorted: Vec<(&String, &f64)> = counts.iter().collect();
    sorted.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let shown = sorted.iter().take(KINDS);
    let shown = shown.map(|(what, count)| format!("{what} {:.decimals$}", **count / divisor));
    shown.collect::<Vec<_>>().join(", ")
}

/// Returns the project's own goals for the load, with the values that were reached.
fn bars(outcome: &Outcome) -> Vec<Bar> {
    let all = &outcome.all;
    let bar = |what, limit, value| Bar { what, limit, value };
    let bare = outcome.bare.as_ref();
    let mut bars = match (outcome.load.as_str(), bare) {
        ("3", Some(bare)) => vec![
            bar("p50, x bare in a row", 1.6, all.p50 / bare.in_a_row.p50),
            bar("p99", 60.0, all.p99),
        ],
        ("10", _) => vec![bar("p50", 30.0, all.p50), bar("p99", 150.0, all.p99)],
        ("20", _) => vec![
            bar("p50", 60.0, all.p50),
            bar("p99", 400.0, all.p99),
            bar("backlog", 0.0, outcome.backlog as f64),
        ],
        ("40", _) => vec![bar("p90 of the warm", 300.0, outcome.warm.p90)],
        ("burst", Some(bare)) => vec![bar(
            "all Ready, x bare at once",
            1.7,
            all.max / bare.at_once_ms,
        )],
        ("gate", _) => match outcome.startup_metric {
            Some([p50, p90, p99]) => vec![
                bar("p50 of the metric", 100.0, p50),
                bar("p90 of the metric", 100.0, p90),
                bar("p99 of the metric", 250.0, p99),
            ],
            None => Vec::new(),
        },
        ("memory", _) => vec![bar("resident memory, MiB", 150.0, outcome.memory.0)],
        _ => Vec::new(),
    };
    if outcome.writes.claims > 0 {
        let writes = &outcome.writes;
        // The assignment, beside it the annotations that clients read at Ready, and the status.
        bars.push(bar(
            "writes before Ready, on average",
            3.0,
            writes.before_ready,
        ));
        bars.push(bar("writes of a claim, on average", 6.0, writes.in_all));
    }
    bars
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_kinds_come_first() {
        let counts = BTreeMap::from([("a".to_owned(), 2.0), ("b".to_owned(), 8.0)]);
        assert_eq!(kinds(&counts, 2.0, 1), "b 4.0, a 1.0");
    }

    #[test]
    fn a_bar_holds_up_to_its_limit() {
        let bar = |value| Bar {
            what: "x",
            limit: 2.0,
            value,
        };
        assert!(bar(2.0).holds());
        assert!(!bar(2.1).holds());
    }
}
