//! The two watched kinds, reduced to the fields that routing needs.
//!
//! All other fields are skipped during parsing: ten thousand sandboxes cost little memory, and an
//! unknown field cannot cause an error.

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use kube::{Resource, core::NamespaceResourceScope};
use serde::Deserialize;
use torpor_api::{Sandbox, annotations::Settings};

/// Sandbox, reduced to the fields that routing needs.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct WatchedSandbox {
    #[serde(default)]
    pub metadata: ObjectMeta,
    #[serde(default)]
    spec: SandboxSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SandboxSpec {
    #[serde(default)]
    operating_mode: String,
    #[serde(default)]
    pod_template: PodTemplate,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct PodTemplate {
    #[serde(default)]
    metadata: Option<TemplateMetadata>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct TemplateMetadata {
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

impl WatchedSandbox {
    /// Reports whether `operatingMode` is `Suspended`.
    pub fn suspended(&self) -> bool {
        self.spec.operating_mode == "Suspended"
    }

    /// Reports whether requests may resume the Sandbox.
    pub fn resume_on_request(&self) -> bool {
        let template = self.spec.pod_template.metadata.as_ref();
        let template = template.and_then(|metadata| metadata.annotations.as_ref());
        Settings::read(self.metadata.annotations.as_ref(), template).resume_on_request
    }
}

/// Pod, reduced to the fields that routing needs.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct WatchedPod {
    #[serde(default)]
    pub metadata: ObjectMeta,
    #[serde(default)]
    status: PodStatus,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct PodStatus {
    #[serde(default, rename = "podIP")]
    pod_ip: String,
    #[serde(default, rename = "podIPs")]
    pod_ips: Vec<PodIp>,
    #[serde(default)]
    conditions: Vec<PodCondition>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct PodIp {
    #[serde(default)]
    ip: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct PodCondition {
    #[serde(default, rename = "type")]
    type_: String,
    #[serde(default)]
    status: String,
}

impl WatchedPod {
    /// Returns the first address of the Pod.
    pub fn address(&self) -> Option<std::net::IpAddr> {
        let first = self.status.pod_ips.first().map(|entry| &entry.ip);
        let text = first
            .filter(|ip| !ip.is_empty())
            .unwrap_or(&self.status.pod_ip);
        text.parse().ok()
    }

    /// Reports whether the Pod is ready.
    pub fn ready(&self) -> bool {
        let conditions = &self.status.conditions;
        conditions
            .iter()
            .any(|condition| condition.type_ == "Ready" && condition.status == "True")
    }

    /// Returns name and UID of the Sandbox that controls the Pod.
    pub fn sandbox(&self) -> Option<(&str, &str)> {
        let owners = self.metadata.owner_references.as_ref()?;
        let owner = owners.iter().find(|owner| {
            owner.controller == Some(true)
                && owner.kind == Sandbox::kind(&())
                && owner.api_version.split('/').next() == Some(&*Sandbox::group(&()))
        })?;
        Some((&owner.name, &owner.uid))
    }
}

macro_rules! watched_as {
    ($slim:ty, $full:ty) => {
        impl Resource for $slim {
            type DynamicType = ();
            type Scope = NamespaceResourceScope;
            fn kind((): &()) -> Cow<'_, str> {
                <$full>::kind(&())
            }
            fn group((): &()) -> Cow<'_, str> {
                <$full>::group(&())
            }
            fn version((): &()) -> Cow<'_, str> {
                <$full>::version(&())
            }
            fn plural((): &()) -> Cow<'_, str> {
                <$full>::plural(&())
            }
            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }
            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

watched_as!(WatchedSandbox, Sandbox);
watched_as!(WatchedPod, Pod);

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn pod(change: &Value) -> WatchedPod {
        serde_json::from_value(change.clone()).unwrap()
    }

    #[rstest]
    #[case(json!({}), None)]
    #[case(json!({"podIP": "10.0.0.1"}), Some("10.0.0.1"))]
    #[case(json!({"podIP": "10.0.0.1", "podIPs": [{"ip": "fd00::1"}]}), Some("fd00::1"))]
    #[case(json!({"podIP": "nonsense"}), None)]
    fn the_first_address_counts(#[case] status: Value, #[case] address: Option<&str>) {
        let address = address.map(|text| text.parse().unwrap());
        assert_eq!(pod(&json!({"status": status})).address(), address);
    }

    #[rstest]
    #[case("Sandbox", "agents.x-k8s.io/v1beta1", true, true)]
    #[case("Sandbox", "agents.x-k8s.io/v1", true, true)]
    #[case("Sandbox", "agents.x-k8s.io/v1beta1", false, false)]
    #[case("Sandbox", "evil.example.com/v1", true, false)]
    #[case("ReplicaSet", "apps/v1", true, false)]
    fn only_the_sandbox_that_controls_a_pod_owns_it(
        #[case] kind: &str,
        #[case] version: &str,
        #[case] controller: bool,
        #[case] owned: bool,
    ) {
        let owner = json!({"kind": kind, "apiVersion": version, "name": "s", "uid": "u", "controller": controller});
        let pod = pod(&json!({"metadata": {"ownerReferences": [owner]}}));
        assert_eq!(pod.sandbox(), owned.then_some(("s", "u")));
    }

    #[rstest]
    #[case(json!({}), json!({}), false)]
    #[case(json!({"torpor.dev/resume-on-request": "true"}), json!({}), true)]
    #[case(json!({}), json!({"torpor.dev/resume-on-request": "true"}), true)]
    #[case(json!({"torpor.dev/resume-on-request": "false"}), json!({"torpor.dev/resume-on-request": "true"}), false)]
    #[case(json!({"torpor.dev/resume-on-request": "yes"}), json!({}), false)]
    fn only_true_lets_a_request_resume(
        #[case] own: Value,
        #[case] template: Value,
        #[case] resume: bool,
    ) {
        let sandbox: WatchedSandbox = serde_json::from_value(json!({
            "metadata": {"annotations": own},
            "spec": {"operatingMode": "Suspended", "podTemplate": {"metadata": {"annotations": template}, "spec": {"futureField": 1}}},
            "status": {"conditions": "no list"},
        }))
        .unwrap();
        assert!(sandbox.suspended());
        assert_eq!(sandbox.resume_on_request(), resume);
    }
}
