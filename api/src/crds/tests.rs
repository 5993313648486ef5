use std::{collections::BTreeMap, fs, path::Path, sync::LazyLock};

use super::*;

/// Shared by the tests, since generating the definitions takes a quarter of a second.
static DEFINITIONS: LazyLock<Vec<Value>> = LazyLock::new(definitions);
static POD_SNAPSHOTS: LazyLock<Vec<Value>> = LazyLock::new(pod_snapshot_definitions);

fn all() -> impl Iterator<Item = &'static Value> {
    DEFINITIONS.iter().chain(POD_SNAPSHOTS.iter())
}

fn definition(kind: &str) -> &'static Value {
    let mut all = DEFINITIONS.iter();
    all.find(|crd| crd["spec"]["names"]["kind"] == kind)
        .unwrap()
}

fn schema(kind: &str) -> Value {
    definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

fn property(kind: &str, path: &str) -> Value {
    let pointer = path.replace('.', "/properties/").replace("[]", "/items");
    schema(kind)
        .pointer(&format!("/properties/{pointer}"))
        .cloned()
        .unwrap_or_else(|| {
            panic!("{kind} has no {path}");
        })
}

#[test]
fn the_committed_files_match_the_types() {
    assert_committed("crds", DEFINITIONS.clone());
    assert_committed("podsnapshots", POD_SNAPSHOTS.clone());
}

fn assert_committed(folder: &str, definitions: Vec<Value>) {
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy");
    let mut committed = BTreeMap::new();
    for entry in fs::read_dir(deploy.join(folder)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        // The names of definition files contain the group, an underscore and the plural.
        if name.contains('_') {
            committed.insert(name, fs::read_to_string(entry.path()).unwrap());
        }
    }
    let generated: BTreeMap<String, String> = files(definitions).unwrap().into_iter().collect();
    let names = |files: &BTreeMap<String, String>| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&committed), names(&generated));
    for (name, text) in &generated {
        // assert_eq would print half a megabyte.
        assert!(
            committed[name] == *text,
            "{name} differs from the types; run torpor-crds (see the file's first lines)"
        );
    }
}

#[test]
fn generating_twice_gives_the_same_bytes() {
    assert!(files(definitions()).unwrap() == files(definitions()).unwrap());
}

#[test]
fn the_yaml_parses_to_the_json() {
    for (name, text) in files(all().cloned().collect()).unwrap() {
        let read: Value = serde_saphyr::from_str(&text).unwrap();
        let crd = all()
            .find(|crd| {
                let spec = &crd["spec"];
                let (group, plural) = (spec["group"].as_str(), spec["names"]["plural"].as_str());
                name == format!("{}_{}.yaml", group.unwrap(), plural.unwrap())
            })
            .unwrap();
        assert!(&read == crd, "{name}");
    }
}

#[test]
fn every_definition_fits_into_the_annotation_of_kubectl_apply() {
    for crd in all() {
        let bytes = serde_json::to_string(&crd).unwrap().len();
        assert!(bytes < 200 * 1024, "{}: {bytes}", crd["metadata"]["name"]);
    }
}

#[test]
fn schemas_are_structural() {
    for crd in all() {
        let name = crd["metadata"]["name"].clone();
        walk(
            &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"],
            &mut |node| {
                for forbidden in ["$ref", "nullable", "oneOf", "allOf", "not", "definitions"] {
                    assert!(
                        node.get(forbidden).is_none(),
                        "{name}: {forbidden} in {node:?}"
                    );
                }
                let free = node.contains_key("x-kubernetes-int-or-string")
                    || node.contains_key("x-kubernetes-preserve-unknown-fields");
                assert!(
                    free || node.contains_key("type"),
                    "{name}: no type in {node:?}"
                );
                if let Some(keys) = node.get("x-kubernetes-list-map-keys") {
                    check_map_keys(keys, &node["items"]);
                }
            },
        );
    }
}

fn check_map_keys(keys: &Value, items: &Value) {
    for key in keys.as_array().unwrap() {
        let required = items["required"]
            .as_array()
            .is_some_and(|all| all.contains(key));
        let default = items["properties"][key.as_str().unwrap()]
            .get("default")
            .is_some();
        assert!(
            required || default,
            "map key {key} is neither required nor defaulted: {items}"
        );
    }
}

fn walk(schema: &Value, look: &mut impl FnMut(&Map<String, Value>)) {
    let node = schema.as_object().unwrap();
    look(node);
    for (_, property) in node
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        walk(property, look);
    }
    for below in ["items", "additionalProperties"] {
        if let Some(below @ Value::Object(_)) = node.get(below) {
            walk(below, look);
        }
    }
}

#[test]
fn names_scopes_and_subresources_are_upstreams() {
    let mut lines = Vec::new();
    for crd in DEFINITIONS.iter() {
        let spec = &crd["spec"];
        let version = &spec["versions"][0];
        let columns: Vec<&str> = version["additionalPrinterColumns"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|column| column["name"].as_str().unwrap())
            .collect();
        lines.push(format!(
            "{} {} {} {} short={} sub={} columns={}",
            spec["group"].as_str().unwrap(),
            version["name"].as_str().unwrap(),
            spec["names"]["plural"].as_str().unwrap(),
            spec["scope"].as_str().unwrap(),
            spec["names"]["shortNames"],
            version["subresources"],
            columns.join(",")
        ));
    }
    insta::assert_snapshot!(lines.join("\n"), @r#"
    agents.x-k8s.io v1beta1 sandboxes Namespaced short=["sandbox"] sub={"status":{}} columns=Ready,Reason,Age
    extensions.agents.x-k8s.io v1beta1 sandboxclaims Namespaced short=["sandboxclaim"] sub={"status":{}} columns=Ready,Sandbox,Reason,Age
    extensions.agents.x-k8s.io v1beta1 sandboxtemplates Namespaced short=["sandboxtemplate"] sub=null columns=
    extensions.agents.x-k8s.io v1beta1 sandboxwarmpools Namespaced short=["swp"] sub={"scale":{"labelSelectorPath":".status.selector","specReplicasPath":".spec.replicas","statusReplicasPath":".status.replicas"},"status":{}} columns=Ready,Desired,Age
    torpor.dev v1alpha1 sandboxsnapshots Namespaced short=["sbsnap"] sub={"status":{}} columns=Sandbox,Node,Size,Committed,Reason,Uploaded,Age
    torpor.dev v1alpha1 sandboxnodes Cluster short=null sub={"status":{}} columns=Ready,Running,Dozing,Hibernated,Images,Age
    torpor.dev v1alpha1 snapshotclasses Cluster short=null sub=null columns=Provisioner,Age
    "#);
}

#[test]
fn sandbox_spec_has_upstreams_defaults_enums_and_rule() {
    let mode = property("Sandbox", "spec.operatingMode");
    assert_eq!(mode["default"], "Running");
    assert_eq!(mode["enum"], json!(["Running", "Suspended"]));
    let policy = property("Sandbox", "spec.shutdownPolicy");
    assert_eq!(
        (&policy["default"], &policy["enum"]),
        (&json!("Retain"), &json!(["Delete", "Retain"]))
    );
    assert_eq!(
        property("Sandbox", "spec.shutdownTime")["format"],
        "date-time"
    );
    let spec = property("Sandbox", "spec");
    assert_eq!(spec["required"], json!(["podTemplate"]));
    assert_eq!(
        spec["x-kubernetes-validations"],
        json!([{
            "rule": "has(self.volumeClaimTemplates) == has(oldSelf.volumeClaimTemplates) && (!has(self.volumeClaimTemplates) || self.volumeClaimTemplates == oldSelf.volumeClaimTemplates)",
            "message": "volumeClaimTemplates is immutable",
        }])
    );
    let templates = property("Sandbox", "spec.volumeClaimTemplates");
    assert_eq!(templates["x-kubernetes-list-type"], "atomic");
    assert_eq!(templates["items"]["required"], json!(["spec"]));
    let mut fields: Vec<String> = spec["properties"]
        .as_object()
        .unwrap()
        .keys()
        .cloned()
        .collect();
    fields.sort();
    assert_eq!(
        fields,
        [
            "operatingMode",
            "podTemplate",
            "service",
            "shutdownPolicy",
            "shutdownTime",
            "volumeClaimTemplates"
        ]
    );
}

#[test]
fn sandbox_status_has_upstreams_fields() {
    let status = property("Sandbox", "status");
    let mut fields: Vec<&String> = status["properties"].as_object().unwrap().keys().collect();
    fields.sort();
    assert_eq!(
        fields,
        [
            "conditions",
            "nodeName",
            "podIPs",
            "selector",
            "service",
            "serviceFQDN"
        ]
    );
    assert_eq!(
        status["properties"]["conditions"]["x-kubernetes-list-map-keys"],
        json!(["type"])
    );
}

#[test]
fn extension_kinds_have_upstreams_defaults_and_limits() {
    let at = |kind: &str, path: &str| property(kind, path);
    assert_eq!(
        at("SandboxClaim", "spec")["required"],
        json!(["warmPoolRef"])
    );
    assert_eq!(
        at("SandboxClaim", "spec.lifecycle.shutdownPolicy")["default"],
        "Retain"
    );
    assert_eq!(
        at("SandboxClaim", "spec.lifecycle.ttlSecondsAfterFinished")["minimum"],
        0
    );
    assert_eq!(
        at("SandboxClaim", "spec.env")["x-kubernetes-list-type"],
        "atomic"
    );
    assert_eq!(
        at("SandboxClaim", "spec.env")["items"]["required"],
        json!(["name", "value"])
    );
    assert_eq!(
        at("SandboxTemplate", "spec.networkPolicyManagement")["default"],
        "Managed"
    );
    assert_eq!(
        at("SandboxTemplate", "spec.envVarsInjectionPolicy")["default"],
        "Disallowed"
    );
    assert_eq!(
        at("SandboxTemplate", "spec.volumeClaimTemplatesPolicy")["default"],
        "Disallowed"
    );
    assert_eq!(
        at("SandboxWarmPool", "spec")["required"],
        json!(["sandboxTemplateRef"])
    );
    let replicas = at("SandboxWarmPool", "spec.replicas");
    assert_eq!(
        (&replicas["default"], &replicas["minimum"]),
        (&json!(1), &json!(0))
    );
    let strategy = at("SandboxWarmPool", "spec.updateStrategy.type");
    assert_eq!(strategy["default"], "OnReplenish");
}

#[test]
fn the_pod_spec_keeps_unknown_fields_and_merges_its_lists_by_key() {
    for kind in ["Sandbox", "SandboxTemplate"] {
        let spec = property(kind, "spec.podTemplate.spec");
        assert_eq!(spec["x-kubernetes-preserve-unknown-fields"], true);
        assert_eq!(
            spec["properties"]["containers"]["x-kubernetes-list-map-keys"],
            json!(["name"])
        );
        let container = &spec["properties"]["containers"]["items"]["properties"];
        assert_eq!(container["command"]["x-kubernetes-list-type"], "atomic");
        let cpu = &container["resources"]["properties"]["limits"]["additionalProperties"];
        assert_eq!(cpu["x-kubernetes-int-or-string"], true);
        assert_eq!(cpu["pattern"], QUANTITY);
    }
}

#[test]
fn a_sandbox_with_a_service_has_a_name_that_a_service_may_have() {
    let rules = &schema("Sandbox")["x-kubernetes-validations"];
    assert_eq!(
        rules[0]["rule"],
        "!has(self.spec.service) || !self.spec.service || size(self.metadata.name) <= 63"
    );
    let least = |path| property("SandboxWarmPool", path)["minimum"].as_f64();
    assert_eq!(least("status.observedGeneration"), Some(0.0));
    assert_eq!(least("spec.readinessGracePeriodSeconds"), Some(30.0));
}

#[test]
fn a_snapshots_spec_is_immutable() {
    let spec = property("SandboxSnapshot", "spec");
    assert_eq!(
        spec["x-kubernetes-validations"][0],
        json!({"rule": "self == oldSelf", "message": "spec is immutable"})
    );
    assert_eq!(spec["required"], json!(["sandboxName"]));
    assert_eq!(spec["properties"]["reason"]["default"], "Manual");
}
