//! Tunnels: connections that have changed their protocol, such as WebSockets.
//!
//! A tunnel carries bytes in both directions; each direction ends by itself. An idle tunnel has no
//! buffer; tokio's `copy_bidirectional` would keep 16 KiB for each direction.

use std::{
    cell::RefCell,
    future::poll_fn,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{body::Exchange, metrics::Metrics};

/// Bytes of one read.
const PIECE: usize = 16 * 1024;

thread_local! {
    /// Buffer shared by all tunnels of a thread, for bytes that the other stream accepts at once.
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; PIECE].into_boxed_slice());
}

/// Open tunnels.
#[derive(Clone, Debug)]
pub struct Tunnels {
    tasks: TaskTracker,
    /// Cancelled to close all tunnels.
    cut: CancellationToken,
    metrics: Arc<Metrics>,
}

impl Tunnels {
    /// Returns a set without tunnels. `tasks` tracks their tasks; `cut` closes them at the end.
    pub fn new(tasks: TaskTracker, cut: CancellationToken, metrics: Arc<Metrics>) -> Self {
        Self {
            tasks,
            cut,
            metrics,
        }
    }

    /// Carries bytes between client and sandbox once both have changed the protocol.
    ///
    /// A tunnel has no time limit; TCP keepalive detects lost peers.
    pub fn open(&self, client: OnUpgrade, sandbox: OnUpgrade, exchange: Exchange) {
        let (cut, metrics) = (self.cut.clone(), Arc::clone(&self.metrics));
        self.tasks.spawn(async move {
            // Moves the whole exchange into the task: dropping it counts the request.
            let mut exchange = exchange;
            metrics.tunnels.inc();
            let (mut up, mut down) = (Direction::default(), Direction::default());
            let carry = async {
                let (client, sandbox) = tokio::try_join!(client, sandbox)?;
                carry(
                    TokioIo::new(client),
                    TokioIo::new(sandbox),
                    &mut up,
                    &mut down,
                )
                .await?;
                anyhow::Ok(())
            };
            tokio::select! {
                carried = carry => {
                    if let Err(error) = carried {
                        tracing::debug!(%error, "tunnel failed");
                    }
                }
                () = cut.cancelled() => {}
            }
            exchange.progress().add(up.bytes);
            exchange.sent = down.bytes;
            metrics.tunnels.dec();
        });
    }
}

/// One direction of a tunnel.
#[derive(Debug, Default)]
struct Direction {
    /// Bytes read but not accepted at once by the other stream.
    kept: Vec<u8>,
    /// Number of bytes of `kept` that are written.
    written: usize,
    /// The source has ended.
    ended: bool,
    /// The destination is shut down.
    done: bool,
    bytes: u64,
}

/// Carries bytes until both directions have ended or one fails.
///
/// The end of one direction is passed on and leaves the other open.
async fn carry(
    mut client: impl AsyncRead + AsyncWrite + Unpin,
    mut sandbox: impl AsyncRead + AsyncWrite + Unpin,
    up: &mut Direction,
    down: &mut Direction,
) -> io::Result<()> {
    poll_fn(|task| {
        let upward = up.poll(task, Pin::new(&mut client), Pin::new(&mut sandbox))?;
        let downward = down.poll(task, Pin::new(&mut sandbox), Pin::new(&mut client))?;
        if upward.is_ready() && downward.is_ready() {
            return Poll::Ready(Ok(()));
        }
        Poll::Pending
    })
    .await
}

impl Direction {
    fn poll(
        &mut self,
        task: &mut Context<'_>,
        mut from: Pin<&mut impl AsyncRead>,
        mut to: Pin<&mut impl AsyncWrite>,
    ) -> Poll<io::Result<()>> {
        while !self.done {
            ready!(self.poll_write_kept(task, to.as_mut()))?;
            if self.ended {
                ready!(to.as_mut().poll_shutdown(task))?;
                self.done = true;
            } else if self
                .poll_pass_on(task, from.as_mut(), to.as_mut())?
                .is_pending()
            {
                ready!(to.as_mut().poll_flush(task))?;
                return Poll::Pending;
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_write_kept(
        &mut self,
        task: &mut Context<'_>,
        mut to: Pin<&mut impl AsyncWrite>,
    ) -> Poll<io::Result<()>> {
        while self.written < self.kept.len() {
            let count = ready!(to.as_mut().poll_write(task, &self.kept[self.written..]))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.written += count;
        }
        self.kept = Vec::new();
        self.written = 0;
        Poll::Ready(Ok(()))
    }

    /// Reads up to [`PIECE`] bytes, writes those accepted at once and keeps the rest.
    fn poll_pass_on(
        &mut self,
        task: &mut Context<'_>,
        from: Pin<&mut impl AsyncRead>,
        to: Pin<&mut impl AsyncWrite>,
    ) -> Poll<io::Result<()>> {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut piece = ReadBuf::new(scratch);
            ready!(from.poll_read(task, &mut piece))?;
            let piece = piece.filled();
            self.bytes += piece.len() as u64;
            self.ended = piece.is_empty();
            if self.ended {
                return Poll::Ready(Ok(()));
            }
            let taken = match to.poll_write(task, piece) {
                Poll::Ready(taken) => taken?,
                Poll::Pending => 0,
            };
            self.kept.extend_from_slice(&piece[taken..]);
            Poll::Ready(Ok(()))
        })
    }
}
