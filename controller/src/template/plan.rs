//! No client required. Plans a template's label and NetworkPolicy.

use std::sync::Arc;

use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPort};
use kube::ResourceExt;
use serde_json::{Value, json};
use torpor_api::{SandboxTemplate, extensions::NetworkPolicyManagement, labels, name_hash};

use crate::{
    blueprint, merge_patch,
    network::rules::{self, Cidr},
    outline,
    owners::owner_reference,
    watches::extensions::controller_of,
};

/// Input of the plan.
#[derive(Clone, Debug)]
pub struct Observed {
    pub template: Arc<SandboxTemplate>,
    /// NetworkPolicy with the name of the template's own, whatever controls it.
    pub policy: Option<Arc<NetworkPolicy>>,
    /// Ranges that the operator blocks in addition to the private addresses.
    pub except: Vec<Cidr>,
}

/// Reason why no Sandbox of a template may be created yet.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unisolated {
    #[error(
        "NetworkPolicy {0:?} of the SandboxTemplate does not exist yet; the Sandbox is created as soon as it does"
    )]
    Missing(String),
    #[error(
        "NetworkPolicy {0:?} does not have the rules of the SandboxTemplate yet; the Sandbox is created as soon as it does"
    )]
    Outdated(String),
    #[error(
        "NetworkPolicy {0:?} exists and is not controlled by the SandboxTemplate, so that no Sandbox is created without the template's rules. \
         Delete that NetworkPolicy or recreate it under another name; or set spec.networkPolicyManagement: Unmanaged in the SandboxTemplate"
    )]
    NotOwned(String),
}

impl Unisolated {
    /// Reports whether the controller itself is about to resolve the reason.
    pub fn is_passing(&self) -> bool {
        !matches!(self, Self::NotOwned(_))
    }
}

/// Checks whether a Sandbox of the template may be created: the template's NetworkPolicy exists, is
/// the template's own, and has the template's rules. `policy` is the NetworkPolicy with its name.
pub fn isolation(
    template: &SandboxTemplate,
    policy: Option<&NetworkPolicy>,
    except: &[Cidr],
) -> Result<(), Unisolated> {
    if !is_managed(template) {
        return Ok(());
    }
    let name = policy_name(template);
    match policy {
        None => Err(Unisolated::Missing(name)),
        Some(policy) if !owns(template, policy) => Err(Unisolated::NotOwned(name)),
        // The next policy with that name is created once this one is gone.
        Some(policy) if policy.metadata.deletion_timestamp.is_some() => {
            Err(Unisolated::Missing(name))
        }
        Some(policy) if update(policy, template, except).is_some() => {
            Err(Unisolated::Outdated(name))
        }
        Some(_) => Ok(()),
    }
}

fn is_managed(template: &SandboxTemplate) -> bool {
    template.spec.network_policy_management == NetworkPolicyManagement::Managed
}

fn owns(template: &SandboxTemplate, policy: &NetworkPolicy) -> bool {
    let owner = controller_of(policy);
    owner.is_some_and(|owner| Some(&owner.uid) == template.metadata.uid.as_ref())
}

/// Step of a plan: one call.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    LabelTemplate(Value),
    CreatePolicy(Value),
    PatchPolicy(Value),
    DeletePolicy { uid: String },
}

/// Suffix of the name of a template's policy.
const POLICY_SUFFIX: &str = "-network-policy";

/// Returns the name of the policy that the Sandboxes of a template share.
pub fn policy_name(template: &SandboxTemplate) -> String {
    template.name_any() + POLICY_SUFFIX
}

/// Returns the name of the template whose policy would have this name.
pub fn template_of_policy(name: &str) -> Option<&str> {
    name.strip_suffix(POLICY_SUFFIX)
}

/// Plans the steps for one template; pure. The error is the name of a policy that another object
/// controls.
pub fn plan(observed: &Observed) -> Result<Vec<Action>, String> {
    let template = &*observed.template;
    if template.metadata.deletion_timestamp.is_some() {
        return Ok(Vec::new());
    }
    let mut steps = Vec::new();
    let hash = name_hash(&template.name_any());
    if template.labels().get(labels::SANDBOX_TEMPLATE_REF_HASH) != Some(&hash) {
        steps.push(Action::LabelTemplate(json!({"metadata": {
            "uid": template.uid(),
            "labels": {labels::SANDBOX_TEMPLATE_REF_HASH: hash},
        }})));
    }
    let (managed, except) = (is_managed(template), &observed.except);
    let ours = observed
        .policy
        .as_ref()
        .is_some_and(|policy| owns(template, policy));
    match (&observed.policy, ours) {
        (Some(policy), true) if managed => steps.extend(update(policy, template, except)),
        (Some(policy), true) => steps.push(Action::DeletePolicy {
            uid: policy.uid().unwrap_or_default(),
        }),
        (Some(policy), false) if managed => return Err(policy.name_any()),
        (None, _) if managed => steps.push(Action::CreatePolicy(policy(template, except))),
        _ => {}
    }
    Ok(steps)
}

fn update(policy: &NetworkPolicy, template: &SandboxTemplate, except: &[Cidr]) -> Option<Action> {
    let (found, wanted) = (json!(policy.spec), spec(template, except));
    if outline::digest(policy) == Some(&*outline::digest_of(&blueprint::normal_form(&wanted))) {
        return None;
    }
    if blueprint::mean_the_same(&found, &wanted) {
        return None;
    }
    let difference = merge_patch::difference(&found, &wanted)?;
    Some(Action::PatchPolicy(json!({
        "metadata": {"uid": policy.uid(), "resourceVersion": policy.resource_version()},
        "spec": difference,
    })))
}

/// Returns the policy to create.
pub fn policy(template: &SandboxTemplate, except: &[Cidr]) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": policy_name(template),
            "namespace": template.namespace(),
            "ownerReferences": [owner_reference(template)],
        },
        "spec": spec(template, except),
    })
}

fn spec(template: &SandboxTemplate, except: &[Cidr]) -> Value {
    let (ingress, egress) = match template.spec.network_policy.clone() {
        None => (rules::ingress(), rules::egress(except)),
        Some(mut rules) => {
            let ingress = rules.ingress.iter_mut().flatten();
            ingress.for_each(|rule| name_protocols(rule.ports.as_deref_mut()));
            let egress = rules.egress.iter_mut().flatten();
            egress.for_each(|rule| name_protocols(rule.ports.as_deref_mut()));
            let (ingress, egress) = (rules.ingress, rules.egress);
            (
                json!(ingress.unwrap_or_default()),
                json!(egress.unwrap_or_default()),
            )
        }
    };
    let hash = name_hash(&template.name_any());
    json!({
        "podSelector": {"matchLabels": {labels::SANDBOX_TEMPLATE_REF_HASH: hash}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    })
}

/// Sets the apiserver's default protocol, so that the stored rules equal the requested ones.
fn name_protocols(ports: Option<&mut [NetworkPolicyPort]>) {
    for port in ports.into_iter().flatten() {
        port.protocol.get_or_insert_with(|| "TCP".to_owned());
    }
}

#[cfg(test)]
mod tests;
