use serde_json::json;

use super::*;

fn template(pod: Value) -> SandboxTemplate {
    let whole = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "metadata": {"name": "t", "namespace": "ns", "uid": "u-t"},
        "spec": {"podTemplate": {"spec": pod}},
    });
    serde_json::from_value(whole).unwrap()
}

fn whole() -> Value {
    let anti = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}});
    json!({
        "runtimeClassName": "torpor",
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"pool": "a"},
        "affinity": anti,
        "securityContext": {"runAsNonRoot": true},
        "volumes": [{"name": "data", "emptyDir": {}}],
        "initContainers": [{"name": "i", "image": "init:1"}],
        "containers": [
            {
                "name": "a", "image": "main:1", "imagePullPolicy": "Always",
                "command": ["serve"], "env": [{"name": "SECRET", "value": "x"}],
                "securityContext": {"allowPrivilegeEscalation": false},
                "resources": {"requests": {"memory": "8Gi"}},
            },
            {"name": "b", "image": "main:1"},
            {"name": "c", "image": "local:1", "imagePullPolicy": "Never"},
        ],
    })
}

#[test]
fn each_image_is_pulled_once_as_for_a_member_and_nothing_of_it_runs() {
    let template = template(whole());
    assert_eq!(images(&template), ["init:1", "main:1"]);
    let pod = pod(&template, "t-images-x", "n1", "runtime:1");
    let spec = &pod["spec"];
    for (key, value) in [
        ("runtimeClassName", json!("torpor")),
        ("imagePullSecrets", json!([{"name": "registry"}])),
        ("nodeSelector", json!({"pool": "a"})),
        ("securityContext", json!({"runAsNonRoot": true})),
        ("automountServiceAccountToken", json!(false)),
        ("restartPolicy", json!("Never")),
    ] {
        assert_eq!(spec[key], value, "{key}");
    }
    assert!(spec["affinity"]["podAntiAffinity"].is_null());
    assert!(
        spec["affinity"]["nodeAffinity"]
            .to_string()
            .contains("\"n1\"")
    );
    assert_eq!(spec["initContainers"][0]["image"], "runtime:1");
    let main = &spec["containers"][1];
    assert_eq!(
        (
            &main["image"],
            &main["imagePullPolicy"],
            &main["securityContext"]
        ),
        (
            &json!("main:1"),
            &json!("Always"),
            &json!({"allowPrivilegeEscalation": false})
        )
    );
    for container in spec["containers"].as_array().unwrap() {
        assert_eq!(container["command"][0], inject::BINARY);
        assert_eq!(container["resources"]["requests"]["memory"], "32Mi");
    }
    assert!(!spec.to_string().contains("SECRET"));
    assert!(!spec.to_string().contains("local:1"));
}

#[test]
fn the_name_follows_what_decides_about_the_images() {
    let first = template(whole());
    let named = |template: &SandboxTemplate, node: &str| name(template, &version(template), node);
    assert_eq!(named(&first, "n1"), named(&template(whole()), "n1"));
    assert_ne!(named(&first, "n1"), named(&first, "n2"));
    for (key, value) in [
        ("imagePullSecrets", json!([])),
        ("containers", json!([{"name": "a", "image": "main:2"}])),
        ("nodeSelector", json!({"pool": "b"})),
    ] {
        let mut pod = whole();
        pod[key] = value;
        assert_ne!(named(&first, "n1"), named(&template(pod), "n1"), "{key}");
    }
    let mut pod = whole();
    pod["containers"][0]["command"] = json!(["other"]);
    assert_eq!(named(&first, "n1"), named(&template(pod), "n1"));
}

#[test]
fn a_pod_pulls_until_it_has_ended() {
    let of = |status: Value| {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "status": status,
        });
        progress(&serde_json::from_value(pod).unwrap(), Timestamp::UNIX_EPOCH)
    };
    assert_eq!(of(json!({})), Progress::Pulling);
    let old: Pod = serde_json::from_value(json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "p", "creationTimestamp": "2026-01-01T00:00:00Z"},
    }))
    .unwrap();
    let after = |minutes: i64| {
        let created: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        progress(&old, created + jiff::SignedDuration::from_mins(minutes))
    };
    assert_eq!(after(29), Progress::Pulling);
    let held = "no progress after 30 minutes";
    assert_eq!(after(30), Progress::Held(held.to_owned()));
    assert_eq!(of(json!({"phase": "Running"})), Progress::Pulling);
    assert_eq!(of(json!({"phase": "Succeeded"})), Progress::Staged);
    let failed = json!({"phase": "Failed", "reason": "NodeAffinity", "message": "m"});
    assert_eq!(of(failed), Progress::Failed("NodeAffinity: m".to_owned()));
    let ended = json!({"phase": "Failed", "containerStatuses": [{
        "name": "image-0", "image": "main:1", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"terminated": {"exitCode": 128, "reason": "StartError", "message": "m"}},
    }]});
    let cause = "image main:1: StartError (exit code 128): m";
    assert_eq!(of(ended), Progress::Failed(cause.to_owned()));
    let silent = json!({"phase": "Failed"});
    assert_eq!(of(silent), Progress::Failed("its Pod failed".to_owned()));
    let waiting = |reason: &str| {
        let state = json!({"waiting": {"reason": reason, "message": "m"}});
        json!({"phase": "Pending", "initContainerStatuses": [{
            "name": "i", "image": "init:1", "imageID": "", "ready": false, "restartCount": 0,
            "state": state,
        }]})
    };
    assert_eq!(of(waiting("PodInitializing")), Progress::Pulling);
    let held = "image init:1: ImagePullBackOff: m";
    assert_eq!(
        of(waiting("ImagePullBackOff")),
        Progress::Held(held.to_owned())
    );
}
