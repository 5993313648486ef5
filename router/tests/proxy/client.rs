//! Clients of the router.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::{
    body::{Body, Incoming},
    client::conn::http2,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::world::{NS, World, soon};

/// Response, read to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Answer {
    /// Returns `status body`.
    pub(crate) fn line(&self) -> String {
        format!("{} {}", self.status, self.body)
    }

    pub(crate) fn connection(&self) -> &str {
        self.headers["x-connection"].to_str().unwrap()
    }
}

/// Returns a request for a sandbox's port.
pub(crate) fn request(sandbox: &str, port: u16) -> http::request::Builder {
    Request::builder()
        .uri("/")
        .header("host", "router")
        .header("x-sandbox-id", sandbox)
        .header("x-sandbox-namespace", NS)
        .header("x-sandbox-port", port)
}

pub(crate) fn nothing() -> Full<Bytes> {
    Full::default()
}

/// Sends a request on a connection of its own.
pub(crate) async fn send<B>(world: &World, request: Request<B>) -> Answer
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: std::error::Error + Send + Sync,
{
    read(soon("an answer", start(world.address, request)).await).await
}

/// Sends a request for `/` of a sandbox's port.
pub(crate) async fn get(world: &World, sandbox: &str, port: u16) -> Answer {
    send(world, request(sandbox, port).body(nothing()).unwrap()).await
}

/// Sends a request on a connection of its own and returns once the response headers have come.
pub(crate) async fn start<B>(address: SocketAddr, request: Request<B>) -> Response<Incoming>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: std::error::Error + Send + Sync,
{
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
        .handshake(TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection.with_upgrades());
    sender
        .send_request(request.map(BodyExt::boxed_unsync))
        .await
        .unwrap()
}

/// Opens a connection that speaks HTTP/2 from its first byte on.
pub(crate) async fn http2<B>(world: &World) -> http2::SendRequest<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: std::error::Error + Send + Sync,
{
    let stream = TcpStream::connect(world.address).await.unwrap();
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    sender
}

pub(crate) async fn read(response: Response<Incoming>) -> Answer {
    let (parts, body) = response.into_parts();
    let body = soon("the end of an answer", body.collect())
        .await
        .unwrap()
        .to_bytes();
    Answer {
        status: parts.status.as_u16(),
        headers: parts.headers,
        body: String::from_utf8(body.to_vec()).unwrap(),
    }
}

/// Connection on which a test writes arbitrary bytes.
pub(crate) struct Raw(pub(crate) TcpStream);

impl Raw {
    pub(crate) async fn open(world: &World) -> Self {
        Self(TcpStream::connect(world.address).await.unwrap())
    }

    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Reads until the router closes the connection.
    pub(crate) async fn rest(&mut self) -> String {
        let mut bytes = Vec::new();
        // A reset is an end too: the router may close before it has read everything.
        let _ = soon("the router closes", self.0.read_to_end(&mut bytes)).await;
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Reads until `end` has come.
    pub(crate) async fn read_until(&mut self, end: &str) -> String {
        let mut text = String::new();
        let mut buffer = [0; 1024];
        while !text.contains(end) {
            let count = soon("more bytes", self.0.read(&mut buffer)).await.unwrap();
            assert_ne!(count, 0, "closed after {text:?}");
            text.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
        }
        text
    }
}
