//! No client required. Adds the volume by which a claim arrives in a sandbox that runs already.
//!
//! The kubelet writes annotations of the Pod into the volume's files, and writes them again when
//! the annotations change. The mount is part of every saved image, as the injected runtime's.

use serde_json::{Map, Value, json};
use torpor_api::annotations::{CLAIM, CLAIM_ENV, CLAIM_SECRET, LATE_BIND};
use torpor_claim_env::{DIRECTORY, ENV, FILES, UID};

use super::inject::{first_container, push};

/// Name of the volume.
const NAME: &str = "torpor-claim";

/// Reason why the volume cannot be added to a Pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("annotation {LATE_BIND}: podTemplate.spec has no container for a claim's files")]
    NoContainer,
    #[error(
        "annotation {LATE_BIND}: {what} {name:?} of podTemplate.spec is reserved for a claim's files; rename it"
    )]
    Taken { what: &'static str, name: String },
}

/// Returns the name of the Secret with the files that a claim brings to the Sandbox of this UID.
/// The Pod mounts it by name, so that no other Secret may have the name, before or after.
pub fn secret_name(sandbox_uid: &str) -> String {
    format!("torpor-claim-{sandbox_uid}")
}

/// Adds the volume, and mounts it in the first container. `secret`: the Secret with files, where
/// claims may bring some; it does not exist before a claim has.
pub(super) fn mount(spec: &mut Map<String, Value>, secret: Option<&str>) -> Result<(), Error> {
    let taken = |what, name: &str| Error::Taken {
        what,
        name: name.to_owned(),
    };
    if is_named(spec.get("volumes"), "name", NAME) {
        return Err(taken("volume", NAME));
    }
    for list in ["containers", "initContainers"] {
        let containers = spec.get(list).and_then(Value::as_array);
        for container in containers.into_iter().flatten() {
            let mounts = container.get("volumeMounts");
            if is_named(mounts, "name", NAME) {
                return Err(taken("volumeMount", NAME));
            }
            for path in [DIRECTORY, &format!("{DIRECTORY}/")] {
                if is_named(mounts, "mountPath", path) {
                    return Err(taken("mountPath", path));
                }
            }
        }
    }
    let container = first_container(spec).ok_or(Error::NoContainer)?;
    let mount = json!({"name": NAME, "mountPath": DIRECTORY, "readOnly": true});
    push(container, "volumeMounts", mount);
    let file = |path: &str, key: &str| {
        let field = format!("metadata.annotations['{key}']");
        json!({"path": path, "fieldRef": {"fieldPath": field}})
    };
    let own = [
        file(UID, CLAIM),
        file(ENV, CLAIM_ENV),
        file(FILES, CLAIM_SECRET),
    ];
    let mut sources = vec![json!({"downwardAPI": {"items": own}})];
    sources.extend(secret.map(|name| json!({"secret": {"name": name, "optional": true}})));
    let projected = json!({"sources": sources});
    push(
        spec,
        "volumes",
        json!({"name": NAME, "projected": projected}),
    );
    Ok(())
}

fn is_named(list: Option<&Value>, field: &str, name: &str) -> bool {
    let all = list.and_then(Value::as_array).into_iter().flatten();
    all.into_iter().any(|one| one[field] == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(value: Value) -> Map<String, Value> {
        value.as_object().cloned().expect("an object")
    }

    #[test]
    fn the_first_container_alone_has_the_files() {
        let mut spec = spec(json!({
            "containers": [{"name": "a", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}, {"name": "b"}],
            "volumes": [{"name": "v", "emptyDir": {}}],
        }));
        mount(&mut spec, Some(&secret_name("u-s"))).unwrap();
        assert_eq!(
            spec["containers"],
            json!([
                {"name": "a", "volumeMounts": [
                    {"name": "v", "mountPath": "/v"},
                    {"name": "torpor-claim", "mountPath": "/run/claim", "readOnly": true},
                ]},
                {"name": "b"},
            ])
        );
        let sources = &spec["volumes"][1]["projected"]["sources"];
        assert_eq!(
            sources[1],
            json!({"secret": {"name": "torpor-claim-u-s", "optional": true}})
        );
        let items = &sources[0]["downwardAPI"]["items"];
        assert_eq!(
            items[1],
            json!({"path": "env", "fieldRef": {"fieldPath": "metadata.annotations['torpor.dev/claim-env']"}})
        );
    }

    #[test]
    fn a_name_or_path_that_is_taken_is_an_error() {
        for (value, what) in [
            (json!({}), "no container"),
            (
                json!({"containers": [{}], "volumes": [{"name": "torpor-claim"}]}),
                "volume",
            ),
            (
                json!({"containers": [{}, {"volumeMounts": [{"name": "torpor-claim"}]}]}),
                "volumeMount",
            ),
            (
                json!({"containers": [{}, {"volumeMounts": [{"mountPath": "/run/claim"}]}]}),
                "mountPath",
            ),
            (
                json!({"containers": [{"volumeMounts": [{"mountPath": "/run/claim/"}]}]}),
                "mountPath",
            ),
        ] {
            let error = mount(&mut spec(value), None).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
