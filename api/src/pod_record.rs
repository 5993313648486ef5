//! Record of a Sandbox's Pod as the controller saw it run: its identity, its node and its container
//! images.
//!
//! The controller keeps the record in an annotation that agents cannot write. A compromised node
//! can thus neither attract another node's Pod nor choose the container images of the Pod that
//! continues.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::ResourceExt;
use serde::{Deserialize, Serialize};

/// Longest annotation value that is parsed, in bytes. A Pod with 100 containers stays below it.
const MAX_LENGTH: usize = 64 * 1024;

/// Pod of a Sandbox, as the kubelet of its node reported it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodRecord {
    /// Reference of each container's image by the container's name, as the runtime reported it
    /// (`repository@sha256:…` or a bare `sha256:…`). Init containers are included.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub images: BTreeMap<String, String>,
    /// Name of the Pod.
    pub name: String,
    /// Node on which the Pod ran.
    pub node_name: String,
    /// UID of the Sandbox that controlled the Pod.
    #[serde(default, rename = "sandboxUID")]
    pub sandbox_uid: String,
    /// UID of the Pod.
    pub uid: String,
}

/// Failure to read a PodRecord from an annotation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the record of a Pod has {length} bytes; the limit is {MAX_LENGTH}")]
    TooLong { length: usize },
    #[error("the record of a Pod is not valid JSON: {0}")]
    Malformed(#[from] serde_json::Error),
}

impl PodRecord {
    /// Parses the value of the annotation.
    pub fn parse(value: &str) -> Result<Self, Error> {
        if value.len() > MAX_LENGTH {
            let length = value.len();
            return Err(Error::TooLong { length });
        }
        Ok(serde_json::from_str(value)?)
    }

    /// Returns the value of the annotation. Equal records give equal text.
    pub fn to_annotation(&self) -> String {
        // Strings and a map of strings always have a JSON form.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Returns the record of a Pod.
    ///
    /// `None` until the Pod has a node and the kubelet has reported the image of each container
    /// that is not an init container.
    pub fn of(pod: &Pod) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let status = pod.status.as_ref()?;
        let init = status.init_container_statuses.iter().flatten();
        let main = status.container_statuses.iter().flatten();
        let named = |status: &ContainerStatus| {
            let image = status.image_id.clone();
            (!image.is_empty()).then(|| (status.name.clone(), image))
        };
        let mut owners = pod.metadata.owner_references.iter().flatten();
        let owner = owners.find(|owner| owner.controller == Some(true));
        let images: BTreeMap<_, _> = main.chain(init).filter_map(named).collect();
        let is_whole = spec.containers.iter().all(|c| images.contains_key(&c.name));
        is_whole.then_some(())?;
        Some(Self {
            images,
            name: pod.name_any(),
            node_name: spec.node_name.clone()?,
            sandbox_uid: owner.map(|owner| owner.uid.clone()).unwrap_or_default(),
            uid: pod.uid()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(image_ids: [&str; 2]) -> Pod {
        serde_json::from_value(json!({
            "metadata": {
                "name": "s", "namespace": "n", "uid": "u",
                "ownerReferences": [{
                    "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "s", "uid": "o", "controller": true,
                }],
            },
            "spec": {"nodeName": "a", "containers": [{"name": "main"}, {"name": "side"}]},
            "status": {
                "initContainerStatuses": [{
                    "name": "init", "image": "i", "imageID": "r@sha256:0", "ready": true, "restartCount": 0,
                }],
                "containerStatuses": [
                    {"name": "main", "image": "i", "imageID": image_ids[0], "ready": true, "restartCount": 0},
                    {"name": "side", "image": "i", "imageID": image_ids[1], "ready": true, "restartCount": 0},
                ],
            },
        }))
        .unwrap()
    }

    #[test]
    fn a_record_has_the_node_and_each_containers_image_and_round_trips_through_its_annotation() {
        let record = PodRecord::of(&pod(["r@sha256:1", "sha256:2"])).unwrap();
        assert_eq!((&*record.uid, &*record.node_name), ("u", "a"));
        assert_eq!(record.sandbox_uid, "o");
        let images: Vec<_> = record.images.iter().map(|(k, v)| (&**k, &**v)).collect();
        let expected = [
            ("init", "r@sha256:0"),
            ("main", "r@sha256:1"),
            ("side", "sha256:2"),
        ];
        assert_eq!(images, expected);
        assert_eq!(PodRecord::parse(&record.to_annotation()).unwrap(), record);
    }

    #[test]
    fn a_pod_whose_images_are_not_known_yet_has_no_record() {
        assert_eq!(PodRecord::of(&pod(["r@sha256:1", ""])), None);
        assert_eq!(PodRecord::of(&Pod::default()), None);
    }

    #[test]
    fn a_record_that_is_too_long_or_no_json_is_refused() {
        let long = " ".repeat(MAX_LENGTH + 1);
        assert!(matches!(
            PodRecord::parse(&long),
            Err(Error::TooLong { .. })
        ));
        assert!(matches!(PodRecord::parse("{"), Err(Error::Malformed(_))));
    }
}
