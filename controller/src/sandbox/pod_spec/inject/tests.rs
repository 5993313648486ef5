use rstest::rstest;

use super::*;

const IMAGE: &str = "registry.example/runtime:1";

fn injected(spec: Value, starts_cold: bool) -> Result<Value, Error> {
    let Value::Object(mut spec) = spec else {
        panic!("{spec}")
    };
    inject(&mut spec, IMAGE, starts_cold).map(|()| spec.into())
}

/// Returns the first container of a Pod after injection into `container`.
fn container(container: Value, starts_cold: bool) -> Value {
    injected(json!({"containers": [container]}), starts_cold).unwrap()["containers"][0].clone()
}

/// Compares the whole Pod. Every saved image contains the container's command and mount, so a
/// change here makes existing images useless.
#[test]
fn the_injected_pod_is_exactly_this() {
    let spec = json!({
        "containers": [
            {"name": "a", "image": "img", "command": ["sh", "-c"], "args": ["exec $(WORDS)"], "tomorrow": 1,
             "volumeMounts": [{"name": "data", "mountPath": "/data"}],
             "resources": {"requests": {"cpu": "1", "memory": "1Gi", "example.com/gpu": 1}, "limits": {"memory": "1Gi"}, "claims": [{"name": "x"}]}},
            {"name": "b", "image": "other"},
        ],
        "initContainers": [{"name": "first", "image": "img"}],
        "volumes": [{"name": "data", "emptyDir": {}}],
        "alsoTomorrow": {"x": []},
    });
    let expected = json!({
        "containers": [
            {"name": "a", "image": "img", "tomorrow": 1,
             "command": ["/.torpor/sandbox-runtime", "run", "--", "sh", "-c"], "args": ["exec $(WORDS)"],
             "volumeMounts": [
                {"name": "data", "mountPath": "/data"},
                {"name": "torpor-runtime", "mountPath": "/.torpor", "readOnly": true},
             ],
             "startupProbe": {"httpGet": {"path": "/", "port": 8888}, "periodSeconds": 1, "failureThreshold": 60},
             "resources": {"requests": {"cpu": "1", "memory": "1Gi", "example.com/gpu": 1}, "limits": {"memory": "1Gi"}, "claims": [{"name": "x"}]}},
            {"name": "b", "image": "other"},
        ],
        "initContainers": [
            {"name": "torpor-runtime", "image": IMAGE,
             "command": ["/sandbox-runtime", "install", "/.torpor"],
             "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
             "volumeMounts": [{"name": "torpor-runtime", "mountPath": "/.torpor"}],
             "terminationMessagePolicy": "FallbackToLogsOnError",
             "securityContext": {
                "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": true, "runAsNonRoot": true, "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
             }},
            {"name": "first", "image": "img"},
        ],
        "volumes": [{"name": "data", "emptyDir": {}}, {"name": "torpor-runtime", "emptyDir": {}}],
        "alsoTomorrow": {"x": []},
    });
    assert_eq!(injected(spec, true).unwrap(), expected);
}

#[rstest]
#[case::around_it(json!({"command": ["a", "--b"]}), &["run", "--", "a", "--b"])]
#[case::a_double_dash_of_its_own(json!({"command": ["--"]}), &["run", "--", "--"])]
#[case::a_port_that_is_the_programs(
    json!({"command": ["a"], "ports": [{"containerPort": 8080}, {"containerPort": 8888}]}),
    &["--legacy-bind-address=0", "--rest-bind-address=0", "run", "--", "a"]
)]
#[case::a_port_of_the_runtime(json!({"ports": [{"containerPort": 9090}]}), &["run"])]
#[case::none(json!({}), &["run"])]
#[case::null(json!({"command": null, "args": null}), &["run"])]
#[case::empty(json!({"command": [], "args": []}), &["run"])]
fn the_runtime_wraps_the_command_and_runs_alone_without_one(
    #[case] given: Value,
    #[case] after: &[&str],
) {
    let words = [&["/.torpor/sandbox-runtime"], after].concat();
    assert_eq!(container(given, true)["command"], json!(words));
}

/// A container keeps its own streams, security, lifecycle, working directory and ports.
#[test]
fn all_other_fields_of_the_container_stay() {
    let own = json!({
        "name": "a", "command": ["a"], "workingDir": "/w", "stdin": true, "tty": true,
        "securityContext": {"runAsUser": 1000, "readOnlyRootFilesystem": true},
        "ports": [{"containerPort": 1}], "livenessProbe": {"exec": {"command": ["x"]}},
        "readinessProbe": {"tcpSocket": {"port": 1}}, "lifecycle": {"preStop": {}},
        "env": [{"name": "SANDBOX_BASE_DIR", "value": "/w"}],
    });
    let mut found = container(own.clone(), true);
    let found = found.as_object_mut().unwrap();
    found.remove("volumeMounts");
    found.insert("command".to_owned(), json!(["a"]));
    assert_eq!(Value::from(found.clone()), own);
}

#[rstest]
#[case::it_starts_cold(json!({}), true, true)]
#[case::it_is_restored_and_answers_already(json!({}), false, false)]
#[case::the_users_readiness_probe(json!({"readinessProbe": {"exec": {}}}), true, false)]
#[case::the_users_startup_probe(json!({"startupProbe": {"exec": {}}}), true, false)]
#[case::unset(json!({"startupProbe": null, "readinessProbe": null}), true, true)]
fn a_startup_probe_is_added_unless_the_user_has_a_probe(
    #[case] given: Value,
    #[case] starts_cold: bool,
    #[case] probed: bool,
) {
    let before = given["startupProbe"].clone();
    let after = container(given, starts_cold)["startupProbe"].clone();
    assert_eq!(after != before, probed, "{after}");
}

fn ports(declared: &[u16]) -> Value {
    declared
        .iter()
        .map(|port| json!({"containerPort": port}))
        .collect()
}

/// Jupyter, for one, listens on 8888.
#[rstest]
#[case::none(&[], &[], json!({"httpGet": {"path": "/", "port": 8888}}))]
#[case::of_no_api(&[80], &[], json!({"httpGet": {"path": "/", "port": 8888}}))]
#[case::of_another_api(&[9090], &["--grpc-bind-address=0"], json!({"httpGet": {"path": "/", "port": 8888}}))]
#[case::of_the_first(&[8888], &["--legacy-bind-address=0"], json!({"httpGet": {"path": "/v1/health", "port": 8080}}))]
#[case::of_the_first_and_last(
    &[9090, 8888],
    &["--legacy-bind-address=0", "--grpc-bind-address=0"],
    json!({"httpGet": {"path": "/v1/health", "port": 8080}})
)]
#[case::all_but_grpcs(
    &[8080, 8888],
    &["--legacy-bind-address=0", "--rest-bind-address=0"],
    json!({"tcpSocket": {"port": 9090}})
)]
fn declared_ports_stay_with_the_program_and_the_probe_uses_another(
    #[case] declared: &[u16],
    #[case] flags: &[&str],
    #[case] asks: Value,
) {
    let found = container(json!({"command": ["a"], "ports": ports(declared)}), true);
    let words = [&["/.torpor/sandbox-runtime"], flags, &["run", "--", "a"]].concat();
    assert_eq!(found["command"], json!(words));
    let mut probe = found["startupProbe"].clone();
    let probe = probe.as_object_mut().unwrap();
    assert_eq!(probe.remove("periodSeconds"), Some(json!(1)));
    assert_eq!(probe.remove("failureThreshold"), Some(json!(60)));
    assert_eq!(Value::from(probe.clone()), asks);
}

/// The runtime takes the ports of a first container without a command, not those of others.
#[rstest]
#[case::a_container(json!({"containers": [{"ports": ports(&[8080])}, {"ports": ports(&[8888])}]}))]
#[case::a_sidecar(json!({"containers": [{}], "initContainers": [{"ports": ports(&[8888])}]}))]
fn a_port_of_another_container_is_left_to_it(#[case] spec: Value) {
    let pod = injected(spec, true).unwrap();
    let words = ["/.torpor/sandbox-runtime", "--legacy-bind-address=0", "run"];
    assert_eq!(pod["containers"][0]["command"], json!(words));
}

/// Equal limits and requests of every container decide about the quality of service.
#[rstest]
#[case(json!({}), json!({}))]
#[case(json!({"limits": {"cpu": "1", "memory": "1Gi"}}), json!({"limits": {"cpu": "1", "memory": "1Gi"}}))]
#[case(json!({"limits": {"hugepages-2Mi": "2Mi", "ephemeral-storage": "1Gi"}}), json!({"limits": {"ephemeral-storage": "1Gi"}}))]
#[case(json!({"limits": null, "requests": {"example.com/gpu": 1}}), json!({}))]
fn the_init_container_asks_for_no_more_than_the_container(
    #[case] given: Value,
    #[case] expected: Value,
) {
    let pod = injected(json!({"containers": [{"resources": given}]}), true).unwrap();
    assert_eq!(pod["initContainers"][0]["resources"], expected);
}

fn taken(what: &'static str, name: &str) -> Error {
    let name = name.to_owned();
    Error::Taken { what, name }
}

#[rstest]
#[case(json!({}), Error::NoContainer)]
#[case(json!({"containers": []}), Error::NoContainer)]
#[case(json!({"containers": [{"name": "a", "args": ["x"]}]}), Error::ArgsAlone("a".to_owned()))]
#[case(json!({"containers": [{"name": "torpor-runtime"}]}), taken("container", NAME))]
#[case(json!({"containers": [{"name": "a"}], "initContainers": [{"name": "torpor-runtime"}]}), taken("init container", NAME))]
#[case(json!({"containers": [{"name": "a"}], "volumes": [{"name": "torpor-runtime"}]}), taken("volume", NAME))]
#[case(json!({"containers": [{"volumeMounts": [{"name": "v", "mountPath": "/.torpor/"}]}]}), taken("mountPath", "/.torpor/"))]
#[case(json!({"containers": [{"volumeMounts": [{"name": "v", "mountPath": "/.torpor/x"}]}]}), taken("mountPath", "/.torpor/x"))]
#[case(json!({"containers": [{"command": ["a"], "ports": ports(&[8080, 9090])}, {"ports": ports(&[8888])}]}), Error::NoPort)]
fn an_impossible_injection_is_refused(#[case] spec: Value, #[case] why: Error) {
    assert_eq!(injected(spec, true), Err(why));
}

#[test]
fn a_mount_path_beside_the_runtimes_is_free() {
    let mounts =
        json!([{"name": "v", "mountPath": "/.torpor2"}, {"name": "w", "mountPath": "/data"}]);
    injected(json!({"containers": [{"volumeMounts": mounts}]}), true).unwrap();
}

#[test]
fn refusals_name_the_remedy() {
    let messages: Vec<String> = [
        Error::NoImage,
        Error::ArgsAlone("a".to_owned()),
        taken("volume", "v"),
        Error::NoPort,
    ]
    .iter()
    .map(ToString::to_string)
    .collect();
    assert_eq!(
        messages,
        [
            "annotation torpor.dev/inject-runtime: the controller has no image of the runtime; start it with --runtime-image",
            r#"annotation torpor.dev/inject-runtime: container "a" has args for its image's entrypoint, which the runtime would replace; set command to the entrypoint"#,
            r#"annotation torpor.dev/inject-runtime: volume "v" of podTemplate.spec is reserved for the runtime; rename it"#,
            "annotation torpor.dev/inject-runtime: containers of podTemplate.spec declare the ports 8888, 8080 and 9090, so that none is left for the runtime; remove one of them from ports",
        ]
    );
}
