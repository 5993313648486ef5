//! No client required. Builds the Sandbox for a claim that takes none from a pool, as JSON, so that
//! fields of a newer Kubernetes are kept.

use kube::{Resource, ResourceExt};
use serde_json::{Map, Value, json};
use torpor_api::{
    SandboxClaim, SandboxTemplate, annotations,
    extensions::{ClaimEnvVar, InjectionPolicy},
    labels, name_hash,
    sandbox::{PodMetadata, VolumeClaimTemplate},
};

use super::{late_bind::Additions, metadata};
use crate::{blueprint, owners::owner_reference};

/// Addition of a claim that the template does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    #[error(
        "environment variables are not allowed: the template's envVarsInjectionPolicy is Disallowed"
    )]
    EnvDisallowed,
    #[error(
        "environment variable {name:?} is in container {container:?} already; the template's envVarsInjectionPolicy Allowed lets a claim add new ones only"
    )]
    EnvExists { name: String, container: String },
    #[error(
        "container {container:?} uses envFrom, so that it is unknown whether {name:?} is new; the template's envVarsInjectionPolicy Allowed lets a claim add new ones only"
    )]
    EnvFrom { name: String, container: String },
    #[error(
        "environment variable {name:?} is for container {container:?}, which the template does not have"
    )]
    NoSuchContainer { name: String, container: String },
    #[error(
        "volumeClaimTemplates are not allowed: the template's volumeClaimTemplatesPolicy is Disallowed"
    )]
    VolumesDisallowed,
    #[error(
        "volumeClaimTemplate {0:?} is in the template already; the template's volumeClaimTemplatesPolicy Allowed lets a claim add new ones only"
    )]
    VolumeExists(String),
    #[error("volumeClaimTemplate number {number} of the {whose} has no name")]
    VolumeWithoutName { whose: &'static str, number: usize },
    #[error("volumeClaimTemplate {name:?} is in the {whose} twice")]
    VolumeTwice { whose: &'static str, name: String },
}

impl Rejected {
    /// Reports whether the error concerns environment variables and not volumes.
    pub fn is_about_env(&self) -> bool {
        matches!(
            self,
            Self::EnvDisallowed
                | Self::EnvExists { .. }
                | Self::EnvFrom { .. }
                | Self::NoSuchContainer { .. }
        )
    }
}

/// Returns the Sandbox to create. `pod_metadata` is the template's merged with the claim's.
/// `additions`: those that reach the sandbox while it runs.
pub fn sandbox(
    claim: &SandboxClaim,
    template: &SandboxTemplate,
    pod_metadata: &PodMetadata,
    additions: &Additions,
) -> Result<Value, Rejected> {
    let mut spec = blueprint::secured_pod_spec(template);
    inject_env(
        &mut spec,
        &claim.spec.env,
        template.spec.env_vars_injection_policy,
    )?;
    let volumes = merge_volumes(
        &template.spec.volume_claim_templates,
        &claim.spec.volume_claim_templates,
        template.spec.volume_claim_templates_policy,
    )?;
    let mut on_sandbox = blueprint::sandbox_annotations(template);
    for (key, list) in metadata::lists(claim) {
        if let Some(list) = list {
            on_sandbox[key] = list.into();
        }
    }
    let late = on_sandbox.get(annotations::LATE_BIND).is_some();
    if late && additions.suit(template.annotations()) {
        for (key, value) in additions.annotations() {
            on_sandbox[key] = value.into();
        }
    }
    if let Some(trace) = claim.annotations().get(annotations::TRACE_CONTEXT) {
        on_sandbox[annotations::TRACE_CONTEXT] = trace.clone().into();
    }
    Ok(json!({
        "apiVersion": torpor_api::Sandbox::api_version(&()),
        "kind": torpor_api::Sandbox::kind(&()),
        "metadata": {
            "name": claim.name_any(),
            "namespace": claim.namespace(),
            "labels": {
                labels::CLAIM_UID: claim.uid(),
                labels::LAUNCH_TYPE: "cold",
                labels::SANDBOX_TEMPLATE_REF_HASH: name_hash(&template.name_any()),
                labels::CREATED_BY: created_by(claim),
            },
            "annotations": on_sandbox,
            "ownerReferences": [owner_reference(claim)],
        },
        "spec": blueprint::sandbox_spec(template, Some(pod_metadata), spec, &volumes),
    }))
}

/// Returns the value of the label for the client that created the claim; `unknown` unless it is in
/// upstream's list.
pub fn created_by(claim: &SandboxClaim) -> &'static str {
    let label = claim.labels().get(labels::CREATED_BY);
    label.map_or("unknown", |creator| labels::created_by(creator))
}

pub(super) fn inject_env(
    spec: &mut Map<String, Value>,
    wanted: &[ClaimEnvVar],
    policy: InjectionPolicy,
) -> Result<(), Rejected> {
    if wanted.is_empty() {
        return Ok(());
    }
    if policy == InjectionPolicy::Disallowed {
        return Err(Rejected::EnvDisallowed);
    }
    for variable in wanted {
        let container = container_mut(spec, &variable.container_name).ok_or_else(|| {
            Rejected::NoSuchContainer {
                name: variable.name.clone(),
                container: variable.container_name.clone(),
            }
        })?;
        set_env(container, variable, policy)?;
    }
    Ok(())
}

/// Returns the container with that name, init containers included; without a name the first
/// container.
fn container_mut<'a>(
    spec: &'a mut Map<String, Value>,
    name: &str,
) -> Option<&'a mut Map<String, Value>> {
    let list = |spec: &Map<String, Value>, list: &str| {
        let all = spec.get(list).and_then(Value::as_array)?;
        if name.is_empty() {
            return (!all.is_empty() && list == "containers").then_some(0);
        }
        all.iter().position(|container| container["name"] == name)
    };
    let (from, at) = ["containers", "initContainers"]
        .into_iter()
        .find_map(|from| Some((from, list(spec, from)?)))?;
    spec.get_mut(from)?.get_mut(at)?.as_object_mut()
}

fn set_env(
    container: &mut Map<String, Value>,
    variable: &ClaimEnvVar,
    policy: InjectionPolicy,
) -> Result<(), Rejected> {
    let name_of = |container: &Map<String, Value>| {
        let name = container.get("name").and_then(Value::as_str);
        name.unwrap_or_default().to_owned()
    };
    let opaque = container
        .get("envFrom")
        .and_then(Value::as_array)
        .is_some_and(|sources| !sources.is_empty());
    if policy == InjectionPolicy::Allowed && opaque {
        return Err(Rejected::EnvFrom {
            name: variable.name.clone(),
            container: name_of(container),
        });
    }
    let container_name = name_of(container);
    let entry = json!({"name": variable.name, "value": variable.value});
    let all = container.entry("env").or_insert_with(|| json!([]));
    if !all.is_array() {
        *all = json!([]);
    }
    let all = all.as_array_mut().into_iter().flatten();
    for existing in all {
        if existing["name"] != variable.name.as_str() {
            continue;
        }
        if policy == InjectionPolicy::Allowed {
            return Err(Rejected::EnvExists {
                name: variable.name.clone(),
                container: container_name,
            });
        }
        *existing = entry;
        return Ok(());
    }
    if let Some(Value::Array(all)) = container.get_mut("env") {
        all.push(entry);
    }
    Ok(())
}

/// Merges the volumes of template and claim. As upstream, the template's own have to be valid even
/// if the claim has none.
fn merge_volumes(
    template: &[VolumeClaimTemplate],
    wanted: &[VolumeClaimTemplate],
    policy: InjectionPolicy,
) -> Result<Vec<VolumeClaimTemplate>, Rejected> {
    check_names(template, "template")?;
    if wanted.is_empty() {
        return Ok(template.to_vec());
    }
    check_names(wanted, "claim")?;
    if policy == InjectionPolicy::Disallowed {
        return Err(Rejected::VolumesDisallowed);
    }
    let mut merged = template.to_vec();
    for volume in wanted {
        let name = &volume.metadata.name;
        match merged
            .iter_mut()
            .find(|existing| existing.metadata.name == *name)
        {
            None => merged.push(volume.clone()),
            Some(existing) if policy == InjectionPolicy::Overrides => *existing = volume.clone(),
            Some(_) => return Err(Rejected::VolumeExists(name.clone())),
        }
    }
    Ok(merged)
}

fn check_names(volumes: &[VolumeClaimTemplate], whose: &'static str) -> Result<(), Rejected> {
    let mut seen = std::collections::BTreeSet::new();
    for (at, volume) in volumes.iter().enumerate() {
        let name = &volume.metadata.name;
        if name.is_empty() {
            let number = at + 1;
            return Err(Rejected::VolumeWithoutName { whose, number });
        }
        if !seen.insert(name) {
            let name = name.clone();
            return Err(Rejected::VolumeTwice { whose, name });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
