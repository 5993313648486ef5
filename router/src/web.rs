//! gRPC-Web on its way to a sandbox that speaks gRPC: which requests are such calls, and how head and
//! messages change. Pure. The wire format is that of gRPC-Web (github.com/grpc/grpc,
//! doc/PROTOCOL-WEB.md): the messages are gRPC's, the trailers come as a last message of the body, and
//! as text everything is in base64. Upstream's router does it since 1.0.10.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode,
    header::{
        ACCEPT, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
        ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE,
        ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, CONTENT_LENGTH,
        CONTENT_TYPE, ORIGIN, TE, VARY,
    },
};
use http_body_util::Full;

use crate::grpc;

/// Clients of gRPC-Web send it, and a browser asks for it before a call from another origin.
const X_GRPC_WEB: HeaderName = HeaderName::from_static("x-grpc-web");
/// Media type of its calls.
const GRPC_WEB: &str = "application/grpc-web";
/// The same in base64.
const GRPC_WEB_TEXT: &str = "application/grpc-web-text";
/// Begins the message that the trailers come as.
const TRAILERS: u8 = 0x80;
/// How long a browser may remember that calls from an origin are let through, in seconds.
const REMEMBERED: &str = "7200";
/// Four letters of base64 are three bytes.
const LETTERS: usize = 4;

/// Bytes before each message: a flag, and its length.
const PREFIX: usize = 5;

/// How a client of gRPC-Web speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Web {
    /// Its request is base64.
    pub text: bool,
    /// The answer is to be base64.
    pub answer_text: bool,
}

impl Web {
    /// How a request speaks gRPC-Web, if it does: a POST of `application/grpc-web` or `-text`, with
    /// a codec (`+proto`) or without.
    pub fn asked(method: &Method, headers: &HeaderMap) -> Option<Self> {
        if method != Method::POST {
            return None;
        }
        let (text, _) = kind(headers.get(CONTENT_TYPE)?.to_str().ok()?)?;
        let accepted = headers.get(ACCEPT).and_then(|value| value.to_str().ok());
        let accepted = accepted.and_then(|kinds| kinds.split(',').find_map(kind));
        let answer_text = accepted.map_or(text, |(text, _)| text);
        Some(Self { text, answer_text })
    }

    /// Turns the head of a call into one of gRPC.
    pub fn request(self, headers: &mut HeaderMap) {
        let codec = headers.get(CONTENT_TYPE).and_then(|value| {
            let (_, codec) = kind(value.to_str().ok()?)?;
            HeaderValue::from_str(&format!("application/grpc{codec}")).ok()
        });
        headers.insert(
            CONTENT_TYPE,
            codec.unwrap_or(HeaderValue::from_static("application/grpc")),
        );
        headers.insert(TE, HeaderValue::from_static("trailers"));
        for of_web in [ACCEPT, CONTENT_LENGTH, X_GRPC_WEB] {
            headers.remove(of_web);
        }
    }

    /// Turns the head of gRPC's answer into one of gRPC-Web. `false`: it is no answer of gRPC, and
    /// goes on as it is.
    pub fn response(self, headers: &mut HeaderMap) -> bool {
        let codec = headers
            .get(CONTENT_TYPE)
            .and_then(|value| value.to_str().ok());
        let codec = codec.and_then(|kind| grpc::codec(kind, grpc::MEDIA_TYPE));
        let Some(codec) = codec else {
            return false;
        };
        let text = if self.answer_text { "-text" } else { "" };
        let kind = format!("application/grpc-web{text}{codec}");
        if let Ok(kind) = HeaderValue::from_str(&kind) {
            headers.insert(CONTENT_TYPE, kind);
        }
        headers.remove(CONTENT_LENGTH);
        true
    }

    /// A piece of an answer as its client gets it.
    pub fn data(self, data: Bytes) -> Bytes {
        // Each piece of base64 may end by itself, with padding.
        if self.answer_text {
            STANDARD.encode(data).into()
        } else {
            data
        }
    }

    /// The trailers of an answer, as the last message of its body.
    pub fn trailers(self, trailers: &HeaderMap) -> Bytes {
        let mut lines = BytesMut::new();
        for (name, value) in trailers {
            lines.put_slice(name.as_str().as_bytes());
            lines.put_slice(b": ");
            lines.put_slice(value.as_bytes());
            lines.put_slice(b"\r\n");
        }
        let mut message = BytesMut::with_capacity(lines.len() + 5);
        message.put_u8(TRAILERS);
        // The heads that a sandbox may send are far smaller than that.
        message.put_u32(u32::try_from(lines.len()).unwrap_or(u32::MAX));
        message.put(lines);
        self.data(message.freeze())
    }
}

/// How far an answer has come in its current message.
#[derive(Debug, Default)]
pub struct Messages {
    /// Bytes of the prefix that have come.
    prefix: [u8; PREFIX],
    filled: usize,
    /// Bytes of the message that are still to come.
    left: usize,
}

impl Messages {
    /// Takes the next bytes of an answer.
    pub fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.left > 0 {
                let taken = self.left.min(bytes.len());
                self.left -= taken;
                bytes = &bytes[taken..];
                continue;
            }
            let taken = (PREFIX - self.filled).min(bytes.len());
            let (of_prefix, rest) = bytes.split_at(taken);
            self.prefix[self.filled..self.filled + taken].copy_from_slice(of_prefix);
            self.filled += taken;
            bytes = rest;
            if self.filled == PREFIX {
                let [_, a, b, c, d] = self.prefix;
                self.filled = 0;
                self.left = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
            }
        }
    }

    /// Whether the next byte begins a message, as that of the trailers has to.
    pub fn at_boundary(&self) -> bool {
        self.filled == 0 && self.left == 0
    }
}

/// Whether a media type is gRPC-Web's as text, and its codec with the `+`.
fn kind(media_type: &str) -> Option<(bool, String)> {
    let text = || grpc::codec(media_type, GRPC_WEB_TEXT).map(|codec| (true, codec));
    grpc::codec(media_type, GRPC_WEB)
        .map(|codec| (false, codec))
        .or_else(text)
}

/// A body is not base64.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the body of a gRPC-Web call is not base64")]
pub struct NotBase64;

/// Reads base64 piece by piece, whose pieces may be padded and cut anywhere.
#[derive(Debug, Default)]
pub struct Decoder {
    /// Fewer than four letters.
    left: BytesMut,
}

impl Decoder {
    /// The bytes of all letters so far that have not been returned. What is returned is smaller
    /// than `letters` and what was left.
    pub fn decode(&mut self, letters: &[u8]) -> Result<Bytes, NotBase64> {
        self.left.extend_from_slice(letters);
        let whole = self.left.len() - self.left.len() % LETTERS;
        let letters = self.left.split_to(whole);
        let mut bytes = Vec::with_capacity(whole / LETTERS * 3);
        let padded = |four: &[u8]| four.contains(&b'=');
        // From padding to padding.
        let mut rest = &letters[..];
        while !rest.is_empty() {
            let end = rest.chunks(LETTERS).position(padded);
            let end = end.map_or(rest.len(), |four| (four + 1) * LETTERS);
            let (piece, after) = rest.split_at(end);
            STANDARD
                .decode_vec(piece, &mut bytes)
                .map_err(|_| NotBase64)?;
            rest = after;
        }
        Ok(bytes.into())
    }

    /// Whether the letters so far are whole.
    pub fn is_whole(&self) -> bool {
        !self.left.has_remaining()
    }
}

/// Which pages of other origins may make gRPC-Web calls. They show their token as any client does:
/// cookies do not count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins(Vec<String>);

impl Origins {
    /// Origins as `https://host`; `*` is all of them.
    pub fn new(origins: Vec<String>) -> Self {
        Self(origins)
    }

    /// The origin of a request, if its pages may make calls.
    pub fn allowed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        if self.0.is_empty() {
            return None;
        }
        let origin = headers.get(ORIGIN)?;
        let text = origin.to_str().ok()?;
        let known = |known: &String| known == "*" || known.eq_ignore_ascii_case(text);
        self.0.iter().any(known).then(|| origin.clone())
    }

    /// The answer to a browser that asks whether a page may make a call. `None`: it asks something
    /// else, or for another page; a sandbox may answer that.
    pub fn preflight(&self, method: &Method, headers: &HeaderMap) -> Option<Response<Full<Bytes>>> {
        if method != Method::OPTIONS {
            return None;
        }
        let origin = self.allowed(headers)?;
        let names = headers.get(ACCESS_CONTROL_REQUEST_HEADERS)?;
        let mut each = names.to_str().ok()?.split(',');
        let of_web = each.any(|name| name.trim().eq_ignore_ascii_case(X_GRPC_WEB.as_str()));
        let post = headers.get(ACCESS_CONTROL_REQUEST_METHOD)? == "POST";
        if !of_web || !post {
            return None;
        }
        let mut response = Response::new(Full::default());
        *response.status_mut() = StatusCode::NO_CONTENT;
        response.headers_mut().extend([
            (ACCESS_CONTROL_ALLOW_ORIGIN, origin),
            (
                ACCESS_CONTROL_ALLOW_METHODS,
                HeaderValue::from_static("POST"),
            ),
            (ACCESS_CONTROL_ALLOW_HEADERS, names.clone()),
            (ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(REMEMBERED)),
            (
                VARY,
                HeaderValue::from_static(
                    "Origin, Access-Control-Request-Method, Access-Control-Request-Headers",
                ),
            ),
        ]);
        Some(response)
    }
}

/// Lets a page of `origin` read an answer.
pub fn readable_by(origin: HeaderValue, headers: &mut HeaderMap) {
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
    headers.append(VARY, HeaderValue::from_static("Origin"));
}

#[cfg(test)]
mod tests;
