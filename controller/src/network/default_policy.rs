//! The NetworkPolicy of Sandboxes that have no SandboxTemplate: one per namespace, which selects their Pods by a label of the controller's. It is made before the first Pod that needs
//! it, and stays: without such Pods it selects nothing. Nobody owns it, because no object of a namespace lives as long as all its Sandboxes.

use std::time::Duration;

use k8s_openapi::api::{core::v1::Pod, networking::v1::NetworkPolicy};
use kube::ResourceExt;
use serde_json::{Map, Value, json};
use torpor_api::{
    Sandbox,
    annotations::{NetworkIsolation, Settings},
    extensions, labels,
};

use super::rules::{self, Cidr};
use crate::{
    blueprint,
    calls::{self, Answer},
    context::Context,
    merge_patch, outline,
    sandbox::{
        plan::{Action, Area, Plan, Step},
        validate::{Ownership, ownership},
    },
    watches::extensions::controller_of,
};

/// Name of the policy, in each namespace.
pub const NAME: &str = "torpor-default-network-policy";
/// Value of [`labels::NETWORK_POLICY`] on a Pod that the policy selects, and on the policy.
const SELECTED: &str = "default";
/// Value of the label on a Pod that is left out.
const LEFT_OUT: &str = "none";
/// How often the policy is read and written anew within one pass.
const ROUNDS: usize = 4;
/// When a Sandbox that runs is looked at again whose namespace's policy could not be brought back.
const RETRY: Duration = Duration::from_secs(60);

/// The network of a Sandbox, as the controller decides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// Nothing. Sandboxes of claims and pools have their template's policy.
    OfTemplate,
    /// Nothing, because the controller gives no policy to Sandboxes without a template.
    Off,
    /// The Sandbox asks to be left out.
    LeftOut,
    /// The strict rules.
    Strict,
}

impl Isolation {
    /// Decides it for a Sandbox. `enabled`: the controller gives a policy to Sandboxes without a template.
    pub fn of(sandbox: &Sandbox, enabled: bool) -> Self {
        let of_template = controller_of(sandbox).is_some_and(|owner| {
            let group = owner.api_version.split_once('/').map(|(group, _)| group);
            group == Some(extensions::GROUP)
        });
        if of_template {
            return Self::OfTemplate;
        }
        if !enabled {
            return Self::Off;
        }
        let settings = Settings::read(
            sandbox.metadata.annotations.as_ref(),
            sandbox.spec.pod_template.annotations(),
        );
        match settings.network_policy.unwrap_or_default() {
            NetworkIsolation::None => Self::LeftOut,
            NetworkIsolation::Default => Self::Strict,
        }
    }

    /// Value of the label on a Pod that is made.
    fn on_new_pod(self) -> Option<&'static str> {
        match self {
            Self::OfTemplate | Self::Off => None,
            Self::LeftOut => Some(LEFT_OUT),
            Self::Strict => Some(SELECTED),
        }
    }

    /// Value of the label on a Pod that has one. A Pod that has none was made before the controller gave policies: it stays as it is until it is made anew.
    fn on_labelled_pod(self) -> Option<&'static str> {
        match self {
            Self::OfTemplate => None,
            Self::Off | Self::LeftOut => Some(LEFT_OUT),
            Self::Strict => Some(SELECTED),
        }
    }
}

/// Whether a plan counts on the policy: it makes a Pod that the policy selects, or there is one.
pub fn is_needed(plan: &Plan, isolation: Isolation) -> bool {
    isolation == Isolation::Strict && (makes_pod(plan) || label_of_pod(plan).is_some())
}

fn makes_pod(plan: &Plan) -> bool {
    let makes = |step: &Step| matches!(step.action, Action::CreatePod { .. });
    plan.steps.iter().any(makes)
}

fn label_of_pod(plan: &Plan) -> Option<&str> {
    let pod = plan.pod.as_deref()?;
    pod.labels().get(labels::NETWORK_POLICY).map(String::as_str)
}

/// Puts what a Sandbox' isolation asks for into its plan. `policy` is why the policy is not in place: then no Pod is made.
pub fn amend(plan: &mut Plan, sandbox: &Sandbox, isolation: Isolation, policy: Result<(), String>) {
    if let Err(why) = policy {
        if makes_pod(plan) {
            refuse_pod(plan, why);
        } else {
            plan.requeue = Some(plan.requeue.map_or(RETRY, |sooner| sooner.min(RETRY)));
        }
    }
    for step in &mut plan.steps {
        if let Action::CreatePod { pod, .. } = &mut step.action
            && let Some(value) = isolation.on_new_pod()
        {
            pod["metadata"]["labels"][labels::NETWORK_POLICY] = value.into();
            if isolation == Isolation::Strict
                && let Some(spec) = pod["spec"].as_object_mut()
            {
                name_public_servers(spec);
            }
        }
    }
    label_existing(plan, sandbox, isolation);
}

/// As a step that fails: nothing that follows it in its area is done.
fn refuse_pod(plan: &mut Plan, why: String) {
    let mut reached = false;
    plan.steps.retain(|step| {
        reached |= matches!(step.action, Action::CreatePod { .. });
        !(reached && step.area == Area::Pod)
    });
    plan.refusals.push((Area::Pod, why));
}

/// The cluster's DNS is out of reach. A Pod in the host's network is not selected by any policy.
fn name_public_servers(spec: &mut Map<String, Value>) {
    if spec.get("hostNetwork") != Some(&Value::Bool(true)) {
        blueprint::name_public_servers(spec);
    }
}

fn label_existing(plan: &mut Plan, sandbox: &Sandbox, isolation: Isolation) {
    let Some(pod) = plan.pod.clone() else { return };
    let said = label_of_pod(plan);
    let wanted = isolation.on_labelled_pod();
    let goes = |step: &Step| matches!(step.action, Action::DeletePod { .. });
    let stays = pod.metadata.deletion_timestamp.is_none() && !plan.steps.iter().any(goes);
    if said.is_none() || said == wanted || !stays || ownership(&*pod, sandbox) != Ownership::Ours {
        return;
    }
    let label = json!({labels::NETWORK_POLICY: wanted});
    let planned = plan
        .steps
        .iter_mut()
        .find_map(|step| match &mut step.action {
            Action::PatchPod { name, patch } if *name == pod.name_any() => Some(patch),
            _ => None,
        });
    match planned {
        Some(patch) => patch["metadata"]["labels"][labels::NETWORK_POLICY] = json!(wanted),
        None => plan.steps.push(patch_labels(&pod, &label)),
    }
}

fn patch_labels(pod: &Pod, label: &Value) -> Step {
    Step {
        area: Area::Pod,
        action: Action::PatchPod {
            name: pod.name_any(),
            patch: json!({"metadata": {"uid": pod.uid(), "labels": label}}),
        },
    }
}

/// The next write to the policy of a namespace.
#[derive(Clone, Debug, PartialEq)]
enum Todo {
    Nothing,
    Create(Value),
    Patch(Value),
}

/// Decides; pure. An error says why the policy cannot be had.
fn decide(namespace: &str, found: Option<&NetworkPolicy>, except: &[Cidr]) -> Result<Todo, String> {
    let spec = json!({
        "podSelector": {"matchLabels": {labels::NETWORK_POLICY: SELECTED}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": rules::ingress(),
        "egress": rules::egress(except),
    });
    let Some(found) = found else {
        return Ok(Todo::Create(json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {
                "name": NAME,
                "namespace": namespace,
                "labels": {labels::NETWORK_POLICY: SELECTED},
            },
            "spec": spec,
        })));
    };
    if found
        .labels()
        .get(labels::NETWORK_POLICY)
        .map(String::as_str)
        != Some(SELECTED)
    {
        return Err(format!(
            "NetworkPolicy {NAME:?} exists without the label {}={SELECTED} of the controller's own, so that the Pod would be made without the strict rules. Delete that \
             NetworkPolicy or make it anew under another name; or annotate the Sandbox with {}: {LEFT_OUT:?}",
            labels::NETWORK_POLICY,
            torpor_api::annotations::NETWORK_POLICY,
        ));
    }
    let current = json!(found.spec);
    if blueprint::mean_the_same(&current, &spec) {
        return Ok(Todo::Nothing);
    }
    Ok(match merge_patch::difference(&current, &spec) {
        None => Todo::Nothing,
        Some(difference) => Todo::Patch(json!({
            "metadata": {"uid": found.uid(), "resourceVersion": found.resource_version()},
            "spec": difference,
        })),
    })
}

/// Why the policy of a namespace is not in place.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    NotOurs(String),
    #[error("NetworkPolicy {NAME:?}, without which no Pod is made: {0}")]
    Refused(calls::Error),
    #[error("NetworkPolicy {NAME:?} keeps changing")]
    Unsettled,
    /// It may be there or not.
    #[error(transparent)]
    Unknown(calls::Error),
}

/// Makes sure that the policy of a namespace is there and has the strict rules. Asks the apiserver only where the cache shows another.
pub async fn ensure(namespace: &str, context: &Context) -> Result<(), Error> {
    let (api, except) = (&context.api, &context.settings.network.except);
    let cached = context.caches.policies.get(namespace, NAME);
    let mut found = match &cached {
        Some(found) if outline::is_outline(&**found) => {
            let whole = outline::whole(api, &**found).await;
            whole.map_err(Error::Unknown)?
        }
        found => found.as_deref().cloned(),
    };
    for _ in 0..ROUNDS {
        let written = match decide(namespace, found.as_ref(), except).map_err(Error::NotOurs)? {
            Todo::Nothing => return Ok(()),
            Todo::Create(policy) => api.create::<NetworkPolicy>(namespace, policy).await,
            Todo::Patch(patch) => api.patch::<NetworkPolicy>(namespace, NAME, &patch).await,
        };
        match written {
            Ok(_) => return Ok(()),
            Err(error) => match error.answer() {
                Answer::AlreadyExists | Answer::Conflict | Answer::NotFound => {
                    found = api.get(namespace, NAME).await.map_err(Error::Unknown)?;
                }
                Answer::Unknown => return Err(Error::Unknown(error)),
                Answer::Refused => return Err(Error::Refused(error)),
            },
        }
    }
    Err(Error::Unsettled)
}

#[cfg(test)]
mod tests;
