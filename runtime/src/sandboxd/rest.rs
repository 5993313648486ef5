//! Files over HTTP/1: the calls of upstream's `filesystem.yaml`, and Torpor's own `/v1/busy`.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use jiff::Timestamp;
use multer::{Constraints, Multipart, SizeLimit};
use serde_json::{Value, json};
use tokio::{fs::File, io::AsyncWriteExt as _, runtime::Handle};

use crate::{
    busy::Mark,
    files::{self, Segment, blocking},
    path,
    refusal::{Body, answer},
    root::{self, Entry, Existing, Root, budget::Budget},
    sandboxd::{
        archive,
        content::{self, Content, Span},
        refusal::{Refusal, text},
        route::{Route, Transfer, has_condition, route},
    },
    server::Calls,
    upload::{self, BodyError, Limits},
};

/// Boundary of answers with several parts.
///
/// The boundary need not be random: a file that contains it harms only the author of the file.
const BOUNDARY: &str = "torpor-4f1d7c0e52a94b3c8e6a";

/// Calls of the REST API, on the files of `root`.
#[derive(Debug)]
pub struct Rest {
    pub root: Arc<Root>,
    pub upload: Limits,
    /// Environment variables that clients may read.
    pub environment: BTreeMap<String, String>,
    pub started: Instant,
    /// Set at the start of the shutdown.
    pub stopping: Arc<AtomicBool>,
    pub busy: Arc<Mark>,
}

fn busy(left: Option<Duration>) -> Response<Body> {
    let body = json!({
        "busy": left.is_some(),
        "seconds_left": left.map_or(0.0, |left| left.as_secs_f64()),
    });
    answer(StatusCode::OK, &body)
}

impl Calls for Rest {
    type Refusal = Refusal;
    const HEALTH: &'static str = "/v1/health";

    async fn call(&self, request: Request<Incoming>) -> Result<Response<Body>, Refusal> {
        let (head, body) = request.into_parts();
        let (path, query) = (head.uri.path(), head.uri.query());
        match route(&head.method, path, query, &head.headers)? {
            Route::Get(path) => self.get(path, &head.headers).await,
            Route::Stat(path) => self.stat(path).await,
            Route::Tree(path) => self.tree(path).await,
            Route::Put {
                path,
                mode,
                existing,
            } => {
                let put = self.put(path, mode, existing, &head.headers, body).await;
                put.map_err(|refusal| match refusal {
                    Refusal::Exists if has_condition(&head.headers) => Refusal::Condition,
                    other => other,
                })
            }
            Route::MakeDirectory { path, mode } => {
                let made = self.change(move |root| root.make_directory(&path, mode));
                Ok(made.await?)
            }
            Route::Move(Transfer { from, to, existing }) => {
                let moved = self.change(move |root| root.rename(&from, &to, existing));
                moved.await.map_err(transfer_error)
            }
            Route::Copy(Transfer { from, to, existing }) => {
                let (mut budget, _guard) = Budget::new(self.upload.bytes);
                let copied = self.change(move |root| root.copy(&from, &to, existing, &mut budget));
                copied.await.map_err(transfer_error)
            }
            Route::Extract(path) => self.extract(path, &head.headers, body).await,
            Route::Delete { path, recursive } => self.delete(path, recursive).await,
            Route::Health => self.health(),
            Route::Busy => Ok(busy(self.busy.left())),
            Route::SetBusy(time) => {
                let mark = Arc::clone(&self.busy);
                let left = blocking(&self.root, move |_| Ok(mark.set(time))).await??;
                Ok(busy(Some(left)))
            }
            Route::ClearBusy => {
                let mark = Arc::clone(&self.busy);
                let cleared = self.change(move |_| {
                    mark.clear();
                    Ok(())
                });
                Ok(cleared.await?)
            }
            Route::Metadata => Ok(answer(StatusCode::OK, &json!({"env": self.environment}))),
        }
    }
}

impl Rest {
    fn health(&self) -> Result<Response<Body>, Refusal> {
        if self.stopping.load(Ordering::Relaxed) {
            return Err(Refusal::Stopping);
        }
        let uptime = self.started.elapsed().as_secs();
        let health = json!({"status": "ok", "uptime_seconds": uptime});
        Ok(answer(StatusCode::OK, &health))
    }

    /// Runs a change whose answer has no body.
    async fn change(
        &self,
        work: impl FnOnce(&Root) -> Result<(), root::Error> + Send + 'static,
    ) -> Result<Response<Body>, root::Error> {
        blocking(&self.root, work).await?;
        Ok(empty(StatusCode::NO_CONTENT))
    }

    async fn stat(&self, path: String) -> Result<Response<Body>, Refusal> {
        let found = blocking(&self.root, move |root| root.stat(&path)).await;
        let entry = found.map_err(root::Error::for_source)?;
        Ok(answer(StatusCode::OK, &described(&entry)))
    }

    async fn get(&self, path: String, headers: &HeaderMap) -> Result<Response<Body>, Refusal> {
        let found = blocking(&self.root, move |root| find(root, &path)).await;
        match found.map_err(root::Error::for_source)? {
            Found::Directory(listing) => Ok(listing),
            Found::File(file, modified, size) => Ok(content(
                file,
                headers,
                modified.unwrap_or(SystemTime::UNIX_EPOCH),
                size,
            )),
        }
    }

    /// Lists all entries below a directory, with names relative to it.
    async fn tree(&self, path: String) -> Result<Response<Body>, Refusal> {
        let (mut budget, _guard) = Budget::new(0);
        let found = blocking(&self.root, move |root| {
            let entries = root.tree(&path, &mut budget)?;
            Ok(listing(&path, &entries))
        });
        Ok(found.await?)
    }

    /// Unpacks the archive while it is received; a refused entry leaves the entries before it.
    async fn extract(
        &self,
        path: String,
        headers: &HeaderMap,
        body: Incoming,
    ) -> Result<Response<Body>, Refusal> {
        if self.upload.refuse(headers) {
            return Err(Refusal::TooLarge);
        }
        let limit = self.upload.bytes;
        let pieces = upload::pieces(body, self.upload.piece_timeout);
        let pieces = pieces.map(|piece| piece.map_err(|error| body_error(&error)));
        let archive = archive::Incoming::new(Box::pin(pieces), Handle::current(), limit);
        let (budget, _guard) = Budget::new(limit);
        let unpacked = blocking(&self.root, move |root| {
            let mut into = root.unpack(&path, budget)?;
            Ok(archive::extract(archive, &mut into))
        });
        let entries = unpacked.await??;
        Ok(answer(StatusCode::OK, &json!({"entries": entries})))
    }

    /// Writes a file, which appears when the whole body has been received.
    async fn put(
        &self,
        path: String,
        mode: u32,
        existing: Existing,
        headers: &HeaderMap,
        body: Incoming,
    ) -> Result<Response<Body>, Refusal> {
        if self.upload.refuse(headers) {
            return Err(Refusal::TooLarge);
        }
        let upload = blocking(&self.root, move |root| root.put(&path, mode, existing)).await?;
        let file = File::from_std(upload.file().map_err(disk_error)?);
        let pieces = upload::pieces(body, self.upload.piece_timeout);
        match multer::parse_boundary(kind_of(headers)) {
            Ok(boundary) => {
                let limit = SizeLimit::new().whole_stream(self.upload.bytes);
                let constraints = Constraints::new().size_limit(limit);
                let form = Multipart::with_constraints(pieces, boundary, constraints);
                pour_form(form, file).await?;
            }
            Err(multer::Error::NoMultipart | multer::Error::DecodeContentType(_)) => {
                let pieces = pieces.map(|piece| piece.map_err(|error| body_error(&error)));
                pour(pieces, file, self.upload.bytes).await?;
            }
            Err(error) => return Err(Refusal::Invalid(format!("invalid multipart body: {error}"))),
        }
        blocking(&self.root, move |_| upload.finish_as(existing)).await?;
        Ok(empty(StatusCode::NO_CONTENT))
    }

    /// Removes an entry; of a link the link itself.
    async fn delete(
        &self,
        path: String,
        recursive: Result<bool, Refusal>,
    ) -> Result<Response<Body>, Refusal> {
        let is_root = path::clean(&path).is_ok_and(|path| path.is_empty());
        let removed = blocking(&self.root, move |root| match recursive {
            Ok(recursive) => root.remove(&path, recursive).map(Ok),
            // A missing path is reported before an invalid parameter, as in upstream.
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

/// Directory or file at a path.
enum Found {
    /// Listing of the directory.
    Directory(Response<Body>),
    /// File, time of its last change and size in bytes.
    File(std::fs::File, Option<SystemTime>, u64),
}

fn find(root: &Root, path: &str) -> Result<Found, root::Error> {
    match root.list(path) {
        Err(root::Error::NotADirectory) => {
            let (file, size) = root.read(path)?;
            let modified = file.metadata().and_then(|metadata| metadata.modified());
            Ok(Found::File(file, modified.ok(), size))
        }
        listed => listed.map(|entries| Found::Directory(listing(path, &entries))),
    }
}

/// Returns the answer with these entries, without dangling links, as in upstream.
///
/// There may be many entries: the call may block.
fn listing(path: &str, entries: &[Entry]) -> Response<Body> {
    let entries = entries.iter().filter(|entry| !entry.dangling);
    let entries = entries.map(described);
    let path = format!("/{}", path.strip_prefix('/').unwrap_or(path));
    let listing = json!({"path": path, "entries": entries.collect::<Value>()});
    answer(StatusCode::OK, &listing)
}

/// Returns a file or directory as upstream's `FileEntry`.
fn described(entry: &Entry) -> Value {
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

/// Returns several ranges of a file as a multipart body.
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

/// Sets a header whose value is always valid.
fn set(response: &mut Response<Body>, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(name, value);
    }
}

fn kind_of(headers: &HeaderMap) -> &str {
    let kind = headers.get(header::CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    // Other multipart types are no forms.
    match kind
        .get(..19)
        .is_some_and(|start| start.eq_ignore_ascii_case("multipart/form-data"))
    {
        true => kind,
        false => "",
    }
}

/// Writes the part `file` of a form; other parts are ignored.
async fn pour_form(mut form: Multipart<'_>, file: File) -> Result<(), Refusal> {
    while let Some(field) = form.next_field().await.map_err(form_error)? {
        if field.name() == Some("file") {
            let pieces = field.map(|piece| piece.map_err(form_error));
            // The form as a whole is limited already.
            return pour(pieces, file, u64::MAX).await;
        }
    }
    let missing = "multipart body is missing the required \"file\" part";
    Err(Refusal::Invalid(missing.to_owned()))
}

/// Writes all pieces to the file and syncs it to the disk.
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
        file.write_all(&piece).await.map_err(disk_error)?;
    }
    // The result of the last write is known only after the flush.
    file.flush().await.map_err(disk_error)?;
    file.sync_all().await.map_err(disk_error)
}

/// Returns the refusal for an error of a move or copy: an entry at the target is a conflict.
fn transfer_error(error: root::Error) -> Refusal {
    match error {
        root::Error::NotEmpty | root::Error::IsADirectory | root::Error::NotADirectory => {
            Refusal::Occupied(error.to_string())
        }
        other => other.into(),
    }
}

fn disk_error(error: std::io::Error) -> Refusal {
    Refusal::Internal(format!("failed to write file contents: {error}"))
}

fn body_error(error: &BodyError) -> Refusal {
    match error {
        BodyError::Slow => Refusal::Slow,
        BodyError::Broken(_) => Refusal::Invalid(error.to_string()),
    }
}

fn form_error(error: multer::Error) -> Refusal {
    match error {
        multer::Error::StreamSizeExceeded { .. } | multer::Error::FieldSizeExceeded { .. } => {
            Refusal::TooLarge
        }
        multer::Error::StreamReadFailed(error) if error.is::<BodyError>() => {
            error.downcast_ref().map_or(Refusal::Slow, body_error)
        }
        error => Refusal::Invalid(format!("invalid multipart body: {error}")),
    }
}
