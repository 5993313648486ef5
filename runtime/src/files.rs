//! The calls that read files: download, list, exists.

use std::{io, sync::Arc};

use bytes::Bytes;
use futures::TryStreamExt as _;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use tokio::{
    fs::File,
    io::{AsyncReadExt as _, AsyncSeekExt as _},
};

use crate::{
    refusal::{Body, Refusal, answer},
    root::{Entry, Error, Root},
};

/// Bytes of a file that are in memory at once.
const CHUNK: usize = 64 * 1024;
/// Characters of a file name that are escaped, as in upstream.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'_')
    .remove(b'.')
    .remove(b'-')
    .remove(b'~');

/// Runs file system calls on a thread that may block.
pub async fn blocking<T: Send + 'static>(
    root: &Arc<Root>,
    work: impl FnOnce(&Root) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let root = Arc::clone(root);
    match tokio::task::spawn_blocking(move || work(&root)).await {
        Ok(result) => result,
        // The task fails only by a panic or at the end of the process.
        Err(_) => Err(Error::Io(rustix::io::Errno::CANCELED)),
    }
}

/// Returns a file as an answer that is read piece by piece.
pub async fn download(root: &Arc<Root>, path: String) -> Result<Response<Body>, Refusal> {
    let name = path.clone();
    let opened = blocking(root, move |root| root.read(&path)).await;
    let (file, size) = opened.map_err(|error| match error {
        Error::Denied => Refusal::Denied,
        Error::Missing | Error::NotADirectory | Error::NotAFile => Refusal::NoFile,
        other => Refusal::Download(other.to_string()),
    })?;
    let whole = Segment::Span {
        start: 0,
        length: size,
    };
    let mut response = Response::new(body(file, vec![whole]));
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("application/octet-stream");
    headers.insert(header::CONTENT_TYPE, kind);
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(size));
    if let Ok(disposition) = HeaderValue::from_str(&disposition(&name)) {
        headers.insert(header::CONTENT_DISPOSITION, disposition);
    }
    Ok(response)
}

/// Part of an answer with the content of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Segment {
    Text(Bytes),
    /// Range of the file, in bytes.
    Span {
        start: u64,
        length: u64,
    },
}

impl Segment {
    /// Returns the length in bytes.
    pub fn length(&self) -> u64 {
        match self {
            Self::Text(text) => text.len() as u64,
            Self::Span { length, .. } => *length,
        }
    }
}

/// State of an answer that is being sent.
struct Reading {
    file: File,
    ahead: std::vec::IntoIter<Segment>,
    left: u64,
}

/// Returns the content of the segments, piece by piece.
///
/// A file that was truncated meanwhile is an error, so that the answer does not look complete.
pub fn pieces(
    file: File,
    segments: Vec<Segment>,
) -> impl futures::Stream<Item = io::Result<Bytes>> + Send {
    let reading = Reading {
        file,
        ahead: segments.into_iter(),
        left: 0,
    };
    futures::stream::try_unfold(reading, |mut reading| async move {
        while reading.left == 0 {
            match reading.ahead.next() {
                None => return Ok(None),
                Some(Segment::Text(text)) => return Ok(Some((text, reading))),
                Some(Segment::Span { start, length }) => {
                    reading.file.seek(io::SeekFrom::Start(start)).await?;
                    reading.left = length;
                }
            }
        }
        let mut piece = vec![0; CHUNK.min(usize::try_from(reading.left).unwrap_or(CHUNK))];
        let read = reading.file.read(&mut piece).await?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        piece.truncate(read);
        reading.left -= read as u64;
        Ok(Some((Bytes::from(piece), reading)))
    })
}

/// Returns the body of an answer with the content of a file.
pub fn body(file: std::fs::File, segments: Vec<Segment>) -> Body {
    let pieces = pieces(File::from_std(file), segments).map_ok(Frame::data);
    StreamBody::new(pieces).boxed_unsync()
}

/// Returns the header `Content-Disposition`, in upstream's two forms.
fn disposition(name: &str) -> String {
    let escaped = utf8_percent_encode(name, ESCAPED).to_string();
    if escaped == name {
        format!("attachment; filename=\"{name}\"")
    } else {
        format!("attachment; filename*=utf-8''{escaped}")
    }
}

/// Lists a directory.
pub async fn list(root: &Arc<Root>, path: String) -> Result<Response<Body>, Refusal> {
    let listed = blocking(root, move |root| root.list(&path)).await;
    let entries = listed.map_err(|error| match error {
        Error::Denied => Refusal::Denied,
        Error::Missing | Error::NotADirectory => Refusal::NoDirectory,
        other => Refusal::List(other.to_string()),
    })?;
    let entries: Value = entries.iter().map(described).collect();
    Ok(answer(StatusCode::OK, &entries))
}

fn described(entry: &Entry) -> Value {
    let kind = if entry.is_directory {
        "directory"
    } else {
        "file"
    };
    json!({"name": entry.name, "size": entry.size, "type": kind, "mod_time": entry.mod_time})
}

/// Reports whether a path exists.
pub async fn exists(root: &Arc<Root>, path: String) -> Result<Response<Body>, Refusal> {
    let asked = path.clone();
    let there = blocking(root, move |root| root.exists(&asked)).await;
    let there = there.map_err(|_| Refusal::Denied)?;
    Ok(answer(
        StatusCode::OK,
        &json!({"path": path, "exists": there}),
    ))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("a/b.txt", "attachment; filename=\"a/b.txt\"")]
    #[case("a b", "attachment; filename*=utf-8''a%20b")]
    #[case("ä\"\r\n", "attachment; filename*=utf-8''%C3%A4%22%0D%0A")]
    fn a_name_is_safe_in_a_header(#[case] name: &str, #[case] header: &str) {
        assert_eq!(disposition(name), header);
    }
}
