//! No client required. Derives Sandboxes from a SandboxTemplate.
//!
//! Sets the secure defaults, computes the hash that labels Sandboxes of the template, and compares
//! a Sandbox with the template.

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

/// Name servers of Sandboxes that the default NetworkPolicy cuts off from the cluster's DNS.
const PUBLIC_NAMESERVERS: [&str; 2] = ["8.8.8.8", "1.1.1.1"];

/// Annotations that a Sandbox takes over from its SandboxTemplate; each group holds the names of
/// one setting.
const TEMPLATE_SETTINGS: [&[&str]; 7] = [
    &[annotations::INJECT_RUNTIME],
    &[annotations::DOZE_AFTER],
    &[
        annotations::HIBERNATE_AFTER,
        annotations::IDLE_TIMEOUT,
        annotations::MAX_IDLE_TIME,
    ],
    &[annotations::WAKE_ON],
    &[annotations::ON_CRASH],
    &[annotations::LATE_BIND],
    &[annotations::ON_CLAIM_EXEC],
];

/// Returns the template's pod spec with the secure defaults.
///
/// They are: no service account token unless the template asks for one, and public name servers
/// where the default NetworkPolicy applies.
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

/// Sets public name servers in a pod spec without `dnsPolicy`, for a Pod that a NetworkPolicy cuts
/// off from the cluster's DNS.
pub fn name_public_servers(spec: &mut Map<String, Value>) {
    if is_unset(spec.get("dnsPolicy")) {
        spec.insert("dnsPolicy".to_owned(), "None".into());
        spec.insert(
            "dnsConfig".to_owned(),
            json!({"nameservers": PUBLIC_NAMESERVERS}),
        );
    }
}

/// Returns the spec of a new Sandbox. Unset fields are left out: the schema of a custom resource
/// allows no null.
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

/// Returns the annotations of a new Sandbox.
///
/// Settings from the template's own annotations go on the Sandbox and not into its pod template, so
/// that adding or removing one makes no Sandbox stale.
pub fn sandbox_annotations(template: &SandboxTemplate) -> Value {
    let mut all = json!({annotations::SANDBOX_TEMPLATE_REF: template.name_any()});
    let pod_template = template.spec.pod_template.annotations();
    // An annotation of the Sandbox would override the pod template's under any of its names.
    let hides = |names: &[&str]| {
        pod_template
            .is_some_and(|annotations| names.iter().any(|key| annotations.contains_key(*key)))
    };
    // No agent acts on the Pods of a template without a RuntimeClass.
    let has_agent = template
        .spec
        .pod_template
        .spec
        .runtime_class_name()
        .is_some();
    let names = TEMPLATE_SETTINGS.into_iter().filter(|names| !hides(names));
    let applies = |key: &&&str| has_agent || !annotations::BINDING.contains(*key);
    for key in names.flatten().filter(applies) {
        if let Some(value) = template.annotations().get(*key) {
            all[*key] = value.clone().into();
        }
    }
    all
}

fn is_unset(value: Option<&Value>) -> bool {
    value.is_none_or(|value| value.is_null() || value == "")
}

/// Returns the value of the label that marks Sandboxes made from this version of a template.
pub fn blueprint_hash(template: &SandboxTemplate) -> String {
    let spec = &template.spec;
    let blueprint = json!({
        "podTemplate": spec.pod_template,
        "service": spec.service,
        "volumeClaimTemplates": spec.volume_claim_templates,
    });
    name_hash(&blueprint.to_string())
}

/// Returns the value of the deprecated label for the pod template alone.
pub fn pod_template_hash(template: &SandboxTemplate) -> String {
    name_hash(&json!(template.spec.pod_template).to_string())
}

/// Template prepared for the comparison with many Sandboxes.
#[derive(Debug)]
pub struct Blueprint<'a> {
    template: &'a SandboxTemplate,
    reference: String,
    hash: String,
    /// Normalized spec; computed for the first Sandbox with another hash.
    meaning: OnceCell<Value>,
    /// Digest of the normalized spec; computed for the first Sandbox cached as an outline.
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

    /// Reports whether a member was made from another template, or from a version of the template
    /// that differs in more than metadata and spelling.
    pub fn is_stale(&self, member: &Sandbox) -> bool {
        !self.is_current(member) && self.is_stale_orphan(member)
    }

    /// Reports whether a member was made from the current template, metadata and spelling included.
    pub fn is_current(&self, member: &Sandbox) -> bool {
        let hash = member.labels().get(labels::SANDBOX_TEMPLATE_HASH);
        self.is_named_by(member) && hash == Some(&self.hash)
    }

    /// Reports whether the template would produce the member unchanged, including what the hash
    /// leaves out: the template's own annotations and its network policy.
    pub fn would_make(&self, member: &Sandbox) -> bool {
        let wanted = sandbox_annotations(self.template);
        let is_as_wanted = |key: &&str| {
            let wanted = wanted.get(*key).and_then(Value::as_str);
            member.annotations().get(*key).map(String::as_str) == wanted
        };
        self.is_current(member)
            && self.is_equivalent(member)
            && TEMPLATE_SETTINGS
                .iter()
                .copied()
                .flatten()
                .all(is_as_wanted)
    }

    /// Reports whether a Sandbox without a controller is stale. Its creator wrote its labels too,
    /// so that only its spec is compared.
    pub fn is_stale_orphan(&self, orphan: &Sandbox) -> bool {
        !(self.is_named_by(orphan) && self.is_equivalent(orphan))
    }

    /// Reports whether the Sandbox's label names this template, in any version.
    fn is_named_by(&self, sandbox: &Sandbox) -> bool {
        let reference = sandbox.labels().get(labels::SANDBOX_TEMPLATE_REF_HASH);
        reference == Some(&self.reference)
    }

    /// Reports whether the Sandbox's spec equals the template's, apart from metadata and spelling.
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

/// Returns the part of a Sandbox, normalized, that decides whether its template would produce it.
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
