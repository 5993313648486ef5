//! Reads the beginning of a request body while the request is held for its sandbox.
//!
//! hyper notices that an HTTP/1 client has disconnected only when nothing of its request is left
//! to read. Without this read, the request of a client that has gone would keep its slot and
//! reach the sandbox in the end.

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

/// Bytes after which reading stops: every held request may keep that many in memory.
///
/// A command fits. The router notices later that the client of a larger body has disconnected.
const ENOUGH: usize = 8 * 1024;

/// Part of a request body that has been read.
#[derive(Debug, Default)]
pub struct BodyPrefetch {
    data: BytesMut,
    trailers: Option<HeaderMap>,
    /// The body has no more frames.
    ended: bool,
}

impl BodyPrefetch {
    /// Reads from `body` until `waiting` completes; an error of the body ends the wait.
    pub async fn read_while<T>(
        &mut self,
        body: &mut Incoming,
        waiting: impl Future<Output = T>,
    ) -> Result<T, hyper::Error> {
        tokio::select! {
            // A request that need not wait reads nothing.
            biased;
            waited = waiting => Ok(waited),
            error = self.read(body) => Err(error),
        }
    }

    /// Reads up to [`ENOUGH`] bytes; returns only on an error of the body.
    async fn read(&mut self, body: &mut Incoming) -> hyper::Error {
        while !self.ended && self.data.len() < ENOUGH {
            match body.frame().await.transpose() {
                Ok(Some(frame)) => self.keep(frame),
                Ok(None) => self.ended = true,
                Err(error) => return error,
            }
        }
        std::future::pending().await
    }

    /// Appends a frame to one buffer: a client may send each byte in a frame of its own.
    fn keep(&mut self, frame: Frame<Bytes>) {
        match frame.into_data() {
            Ok(data) => self.data.extend_from_slice(&data),
            Err(frame) => self.trailers = frame.into_trailers().ok(),
        }
    }

    /// Returns the next frame of the part that was read.
    pub fn take_frame(&mut self) -> Option<Frame<Bytes>> {
        if self.data.is_empty() {
            return self.trailers.take().map(Frame::trailers);
        }
        Some(Frame::data(self.data.split().freeze()))
    }

    /// Reports whether the body ends with the part that was read.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Reports whether neither this part nor `rest` has anything left.
    pub fn is_end_stream(&self, rest: &Incoming) -> bool {
        let nothing = self.data.is_empty() && self.trailers.is_none();
        nothing && (self.ended || rest.is_end_stream())
    }

    /// Returns the bounds of the bytes left in this part and in `rest`.
    pub fn size_hint(&self, rest: &Incoming) -> SizeHint {
        let (here, rest) = (self.data.len() as u64, rest.size_hint());
        let mut all = SizeHint::new();
        if let Some(upper) = rest.upper() {
            all.set_upper(upper.saturating_add(here));
        }
        all.set_lower(rest.lower().saturating_add(here));
        all
    }
}
