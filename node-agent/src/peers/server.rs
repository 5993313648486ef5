//! Server of this node's images.

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use futures::stream;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::CONTENT_LENGTH;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use kube::Client;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use torpor_api::node::ImageServer;
use torpor_daemon::serve::{Bounds, each, listen};
use torpor_snapshots::{Image, ImageError};

use super::admit::{admit, check_image};
use super::identity::{CertificateDigest, Identity, IdentityError};
use super::protocol::{MANIFEST_LENGTH, Reason, Refusal, Request, STALLED, time_limit};
use crate::reconcile::node::Node;
use crate::reconcile::observe::words;
use crate::report::metrics::Metrics;

/// Connections at once. Each process that reaches the address may connect.
const CONNECTIONS: Bounds = Bounds {
    total: 64,
    per_address: 8,
};
/// Images that are sent at once.
const SENT_AT_ONCE: usize = 4;
/// Questions to the apiserver at once, for requests that are not admitted yet.
const ASKED_AT_ONCE: usize = 4;
/// Time limit of a TLS handshake, and of a request's head.
const HEAD_LIMIT: Duration = Duration::from_secs(5);
/// Size limit of a request's head, in bytes.
const MAX_HEAD: usize = 16 * 1024;
/// Time for which a request waits until fewer images are sent.
const BUSY_LIMIT: Duration = Duration::from_secs(20);
/// Bytes that are read and sent together, and how many such pieces wait for the network. The
/// allocator takes larger ones from the kernel each time, which costs more than the copy.
const PIECE: usize = 64 * 1024;
const PIECES: usize = 8;

type Body = BoxBody<Bytes, io::Error>;

/// Server of this node's images.
pub(crate) struct Server {
    identity: Arc<Identity>,
    node: Arc<Node>,
    client: Client,
    /// Name of this node.
    name: String,
    metrics: Arc<Metrics>,
    pub(super) sends: Arc<Semaphore>,
    asks: Semaphore,
}

/// Content of an image that is sent.
struct Content {
    manifest: Vec<u8>,
    image: Image,
}

impl Server {
    pub(crate) fn new(
        identity: Arc<Identity>,
        node: Arc<Node>,
        client: Client,
        name: String,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            identity,
            node,
            client,
            name,
            metrics,
            sends: Arc::new(Semaphore::new(SENT_AT_ONCE)),
            asks: Semaphore::new(ASKED_AT_ONCE),
        }
    }

    /// Answers a connection. Returns once it is over or its request is admitted: other clients
    /// cannot take the place of an image that is being sent.
    async fn connection(
        self: Arc<Self>,
        acceptor: TlsAcceptor,
        stream: TcpStream,
        ends: CancellationToken,
    ) {
        let Ok(Ok(stream)) = timeout(HEAD_LIMIT, acceptor.accept(stream)).await else {
            return;
        };
        let certificate = CertificateDigest::of_peer(stream.get_ref().1.peer_certificates());
        let admitted = Arc::new(Notify::new());
        let guard = ends.clone().drop_guard();
        let (notify, stop) = (admitted.clone(), ends.clone());
        let service = service_fn(move |request| {
            let (server, stop, admitted) = (self.clone(), stop.clone(), notify.clone());
            let certificate = certificate.clone();
            async move {
                let answer = server.respond(&request, certificate.as_ref(), &admitted, stop);
                Ok::<_, Infallible>(answer.await)
            }
        });
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(HEAD_LIMIT)
            .max_buf_size(MAX_HEAD)
            .keep_alive(false);
        let serving = http.serve_connection(TokioIo::new(stream), service);
        let serving = tokio::spawn(async move {
            if let Some(Err(error)) = ends.run_until_cancelled(serving).await {
                tracing::debug!(%error, "a connection of another node failed");
            }
        });
        // Cancel-safe: both arms only wait.
        tokio::select! {
            _ = serving => {}
            () = admitted.notified() => drop(guard.disarm()),
        }
    }

    async fn respond(
        self: &Arc<Self>,
        request: &hyper::Request<Incoming>,
        certificate: Option<&CertificateDigest>,
        admitted: &Notify,
        stalled: CancellationToken,
    ) -> Response<Body> {
        match self.open(request, certificate, admitted).await {
            Ok((content, permit)) => self.send(content, permit, stalled),
            Err(refusal) => {
                let Refusal { reason, words } = &refusal;
                // Each process of the network may ask as often as it likes.
                tracing::debug!(path = request.uri().path(), ?reason, %words, "an image is not sent");
                self.metrics.not_sent(reason.name());
                let mut response = Response::new(full(refusal.words.clone()));
                *response.status_mut() = refusal.reason.status();
                response
            }
        }
    }

    /// Admits a request, and opens its image.
    async fn open(
        &self,
        request: &hyper::Request<Incoming>,
        certificate: Option<&CertificateDigest>,
        admitted: &Notify,
    ) -> Result<(Content, OwnedSemaphorePermit), Refusal> {
        let parsed = Request::parse(request.uri(), request.headers());
        let wanted = parsed.filter(|_| request.method() == Method::GET);
        let wanted = wanted
            .ok_or_else(|| Refusal::new(Reason::Malformed, "this is no request for an image"))?;
        let used = {
            let _turn = self.asks.acquire().await;
            admit(&self.client, &self.name, &wanted, certificate).await?
        };
        admitted.notify_one();
        let turn = timeout(BUSY_LIMIT, self.sends.clone().acquire_owned()).await;
        let permit = turn.ok().and_then(Result::ok).ok_or_else(|| {
            Refusal::new(Reason::Busy, "this node sends as many images as it may")
        })?;
        let node = self.node.clone();
        let opened = tokio::task::spawn_blocking(move || {
            let found = node.store.image(&wanted.namespace, &wanted.image);
            let unreadable = |error: &dyn std::error::Error| {
                let words = format!("the image is unreadable: {error}");
                Refusal::new(Reason::Unavailable, words)
            };
            let image = found.map_err(|error| match error {
                ImageError::Missing { .. } => Refusal::new(Reason::Missing, words(&error)),
                error => unreadable(&error),
            })?;
            let consumed_by = image.consumed_by().map_err(|error| unreadable(&error))?;
            let digest = image.digest().to_string();
            check_image(&used, &digest, consumed_by.as_ref())?;
            let encoded = image.manifest().encode();
            let (manifest, _) = encoded.map_err(|error| unreadable(&error))?;
            Ok(Content { manifest, image })
        });
        let content = opened.await.map_err(|error| {
            Refusal::new(
                Reason::Unavailable,
                format!("the image was not read: {error}"),
            )
        })??;
        Ok((content, permit))
    }

    fn send(
        self: &Arc<Self>,
        content: Content,
        permit: OwnedSemaphorePermit,
        stalled: CancellationToken,
    ) -> Response<Body> {
        let manifest = content.manifest.len();
        let size = manifest as u64 + content.image.manifest().size();
        let (pieces, receiver) = mpsc::channel(PIECES);
        let (server, runtime) = (self.clone(), Handle::current());
        let slow = stalled.clone();
        tokio::spawn(async move {
            let ended = timeout(time_limit(size), slow.cancelled()).await;
            ended.unwrap_or_else(|_| slow.cancel());
        });
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let begun = Instant::now();
            let put = |piece| {
                let put = runtime.block_on(timeout(STALLED, pieces.send(piece)));
                if put.is_err() {
                    stalled.cancel();
                }
                matches!(put, Ok(Ok(())))
            };
            match copy(content, &put) {
                Ok(true) => server.metrics.sent(size, begun.elapsed()),
                Ok(false) => server.metrics.not_sent("Disconnected"),
                Err(error) => {
                    tracing::warn!(%error, "cannot read an image that another node fetches");
                    server.metrics.not_sent(Reason::Unavailable.name());
                    put(Err(error));
                }
            }
        });
        let frames = stream::unfold(receiver, |mut receiver| async move {
            let piece: io::Result<Bytes> = receiver.recv().await?;
            Some((piece.map(Frame::data), receiver))
        });
        let mut response = Response::new(StreamBody::new(frames).boxed());
        let headers = response.headers_mut();
        headers.insert(CONTENT_LENGTH, size.into());
        headers.insert(MANIFEST_LENGTH, manifest.into());
        response
    }
}

/// Returns what the SandboxNode says of a server. `address`: that of its agent for other nodes.
pub(crate) fn described(identity: &Identity, address: IpAddr, port: u16) -> ImageServer {
    ImageServer {
        address: SocketAddr::new(address, port).to_string(),
        certificate: identity.digest().to_string(),
    }
}

fn full(words: String) -> Body {
    Full::from(words).map_err(|never| match never {}).boxed()
}

/// Reads an image and hands its content to `put`, which returns false once nobody takes it. Returns
/// whether all of it was taken. Blocks.
fn copy(content: Content, put: &dyn Fn(io::Result<Bytes>) -> bool) -> io::Result<bool> {
    if !put(Ok(content.manifest.into())) {
        return Ok(false);
    }
    for entry in &content.image.manifest().files {
        let file = content.image.open_file(&entry.name);
        let mut file = File::from(file.map_err(io::Error::other)?);
        let mut left = entry.size;
        while left > 0 {
            let mut piece = vec![0; PIECE.min(usize::try_from(left).unwrap_or(PIECE))];
            file.read_exact(&mut piece)?;
            left -= piece.len() as u64;
            if !put(Ok(piece.into())) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Serves this node's images until `stop` is cancelled.
pub(crate) async fn serve(
    server: Server,
    address: SocketAddr,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let listener = listen(address)
        .await
        .with_context(|| format!("cannot listen at {address} (--images-bind-address)"))?;
    serve_on(server, listener, stop)?.await;
    Ok(())
}

/// Serves at a listener until `stop` is cancelled.
pub(super) fn serve_on(
    server: Server,
    listener: TcpListener,
    stop: CancellationToken,
) -> Result<impl Future<Output = ()>, IdentityError> {
    let acceptor = TlsAcceptor::from(server.identity.server()?);
    let (server, ends) = (Arc::new(server), stop.clone());
    let answer = move |stream| {
        let serving = server.clone();
        // The other node tries again.
        serving.connection(acceptor.clone(), stream, ends.child_token())
    };
    Ok(each(listener, CONNECTIONS, answer, stop))
}
