//! `why`: what was asked of a sandbox, what its node makes of it, and what stands in the way, in words. Pure.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use serde::Serialize;
use torpor_api::annotations::{self, HIBERNATE, Settings, SleepAfter};
use torpor_api::conditions::{self, HIBERNATED, READY, RESTORED, SUSPENDED};
use torpor_api::node::RuntimeKind;
use torpor_api::{OperatingMode, Sandbox, SandboxNode, SandboxSnapshot};

use crate::output::Shown;
use crate::table::printable;
use crate::units;
use crate::view::{self, View};
use crate::words;

/// One thing to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Point {
    /// asked, planner, wake, condition, node, snapshot
    pub about: &'static str,
    /// Name of the reason, where there is one: for scripts.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    pub text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// What `why` prints.
#[derive(Debug, Serialize)]
pub struct Explanation {
    #[serde(flatten)]
    pub view: View,
    pub points: Vec<Point>,
    #[serde(skip)]
    pub now: Timestamp,
}

impl Shown for Explanation {
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
            let said = printable(&point.text);
            text.push_str(&format!("  {:<width$}   {said}\n", point.about));
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

/// Everything that bears on one Sandbox.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    pub sandbox: &'a Sandbox,
    pub pod: Option<&'a Pod>,
    pub snapshots: &'a [SandboxSnapshot],
    pub nodes: &'a [SandboxNode],
}

/// Explains.
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
    points.extend(said(sandbox));
    let settings = settings(sandbox);
    points.extend(pod.and_then(|pod| node_point(pod, nodes, &settings, now)));
    points.extend(waiting_snapshots(sandbox, snapshots));
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

/// What the user asked for: mode, annotations, and what is wrong with them.
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
    points.extend(by_itself(&settings).map(point));
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

/// When it is to fall asleep without being asked.
fn by_itself(settings: &Settings) -> Option<String> {
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

/// What the planner of the node's agent decided, and why.
fn planned(pod: Option<&Pod>, nodes: &[SandboxNode], now: Timestamp) -> Vec<Point> {
    let Some(report) = pod.and_then(|pod| view::report_of(pod, nodes)) else {
        return Vec::new();
    };
    let told = report.reasons.iter().map(|reason| {
        let words = words::of_plan(&reason.reason).unwrap_or("(of a newer agent)");
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
    told.collect()
}

/// How it last woke in place.
fn last_wake(pod: &Pod, nodes: &[SandboxNode], now: Timestamp) -> Option<Point> {
    let wake = view::report_of(pod, nodes)?.last_wake.as_ref()?;
    let text = format!(
        "woken {} ago {}, from {}, in {}",
        units::age(wake.at.0, now),
        words::of_cause(&wake.cause),
        words::of_depth(&wake.from),
        units::micros(wake.duration_micros),
    );
    Some(Point {
        about: "wake",
        reason: wake.cause.clone(),
        text,
        remedy: None,
    })
}

/// ` (in 25s)`.
fn until(time: &str, now: Timestamp) -> String {
    match time.parse::<Timestamp>() {
        Ok(time) => format!(" (in {})", units::age(now, time)),
        Err(_) => format!(" ({time})"),
    }
}

/// What the conditions say, those first that tell of something wrong.
fn said(sandbox: &Sandbox) -> Vec<Point> {
    let all = view::conditions_of(sandbox);
    let told = |condition: &Condition| Point {
        about: "condition",
        reason: condition.reason.clone(),
        text: format!(
            "{}={}, {}: {}",
            condition.type_, condition.status, condition.reason, condition.message
        ),
        remedy: words::remedy(&condition.reason).map(str::to_owned),
    };
    let mut points: Vec<Point> = [RESTORED, HIBERNATED, SUSPENDED, READY]
        .iter()
        .filter_map(|type_| conditions::find(all, type_))
        .map(told)
        .collect();
    points.sort_by_key(|point| point.remedy.is_none());
    points
}

/// The node of the Pod, where it cannot do what Torpor is for.
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
                "no agent of Torpor reports from node {name}, or you may not see its SandboxNode"
            ),
            "kubectl torpor doctor",
        ));
    };
    let status = node.status.as_ref()?;
    if let Some(late) = crate::doctor::nodes::silence(node, now) {
        let text = format!(
            "the agent of node {name} was last heard of {late} ago: what stands here may be old"
        );
        return Some(point("AgentSilent", text, "kubectl torpor doctor"));
    }
    let dozes = settings.doze_after.and_then(SleepAfter::duration).is_some();
    // Of Kata it is said by the Pods that it runs.
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

/// Snapshots of the sandbox that wait for something.
fn waiting_snapshots(sandbox: &Sandbox, snapshots: &[SandboxSnapshot]) -> Vec<Point> {
    let own = snapshots.iter().filter(|snapshot| {
        snapshot.namespace() == sandbox.namespace()
            && snapshot.spec.sandbox_name == sandbox.name_any()
            && (!snapshot.is_committed() || snapshot.metadata.deletion_timestamp.is_some())
    });
    own.map(|snapshot| {
        let committed = conditions::find(snapshot.conditions(), conditions::COMMITTED);
        let said = committed.map_or_else(
            || "no agent has taken it up yet".to_owned(),
            |c| format!("{}: {}", c.reason, c.message),
        );
        let held = snapshot
            .finalizers()
            .iter()
            .any(|name| name == annotations::IMAGE_FINALIZER);
        let going = snapshot.metadata.deletion_timestamp.is_some() && held;
        let text = match going {
            true => "is being deleted, and its bytes are still on the node".to_owned(),
            false => said,
        };
        Point {
            about: "snapshot",
            reason: committed.map(|c| c.reason.clone()).unwrap_or_default(),
            text: format!("SandboxSnapshot {}: {text}", snapshot.name_any()),
            remedy: committed
                .and_then(|c| words::remedy(&c.reason))
                .map(str::to_owned),
        }
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::args::Format;
    use crate::output::rendered;
    use crate::view::tests::{at, world};
    use crate::view::{pod_of, pods_by_owner};
    use crate::world::World;

    use super::*;

    fn explained(world: &World, name: &str) -> Explanation {
        let pods = pods_by_owner(&world.pods);
        let sandbox = world.sandboxes.iter().find(|s| s.name_any() == name);
        let sandbox = sandbox.unwrap();
        let evidence = Evidence {
            sandbox,
            pod: pod_of(&pods, sandbox),
            snapshots: &world.snapshots,
            nodes: &world.nodes,
        };
        explain(evidence, at("2026-11-21T12:00:00Z"))
    }

    fn heard_of_just_now(world: &mut World) {
        let status = world.nodes[0].status.as_mut().unwrap();
        status.heartbeat_time = serde_json::from_value(json!("2026-11-21T11:59:45Z")).unwrap();
    }

    #[test]
    fn of_a_sandbox_that_sleeps_as_asked_nothing_is_wrong() {
        let mut world = world();
        heard_of_just_now(&mut world);
        world.sandboxes[0].metadata.annotations =
            Some([(HIBERNATE.to_owned(), "true".to_owned())].into());
        let explained = explained(&world, "sleeper");
        assert!(explained.points.iter().all(|point| point.remedy.is_none()));
        insta::assert_snapshot!(rendered(&explained, Format::Table).unwrap());
    }

    #[test]
    fn what_is_wrong_comes_with_a_remedy() {
        let mut world = world();
        let node = world.nodes[0].status.as_mut().unwrap();
        node.sandboxes = serde_json::from_value(json!([{
            "podUID": "pod-uid-of-runner", "reasons": [
                {"reason": "SleepWanted"},
                {"reason": "Backoff", "detail": "until=2026-11-21T12:00:25Z"},
                {"reason": "Moonlight", "detail": "phase=full"},
            ],
        }]))
        .unwrap();
        node.runtimes = serde_json::from_value(json!([
            {"handler": "torpor", "message": "this node's runsc could not be probed: no such file"},
        ]))
        .unwrap();
        heard_of_just_now(&mut world);
        let sandbox = &mut world.sandboxes[2];
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
        insta::assert_snapshot!(rendered(&explained(&world, "runner"), Format::Table).unwrap());
    }

    #[test]
    fn of_one_that_dozes_the_times_are_told_and_what_woke_it_last() {
        let mut world = world();
        heard_of_just_now(&mut world);
        let status = world.nodes[0].status.as_mut().unwrap();
        let report = &mut status.sandboxes[0];
        report.reasons = serde_json::from_value(json!([{"reason": "Dozing"}])).unwrap();
        report.asleep_since = serde_json::from_value(json!("2026-11-21T11:50:00Z")).unwrap();
        status.runtimes = serde_json::from_value(json!([{
            "handler": "torpor", "capabilities": {"hibernate": true, "restore": true, "doze": true},
        }]))
        .unwrap();
        let sandbox = &mut world.sandboxes[0];
        let asked = [
            ("torpor.dev/doze-after", "30s"),
            ("torpor.dev/hibernate-after", "1h30m"),
        ];
        let asked = asked.map(|(key, value)| (key.to_owned(), value.to_owned()));
        sandbox.metadata.annotations = Some(asked.into());
        let hibernated = &mut sandbox.status.as_mut().unwrap().conditions[0];
        (hibernated.status, hibernated.reason) = ("False".to_owned(), "Dozing".to_owned());
        insta::assert_snapshot!(rendered(&explained(&world, "sleeper"), Format::Table).unwrap());
        // The same wish on a node without swap.
        let status = world.nodes[0].status.as_mut().unwrap();
        status.runtimes[0].capabilities.doze = false;
        status.runtimes[0].message = "cannot doze: this node has no swap".to_owned();
        let unable = explained(&world, "sleeper");
        let node = unable.points.iter().find(|point| point.about == "node");
        assert!(node.unwrap().text.contains("cannot doze"), "{node:?}");
        // What Kata cannot on the same node is not this sandbox' matter.
        let status = world.nodes[0].status.as_mut().unwrap();
        status.runtimes = serde_json::from_value(json!([
            { "handler": "kata-qemu", "kind": "Kata", "capabilities": {"freeze": true, "doze": true} },
            { "handler": "torpor", "capabilities": {"hibernate": true, "restore": true, "doze": true} },
        ]))
        .unwrap();
        let able = explained(&world, "sleeper");
        assert!(
            able.points.iter().all(|point| point.about != "node"),
            "{able:?}"
        );
    }

    #[test]
    fn without_a_report_of_the_node_that_is_what_is_said() {
        let mut world = world();
        world.nodes.clear();
        let explained = explained(&world, "runner");
        let point = explained.points.iter().find(|point| point.about == "node");
        assert_eq!(point.unwrap().reason, "NoAgent");
    }
}
