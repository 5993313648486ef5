//! Report about a failed test's namespace and node.

use std::fmt::Write;
use std::time::Duration;

use tokio::process::Command;
use torpor_records::PodRecord;

use crate::agent::{self, Agent};
use crate::case::Case;
use crate::kubectl::Kubectl;
use crate::{machine, wait};

/// Number of lines of each log, in a report about a namespace and in one about a Pod.
const LINES: usize = 60;
const LINES_OF_POD: usize = 10;

/// Collects objects, Events, logs, records and ledgers of the test's namespace.
pub async fn explain(case: &Case) -> String {
    let mut text = format!(
        "=== namespace {} at the time of the failure\n",
        case.namespace
    );
    let queries: [&[&str]; 3] = [
        &["get", "pods,sandboxes,sandboxsnapshots", "-o", "wide"],
        &["describe", "pods"],
        &["describe", "sandboxes,sandboxsnapshots"],
    ];
    for query in queries {
        section(&mut text, &case.kubectl, query).await;
    }
    let system = system(case);
    let tail = format!("--tail={LINES}");
    section(
        &mut text,
        &system,
        &["logs", "daemonset/torpor-agent", &tail],
    )
    .await;
    section(
        &mut text,
        &system,
        &[
            "logs",
            "--prefix",
            "--selector=app=agent-sandbox-controller",
            &tail,
        ],
    )
    .await;
    let log = Agent::find()
        .ok()
        .and_then(|agent| std::fs::read_to_string(agent.log_file()?).ok());
    if let Some(log) = log {
        add(&mut text, "the agent's log", &last(LINES, log.lines()));
    }
    node(&mut text, case);
    for program in ["kubelet", "containerd"] {
        program_log(&mut text, case, program, &case.namespace, LINES).await;
    }
    text
}

/// Returns a kubectl for the namespace in which Torpor runs.
fn system(case: &Case) -> Kubectl {
    Kubectl {
        namespace: agent::NAMESPACE.to_owned(),
        ..case.kubectl.clone()
    }
}

fn add(text: &mut String, title: &str, body: &str) {
    // Writing into a String cannot fail.
    let _ = writeln!(text, "--- {title}\n{}", body.trim_end());
}

fn last<'a>(most: usize, lines: impl Iterator<Item = &'a str>) -> String {
    let all: Vec<&str> = lines.collect();
    all[all.len().saturating_sub(most)..].join("\n")
}

async fn section(text: &mut String, kubectl: &Kubectl, args: &[&str]) {
    let body = match kubectl.run(args).await {
        Ok(ran) => ran.out + &ran.err,
        Err(error) => format!("{error:#}"),
    };
    add(text, &format!("kubectl {}", args.join(" ")), &body);
}

/// Collects the conditions of one Pod, and what this node has of it: a report that is short enough
/// for the output of a run.
pub async fn pod(case: &Case, name: &str) -> String {
    let mut text = format!("=== report about Pod {name} at the time of the failure\n");
    let conditions =
        "{range .status.conditions[*]}{.type}={.status} {.reason} {.message}{\"\\n\"}{end}";
    let query = ["get", "pod", name, "-o", &format!("jsonpath={conditions}")];
    section(&mut text, &case.kubectl, &query).await;
    let pods = case.node.records.pods().unwrap_or_default();
    let of_case = |pod: &&PodRecord| pod.namespace.as_str() == case.namespace && pod.name == name;
    for pod in pods.iter().filter(of_case) {
        on_node(&mut text, case, pod);
        program_log(
            &mut text,
            case,
            "containerd",
            pod.sandbox.as_str(),
            LINES_OF_POD,
        )
        .await;
    }
    let system = system(case);
    if let Ok(ran) = system.run(&["logs", "daemonset/torpor-agent"]).await {
        let lines = ran.out.lines().filter(|line| line.contains(name));
        add(
            &mut text,
            "the agent, about this Pod",
            &last(LINES_OF_POD, lines),
        );
    }
    text.push_str("=== end of the report\n");
    text
}

/// Adds records, ledgers and images of the namespace's Pods on this node.
fn node(text: &mut String, case: &Case) {
    for pod in case.node.records.pods().unwrap_or_default() {
        if pod.namespace.as_str() == case.namespace {
            on_node(text, case, &pod);
        }
    }
}

/// Adds what this node has of one sandbox.
fn on_node(text: &mut String, case: &Case, pod: &PodRecord) {
    let node = &case.node;
    let uid = pod.pod_uid.as_str();
    let mut body = format!("state {:?}\n", node.records.state(&pod.sandbox));
    for container in node.records.containers_of(&pod.sandbox).unwrap_or_default() {
        let _ = writeln!(body, "container {container:?}");
    }
    let _ = writeln!(body, "ledger {}", node.ledger_words(uid));
    let _ = writeln!(body, "images {:?}", node.images_of(&case.namespace, uid));
    // The commands at work and the shim name the sandbox, and so does its sentry.
    let naming = machine::processes_naming(&[pod.sandbox.to_string()]);
    let mut others = node.sandbox_processes(uid).unwrap_or_default();
    others.retain(|process| !naming.contains(process));
    for process in &naming {
        let _ = writeln!(body, "process {} {:.120}", process.pid, process.command);
        body.push_str(&threads(process.pid));
    }
    for process in others {
        let _ = writeln!(body, "process {} {:.120}", process.pid, process.command);
    }
    let (name, sandbox) = (&pod.name, &pod.sandbox);
    let title = format!("records of Pod {name} ({uid}), sandbox {sandbox}");
    add(text, &title, &body);
}

/// Returns a line for each thread of the process: its name and the function of the kernel in which
/// it waits.
fn threads(pid: i32) -> String {
    let mut text = String::new();
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
    for thread in threads.into_iter().flatten().flatten() {
        let read = |file: &str| std::fs::read_to_string(thread.path().join(file));
        // A thread may have ended meanwhile.
        let (Ok(name), Ok(waits_in)) = (read("comm"), read("wchan")) else {
            continue;
        };
        let _ = writeln!(text, "  thread {} {waits_in}", name.trim());
    }
    text
}

/// Adds the last lines in a program's log that contain `subject`, `most` of them.
async fn program_log(text: &mut String, case: &Case, program: &str, subject: &str, most: usize) {
    let Some(driver) = &case.cluster.driver else {
        return;
    };
    let asked = Command::new(driver)
        .args(["logs", program, "-n", "3000"])
        .output();
    let Ok(Ok(output)) = tokio::time::timeout(wait::scaled(Duration::from_secs(20)), asked).await
    else {
        return;
    };
    let log = String::from_utf8_lossy(&output.stdout).into_owned();
    let lines = log.lines().filter(|line| line.contains(subject));
    add(
        text,
        &format!("{program}, about {subject}"),
        &last(most, lines),
    );
}
