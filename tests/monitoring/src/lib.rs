//! Metrics that dashboards and alerts of `deploy/monitoring` query, so that tests of each program
//! can check that the program has them.
//!
//! Expressions are parsed as Prometheus parses them. A metric or label that no program has is an
//! error, and so is an invalid expression.

pub mod collector;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use promql_parser::parser::{Expr, LabelModifier, VectorSelector, parse};
use serde_json::Value;

/// Prefixes of all metrics of Torpor, by the program that has them. No program has a metric without
/// one of these.
pub const PREFIXES: [&str; 9] = [
    "torpor_agent_",
    "torpor_warmpool",
    "torpor_image_staging",
    "torpor_router_",
    "sandbox_router_",
    "agent_sandbox",
    "controller_runtime_",
    "leader_election_",
    "up",
];

/// Labels that Prometheus adds: those of the target, and those of a histogram's buckets.
const ADDED: [&str; 8] = [
    "job",
    "instance",
    "namespace",
    "pod",
    "node",
    "container",
    "le",
    "__name__",
];

/// Metric that an expression uses.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Used {
    pub metric: String,
    /// Labels that are matched, or that the result is grouped by where the metric is the only one.
    pub labels: BTreeSet<String>,
    /// File, and panel or alert.
    pub place: String,
}

/// Expression, and where it is.
#[derive(Clone, Debug)]
pub struct Asked {
    pub place: String,
    pub expression: String,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/monitoring")
}

fn read(name: &str) -> Value {
    let path = folder().join(name);
    let text = std::fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    if name.ends_with(".json") {
        return serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Returns the alerts as Prometheus' own rule file.
pub fn rules() -> Value {
    read("alerts.yaml")
}

/// Returns the alerts as an object of the Prometheus operator.
pub fn prometheus_rule() -> Value {
    read("prometheusrule.yaml")
}

/// Returns the dashboard.
pub fn dashboard() -> Value {
    read("dashboard.json")
}

/// Returns all expressions of alerts and dashboard.
pub fn asked() -> Vec<Asked> {
    let mut all = Vec::new();
    for group in array(&rules()["groups"]) {
        for rule in array(&group["rules"]) {
            let name = ["alert", "record"]
                .iter()
                .find_map(|key| rule[key].as_str());
            all.push(Asked {
                place: format!("alerts.yaml: {}", name.unwrap_or("?")),
                expression: rule["expr"].as_str().unwrap_or_default().to_owned(),
            });
        }
    }
    for panel in array(&dashboard()["panels"]) {
        for target in array(&panel["targets"]) {
            all.push(Asked {
                place: format!("dashboard.json: {}", panel["title"].as_str().unwrap_or("?")),
                expression: target["expr"].as_str().unwrap_or_default().to_owned(),
            });
        }
    }
    all
}

/// Returns the elements of an array; none of any other value.
pub fn array(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

/// Returns the metrics that an expression uses; an error says why Prometheus would refuse the
/// expression.
pub fn used(asked: &Asked) -> Result<Vec<Used>, String> {
    // Grafana fills in its variables before Prometheus sees the expression.
    let expression = asked.expression.replace("$__rate_interval", "5m");
    let parsed = parse(&expression).map_err(|error| format!("{}: {error}", asked.place))?;
    let mut found = Vec::new();
    walk(&parsed, &BTreeSet::new(), &mut |selector, grouped| {
        let matched = selector.matchers.matchers.iter().map(|m| m.name.clone());
        found.push(Used {
            metric: selector.name.clone().unwrap_or_default(),
            labels: matched.chain(grouped.iter().cloned()).collect(),
            place: asked.place.clone(),
        });
    });
    Ok(found)
}

/// Visits every selector, with the labels by which its result is grouped.
fn walk(
    expression: &Expr,
    grouped: &BTreeSet<String>,
    visit: &mut impl FnMut(&VectorSelector, &BTreeSet<String>),
) {
    match expression {
        Expr::Aggregate(aggregate) => {
            let mut grouped = grouped.clone();
            if let Some(LabelModifier::Include(labels)) = &aggregate.modifier {
                grouped.extend(labels.labels.iter().cloned());
            }
            walk(&aggregate.expr, &grouped, visit);
            if let Some(parameter) = &aggregate.param {
                walk(parameter, &BTreeSet::new(), visit);
            }
        }
        Expr::Unary(unary) => walk(&unary.expr, grouped, visit),
        Expr::Binary(binary) => {
            walk(&binary.lhs, grouped, visit);
            walk(&binary.rhs, grouped, visit);
        }
        Expr::Paren(paren) => walk(&paren.expr, grouped, visit),
        Expr::Subquery(subquery) => walk(&subquery.expr, grouped, visit),
        Expr::VectorSelector(selector) => visit(selector, grouped),
        Expr::MatrixSelector(selector) => visit(&selector.vs, grouped),
        Expr::Call(call) => {
            for argument in &call.args.args {
                walk(argument, grouped, visit);
            }
        }
        Expr::NumberLiteral(_) | Expr::StringLiteral(_) | Expr::Extension(_) => {}
    }
}

/// Returns the samples of a text in Prometheus' or OpenMetrics' format: each name with its labels.
pub fn samples(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let name_ends = line.find(['{', ' ']).unwrap_or(line.len());
        let (name, rest) = line.split_at(name_ends);
        let labels = rest
            .strip_prefix('{')
            .and_then(|rest| rest.split_once('}'))
            .map_or("", |(labels, _)| labels);
        let names = labels.split("\",").filter_map(|pair| pair.split_once('='));
        all.entry(name.to_owned())
            .or_default()
            .extend(names.map(|(name, _)| name.to_owned()));
    }
    all
}

/// Checks that the text has each metric with this prefix, and each of its labels, that the
/// dashboard or an alert uses.
///
/// # Panics
/// With all that is missing, or if no expression uses a metric with the prefix.
pub fn check(prefix: &str, text: &str) {
    let there = samples(text);
    let mut missing = Vec::new();
    let mut count = 0;
    for asked in asked() {
        let all = used(&asked).unwrap_or_else(|error| panic!("{error}"));
        for used in all.iter().filter(|used| used.metric.starts_with(prefix)) {
            count += 1;
            match there.get(&used.metric) {
                None => missing.push(format!("{}: no metric {}", used.place, used.metric)),
                Some(labels) => missing.extend(
                    used.labels
                        .iter()
                        .filter(|l| !labels.contains(*l) && !ADDED.contains(&l.as_str()))
                        .map(|l| format!("{}: {} has no label {l}", used.place, used.metric)),
                ),
            }
        }
    }
    assert!(
        missing.is_empty(),
        "{}\nthere is:\n{there:#?}",
        missing.join("\n")
    );
    assert!(
        count > 0,
        "no expression uses a metric that begins with {prefix}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_expression_is_promql_and_uses_torpors_metrics() {
        let all = asked();
        assert!(all.len() > 20, "{}", all.len());
        for asked in all {
            let used = used(&asked).unwrap_or_else(|error| panic!("{error}"));
            assert!(!used.is_empty(), "{} uses no metric", asked.place);
            for used in used {
                let ours = PREFIXES
                    .iter()
                    .any(|prefix| used.metric.starts_with(prefix));
                assert!(ours, "{}: no program has {}", used.place, used.metric);
            }
        }
    }

    /// Prefixes of metrics that others have too: every controller in the cluster, the control
    /// plane, every target.
    const SHARED: [&str; 3] = ["controller_runtime_", "leader_election_", "up"];

    #[test]
    fn metrics_that_other_programs_have_too_are_selected_by_job() {
        for asked in asked() {
            let used = used(&asked).unwrap_or_else(|error| panic!("{error}"));
            for used in used {
                let name = &used.metric;
                let shared = SHARED.iter().any(|prefix| name.starts_with(prefix));
                let ours = used.labels.contains("job");
                assert!(ours || !shared, "{}: {name} without a job", used.place);
            }
        }
    }

    #[test]
    fn alerts_name_nodes_and_no_addresses() {
        let all = rules().to_string();
        assert!(all.contains("$labels.node"), "{all}");
        assert!(!all.contains("instance"), "{all}");
    }

    #[test]
    fn both_forms_of_the_alerts_are_the_same() {
        assert_eq!(prometheus_rule()["spec"], rules());
    }

    #[test]
    fn every_alert_has_a_severity_a_summary_and_a_description() {
        let mut names = BTreeSet::new();
        for group in array(&rules()["groups"]) {
            for rule in array(&group["rules"]) {
                let name = rule["alert"].as_str().unwrap().to_owned();
                let severity = rule["labels"]["severity"].as_str().unwrap();
                assert!(["critical", "warning"].contains(&severity), "{name}");
                for annotation in ["summary", "description"] {
                    let text = rule["annotations"][annotation].as_str().unwrap_or_default();
                    assert!(text.len() > 20, "{name} has no {annotation}");
                }
                assert!(names.insert(name.clone()), "{name} twice");
            }
        }
    }

    #[test]
    fn panels_do_not_overlap_and_have_a_unit_and_a_description() {
        let mut cells = BTreeSet::new();
        let mut ids = BTreeSet::new();
        for panel in array(&dashboard()["panels"]) {
            let title = panel["title"].as_str().unwrap();
            assert!(
                ids.insert(panel["id"].as_u64().unwrap()),
                "{title}: id twice"
            );
            let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
            for x in at("x")..at("x") + at("w") {
                assert!(x < 24, "{title} is wider than the grid");
                for y in at("y")..at("y") + at("h") {
                    assert!(cells.insert((x, y)), "{title} lies on another");
                }
            }
            if panel["type"] != "row" {
                assert!(
                    panel["fieldConfig"]["defaults"]["unit"].is_string(),
                    "{title}"
                );
                assert!(panel["description"].is_string(), "{title}");
            }
        }
    }

    #[test]
    fn samples_are_read_with_their_labels() {
        let text = "# HELP a b\n# TYPE a counter\na_total{x=\"1,2\",y=\"z\"} 1\nb 2\n# EOF\n";
        let found = samples(text);
        assert_eq!(Vec::from_iter(&found["a_total"]), ["x", "y"]);
        assert!(found["b"].is_empty());
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn an_invalid_expression_is_refused() {
        let asked = |expression: &str| Asked {
            place: "here".to_owned(),
            expression: expression.to_owned(),
        };
        used(&asked("sum by (x (a)")).unwrap_err();
        used(&asked("rate(a)")).unwrap_err();
        let found = used(&asked(
            "sum by (x) (rate(a{y=\"1\"}[$__rate_interval])) > 1",
        ))
        .unwrap();
        assert_eq!(found[0].metric, "a");
        assert_eq!(Vec::from_iter(&found[0].labels), ["x", "y"]);
    }
}
