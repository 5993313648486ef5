//! Translates gRPC-Web to gRPC for sandboxes. Pure. Upstream's router does it since 1.0.10.
//!
//! The wire format is that of gRPC-Web (github.com/grpc/grpc, doc/PROTOCOL-WEB.md): messages are
//! those of gRPC, the trailers are the last message of the body, and the text format encodes all in
//! base64.

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

/// Header that gRPC-Web clients send, and that a browser names in a preflight request.
const X_GRPC_WEB: HeaderName = HeaderName::from_static("x-grpc-web");
/// Media type of gRPC-Web calls.
const GRPC_WEB: &str = "application/grpc-web";
/// Media type of gRPC-Web calls in base64.
const GRPC_WEB_TEXT: &str = "application/grpc-web-text";
/// First byte of the message that holds the trailers.
const TRAILERS: u8 = 0x80;
/// Time for which a browser may cache the response to a preflight request, in seconds.
const REMEMBERED: &str = "7200";
/// Characters of base64 that encode three bytes.
const LETTERS: usize = 4;

/// Length in bytes of the prefix of each message: a flag and the length of the message.
const PREFIX: usize = 5;

/// Format of a gRPC-Web call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Web {
    /// The request is base64.
    pub text: bool,
    /// The client expects a response in base64.
    pub answer_text: bool,
}

impl Web {
    /// Returns the format of a request, if it is a gRPC-Web call: a POST of `application/grpc-web`
    /// or `-text`, with a codec (`+proto`) or without.
    pub fn of_request(method: &Method, headers: &HeaderMap) -> Option<Self> {
        if method != Method::POST {
            return None;
        }
        let (text, _) = kind(headers.get(CONTENT_TYPE)?.to_str().ok()?)?;
        let accepted = headers.get(ACCEPT).and_then(|value| value.to_str().ok());
        let accepted = accepted.and_then(|kinds| kinds.split(',').find_map(kind));
        let answer_text = accepted.map_or(text, |(text, _)| text);
        Some(Self { text, answer_text })
    }

    /// Rewrites the headers of a call for gRPC.
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

    /// Rewrites the headers of a gRPC response for gRPC-Web. `false`: the response is not gRPC and
    /// stays unchanged.
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

    /// Converts a piece of a response to the client's format.
    pub fn data(self, data: Bytes) -> Bytes {
        // Each piece may be encoded by itself, with its own padding.
        if self.answer_text {
            STANDARD.encode(data).into()
        } else {
            data
        }
    }

    /// Converts the trailers of a response to the last message of its body.
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
        // The size limit for a sandbox's headers is far below `u32::MAX`.
        message.put_u32(u32::try_from(lines.len()).unwrap_or(u32::MAX));
        message.put(lines);
        self.data(message.freeze())
    }
}

/// Position of a response in its current message.
#[derive(Debug, Default)]
pub struct Messages {
    /// Prefix of the current message; `filled` bytes have come.
    prefix: [u8; PREFIX],
    filled: usize,
    /// Bytes of the message that have not come yet.
    left: usize,
}

impl Messages {
    /// Advances by the next bytes of a response.
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

    /// Reports whether the next byte begins a message; trailers must begin one.
    pub fn at_boundary(&self) -> bool {
        self.filled == 0 && self.left == 0
    }
}

/// Returns whether a gRPC-Web media type is the text format, and its codec with the `+`; `None`:
/// the media type is another.
fn kind(media_type: &str) -> Option<(bool, String)> {
    let text = || grpc::codec(media_type, GRPC_WEB_TEXT).map(|codec| (true, codec));
    grpc::codec(media_type, GRPC_WEB)
        .map(|codec| (false, codec))
        .or_else(text)
}

/// Error of a body that is not base64.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the body of a gRPC-Web call is not base64")]
pub struct NotBase64;

/// Decoder of base64 that comes in pieces, each of which may be padded and cut anywhere.
#[derive(Debug, Default)]
pub struct Decoder {
    /// Up to three characters of an incomplete group.
    left: BytesMut,
}

impl Decoder {
    /// Decodes all complete groups of characters so far. The result is smaller than `letters` and
    /// the characters left over from earlier calls.
    pub fn decode(&mut self, letters: &[u8]) -> Result<Bytes, NotBase64> {
        self.left.extend_from_slice(letters);
        let whole = self.left.len() - self.left.len() % LETTERS;
        let letters = self.left.split_to(whole);
        let mut bytes = Vec::with_capacity(whole / LETTERS * 3);
        let padded = |four: &[u8]| four.contains(&b'=');
        // Each padded part is decoded by itself.
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

    /// Reports whether no incomplete group is left.
    pub fn is_whole(&self) -> bool {
        !self.left.has_remaining()
    }
}

/// Origins whose pages may make gRPC-Web calls. The pages send their token as any client does;
/// cookies do not authorize such calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origins(Vec<String>);

impl Origins {
    /// Returns a list of origins in the form `https://host`; `*`: all.
    pub fn new(origins: Vec<String>) -> Self {
        Self(origins)
    }

    /// Returns the origin of a request, if its pages may make calls.
    pub fn allowed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        if self.0.is_empty() {
            return None;
        }
        let origin = headers.get(ORIGIN)?;
        let text = origin.to_str().ok()?;
        let known = |known: &String| known == "*" || known.eq_ignore_ascii_case(text);
        self.0.iter().any(known).then(|| origin.clone())
    }

    /// Returns the response to a preflight request for a call of an allowed page. `None`: another
    /// request, which goes to the sandbox.
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

/// Sets headers that let a page of `origin` read a response.
pub fn allow_reading(origin: HeaderValue, headers: &mut HeaderMap) {
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*"));
    headers.append(VARY, HeaderValue::from_static("Origin"));
}

#[cfg(test)]
mod tests;
