//! HTTP servers that stand for programs in sandboxes.

use std::{
    convert::Infallible,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use tokio::{net::TcpListener, sync::mpsc, task::JoinHandle};

pub(crate) type Body = UnsyncBoxBody<Bytes, Infallible>;

/// HTTP/1 and HTTP/2 server on a loopback address.
pub(crate) struct Backend {
    pub(crate) port: u16,
    connections: Arc<AtomicUsize>,
    serving: JoinHandle<()>,
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Backend {
    /// Starts a server that answers each request by `answer`; the response header `x-connection`
    /// has the number of the connection.
    pub(crate) async fn start<F, A>(answer: F) -> Self
    where
        F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
        A: Future<Output = Response<Body>> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&connections);
        let serving = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let number = counted.fetch_add(1, Ordering::SeqCst) + 1;
                let answer = answer.clone();
                let service = service_fn(move |request| {
                    let answer = answer(request);
                    async move {
                        let mut response = answer.await;
                        response.headers_mut().insert("x-connection", number.into());
                        Ok::<_, Infallible>(response)
                    }
                });
                tokio::spawn(async move {
                    let _ = auto::Builder::new(TokioExecutor::new())
                        .serve_connection_with_upgrades(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Self {
            port,
            connections,
            serving,
        }
    }

    /// Starts a server that returns the request: a line for it, a line for each header, and the
    /// body.
    pub(crate) async fn echo() -> Self {
        Self::start(|request: Request<Incoming>| async move {
            let (parts, body) = request.into_parts();
            let mut text = format!("{} {}\n", parts.method, parts.uri);
            for (name, value) in &parts.headers {
                text.push_str(&format!("{name}: {}\n", value.to_str().unwrap()));
            }
            // The error stands for the body if it was cut off.
            match body.collect().await {
                Ok(body) => text.push_str(&String::from_utf8_lossy(&body.to_bytes())),
                Err(error) => text.push_str(&format!("{error}")),
            }
            Response::new(full(text))
        })
        .await
    }

    /// Starts a server that returns its name.
    pub(crate) async fn named(name: &'static str) -> Self {
        Self::start(move |_| async move { Response::new(full(name)) }).await
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).boxed_unsync()
}

/// Returns a body of the frames that the test sends.
pub(crate) fn frames(mut frames: mpsc::UnboundedReceiver<Frame<Bytes>>) -> Body {
    let frames = futures::stream::poll_fn(move |task| frames.poll_recv(task));
    StreamBody::new(futures::StreamExt::map(frames, Ok)).boxed_unsync()
}

/// Returns a data frame.
pub(crate) fn data(text: &str) -> Frame<Bytes> {
    Frame::data(Bytes::copy_from_slice(text.as_bytes()))
}
