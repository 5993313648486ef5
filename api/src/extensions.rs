//! SandboxClaim, SandboxTemplate and SandboxWarmPool: upstream's kinds of
//! `extensions.agents.x-k8s.io/v1beta1`, field for field.

use k8s_openapi::{
    api::networking::v1::{NetworkPolicyEgressRule, NetworkPolicyIngressRule},
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
};
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::{
    conditions,
    sandbox::{PodMetadata, PodTemplate, VolumeClaimTemplate},
};

/// API group of the kinds of this module.
pub const GROUP: &str = "extensions.agents.x-k8s.io";

/// Desired state of a SandboxClaim.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "extensions.agents.x-k8s.io",
    version = "v1beta1",
    kind = "SandboxClaim",
    plural = "sandboxclaims",
    shortname = "sandboxclaim",
    namespaced,
    status = "SandboxClaimStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "SandboxClaim asks for a Sandbox from a warm pool.",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(name = "Sandbox", type_ = "string", json_path = ".status.sandbox.name"),
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
#[serde(rename_all = "camelCase")]
pub struct SandboxClaimSpec {
    /// Labels and annotations of the Pod in addition to those of the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub additional_pod_metadata: Option<PodMetadata>,
    /// Environment variables of the sandbox. A claim with any starts cold.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub env: Vec<ClaimEnvVar>,
    /// Expiry of the claim. Unset: the claim never expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<ClaimLifecycle>,
    /// Volume claims of the sandbox. A claim with any starts cold.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub volume_claim_templates: Vec<VolumeClaimTemplate>,
    /// Pool to take a sandbox from.
    pub warm_pool_ref: NameRef,
}

/// Environment variable of one container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClaimEnvVar {
    /// Container that gets the variable. Unset: the first one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub container_name: String,
    /// Name of the variable.
    pub name: String,
    /// Value of the variable.
    pub value: String,
}

/// Lifetime of a claim.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClaimLifecycle {
    /// Action on the claim once it has expired.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "claim_shutdown_policy_schema")]
    pub shutdown_policy: Option<ClaimShutdownPolicy>,
    /// Time at which the claim expires.
    #[serde(
        default,
        deserialize_with = "crate::times::or_last",
        skip_serializing_if = "Option::is_none"
    )]
    pub shutdown_time: Option<Time>,
    /// Seconds for which a finished claim is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "ttl_schema")]
    pub ttl_seconds_after_finished: Option<i32>,
}

/// Action on an expired claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ClaimShutdownPolicy {
    Delete,
    DeleteForeground,
    #[default]
    Retain,
}

impl ClaimShutdownPolicy {
    /// Returns the spelling used in objects and Events.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Delete => "Delete",
            Self::DeleteForeground => "DeleteForeground",
            Self::Retain => "Retain",
        }
    }
}

/// Observed state of a SandboxClaim.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SandboxClaimStatus {
    /// Current conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions::list_schema")]
    pub conditions: Vec<Condition>,
    /// Sandbox that the claim holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<ClaimedSandbox>,
}

/// Sandbox that a claim holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ClaimedSandbox {
    /// Name of the Sandbox.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Addresses of the Sandbox's Pod.
    #[serde(default, rename = "podIPs", skip_serializing_if = "Vec::is_empty")]
    pub pod_ips: Vec<String>,
}

/// Reference to an object of the same namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NameRef {
    /// Name of the object.
    pub name: String,
}

/// Desired state of a SandboxTemplate.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "extensions.agents.x-k8s.io",
    version = "v1beta1",
    kind = "SandboxTemplate",
    plural = "sandboxtemplates",
    shortname = "sandboxtemplate",
    namespaced,
    derive = "Default",
    derive = "PartialEq",
    doc = "SandboxTemplate is the blueprint of the Sandboxes of a pool."
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxTemplateSpec {
    /// Permission for claims to set environment variables.
    #[serde(default = "disallowed")]
    #[schemars(schema_with = "env_policy_schema")]
    pub env_vars_injection_policy: InjectionPolicy,
    /// Rules of the NetworkPolicy that the template's sandboxes share. Unset: a strict default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<TemplateNetworkPolicy>,
    /// Management of the template's NetworkPolicy: by the controller (Managed) or by the user
    /// (Unmanaged).
    #[serde(default)]
    #[schemars(schema_with = "network_management_schema")]
    pub network_policy_management: NetworkPolicyManagement,
    /// Pod to run.
    pub pod_template: PodTemplate,
    /// Selects whether each Sandbox has a headless Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<bool>,
    /// Templates of PersistentVolumeClaims: one claim per entry and Sandbox.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub volume_claim_templates: Vec<VolumeClaimTemplate>,
    /// Permission for claims to bring volume claims.
    #[serde(default = "disallowed")]
    #[schemars(schema_with = "claim_policy_schema")]
    pub volume_claim_templates_policy: InjectionPolicy,
}

/// Rules of the shared NetworkPolicy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TemplateNetworkPolicy {
    /// Allowed egress traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Vec<NetworkPolicyEgressRule>>,
    /// Allowed ingress traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<Vec<NetworkPolicyIngressRule>>,
}

/// Management of the NetworkPolicy: by the controller (Managed) or by the user (Unmanaged).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NetworkPolicyManagement {
    #[default]
    Managed,
    Unmanaged,
}

/// Permission for claims to bring settings of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum InjectionPolicy {
    Allowed,
    Overrides,
    #[default]
    Disallowed,
}

fn disallowed() -> InjectionPolicy {
    InjectionPolicy::Disallowed
}

/// Desired state of a SandboxWarmPool.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "extensions.agents.x-k8s.io",
    version = "v1beta1",
    kind = "SandboxWarmPool",
    plural = "sandboxwarmpools",
    shortname = "swp",
    namespaced,
    status = "SandboxWarmPoolStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "SandboxWarmPool keeps a number of Sandboxes ready to be claimed.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyReplicas"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".spec.replicas"),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxWarmPoolSpec {
    /// Number of unclaimed sandboxes to keep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "replicas_schema")]
    pub replicas: Option<i32>,
    /// Template to make the sandboxes from.
    pub sandbox_template_ref: NameRef,
    /// Action on members made from an older template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_strategy: Option<WarmPoolUpdateStrategy>,
    /// Seconds after which a member that is not Ready is replaced. Unset: the controller's default
    /// (5 minutes). Since 1.0.12 of upstream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 30))]
    pub readiness_grace_period_seconds: Option<i32>,
}

/// Action on members made from an older template.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WarmPoolUpdateStrategy {
    /// Recreate replaces such members at once, OnReplenish when they leave the pool.
    #[serde(default, rename = "type")]
    #[schemars(schema_with = "update_strategy_schema")]
    pub type_: WarmPoolUpdateStrategyType,
}

/// Time at which stale members are replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum WarmPoolUpdateStrategyType {
    Recreate,
    #[default]
    OnReplenish,
}

/// Observed state of a SandboxWarmPool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxWarmPoolStatus {
    /// Current conditions: Available and Progressing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions::list_schema")]
    pub conditions: Vec<Condition>,
    /// Generation that this status describes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub observed_generation: Option<i64>,
    /// Number of members that are ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    /// Number of members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Label selector of the members' Pods.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub selector: String,
}

fn claim_shutdown_policy_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "enum": ["Delete", "DeleteForeground", "Retain"],
        "default": "Retain",
    })
}

fn ttl_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "format": "int32", "minimum": 0})
}

fn env_policy_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "enum": ["Allowed", "Overrides", "Disallowed"],
        "default": "Disallowed",
    })
}

fn claim_policy_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "string",
        "enum": ["Disallowed", "Allowed", "Overrides"],
        "default": "Disallowed",
    })
}

fn network_management_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": ["Managed", "Unmanaged"], "default": "Managed"})
}

fn replicas_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "format": "int32", "minimum": 0, "default": 1})
}

fn update_strategy_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "enum": ["Recreate", "OnReplenish"], "default": "OnReplenish"})
}
