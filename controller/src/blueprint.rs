//! No client required. What a SandboxTemplate says about its Sandboxes: the secure defaults that are put in, the hash that marks what was made from it, and whether a
//! Sandbox is still what the template says.

use std::cell::OnceCell;

use kube::ResourceExt;
use serde_json::{Map, Value, json};
use torpor_api::{
    Sandbox, SandboxSpec, SandboxTemplate, annotations,
    extensions::NetworkPolicyManagement,
    labels, name_hash,
    raw::RawPodSpec,
    sandbox::{PodMetadata, PodTemplate, VolumeClaimTemplate},
};

use crate::outline;

mod meaning;

use self::meaning::{VOLUME_CLAIM, normalized};
pub use self::meaning::{mean_the_same, normal_form};

/// Name servers of sandboxes that the default NetworkPolicy cuts off from the cluster's DNS.
const PUBLIC_NAMESERVERS: [&str; 2] = ["8.8.8.8", "1.1.1.1"];

/// What a SandboxTemplate's own annotations may ask of its Sandboxes; names of the same setting stand together.
const OF_TEMPLATE: [&[&str]; 5] = [
    &[annotations::INJECT_RUNTIME],
    &[annotations::DOZE_AFTER],
    &[
        annotations::HIBERNATE_AFTER,
        annotations::IDLE_TIMEOUT,
        annotations::MAX_IDLE_TIME,
    ],
    &[annotations::WAKE_ON],
    &[annotations::ON_CRASH],
];

/// The template's pod spec with the secure defaults: no service account token unless asked for, and public name servers where the default NetworkPolicy applies.
pub fn secured_pod_spec(template: &SandboxTemplate) -> Map<String, Value> {
    let mut spec = template.spec.pod_template.spec.json().clone();
    if is_unset(spec.get("automountServiceAccountToken")) {
        spec.insert("automountServiceAccountToken".to_owned(), false.into());
    }
    let strict = template.spec.network_policy_management == NetworkPolicyManagement::Managed
        && template.spec.network_policy.is_none();
    if strict {
        name_public_servers(&mut spec);
    }
    spec
}

/// Names public name servers in a pod spec that says nothing of DNS, where a NetworkPolicy cuts the Pod off from the cluster's.
pub fn name_public_servers(spec: &mut Map<String, Value>) {
    if is_unset(spec.get("dnsPolicy")) {
        spec.insert("dnsPolicy".to_owned(), "None".into());
        spec.insert(
            "dnsConfig".to_owned(),
            json!({"nameservers": PUBLIC_NAMESERVERS}),
        );
    }
}

/// The spec of a Sandbox to create. What is unset is left out: the schema of a custom resource knows no null.
pub fn sandbox_spec(
    template: &SandboxTemplate,
    pod_metadata: Option<&PodMetadata>,
    pod_spec: Map<String, Value>,
    volume_claim_templates: &[VolumeClaimTemplate],
) -> Value {
    let pod_template = PodTemplate {
        metadata: pod_metadata.cloned(),
        spec: RawPodSpec::new(pod_spec),
    };
    json!(SandboxSpec {
        pod_template,
        service: template.spec.service,
        volume_claim_templates: volume_claim_templates.to_vec(),
        ..SandboxSpec::default()
    })
}

/// Annotations of a Sandbox to create. What a template's own annotations ask of the Sandbox stands on it and not in its pod template: that it is there or not makes no Sandbox stale.
pub fn sandbox_annotations(template: &SandboxTemplate) -> Value {
    let mut all = json!({annotations::SANDBOX_TEMPLATE_REF: template.name_any()});
    let pod_template = template.spec.pod_template.annotations();
    // What stands on the Sandbox would hide what the pod template says, by whatever name.
    let hides = |names: &[&str]| {
        pod_template.is_some_and(|said| names.iter().any(|key| said.contains_key(*key)))
    };
    let names = OF_TEMPLATE.into_iter().filter(|names| !hides(names));
    for key in names.flatten() {
        if let Some(value) = template.annotations().get(*key) {
            all[*key] = value.clone().into();
        }
    }
    all
}

fn is_unset(value: Option<&Value>) -> bool {
    value.is_none_or(|value| value.is_null() || value == "")
}

/// Value of the label that marks what was made from this version of a template.
pub fn blueprint_hash(template: &SandboxTemplate) -> String {
    let spec = &template.spec;
    let blueprint = json!({
        "podTemplate": spec.pod_template,
        "service": spec.service,
        "volumeClaimTemplates": spec.volume_claim_templates,
    });
    name_hash(&blueprint.to_string())
}

/// Value of the deprecated twin of that label.
pub fn pod_template_hash(template: &SandboxTemplate) -> String {
    name_hash(&json!(template.spec.pod_template).to_string())
}

/// A template, prepared to be compared with many Sandboxes.
#[derive(Debug)]
pub struct Blueprint<'a> {
    template: &'a SandboxTemplate,
    reference: String,
    hash: String,
    /// Worked out when the first Sandbox with another hash is looked at.
    meaning: OnceCell<Value>,
    /// The same, of the first that is known by its outline.
    digest: OnceCell<String>,
}

impl<'a> Blueprint<'a> {
    /// Prepares a template.
    pub fn of(template: &'a SandboxTemplate) -> Self {
        Self {
            template,
            reference: name_hash(&template.name_any()),
            hash: blueprint_hash(template),
            meaning: OnceCell::new(),
            digest: OnceCell::new(),
        }
    }

    /// Whether a member was made from another template, or from a version of it that differs in more than metadata and spelling.
    pub fn is_stale(&self, member: &Sandbox) -> bool {
        !self.is_current(member) && self.is_stale_orphan(member)
    }

    /// Whether a member was made from the template as it is, metadata and spelling included.
    pub fn is_current(&self, member: &Sandbox) -> bool {
        let hash = member.labels().get(labels::SANDBOX_TEMPLATE_HASH);
        self.is_named_by(member) && hash == Some(&self.hash)
    }

    /// Whether the template would make the member as it was made: also what is not in the hash, its own annotations and its network's policy.
    pub fn would_make(&self, member: &Sandbox) -> bool {
        let wanted = sandbox_annotations(self.template);
        let is_as_wanted = |key: &&str| {
            let wanted = wanted.get(*key).and_then(Value::as_str);
            member.annotations().get(*key).map(String::as_str) == wanted
        };
        self.is_current(member)
            && self.is_equivalent(member)
            && OF_TEMPLATE.iter().copied().flatten().all(is_as_wanted)
    }

    /// The same of a Sandbox that nobody controls. Whoever made it wrote its labels too: its spec has to show what it is.
    pub fn is_stale_orphan(&self, orphan: &Sandbox) -> bool {
        !(self.is_named_by(orphan) && self.is_equivalent(orphan))
    }

    /// Whether a Sandbox says that it was made from this template, in whatever version.
    fn is_named_by(&self, sandbox: &Sandbox) -> bool {
        let reference = sandbox.labels().get(labels::SANDBOX_TEMPLATE_REF_HASH);
        reference == Some(&self.reference)
    }

    /// Whether a Sandbox is what the template would make, as far as it matters.
    fn is_equivalent(&self, sandbox: &Sandbox) -> bool {
        let Some(digest) = outline::digest(sandbox) else {
            return *self.meaning() == meaning_of(sandbox);
        };
        digest
            == self
                .digest
                .get_or_init(|| outline::digest_of(self.meaning()))
    }

    fn meaning(&self) -> &Value {
        let spec = &self.template.spec;
        self.meaning.get_or_init(|| {
            let pod_spec = Value::Object(secured_pod_spec(self.template));
            meaning(&pod_spec, spec.service, &spec.volume_claim_templates)
        })
    }
}

/// The part of a Sandbox that tells whether its template would make it.
pub fn meaning_of(sandbox: &Sandbox) -> Value {
    let spec = &sandbox.spec;
    let pod_spec = json!(spec.pod_template.spec);
    meaning(&pod_spec, spec.service, &spec.volume_claim_templates)
}

fn meaning(pod_spec: &Value, service: Option<bool>, volumes: &[VolumeClaimTemplate]) -> Value {
    let volumes = volumes.iter().map(|template| {
        let spec = normalized(VOLUME_CLAIM, &json!(template.spec));
        json!([template.metadata.name, spec])
    });
    json!([normal_form(pod_spec), service, volumes.collect::<Vec<_>>()])
}

#[cfg(test)]
mod tests;
