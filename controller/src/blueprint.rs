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
    if strict && is_unset(spec.get("dnsPolicy")) {
        spec.insert("dnsPolicy".to_owned(), "None".into());
        spec.insert(
            "dnsConfig".to_owned(),
            json!({"nameservers": PUBLIC_NAMESERVERS}),
        );
    }
    spec
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
    pod_spec: OnceCell<Value>,
}

impl<'a> Blueprint<'a> {
    /// Prepares a template.
    pub fn of(template: &'a SandboxTemplate) -> Self {
        Self {
            template,
            reference: name_hash(&template.name_any()),
            hash: blueprint_hash(template),
            pod_spec: OnceCell::new(),
        }
    }

    /// Whether a Sandbox was made from another template, or from a version of it that differs in more than metadata and spelling.
    pub fn is_stale(&self, sandbox: &Sandbox) -> bool {
        let label = |key| sandbox.labels().get(key);
        if label(labels::SANDBOX_TEMPLATE_REF_HASH) != Some(&self.reference) {
            return true;
        }
        label(labels::SANDBOX_TEMPLATE_HASH) != Some(&self.hash) && !self.is_equivalent(sandbox)
    }

    /// Whether a Sandbox is what the template would make, as far as it matters.
    fn is_equivalent(&self, sandbox: &Sandbox) -> bool {
        let template = self.template;
        let wanted = self
            .pod_spec
            .get_or_init(|| normalized("", &Value::Object(secured_pod_spec(template))));
        *wanted == normalized("", &json!(sandbox.spec.pod_template.spec))
            && sandbox.spec.service == template.spec.service
            && volumes(&sandbox.spec.volume_claim_templates)
                == volumes(&template.spec.volume_claim_templates)
    }
}

fn volumes(templates: &[VolumeClaimTemplate]) -> Vec<(&str, Value)> {
    templates
        .iter()
        .map(|template| {
            let spec = normalized("", &json!(template.spec));
            (template.metadata.name.as_str(), spec)
        })
        .collect()
}

/// Whether two specs differ in nothing but what is unset or empty, and in the spelling of quantities.
pub fn mean_the_same(one: &Value, other: &Value) -> bool {
    normalized("", one) == normalized("", other)
}

/// Maps of strings: an empty one means the same as none. An empty object elsewhere may mean something, such as `emptyDir: {}`.
const STRING_MAPS: [&str; 6] = [
    "nodeSelector",
    "matchLabels",
    "limits",
    "requests",
    "labels",
    "annotations",
];
/// Objects whose values are quantities, and single fields that are one.
const QUANTITY_MAPS: [&str; 3] = ["limits", "requests", "overhead"];
const QUANTITIES: [&str; 2] = ["sizeLimit", "divisor"];

/// The same value without differences that mean nothing to Kubernetes: unset or empty, and the spelling of quantities. `key` is the name under which it stands.
fn normalized(key: &str, value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let quantities = QUANTITY_MAPS.contains(&key);
            let entries = map.iter().filter_map(|(name, value)| {
                let inner = if quantities {
                    quantity(value)
                } else {
                    normalized(name, value)
                };
                (!means_nothing(name, &inner)).then(|| (name.clone(), inner))
            });
            Value::Object(entries.collect())
        }
        Value::Array(items) => items.iter().map(|item| normalized("", item)).collect(),
        other if QUANTITIES.contains(&key) => quantity(other),
        other => other.clone(),
    }
}

fn means_nothing(key: &str, value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty() && STRING_MAPS.contains(&key),
        _ => false,
    }
}

/// A quantity in thousandths, or as it is written if it cannot be read.
fn quantity(value: &Value) -> Value {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        other => return other.clone(),
    };
    match thousandths(&text) {
        Some(amount) => json!(format!("{amount}m")),
        None => value.clone(),
    }
}

/// Exact, so that two spellings are the same only if the amounts are. `None` for what is no quantity, or has more digits than thousandths hold.
fn thousandths(text: &str) -> Option<i128> {
    const SUFFIXES: [(&str, i128, i128); 14] = [
        ("Ki", 1 << 10, 1),
        ("Mi", 1 << 20, 1),
        ("Gi", 1 << 30, 1),
        ("Ti", 1 << 40, 1),
        ("Pi", 1 << 50, 1),
        ("Ei", 1 << 60, 1),
        ("m", 1, 1000),
        ("k", 1_000, 1),
        ("M", 1_000_000, 1),
        ("G", 1_000_000_000, 1),
        ("T", 1_000_000_000_000, 1),
        ("P", 1_000_000_000_000_000, 1),
        ("E", 1_000_000_000_000_000_000, 1),
        ("", 1, 1),
    ];
    let (number, times, divided_by) = SUFFIXES
        .iter()
        .find_map(|(suffix, times, by)| Some((text.strip_suffix(suffix)?, *times, *by)))?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = format!("{whole}{fraction}");
    let scale = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let amount = digits
        .parse::<i128>()
        .ok()?
        .checked_mul(times)?
        .checked_mul(1000)?;
    let below = scale.checked_mul(divided_by)?;
    (amount % below == 0).then_some(amount / below)
}

#[cfg(test)]
mod tests;
