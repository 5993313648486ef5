//! World with one Sandbox that tests drive pass by pass. Caches are refreshed only on request, so
//! every stale view is reproducible.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use torpor_api::Sandbox;
use torpor_controller::{calls, context::Context, sandbox, settings::Settings};

use crate::{
    apiserver::{Apiserver, Write},
    cluster::is_terminating,
    objects::{NS, ready_pod, running, runtime_class, sandbox_node},
};

pub(crate) struct World {
    pub(crate) api: Apiserver,
    pub(crate) context: Arc<Context>,
}

/// Status, reason and message of a condition, or type, reason and note of an Event.
pub(crate) type ConditionText = (String, String, String);

/// Reasons of the Events that every Sandbox has.
const LIFECYCLE: [&str; 7] = [
    "SandboxPodCreated",
    "SandboxPodCreateFailed",
    "SandboxReady",
    "SandboxSuspended",
    "SandboxExpired",
    "PodSucceeded",
    "PodFailed",
];

/// Reports whether an Event is one that every Sandbox has.
pub(crate) fn is_lifecycle_event(reason: &str) -> bool {
    LIFECYCLE.contains(&reason)
}

/// Returns types, reasons and notes of all Events in order.
pub(crate) fn events(api: &Apiserver) -> Vec<ConditionText> {
    let mut events = api.list("events");
    events.sort_by_key(|event| event["eventTime"].as_str().unwrap().to_owned());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    events
        .iter()
        .map(|event| {
            (
                text(&event["type"]),
                text(&event["reason"]),
                text(&event["note"]),
            )
        })
        .collect()
}

/// Time that no pass writes.
const LONG_AGO: &str = "2020-01-01T00:00:00Z";

impl World {
    /// Returns a world with one node "n1" that can hibernate with the RuntimeClass "torpor".
    pub(crate) fn new() -> Self {
        let api = Apiserver::new();
        api.create("runtimeclasses", runtime_class());
        api.create("sandboxnodes", sandbox_node("n1"));
        api.create("nodes", json!({"metadata": {"name": "n1"}}));
        let context = context(&api, Duration::from_secs(20));
        Self { api, context }
    }

    /// Returns a world whose controller's calls time out after `timeout`.
    pub(crate) fn with_timeout(timeout: Duration) -> Self {
        let world = Self::new();
        let context = context(&world.api, timeout);
        Self { context, ..world }
    }

    /// Returns a world whose controller's calls time out after 200 ms.
    pub(crate) fn impatient() -> Self {
        Self::with_timeout(Duration::from_millis(200))
    }

    /// Returns a world whose controller has these settings.
    pub(crate) fn with_settings(settings: Settings) -> Self {
        let world = Self::new();
        let calls = calls::Apiserver::new(world.api.client(), Duration::from_secs(20));
        let context = Context::new(calls, "cluster.local".to_owned(), settings);
        Self {
            context: Arc::new(context),
            ..world
        }
    }

    /// Returns the same cluster with a new controller whose caches are empty.
    pub(crate) fn restarted(self) -> Self {
        let context = context(&self.api, Duration::from_secs(20));
        Self { context, ..self }
    }

    /// Refreshes every cache.
    pub(crate) fn sync(&self) {
        crate::sync::all(&self.api, &self.context);
    }

    /// Returns the Sandbox "s".
    pub(crate) fn sandbox(&self) -> Value {
        self.api
            .get("sandboxes", NS, "s")
            .expect("the Sandbox exists")
    }

    pub(crate) fn pod(&self) -> Option<Value> {
        self.api.get("pods", NS, "s")
    }

    /// Reports whether the Pod is being deleted.
    pub(crate) fn pod_is_terminating(&self) -> bool {
        is_terminating(&self.pod().expect("the Pod exists"))
    }

    pub(crate) fn pod_annotation(&self, key: &str) -> Option<String> {
        let pod = self.pod().expect("the Pod exists");
        let value = pod["metadata"]["annotations"].get(key)?;
        Some(value.as_str().expect("a string").to_owned())
    }

    pub(crate) fn pod_uid(&self) -> String {
        self.pod().expect("the Pod exists")["metadata"]["uid"]
            .as_str()
            .unwrap()
            .to_owned()
    }

    pub(crate) fn snapshots(&self) -> Vec<Value> {
        self.api.list("sandboxsnapshots")
    }

    /// Returns the name of the only snapshot.
    pub(crate) fn snapshot(&self) -> String {
        let all = self.snapshots();
        assert_eq!(all.len(), 1, "{all:#?}");
        all[0]["metadata"]["name"].as_str().unwrap().to_owned()
    }

    /// Runs a pass over the present Sandbox without a refresh of the caches.
    pub(crate) async fn stale_pass(&self) -> Result<Option<Duration>, sandbox::Error> {
        let Some(object) = self.api.get("sandboxes", NS, "s") else {
            return Ok(None);
        };
        let object: Sandbox = serde_json::from_value(object).unwrap();
        sandbox::reconcile(Arc::new(object), Arc::clone(&self.context)).await
    }

    /// Runs a pass with refreshed caches.
    pub(crate) async fn pass(&self) -> Result<Option<Duration>, sandbox::Error> {
        self.sync();
        self.stale_pass().await
    }

    /// Runs passes until one writes nothing.
    pub(crate) async fn settle(&self) {
        for _ in 0..20 {
            self.api.take_writes();
            let result = self.pass().await;
            if self.api.take_writes().is_empty() {
                result.expect("settles without an error");
                return;
            }
        }
        panic!("it never settles:\n{:#}", self.sandbox());
    }

    /// Runs passes until one has no successful write, and returns the last error.
    pub(crate) async fn settle_with_errors(&self) -> Option<sandbox::Error> {
        for _ in 0..20 {
            self.api.take_writes();
            let result = self.pass().await;
            if self.api.take_writes().iter().all(|write| write.code >= 400) {
                return result.err();
            }
        }
        panic!("it never settles:\n{:#}", self.sandbox());
    }

    /// Runs a pass and returns its writes as `verb kind`.
    pub(crate) async fn writes_of_a_pass(&self) -> Vec<String> {
        self.api.take_writes();
        let _ = self.pass().await;
        self.api
            .take_writes()
            .iter()
            .map(|Write { verb, kind, .. }| format!("{verb} {kind}"))
            .collect()
    }

    pub(crate) fn edit_sandbox(&self, patch: &Value) {
        let spec = patch.get("spec").is_some();
        let generation = self.generation();
        self.api.edit("sandboxes", NS, "s", patch);
        if spec {
            let next = json!({"metadata": {"generation": generation + 1}});
            self.api.edit("sandboxes", NS, "s", &next);
        }
    }

    pub(crate) fn edit_pod(&self, patch: &Value) {
        self.api.edit("pods", NS, "s", patch);
    }

    pub(crate) fn pod_becomes_ready(&self) {
        let mut ready = ready_pod("n1");
        let pod = self.pod().expect("the Pod exists");
        let containers = pod["spec"]["containers"].as_array().unwrap();
        let statuses = containers
            .iter()
            .map(|container| running(container["name"].as_str().unwrap()));
        ready["status"]["containerStatuses"] = statuses.collect();
        self.edit_pod(&ready);
    }

    /// Removes a Pod that is being deleted, as its kubelet does.
    pub(crate) fn pod_ends(&self) {
        let pod = self.pod().expect("the Pod exists");
        assert!(
            is_terminating(&pod),
            "the Pod is not being deleted: {pod:#}"
        );
        self.api.remove("pods", NS, "s");
    }

    /// Adds a condition to the Pod, as the agent does.
    pub(crate) fn set_pod_condition(&self, condition: Value) {
        let pod = self.pod().unwrap();
        let mut all = pod["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        all.retain(|other| other["type"] != condition["type"]);
        all.push(condition);
        self.edit_pod(&json!({"status": {"conditions": all}}));
    }

    /// Returns the name of the SandboxSnapshot of a suspension.
    pub(crate) fn image_of_suspension(&self) -> Option<String> {
        let all = self.snapshots();
        let own = all.iter().find(|one| one["spec"]["reason"] == "Suspend")?;
        own["metadata"]["name"].as_str().map(str::to_owned)
    }

    /// The node's agent has not reported for long.
    pub(crate) fn node_falls_silent(&self, node: &str) {
        let old_heartbeat = json!({"status": {"heartbeatTime": LONG_AGO}});
        self.api.edit("sandboxnodes", "", node, &old_heartbeat);
    }

    /// Removes a Node. Its SandboxNode stays, since its agent no longer writes it.
    pub(crate) fn node_leaves(&self, node: &str) {
        self.node_falls_silent(node);
        self.api.remove("nodes", "", node);
    }

    pub(crate) fn edit_snapshot(&self, name: &str, patch: &Value) {
        self.api.edit("sandboxsnapshots", NS, name, patch);
    }

    /// Removes the finalizers of a snapshot, as the agent does once it has deleted the bytes.
    pub(crate) fn image_is_gone(&self, name: &str) {
        self.edit_snapshot(name, &json!({"metadata": {"finalizers": []}}));
    }

    /// Creates the Sandbox and brings it up.
    pub(crate) async fn ready(&self, sandbox: Value) {
        self.api.create("sandboxes", sandbox);
        self.settle().await;
        self.pod_becomes_ready();
        self.settle().await;
        assert_eq!(
            self.condition("Ready").unwrap().0,
            "True",
            "{:#}",
            self.sandbox()
        );
    }

    /// Returns the generation of the Sandbox.
    pub(crate) fn generation(&self) -> u64 {
        self.sandbox()["metadata"]["generation"].as_u64().unwrap()
    }

    fn whole_condition(&self, type_: &str) -> Option<Value> {
        let sandbox = self.sandbox();
        let all = sandbox["status"]["conditions"].as_array()?;
        let found = all.iter().find(|condition| condition["type"] == type_)?;
        Some(found.clone())
    }

    /// Returns status, reason and message of a condition of the Sandbox.
    pub(crate) fn condition(&self, type_: &str) -> Option<ConditionText> {
        let found = self.whole_condition(type_)?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Some((
            text(&found["status"]),
            text(&found["reason"]),
            text(&found["message"]),
        ))
    }

    /// Checks a condition of the present generation.
    #[track_caller]
    pub(crate) fn assert_condition(&self, type_: &str, status: &str, reason: &str, message: &str) {
        self.assert_condition_of_generation(self.generation(), type_, status, reason, message);
    }

    /// Checks a condition of an earlier generation, since which nothing has been observed.
    #[track_caller]
    pub(crate) fn assert_condition_of_generation(
        &self,
        generation: u64,
        type_: &str,
        status: &str,
        reason: &str,
        message: &str,
    ) {
        let found = self.condition(type_);
        let wanted = (status.to_owned(), reason.to_owned(), message.to_owned());
        let shown = &self.sandbox()["status"];
        assert_eq!(found, Some(wanted), "{shown:#}");
        let observed = &self.whole_condition(type_).unwrap()["observedGeneration"];
        assert_eq!(*observed, generation, "{type_} in {shown:#}");
    }

    /// Backdates all conditions of the Sandbox, so that [`Self::has_moved`] detects later changes
    /// of status.
    pub(crate) fn let_time_pass(&self) {
        let mut all = self.sandbox()["status"]["conditions"].clone();
        for condition in all.as_array_mut().unwrap() {
            condition["lastTransitionTime"] = LONG_AGO.into();
        }
        let old = json!({"status": {"conditions": all}});
        self.api.edit("sandboxes", NS, "s", &old);
    }

    /// Reports whether the `lastTransitionTime` of a condition changed since
    /// [`Self::let_time_pass`].
    pub(crate) fn has_moved(&self, type_: &str) -> bool {
        self.whole_condition(type_).unwrap()["lastTransitionTime"] != LONG_AGO
    }

    pub(crate) fn condition_types(&self) -> Vec<String> {
        let sandbox = self.sandbox();
        let all = sandbox["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        all.iter()
            .map(|c| c["type"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Returns the reasons of all Events except those of [`LIFECYCLE`].
    pub(crate) fn events(&self) -> Vec<String> {
        let events = events(&self.api).into_iter();
        events
            .map(|(_, reason, _)| reason)
            .filter(|reason| !is_lifecycle_event(reason))
            .collect()
    }
}

fn context(api: &Apiserver, timeout: Duration) -> Arc<Context> {
    let settings = Settings {
        sandbox_workers: 4,
        ..Settings::default()
    };
    Arc::new(Context::new(
        calls::Apiserver::new(api.client(), timeout),
        "cluster.local".to_owned(),
        settings,
    ))
}
