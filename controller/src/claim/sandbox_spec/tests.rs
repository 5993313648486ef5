use rstest::rstest;

use super::*;

fn template(env: &str, volumes: &str) -> SandboxTemplate {
    serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "metadata": {"name": "t", "namespace": "ns"},
        "spec": {
            "podTemplate": {"spec": {
                "fieldOfTomorrow": 1,
                "initContainers": [{"name": "i", "image": "img"}],
                "containers": [
                    {"name": "c", "image": "img", "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]},
                    {"name": "from", "image": "img", "envFrom": [{"secretRef": {"name": "s"}}]},
                ],
            }},
            "volumeClaimTemplates": [{"metadata": {"name": "v"}, "spec": {"accessModes": ["ReadWriteOnce"]}}],
            "envVarsInjectionPolicy": env,
            "volumeClaimTemplatesPolicy": volumes,
        },
    }))
    .unwrap()
}

fn claim(spec: Value) -> SandboxClaim {
    let mut whole = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
        "metadata": {"name": "c", "namespace": "ns", "uid": "u-c", "labels": {"agents.x-k8s.io/created-by": "curl"}},
        "spec": {"warmPoolRef": {"name": "p"}},
    });
    crate::merge_patch::apply(&mut whole, &json!({"spec": spec}));
    serde_json::from_value(whole).unwrap()
}

fn env(container: &str, name: &str) -> Value {
    json!({"env": [{"containerName": container, "name": name, "value": "1"}]})
}

fn made(policy: &str, spec: Value) -> Result<Value, String> {
    let template = template(policy, policy);
    sandbox(
        &claim(spec),
        &template,
        &PodMetadata::default(),
        &Additions::default(),
    )
    .map_err(|error| error.to_string())
}

#[rstest]
#[case::disallowed(
    "Disallowed",
    env("", "B"),
    "environment variables are not allowed: the template's envVarsInjectionPolicy is Disallowed"
)]
#[case::variable_exists(
    "Allowed",
    env("", "A"),
    "environment variable \"A\" is in container \"c\" already; the template's envVarsInjectionPolicy Allowed lets a claim add new ones only"
)]
#[case::opaque(
    "Allowed",
    env("from", "B"),
    "container \"from\" uses envFrom, so that it is unknown whether \"B\" is new; the template's envVarsInjectionPolicy Allowed lets a claim add new ones only"
)]
#[case::no_such_container(
    "Overrides",
    env("x", "B"),
    "environment variable \"B\" is for container \"x\", which the template does not have"
)]
#[case::twice("Allowed", json!({"env": [{"name": "B", "value": "1"}, {"name": "B", "value": "2"}]}), "environment variable \"B\" is in container \"c\" already; the template's envVarsInjectionPolicy Allowed lets a claim add new ones only")]
#[case::volumes_disallowed("Disallowed", json!({"volumeClaimTemplates": [{"metadata": {"name": "w"}, "spec": {}}]}), "volumeClaimTemplates are not allowed: the template's volumeClaimTemplatesPolicy is Disallowed")]
#[case::volume_exists("Allowed", json!({"volumeClaimTemplates": [{"metadata": {"name": "v"}, "spec": {}}]}), "volumeClaimTemplate \"v\" is in the template already; the template's volumeClaimTemplatesPolicy Allowed lets a claim add new ones only")]
#[case::volume_without_name("Allowed", json!({"volumeClaimTemplates": [{"spec": {}}]}), "volumeClaimTemplate number 1 of the claim has no name")]
#[case::volume_twice("Overrides", json!({"volumeClaimTemplates": [{"metadata": {"name": "w"}, "spec": {}}, {"metadata": {"name": "w"}, "spec": {}}]}), "volumeClaimTemplate \"w\" is in the claim twice")]
fn additions_that_the_template_forbids_are_named(
    #[case] policy: &str,
    #[case] spec: Value,
    #[case] error: &str,
) {
    let rejected = made(policy, spec).unwrap_err();
    assert_eq!(rejected, error);
}

#[rstest]
#[case::without_name(json!([{"metadata": {"name": "v"}, "spec": {}}, {"spec": {}}]), "volumeClaimTemplate number 2 of the template has no name")]
#[case::twice(json!([{"metadata": {"name": "v"}, "spec": {}}, {"metadata": {"name": "v"}, "spec": {}}]), "volumeClaimTemplate \"v\" is in the template twice")]
fn volumes_of_the_template_have_to_be_valid(
    #[values("Disallowed", "Allowed", "Overrides")] policy: &str,
    #[values(json!({}), json!({"volumeClaimTemplates": [{"metadata": {"name": "v"}, "spec": {}}]}))]
    spec: Value,
    #[case] volumes: Value,
    #[case] error: &str,
) {
    let mut template = template(policy, policy);
    template.spec.volume_claim_templates = serde_json::from_value(volumes).unwrap();
    let rejected = sandbox(
        &claim(spec),
        &template,
        &PodMetadata::default(),
        &Additions::default(),
    )
    .unwrap_err();
    assert_eq!(rejected.to_string(), error);
    assert!(!rejected.is_about_env());
}

#[rstest]
#[case::new("Allowed", env("", "B"), 0, 1, json!({"name": "B", "value": "1"}))]
#[case::replaced("Overrides", env("c", "A"), 0, 0, json!({"name": "A", "value": "1"}))]
#[case::beside_a_source("Overrides", env("from", "B"), 1, 0, json!({"name": "B", "value": "1"}))]
fn variables_reach_their_container(
    #[case] policy: &str,
    #[case] spec: Value,
    #[case] container: usize,
    #[case] at: usize,
    #[case] expected: Value,
) {
    let sandbox = made(policy, spec).unwrap();
    let containers = &sandbox["spec"]["podTemplate"]["spec"]["containers"];
    assert_eq!(containers[container]["env"][at], expected);
}

#[test]
fn variables_reach_init_containers_too() {
    let sandbox = made("Allowed", env("i", "B")).unwrap();
    let init = &sandbox["spec"]["podTemplate"]["spec"]["initContainers"][0];
    assert_eq!(init["env"], json!([{"name": "B", "value": "1"}]));
}

#[rstest]
#[case::appended("Allowed", "w", &["v", "w"])]
#[case::replaced("Overrides", "v", &["v"])]
fn volumes_are_merged_by_name(#[case] policy: &str, #[case] name: &str, #[case] names: &[&str]) {
    let spec = json!({"volumeClaimTemplates": [{"metadata": {"name": name}, "spec": {"storageClassName": "fast"}}]});
    let sandbox = made(policy, spec).unwrap();
    let volumes = sandbox["spec"]["volumeClaimTemplates"].as_array().unwrap();
    let found: Vec<&str> = volumes
        .iter()
        .map(|volume| volume["metadata"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(found, names);
    assert_eq!(volumes.last().unwrap()["spec"]["storageClassName"], "fast");
}

#[test]
fn a_cold_sandbox_equals_a_sandbox_of_upstream() {
    let sandbox = made("Disallowed", json!({})).unwrap();
    insta::assert_json_snapshot!(sandbox["metadata"], @r#"
    {
      "annotations": {
        "agents.x-k8s.io/sandbox-template-ref": "t"
      },
      "labels": {
        "agents.x-k8s.io/claim-uid": "u-c",
        "agents.x-k8s.io/created-by": "unknown",
        "agents.x-k8s.io/launch-type": "cold",
        "agents.x-k8s.io/sandbox-template-ref-hash": "f10c3da3"
      },
      "name": "c",
      "namespace": "ns",
      "ownerReferences": [
        {
          "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
          "blockOwnerDeletion": true,
          "controller": true,
          "kind": "SandboxClaim",
          "name": "c",
          "uid": "u-c"
        }
      ]
    }
    "#);
    let spec = &sandbox["spec"]["podTemplate"]["spec"];
    assert_eq!(spec["automountServiceAccountToken"], false);
    assert_eq!(spec["dnsPolicy"], "None");
    assert_eq!(spec["fieldOfTomorrow"], 1);
}
