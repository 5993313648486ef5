//! Connections that have changed their protocol (WebSocket and its like): bytes in both directions, each ended by itself. A tunnel in which nothing moves has no buffer,
//! which tokio's `copy_bidirectional` cannot give (16 KiB for each).

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

/// What is read at once, in bytes.
const PIECE: usize = 16 * 1024;

thread_local! {
    /// Where bytes are between one stream and the other, if the other takes them at once.
    static SCRATCH: RefCell<Box<[u8]>> = RefCell::new(vec![0; PIECE].into_boxed_slice());
}

/// The tunnels that are open.
#[derive(Clone, Debug)]
pub struct Tunnels {
    tasks: TaskTracker,
    /// Cuts all of them.
    cut: CancellationToken,
    metrics: Arc<Metrics>,
}

impl Tunnels {
    /// None yet. `tasks` waits for them at the end; `cut` ends that wait.
    pub fn new(tasks: TaskTracker, cut: CancellationToken, metrics: Arc<Metrics>) -> Self {
        Self {
            tasks,
            cut,
            metrics,
        }
    }

    /// Carries bytes between the two once both have changed the protocol. There is no limit in time: TCP's keepalive says whether the ends live.
    pub fn open(&self, client: OnUpgrade, sandbox: OnUpgrade, exchange: Exchange) {
        let (cut, metrics) = (self.cut.clone(), Arc::clone(&self.metrics));
        self.tasks.spawn(async move {
            // The whole of it, which is counted when the tunnel ends.
            let mut exchange = exchange;
            metrics.tunnels.inc();
            let (mut up, mut down) = (Way::default(), Way::default());
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
                        tracing::debug!(%error, "tunnel broke");
                    }
                }
                () = cut.cancelled() => {}
            }
            exchange.seen().add(up.bytes);
            exchange.sent = down.bytes;
            metrics.tunnels.dec();
        });
    }
}

/// One direction.
#[derive(Debug, Default)]
struct Way {
    /// Read and not yet written.
    kept: Vec<u8>,
    /// Of `kept`, what is written.
    written: usize,
    /// Nothing more comes.
    ended: bool,
    /// The other end knows.
    done: bool,
    bytes: u64,
}

/// Carries bytes until both directions have ended, or one breaks. The end of one is passed on and leaves the other open.
async fn carry(
    mut client: impl AsyncRead + AsyncWrite + Unpin,
    mut sandbox: impl AsyncRead + AsyncWrite + Unpin,
    up: &mut Way,
    down: &mut Way,
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

impl Way {
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

    /// Reads a piece and writes what is taken at once; the rest is kept.
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
