use rstest::rstest;
use serde_json::json;

use super::*;

fn claim(env: Value) -> SandboxClaim {
    serde_json::from_value(json!({
        "metadata": {"name": "c", "namespace": "n"},
        "spec": {"warmPoolRef": {"name": "p"}, "env": env},
    }))
    .unwrap()
}

fn template(policy: &str) -> SandboxTemplate {
    serde_json::from_value(json!({
        "metadata": {
            "name": "t", "namespace": "n", "annotations": {annotations::LATE_BIND: "env"},
        },
        "spec": {
            "envVarsInjectionPolicy": policy,
            "podTemplate": {"spec": {
                "runtimeClassName": "torpor",
                "containers": [
                    {"name": "main", "image": "i", "env": [{"name": "HAS", "value": "1"}]},
                    {"name": "other", "image": "i"},
                ],
            }},
        },
    }))
    .unwrap()
}

#[test]
fn variables_of_the_first_container_are_late() {
    let both = claim(json!([
        {"name": "A", "value": "it's"}, {"name": "B", "value": "2", "containerName": "main"},
    ]));
    let late = env(&both, &template("Allowed"));
    assert_eq!(late.unwrap(), "export A=\"it's\"\nexport B=2\n");
    assert_eq!(env(&claim(json!([])), &template("Disallowed")).unwrap(), "");
}

#[test]
fn variables_are_late_only_if_the_template_allows_it() {
    let asks = claim(json!([{"name": "A", "value": "1"}]));
    for late in ["files", "bad"] {
        let mut template = template("Allowed");
        let key = annotations::LATE_BIND.to_owned();
        template.annotations_mut().insert(key, late.to_owned());
        assert_eq!(env(&asks, &template), None, "{late}");
    }
}

#[test]
fn the_last_value_of_a_name_applies() {
    let twice = claim(json!([{"name": "HAS", "value": "2"}, {"name": "HAS", "value": "3"}]));
    let late = env(&twice, &template("Overrides"));
    assert_eq!(late.unwrap(), "export HAS=3\n");
}

#[rstest]
#[case::another_container(json!([{"name": "A", "value": "1", "containerName": "other"}]), "Allowed")]
#[case::no_such_container(json!([{"name": "A", "value": "1", "containerName": "x"}]), "Allowed")]
#[case::a_reference(json!([{"name": "A", "value": "$(HAS)"}]), "Allowed")]
#[case::not_admitted(json!([{"name": "A", "value": "1"}]), "Disallowed")]
#[case::exists(json!([{"name": "HAS", "value": "1"}]), "Allowed")]
#[case::no_name_of_a_shell(json!([{"name": "a.b", "value": "1"}]), "Allowed")]
fn other_variables_need_a_cold_start(#[case] wanted: Value, #[case] policy: &str) {
    assert_eq!(env(&claim(wanted), &template(policy)), None);
}

fn sandbox(annotations: Value, conditions: Value) -> Sandbox {
    serde_json::from_value(json!({
        "metadata": {"name": "s", "annotations": annotations},
        "spec": {"podTemplate": {"spec": {"containers": []}}},
        "status": {"conditions": conditions},
    }))
    .unwrap()
}

#[test]
fn additions_reach_only_a_sandbox_with_the_volume_for_them() {
    let additions = |env: &str, files: Option<&str>| Additions {
        env: env.to_owned(),
        files: files.map(str::to_owned),
    };
    let (none, env) = (additions("", None), additions("export A=1\n", None));
    let files = additions("", Some("secret/a"));
    let token = additions("export A=1\n", Some("configmap/a,token/b"));
    for (late, suits) in [
        (Some("env"), [true, true, false, false]),
        (Some("files"), [true, false, true, false]),
        (Some("env,files,identity"), [true, true, true, true]),
        (Some("bad"), [true, false, false, false]),
        (None, [true, false, false, false]),
    ] {
        let on_sandbox = late.map(|late| (annotations::LATE_BIND.to_owned(), late.to_owned()));
        let on_sandbox = on_sandbox.into_iter().collect();
        let found = [&none, &env, &files, &token].map(|one| one.suit(&on_sandbox));
        assert_eq!(found, suits, "{late:?}");
    }
    assert_eq!(none.annotations(), []);
    assert_eq!(
        token.annotations(),
        [
            ("torpor.dev/claim-env", "export A=1\n"),
            ("torpor.dev/claim-files", "configmap/a,token/b"),
            ("torpor.dev/claim-secret", "pending"),
        ]
    );
}

#[test]
fn a_ready_sandbox_without_word_of_the_claim_is_from_before() {
    let condition = |type_: &str, status: &str| {
        json!({
            "type": type_, "status": status, "reason": "R", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        })
    };
    let ready = condition("Ready", "True");
    let late = json!({"torpor.dev/late-bind": "env"});
    let command = json!({"torpor.dev/on-claim-exec": "[\"true\"]"});
    for (annotations, conditions, from_before) in [
        (late.clone(), json!([ready]), true),
        (command, json!([ready]), true),
        (
            late.clone(),
            json!([ready, condition("Bound", "False")]),
            true,
        ),
        (
            late.clone(),
            json!([ready, condition("Bound", "True")]),
            false,
        ),
        (late, json!([condition("Ready", "False")]), false),
        (json!({}), json!([ready]), false),
    ] {
        let shown = sandbox(annotations, conditions.clone());
        assert_eq!(is_from_before(&shown), from_before, "{conditions}");
    }
}
