//! The beginning of a body, read while its sandbox is waited for. hyper hears that a client of HTTP/1 has gone only when nothing of its request is left to read: else the request
//! would keep its place, and be carried out in the end, for nobody.

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

/// From so many bytes on no more is read: every request that waits may hold them. A command fits; that the client of a larger body has gone is heard later.
const ENOUGH: usize = 8 * 1024;

/// What was read.
#[derive(Debug, Default)]
pub struct Ahead {
    data: BytesMut,
    trailers: Option<HeaderMap>,
    /// It was all.
    ended: bool,
}

impl Ahead {
    /// Reads from `body` until what is waited for is there, or the body breaks off.
    pub async fn while_waiting<T>(
        &mut self,
        body: &mut Incoming,
        waiting: impl Future<Output = T>,
    ) -> Result<T, hyper::Error> {
        tokio::select! {
            // Who does not have to wait reads nothing.
            biased;
            waited = waiting => Ok(waited),
            error = self.read(body) => Err(error),
        }
    }

    /// Ends by an error only.
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

    /// Put together: a client may send each byte by itself.
    fn keep(&mut self, frame: Frame<Bytes>) {
        match frame.into_data() {
            Ok(data) => self.data.extend_from_slice(&data),
            Err(frame) => self.trailers = frame.into_trailers().ok(),
        }
    }

    /// The next frame of what was read.
    pub fn take_frame(&mut self) -> Option<Frame<Bytes>> {
        if self.data.is_empty() {
            return self.trailers.take().map(Frame::trailers);
        }
        Some(Frame::data(self.data.split().freeze()))
    }

    /// Whether nothing comes after what was read.
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Whether nothing is left, here and of `rest`.
    pub fn is_end_stream(&self, rest: &Incoming) -> bool {
        let nothing = self.data.is_empty() && self.trailers.is_none();
        nothing && (self.ended || rest.is_end_stream())
    }

    /// How much is left, here and of `rest`.
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
