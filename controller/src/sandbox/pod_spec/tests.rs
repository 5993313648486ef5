use rstest::rstest;

use super::*;

fn sandbox(spec: Value) -> Sandbox {
    serde_json::from_value(json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
        "metadata": {"name": "s", "namespace": "ns", "uid": "u"},
        "spec": {"podTemplate": {"spec": spec}},
    }))
    .unwrap()
}

/// Pod without the injected runtime.
fn pod(sandbox: &Sandbox, wishes: &[(&str, String)], memory: Option<&Memory>) -> Value {
    super::pod(
        sandbox,
        wishes,
        memory.map_or(Start::Cold, Start::Memory),
        None,
    )
    .unwrap()
}

fn memory() -> Memory {
    Memory {
        image_id: "p.1".into(),
        nodes: vec!["n1".into()],
        sources: None,
        copy: false,
        on_failure: OnRestoreFailure::Fail,
        containers: vec![("c".into(), Some("registry.example/img@sha256:abc".into()))],
        completed: Vec::new(),
        pod_name: Some("s".into()),
        backup: None,
        pod_snapshot: None,
    }
}

#[test]
fn without_memory_the_spec_is_exactly_the_templates() {
    let spec = json!({
        "containers": [{"name": "c", "image": "img", "tomorrow": 1}], "alsoTomorrow": {"x": []},
    });
    let pod = pod(&sandbox(spec.clone()), &[], None);
    assert_eq!(pod["spec"], spec);
    assert_eq!(pod["metadata"]["annotations"], json!({}));
}

#[test]
fn a_pod_with_a_runtime_class_names_the_containers_that_add_net_raw() {
    let named = |class: Value| {
        let context = json!({"capabilities": {"add": ["NET_RAW"]}});
        let containers = json!([{"name": "c", "securityContext": context}, {"name": "d"}]);
        let spec = json!({"runtimeClassName": class, "containers": containers});
        pod(&sandbox(spec), &[], None)["metadata"]["annotations"].clone()
    };
    assert_eq!(named(json!("torpor")), json!({"torpor.dev/net-raw": "c"}));
    assert_eq!(named(json!(null)), json!({}));
}

const RULE: &str = r#"{"key":"metadata.name","operator":"In","values":["n1"]}"#;

#[rstest]
#[case::no_affinity(json!({}), json!([{"matchFields": [0]}]))]
#[case::an_empty_list(
    json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}),
    json!([{"matchFields": [0]}])
)]
#[case::each_alternative_gets_it(
    json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "zone", "operator": "Exists"}]},
        {"matchFields": [{"key": "x"}]},
    ]}}}),
    json!([
        {"matchExpressions": [{"key": "zone", "operator": "Exists"}], "matchFields": [0]},
        {"matchFields": [{"key": "x"}, 0]},
    ])
)]
fn the_node_is_added_to_the_affinity_of_the_template(
    #[case] affinity: Value,
    #[case] mut terms: Value,
) {
    let rule: Value = serde_json::from_str(RULE).unwrap();
    for term in terms.as_array_mut().unwrap() {
        for field in term["matchFields"].as_array_mut().unwrap() {
            if *field == 0 {
                *field = rule.clone();
            }
        }
    }
    let mut affinity = affinity;
    affinity["podAffinity"] = json!({"kept": true});
    let pod = pod(
        &sandbox(json!({"affinity": affinity, "containers": []})),
        &[],
        Some(&memory()),
    );
    let affinity = &pod["spec"]["affinity"];
    let required = &affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    assert_eq!(required["nodeSelectorTerms"], terms);
    assert_eq!(affinity["podAffinity"], json!({"kept": true}));
}

#[rstest]
#[case("registry.example/img@sha256:abc", "registry.example/img@sha256:abc")]
#[case("sha256:abc", "sha256:abc")]
#[case("docker-pullable://img@sha256:abc", "img@sha256:abc")]
fn container_images_are_those_of_the_image(#[case] saved: &str, #[case] used: &str) {
    let memory = Memory {
        containers: vec![("c".into(), Some(saved.into()))],
        ..memory()
    };
    for (policy, kept) in [(json!("Always"), "IfNotPresent"), (json!("Never"), "Never")] {
        let spec =
            json!({"containers": [{"name": "c", "image": "img", "imagePullPolicy": policy}]});
        let pod = pod(&sandbox(spec), &[], Some(&memory));
        let container = &pod["spec"]["containers"][0];
        assert_eq!(
            (&container["image"], &container["imagePullPolicy"]),
            (&json!(used), &json!(kept))
        );
    }
}

#[rstest]
#[case::it_would_be_pulled(json!("Always"), "IfNotPresent")]
#[case::latest_would_be_pulled(Value::Null, "IfNotPresent")]
#[case::it_never_is(json!("Never"), "Never")]
fn the_image_of_an_ended_container_is_not_pulled(#[case] policy: Value, #[case] kept: &str) {
    let container =
        |name: &str| json!({"name": name, "image": "img:latest", "imagePullPolicy": policy});
    let memory = Memory {
        completed: vec!["setup".into()],
        ..memory()
    };
    let spec = json!({
        "initContainers": [container("setup"), container("added")], "containers": [container("c")],
    });
    let pod = pod(&sandbox(spec), &[], Some(&memory));
    let ended = &pod["spec"]["initContainers"][0];
    assert_eq!(ended["image"], "img:latest");
    assert_eq!(ended["imagePullPolicy"], kept);
    let added = &pod["spec"]["initContainers"][1];
    assert_eq!(*added, container("added"), "not known from before");
}

#[test]
fn start_hooks_of_a_saved_container_are_removed() {
    let container = |name: &str| {
        json!({
            "name": name, "image": "img", "startupProbe": {"tcpSocket": {"port": 1}}, "livenessProbe": {"tcpSocket": {"port": 2}},
            "lifecycle": {"postStart": {"exec": {"command": ["a"]}}, "preStop": {"exec": {"command": ["b"]}}},
        })
    };
    let spec = json!({"initContainers": [container("sidecar"), container("once")], "containers": [container("c")]});
    let saved = |name: &str| (name.to_owned(), Some("sha256:abc".to_owned()));
    let memory = Memory {
        containers: vec![saved("sidecar"), saved("c")],
        ..memory()
    };
    let pod = pod(&sandbox(spec), &[], Some(&memory));
    let has = |pointer: &str| pod["spec"].pointer(pointer).is_some();
    for continued in ["/initContainers/0", "/containers/0"] {
        assert!(
            !has(&format!("{continued}/lifecycle/postStart")),
            "{continued}"
        );
        assert!(
            has(&format!("{continued}/lifecycle/preStop")),
            "{continued}"
        );
        assert!(has(&format!("{continued}/livenessProbe")), "{continued}");
    }
    assert!(
        !has("/initContainers/0/startupProbe"),
        "main containers would wait for the probe"
    );
    assert!(
        has("/containers/0/startupProbe"),
        "the probe may not have passed yet"
    );
    assert!(
        has("/initContainers/1/lifecycle/postStart"),
        "the container is not in the image"
    );
}

#[rstest]
#[case::the_same_name(Some("s"), false, json!({}), None)]
#[case::another_name(Some("pool-x"), false, json!({}), Some("pool-x"))]
#[case::the_users_own(Some("pool-x"), false, json!({"hostname": "h"}), Some("h"))]
#[case::not_known(None, false, json!({}), None)]
#[case::a_copy(Some("pool-x"), true, json!({}), None)]
fn a_pod_keeps_its_hostname_unless_it_is_a_copy(
    #[case] saved: Option<&str>,
    #[case] copy: bool,
    #[case] mut spec: Value,
    #[case] hostname: Option<&str>,
) {
    spec["containers"] = json!([]);
    let memory = Memory {
        pod_name: saved.map(str::to_owned),
        copy,
        ..memory()
    };
    let pod = pod(&sandbox(spec), &[], Some(&memory));
    assert_eq!(
        pod["spec"].get("hostname").and_then(Value::as_str),
        hostname
    );
}

#[test]
fn a_copy_has_its_annotation() {
    let pod = pod(
        &sandbox(json!({})),
        &[],
        Some(&Memory {
            copy: true,
            ..memory()
        }),
    );
    assert_eq!(
        pod["metadata"]["annotations"],
        json!({
            "torpor.dev/restore-image": "p.1",
            "torpor.dev/restore-copy": "true",
            "torpor.dev/on-restore-failure": "Fail",
        })
    );
}

#[rstest]
#[case::alone(json!({}), json!([{"conditionType": "torpor.dev/RestoreSettled"}]))]
#[case::beside_others(
    json!([{"conditionType": "x"}]),
    json!([{"conditionType": "x"}, {"conditionType": "torpor.dev/RestoreSettled"}])
)]
#[case::there_already(
    json!([{"conditionType": "torpor.dev/RestoreSettled"}]),
    json!([{"conditionType": "torpor.dev/RestoreSettled"}])
)]
fn a_pod_that_restores_a_pod_snapshot_waits_for_the_report_of_its_agent(
    #[case] gates: Value,
    #[case] wanted: Value,
) {
    let asked = Memory {
        pod_snapshot: Some("t-1".into()),
        ..memory()
    };
    let sandbox = sandbox(json!({"containers": [{"name": "c"}], "readinessGates": gates}));
    let gated = pod(&sandbox, &[], Some(&asked));
    assert_eq!(
        gated["metadata"]["annotations"]["torpor.dev/pod-snapshot"],
        "t-1"
    );
    assert_eq!(gated["spec"]["readinessGates"], wanted);
    let plain = pod(&sandbox, &[], Some(&memory()));
    assert_eq!(plain["spec"]["readinessGates"], gates);
}

#[test]
fn claims_replace_volumes_of_their_name_and_keep_the_others() {
    let mut sandbox =
        sandbox(json!({"volumes": [{"name": "data", "emptyDir": {}}, {"name": "x"}]}));
    sandbox.spec.volume_claim_templates =
        serde_json::from_value(json!([{"metadata": {"name": "data"}, "spec": {}}])).unwrap();
    let pod = pod(&sandbox, &[], None);
    assert_eq!(
        pod["spec"]["volumes"],
        json!([
            {"name": "x"},
            {"name": "data", "persistentVolumeClaim": {"claimName": "data-s"}},
        ])
    );
}

#[test]
fn memory_in_a_repository_may_continue_on_each_node_that_fits() {
    let spec = json!({
        "containers": [{"name": "c"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
                {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]},
            ],
        }}},
    });
    let memory = Memory {
        nodes: vec!["n1".into(), "n2".into()],
        sources: Some(Sources {
            cluster: None,
            class: Some("far".into()),
            digest: "blake3:1".into(),
            node: Some("n1".into()),
        }),
        ..memory()
    };
    let pod = pod(&sandbox(spec), &[], Some(&memory));
    let affinity = &pod["spec"]["affinity"]["nodeAffinity"];
    let terms = &affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    let chosen: Vec<(&str, &str)> = terms
        .as_array()
        .unwrap()
        .iter()
        .map(|term| {
            let zone = &term["matchExpressions"][0]["values"][0];
            let node = &term["matchFields"][0]["values"][0];
            (zone.as_str().unwrap(), node.as_str().unwrap())
        })
        .collect();
    assert_eq!(chosen, [("a", "n1"), ("a", "n2"), ("b", "n1"), ("b", "n2")]);
    let preferred = &affinity["preferredDuringSchedulingIgnoredDuringExecution"];
    assert_eq!(
        preferred[0]["preference"]["matchFields"][0]["values"][0],
        "n1"
    );
    let annotated = &pod["metadata"]["annotations"];
    assert_eq!(annotated[annotations::RESTORE_CLASS], "far");
    assert_eq!(annotated[annotations::RESTORE_DIGEST], "blake3:1");
    assert_eq!(annotated[annotations::RESTORE_NODE], "n1");
}

#[test]
fn a_snapshot_without_image_or_node_is_no_memory() {
    let snapshot = |status: Value| -> SandboxSnapshot {
        serde_json::from_value(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": {"name": "m"}, "spec": {"sandboxName": "s"}, "status": status,
        }))
        .unwrap()
    };
    let of = |status| {
        let nodes = vec!["n1".to_owned()];
        Memory::of(
            &snapshot(status),
            nodes,
            None,
            None,
            false,
            OnRestoreFailure::Fail,
        )
    };
    assert_eq!(of(json!({"imageID": "p.1"})), None);
    assert_eq!(of(json!({"nodeName": "n1"})), None);
    assert!(of(json!({"imageID": "p.1", "nodeName": "n1"})).is_some());
}

#[test]
fn an_image_can_be_fetched_from_its_repository_or_from_its_node() {
    let sources = |uploaded: &str, server: Option<&str>| {
        let snapshot: SandboxSnapshot = serde_json::from_value(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": {"name": "m"}, "spec": {"sandboxName": "s", "snapshotClassName": "far"},
            "status": {
                "imageID": "p.1", "nodeName": "n1", "digest": "blake3:1",
                "conditions": [{
                    "type": "Uploaded", "status": uploaded, "reason": "r", "message": "",
                    "lastTransitionTime": "2026-11-28T00:00:00Z",
                }],
            },
        }))
        .unwrap();
        let server = server.map(str::to_owned);
        let nodes = vec!["n1".to_owned()];
        let memory = Memory::of(
            &snapshot,
            nodes,
            server,
            None,
            false,
            OnRestoreFailure::Fail,
        );
        memory.unwrap().sources.map(|from| (from.class, from.node))
    };
    let (class, node) = (Some("far".to_owned()), Some("n1".to_owned()));
    assert_eq!(sources("False", None), None);
    assert_eq!(sources("True", None), Some((class.clone(), None)));
    assert_eq!(sources("False", Some("n1")), Some((None, node.clone())));
    assert_eq!(sources("True", Some("n1")), Some((class, node)));
}

#[test]
fn a_member_prefers_the_nodes_with_a_golden_image_and_may_start_cold_on_any_other() {
    let spec = json!({
        "containers": [
            {"name": "c", "image": "img:1"},
            {"name": "d", "image": "other:1", "imagePullPolicy": "Never"},
            {"name": "e", "image": "third:1", "lifecycle": {"preStop": {}}},
            {"name": "f", "image": "registry:5000/fourth"},
        ],
    });
    let golden = Images {
        ids: vec!["a.1".into(), "b.1".into()],
        nodes: vec!["n1".into(), "n2".into()],
        containers: [("c", "docker://img@sha256:1"), ("d", "other@sha256:2")]
            .into_iter()
            .chain([
                ("e", "evil@sha256:3"),
                ("f", "registry:5000/fourth@sha256:4"),
            ])
            .map(|(name, image)| (name.to_owned(), image.to_owned()))
            .collect(),
    };
    let pod = super::pod(&sandbox(spec), &[], Start::Golden(&golden), None).unwrap();
    let on_pod = &pod["metadata"]["annotations"];
    assert_eq!(*on_pod, json!({"torpor.dev/golden-images": "a.1,b.1"}));
    let affinity = &pod["spec"]["affinity"]["nodeAffinity"];
    assert!(affinity["requiredDuringSchedulingIgnoredDuringExecution"].is_null());
    let preferred = &affinity["preferredDuringSchedulingIgnoredDuringExecution"];
    assert_eq!(preferred.as_array().map(Vec::len), Some(2));
    insta::assert_json_snapshot!(pod["spec"]["containers"], @r#"
    [
      {
        "image": "img@sha256:1",
        "imagePullPolicy": "IfNotPresent",
        "name": "c"
      },
      {
        "image": "other@sha256:2",
        "imagePullPolicy": "Never",
        "name": "d"
      },
      {
        "image": "third:1",
        "lifecycle": {
          "preStop": {}
        },
        "name": "e"
      },
      {
        "image": "registry:5000/fourth@sha256:4",
        "imagePullPolicy": "IfNotPresent",
        "name": "f"
      }
    ]
    "#);
}

#[test]
fn nodes_that_a_pod_requires_by_name_are_known() {
    let spec = |spec: Value| spec.as_object().cloned().unwrap_or_default();
    let mut pod = spec(json!({"containers": []}));
    assert_eq!(named_nodes(&pod), None);
    require_nodes(&mut pod, &["a".to_owned(), "b".to_owned()]);
    assert_eq!(
        named_nodes(&pod),
        Some(vec!["a".to_owned(), "b".to_owned()])
    );
    // Terms are alternatives: one without a name admits each node.
    let name = "requiredDuringSchedulingIgnoredDuringExecution";
    let terms = &mut pod["affinity"]["nodeAffinity"][name]["nodeSelectorTerms"];
    let other = json!({"matchExpressions": [{"key": "k", "operator": "Exists"}]});
    terms.as_array_mut().unwrap().push(other);
    assert_eq!(named_nodes(&pod), None);
}
