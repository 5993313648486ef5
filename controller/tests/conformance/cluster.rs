//! Cluster of templates, pools, claims and Sandboxes that tests drive pass by pass, with any number
//! of controllers.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio::sync::Semaphore;
use torpor_api::{SandboxTemplate, extensions::NetworkPolicyManagement};
use torpor_controller::{
    calls, claim, context::Context, pool, sandbox, settings::Settings, template,
};

use crate::{
    apiserver::{Apiserver, Write},
    objects::NS,
    sync, world,
};

/// Reasons of Ready at which clients (upstream's SDKs) stop waiting.
const GIVEN_UP: [&str; 7] = [
    "InvalidMetadata",
    "EnvVarsInjectionRejected",
    "VolumeClaimTemplatesError",
    "ClaimExpired",
    "SandboxExpired",
    "WarmPoolNotFound",
    "TemplateNotFound",
];

pub(crate) struct Cluster {
    pub(crate) api: Apiserver,
    pub(crate) context: Arc<Context>,
}

/// Returns the status that makes a Pod ready, with the node and IP of this address number.
pub(crate) fn ready_at(address: usize) -> Value {
    let node = format!("n{}", address % 3);
    let ip = format!("10.0.{}.{}", address / 250, address % 250 + 1);
    let mut pod = crate::objects::ready_pod(&node);
    pod["status"]["podIPs"] = json!([{"ip": ip}]);
    pod
}

impl Cluster {
    pub(crate) fn new() -> Self {
        Self::with(settings())
    }

    pub(crate) fn with(settings: Settings) -> Self {
        let api = Apiserver::with_clock();
        let context = context(&api, settings, Duration::from_secs(20));
        Self { api, context }
    }

    /// Returns a cluster with a pool "p" of this many Ready members.
    pub(crate) async fn filled(replicas: usize, pool: Value) -> Self {
        let cluster = Self::new();
        cluster.template(json!({}));
        cluster.pool(replicas, pool);
        cluster.settle().await;
        cluster
    }

    /// Returns the same cluster with another controller, whose caches are empty.
    pub(crate) fn another(&self) -> Self {
        let settings = self.context.settings.clone();
        Self {
            api: self.api.clone(),
            context: context(&self.api, settings, Duration::from_secs(20)),
        }
    }

    /// Returns the same cluster with another controller, whose calls time out after 50 ms.
    pub(crate) fn impatient(&self) -> Self {
        let settings = self.context.settings.clone();
        Self {
            api: self.api.clone(),
            context: context(&self.api, settings, Duration::from_millis(50)),
        }
    }

    /// Returns the same cluster with another controller, whose calls each wait for the gate.
    pub(crate) fn gated(&self, gate: &Arc<Semaphore>) -> Self {
        let client = self.api.gated_client(gate);
        let calls = calls::Apiserver::new(client, Duration::from_secs(120));
        let settings = self.context.settings.clone();
        Self {
            api: self.api.clone(),
            context: Arc::new(Context::new(calls, "cluster.local".to_owned(), settings)),
        }
    }

    pub(crate) fn sync(&self) {
        sync::all(&self.api, &self.context);
    }

    // Passes.

    /// Runs a pass over a claim without a refresh of the caches.
    pub(crate) async fn stale_claim_pass(
        &self,
        name: &str,
    ) -> Result<Option<Duration>, claim::Error> {
        let Some(found) = self.context.caches.claims.get(NS, name) else {
            return Ok(None);
        };
        claim::reconcile(found, Arc::clone(&self.context)).await
    }

    pub(crate) async fn claim_pass(&self, name: &str) -> Result<Option<Duration>, claim::Error> {
        self.sync();
        self.stale_claim_pass(name).await
    }

    pub(crate) async fn stale_pool_pass(
        &self,
        name: &str,
    ) -> Result<Option<Duration>, pool::Error> {
        let Some(found) = self.context.caches.pools.get(NS, name) else {
            return Ok(None);
        };
        pool::reconcile(found, Arc::clone(&self.context)).await
    }

    pub(crate) async fn pool_pass(&self, name: &str) -> Result<Option<Duration>, pool::Error> {
        self.sync();
        self.stale_pool_pass(name).await
    }

    pub(crate) async fn template_pass(
        &self,
        name: &str,
    ) -> Result<Option<Duration>, template::Error> {
        self.sync();
        let found = self.context.caches.templates.get(NS, name).unwrap();
        template::reconcile(found, Arc::clone(&self.context)).await
    }

    /// Runs a pass over every Sandbox.
    pub(crate) async fn sandbox_passes(&self) {
        self.sync();
        self.stale_sandbox_passes().await;
    }

    /// Runs a pass over every Sandbox without a refresh of the caches.
    pub(crate) async fn stale_sandbox_passes(&self) {
        for found in self.context.caches.sandboxes.filtered(|_| true) {
            let _ = sandbox::reconcile(found, Arc::clone(&self.context)).await;
        }
    }

    /// Runs a pass over every object.
    pub(crate) async fn passes(&self) {
        for template in self.api.list("sandboxtemplates") {
            let _ = self.template_pass(name(&template)).await;
        }
        for claim in self.api.list("sandboxclaims") {
            let _ = self.claim_pass(name(&claim)).await;
        }
        for pool in self.api.list("sandboxwarmpools") {
            let _ = self.pool_pass(name(&pool)).await;
        }
        self.sandbox_passes().await;
    }

    /// Runs passes until they write nothing. Pods become ready meanwhile.
    pub(crate) async fn settle(&self) {
        for _ in 0..30 {
            self.api.take_writes();
            self.passes().await;
            let started = self.kubelets();
            if self.api.take_writes().is_empty() && !started {
                return;
            }
        }
        panic!("it never settles: {:#?}", self.api.take_writes());
    }

    /// Starts every pending Pod and advances the termination of every Pod with a deletion
    /// timestamp.
    ///
    /// Termination has two steps, as with a kubelet since 1.27: it reports the final phase, then
    /// removes the Pod. Returns true if any Pod changed.
    pub(crate) fn kubelets(&self) -> bool {
        let mut any = false;
        for (at, pod) in self.api.list("pods").into_iter().enumerate() {
            let phase = &pod["status"]["phase"];
            if is_terminating(&pod) && (phase == "Succeeded" || phase == "Failed") {
                self.api.remove("pods", NS, name(&pod));
            } else if is_terminating(&pod) {
                let phase = ["Failed", "Succeeded"][at % 2];
                let ended = json!({"status": {"phase": phase}});
                self.api.edit("pods", NS, name(&pod), &ended);
            } else if pod["status"]["phase"] == "Pending" {
                self.api.edit("pods", NS, name(&pod), &ready_at(at));
            } else {
                continue;
            }
            any = true;
        }
        any
    }

    /// Returns the writes since the last call as `verb kind`, without Events.
    pub(crate) fn writes(&self) -> Vec<String> {
        let writes = self.api.take_writes();
        writes
            .iter()
            .map(|Write { verb, kind, .. }| format!("{verb} {kind}"))
            .collect()
    }

    /// Returns the writes since the last call as `verb kind`, including Events.
    pub(crate) fn writes_with_events(&self) -> Vec<String> {
        let writes = self.api.take_all_writes();
        writes
            .iter()
            .map(|Write { verb, kind, .. }| format!("{verb} {kind}"))
            .collect()
    }

    // Objects.

    /// Creates a template with its NetworkPolicy, as if the controller had reconciled it. An
    /// existing NetworkPolicy of the name stays.
    pub(crate) fn template(&self, change: Value) {
        self.new_template(change);
        let found = self.api.get("sandboxtemplates", NS, "t").unwrap();
        let Ok(template) = serde_json::from_value::<SandboxTemplate>(found) else {
            return;
        };
        let managed = template.spec.network_policy_management == NetworkPolicyManagement::Managed;
        let name = template::plan::policy_name(&template);
        if managed && self.api.get("networkpolicies", NS, &name).is_none() {
            let policy = template::plan::policy(&template, &self.context.settings.network.except);
            self.api.create("networkpolicies", policy);
        }
    }

    /// Creates a template without its NetworkPolicy.
    pub(crate) fn new_template(&self, change: Value) {
        let template = merged(
            json!({
                "metadata": {"name": "t", "namespace": NS},
                "spec": {"podTemplate": {"spec": {"containers": [{"name": "c", "image": "img"}]}}},
            }),
            &change,
        );
        self.api.create("sandboxtemplates", template);
    }

    pub(crate) fn pool(&self, replicas: usize, change: Value) {
        let pool = merged(
            json!({
                "metadata": {"name": "p", "namespace": NS},
                "spec": {"replicas": replicas, "sandboxTemplateRef": {"name": "t"}},
            }),
            &change,
        );
        self.api.create("sandboxwarmpools", pool);
    }

    pub(crate) fn claim(&self, name: &str, change: Value) {
        let claim = merged(
            json!({
                "metadata": {"name": name, "namespace": NS},
                "spec": {"warmPoolRef": {"name": "p"}},
            }),
            &change,
        );
        self.api.create("sandboxclaims", claim);
    }

    /// Returns two Sandboxes of a template: a former pool member and one that started cold.
    pub(crate) async fn warm_and_cold(&self, template: Value) -> [String; 2] {
        self.template(template);
        self.pool(1, json!({}));
        self.settle().await;
        self.claim("warm", json!({}));
        self.claim("cold", json!({}));
        self.settle().await;
        ["warm", "cold"].map(|claim| self.held_by(claim).expect("it has one"))
    }

    /// Returns the members of a pool with the strategy Recreate before and after a change of its
    /// template.
    pub(crate) async fn members_over(&self, template: Value, change: &Value) -> [Vec<String>; 2] {
        self.template(template);
        self.pool(2, json!({"spec": {"updateStrategy": {"type": "Recreate"}}}));
        self.settle().await;
        let before = self.members();
        self.edit("sandboxtemplates", "t", change);
        self.settle().await;
        [before, self.members()]
    }

    /// Applies a user's change; a change of the spec increments the generation.
    pub(crate) fn edit(&self, kind: &str, name: &str, patch: &Value) {
        let object = self.api.get(kind, NS, name).unwrap();
        self.api.edit(kind, NS, name, patch);
        if patch.get("spec").is_some() {
            let generation = object["metadata"]["generation"].as_u64().unwrap() + 1;
            let next = json!({"metadata": {"generation": generation}});
            self.api.edit(kind, NS, name, &next);
        }
    }

    pub(crate) fn get_claim(&self, name: &str) -> Value {
        self.api
            .get("sandboxclaims", NS, name)
            .expect("the claim exists")
    }

    pub(crate) fn get_pool(&self, name: &str) -> Value {
        self.api
            .get("sandboxwarmpools", NS, name)
            .expect("the pool exists")
    }

    pub(crate) fn get_sandbox(&self, name: &str) -> Value {
        self.api
            .get("sandboxes", NS, name)
            .expect("the Sandbox exists")
    }

    /// Returns the name of the Sandbox in a claim's status.
    pub(crate) fn held_by(&self, claim: &str) -> Option<String> {
        let claim = self.get_claim(claim);
        claim["status"]["sandbox"]["name"]
            .as_str()
            .map(str::to_owned)
    }

    /// Returns the names of the Sandboxes that an object controls.
    pub(crate) fn controlled_by(&self, owner: &Value) -> Vec<String> {
        let uid = &owner["metadata"]["uid"];
        let all = self.api.list("sandboxes");
        all.iter()
            .filter(|sandbox| controller(sandbox).is_some_and(|by| by["uid"] == *uid))
            .map(|sandbox| name(sandbox).to_owned())
            .collect()
    }

    /// Returns the names of the members of the pool "p".
    pub(crate) fn members(&self) -> Vec<String> {
        self.controlled_by(&self.get_pool("p"))
    }

    /// Returns status, reason and message of a claim's condition.
    pub(crate) fn claim_condition(
        &self,
        claim: &str,
        type_: &str,
    ) -> Option<(String, String, String)> {
        condition_of(&self.get_claim(claim), type_)
    }

    #[track_caller]
    pub(crate) fn assert_claim_ready(
        &self,
        claim: &str,
        status: &str,
        reason: &str,
        message: &str,
    ) {
        let wanted = (status.to_owned(), reason.to_owned(), message.to_owned());
        assert_eq!(
            self.claim_condition(claim, "Ready"),
            Some(wanted),
            "{:#}",
            self.get_claim(claim)
        );
    }

    /// Checks invariants of claims that request nothing forbidden.
    ///
    /// A Ready claim's Sandbox names its Pod, and no claim has a reason at which clients stop
    /// waiting.
    #[track_caller]
    pub(crate) fn check_claims(&self) {
        for claim in self.api.list("sandboxclaims") {
            let Some((status, reason, _)) = condition_of(&claim, "Ready") else {
                continue;
            };
            assert!(!GIVEN_UP.contains(&&*reason), "{claim:#}");
            assert_eq!(condition_of(&claim, "Finished"), None, "{claim:#}");
            let named = claim["status"]["sandbox"]["name"].as_str();
            let held = named.and_then(|named| self.api.get("sandboxes", NS, named));
            let owns = |held: &Value| {
                controller(held).is_some_and(|by| by["uid"] == claim["metadata"]["uid"])
            };
            if status == "True"
                && let Some(held) = held.filter(owns).filter(|held| !is_terminating(held))
            {
                let pod = &held["metadata"]["annotations"]["agents.x-k8s.io/pod-name"];
                assert!(
                    pod.is_string() || is_of_namesake(&claim, &held),
                    "{claim:#} is Ready, but {held:#}"
                );
            }
        }
    }

    /// Returns reasons and notes of all Events except those that every Sandbox has.
    pub(crate) fn events(&self) -> Vec<(String, String)> {
        let events = world::events(&self.api).into_iter();
        events
            .map(|(_, reason, note)| (reason, note))
            .filter(|(reason, _)| !world::is_lifecycle_event(reason))
            .collect()
    }
}

/// Reports whether a claim's status is about a deleted Sandbox whose name a newer Sandbox has.
fn is_of_namesake(claim: &Value, held: &Value) -> bool {
    let version = |object: &Value| {
        let version = object["metadata"]["resourceVersion"].as_str();
        version.unwrap().parse::<u64>().unwrap()
    };
    held["metadata"]["annotations"]["torpor.dev/replaces"] == held["metadata"]["name"]
        && version(claim) < version(held)
}

/// Returns upstream's defaults, except that a pool's status is written at each change so that tests
/// observe it.
pub(crate) fn settings() -> Settings {
    let mut settings = Settings {
        extensions: true,
        ..Settings::default()
    };
    settings.pools.status_interval = Duration::ZERO;
    settings
}

pub(crate) fn context(api: &Apiserver, settings: Settings, timeout: Duration) -> Arc<Context> {
    Arc::new(Context::new(
        calls::Apiserver::new(api.client(), timeout),
        "cluster.local".to_owned(),
        settings,
    ))
}

pub(crate) fn merged(mut object: Value, change: &Value) -> Value {
    torpor_test_apiserver::merge_patch::apply(&mut object, change);
    object
}

pub(crate) fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap()
}

pub(crate) fn is_terminating(object: &Value) -> bool {
    object["metadata"].get("deletionTimestamp").is_some()
}

/// Returns the controlling owner reference of an object.
pub(crate) fn controller(object: &Value) -> Option<&Value> {
    let owners = object["metadata"]["ownerReferences"].as_array()?;
    owners.iter().find(|owner| owner["controller"] == true)
}

/// Returns the patch that removes the Pod's name from a Sandbox.
pub(crate) fn nameless() -> Value {
    json!({"metadata": {"annotations": {"agents.x-k8s.io/pod-name": null}}})
}

pub(crate) fn condition_of(object: &Value, type_: &str) -> Option<(String, String, String)> {
    let all = object["status"]["conditions"].as_array()?;
    let found = all.iter().find(|condition| condition["type"] == type_)?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Some((
        text(&found["status"]),
        text(&found["reason"]),
        text(&found["message"]),
    ))
}
