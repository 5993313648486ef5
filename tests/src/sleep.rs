//! Hibernates and wakes Pods by their annotation, and waits for their conditions.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use torpor_api::annotations::HIBERNATE;
use torpor_api::conditions::POD_HIBERNATED;
use torpor_api::reasons::hibernated::{AWAKE, DOZING};

use crate::case::{Case, condition};
use crate::wait;

/// Time to fall asleep: a save of a small sandbox takes a tenth of a second, four on two busy cores
/// take longer.
pub const SLEEP_LIMIT: Duration = Duration::from_secs(40);

impl Case {
    /// Requests hibernation and waits until the Pod's condition shows that it sleeps.
    pub async fn hibernate(&self, pod: &str) -> anyhow::Result<Pod> {
        self.annotate(pod, HIBERNATE, Some("true")).await?;
        self.asleep(pod).await
    }

    /// Withdraws the request for hibernation and waits until the Pod's condition shows that it is
    /// awake.
    pub async fn wake(&self, pod: &str) -> anyhow::Result<Pod> {
        self.annotate(pod, HIBERNATE, None).await?;
        let awake = |pod: &Pod| condition(pod, POD_HIBERNATED).1 == AWAKE && is_ready(pod);
        self.pod_until(pod, "it is awake", SLEEP_LIMIT, awake).await
    }

    /// Returns the number of a Pod that counts ([`crate::pods::COUNT`]) by an exec, which wakes it.
    pub async fn counted(&self, pod: &str) -> anyhow::Result<u64> {
        // If the agent dies during a wake, the shim's command keeps the lock: the exec waits for
        // that command or is tried again.
        wait::until("the Pod answers", SLEEP_LIMIT, async || {
            let ran = self.exec(pod, "a", &["cat", "/n"]).await?;
            Ok(if ran.code == 0 {
                // The file is empty between its opening and the write.
                let text = ran.ok()?;
                text.parse().map_err(|_| format!("{text:?} is no number"))
            } else {
                Err(ran.err)
            })
        })
        .await
    }

    /// Returns the Pod once its condition shows that it sleeps.
    pub async fn asleep(&self, pod: &str) -> anyhow::Result<Pod> {
        let asleep = |pod: &Pod| condition(pod, POD_HIBERNATED).0 == "True";
        self.pod_until(pod, "it sleeps", SLEEP_LIMIT, asleep).await
    }

    /// Returns the Pod once its condition shows that it dozes.
    ///
    /// Its memory may still be on its way to swap: see [`crate::node::Node::dozes`].
    pub async fn dozes(&self, pod: &str) -> anyhow::Result<Pod> {
        self.pod_until(pod, "it dozes", SLEEP_LIMIT, is_dozing)
            .await
    }

    /// Waits until the node has no image of the Pod, whole or partial.
    pub async fn no_image_left(&self, uid: &str) -> anyhow::Result<()> {
        wait::until("the Pod's images go", SLEEP_LIMIT, async || {
            let left = self.node.images_of(&self.namespace, uid);
            wait::holds(left.is_empty(), || format!("{left:?}"))
        })
        .await
    }
}

/// Reports whether the Pod's condition shows that it dozes.
pub fn is_dozing(pod: &Pod) -> bool {
    condition(pod, POD_HIBERNATED).1 == DOZING
}

/// Reports whether all containers of the Pod are ready.
pub fn is_ready(pod: &Pod) -> bool {
    condition(pod, "Ready").0 == "True"
}

/// Returns the number of restarts of all the Pod's containers.
pub fn restarts(pod: &Pod) -> i32 {
    let status = pod.status.as_ref();
    let containers = status
        .and_then(|status| status.container_statuses.as_deref())
        .unwrap_or_default();
    containers
        .iter()
        .map(|container| container.restart_count)
        .sum()
}
