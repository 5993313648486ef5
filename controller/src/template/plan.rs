//! No client required. What a template's label and NetworkPolicy have to be.

use std::sync::Arc;

use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPort};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};
use torpor_api::{SandboxTemplate, extensions::NetworkPolicyManagement, labels, name_hash};

use crate::{blueprint, merge_patch, watches::extensions::controller_of};

/// Namespace and label of the router: the only one that the default lets in.
const ROUTER_NAMESPACE: &str = "agent-sandbox-system";
const ROUTER_APP: &str = "sandbox-router";
/// What sandboxes may not reach by default: private and link-local addresses, and with them the cluster, its DNS and the cloud's metadata service.
const PRIVATE_V4: [&str; 4] = [
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "169.254.0.0/16",
];
const PRIVATE_V6: [&str; 2] = ["fc00::/7", "fe80::/10"];

/// What was seen.
#[derive(Clone, Debug)]
pub struct Observed {
    pub template: Arc<SandboxTemplate>,
    /// Whatever has the name of the template's policy.
    pub policy: Option<Arc<NetworkPolicy>>,
}

/// One call.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    LabelTemplate(Value),
    CreatePolicy(Value),
    PatchPolicy(Value),
    DeletePolicy { uid: String },
}

/// Name of the policy that the Sandboxes of a template share.
pub fn policy_name(template: &SandboxTemplate) -> String {
    format!("{}-network-policy", template.name_any())
}

/// Decides; pure. An error names a policy that somebody else has under this name.
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
    let managed = template.spec.network_policy_management == NetworkPolicyManagement::Managed;
    let ours = observed.policy.as_ref().map(|policy| {
        let owner = controller_of(&**policy);
        owner.is_some_and(|owner| Some(&owner.uid) == template.metadata.uid.as_ref())
    });
    match (&observed.policy, ours.unwrap_or_default()) {
        (Some(policy), true) if managed => steps.extend(update(policy, template)),
        (Some(policy), true) => steps.push(Action::DeletePolicy {
            uid: policy.uid().unwrap_or_default(),
        }),
        (Some(policy), false) if managed => return Err(policy.name_any()),
        (None, _) if managed => steps.push(Action::CreatePolicy(policy(template))),
        _ => {}
    }
    Ok(steps)
}

fn update(policy: &NetworkPolicy, template: &SandboxTemplate) -> Option<Action> {
    let (found, wanted) = (json!(policy.spec), spec(template));
    if blueprint::mean_the_same(&found, &wanted) {
        return None;
    }
    let difference = merge_patch::difference(&found, &wanted)?;
    Some(Action::PatchPolicy(json!({
        "metadata": {"uid": policy.uid(), "resourceVersion": policy.resource_version()},
        "spec": difference,
    })))
}

fn policy(template: &SandboxTemplate) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": policy_name(template),
            "namespace": template.namespace(),
            "ownerReferences": [{
                "apiVersion": SandboxTemplate::api_version(&()),
                "kind": SandboxTemplate::kind(&()),
                "name": template.name_any(),
                "uid": template.uid(),
                "controller": true,
                "blockOwnerDeletion": true,
            }],
        },
        "spec": spec(template),
    })
}

fn spec(template: &SandboxTemplate) -> Value {
    let (ingress, egress) = match template.spec.network_policy.clone() {
        None => (default_ingress(), default_egress()),
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

/// The apiserver's default, so that what it stores is what was asked for.
fn name_protocols(ports: Option<&mut [NetworkPolicyPort]>) {
    for port in ports.into_iter().flatten() {
        port.protocol.get_or_insert_with(|| "TCP".to_owned());
    }
}

fn default_ingress() -> Value {
    json!([{"from": [{
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": ROUTER_NAMESPACE}},
        "podSelector": {"matchLabels": {"app": ROUTER_APP}},
    }]}])
}

fn default_egress() -> Value {
    json!([{"to": [
        {"ipBlock": {"cidr": "0.0.0.0/0", "except": PRIVATE_V4}},
        {"ipBlock": {"cidr": "::/0", "except": PRIVATE_V6}},
    ]}])
}

#[cfg(test)]
mod tests;
