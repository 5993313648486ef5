//! Files over HTTP/1: the calls of upstream's `filesystem.yaml`. And `/v1/busy`, which is Torpor's.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use jiff::Timestamp;
use multer::{Constraints, Multipart, SizeLimit};
use serde_json::{Value, json};
use tokio::{fs::File, io::AsyncWriteExt as _};

use torpor_daemon::go_flags::duration;

use crate::{
    busy::{self, Mark},
    files::{self, Segment, blocking},
    path,
    refusal::{Body, answer},
    root::{self, Entry, Root},
    sandboxd::{
        content::{self, Content, Span},
        refusal::{Refusal, text},
    },
    server::Calls,
    upload::{self, BodyError, Limits},
};

/// Between the parts of an answer that has several. Not random: a file that holds it does harm only to who wrote it.
const BOUNDARY: &str = "torpor-4f1d7c0e52a94b3c8e6a";

/// The calls, on the files of `root`.
#[derive(Debug)]
pub struct Rest {
    pub root: Arc<Root>,
    pub upload: Limits,
    /// What clients see of the environment.
    pub environment: BTreeMap<String, String>,
    pub started: Instant,
    /// Set when the end begins.
    pub stopping: Arc<AtomicBool>,
    pub busy: Arc<Mark>,
}

/// A call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Route {
    Get(String),
    Put(String),
    Delete(String),
    Health,
    Metadata,
    /// For how long the sandbox is busy.
    Busy,
    /// It is.
    SetBusy,
    /// It is not.
    ClearBusy,
}

/// Finds the call. A path is decoded once, with the slashes in it.
fn route(method: &Method, path: &str) -> Result<Route, Refusal> {
    let reads = matches!(*method, Method::GET | Method::HEAD);
    if let Some(path) = path.strip_prefix("/v1/files/") {
        let path = path::decode(path);
        return match *method {
            Method::PUT => Ok(Route::Put(path)),
            Method::DELETE => Ok(Route::Delete(path)),
            _ if reads => Ok(Route::Get(path)),
            _ => Err(Refusal::Method("DELETE, GET, HEAD, PUT")),
        };
    }
    if path == "/v1/busy" {
        return match *method {
            Method::PUT => Ok(Route::SetBusy),
            Method::DELETE => Ok(Route::ClearBusy),
            _ if reads => Ok(Route::Busy),
            _ => Err(Refusal::Method("DELETE, GET, HEAD, PUT")),
        };
    }
    let route = match path {
        "/v1/health" => Route::Health,
        "/v1/metadata" => Route::Metadata,
        _ => return Err(Refusal::NoRoute),
    };
    match reads {
        true => Ok(route),
        false => Err(Refusal::Method("GET, HEAD")),
    }
}

/// The first value of a name in a query; empty counts as none.
fn parameter<'a>(query: Option<&'a str>, name: &str) -> Option<Cow<'a, str>> {
    let pairs = query?
        .split('&')
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    let value = pairs.into_iter().find(|(key, _)| *key == name)?.1;
    let value = percent_encoding::percent_decode_str(value).decode_utf8_lossy();
    (!value.is_empty()).then_some(value)
}

/// `0644` and the like; three octal digits after a zero.
fn mode(text: Option<&str>) -> Result<u32, Refusal> {
    let Some(text) = text else { return Ok(0o644) };
    let octal =
        |digits: &str| digits.len() == 3 && digits.bytes().all(|b| matches!(b, b'0'..=b'7'));
    let digits = text.strip_prefix('0').filter(|digits| octal(digits));
    let mode = digits.and_then(|digits| u32::from_str_radix(digits, 8).ok());
    mode.ok_or_else(|| Refusal::Invalid(format!("mode {text:?} must match ^0[0-7]{{3}}$")))
}

/// A truth value as Go reads it.
fn truth(text: Option<&str>) -> Result<bool, Refusal> {
    match text {
        None | Some("0" | "f" | "F" | "false" | "FALSE" | "False") => Ok(false),
        Some("1" | "t" | "T" | "true" | "TRUE" | "True") => Ok(true),
        Some(text) => Err(Refusal::Invalid(format!(
            "recursive {text:?} must be a boolean"
        ))),
    }
}

/// For how long: `for=90s`, as Go writes durations.
fn busy_for(text: Option<&str>) -> Result<Duration, Refusal> {
    let Some(text) = text else {
        return Ok(busy::DEFAULT);
    };
    let allowed = Duration::from_secs(1)..=busy::LONGEST;
    let time = duration(text).ok().filter(|time| allowed.contains(time));
    time.ok_or_else(|| {
        Refusal::Invalid(format!(
            "for {text:?} must be a duration from 1s to 24h, such as 90s"
        ))
    })
}

fn busy(left: Option<Duration>) -> Response<Body> {
    let told = json!({
        "busy": left.is_some(),
        "seconds_left": left.map_or(0.0, |left| left.as_secs_f64()),
    });
    answer(StatusCode::OK, &told)
}

impl Calls for Rest {
    type Refusal = Refusal;
    const HEALTH: &'static str = "/v1/health";

    async fn call(&self, request: Request<Incoming>) -> Result<Response<Body>, Refusal> {
        let (head, body) = request.into_parts();
        let query = |name| parameter(head.uri.query(), name);
        match route(&head.method, head.uri.path())? {
            Route::Get(path) => self.get(path, &head.headers).await,
            Route::Put(path) => {
                let mode = mode(query("mode").as_deref())?;
                self.put(path, mode, &head.headers, body).await
            }
            Route::Delete(path) => {
                let recursive = truth(query("recursive").as_deref());
                self.delete(path, recursive).await
            }
            Route::Health if self.stopping.load(Ordering::Relaxed) => Err(Refusal::Stopping),
            Route::Health => {
                let uptime = self.started.elapsed().as_secs();
                let health = json!({"status": "ok", "uptime_seconds": uptime});
                Ok(answer(StatusCode::OK, &health))
            }
            Route::Busy => Ok(busy(self.busy.left())),
            Route::SetBusy => {
                let time = busy_for(query("for").as_deref())?;
                let mark = Arc::clone(&self.busy);
                let left = blocking(&self.root, move |_| Ok(mark.set(time))).await??;
                Ok(busy(Some(left)))
            }
            Route::ClearBusy => {
                let mark = Arc::clone(&self.busy);
                let cleared = move |_: &Root| {
                    mark.clear();
                    Ok(())
                };
                blocking(&self.root, cleared).await?;
                Ok(empty(StatusCode::NO_CONTENT))
            }
            Route::Metadata => Ok(answer(StatusCode::OK, &json!({"env": self.environment}))),
        }
    }
}

impl Rest {
    async fn get(&self, path: String, headers: &HeaderMap) -> Result<Response<Body>, Refusal> {
        let asked = path.clone();
        let found = blocking(&self.root, move |root| find(root, &asked)).await;
        // Nothing is below a file, which is no error of who asks.
        let found = found.map_err(|error| match error {
            root::Error::NotADirectory => Refusal::Missing,
            other => other.into(),
        })?;
        match found {
            Found::Directory(entries) => Ok(answer(StatusCode::OK, &listing(&path, &entries))),
            Found::File(file, modified, size) => Ok(content(
                file,
                headers,
                modified.unwrap_or(SystemTime::UNIX_EPOCH),
                size,
            )),
        }
    }

    /// The file appears when the whole body has come.
    async fn put(
        &self,
        path: String,
        mode: u32,
        headers: &HeaderMap,
        body: Incoming,
    ) -> Result<Response<Body>, Refusal> {
        if self.upload.refuse(headers) {
            return Err(Refusal::TooLarge);
        }
        let upload = blocking(&self.root, move |root| root.put(&path, mode)).await?;
        let file = File::from_std(upload.file().map_err(of_disk)?);
        let pieces = upload::pieces(body, self.upload.patience);
        match multer::parse_boundary(kind_of(headers)) {
            Ok(boundary) => {
                let limit = SizeLimit::new().whole_stream(self.upload.bytes);
                let constraints = Constraints::new().size_limit(limit);
                let form = Multipart::with_constraints(pieces, boundary, constraints);
                pour_form(form, file).await?;
            }
            Err(multer::Error::NoMultipart | multer::Error::DecodeContentType(_)) => {
                let pieces = pieces.map(|piece| piece.map_err(|error| of_body(&error)));
                pour(pieces, file, self.upload.bytes).await?;
            }
            Err(error) => return Err(Refusal::Invalid(format!("invalid multipart body: {error}"))),
        }
        blocking(&self.root, move |_| upload.finish()).await?;
        Ok(empty(StatusCode::NO_CONTENT))
    }

    /// A link is removed itself, whatever it leads to.
    async fn delete(
        &self,
        path: String,
        recursive: Result<bool, Refusal>,
    ) -> Result<Response<Body>, Refusal> {
        let is_root = path::clean(&path).is_ok_and(|path| path.is_empty());
        let removed = blocking(&self.root, move |root| match recursive {
            Ok(recursive) => root.remove(&path, recursive).map(Ok),
            // What is not there is told first, as with upstream.
            Err(refusal) => match root.exists(&path)? {
                true => Ok(Err(refusal)),
                false => Err(root::Error::Missing),
            },
        });
        match removed.await {
            Ok(done) => done?,
            Err(root::Error::NotEmpty) if is_root => return Err(Refusal::IsRoot),
            Err(root::Error::NotADirectory) => return Err(Refusal::Missing),
            Err(error) => return Err(error.into()),
        }
        Ok(empty(StatusCode::NO_CONTENT))
    }
}

/// What a path leads to.
enum Found {
    Directory(Vec<Entry>),
    File(std::fs::File, Option<SystemTime>, u64),
}

fn find(root: &Root, path: &str) -> Result<Found, root::Error> {
    match root.list(path) {
        Err(root::Error::NotADirectory) => {
            let (file, size) = root.read(path)?;
            let modified = file.metadata().and_then(|metadata| metadata.modified());
            Ok(Found::File(file, modified.ok(), size))
        }
        listed => listed.map(Found::Directory),
    }
}

/// Links that lead nowhere or outside are left out, as with upstream.
fn listing(path: &str, entries: &[Entry]) -> Value {
    let entries = entries.iter().filter(|entry| !entry.dangling).map(|entry| {
        let kind = if entry.is_directory {
            "directory"
        } else {
            "file"
        };
        #[expect(
            clippy::cast_possible_truncation,
            reason = "whole seconds, and no year so large"
        )]
        let modified = Timestamp::from_second(entry.mod_time as i64).unwrap_or_default();
        json!({
            "name": entry.name,
            "size": entry.size,
            "type": kind,
            "modified_at": modified.to_string(),
            "mode": format!("{:04o}", entry.mode),
        })
    });
    let path = format!("/{}", path.strip_prefix('/').unwrap_or(path));
    json!({"path": path, "entries": entries.collect::<Value>()})
}

fn content(
    file: std::fs::File,
    headers: &HeaderMap,
    modified: SystemTime,
    size: u64,
) -> Response<Body> {
    let octets = "application/octet-stream";
    let mut response = match content::choose(headers, modified, size) {
        Content::NotModified => empty(StatusCode::NOT_MODIFIED),
        Content::PreconditionFailed => empty(StatusCode::PRECONDITION_FAILED),
        Content::NotSatisfiable(invalid) => {
            let mut response = text(StatusCode::RANGE_NOT_SATISFIABLE, &invalid.to_string());
            if invalid == content::Invalid::NoOverlap {
                set(
                    &mut response,
                    header::CONTENT_RANGE,
                    &format!("bytes */{size}"),
                );
            }
            return response;
        }
        Content::Whole => {
            let whole = Segment::Span {
                start: 0,
                length: size,
            };
            streamed(StatusCode::OK, file, vec![whole], octets)
        }
        Content::Parts(spans) => match spans[..] {
            [Span { start, length }] => {
                let part = vec![Segment::Span { start, length }];
                let mut response = streamed(StatusCode::PARTIAL_CONTENT, file, part, octets);
                set(&mut response, header::CONTENT_RANGE, &spans[0].header(size));
                response
            }
            _ => {
                let kind = format!("multipart/byteranges; boundary={BOUNDARY}");
                let parts = parts(&spans, size, octets);
                streamed(StatusCode::PARTIAL_CONTENT, file, parts, &kind)
            }
        },
    };
    if let Some(modified) = content::last_modified(modified) {
        set(&mut response, header::LAST_MODIFIED, &modified);
    }
    response
}

/// Several parts of a file, each with a head.
fn parts(spans: &[Span], size: u64, kind: &str) -> Vec<Segment> {
    let mut segments = Vec::new();
    for (number, span) in spans.iter().enumerate() {
        let before = if number == 0 { "" } else { "\r\n" };
        let range = span.header(size);
        let head = format!(
            "{before}--{BOUNDARY}\r\nContent-Range: {range}\r\nContent-Type: {kind}\r\n\r\n"
        );
        segments.push(Segment::Text(head.into()));
        segments.push(Segment::Span {
            start: span.start,
            length: span.length,
        });
    }
    segments.push(Segment::Text(format!("\r\n--{BOUNDARY}--\r\n").into()));
    segments
}

fn streamed(
    status: StatusCode,
    file: std::fs::File,
    segments: Vec<Segment>,
    kind: &str,
) -> Response<Body> {
    let length: u64 = segments.iter().map(Segment::length).sum();
    let mut response = Response::new(files::body(file, segments));
    *response.status_mut() = status;
    set(&mut response, header::CONTENT_TYPE, kind);
    set(&mut response, header::ACCEPT_RANGES, "bytes");
    set(&mut response, header::CONTENT_LENGTH, &length.to_string());
    response
}

fn empty(status: StatusCode) -> Response<Body> {
    let nothing = Empty::new().map_err(|never| match never {});
    let mut response = Response::new(nothing.boxed_unsync());
    *response.status_mut() = status;
    response
}

/// Sets a header whose value is ours, and so can be one.
fn set(response: &mut Response<Body>, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

fn kind_of(headers: &HeaderMap) -> &str {
    let kind = headers.get(header::CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    // Only this one kind of form is one.
    match kind
        .get(..19)
        .is_some_and(|start| start.eq_ignore_ascii_case("multipart/form-data"))
    {
        true => kind,
        false => "",
    }
}

/// The part `file` of a form, whatever else there is.
async fn pour_form(mut form: Multipart<'_>, file: File) -> Result<(), Refusal> {
    while let Some(field) = form.next_field().await.map_err(of_form)? {
        if field.name() == Some("file") {
            let pieces = field.map(|piece| piece.map_err(of_form));
            // The form as a whole has a limit.
            return pour(pieces, file, u64::MAX).await;
        }
    }
    let missing = "multipart body is missing the required \"file\" part";
    Err(Refusal::Invalid(missing.to_owned()))
}

/// Writes all that comes, and waits until it is on the disk.
async fn pour(
    pieces: impl Stream<Item = Result<Bytes, Refusal>>,
    mut file: File,
    limit: u64,
) -> Result<(), Refusal> {
    let mut pieces = std::pin::pin!(pieces);
    let mut written = 0_u64;
    while let Some(piece) = pieces.next().await {
        let piece = piece?;
        written = written.saturating_add(piece.len() as u64);
        if written > limit {
            return Err(Refusal::TooLarge);
        }
        file.write_all(&piece).await.map_err(of_disk)?;
    }
    // The last write is known to have happened only now.
    file.flush().await.map_err(of_disk)?;
    file.sync_all().await.map_err(of_disk)
}

fn of_disk(error: std::io::Error) -> Refusal {
    Refusal::Internal(format!("failed to write file contents: {error}"))
}

fn of_body(error: &BodyError) -> Refusal {
    match error {
        BodyError::Slow => Refusal::Slow,
        BodyError::Broken(_) => Refusal::Invalid(error.to_string()),
    }
}

fn of_form(error: multer::Error) -> Refusal {
    match error {
        multer::Error::StreamSizeExceeded { .. } | multer::Error::FieldSizeExceeded { .. } => {
            Refusal::TooLarge
        }
        multer::Error::StreamReadFailed(error) if error.is::<BodyError>() => {
            error.downcast_ref().map_or(Refusal::Slow, of_body)
        }
        error => Refusal::Invalid(format!("invalid multipart body: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("GET", "/v1/files/a%2Fb", Ok(Route::Get("a/b".into())))]
    #[case("HEAD", "/v1/files/", Ok(Route::Get("".into())))]
    #[case("PUT", "/v1/files/%2E%2E/a%00", Ok(Route::Put("../a\0".into())))]
    #[case("DELETE", "/v1/files/%252e", Ok(Route::Delete("%2e".into())))]
    #[case("GET", "/v1/health", Ok(Route::Health))]
    #[case("HEAD", "/v1/metadata", Ok(Route::Metadata))]
    #[case("POST", "/v1/files/a", Err(Refusal::Method("DELETE, GET, HEAD, PUT")))]
    #[case("PUT", "/v1/health", Err(Refusal::Method("GET, HEAD")))]
    #[case("GET", "/v1/files", Err(Refusal::NoRoute))]
    #[case("GET", "/", Err(Refusal::NoRoute))]
    fn a_request_is_one_call_or_none(
        #[case] method: Method,
        #[case] path: &str,
        #[case] expected: Result<Route, Refusal>,
    ) {
        assert_eq!(route(&method, path), expected);
    }

    #[rstest]
    #[case("PUT", Ok(Route::SetBusy))]
    #[case("DELETE", Ok(Route::ClearBusy))]
    #[case("HEAD", Ok(Route::Busy))]
    #[case("POST", Err(Refusal::Method("DELETE, GET, HEAD, PUT")))]
    fn to_be_busy_is_set_asked_and_cleared(
        #[case] method: Method,
        #[case] expected: Result<Route, Refusal>,
    ) {
        assert_eq!(route(&method, "/v1/busy"), expected);
    }

    #[rstest]
    #[case(None, Some(60))]
    #[case(Some("90s"), Some(90))]
    #[case(Some("24h"), Some(86_400))]
    #[case(Some("24h1s"), None)]
    #[case(Some("0"), None)]
    #[case(Some("500ms"), None)]
    #[case(Some("-5s"), None)]
    #[case(Some("60"), None)]
    #[case(Some("for ever"), None)]
    fn nobody_is_busy_for_ever(#[case] text: Option<&str>, #[case] seconds: Option<u64>) {
        assert_eq!(busy_for(text).ok().map(|time| time.as_secs()), seconds);
    }

    #[rstest]
    #[case(None, None)]
    #[case(Some("mode=0755"), Some("0755"))]
    #[case(Some("a=b&mode=%30644&mode=0000"), Some("0644"))]
    #[case(Some("mode"), None)]
    #[case(Some("mode="), None)]
    #[case(Some("xmode=1"), None)]
    fn a_parameter_is_the_first_of_its_name(
        #[case] query: Option<&str>,
        #[case] expected: Option<&str>,
    ) {
        assert_eq!(parameter(query, "mode").as_deref(), expected);
    }

    #[rstest]
    #[case(None, Some(0o644))]
    #[case(Some("0755"), Some(0o755))]
    #[case(Some("0000"), Some(0))]
    #[case(Some("0999"), None)]
    #[case(Some("777"), None)]
    #[case(Some("abcd"), None)]
    #[case(Some("01777"), None)]
    #[case(Some("0+77"), None)]
    fn a_mode_is_three_octal_digits(#[case] text: Option<&str>, #[case] expected: Option<u32>) {
        assert_eq!(mode(text).ok(), expected);
    }

    #[rstest]
    #[case(Some("true"), Some(true))]
    #[case(Some("0"), Some(false))]
    #[case(None, Some(false))]
    #[case(Some("banana"), None)]
    #[case(Some("tRUE"), None)]
    fn a_truth_value_is_gos(#[case] text: Option<&str>, #[case] expected: Option<bool>) {
        assert_eq!(truth(text).ok(), expected);
    }
}
