//! The agent's process and its DaemonSet: kills, restarts, patches.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::case::Case;
use crate::kubectl::Kubectl;
use crate::machine::{self, Process};
use crate::wait;

/// Namespace of the agent's DaemonSet.
pub const NAMESPACE: &str = "agent-sandbox-system";
/// Label of the agent's Pods.
pub const AGENT: &str = "app.kubernetes.io/name=torpor-agent";
const DAEMON_SET: &str = "torpor-agent";
const INSTALLER: &str = "torpor-installer";
const COMEBACK_LIMIT: Duration = Duration::from_secs(60);
/// Time for the next agent's Pod to start, also while containerd is killed repeatedly.
///
/// If containerd dies while it starts the Pod, the kubelet tries again at its next sync.
const REPLACEMENT_LIMIT: Duration = Duration::from_secs(180);
/// Time for a rollout of a DaemonSet.
///
/// The kubelet restarts an agent that exited after an install, the second time with a back-off.
const ROLLOUT_LIMIT: Duration = Duration::from_secs(90);

/// The agent's process on this machine.
#[derive(Debug)]
pub struct Agent {
    pub process: Process,
}

impl Agent {
    /// Finds the agent among the processes, in its container or outside of one.
    pub fn find() -> anyhow::Result<Self> {
        Self::all()
            .next()
            .context("torpor-agent does not run on this machine")
    }

    /// Finds the agent of a node, of those whose nodes share this machine.
    pub fn of_node(node: &str) -> anyhow::Result<Self> {
        let variable = format!("NODE_NAME={node}");
        let is_of_node = |agent: &Self| {
            let all = std::fs::read(format!("/proc/{}/environ", agent.process.pid));
            let all = all.unwrap_or_default();
            all.split(|byte| *byte == 0)
                .any(|one| one == variable.as_bytes())
        };
        let found = Self::all().find(is_of_node);
        found.with_context(|| format!("no torpor-agent runs with {variable}"))
    }

    fn all() -> impl Iterator<Item = Self> {
        let all = machine::processes().into_iter().filter(|process| {
            let mut words = process.command.split(' ');
            words
                .next()
                .is_some_and(|program| program.ends_with("torpor-agent"))
                && words.next() == Some("run")
        });
        all.map(|process| Self { process })
    }

    /// Waits for the agent: its Pod may just be replaced.
    pub async fn running() -> anyhow::Result<Self> {
        wait::until("the agent", COMEBACK_LIMIT, async || {
            Ok(Self::find().map_err(|error| error.to_string()))
        })
        .await
    }

    /// Returns the UID of the agent's Pod; `None` if a developer runs the agent by hand.
    fn pod(&self) -> Option<String> {
        let cgroups = std::fs::read_to_string(format!("/proc/{}/cgroup", self.process.pid)).ok()?;
        let (_, rest) = cgroups.split_once("/pod")?;
        rest.split(['/', '.']).next().map(str::to_owned)
    }

    /// Kills the agent with SIGKILL and waits for another one.
    ///
    /// The other agent runs in the DaemonSet's next Pod: the kubelet would restart the container of
    /// the same Pod with a growing back-off. Where a developer runs the agent by hand, the same
    /// command is started again.
    pub async fn kill_and_replace(self, client: Client) -> anyhow::Result<Self> {
        let pod = self.pod();
        if pod.is_some() {
            self.process.kill()?;
            delete_pods(client, &ListParams::default().labels(AGENT)).await?;
        } else {
            let again = Restart::read(&self.process)?;
            self.process.kill()?;
            again.run()?;
        }
        let old = self.process;
        wait::until("another agent", COMEBACK_LIMIT, async || {
            Ok(match Self::find() {
                // The kubelet may restart the old Pod's container before it sees the deletion. A
                // process that is exiting is in no Pod's cgroup any more.
                Ok(agent) if pod.is_some() => match agent.pod() {
                    Some(now) if Some(&now) != pod.as_ref() => Ok(agent),
                    now => Err(format!("that of Pod {now:?}")),
                },
                Ok(agent) if agent.process.pid == old.pid => Err("the old one".to_owned()),
                Ok(agent) => Ok(agent),
                Err(error) => Err(error.to_string()),
            })
        })
        .await
    }

    /// Replaces the DaemonSet's agent after it was killed: deletes its Pod and waits for the next.
    pub async fn replace(client: Client) -> anyhow::Result<()> {
        let old = Self::find().ok().and_then(|agent| agent.pod());
        delete_pods(client, &ListParams::default().labels(AGENT)).await?;
        wait::until("another agent", REPLACEMENT_LIMIT, async || {
            let found = Self::find().ok().and_then(|agent| agent.pod());
            wait::holds(found.is_some() && found != old, || format!("{found:?}"))
        })
        .await
    }

    /// Replaces the agent as an upgrade does and waits until the new one is ready.
    pub async fn roll(case: &Case) -> anyhow::Result<()> {
        let sets: Api<DaemonSet> = Api::namespaced(case.client(), NAMESPACE);
        sets.restart(DAEMON_SET).await?;
        rolled_out(case.client(), DAEMON_SET).await
    }

    /// Waits until the DaemonSet's agent has its usual spec.
    ///
    /// A test that changes the DaemonSet does not wait until its change is undone. An agent that
    /// runs by hand is left as it is.
    pub async fn settled(case: &Case) -> anyhow::Result<()> {
        if Self::find().is_ok_and(|agent| agent.pod().is_none()) {
            return Ok(());
        }
        rolled_out(case.client(), DAEMON_SET).await
    }

    /// Runs the body while the agent has these environment variables.
    ///
    /// The DaemonSet's agent must not have these variables otherwise. Afterwards the usual agent
    /// replaces this one; the next test that runs alone waits for that ([`Self::settled`]).
    pub async fn with_environment(
        case: &Case,
        variables: &[(&str, &str)],
        body: impl AsyncFnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let set = variables
            .iter()
            .map(|(name, value)| json!({ "name": name, "value": value }));
        let unset = variables
            .iter()
            .map(|(name, _)| json!({ "name": name, "$patch": "delete" }));
        change_environment(case.client(), set.collect()).await?;
        let done = match rolled_out(case.client(), DAEMON_SET).await {
            Ok(()) => body().await,
            Err(error) => Err(error),
        };
        change_environment(case.client(), unset.collect()).await?;
        done
    }

    /// Runs the body while the DaemonSet is patched with a strategic merge patch, in YAML or JSON.
    ///
    /// The patch is undone as in [`Self::with_environment`].
    pub async fn with_patch(
        case: &Case,
        patch: &str,
        body: impl AsyncFnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        with_patch_of(case, DAEMON_SET, patch, body).await
    }

    /// Runs the body while the installer's DaemonSet is patched.
    ///
    /// The agent restarts when something else is installed; the body waits for that where it needs
    /// it.
    pub async fn with_installer_patch(
        case: &Case,
        patch: &str,
        body: impl AsyncFnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let done = with_patch_of(case, INSTALLER, patch, body).await;
        rolled_out(case.client(), INSTALLER).await?;
        done
    }

    /// Returns the path of the agent's log, if the agent runs by hand and logs to a file.
    pub fn log_file(&self) -> Option<PathBuf> {
        let path = std::fs::read_link(format!("/proc/{}/fd/2", self.process.pid)).ok()?;
        path.is_file().then_some(path)
    }
}

/// Deletes Pods of Torpor at once; others take their place.
pub async fn delete_pods(client: Client, which: &ListParams) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client, NAMESPACE);
    let at_once = DeleteParams {
        grace_period_seconds: Some(0),
        ..DeleteParams::background()
    };
    pods.delete_collection(&at_once, which).await?;
    Ok(())
}

/// Merges environment variables into those of the agent's container, by name.
async fn change_environment(client: Client, variables: Vec<Value>) -> anyhow::Result<()> {
    let sets: Api<DaemonSet> = Api::namespaced(client, NAMESPACE);
    let agent = json!({ "name": "agent", "env": variables });
    let change = json!({ "spec": { "template": { "spec": { "containers": [agent] } } } });
    let (parameters, patch) = (PatchParams::default(), Patch::Strategic(change));
    sets.patch(DAEMON_SET, &parameters, &patch).await?;
    Ok(())
}

async fn with_patch_of(
    case: &Case,
    set: &str,
    patch: &str,
    body: impl AsyncFnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    daemon_set(&case.kubectl, set, &["patch"], &["--patch", patch]).await?;
    let done = match rolled_out(case.client(), set).await {
        Ok(()) => body().await,
        Err(error) => Err(error),
    };
    daemon_set(&case.kubectl, set, &["rollout", "undo"], &[]).await?;
    done
}

/// Runs one kubectl command on a DaemonSet.
async fn daemon_set(
    kubectl: &Kubectl,
    set: &str,
    verb: &[&str],
    more: &[&str],
) -> anyhow::Result<()> {
    let kubectl = Kubectl {
        namespace: NAMESPACE.to_owned(),
        ..kubectl.clone()
    };
    let name = format!("daemonset/{set}");
    let all = [verb, &[name.as_str()], more].concat();
    kubectl.ok(&all).await.map(drop)
}

async fn rolled_out(client: Client, set: &str) -> anyhow::Result<()> {
    let sets: Api<DaemonSet> = Api::namespaced(client, NAMESPACE);
    let words = format!("{set} is rolled out");
    wait::object(sets, set, &words, ROLLOUT_LIMIT, |found| {
        found.map_or_else(
            || Err("there is no such DaemonSet".to_owned()),
            |set| is_rolled_out(&set),
        )
    })
    .await
}

/// Checks the conditions that `kubectl rollout status` waits for; an error says which is missing.
fn is_rolled_out(set: &DaemonSet) -> Result<(), String> {
    let status = set.status.clone().unwrap_or_default();
    let wanted = status.desired_number_scheduled;
    let updated = status.updated_number_scheduled.unwrap_or(0);
    let available = status.number_available.unwrap_or(0);
    if status.observed_generation < set.metadata.generation {
        Err("its change is not observed yet".to_owned())
    } else if updated < wanted || available < wanted {
        Err(format!(
            "of {wanted} Pods {updated} are new and {available} available"
        ))
    } else {
        Ok(())
    }
}

/// Command line, environment and log of a process, to start it again.
struct Restart {
    program: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    log: Option<PathBuf>,
}

impl Restart {
    fn read(process: &Process) -> anyhow::Result<Self> {
        let proc = PathBuf::from(format!("/proc/{}", process.pid));
        let environment = std::fs::read_to_string(proc.join("environ"))?;
        let pairs = environment
            .split('\0')
            .filter_map(|pair| pair.split_once('='));
        // If the binary has been replaced, the new one is started.
        let program = std::fs::read_link(proc.join("exe"))?
            .to_string_lossy()
            .replace(" (deleted)", "");
        Ok(Self {
            program: program.into(),
            arguments: process
                .command
                .split(' ')
                .skip(1)
                .map(str::to_owned)
                .collect(),
            environment: pairs
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .collect(),
            log: std::fs::read_link(proc.join("fd/2"))
                .ok()
                .filter(|path| path.is_file()),
        })
    }

    fn run(self) -> anyhow::Result<()> {
        use std::os::unix::process::CommandExt;
        let log = match &self.log {
            Some(path) => Stdio::from(std::fs::OpenOptions::new().append(true).open(path)?),
            None => Stdio::null(),
        };
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .env_clear()
            .envs(self.environment)
            .current_dir("/");
        // The process outlives the test and must not get the test's SIGINT.
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0);
        command
            .spawn()
            .with_context(|| format!("cannot start {} again", self.program.display()))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns a DaemonSet of one node at its second generation.
    fn set(observed: i64, updated: i32, available: i32) -> DaemonSet {
        let status = json!({
            "currentNumberScheduled": 1, "desiredNumberScheduled": 1, "numberMisscheduled": 0, "numberReady": available,
            "numberAvailable": available, "updatedNumberScheduled": updated, "observedGeneration": observed,
        });
        serde_json::from_value(json!({ "metadata": { "generation": 2 }, "status": status }))
            .expect("a DaemonSet")
    }

    #[test]
    fn a_daemon_set_is_rolled_out_when_its_new_pods_are_available() {
        assert_eq!(is_rolled_out(&set(2, 1, 1)), Ok(()));
        let words = |set| is_rolled_out(&set).expect_err("it is not");
        assert_eq!(words(set(1, 1, 1)), "its change is not observed yet");
        assert_eq!(words(set(2, 0, 1)), "of 1 Pods 0 are new and 1 available");
        assert_eq!(words(set(2, 1, 0)), "of 1 Pods 1 are new and 0 available");
        let mut unseen = set(2, 1, 1);
        unseen.status = None;
        assert_eq!(words(unseen), "its change is not observed yet");
    }
}
