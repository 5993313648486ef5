//! Sandbox: one long-lived, named Pod with its volumes and its Service. Upstream's kind of
//! `agents.x-k8s.io/v1beta1`, field for field.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    annotations::Settings,
    conditions,
    raw::{self, RawClaimSpec, RawPodSpec},
};

/// Desired state of a Sandbox.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "agents.x-k8s.io",
    version = "v1beta1",
    kind = "Sandbox",
    plural = "sandboxes",
    shortname = "sandbox",
    namespaced,
    status = "SandboxStatus",
    derive = "Default",
    derive = "PartialEq",
    validation = Rule::new("!has(self.spec.service) || !self.spec.service || size(self.metadata.name) <= 63").message("metadata.name has at most 63 characters where spec.service is true: it is the Service's name"),
    doc = "Sandbox is a singleton workload with a stable identity: one Pod, its volumes and its Service.",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].reason"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[x_kube(validation = Rule::new("has(self.volumeClaimTemplates) == has(oldSelf.volumeClaimTemplates) && (!has(self.volumeClaimTemplates) || self.volumeClaimTemplates == oldSelf.volumeClaimTemplates)").message("volumeClaimTemplates is immutable"))]
#[serde(rename_all = "camelCase")]
pub struct SandboxSpec {
    /// Desired mode: Running or Suspended. In the mode Suspended the Pod is deleted or paused, as
    /// the suspension strategy selects.
    #[serde(default)]
    #[schemars(schema_with = "operating_mode_schema")]
    pub operating_mode: OperatingMode,
    /// Pod to run. Changes take effect with the next Pod.
    pub pod_template: PodTemplate,
    /// Selects whether the Sandbox has a headless Service. Unset: an existing Service is kept, and
    /// none is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<bool>,
    /// Action on this object once it has expired. Its Pod and Service are deleted in any case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "shutdown_policy_schema")]
    pub shutdown_policy: Option<ShutdownPolicy>,
    /// Time at which the Sandbox expires. Unset: never.
    #[serde(
        default,
        deserialize_with = "crate::times::or_last",
        skip_serializing_if = "Option::is_none"
    )]
    pub shutdown_time: Option<Time>,
    /// Templates of PersistentVolumeClaims: one claim per entry, mounted under the entry's name.
    /// Immutable.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub volume_claim_templates: Vec<VolumeClaimTemplate>,
}

/// Template of a Sandbox's Pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PodTemplate {
    /// Labels and annotations of the Pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<PodMetadata>,
    /// Specification of the Pod.
    #[schemars(schema_with = "raw::pod_spec_schema")]
    pub spec: RawPodSpec,
}

impl PodTemplate {
    /// Returns the template's labels, or `None` when unset.
    pub fn labels(&self) -> Option<&BTreeMap<String, String>> {
        self.metadata.as_ref()?.labels.as_ref()
    }

    /// Returns the template's annotations, or `None` when unset.
    pub fn annotations(&self) -> Option<&BTreeMap<String, String>> {
        self.metadata.as_ref()?.annotations.as_ref()
    }

    /// Returns the name of the snapshot that the template's sandboxes start from as copies.
    pub fn restore_from(&self) -> Option<&str> {
        let named = self.annotations()?.get(crate::annotations::RESTORE_FROM)?;
        Some(named)
    }

    /// Reports whether the template uses nothing of Torpor's.
    ///
    /// Such a template names no RuntimeClass, and neither the template nor the annotations of its
    /// Sandbox (`own`) set a suspension strategy. A suspension then loses the memory, as with
    /// upstream.
    pub fn is_plain(&self, own: Option<&BTreeMap<String, String>>) -> bool {
        let named = self.spec.json().get("runtimeClassName");
        let names_none = named.is_none_or(|name| name.as_str().is_none_or(str::is_empty));
        let settings = Settings::read(own, self.annotations());
        names_none && settings.suspension_strategy.is_none()
    }
}

/// Part of a Pod's metadata that a template may set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PodMetadata {
    /// Annotations of the Pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
    /// Labels of the Pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
}

/// Template of a PersistentVolumeClaim of the Sandbox.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VolumeClaimTemplate {
    /// Name of the volume (the claim is named `<name>-<sandbox>`), labels and annotations.
    #[serde(default)]
    #[schemars(schema_with = "embedded_metadata_schema")]
    pub metadata: EmbeddedMetadata,
    /// Specification of the claim.
    pub spec: RawClaimSpec,
}

/// Part of a claim's metadata that a template may set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EmbeddedMetadata {
    /// Annotations of the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
    /// Labels of the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Name of the volume.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
}

/// Desired mode of a Sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OperatingMode {
    #[default]
    Running,
    Suspended,
}

/// Action on the object after its expiry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ShutdownPolicy {
    Delete,
    #[default]
    Retain,
}

/// Observed state of a Sandbox.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxStatus {
    /// Current conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions::list_schema")]
    pub conditions: Vec<Condition>,
    /// Node of the Pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub node_name: String,
    /// Addresses of the Pod.
    #[serde(default, rename = "podIPs", skip_serializing_if = "Vec::is_empty")]
    pub pod_ips: Vec<String>,
    /// Label selector of the Pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub selector: String,
    /// Name of the Service.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub service: String,
    /// DNS name of the Service.
    #[serde(
        default,
        rename = "serviceFQDN",
        skip_serializing_if = "String::is_empty"
    )]
    pub service_fqdn: String,
}

fn operating_mode_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "string", "enum": ["Running", "Suspended"], "default": "Running",
    })
}

fn shutdown_policy_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "string", "enum": ["Delete", "Retain"], "default": "Retain"})
}

fn embedded_metadata_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
    EmbeddedMetadata::json_schema(generator)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_template_without_runtime_and_strategy_is_plain() {
        let template = |spec: Value, annotations: Value| -> PodTemplate {
            let metadata = json!({"annotations": annotations});
            serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
        };
        let stop = json!({"torpor.dev/suspension-strategy": "Stop"});
        let own = serde_json::from_value(stop.clone()).unwrap();
        let class = |name: &str| json!({"runtimeClassName": name});
        assert!(template(json!({}), json!({})).is_plain(None));
        assert!(template(class(""), json!({})).is_plain(None));
        assert!(!template(class("kata"), json!({})).is_plain(None));
        assert!(!template(json!({}), stop).is_plain(None));
        assert!(!template(json!({}), json!({})).is_plain(Some(&own)));
    }
}
