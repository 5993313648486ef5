//! Checks of the nodes: DaemonSets, agents, abilities.

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

/// First version of Linux with sk_lookup, which port-forward needs
/// (docs/decisions/2026-11-21-port-forward-over-loopback.md).
const PORT_FORWARD_KERNEL: (u32, u32) = (5, 9);

/// Returns the age of the agent's last heartbeat, if it is too old.
pub fn overdue_heartbeat(node: &SandboxNode, now: Timestamp) -> Option<String> {
    let heartbeat = node.status.as_ref()?.heartbeat_time.as_ref()?.0;
    node.is_silent(now).then(|| units::age(heartbeat, now))
}

/// DaemonSet of Torpor, with the texts of its findings.
struct Workload {
    name: &'static str,
    pods: &'static str,
    missing: &'static str,
    logs: &'static str,
}

/// DaemonSets of Torpor. The installer is first: the agent waits for it.
const WORKLOADS: [Workload; 2] = [
    Workload {
        name: install::INSTALLER,
        pods: "nodes are installed",
        missing: "is missing: nodes get no runtime",
        logs: "-c install",
    },
    Workload {
        name: install::AGENT,
        pods: "agents are ready",
        missing: "is missing: nothing hibernates",
        logs: "-c agent",
    },
];

/// Checks that the DaemonSets exist and their Pods are ready.
pub fn agents(facts: &Facts) -> Vec<Finding> {
    match &facts.daemon_sets {
        Ok(sets) => WORKLOADS
            .iter()
            .flat_map(|workload| check_daemon_set(facts, sets, workload))
            .collect(),
        Err(why) => vec![Finding::unseen("DaemonSets", why)],
    }
}

fn check_daemon_set(facts: &Facts, sets: &[DaemonSet], workload: &Workload) -> Option<Finding> {
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
        let remedy = "check its nodeSelector and the labels of the nodes";
        return Some(Finding::problem(subject, text, remedy));
    }
    let why = pod_faults(facts, |pod| is_of(pod, name));
    let text = format!("{ready} of {wanted} {}{why}", workload.pods);
    let remedy = format!(
        "see the log for the reason: kubectl -n {namespace} logs ds/{name} {}",
        workload.logs
    );
    (ready < wanted).then(|| Finding::problem(subject, text, remedy))
}

fn is_of(pod: &Pod, name: &str) -> bool {
    let label = pod.labels().get("app.kubernetes.io/name");
    label.is_some_and(|label| label == name)
}

/// Returns the faults of the Pods that are not ready: `; node-1: install: CrashLoopBackOff`.
pub fn pod_faults(facts: &Facts, selects: impl Fn(&Pod) -> bool) -> String {
    let pods = facts.pods.iter().flatten().filter(|pod| selects(pod));
    let faults = pods.filter_map(|pod| {
        let node = pod.spec.as_ref()?.node_name.clone();
        let status = pod.status.as_ref()?;
        let containers = status.init_container_statuses.iter().flatten();
        let containers = containers.chain(status.container_statuses.iter().flatten());
        let fault = containers.filter_map(container_fault).next()?;
        let place = node.unwrap_or_else(|| "not scheduled yet".to_owned());
        Some(format!("; {place}: {fault}"))
    });
    faults.collect()
}

fn container_fault(container: &ContainerStatus) -> Option<String> {
    let state = container.state.as_ref()?;
    let reason = match (&state.waiting, &state.terminated) {
        (Some(waiting), _) => waiting.reason.clone()?,
        (None, Some(ended)) if ended.exit_code != 0 => {
            format!("exited with code {}", ended.exit_code)
        }
        _ => return None,
    };
    // The other containers wait for the init containers.
    (reason != "PodInitializing").then(|| format!("{}: {reason}", container.name))
}

/// Checks that each node reports, and can hibernate and doze sandboxes.
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
        findings.extend(check_machine(node));
        let report = reports.iter().find(|r| r.name_any() == node.name_any());
        match report {
            Some(report) => findings.extend(check_report(report, largest.unwrap_or(0), facts.now)),
            None => findings.push(Finding::warning(
                subject(&node.name_any()),
                "no agent reports this node: its Pods cannot hibernate",
                format!(
                    "check that an agent runs on the node: kubectl -n {} get pods -o wide",
                    facts.namespace
                ),
            )),
        }
    }
    findings.extend(orphaned_reports(reports, nodes));
    findings.extend(several_versions(reports));
    findings.extend(without_image_server(reports, facts));
    findings
}

fn subject(node: &str) -> String {
    format!("Node {node}")
}

fn is_linux(node: &Node) -> bool {
    let info = node.status.as_ref().and_then(|s| s.node_info.as_ref());
    info.is_none_or(|info| info.operating_system == "linux")
}

/// Checks the container runtime and the kernel that the kubelet reports.
fn check_machine(node: &Node) -> Vec<Finding> {
    let Some(info) = node.status.as_ref().and_then(|s| s.node_info.as_ref()) else {
        return Vec::new();
    };
    let mut findings = Vec::new();
    let runtime = &info.container_runtime_version;
    if !runtime.starts_with("containerd://") {
        findings.push(Finding::problem(
            subject(&node.name_any()),
            format!("its container runtime is {runtime}; Torpor needs containerd"),
            "exclude the node by a nodeSelector of the agent, or install containerd on it",
        ));
    }
    let kernel = &info.kernel_version;
    if version(kernel).is_some_and(|version| version < PORT_FORWARD_KERNEL) {
        let (major, minor) = PORT_FORWARD_KERNEL;
        findings.push(Finding::warning(
            subject(&node.name_any()),
            format!(
                "its kernel is {kernel}; kubectl port-forward into sandboxes needs {major}.{minor}"
            ),
            "install a newer kernel; all other functions work",
        ));
    }
    findings
}

/// Parses major and minor version: (6, 1) for `6.1.0-18-amd64`.
fn version(kernel: &str) -> Option<(u32, u32)> {
    let mut parts = kernel.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Checks the agent's report. `largest` is the size in bytes of the largest known image.
fn check_report(node: &SandboxNode, largest: i64, now: Timestamp) -> Vec<Finding> {
    let name = node.name_any();
    let Some(status) = &node.status else {
        let text = "its agent created the SandboxNode and has reported no status";
        let remedy = "see the log of the agent on this node";
        return vec![Finding::problem(subject(&name), text, remedy)];
    };
    if let Some(silent) = overdue_heartbeat(node, now) {
        return vec![Finding::problem(
            subject(&name),
            format!("its agent last reported {silent} ago"),
            "check the agent's Pod on this node, and that the node is up",
        )];
    }
    let mut findings = Vec::new();
    if let Some(ready) = conditions::find(&status.conditions, READY)
        && ready.status != "True"
    {
        let text = format!("{}: {}", ready.reason, ready.message);
        let remedy = "fix the cause that the message names, then restart the agent's Pod";
        findings.push(Finding::problem(subject(&name), text, remedy));
        return findings;
    }
    for runtime in &status.runtimes {
        let able = runtime.capabilities;
        // Kata cannot hibernate, and there is no remedy. The conditions of its Pods report that.
        if able.hibernate && able.restore || runtime.kind == RuntimeKind::Kata {
            continue;
        }
        let missing = if able.hibernate {
            "restore"
        } else {
            "hibernate"
        };
        let why = match runtime.message.as_str() {
            "" => "its runsc does not support it",
            message => message,
        };
        findings.push(Finding::problem(
            subject(&name),
            format!("the handler {} cannot {missing}: {why}", runtime.handler),
            "install a build of runsc that supports it (the agent's image has one), then restart the agent's Pod",
        ));
    }
    findings.extend(status.runtimes.iter().filter_map(|r| no_doze(&name, r)));
    findings.extend(under_pressure(&name, &status.conditions));
    findings.extend(revoked(&name, &status.conditions));
    if let Some(storage) = &status.storage
        && storage.available_bytes < largest.max(storage.capacity_bytes / 10)
    {
        let text = format!(
            "the disk of images has {} of {} free; images use {}, and the largest has {}",
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

/// Returns the warning for a runtime that cannot doze.
///
/// A runtime that cannot hibernate either has a finding already.
fn no_doze(node: &str, runtime: &NodeRuntime) -> Option<Finding> {
    let able = runtime.capabilities;
    let sleeps = able.hibernate && able.restore || runtime.kind == RuntimeKind::Kata;
    if able.doze || !sleeps {
        return None;
    }
    let why = match runtime.message.trim_start_matches("cannot doze: ") {
        "" => "its agent gives no reason",
        why => why,
    };
    Some(Finding::warning(
        subject(node),
        format!("the handler {} cannot doze: {why}", runtime.handler),
        "fix the cause that the reason names, or give the node swap (its own, or the installer's --doze-swap=zram:50%); sandboxes of gVisor still hibernate",
    ))
}

/// Returns the warning for a node that is short of memory or swap.
fn under_pressure(node: &str, conditions: &[Condition]) -> Option<Finding> {
    let pressure = conditions::find(conditions, PRESSURE)?;
    let short = pressure.status == "True";
    short.then(|| {
        Finding::warning(
            subject(node),
            format!("{}: {}", pressure.reason, pressure.message),
            "idle sandboxes sleep before their time; if the condition stays, give the node more memory or swap, or fewer Pods",
        )
    })
}

/// Returns the finding for revoked builds of gVisor.
///
/// If the installed build is revoked, no sandbox starts on the node.
fn revoked(node: &str, conditions: &[Condition]) -> Option<Finding> {
    let condition = conditions::find(conditions, RUNSC_REVOKED)?;
    let text = format!("{}: {}", condition.reason, condition.message);
    match (condition.status.as_str(), condition.reason.as_str()) {
        ("True", "InstalledBuild") => Some(Finding::problem(
            subject(node),
            text,
            "install another build of runsc (a new version of Torpor, or the installer's --runsc)",
        )),
        ("True", _) => Some(Finding::warning(
            subject(node),
            text,
            "sandboxes whose images need a revoked build wait until the build is removed from the installer's --revoked-runsc",
        )),
        _ => None,
    }
}

fn orphaned_reports(reports: &[SandboxNode], nodes: &[Node]) -> Vec<Finding> {
    let gone = reports.iter().filter(|report| {
        let name = report.name_any();
        nodes.iter().all(|node| node.name_any() != name)
    });
    gone.map(|report| {
        let name = report.name_any();
        Finding::warning(
            format!("SandboxNode {name}"),
            "its node is no longer in the cluster",
            format!("if the node does not return: kubectl delete sandboxnode {name}"),
        )
    })
    .collect()
}

/// Returns the nodes that give no images to other nodes, where others do.
fn without_image_server(reports: &[SandboxNode], facts: &Facts) -> Option<Finding> {
    let reporting = reports.iter().filter(|report| !report.is_silent(facts.now));
    let (serving, without): (Vec<_>, Vec<_>) = reporting.partition(|report| report.serves_images());
    if serving.is_empty() || without.is_empty() {
        return None;
    }
    let names: Vec<String> = without.iter().map(|report| report.name_any()).collect();
    Some(Finding::warning(
        format!("DaemonSet {}", install::AGENT),
        format!(
            "nodes that exchange no images with others: {}",
            names.join(", ")
        ),
        "wait for the end of an upgrade; else check TORPOR_IMAGES_ADDRESS in the DaemonSet and the agent's log",
    ))
}

fn several_versions(reports: &[SandboxNode]) -> Option<Finding> {
    let mut versions: BTreeMap<&str, usize> = BTreeMap::new();
    let statuses = reports.iter().filter_map(|report| report.status.as_ref());
    for version in statuses.filter_map(|status| status.agent_version.as_deref()) {
        *versions.entry(version).or_default() += 1;
    }
    if versions.len() < 2 {
        return None;
    }
    let counts: Vec<String> = versions
        .iter()
        .map(|(version, count)| format!("{version} on {count}"))
        .collect();
    Some(Finding::warning(
        format!("DaemonSet {}", install::AGENT),
        format!("agents of several versions run: {}", counts.join(", ")),
        "wait for the end of the upgrade: kubectl rollout status",
    ))
}
