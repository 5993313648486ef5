//! `why`: explains the state of a sandbox by its settings, its node's report and its conditions.
//! Pure.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use serde::Serialize;
use torpor_api::annotations::{self, HIBERNATE, Settings, SleepAfter};
use torpor_api::conditions::{self, HIBERNATED, READY, RESTORED, SUSPENDED};
use torpor_api::node::RuntimeKind;
use torpor_api::{OperatingMode, Sandbox, SandboxNode, SandboxSnapshot};

use crate::output::Render;
use crate::table::printable;
use crate::texts;
use crate::units;
use crate::view::{self, View};

/// One statement about a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Point {
    /// Subject: asked, planner, wake, condition, node or snapshot.
    pub about: &'static str,
    /// Machine-readable reason, where there is one.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    pub text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// Output of `why`.
#[derive(Debug, Serialize)]
pub struct Explanation {
    #[serde(flatten)]
    pub view: View,
    pub points: Vec<Point>,
    #[serde(skip)]
    pub now: Timestamp,
}

impl Render for Explanation {
    fn text(&self, _wide: bool) -> String {
        let View {
            name, state, node, ..
        } = &self.view;
        let since = self.view.since;
        let since = since.map_or_else(String::new, |since| {
            format!(" for {}", units::age(since, self.now))
        });
        let node = node.as_ref();
        let node = node.map_or_else(String::new, |node| format!(", node {node}"));
        let mut text = format!("{name}: {state}{since}{node}\n");
        let width = self.points.iter().map(|point| point.about.len()).max();
        let width = width.unwrap_or(0);
        for point in &self.points {
            let line = printable(&point.text);
            text.push_str(&format!("  {:<width$}   {line}\n", point.about));
            if let Some(remedy) = &point.remedy {
                text.push_str(&format!("  {:<width$}   → {remedy}\n", ""));
            }
        }
        text
    }

    fn names(&self) -> Vec<String> {
        vec![format!("sandbox.agents.x-k8s.io/{}", self.view.name)]
    }
}

/// Objects that explain the state of one Sandbox.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    pub sandbox: &'a Sandbox,
    pub pod: Option<&'a Pod>,
    pub snapshots: &'a [SandboxSnapshot],
    pub nodes: &'a [SandboxNode],
}

/// Explains the state of a Sandbox.
pub fn explain(evidence: Evidence<'_>, now: Timestamp) -> Explanation {
    let Evidence {
        sandbox,
        pod,
        snapshots,
        nodes,
    } = evidence;
    let mut points = asked(sandbox);
    points.extend(planned(pod, nodes, now));
    points.extend(pod.and_then(|pod| last_wake(pod, nodes, now)));
    points.extend(condition_points(sandbox));
    let settings = settings(sandbox);
    points.extend(pod.and_then(|pod| node_point(pod, nodes, &settings, now)));
    points.extend(pending_snapshots(sandbox, snapshots));
    Explanation {
        view: view::view(sandbox, pod, snapshots, nodes),
        points,
        now,
    }
}

fn settings(sandbox: &Sandbox) -> Settings {
    let own = sandbox.metadata.annotations.as_ref();
    Settings::read(own, sandbox.spec.pod_template.annotations())
}

/// Returns what the user requested by mode and annotations, and the invalid annotations.
fn asked(sandbox: &Sandbox) -> Vec<Point> {
    let own = sandbox.metadata.annotations.as_ref();
    let settings = settings(sandbox);
    let point = |text: String| Point {
        about: "asked",
        reason: String::new(),
        text,
        remedy: None,
    };
    let mut points = vec![match sandbox.spec.operating_mode {
        OperatingMode::Suspended => point(format!(
            "operatingMode: Suspended, with the strategy {:?}",
            settings.strategy()
        )),
        OperatingMode::Running if settings.hibernate => {
            let place = match own.is_some_and(|own| own.contains_key(HIBERNATE)) {
                true => "on the Sandbox",
                false => "in its pod template",
            };
            point(format!("to hibernate in place ({HIBERNATE}=true {place})"))
        }
        OperatingMode::Running => point("to run".to_owned()),
    }];
    points.extend(idle_sleep(&settings).map(point));
    if let Some(image) = &settings.restore_from {
        points.push(point(format!(
            "to start as a copy of SandboxSnapshot {image}"
        )));
    }
    points.extend(settings.problems.iter().map(|problem| Point {
        reason: "InvalidAnnotation".to_owned(),
        remedy: Some(format!(
            "kubectl annotate sandbox {} --overwrite {}=…",
            sandbox.name_any(),
            problem.key
        )),
        ..point(format!("{problem}; the default applies"))
    }));
    points
}

/// Returns the idle times after which the sandbox sleeps.
fn idle_sleep(settings: &Settings) -> Option<String> {
    let after = |what: &str, after: Option<SleepAfter>| {
        let idle = after?.duration()?;
        Some(format!("to {what} after {} without use", units::span(idle)))
    };
    let depths = [
        after("doze", settings.doze_after),
        after("hibernate", settings.hibernate_after),
    ];
    let depths: Vec<String> = depths.into_iter().flatten().collect();
    (!depths.is_empty()).then(|| depths.join(", "))
}

/// Returns the reasons of the latest plan of the node's agent.
fn planned(pod: Option<&Pod>, nodes: &[SandboxNode], now: Timestamp) -> Vec<Point> {
    let Some(report) = pod.and_then(|pod| view::report_of(pod, nodes)) else {
        return Vec::new();
    };
    let points = report.reasons.iter().map(|reason| {
        let words = texts::plan_text(&reason.reason)
            .unwrap_or("unknown reason: the agent is newer than this plugin");
        let detail = match reason.detail.split_once('=') {
            Some(("until", time)) => until(time, now),
            _ if reason.detail.is_empty() => String::new(),
            _ => format!(" ({})", reason.detail),
        };
        Point {
            about: "planner",
            reason: reason.reason.clone(),
            text: format!("{}: {words}{detail}", reason.reason),
            remedy: None,
        }
    });
    points.collect()
}

/// Returns the last wake in place.
fn last_wake(pod: &Pod, nodes: &[SandboxNode], now: Timestamp) -> Option<Point> {
    let wake = view::report_of(pod, nodes)?.last_wake.as_ref()?;
    let text = format!(
        "woken {} ago {}, from {}, in {}",
        units::age(wake.at.0, now),
        texts::cause_text(&wake.cause),
        texts::sleep_text(&wake.from),
        units::micros(wake.duration_micros),
    );
    Some(Point {
        about: "wake",
        reason: wake.cause.clone(),
        text,
        remedy: None,
    })
}

/// Returns the time left as ` (in 25s)`.
fn until(time: &str, now: Timestamp) -> String {
    match time.parse::<Timestamp>() {
        Ok(time) => format!(" (in {})", units::age(now, time)),
        Err(_) => format!(" ({time})"),
    }
}

/// Returns the conditions, those with a remedy first.
fn condition_points(sandbox: &Sandbox) -> Vec<Point> {
    let all = view::conditions_of(sandbox);
    let point = |condition: &Condition| Point {
        about: "condition",
        reason: condition.reason.clone(),
        text: format!(
            "{}={}, {}: {}",
            condition.type_, condition.status, condition.reason, condition.message
        ),
        remedy: texts::remedy(&condition.reason).map(str::to_owned),
    };
    let mut points: Vec<Point> = [RESTORED, HIBERNATED, SUSPENDED, READY]
        .iter()
        .filter_map(|type_| conditions::find(all, type_))
        .map(point)
        .collect();
    points.sort_by_key(|point| point.remedy.is_none());
    points
}

/// Returns why the Pod's node cannot hibernate or doze the sandbox; `None` if it can.
fn node_point(
    pod: &Pod,
    nodes: &[SandboxNode],
    settings: &Settings,
    now: Timestamp,
) -> Option<Point> {
    let name = pod.spec.as_ref()?.node_name.as_deref()?;
    let point = |reason: &str, text: String, remedy: &str| Point {
        about: "node",
        reason: reason.to_owned(),
        text,
        remedy: Some(remedy.to_owned()),
    };
    let Some(node) = nodes.iter().find(|node| node.name_any() == name) else {
        return Some(point(
            "NoAgent",
            format!(
                "no agent of Torpor reports node {name}, or you are not allowed to read its SandboxNode"
            ),
            "kubectl torpor doctor",
        ));
    };
    let status = node.status.as_ref()?;
    if let Some(late) = crate::doctor::nodes::overdue_heartbeat(node, now) {
        let text = format!(
            "the agent of node {name} last reported {late} ago: this information may be outdated"
        );
        return Some(point("AgentSilent", text, "kubectl torpor doctor"));
    }
    let dozes = settings.doze_after.and_then(SleepAfter::duration).is_some();
    // The conditions of Kata's own Pods report what Kata cannot do.
    let mut own = status
        .runtimes
        .iter()
        .filter(|runtime| runtime.kind != RuntimeKind::Kata);
    let (unable, what) = own.find_map(|runtime| {
        let able = runtime.capabilities;
        match (able.hibernate, able.doze) {
            (false, _) => Some((runtime, "hibernate")),
            (true, false) if dozes => Some((runtime, "doze")),
            _ => None,
        }
    })?;
    let text = format!(
        "node {name} cannot {what} with the handler {}: {}",
        unable.handler, unable.message
    );
    Some(point("NotCapable", text, "kubectl torpor doctor"))
}

/// Returns the snapshots of the sandbox that are not committed or are being deleted.
fn pending_snapshots(sandbox: &Sandbox, snapshots: &[SandboxSnapshot]) -> Vec<Point> {
    let own = snapshots.iter().filter(|snapshot| {
        snapshot.namespace() == sandbox.namespace()
            && snapshot.spec.sandbox_name == sandbox.name_any()
            && (!snapshot.is_committed() || snapshot.metadata.deletion_timestamp.is_some())
    });
    own.map(|snapshot| {
        let committed = conditions::find(snapshot.conditions(), conditions::COMMITTED);
        let status = committed.map_or_else(
            || "no agent has processed it yet".to_owned(),
            |c| format!("{}: {}", c.reason, c.message),
        );
        let held = snapshot
            .finalizers()
            .iter()
            .any(|name| name == annotations::IMAGE_FINALIZER);
        let going = snapshot.metadata.deletion_timestamp.is_some() && held;
        let text = match going {
            true => "is being deleted; its image is still on the node".to_owned(),
            false => status,
        };
        Point {
            about: "snapshot",
            reason: committed.map(|c| c.reason.clone()).unwrap_or_default(),
            text: format!("SandboxSnapshot {}: {text}", snapshot.name_any()),
            remedy: committed
                .and_then(|c| texts::remedy(&c.reason))
                .map(str::to_owned),
        }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::args::Format;
    use crate::objects::Objects;
    use crate::output::rendered;
    use crate::view::tests::{at, objects};
    use crate::view::{pod_of, pods_by_owner};

    use super::*;

    fn explained(objects: &Objects, name: &str) -> Explanation {
        let pods = pods_by_owner(&objects.pods);
        let sandbox = objects.sandboxes.iter().find(|s| s.name_any() == name);
        let sandbox = sandbox.unwrap();
        let evidence = Evidence {
            sandbox,
            pod: pod_of(&pods, sandbox),
            snapshots: &objects.snapshots,
            nodes: &objects.nodes,
        };
        explain(evidence, at("2026-11-21T12:00:00Z"))
    }

    fn reported_just_now(objects: &mut Objects) {
        let status = objects.nodes[0].status.as_mut().unwrap();
        status.heartbeat_time = serde_json::from_value(json!("2026-11-21T11:59:45Z")).unwrap();
    }

    #[test]
    fn a_sandbox_that_sleeps_as_requested_has_no_remedies() {
        let mut objects = objects();
        reported_just_now(&mut objects);
        objects.sandboxes[0].metadata.annotations =
            Some([(HIBERNATE.to_owned(), "true".to_owned())].into());
        let explained = explained(&objects, "sleeper");
        assert!(explained.points.iter().all(|point| point.remedy.is_none()));
        insta::assert_snapshot!(rendered(&explained, Format::Table).unwrap());
    }

    #[test]
    fn each_fault_has_a_remedy() {
        let mut objects = objects();
        let node = objects.nodes[0].status.as_mut().unwrap();
        node.sandboxes = serde_json::from_value(json!([{
            "podUID": "pod-uid-of-runner", "reasons": [
                {"reason": "SleepWanted"},
                {"reason": "Backoff", "detail": "until=2026-11-21T12:00:25Z"},
                {"reason": "Moonlight", "detail": "phase=full"},
            ],
        }]))
        .unwrap();
        node.runtimes = serde_json::from_value(json!([
            {"handler": "torpor", "message": "the agent cannot probe this node's runsc: no such file"},
        ]))
        .unwrap();
        reported_just_now(&mut objects);
        let sandbox = &mut objects.sandboxes[2];
        sandbox.metadata.annotations = Some(
            [
                (HIBERNATE.to_owned(), "true".to_owned()),
                (
                    annotations::ON_RESTORE_FAILURE.to_owned(),
                    "Retry".to_owned(),
                ),
            ]
            .into(),
        );
        let conditions = &mut sandbox.status.as_mut().unwrap().conditions;
        conditions[0].reason = "SaveFailed".to_owned();
        insta::assert_snapshot!(rendered(&explained(&objects, "runner"), Format::Table).unwrap());
    }

    #[test]
    fn a_dozing_sandbox_has_its_idle_times_and_its_last_wake() {
        let mut objects = objects();
        reported_just_now(&mut objects);
        let status = objects.nodes[0].status.as_mut().unwrap();
        let report = &mut status.sandboxes[0];
        report.reasons = serde_json::from_value(json!([{"reason": "Dozing"}])).unwrap();
        report.asleep_since = serde_json::from_value(json!("2026-11-21T11:50:00Z")).unwrap();
        status.runtimes = serde_json::from_value(json!([{
            "handler": "torpor", "capabilities": {"hibernate": true, "restore": true, "doze": true},
        }]))
        .unwrap();
        let sandbox = &mut objects.sandboxes[0];
        let asked = [
            ("torpor.dev/doze-after", "30s"),
            ("torpor.dev/hibernate-after", "1h30m"),
        ];
        let asked = asked.map(|(key, value)| (key.to_owned(), value.to_owned()));
        sandbox.metadata.annotations = Some(asked.into());
        let hibernated = &mut sandbox.status.as_mut().unwrap().conditions[0];
        (hibernated.status, hibernated.reason) = ("False".to_owned(), "Dozing".to_owned());
        insta::assert_snapshot!(rendered(&explained(&objects, "sleeper"), Format::Table).unwrap());
        // The same settings on a node without swap.
        let status = objects.nodes[0].status.as_mut().unwrap();
        status.runtimes[0].capabilities.doze = false;
        status.runtimes[0].message = "cannot doze: this node has no swap".to_owned();
        let unable = explained(&objects, "sleeper");
        let node = unable.points.iter().find(|point| point.about == "node");
        assert!(node.unwrap().text.contains("cannot doze"), "{node:?}");
        // Missing abilities of Kata on the same node do not concern this sandbox.
        let status = objects.nodes[0].status.as_mut().unwrap();
        status.runtimes = serde_json::from_value(json!([
            { "handler": "kata-qemu", "kind": "Kata", "capabilities": {"freeze": true, "doze": true} },
            { "handler": "torpor", "capabilities": {"hibernate": true, "restore": true, "doze": true} },
        ]))
        .unwrap();
        let able = explained(&objects, "sleeper");
        assert!(
            able.points.iter().all(|point| point.about != "node"),
            "{able:?}"
        );
    }

    #[test]
    fn a_missing_report_of_the_node_is_named() {
        let mut objects = objects();
        objects.nodes.clear();
        let explained = explained(&objects, "runner");
        let point = explained.points.iter().find(|point| point.about == "node");
        assert_eq!(point.unwrap().reason, "NoAgent");
    }
}
