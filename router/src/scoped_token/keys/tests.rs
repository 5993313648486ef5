use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair as _};
use proptest::prelude::*;
use rstest::rstest;

use super::*;

/// Public key and tokens made by Python's `cryptography` 48; the seed is the bytes 0 to 31.
const PUBLIC: &str = "A6EHv_POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg";
const FOR_ONE_REQUEST: &str = "current.eyJucyI6InRlYW0tYSIsIm5hbWUiOiJib3gtYSIsInVpZCI6IjRmNzM3ZTRiLTIyZGMtNGE2MS1hMmRiLWM3NjVmZTI4Zjk2NyIsInBvcnQiOjkwOTAsIm1ldGhvZCI6IkdFVCIsInBhdGgiOiIvZXhlYy9ydW4iLCJleHAiOjQxMDI0NDQ4MDB9.qm6S-IxER0I1lLd5W907RPjF4DouBLwKqNXUQ26BsUOJkTnRTaZVD7qFqyL-RXp3Hemo8440IOJ5ylbV41zwCg";
const FOR_THE_SANDBOX: &str = "current.eyJucyI6InRlYW0tYSIsIm5hbWUiOiJib3gtYSIsInVpZCI6IjRmNzM3ZTRiLTIyZGMtNGE2MS1hMmRiLWM3NjVmZTI4Zjk2NyIsImV4cCI6NDEwMjQ0NDgwMH0.WVrUaPCbEG_xS8zuoTXByLrvCDV5TqnKBznFR5P0gX5MS6slUIKv_Gi2ye90Xp0xmPlKjCOIYjgHS3d93pHJCg";
const EXP: i64 = 4_102_444_800;

fn claims() -> Claims {
    Claims {
        namespace: "team-a".into(),
        name: "box-a".into(),
        uid: "4f737e4b-22dc-4a61-a2db-c765fe28f967".into(),
        port: 9090,
        method: "GET".into(),
        path: "/exec/run".into(),
        exp: EXP,
    }
}

fn for_the_sandbox() -> Claims {
    Claims {
        port: 0,
        method: String::new(),
        path: String::new(),
        ..claims()
    }
}

fn file(keys: &[(&str, &str)]) -> String {
    let keys = keys
        .iter()
        .map(|(kid, key)| serde_json::json!({"kid": kid, "publicKey": key}));
    serde_json::json!({"keys": keys.collect::<Vec<_>>()}).to_string()
}

fn keys() -> Keys {
    Keys::read(file(&[("current", PUBLIC)]).as_bytes()).unwrap()
}

fn pair(seed: u8) -> (Ed25519KeyPair, String) {
    let pair = Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap();
    let public = URL_SAFE_NO_PAD.encode(pair.public_key());
    (pair, public)
}

fn sign(pair: &Ed25519KeyPair, id: &str, payload: &[u8]) -> String {
    let signed = format!("{id}.{}", URL_SAFE_NO_PAD.encode(payload));
    let signature = pair.sign(format!("{CONTEXT}{signed}").as_bytes());
    format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
}

#[rstest]
#[case::for_one_request(FOR_ONE_REQUEST, claims())]
#[case::for_the_whole_sandbox(FOR_THE_SANDBOX, for_the_sandbox())]
fn tokens_of_another_program_are_valid_until_they_expire(
    #[case] token: &str,
    #[case] claims: Claims,
) {
    assert_eq!(keys().verify(token, EXP - 1), Some(claims));
    assert_eq!(keys().verify(token, EXP), None);
}

#[test]
fn the_id_of_the_key_is_signed_too() {
    let twice = file(&[("current", PUBLIC), ("next", PUBLIC)]);
    let keys = Keys::read(twice.as_bytes()).unwrap();
    assert!(keys.verify(FOR_ONE_REQUEST, 0).is_some());
    for other in ["next", "unknown"] {
        let token = FOR_ONE_REQUEST.replacen("current", other, 1);
        assert_eq!(keys.verify(&token, 0), None);
    }
}

#[test]
fn while_a_key_is_replaced_both_are_good() {
    let ((old, old_public), (new, new_public)) = (pair(1), pair(2));
    let payload = serde_json::to_vec(&claims()).unwrap();
    let tokens = [sign(&old, "old", &payload), sign(&new, "new", &payload)];
    let both = file(&[("old", &old_public), ("new", &new_public)]);
    let both = Keys::read(both.as_bytes()).unwrap();
    assert!(
        tokens
            .iter()
            .all(|token| both.verify(token, 0) == Some(claims()))
    );
    let after = Keys::read(file(&[("new", &new_public)]).as_bytes()).unwrap();
    assert_eq!(
        tokens.map(|token| after.verify(&token, 0).is_some()),
        [false, true]
    );
}

#[rstest]
#[case::without_a_uid(r#"{"ns":"a","name":"b","exp":9}"#)]
#[case::with_an_empty_uid(r#"{"ns":"a","name":"b","uid":"","exp":9}"#)]
#[case::without_an_end(r#"{"ns":"a","name":"b","uid":"u"}"#)]
#[case::a_port_that_is_none(r#"{"ns":"a","name":"b","uid":"u","port":70000,"exp":9}"#)]
#[case::no_json("{")]
fn a_signed_payload_that_is_no_token_opens_nothing(#[case] payload: &str) {
    let (pair, public) = pair(1);
    let keys = Keys::read(file(&[("k", &public)]).as_bytes()).unwrap();
    assert_eq!(keys.verify(&sign(&pair, "k", payload.as_bytes()), 0), None);
}

#[rstest]
#[case::itself(9090, "GET", "/exec/run", true)]
#[case::another_port(9091, "GET", "/exec/run", false)]
#[case::another_method(9090, "POST", "/exec/run", false)]
#[case::a_method_in_small_letters(9090, "get", "/exec/run", false)]
#[case::another_path(9090, "GET", "/exec/run/", false)]
#[case::below_the_path(9090, "GET", "/exec/run/x", false)]
#[case::written_otherwise(9090, "GET", "/exec/ru%6e", false)]
#[case::no_path(9090, "GET", "/exec/run%", false)]
fn a_token_for_one_request_is_good_for_that_alone(
    #[case] port: u16,
    #[case] method: &str,
    #[case] path: &str,
    #[case] covered: bool,
) {
    let method = Method::from_bytes(method.as_bytes()).unwrap();
    assert_eq!(claims().covers(port, &method, path), covered);
    assert!(for_the_sandbox().covers(port, &method, path));
}

#[test]
fn a_token_that_leaves_out_a_part_is_not_for_the_whole_sandbox() {
    for part in [
        Claims {
            port: 9090,
            ..for_the_sandbox()
        },
        Claims {
            method: "GET".into(),
            ..for_the_sandbox()
        },
        Claims {
            path: "/".into(),
            ..for_the_sandbox()
        },
    ] {
        assert!(!part.covers(9090, &Method::GET, "/"), "{part:?}");
    }
}

/// The expected paths are Go's: `(&url.URL{Path: unescaped, RawPath: raw}).EscapedPath()` with
/// escapes in capitals.
#[rstest]
#[case("/", Some("/"))]
#[case("/caf%c3%a9", Some("/caf%C3%A9"))]
#[case("/a%2fb", Some("/a%2Fb"))]
#[case("/x%7eY", Some("/x%7EY"))]
#[case("/a;b=1,2/@:[]!$&'()*+", Some("/a;b=1,2/@:[]!$&'()*+"))]
#[case("/a\"b|c^d", Some("/a%22b%7Cc%5Ed"))]
#[case("/x%zz", None)]
#[case("/x%", None)]
#[case("/x%4", None)]
#[case("/x%é", None)]
fn a_path_has_one_form(#[case] path: &str, #[case] written: Option<&str>) {
    assert_eq!(canonical(path).as_deref(), written);
}

#[rstest]
#[case::no_json("{", "readable")]
#[case::something_behind(&format!("{} x", file(&[("k", PUBLIC)])), "readable")]
#[case::an_unknown_field(r#"{"keys":[],"more":1}"#, "readable")]
#[case::no_key(r#"{"keys":[]}"#, "no key")]
#[case::no_id(&file(&[("", PUBLIC)]), "key ID")]
#[case::a_dot_in_an_id(&file(&[("2026.08", PUBLIC)]), "key ID")]
#[case::a_long_id(&file(&[(&"x".repeat(129), PUBLIC)]), "key ID")]
#[case::twice(&file(&[("k", PUBLIC), ("k", PUBLIC)]), "twice")]
#[case::a_short_key(&file(&[("k", "AAAA")]), "32 bytes")]
#[case::padded(&file(&[("k", &format!("{PUBLIC}="))]), "32 bytes")]
fn a_malformed_file_of_keys_is_refused(#[case] content: &str, #[case] why: &str) {
    let error = Keys::read(content.as_bytes()).unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
}

#[test]
fn the_most_keys_with_the_longest_names_fit_into_the_largest_file() {
    let ids: Vec<String> = (0..=MOST_KEYS).map(|n| format!("{n:0>128}")).collect();
    let all: Vec<(&str, &str)> = ids.iter().map(|id| (id.as_str(), PUBLIC)).collect();
    let most = file(&all[1..]);
    assert!(most.len() < LARGEST_FILE);
    Keys::read(most.as_bytes()).unwrap();
    let error = Keys::read(file(&all).as_bytes()).unwrap_err();
    assert!(matches!(error, KeysError::TooMany(n) if n == MOST_KEYS + 1));
}

proptest! {
    #[test]
    fn any_changed_byte_makes_a_token_invalid(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = FOR_ONE_REQUEST.to_owned().into_bytes();
        let at = at.index(bytes.len());
        prop_assume!(bytes[at] != byte);
        bytes[at] = byte;
        if let Ok(changed) = String::from_utf8(bytes) {
            prop_assert_eq!(keys().verify(&changed, 0), None);
        }
    }

    #[test]
    fn no_input_causes_a_panic(token in "(current\\.)?\\PC{0,80}", path in "\\PC{0,40}") {
        prop_assert_eq!(keys().verify(&token, 0), None);
        if let Some(written) = canonical(&path) {
            prop_assert_eq!(canonical(&written), Some(written));
        }
    }
}
