//! JSON objects that pass through Torpor's programs unchanged.
//!
//! The types of k8s-openapi drop fields that they do not know, but a pod template for a newer
//! Kubernetes must reach the Pod complete. [`Raw`] therefore keeps the object as it came and offers
//! a typed view of it.

use std::{borrow::Cow, marker::PhantomData};

use k8s_openapi::api::core::v1::{PersistentVolumeClaimSpec, PodSpec};
use schemars::{
    JsonSchema, Schema, SchemaGenerator,
    transform::{RecursiveTransform, Transform},
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::DeserializeOwned};
use serde_json::{Map, Value};

/// Pod spec as the user wrote it.
pub type RawPodSpec = Raw<PodSpec>;
/// PersistentVolumeClaim spec as the user wrote it.
pub type RawClaimSpec = Raw<PersistentVolumeClaimSpec>;

/// JSON object with the schema of `T`.
pub struct Raw<T> {
    json: Map<String, Value>,
    schema: PhantomData<fn() -> T>,
}

/// Failure to read a JSON object as its type.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the object as {type_name}")]
pub struct NotTyped {
    type_name: &'static str,
    source: serde_json::Error,
}

impl<T> Raw<T> {
    pub fn new(json: Map<String, Value>) -> Self {
        Self {
            json,
            schema: PhantomData,
        }
    }

    /// Returns the object with all its fields.
    pub fn json(&self) -> &Map<String, Value> {
        &self.json
    }
}

impl RawPodSpec {
    /// Returns `runtimeClassName`.
    pub fn runtime_class_name(&self) -> Option<&str> {
        self.json.get("runtimeClassName")?.as_str()
    }
}

impl<T: DeserializeOwned> Raw<T> {
    /// Returns the typed view, without the fields that `T` does not know.
    pub fn typed(&self) -> Result<T, NotTyped> {
        T::deserialize(&self.json).map_err(|source| NotTyped {
            type_name: std::any::type_name::<T>(),
            source,
        })
    }
}

// Implemented by hand, because a derive would require the trait of `T`.
impl<T> Clone for Raw<T> {
    fn clone(&self) -> Self {
        Self::new(self.json.clone())
    }
}

impl<T> Default for Raw<T> {
    fn default() -> Self {
        Self::new(Map::new())
    }
}

impl<T> PartialEq for Raw<T> {
    fn eq(&self, other: &Self) -> bool {
        self.json == other.json
    }
}

impl<T> std::fmt::Debug for Raw<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.json.fmt(f)
    }
}

impl<T> Serialize for Raw<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.json.serialize(serializer)
    }
}

impl<'de, T> Deserialize<'de> for Raw<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Map::deserialize(deserializer).map(Self::new)
    }
}

impl<T: JsonSchema> JsonSchema for Raw<T> {
    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::json_schema(generator)
    }
}

/// Returns the schema of a pod template's spec: the API's own, with unknown fields preserved by the
/// apiserver.
pub fn pod_spec_schema(generator: &mut SchemaGenerator) -> Schema {
    // The apiserver drops unlisted fields of an object that lists any, unless that very object
    // preserves them (Kubernetes, "Field pruning").
    let mut keep_unknown_fields = RecursiveTransform(|schema: &mut Schema| {
        if schema.get("properties").is_some() {
            schema.insert(
                "x-kubernetes-preserve-unknown-fields".to_owned(),
                true.into(),
            );
        }
    });
    let mut schema = PodSpec::json_schema(generator);
    keep_unknown_fields.transform(&mut schema);
    schema
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unknown_fields_survive_decode_and_encode() {
        let written = json!({
            "containers": [{"name": "c", "image": "busybox", "fieldOfTomorrow": {"a": [1, 2]}}],
            "podFieldOfTomorrow": "x",
        });
        let raw: RawPodSpec = serde_json::from_value(written.clone()).unwrap();
        assert_eq!(serde_json::to_value(&raw).unwrap(), written);
        assert_eq!(raw.typed().unwrap().containers[0].name, "c");
    }

    #[test]
    fn a_spec_of_the_wrong_shape_is_an_error_that_names_the_type() {
        let raw: RawPodSpec = serde_json::from_value(json!({"containers": "none"})).unwrap();
        let error = raw.typed().unwrap_err();
        assert!(error.to_string().contains("PodSpec"), "{error}");
    }
}
