use rstest::rstest;

use super::*;

fn claim(files: &str) -> SandboxClaim {
    serde_json::from_value(json!({
        "metadata": {"name": "c", "namespace": "n", "annotations": {CLAIM_FILES: files}},
        "spec": {"warmPoolRef": {"name": "p"}},
    }))
    .unwrap()
}

fn template(late: &str, class: Option<&str>) -> SandboxTemplate {
    serde_json::from_value(json!({
        "metadata": {"name": "t", "annotations": {annotations::LATE_BIND: late}},
        "spec": {"podTemplate": {"spec": {"containers": [], "runtimeClassName": class}}},
    }))
    .unwrap()
}

#[rstest]
#[case::all(
    "secret/a,configmap/b,token/c",
    "env,files,identity",
    Some("torpor"),
    None
)]
#[case::files_alone("secret/a", "files", Some("torpor"), None)]
#[case::no_identity(
    "secret/a,token/c",
    "files",
    Some("torpor"),
    Some(r#"ServiceAccount "c""#)
)]
#[case::no_files("configmap/b", "env,identity", Some("torpor"), Some(r#"have "files""#))]
#[case::no_agent("secret/a", "files", None, Some("RuntimeClass"))]
#[case::no_setting("secret/a", "bad", Some("torpor"), Some(r#"template "t""#))]
#[case::no_form("secret", "files", Some("torpor"), Some("claim-files"))]
fn a_template_admits_sources(
    #[case] files: &str,
    #[case] late: &str,
    #[case] class: Option<&str>,
    #[case] refused: Option<&str>,
) {
    let (claim, template) = (claim(files), template(late, class));
    let found = wanted(&claim, &template).map_err(|why| why.to_string().to_lowercase());
    match refused {
        None => assert_eq!(found, Ok(Some(files))),
        Some(words) => {
            let why = found.unwrap_err();
            assert!(why.contains(&words.to_lowercase()), "{why}");
        }
    }
}

#[test]
fn the_owner_of_a_source_decides_whether_claims_bring_it() {
    let source = ClaimFile::Secret("a".to_owned());
    let labels = |value: &str| BTreeMap::from([(CLAIMABLE.to_owned(), value.to_owned())]);
    assert_eq!(check(&source, Some(&labels("true"))), Ok(()));
    for labels in [BTreeMap::new(), labels("false")] {
        let refused = check(&source, Some(&labels));
        assert_eq!(refused, Err(Refused::NotClaimable(source.clone())));
    }
    assert_eq!(check(&source, None), Err(Refused::Missing(source.clone())));
}

#[test]
fn a_file_of_a_claim_has_only_one_source() {
    let of = |name: &str| Files::from([(name.to_owned(), ByteString(b"x".to_vec()))]);
    let (secret, map) = (
        ClaimFile::Secret("a".to_owned()),
        ClaimFile::ConfigMap("b".to_owned()),
    );
    let mut all = Files::new();
    add(&mut all, &secret, of("key")).unwrap();
    let twice = add(&mut all, &map, of("key"));
    assert_eq!(twice, Err(Refused::Twice(map.clone(), "key".to_owned())));
    for own in ["uid", "env", "files", ".claim", "token"] {
        let reserved = add(&mut all, &map, of(own));
        assert_eq!(
            reserved,
            Err(Refused::Reserved(map.clone(), own.to_owned()))
        );
    }
    assert_eq!(all.len(), 1);
}

fn sandbox(on_sandbox: Value) -> Sandbox {
    serde_json::from_value(json!({
        "metadata": {"name": "s", "uid": "u-s", "annotations": on_sandbox},
        "spec": {"podTemplate": {"spec": {"containers": []}}},
    }))
    .unwrap()
}

fn state(state: &str, until: Value, reason: &str) -> Sandbox {
    let mut all = json!({CLAIM_FILES: "secret/a,token/b", CLAIM_SECRET: state});
    if until.is_string() {
        all[CLAIM_TOKEN_UNTIL] = until;
    }
    let mut sandbox = sandbox(all);
    sandbox.status = serde_json::from_value(json!({"conditions": [{
        "type": "Bound", "status": "False", "reason": reason, "message": "",
        "lastTransitionTime": "2026-11-27T12:00:00Z",
    }]}))
    .unwrap();
    sandbox
}

#[test]
fn files_are_due_until_they_are_written_and_looked_at_when_a_token_grows_old() {
    let now: Timestamp = "2026-11-27T12:00:00Z".parse().unwrap();
    for (found, is_due, needs_upkeep) in [
        (state(PENDING, Value::Null, "Binding"), true, false),
        (state(WRITTEN, Value::Null, "Binding"), false, false),
        (
            state(WRITTEN, Value::Null, "ClaimNotDelivered"),
            false,
            true,
        ),
        (
            state(PENDING, Value::Null, "ClaimNotDelivered"),
            true,
            false,
        ),
        (
            state(WRITTEN, "2026-11-27T12:00:00Z".into(), "Bound"),
            false,
            true,
        ),
        (
            state(WRITTEN, "2026-11-27T12:10:00Z".into(), "Bound"),
            false,
            false,
        ),
        (sandbox(json!({})), false, false),
    ] {
        let found = (due(&found).is_some(), need_upkeep(&found, now));
        assert_eq!(found, (is_due, needs_upkeep));
    }
    let later = state(WRITTEN, "2026-11-27T12:10:00Z".into(), "Bound");
    assert_eq!(renewal_in(&later, now), Some(Duration::from_secs(600)));
    let over = state(WRITTEN, "2026-11-27T11:00:00Z".into(), "Bound");
    assert_eq!(renewal_in(&over, now), Some(Duration::from_secs(60)));
    assert_eq!(account_to_renew(&over, now).as_deref(), Some("b"));
    assert_eq!(account_to_renew(&later, now), None);
    let expires = "2026-11-27T13:00:00Z".parse().unwrap();
    assert_eq!(renew_at(expires, now).to_string(), "2026-11-27T12:48:00Z");
}

#[test]
fn an_edit_of_the_claim_corrects_sources_that_are_not_written() {
    let mut pending = state(PENDING, Value::Null, "Binding");
    let late = (annotations::LATE_BIND.to_owned(), "files".to_owned());
    pending.annotations_mut().extend([late.clone()]);
    let patched = |files: &str| {
        let patch = correction(&claim(files), &pending)?;
        patch["metadata"]["annotations"][CLAIM_FILES]
            .as_str()
            .map(str::to_owned)
    };
    assert_eq!(patched("secret/b").as_deref(), Some("secret/b"));
    // The same; no form; not admitted.
    for same in ["secret/a,token/b", "secret", "secret/b,token/b"] {
        assert_eq!(patched(same), None, "{same}");
    }
    let mut none = claim("");
    none.annotations_mut().clear();
    let removed = correction(&none, &pending).unwrap();
    assert!(removed["metadata"]["annotations"][CLAIM_SECRET].is_null());
    let mut written = state(WRITTEN, Value::Null, "Binding");
    written.annotations_mut().extend([late]);
    assert_eq!(correction(&claim("secret/b"), &written), None);
}

#[test]
fn a_secret_goes_with_its_sandbox_and_is_known_again() {
    let owner = sandbox(json!({}));
    let made = secret(&owner, "claim-1", &Files::new());
    assert_eq!(made["metadata"]["name"], "torpor-claim-u-s");
    let made: Secret = serde_json::from_value(made).unwrap();
    assert!(is_of(&made, &owner, "claim-1"));
    assert!(!is_of(&made, &owner, "claim-2"));
    let mut other = owner;
    other.metadata.uid = Some("u-other".to_owned());
    assert!(!is_of(&made, &other, "claim-1"));
}
