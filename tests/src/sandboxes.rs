//! Sandboxes for tests, and waiting for their conditions.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use torpor_api::Sandbox;
use torpor_api::conditions::find;

use crate::case::{Case, condition};
use crate::pods::pod_spec;
use crate::wait;

/// Time for a save, a deletion with its grace period and a start: seconds, more on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Returns a Sandbox of the RuntimeClass torpor.
pub fn sandbox(name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "agents.x-k8s.io/v1beta1",
        "kind": "Sandbox",
        "metadata": { "name": name },
        "spec": { "podTemplate": { "spec": pod_spec(spec) } },
    })
}

/// Returns the Sandbox's conditions; none before its first status.
pub fn conditions(sandbox: &Sandbox) -> &[Condition] {
    sandbox
        .status
        .as_ref()
        .map_or(&[], |status| &status.conditions)
}

/// Returns status, reason and message of a condition; empty strings where there is none.
pub fn condition_of<'a>(sandbox: &'a Sandbox, kind: &str) -> (&'a str, &'a str, &'a str) {
    find(conditions(sandbox), kind).map_or(("", "", ""), |condition| {
        (&condition.status, &condition.reason, &condition.message)
    })
}

impl Case {
    /// Sets `operatingMode`.
    pub async fn set_mode(&self, sandbox: &str, mode: &str) -> anyhow::Result<()> {
        self.patch(sandbox, json!({ "spec": { "operatingMode": mode } }))
            .await
    }

    /// Changes a Sandbox by a merge patch.
    pub async fn patch(&self, sandbox: &str, change: Value) -> anyhow::Result<()> {
        let (parameters, patch) = (PatchParams::default(), Patch::Merge(change));
        self.sandboxes().patch(sandbox, &parameters, &patch).await?;
        Ok(())
    }

    /// Returns the Sandbox once a condition has this status and reason.
    pub async fn sandbox_has(
        &self,
        sandbox: &str,
        kind: &str,
        status: &str,
        reason: &str,
    ) -> anyhow::Result<Sandbox> {
        let words = format!("Sandbox {sandbox}: {kind}={status}/{reason}");
        wait::object(self.sandboxes(), sandbox, &words, LIMIT, |found| {
            let found = found.ok_or("there is no such Sandbox")?;
            let (has_status, has_reason, _) = condition_of(&found, kind);
            if (has_status, has_reason) == (status, reason) {
                Ok(found)
            } else {
                Err(format!("{:?}", conditions(&found)))
            }
        })
        .await
    }

    /// Returns the Pod of a Sandbox once both are ready.
    pub async fn sandbox_ready(&self, sandbox: &str) -> anyhow::Result<Pod> {
        self.sandbox_has(sandbox, "Ready", "True", "DependenciesReady")
            .await?;
        self.ready(sandbox).await
    }

    /// Waits until the Pod that follows `before` is Ready.
    pub async fn next_pod(&self, before: &Pod, limit: Duration) -> anyhow::Result<Pod> {
        let is_next = |pod: &Pod| pod.uid() != before.uid() && condition(pod, "Ready").0 == "True";
        let name = before.name_any();
        self.pod_until(&name, "it continues", limit, is_next).await
    }

    /// Suspends the Sandbox and waits until its Pod is gone.
    pub async fn suspend(&self, sandbox: &str) -> anyhow::Result<Sandbox> {
        self.set_mode(sandbox, "Suspended").await?;
        self.sandbox_has(sandbox, "Suspended", "True", "PodTerminated")
            .await
    }

    /// Resumes the Sandbox and waits for the new Pod, which must continue from the image.
    pub async fn resume(&self, sandbox: &str) -> anyhow::Result<Pod> {
        let pod = self.run(sandbox).await?;
        self.sandbox_has(sandbox, "Restored", "True", "Restored")
            .await?;
        Ok(pod)
    }

    /// Takes a snapshot of the Sandbox and waits until it is committed.
    pub async fn snapshot(&self, name: &str, sandbox: &str) -> anyhow::Result<()> {
        self.create(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": { "name": name }, "spec": { "sandboxName": sandbox },
        }))
        .await?;
        let (snapshots, words) = (self.snapshots(), "the snapshot is committed");
        wait::object(snapshots, name, words, LIMIT, |found| match found {
            Some(snapshot) if snapshot.is_committed() => Ok(()),
            found => Err(format!("{:?}", found.and_then(|found| found.status))),
        })
        .await
    }

    /// Sets `Running` and waits for the Pod, however it starts.
    pub async fn run(&self, sandbox: &str) -> anyhow::Result<Pod> {
        self.set_mode(sandbox, "Running").await?;
        self.sandbox_ready(sandbox).await
    }
}
