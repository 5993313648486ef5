//! gRPC calls: their recognition, their timeouts, and the router's own error responses. Pure.
//!
//! The wire format is that of gRPC over HTTP/2 (github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md). The
//! definition of a call and the status of each refusal are upstream's.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, Version, header::CONTENT_TYPE};
use http_body_util::Full;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::refusal::Refusal;

/// Time that the client waits.
const TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");
/// Media type of calls.
pub(crate) const MEDIA_TYPE: &str = "application/grpc";
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// Characters that `grpc-message` encodes: all but the printable ones of ASCII, and `%`.
const NOT_IN_MESSAGES: &AsciiSet = &CONTROLS.add(b'%');
/// Most digits of `grpc-timeout`.
const DIGITS: usize = 8;
/// Units of `grpc-timeout` in nanoseconds, finest first.
const UNITS: [(u8, u128); 6] = [
    (b'n', 1),
    (b'u', 1_000),
    (b'm', 1_000_000),
    (b'S', 1_000_000_000),
    (b'M', 60_000_000_000),
    (b'H', 3_600_000_000_000),
];

/// Status codes of gRPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    Unauthenticated = 16,
}

/// Reports whether a request is a call: a POST over HTTP/2 of `application/grpc`, with a codec
/// (`+proto`) or without. [`crate::web`] recognizes gRPC-Web.
pub fn is_call(version: Version, method: &Method, headers: &HeaderMap) -> bool {
    version == Version::HTTP_2
        && method == Method::POST
        && headers
            .get(CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .is_some_and(|kind| codec(kind, MEDIA_TYPE).is_some())
}

/// Returns the codec of a media type with the `+`, or an empty string without a codec; `None`: the
/// media type is another.
pub(crate) fn codec(media_type: &str, kind: &str) -> Option<String> {
    let essence = media_type.split(';').next()?.trim();
    // This check needs no copy: most requests are not calls.
    let begin = essence.get(..kind.len())?;
    let codec = essence.get(kind.len()..)?;
    let fine = codec.is_empty() || codec.len() > 1 && codec.starts_with('+');
    (begin.eq_ignore_ascii_case(kind) && fine).then(|| codec.to_ascii_lowercase())
}

/// Returns the time that the client waits, if the request names one.
pub fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, Refusal> {
    let mut values = headers.get_all(&TIMEOUT).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    let read = read_timeout(value.as_bytes()).filter(|_| values.next().is_none());
    read.map(Some).ok_or(Refusal::TimeoutFormat)
}

fn read_timeout(text: &[u8]) -> Option<Duration> {
    let (unit, digits) = text.split_last()?;
    if digits.is_empty() || digits.len() > DIGITS || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let (_, nanoseconds) = UNITS.iter().find(|(letter, _)| letter == unit)?;
    let number: u128 = str::from_utf8(digits).ok()?.parse().ok()?;
    Some(Duration::from_nanos_u128(number * nanoseconds))
}

/// Sets `grpc-timeout` to the time that the client still waits.
///
/// The value is rounded up, in the finest unit in which it has at most eight digits.
pub fn set_timeout(headers: &mut HeaderMap, left: Duration) {
    let most = 10_u128.pow(8) - 1;
    let nanoseconds = left.as_nanos();
    let fitting = UNITS
        .iter()
        .map(|(letter, unit)| (nanoseconds.div_ceil(*unit), *letter));
    let (number, letter) = fitting
        .clone()
        .find(|(number, _)| *number <= most)
        .unwrap_or((most, b'H'));
    let text = format!("{number}{}", char::from(letter));
    headers.insert(
        TIMEOUT,
        HeaderValue::from_str(&text).unwrap_or_else(|_| HeaderValue::from_static("0n")),
    );
}

fn code(refusal: &Refusal) -> Code {
    match refusal {
        Refusal::NoSandbox
        | Refusal::SandboxFormat
        | Refusal::NamespaceFormat
        | Refusal::PortFormat
        | Refusal::NoPort
        | Refusal::AddressFormat
        | Refusal::TimeoutFormat
        | Refusal::PathFormat
        | Refusal::PathEncoding
        | Refusal::PathContradicted
        | Refusal::NotBase64
        | Refusal::HostFormat(_)
        | Refusal::HostAmbiguous(_) => Code::InvalidArgument,
        Refusal::Unauthenticated | Refusal::NoBearer | Refusal::WrongToken => Code::Unauthenticated,
        Refusal::Forbidden | Refusal::ForeignOrigin => Code::PermissionDenied,
        Refusal::ReviewFailed => Code::Internal,
        Refusal::Unreachable(_)
        | Refusal::Suspended(_)
        | Refusal::NotResumed(..)
        | Refusal::ResumeTimeout(_) => Code::Unavailable,
        Refusal::TooLate => Code::DeadlineExceeded,
        Refusal::TooManyHeld
        | Refusal::TooManyOpen
        | Refusal::TooManyRequests(_)
        | Refusal::TooManyReviews
        | Refusal::BodyTooLarge => Code::ResourceExhausted,
        Refusal::Method => Code::Unimplemented,
    }
}

/// Returns status and message of a refusal as trailers.
pub fn trailers(refusal: &Refusal) -> HeaderMap {
    let message = refusal.to_string();
    let message = utf8_percent_encode(&message, NOT_IN_MESSAGES).to_string();
    let mut trailers = HeaderMap::new();
    trailers.insert(STATUS, HeaderValue::from(code(refusal) as u16));
    if let Ok(message) = HeaderValue::from_str(&message) {
        trailers.insert(MESSAGE, message);
    }
    trailers
}

/// Returns the response to a refused call. The body is empty: the headers serve as trailers.
pub fn response(refusal: &Refusal) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::default());
    *response.headers_mut() = trailers(refusal);
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("application/grpc", true)]
    #[case("application/grpc+proto", true)]
    #[case("Application/GRPC; charset=utf-8", true)]
    #[case("application/grpc+", false)]
    #[case("application/grpc-web", false)]
    #[case("application/grpc-web+proto", false)]
    #[case("application/json", false)]
    fn the_media_type_makes_a_call(#[case] text: &'static str, #[case] call: bool) {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(text));
        assert_eq!(is_call(Version::HTTP_2, &Method::POST, &headers), call);
        assert!(!is_call(Version::HTTP_11, &Method::POST, &headers));
        assert!(!is_call(Version::HTTP_2, &Method::GET, &headers));
    }

    #[rstest]
    #[case(&[], Ok(None))]
    #[case(&["1S"], Ok(Some(Duration::from_secs(1))))]
    #[case(&["250m"], Ok(Some(Duration::from_millis(250))))]
    #[case(&["99999999H"], Ok(Some(Duration::from_secs(3600 * 99_999_999))))]
    #[case(&["0n"], Ok(Some(Duration::ZERO)))]
    #[case(&["123456789n"], Err(Refusal::TimeoutFormat))]
    #[case(&["1"], Err(Refusal::TimeoutFormat))]
    #[case(&["S"], Err(Refusal::TimeoutFormat))]
    #[case(&[""], Err(Refusal::TimeoutFormat))]
    #[case(&["+1S"], Err(Refusal::TimeoutFormat))]
    #[case(&["1s"], Err(Refusal::TimeoutFormat))]
    #[case(&["1S", "1S"], Err(Refusal::TimeoutFormat))]
    fn timeouts_are_read(
        #[case] values: &[&'static str],
        #[case] timeout: Result<Option<Duration>, Refusal>,
    ) {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(TIMEOUT, HeaderValue::from_static(value));
        }
        assert_eq!(super::timeout(&headers), timeout);
    }

    proptest! {
        #[test]
        fn rounding_never_shortens_a_timeout(nanoseconds in any::<u64>()) {
            let left = Duration::from_nanos(nanoseconds);
            let mut headers = HeaderMap::new();
            set_timeout(&mut headers, left);
            let read = timeout(&headers).unwrap().unwrap();
            prop_assert!(read >= left);
            // Eight digits lose at most one part in ten thousand, at a change of units.
            prop_assert!(read - left <= left / 1000 + Duration::from_nanos(1), "{:?}", headers);
        }
    }

    #[test]
    fn a_refusal_is_an_answer_of_headers_alone() {
        let answer = response(&Refusal::Unreachable("näme 100%".into()));
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers()["content-type"], "application/grpc");
        assert_eq!(answer.headers()["grpc-status"], "14");
        let message = "Could not connect to the backend sandbox: n%C3%A4me 100%25";
        assert_eq!(answer.headers()["grpc-message"], message);
        assert!(http_body::Body::is_end_stream(answer.body()));
    }
}
