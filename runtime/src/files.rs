//! The calls that look at files.

use std::{io, sync::Arc};

use bytes::Bytes;
use futures::TryStreamExt as _;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Frame;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Value, json};
use tokio::{fs::File, io::AsyncReadExt as _};

use crate::{
    refusal::{Body, Refusal, answer},
    root::{Entry, Error, Root},
};

/// Bytes of a file that are in memory at once.
const CHUNK: usize = 64 * 1024;
/// What upstream leaves as it is in a file's name.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'/')
    .remove(b'_')
    .remove(b'.')
    .remove(b'-')
    .remove(b'~');

/// Does file system calls where they hold up nothing else.
pub async fn blocking<T: Send + 'static>(
    root: &Arc<Root>,
    work: impl FnOnce(&Root) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let root = Arc::clone(root);
    match tokio::task::spawn_blocking(move || work(&root)).await {
        Ok(result) => result,
        // Only a panic or the end of the process does this.
        Err(_) => Err(Error::Io(rustix::io::Errno::CANCELED)),
    }
}

/// Sends a file piece by piece.
pub async fn download(root: &Arc<Root>, path: String) -> Result<Response<Body>, Refusal> {
    let name = path.clone();
    let opened = blocking(root, move |root| root.read(&path)).await;
    let (file, size) = opened.map_err(|error| match error {
        Error::Denied => Refusal::Denied,
        Error::Missing | Error::NotADirectory | Error::NotAFile => Refusal::NoFile,
        other => Refusal::Download(other.to_string()),
    })?;
    let pieces = pieces(File::from_std(file), size).map_ok(Frame::data);
    let mut response = Response::new(StreamBody::new(pieces).boxed_unsync());
    let headers = response.headers_mut();
    let kind = HeaderValue::from_static("application/octet-stream");
    headers.insert(header::CONTENT_TYPE, kind);
    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(size));
    if let Ok(disposition) = HeaderValue::from_str(&disposition(&name)) {
        headers.insert(header::CONTENT_DISPOSITION, disposition);
    }
    Ok(response)
}

/// Exactly `size` bytes, or an error: a file that was cut meanwhile must not look whole.
fn pieces(file: File, size: u64) -> impl futures::Stream<Item = io::Result<Bytes>> + Send {
    futures::stream::try_unfold((file, size), |(mut file, left)| async move {
        if left == 0 {
            return Ok(None);
        }
        let mut piece = vec![0; CHUNK.min(usize::try_from(left).unwrap_or(CHUNK))];
        let read = file.read(&mut piece).await?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        piece.truncate(read);
        Ok(Some((Bytes::from(piece), (file, left - read as u64))))
    })
}

/// A file's name as a header, in upstream's two forms.
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

/// Says whether something is there.
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
