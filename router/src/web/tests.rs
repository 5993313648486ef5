use proptest::prelude::*;
use rstest::rstest;

use super::*;

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in pairs {
        map.append(*name, value.parse().unwrap());
    }
    map
}

fn web(text: bool, answer_text: bool) -> Option<Web> {
    Some(Web { text, answer_text })
}

#[rstest]
#[case("application/grpc-web", "", web(false, false))]
#[case("application/grpc-web+proto", "*/*", web(false, false))]
#[case("Application/gRPC-Web+Proto; charset=utf-8", "", web(false, false))]
#[case("application/grpc-web-text", "", web(true, true))]
#[case(
    "application/grpc-web-text+proto",
    "application/grpc-web-text",
    web(true, true)
)]
#[case("application/grpc-web-text", "application/grpc-web", web(true, false))]
#[case(
    "application/grpc-web",
    "text/html, application/grpc-web-text",
    web(false, true)
)]
#[case("application/grpc-web+", "", None)]
#[case("application/grpc-webs", "", None)]
#[case("application/grpc-web-texts", "", None)]
#[case("application/grpc", "", None)]
#[case("application/grpc+proto", "", None)]
#[case("text/plain", "application/grpc-web-text", None)]
fn the_media_type_makes_a_call_of_grpc_web(
    #[case] kind: &str,
    #[case] accept: &str,
    #[case] call: Option<Web>,
) {
    let headers = headers(&[("content-type", kind), ("accept", accept)]);
    assert_eq!(Web::of_request(&Method::POST, &headers), call);
    assert_eq!(Web::of_request(&Method::GET, &headers), None);
}

#[rstest]
#[case("application/grpc-web-text+proto", "application/grpc+proto")]
#[case("application/grpc-web", "application/grpc")]
fn headers_of_a_call_become_those_of_grpc(#[case] from: &str, #[case] to: &str) {
    let mut map = headers(&[
        ("content-type", from),
        ("accept", from),
        ("content-length", "12"),
        ("x-grpc-web", "1"),
        ("own", "1"),
    ]);
    let call = Web::of_request(&Method::POST, &map).unwrap();
    call.request(&mut map);
    let expected = headers(&[("content-type", to), ("te", "trailers"), ("own", "1")]);
    assert_eq!(map, expected);
}

#[rstest]
#[case("application/grpc+proto", false, Some("application/grpc-web+proto"))]
#[case("application/grpc", true, Some("application/grpc-web-text"))]
#[case("text/html", true, None)]
#[case("application/grpcx", false, None)]
fn an_answer_of_grpc_becomes_one_of_grpc_web(
    #[case] from: &str,
    #[case] text: bool,
    #[case] to: Option<&str>,
) {
    let call = web(false, text).unwrap();
    let mut map = headers(&[("content-type", from), ("content-length", "3")]);
    assert_eq!(call.response(&mut map), to.is_some());
    assert_eq!(map["content-type"], to.unwrap_or(from));
    assert_eq!(map.contains_key("content-length"), to.is_none());
}

#[test]
fn trailers_come_as_a_last_message() {
    let trailers = headers(&[("grpc-status", "0"), ("grpc-message", "fine")]);
    let mut message = b"\x80\0\0\0\x24".to_vec();
    message.extend_from_slice(b"grpc-status: 0\r\ngrpc-message: fine\r\n");
    assert_eq!(web(true, false).unwrap().trailers(&trailers), message);
    let text = web(false, true).unwrap().trailers(&trailers);
    assert_eq!(STANDARD.decode(text).unwrap(), message);
}

#[rstest]
#[case(b"", true)]
#[case(b"\0\0\0\0", false)]
#[case(b"\0\0\0\0\0", true)]
#[case(b"\0\0\0\0\x02h", false)]
#[case(b"\0\0\0\0\x02hi", true)]
#[case(b"\0\0\0\0\x02hi\0", false)]
#[case(b"\0\0\0\0\x02hi\x01\0\0\x01\0", false)]
fn the_end_of_a_message_is_found_wherever_the_body_is_cut(#[case] bytes: &[u8], #[case] end: bool) {
    for size in 1..9 {
        let mut messages = Messages::default();
        for piece in bytes.chunks(size) {
            messages.take(piece);
        }
        assert_eq!(messages.at_boundary(), end, "{size}");
    }
}

#[rstest]
#[case(&["AAAA"], b"\0\0\0")]
#[case(&["AAAAAAI=", "aGk="], b"\0\0\0\0\x02hi")]
#[case(&["AA", "AA", "A", "AI=a", "Gk="], b"\0\0\0\0\x02hi")]
#[case(&[], b"")]
fn base64_is_read_in_pieces(#[case] pieces: &[&str], #[case] bytes: &[u8]) {
    let mut decoder = Decoder::default();
    let read: Vec<Bytes> = pieces
        .iter()
        .map(|piece| decoder.decode(piece.as_bytes()).unwrap())
        .collect();
    assert_eq!(read.concat(), bytes);
    assert!(decoder.is_whole());
}

#[rstest]
#[case("AAA*")]
#[case("A===")]
#[case("====")]
#[case("AA=A")]
#[case("AA A")]
fn invalid_base64_is_refused(#[case] letters: &str) {
    assert_eq!(
        Decoder::default().decode(letters.as_bytes()),
        Err(NotBase64)
    );
}

#[test]
fn base64_that_is_cut_off_is_not_whole() {
    let mut decoder = Decoder::default();
    assert_eq!(decoder.decode(b"AAAAAA").unwrap(), &b"\0\0\0"[..]);
    assert!(!decoder.is_whole());
}

proptest! {
    #[test]
    fn base64_is_read_back_wherever_it_is_cut(
        pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..6), cut in 1_usize..9,
    ) {
        let call = Web { text: true, answer_text: true };
        let text: Vec<u8> = pieces.iter().flat_map(|piece| call.data(piece.clone().into())).collect();
        let mut decoder = Decoder::default();
        let mut read = Vec::new();
        for letters in text.chunks(cut) {
            read.extend_from_slice(&decoder.decode(letters).unwrap());
        }
        prop_assert!(decoder.is_whole());
        prop_assert_eq!(read, pieces.concat());
    }
}

fn page(origin: &str) -> HeaderMap {
    headers(&[
        ("origin", origin),
        ("access-control-request-method", "POST"),
        (
            "access-control-request-headers",
            "authorization,content-type,x-grpc-web",
        ),
    ])
}

#[test]
fn pages_of_origins_that_are_named_may_make_calls() {
    let origins = Origins::new(vec!["https://app.dev".into()]);
    let answer = origins
        .preflight(&Method::OPTIONS, &page("https://app.dev"))
        .unwrap();
    assert_eq!(answer.status(), 204);
    let head = answer.headers();
    assert_eq!(head["access-control-allow-origin"], "https://app.dev");
    assert_eq!(head["access-control-allow-methods"], "POST");
    assert_eq!(
        head["access-control-allow-headers"],
        "authorization,content-type,x-grpc-web"
    );
    assert!(!head.contains_key("access-control-allow-credentials"));
    let all = Origins::new(vec!["*".into()]);
    assert!(
        all.preflight(&Method::OPTIONS, &page("https://any.dev"))
            .is_some()
    );
}

#[test]
fn other_preflights_go_to_the_sandbox() {
    let origins = Origins::new(vec!["https://app.dev".into()]);
    let ask = |method: Method, headers: &HeaderMap| origins.preflight(&method, headers).is_some();
    assert!(!ask(Method::OPTIONS, &page("https://evil.dev")));
    assert!(!ask(Method::OPTIONS, &page("null")));
    assert!(!ask(Method::POST, &page("https://app.dev")));
    for (name, value) in [
        ("access-control-request-method", "PUT"),
        ("access-control-request-headers", "authorization"),
    ] {
        let mut headers = page("https://app.dev");
        headers.insert(name, value.parse().unwrap());
        assert!(!ask(Method::OPTIONS, &headers), "{name}");
    }
    let none = Origins::default();
    assert!(
        none.preflight(&Method::OPTIONS, &page("https://app.dev"))
            .is_none()
    );
}
