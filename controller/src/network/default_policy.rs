//! Maintains the NetworkPolicy of Sandboxes without a SandboxTemplate, one for each namespace. It
//! selects their Pods by a label of the controller. The controller creates the policy before the
//! first Pod that needs it, and keeps it: without such Pods it selects nothing. The policy has no
//! owner, because no object of a namespace lives as long as all its Sandboxes.

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

/// Name of the policy in each namespace.
pub const NAME: &str = "torpor-default-network-policy";
/// Value of [`labels::NETWORK_POLICY`] on a selected Pod and on the policy.
const SELECTED: &str = "default";
/// Value of the label on a Pod that the policy does not select.
const LEFT_OUT: &str = "none";
/// Number of tries to write the policy within one pass.
const ROUNDS: usize = 4;
/// Time until the next pass over a running Sandbox when the policy could not be restored.
const RETRY: Duration = Duration::from_secs(60);

/// Network isolation of a Sandbox, as the controller decides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// No default policy: Sandboxes of claims and pools have their template's policy.
    OfTemplate,
    /// No default policy: the controller's flag for it is off.
    Off,
    /// No default policy: the Sandbox's annotation opts out.
    LeftOut,
    /// The strict rules.
    Strict,
}

impl Isolation {
    /// Returns the isolation of a Sandbox.
    ///
    /// `enabled` says whether the controller gives a policy to Sandboxes without a template.
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

    /// Returns the label's value for a new Pod.
    fn on_new_pod(self) -> Option<&'static str> {
        match self {
            Self::OfTemplate | Self::Off => None,
            Self::LeftOut => Some(LEFT_OUT),
            Self::Strict => Some(SELECTED),
        }
    }

    /// Returns the label's value for an existing Pod with the label.
    ///
    /// A Pod without the label was created before the controller gave policies. It stays as it is
    /// until it is created again.
    fn on_labelled_pod(self) -> Option<&'static str> {
        match self {
            Self::OfTemplate => None,
            Self::Off | Self::LeftOut => Some(LEFT_OUT),
            Self::Strict => Some(SELECTED),
        }
    }
}

/// Reports whether a plan needs the policy: it creates a Pod that the policy selects, or has one.
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

/// Applies the isolation of a Sandbox to its plan.
///
/// An error in `policy` says why the policy is not in place. The plan then creates no Pod.
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

/// Removes the creation of the Pod and the later steps of its area, as if the creation had failed.
fn refuse_pod(plan: &mut Plan, why: String) {
    let mut reached = false;
    plan.steps.retain(|step| {
        reached |= matches!(step.action, Action::CreatePod { .. });
        !(reached && step.area == Area::Pod)
    });
    plan.refusals.push((Area::Pod, why));
}

/// Names public DNS servers, because the policy blocks the cluster's DNS.
///
/// No policy selects a Pod in the host's network.
fn name_public_servers(spec: &mut Map<String, Value>) {
    if spec.get("hostNetwork") != Some(&Value::Bool(true)) {
        blueprint::name_public_servers(spec);
    }
}

fn label_existing(plan: &mut Plan, sandbox: &Sandbox, isolation: Isolation) {
    let Some(pod) = plan.pod.clone() else { return };
    let current_label = label_of_pod(plan);
    let wanted = isolation.on_labelled_pod();
    let deletes = |step: &Step| matches!(step.action, Action::DeletePod { .. });
    let stays = pod.metadata.deletion_timestamp.is_none() && !plan.steps.iter().any(deletes);
    if current_label.is_none()
        || current_label == wanted
        || !stays
        || ownership(&*pod, sandbox) != Ownership::Ours
    {
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

/// Next write to the policy of a namespace.
#[derive(Clone, Debug, PartialEq)]
enum NextWrite {
    Nothing,
    Create(Value),
    Patch(Value),
}

/// Decides the next write; pure. The error says why there can be no policy.
fn decide(
    namespace: &str,
    found: Option<&NetworkPolicy>,
    except: &[Cidr],
) -> Result<NextWrite, String> {
    let spec = json!({
        "podSelector": {"matchLabels": {labels::NETWORK_POLICY: SELECTED}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": rules::ingress(),
        "egress": rules::egress(except),
    });
    let Some(found) = found else {
        return Ok(NextWrite::Create(json!({
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
            "NetworkPolicy {NAME:?} exists without the controller's label {}={SELECTED}, so the Pod would not have the strict rules. Delete that \
             NetworkPolicy or give it another name; or annotate the Sandbox with {}: {LEFT_OUT:?}",
            labels::NETWORK_POLICY,
            torpor_api::annotations::NETWORK_POLICY,
        ));
    }
    let current = json!(found.spec);
    if blueprint::mean_the_same(&current, &spec) {
        return Ok(NextWrite::Nothing);
    }
    Ok(match merge_patch::difference(&current, &spec) {
        None => NextWrite::Nothing,
        Some(difference) => NextWrite::Patch(json!({
            "metadata": {"uid": found.uid(), "resourceVersion": found.resource_version()},
            "spec": difference,
        })),
    })
}

/// Reason why the policy of a namespace is not in place.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    NotOurs(String),
    #[error("cannot write NetworkPolicy {NAME:?}, which the Pod needs: {0}")]
    Refused(calls::Error),
    #[error("NetworkPolicy {NAME:?} keeps changing")]
    Unsettled,
    /// The outcome of a call is unknown.
    #[error(transparent)]
    Unknown(calls::Error),
}

/// Ensures that the policy of a namespace exists and has the strict rules.
///
/// It calls the apiserver only where the cache shows another state.
pub async fn ensure(namespace: &str, context: &Context) -> Result<(), Error> {
    let (api, except) = (&context.api, &context.settings.network.except);
    let cached = context.caches.policies.get(namespace, NAME);
    let mut found = match &cached {
        Some(found) if outline::is_outline(&**found) => {
            let whole = outline::read_full(api, &**found).await;
            whole.map_err(Error::Unknown)?
        }
        found => found.as_deref().cloned(),
    };
    for _ in 0..ROUNDS {
        let written = match decide(namespace, found.as_ref(), except).map_err(Error::NotOurs)? {
            NextWrite::Nothing => return Ok(()),
            NextWrite::Create(policy) => api.create::<NetworkPolicy>(namespace, policy).await,
            NextWrite::Patch(patch) => api.patch::<NetworkPolicy>(namespace, NAME, &patch).await,
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
