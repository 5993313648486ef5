//! HTTP/2 connections to sandboxes for gRPC, without TLS and with prior knowledge.
//!
//! All calls to one port of a sandbox share a connection. The first call makes it; the router
//! closes it after a time without calls.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use http::{Request, Response};
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{net::TcpStream, sync::watch};

use crate::{
    body::RequestBody,
    gate::Destination,
    server::{MAX_HEAD, PING, PONG},
    upstream::{self, DialError, Dialer, Key},
    wait_slots::Bounds,
};

/// Time that a connection without calls stays open: at least this long, at most twice as long.
const IDLE: Duration = Duration::from_secs(45);
/// Bytes of one call that a sandbox may send before the client has read them; HTTP/2's default.
const STREAM_WINDOW: u32 = 64 * 1024;
/// Largest flow-control window of HTTP/2, in bytes.
const MAX_WINDOW: u32 = (1 << 31) - 1;

/// Error of a call without a response.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot connect for a gRPC call")]
    Dial(#[source] Arc<DialError>),
    #[error("the sandbox's port does not speak HTTP/2")]
    Handshake(#[source] Arc<hyper::Error>),
    #[error("the gRPC call was interrupted")]
    Call(#[source] Arc<hyper::Error>),
    #[error("the connection was closed before the call was sent")]
    Closed,
}

impl Error {
    /// Returns upstream's `reason` label.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Dial(error) => error.reason(),
            Self::Handshake(error) | Self::Call(error) => upstream::reason(&**error),
            Self::Closed => "eof",
        }
    }
}

/// Connections to sandboxes, by destination. Clones share them.
#[derive(Clone, Debug)]
pub struct Calls {
    dialer: Dialer,
    /// Bytes of all calls of a connection that a sandbox may send before clients have read them.
    window: u32,
    open: Arc<Mutex<HashMap<Destination, watch::Receiver<State>>>>,
}

/// State of a connection, which stays open while a call holds a receiver.
#[derive(Clone, Debug)]
enum State {
    Dialling,
    Open(http2::SendRequest<RequestBody>),
    Failed(Error),
}

/// Guard that keeps a connection open.
#[derive(Debug)]
pub struct InUse {
    _connection: watch::Receiver<State>,
}

impl Calls {
    /// Returns a pool without connections. `bounds` limits the calls of one sandbox.
    pub fn new(dialer: Dialer, bounds: Bounds) -> Self {
        Self {
            dialer,
            window: connection_window(bounds.most_of_one()),
            open: Arc::default(),
        }
    }

    /// Sends a call and returns the response headers.
    ///
    /// The connection stays open while the second value lives. Dropping the future resets the call.
    pub async fn request(
        &self,
        to: &Destination,
        mut request: Request<RequestBody>,
    ) -> Result<(Response<Incoming>, InUse), Error> {
        let mut last = Error::Closed;
        // A connection that the sandbox is closing returns the call unsent; the second attempt uses
        // a new connection.
        for _ in 0..2 {
            let mut connection = self.connection(to);
            let state = connection
                .wait_for(|state| !matches!(state, State::Dialling))
                .await
                .map_or(State::Failed(Error::Closed), |state| state.clone());
            let mut sender = match state {
                State::Open(sender) => sender,
                State::Failed(error) => return Err(error),
                State::Dialling => return Err(Error::Closed),
            };
            match sender.try_send_request(request).await {
                Ok(response) => {
                    let _connection = connection;
                    return Ok((response, InUse { _connection }));
                }
                Err(mut error) => {
                    let unsent = error.take_message();
                    last = Error::Call(Arc::new(error.into_error()));
                    let Some(unsent) = unsent else {
                        return Err(last);
                    };
                    self.forget(to, &connection);
                    request = unsent;
                }
            }
        }
        Err(last)
    }

    fn connection(&self, to: &Destination) -> watch::Receiver<State> {
        let mut open = self.open();
        if let Some(connection) = open.get(to) {
            return connection.clone();
        }
        let (state, connection) = watch::channel(State::Dialling);
        open.insert(to.clone(), connection.clone());
        drop(open);
        tokio::spawn(self.clone().keep(to.clone(), state));
        connection
    }

    /// Makes a connection and keeps it until it ends or no call has needed it for [`IDLE`].
    ///
    /// All calls that wait for the connection get its error; a later call tries again.
    async fn keep(self, to: Destination, state: watch::Sender<State>) {
        let (sender, connection) = match self.connect(&to).await {
            Ok(made) => made,
            Err(error) => {
                self.forget(&to, &state.subscribe());
                state.send_replace(State::Failed(error));
                return;
            }
        };
        state.send_replace(State::Open(sender));
        let mut connection = std::pin::pin!(connection);
        loop {
            match tokio::time::timeout(IDLE, connection.as_mut()).await {
                Ok(Ok(())) => break,
                Ok(Err(error)) => {
                    tracing::debug!(%error, "HTTP/2 connection to a sandbox ended");
                    break;
                }
                Err(_) if self.forget_unused(&to, &state) => return,
                Err(_) => {}
            }
        }
        self.forget(&to, &state.subscribe());
    }

    async fn connect(&self, to: &Destination) -> Result<Connection, Error> {
        let stream = self.dialer.dial(Key::of(to)).await;
        let stream = stream.map_err(|error| Error::Dial(Arc::new(error)))?;
        http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .keep_alive_interval(PING)
            .keep_alive_timeout(PONG)
            .max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX))
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(self.window)
            .handshake(stream)
            .await
            .map_err(|error| Error::Handshake(Arc::new(error)))
    }

    fn forget(&self, to: &Destination, connection: &watch::Receiver<State>) {
        let mut open = self.open();
        // A newer connection may be in the map.
        if open
            .get(to)
            .is_some_and(|other| other.same_channel(connection))
        {
            open.remove(to);
        }
    }

    /// Removes a connection without calls; the lock prevents that a call takes it meanwhile.
    fn forget_unused(&self, to: &Destination, state: &watch::Sender<State>) -> bool {
        let mut open = self.open();
        let known = open.get(to);
        let ours = known.is_some_and(|known| known.same_channel(&state.subscribe()));
        let unused = state.receiver_count() == usize::from(ours);
        if ours && unused {
            open.remove(to);
        }
        unused
    }

    fn open(&self) -> MutexGuard<'_, HashMap<Destination, watch::Receiver<State>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Connection = (
    http2::SendRequest<RequestBody>,
    http2::Connection<TokioIo<TcpStream>, RequestBody, TokioExecutor>,
);

/// Returns the window of a connection, in bytes: the sum of the stream windows of all calls that a
/// sandbox may have.
///
/// Clients that read nothing then do not block the other calls. The window is not larger than that,
/// because h2 derives from it how many tiny frames it buffers. From 32,768 calls on, HTTP/2 has no
/// window that is large enough.
fn connection_window(calls: usize) -> u32 {
    let calls = u32::try_from(calls).unwrap_or(u32::MAX).max(1);
    calls.saturating_mul(STREAM_WINDOW).min(MAX_WINDOW)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::none_is_let_through(0, STREAM_WINDOW)]
    #[case::by_default(1024, 64 << 20)]
    #[case::more(4096, 256 << 20)]
    #[case::the_most_that_fit(32_767, MAX_WINDOW - 65_535)]
    #[case::more_than_fit(32_768, MAX_WINDOW)]
    #[case::as_many_as_there_can_be(usize::MAX, MAX_WINDOW)]
    fn all_calls_that_a_sandbox_may_have_fit_in_the_window_of_a_connection(
        #[case] calls: usize,
        #[case] window: u32,
    ) {
        assert_eq!(connection_window(calls), window);
    }
}
