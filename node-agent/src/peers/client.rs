//! Client of the image server of another node.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http1;
use hyper::header::{HOST, HeaderName};
use hyper::{Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use torpor_api::reasons::restored as reasons;
use torpor_core::ids::{ImageId, Namespace, PodUid};
use torpor_repository::{Progress, WriteBack};
use torpor_snapshots::Manifest;
use torpor_snapshots::manifest::MAX_BYTES;

use super::admit::image_server;
use super::identity::{CertificateDigest, Identity, IdentityError};
use super::protocol::{MANIFEST_LENGTH, NODE, POD, Reason, Request, STALLED, time_limit};
use crate::reconcile::driver::ask;
use crate::reconcile::observe::words;

/// Time limit of a connection with its handshake.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Time limit of an answer's head: the other node asks the apiserver twice.
const ANSWER_LIMIT: Duration = Duration::from_secs(45);
/// Most bytes of a refusal's words.
const MAX_WORDS: usize = 1024;
/// Bytes that are written together.
const PART: usize = 1 << 20;

/// Error of a download from another node.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{}", words(.0))]
    Ask(#[from] ask::Error),
    #[error("node {node:?} gives no images to other nodes")]
    NoServer { node: String },
    #[error("cannot connect to node {node:?} at {address}: {source}")]
    Connect {
        node: String,
        address: String,
        source: io::Error,
    },
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("the connection to node {node:?} failed: {}", words(.source))]
    Connection { node: String, source: hyper::Error },
    #[error("node {node:?} did not go on within {limit:?}")]
    Stalled { node: String, limit: Duration },
    #[error("node {node:?} refuses the image ({:?}): {words}", .reason.of_condition())]
    Refused {
        node: String,
        reason: Reason,
        words: String,
    },
    #[error("node {node:?} sends another content than its answer says: {why}")]
    Content { node: String, why: &'static str },
    #[error("cannot write the image to this node's disk: {0}")]
    Disk(io::Error),
}

impl Error {
    /// Returns the reason for conditions.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Refused { reason, .. } => reason.of_condition(),
            Self::Content { .. } => reasons::IMAGE_CORRUPT,
            Self::Disk(_) => reasons::RESTORE_FAILED,
            _ => reasons::SOURCE_NODE_UNAVAILABLE,
        }
    }

    /// Reports whether another attempt fails too, as far as this node can tell.
    pub(crate) fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Refused {
                reason: Reason::Missing | Reason::Consumed,
                ..
            }
        )
    }

    /// Reports whether the node sends as many images as it may.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(
            self,
            Self::Refused {
                reason: Reason::Busy,
                ..
            }
        )
    }
}

/// Asks other nodes for images, in the name of this node.
#[derive(Clone)]
pub(crate) struct Peers {
    pub(crate) identity: Arc<Identity>,
    pub(crate) client: kube::Client,
    /// Name of this node.
    pub(crate) node: String,
}

/// Image that another node sends.
pub(crate) struct Offer {
    manifest: Vec<u8>,
    content: Content,
}

/// Connection to a server.
type Connection = Pin<Box<http1::Connection<TokioIo<TlsStream<TcpStream>>, Empty<Bytes>>>>;

/// Content of an answer, in pieces.
struct Content {
    node: String,
    body: Incoming,
    /// Bytes that were received and not used yet.
    rest: Bytes,
    /// Moves the connection's bytes when it is polled; none once it has ended. In a task of its own
    /// it would wake this one for each record of TLS.
    connection: Option<Connection>,
}

impl Peers {
    /// Asks a node for an image that a Pod of this node continues from.
    pub(crate) async fn ask(
        &self,
        node: &str,
        (namespace, image): &(Namespace, ImageId),
        pod: &PodUid,
    ) -> Result<Offer, Error> {
        let server = image_server(&self.client, node).await?;
        let server = server.ok_or_else(|| Error::NoServer {
            node: node.to_owned(),
        })?;
        let certificate = CertificateDigest::written(&server.certificate);
        let connecting = self.connect(&server.address, certificate);
        let connected = match timeout(CONNECT_LIMIT, connecting).await {
            Ok(connected) => connected?,
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        };
        let stream = connected.map_err(|source| Error::Connect {
            node: node.to_owned(),
            address: server.address.clone(),
            source,
        })?;
        let failed = |source| Error::Connection {
            node: node.to_owned(),
            source,
        };
        let (mut sender, connection) = http1::handshake(stream).await.map_err(failed)?;
        let mut connection = Box::pin(connection);
        let request = Request {
            namespace: namespace.clone(),
            image: image.clone(),
            node: self.node.clone(),
            pod: pod.clone(),
        };
        let stalled = |_| Error::Stalled {
            node: node.to_owned(),
            limit: ANSWER_LIMIT,
        };
        let answering = sender.send_request(head(&request, &server.address));
        let answering = async {
            tokio::select! {
                biased;
                answer = answering => answer,
                // It does not end before the answer, or the answer has its error.
                Err(error) = &mut connection => Err(error),
            }
        };
        let answer = timeout(ANSWER_LIMIT, answering).await.map_err(stalled)?;
        Offer::read(node, answer.map_err(failed)?, connection).await
    }

    /// Connects to a server with this certificate.
    async fn connect(
        &self,
        address: &str,
        certificate: CertificateDigest,
    ) -> Result<io::Result<TokioIo<TlsStream<TcpStream>>>, Error> {
        let connector = TlsConnector::from(self.identity.client(certificate)?);
        let connecting = async {
            let parsed: Result<SocketAddr, _> = address.parse();
            let address = parsed.map_err(|error| io::Error::other(format!("no address: {error}")));
            let stream = TcpStream::connect(address?).await?;
            let stream = connector.connect(Identity::server_name(), stream).await?;
            Ok(TokioIo::new(stream))
        };
        Ok(connecting.await)
    }
}

/// Returns the head of a request, which has no body.
fn head(request: &Request, address: &str) -> hyper::Request<Empty<Bytes>> {
    let mut head = hyper::Request::new(Empty::new());
    // Paths and names of these types are valid in a URI and in a header.
    if let Ok(uri) = request.path().parse() {
        *head.uri_mut() = uri;
    }
    for (name, value) in [
        (HOST.as_str(), address),
        (NODE, &request.node),
        (POD, request.pod.as_str()),
    ] {
        if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value.parse()) {
            head.headers_mut().insert(name, value);
        }
    }
    head
}

impl Offer {
    async fn read(
        node: &str,
        answer: Response<Incoming>,
        connection: Connection,
    ) -> Result<Self, Error> {
        let (head, body) = answer.into_parts();
        let node = node.to_owned();
        let mut content = Content {
            node: node.clone(),
            body,
            rest: Bytes::new(),
            connection: Some(connection),
        };
        if head.status != StatusCode::OK {
            let mut words = Vec::new();
            // Without them the status says enough.
            let _ = content.collect(MAX_WORDS, &mut words).await;
            let words = String::from_utf8_lossy(&words);
            let words = words.replace(char::is_control, " ");
            let reason = Reason::of(head.status);
            return Err(Error::Refused {
                node,
                reason,
                words,
            });
        }
        let length = head.headers.get(MANIFEST_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
        let length = length.filter(|length| *length <= MAX_BYTES);
        let length = length.ok_or_else(|| content.is_wrong("it has no manifest of a valid length"));
        // The digest shows whether all of it came.
        let mut manifest = Vec::new();
        content.collect(length?, &mut manifest).await?;
        Ok(Self { manifest, content })
    }

    /// Returns the content of the image's `manifest.json`. Nothing has been checked in it.
    pub(crate) fn manifest(&self) -> &[u8] {
        &self.manifest
    }

    /// Returns the node that sends the image.
    pub(crate) fn node(&self) -> &str {
        &self.content.node
    }

    /// Downloads all files into `files`, in the order of the manifest, which is the offer's. The
    /// caller compares the files with the manifest's digests.
    pub(crate) async fn download(
        &mut self,
        manifest: &Manifest,
        files: Vec<File>,
        progress: &Progress,
    ) -> Result<(), Error> {
        let limit = time_limit(manifest.size());
        let node = self.content.node.clone();
        let done = timeout(limit, self.download_all(manifest, files, progress)).await;
        done.unwrap_or(Err(Error::Stalled { node, limit }))
    }

    async fn download_all(
        &mut self,
        manifest: &Manifest,
        files: Vec<File>,
        progress: &Progress,
    ) -> Result<(), Error> {
        progress.begin(manifest.size());
        let files: Vec<Arc<File>> = files.into_iter().map(Arc::new).collect();
        let mut write_back = WriteBack::of(&files);
        let failed = |(_, source)| Error::Disk(source);
        // The next part is received while one is written.
        let mut writing: Option<JoinHandle<(Vec<u8>, io::Result<()>)>> = None;
        let mut part = Vec::new();
        for (entry, file) in manifest.files.iter().zip(&files) {
            let mut offset = 0;
            while offset < entry.size {
                let most = usize::try_from(entry.size - offset)
                    .unwrap_or(PART)
                    .min(PART);
                self.content.collect(most, &mut part).await?;
                if part.len() < most {
                    return Err(self.content.is_wrong("it ends early"));
                }
                let full = std::mem::replace(&mut part, written(writing.take()).await?);
                let (length, file) = (most as u64, file.clone());
                writing = Some(spawn_blocking(move || {
                    let written = file.write_all_at(&full, offset);
                    (full, written)
                }));
                write_back.wrote(length).await.map_err(failed)?;
                progress.add(length, length);
                offset += length;
            }
        }
        written(writing).await?;
        write_back.end().await.map_err(failed)?;
        match self.content.piece(1).await? {
            None => Ok(()),
            Some(_) => Err(self.content.is_wrong("it goes on after the last file")),
        }
    }
}

/// Waits for a write, and returns its buffer.
async fn written(writing: Option<JoinHandle<(Vec<u8>, io::Result<()>)>>) -> Result<Vec<u8>, Error> {
    let Some(writing) = writing else {
        return Ok(Vec::new());
    };
    let ended = writing.await.map_err(io::Error::other);
    let (buffer, written) = ended.map_err(Error::Disk)?;
    written.map_err(Error::Disk).map(|()| buffer)
}

impl Content {
    fn is_wrong(&self, why: &'static str) -> Error {
        Error::Content {
            node: self.node.clone(),
            why,
        }
    }

    async fn frame(&mut self) -> Option<hyper::Result<Frame<Bytes>>> {
        loop {
            let Some(connection) = &mut self.connection else {
                return self.body.frame().await;
            };
            // Cancel-safe: a frame that has come is returned at once.
            tokio::select! {
                biased;
                frame = self.body.frame() => return frame,
                // The body has its error, and what came before it.
                _ = connection => self.connection = None,
            }
        }
    }

    /// Returns the next bytes, at most `most`; none at the end.
    async fn piece(&mut self, most: usize) -> Result<Option<Bytes>, Error> {
        while self.rest.is_empty() {
            let frame = timeout(STALLED, self.frame()).await;
            let frame = frame.map_err(|_| Error::Stalled {
                node: self.node.clone(),
                limit: STALLED,
            })?;
            let Some(frame) = frame else { return Ok(None) };
            let frame = frame.map_err(|source| Error::Connection {
                node: self.node.clone(),
                source,
            })?;
            self.rest = frame.into_data().unwrap_or_default();
        }
        Ok(Some(self.rest.split_to(most.min(self.rest.len()))))
    }

    /// Replaces the content of `all` by the next bytes: `most`, or fewer at the end.
    async fn collect(&mut self, most: usize, all: &mut Vec<u8>) -> Result<(), Error> {
        all.clear();
        all.reserve(most);
        while all.len() < most
            && let Some(piece) = self.piece(most - all.len()).await?
        {
            all.extend_from_slice(&piece);
        }
        Ok(())
    }
}
