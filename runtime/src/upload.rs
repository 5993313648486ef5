//! The call `upload`: receives a file piece by piece.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use http::{HeaderMap, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use multer::{Constraints, Field, Multipart, SizeLimit};
use serde_json::json;
use tokio::{fs::File, io::AsyncWriteExt as _, time::timeout};

use crate::{
    files::blocking,
    refusal::{Body, Refusal, answer},
    root::{self, Root, Upload},
};

/// Failure to receive a body.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    #[error("the body exceeded its time limit")]
    Slow,
    #[error("the body is incomplete")]
    Broken(#[source] hyper::Error),
}

/// Limits of a body.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub bytes: u64,
    /// Time limit of the next piece.
    pub piece_timeout: Duration,
}

impl Limits {
    /// Reports whether the header `Content-Length` exceeds the limit.
    pub fn refuse(&self, headers: &HeaderMap) -> bool {
        let length = headers.get(header::CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
        length.is_some_and(|length: u64| length > self.bytes)
    }
}

/// Returns the pieces of a body.
pub fn pieces(
    body: Incoming,
    piece_timeout: Duration,
) -> impl Stream<Item = Result<Bytes, BodyError>> + Send {
    futures::stream::unfold(body, move |mut body| async move {
        loop {
            let piece = match timeout(piece_timeout, body.frame()).await {
                Err(_) => Err(BodyError::Slow),
                Ok(None) => return None,
                Ok(Some(Err(error))) => Err(BodyError::Broken(error)),
                Ok(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => Ok(data),
                    // Trailers are ignored.
                    Err(_) => continue,
                },
            };
            return Some((piece, body));
        }
    })
}

/// Reads a small body into memory.
pub async fn whole(body: Incoming, limits: Limits) -> Result<Vec<u8>, Refusal> {
    let mut whole = Vec::new();
    let mut pieces = std::pin::pin!(pieces(body, limits.piece_timeout));
    while let Some(piece) = pieces.next().await {
        whole.extend_from_slice(&piece.map_err(|error| refusal_of(&error))?);
        if whole.len() as u64 > limits.bytes {
            return Err(Refusal::TooLarge);
        }
    }
    Ok(whole)
}

/// Writes the field `file` of a form to the path in its file name.
///
/// The file appears when the whole form has been received.
pub async fn upload(
    root: &Arc<Root>,
    headers: &HeaderMap,
    body: Incoming,
    limits: Limits,
) -> Result<Response<Body>, Refusal> {
    let kind = headers.get(header::CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let boundary = multer::parse_boundary(kind).map_err(|_| Refusal::missing(Some("file")))?;
    let limit = SizeLimit::new().whole_stream(limits.bytes);
    let constraints = Constraints::new().size_limit(limit);
    let pieces = pieces(body, limits.piece_timeout);
    let mut form = Multipart::with_constraints(pieces, boundary, constraints);
    let mut taken: Option<(String, Upload)> = None;
    while let Some(field) = form.next_field().await.map_err(form_error)? {
        if field.name() == Some("file") && taken.is_none() {
            taken = Some(take(root, field).await?);
        }
    }
    let (name, file) = taken.ok_or_else(|| Refusal::missing(Some("file")))?;
    blocking(root, move |_| file.finish())
        .await
        .map_err(root_error)?;
    let message = format!("File '{name}' uploaded successfully.");
    Ok(answer(StatusCode::OK, &json!({"message": message})))
}

async fn take(root: &Arc<Root>, mut field: Field<'_>) -> Result<(String, Upload), Refusal> {
    let Some(name) = field.file_name().map(str::to_owned) else {
        return Err(Refusal::Field {
            kind: "value_error",
            field: Some("file"),
            message: "Value error, Expected UploadFile, received: <class 'str'>",
        });
    };
    let path = name.clone();
    let begun = blocking(root, move |root| root.begin(&path)).await;
    let upload = begun.map_err(root_error)?;
    let mut file = File::from_std(upload.file().map_err(disk_error)?);
    while let Some(piece) = field.chunk().await.map_err(form_error)? {
        file.write_all(&piece).await.map_err(disk_error)?;
    }
    // The result of the last write is known only after the flush.
    file.flush().await.map_err(disk_error)?;
    Ok((name, upload))
}

fn disk_error(error: io::Error) -> Refusal {
    Refusal::Upload(error.to_string())
}

fn root_error(error: root::Error) -> Refusal {
    match error {
        root::Error::Denied => Refusal::Denied,
        other => Refusal::Upload(other.to_string()),
    }
}

fn form_error(error: multer::Error) -> Refusal {
    match error {
        multer::Error::StreamSizeExceeded { .. } | multer::Error::FieldSizeExceeded { .. } => {
            Refusal::TooLarge
        }
        multer::Error::StreamReadFailed(error) => match error.downcast_ref::<BodyError>() {
            Some(error) => refusal_of(error),
            None => Refusal::Malformed,
        },
        _ => Refusal::Malformed,
    }
}

fn refusal_of(error: &BodyError) -> Refusal {
    match error {
        BodyError::Slow => Refusal::Slow,
        BodyError::Broken(_) => Refusal::Malformed,
    }
}
