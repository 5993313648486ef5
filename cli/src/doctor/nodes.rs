//! Whether every node has an agent that works, and what each can do.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ContainerStatus, Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use torpor_api::conditions::{self, PRESSURE, READY, RUNSC_REVOKED};
use torpor_api::node::{NodeRuntime, RuntimeKind};
use torpor_api::{SandboxNode, install};

use super::Finding;
use super::facts::Facts;
use crate::units;

/// Linux before this has no sk_lookup, which port-forward is built on (docs/decisions/2026-11-21-port-forward-over-loopback.md).
const PORT_FORWARD_KERNEL: (u32, u32) = (5, 9);

/// For how long nothing was heard of a node's agent, if that is too long.
pub fn silence(node: &SandboxNode, now: Timestamp) -> Option<String> {
    let heard = node.status.as_ref()?.heartbeat_time.as_ref()?.0;
    node.is_silent(now).then(|| units::age(heard, now))
}

/// A DaemonSet of Torpor, with the words of findings about it.
struct Workload {
    name: &'static str,
    pods: &'static str,
    missing: &'static str,
    logs: &'static str,
}

/// The installer comes first: an agent waits for it.
const WORKLOADS: [Workload; 2] = [
    Workload {
        name: install::INSTALLER,
        pods: "nodes are installed",
        missing: "is missing: nodes get no runtime",
        logs: "-c install: the installer names its reason",
    },
    Workload {
        name: install::AGENT,
        pods: "agents are ready",
        missing: "is missing: nothing hibernates",
        logs: "-c agent: it says what it waits for",
    },
];

/// The DaemonSets are there, and their Pods are ready.
pub fn agents(facts: &Facts) -> Vec<Finding> {
    match &facts.daemon_sets {
        Ok(sets) => WORKLOADS
            .iter()
            .flat_map(|workload| of_daemon_set(facts, sets, workload))
            .collect(),
        Err(why) => vec![Finding::unseen("DaemonSets", why)],
    }
}

fn of_daemon_set(facts: &Facts, sets: &[DaemonSet], workload: &Workload) -> Option<Finding> {
    let (namespace, name) = (&facts.namespace, workload.name);
    let subject = format!("DaemonSet {namespace}/{name}");
    let Some(set) = sets.iter().find(|set| set.name_any() == name) else {
        return Some(Finding::problem(
            subject,
            workload.missing,
            super::install::APPLY,
        ));
    };
    let status = set.status.clone().unwrap_or_default();
    let (wanted, ready) = (status.desired_number_scheduled, status.number_ready);
    if wanted == 0 {
        let text = "runs on no node";
        let remedy = "look at its nodeSelector, and whether nodes are there";
        return Some(Finding::problem(subject, text, remedy));
    }
    let why = troubles(facts, |pod| is_of(pod, name));
    let text = format!("{ready} of {wanted} {}{why}", workload.pods);
    let remedy = format!("kubectl -n {namespace} logs ds/{name} {}", workload.logs);
    (ready < wanted).then(|| Finding::problem(subject, text, remedy))
}

fn is_of(pod: &Pod, name: &str) -> bool {
    let label = pod.labels().get("app.kubernetes.io/name");
    label.is_some_and(|label| label == name)
}

/// What the Pods that are not ready say: `; node-1: install: CrashLoopBackOff`.
pub fn troubles(facts: &Facts, of: impl Fn(&Pod) -> bool) -> String {
    let pods = facts.pods.iter().flatten().filter(|pod| of(pod));
    let said = pods.filter_map(|pod| {
        let node = pod.spec.as_ref()?.node_name.clone();
        let status = pod.status.as_ref()?;
        let containers = status.init_container_statuses.iter().flatten();
        let containers = containers.chain(status.container_statuses.iter().flatten());
        let trouble = containers.filter_map(trouble).next()?;
        let place = node.unwrap_or_else(|| "on no node yet".to_owned());
        Some(format!("; {place}: {trouble}"))
    });
    said.collect()
}

fn trouble(container: &ContainerStatus) -> Option<String> {
    let state = container.state.as_ref()?;
    let reason = match (&state.waiting, &state.terminated) {
        (Some(waiting), _) => waiting.reason.clone()?,
        (None, Some(ended)) if ended.exit_code != 0 => {
            format!("ended with {}", ended.exit_code)
        }
        _ => return None,
    };
    // Until an init container is done, the others wait.
    (reason != "PodInitializing").then(|| format!("{}: {reason}", container.name))
}

/// Each node reports, and can do what Torpor is for.
pub fn abilities(facts: &Facts) -> Vec<Finding> {
    let (nodes, reports) = match (&facts.nodes, &facts.sandbox_nodes) {
        (Ok(nodes), Ok(reports)) => (nodes, reports),
        (Err(why), _) => return vec![Finding::unseen("Nodes", why)],
        (_, Err(why)) => return vec![Finding::unseen("SandboxNodes", why)],
    };
    let largest = facts
        .snapshots
        .iter()
        .flatten()
        .filter_map(|snapshot| snapshot.status.as_ref()?.size_bytes)
        .max();
    let mut findings = Vec::new();
    for node in nodes.iter().filter(|node| is_linux(node)) {
        findings.extend(of_machine(node));
        let report = reports.iter().find(|r| r.name_any() == node.name_any());
        match report {
            Some(report) => findings.extend(of_report(report, largest.unwrap_or(0), facts.now)),
            None => findings.push(Finding::warning(
                subject(&node.name_any()),
                "no agent has reported from it: its Pods cannot hibernate",
                format!(
                    "kubectl -n {} get pods -o wide: is an agent there?",
                    facts.namespace
                ),
            )),
        }
    }
    findings.extend(left_behind(reports, nodes));
    findings.extend(several_versions(reports));
    findings
}

fn subject(node: &str) -> String {
    format!("Node {node}")
}

fn is_linux(node: &Node) -> bool {
    let info = node.status.as_ref().and_then(|s| s.node_info.as_ref());
    info.is_none_or(|info| info.operating_system == "linux")
}

/// What the kubelet says of the machine.
fn of_machine(node: &Node) -> Vec<Finding> {
    let Some(info) = node.status.as_ref().and_then(|s| s.node_info.as_ref()) else {
        return Vec::new();
    };
    let mut findings = Vec::new();
    let runtime = &info.container_runtime_version;
    if !runtime.starts_with("containerd://") {
        findings.push(Finding::problem(
            subject(&node.name_any()),
            format!("its container runtime is {runtime}; Torpor needs containerd"),
            "keep the agent off it with a nodeSelector, or give it containerd",
        ));
    }
    let kernel = &info.kernel_version;
    if version(kernel).is_some_and(|version| version < PORT_FORWARD_KERNEL) {
        let (major, minor) = PORT_FORWARD_KERNEL;
        findings.push(Finding::warning(
            subject(&node.name_any()),
            format!("kernel {kernel}: kubectl port-forward into sandboxes needs {major}.{minor}"),
            "a newer kernel; all else works",
        ));
    }
    findings
}

/// `6.1.0-18-amd64` as (6, 1).
fn version(kernel: &str) -> Option<(u32, u32)> {
    let mut parts = kernel.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// What the agent says. `largest`: bytes of the largest image that is known.
fn of_report(node: &SandboxNode, largest: i64, now: Timestamp) -> Vec<Finding> {
    let name = node.name_any();
    let Some(status) = &node.status else {
        let text = "its agent has made a SandboxNode and reported nothing";
        let remedy = "look at the agent's log on this node";
        return vec![Finding::problem(subject(&name), text, remedy)];
    };
    if let Some(silent) = silence(node, now) {
        return vec![Finding::problem(
            subject(&name),
            format!("its agent was last heard of {silent} ago"),
            "look at the agent's Pod on this node, and whether the node is up",
        )];
    }
    let mut findings = Vec::new();
    if let Some(ready) = conditions::find(&status.conditions, READY)
        && ready.status != "True"
    {
        let text = format!("{}: {}", ready.reason, ready.message);
        let remedy = "the message names it; after mending restart the agent's Pod";
        findings.push(Finding::problem(subject(&name), text, remedy));
        return findings;
    }
    for runtime in &status.runtimes {
        let able = runtime.capabilities;
        // Kata cannot, and no remedy helps: its Pods say so themselves.
        if able.hibernate && able.restore || runtime.kind == RuntimeKind::Kata {
            continue;
        }
        let missing = if able.hibernate {
            "restore"
        } else {
            "hibernate"
        };
        let why = match runtime.message.as_str() {
            "" => "its runsc cannot do it",
            message => message,
        };
        findings.push(Finding::problem(
            subject(&name),
            format!("the handler {} cannot {missing}: {why}", runtime.handler),
            "install a build of runsc that can (the agent's image has one), then restart the agent's Pod",
        ));
    }
    findings.extend(status.runtimes.iter().filter_map(|r| no_doze(&name, r)));
    findings.extend(pressed(&name, &status.conditions));
    findings.extend(revoked(&name, &status.conditions));
    if let Some(storage) = &status.storage
        && storage.available_bytes < largest.max(storage.capacity_bytes / 10)
    {
        let text = format!(
            "{} of {} are free where images are kept, which hold {}; the largest image has {}",
            units::bytes(storage.available_bytes),
            units::bytes(storage.capacity_bytes),
            units::bytes(storage.bytes),
            units::bytes(largest),
        );
        findings.push(Finding::warning(
            subject(&name),
            text,
            "delete SandboxSnapshots, or enlarge the disk of /var/lib/torpor",
        ));
    }
    findings
}

/// Torpor's sandboxes there do not doze, and the agent says why. One that can do nothing else either is told of as such.
fn no_doze(node: &str, runtime: &NodeRuntime) -> Option<Finding> {
    let able = runtime.capabilities;
    let sleeps = able.hibernate && able.restore || runtime.kind == RuntimeKind::Kata;
    if able.doze || !sleeps {
        return None;
    }
    let why = match runtime.message.trim_start_matches("cannot doze: ") {
        "" => "its agent does not say why",
        why => why,
    };
    Some(Finding::warning(
        subject(node),
        format!("the handler {} cannot doze: {why}", runtime.handler),
        "give the node swap (its own, or the installer's --doze-swap=zram:50%), or what the reason names; sandboxes of gVisor hibernate all the same",
    ))
}

/// The node is short of memory or swap: sandboxes sleep before their time.
fn pressed(node: &str, conditions: &[Condition]) -> Option<Finding> {
    let pressure = conditions::find(conditions, PRESSURE)?;
    let short = pressure.status == "True";
    short.then(|| {
        Finding::warning(
            subject(node),
            format!("{}: {}", pressure.reason, pressure.message),
            "idle sandboxes are put to sleep before their time; if that stays so, give the node more memory or swap, or fewer Pods",
        )
    })
}

/// Builds of gVisor are revoked on the node. Where the installed one is among them, nothing starts there.
fn revoked(node: &str, conditions: &[Condition]) -> Option<Finding> {
    let told = conditions::find(conditions, RUNSC_REVOKED)?;
    let words = format!("{}: {}", told.reason, told.message);
    match (told.status.as_str(), told.reason.as_str()) {
        ("True", "InstalledBuild") => Some(Finding::problem(
            subject(node),
            words,
            "install another build of runsc (a new version of Torpor, or the installer's --runsc)",
        )),
        ("True", _) => Some(Finding::warning(
            subject(node),
            words,
            "sandboxes whose images need such a build wait until it is taken out of the installer's --revoked-runsc",
        )),
        _ => None,
    }
}

fn left_behind(reports: &[SandboxNode], nodes: &[Node]) -> Vec<Finding> {
    let gone = reports.iter().filter(|report| {
        let name = report.name_any();
        nodes.iter().all(|node| node.name_any() != name)
    });
    gone.map(|report| {
        let name = report.name_any();
        Finding::warning(
            format!("SandboxNode {name}"),
            "its node is gone from the cluster",
            format!("if it does not come back: kubectl delete sandboxnode {name}"),
        )
    })
    .collect()
}

fn several_versions(reports: &[SandboxNode]) -> Option<Finding> {
    let mut versions: BTreeMap<&str, usize> = BTreeMap::new();
    let told = reports.iter().filter_map(|report| report.status.as_ref());
    for version in told.filter_map(|status| status.agent_version.as_deref()) {
        *versions.entry(version).or_default() += 1;
    }
    if versions.len() < 2 {
        return None;
    }
    let told: Vec<String> = versions
        .iter()
        .map(|(version, count)| format!("{version} on {count}"))
        .collect();
    Some(Finding::warning(
        format!("DaemonSet {}", install::AGENT),
        format!("agents of several versions: {}", told.join(", ")),
        "wait for the upgrade to end: kubectl rollout status",
    ))
}
