//! A client's connection while no request is under way. hyper has one timer for an idle connection and for the head of the next request; a slow head must end in seconds
//! and an idle connection may last minutes, so that the two are told apart here: by the first byte after the last answer.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
};

/// How long a connection has done nothing before it may have to go for another: what its client says first, or heard last, may be on its way.
pub const QUIET: Duration = Duration::from_millis(100);

/// How long a connection may do nothing.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// From the first byte of a request's head to its last; also from the connection to the first request.
    pub head: Duration,
    /// Between requests.
    pub idle: Duration,
    /// For a request and its answer. Whoever carries them keeps this limit too, but hears nothing while the client does not take what is there.
    pub busy: Duration,
}

/// What a connection does. Clones are the same connection.
#[derive(Clone, Debug)]
pub struct Pulse(Arc<State>);

#[derive(Debug)]
struct State {
    patience: Patience,
    begin: Instant,
    in_flight: AtomicUsize,
    /// Of those, the ones that [`Patience::busy`] does not bound.
    own: AtomicUsize,
    /// Streams of HTTP/2 share their connection, and it carries bytes that belong to no request.
    http2: AtomicBool,
    /// All in milliseconds since `begin`.
    idle_since: AtomicU64,
    head_since: AtomicU64,
    /// When the last request that is under way began.
    busy_since: AtomicU64,
    /// The client has not taken all that there is for it.
    unwritten: AtomicBool,
    /// Asked to go for another, and has not heard it yet.
    asked: AtomicBool,
    asking: Notify,
}

/// No head has begun.
const NONE: u64 = u64::MAX;

impl Pulse {
    /// A connection that has just been made.
    pub fn new(patience: Patience) -> Self {
        Self(Arc::new(State {
            patience,
            begin: Instant::now(),
            in_flight: AtomicUsize::new(0),
            own: AtomicUsize::new(0),
            http2: AtomicBool::new(false),
            idle_since: AtomicU64::new(0),
            head_since: AtomicU64::new(0),
            busy_since: AtomicU64::new(0),
            unwritten: AtomicBool::new(false),
            asked: AtomicBool::new(false),
            asking: Notify::new(),
        }))
    }

    /// The first request may begin only now: what came before it belongs to TLS.
    pub fn begin_head(&self) {
        self.0.head_since.store(self.0.now(), Ordering::Relaxed);
    }

    /// A request has arrived; it is under way until the result is dropped.
    pub fn request(&self, http2: bool, bound: Bound) -> InFlight {
        self.0.http2.store(http2, Ordering::Relaxed);
        self.0.head_since.store(NONE, Ordering::Relaxed);
        self.0.busy_since.store(self.0.now(), Ordering::Relaxed);
        self.0.in_flight.fetch_add(1, Ordering::Relaxed);
        if bound == Bound::Own {
            self.0.own.fetch_add(1, Ordering::Relaxed);
        }
        InFlight {
            pulse: self.clone(),
            bound,
        }
    }

    /// When to look at it again; `None`: it is to be closed now. Whoever waits hears of no change meanwhile, and so never waits longer than the shorter patience.
    pub fn deadline(&self) -> Option<Instant> {
        let state = &*self.0;
        let now = Instant::now();
        let Patience { head, idle, busy } = state.patience;
        let look_again = now + head.min(idle).min(busy);
        if state.own.load(Ordering::Relaxed) > 0 {
            return Some(look_again);
        }
        let head_since = state.head_since.load(Ordering::Relaxed);
        let (since, patience) = if state.in_flight.load(Ordering::Relaxed) > 0 {
            (state.busy_since.load(Ordering::Relaxed), busy)
        } else if head_since == NONE || state.http2.load(Ordering::Relaxed) {
            (state.idle_since.load(Ordering::Relaxed), idle)
        } else {
            (head_since, head)
        };
        let deadline = state.begin + Duration::from_millis(since) + patience;
        (now < deadline).then(|| deadline.min(look_again))
    }

    /// Since when nothing has been under way; `None`: something is, or was until just now, or it is going already.
    pub fn idle_since(&self, now: Instant) -> Option<Instant> {
        let state = &*self.0;
        // Who sees the end of a request sees when it was, too.
        let busy = state.in_flight.load(Ordering::Acquire) > 0;
        if busy || state.asked.load(Ordering::Relaxed) {
            return None;
        }
        let since = state.begin + Duration::from_millis(state.idle_since.load(Ordering::Relaxed));
        let idle = now.saturating_duration_since(since);
        // By not taking an answer nobody keeps a place for longer than by a slow head.
        let writing = state.unwritten.load(Ordering::Relaxed) && idle < state.patience.head;
        (idle >= QUIET && !writing).then_some(since)
    }

    /// Asks it to go for another.
    pub fn ask_to_go(&self) {
        self.0.asked.store(true, Ordering::Relaxed);
        self.0.asking.notify_one();
    }

    /// Waits until it has to go for another. A request that came before the asking was heard goes first.
    pub async fn has_to_go(&self) {
        loop {
            self.0.asking.notified().await;
            self.0.asked.store(false, Ordering::Relaxed);
            if self.idle_since(Instant::now()).is_some() {
                return;
            }
        }
    }

    fn written(&self, all: bool) {
        // Most writes change nothing.
        if self.0.unwritten.load(Ordering::Relaxed) == all {
            self.0.unwritten.store(!all, Ordering::Relaxed);
        }
    }

    fn byte_read(&self) {
        let state = &*self.0;
        if state.in_flight.load(Ordering::Relaxed) == 0 {
            let now = state.now();
            let _ =
                state
                    .head_since
                    .compare_exchange(NONE, now, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

impl State {
    fn now(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(NONE - 1)
    }
}

/// What bounds a request in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// [`Patience::busy`].
    Busy,
    /// Its client, or nothing: a gRPC stream may last. HTTP/2's pings say whether the client lives.
    Own,
}

/// A request under way.
#[derive(Debug)]
pub struct InFlight {
    pulse: Pulse,
    bound: Bound,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let state = &*self.pulse.0;
        if self.bound == Bound::Own {
            state.own.fetch_sub(1, Ordering::Relaxed);
        }
        state.idle_since.store(state.now(), Ordering::Relaxed);
        state.in_flight.fetch_sub(1, Ordering::Release);
    }
}

/// A connection whose reads are felt, and writes that wait for the client.
#[derive(Debug)]
pub struct Felt<S> {
    inner: S,
    pulse: Pulse,
}

impl<S> Felt<S> {
    /// Tells `pulse`.
    pub fn new(inner: S, pulse: Pulse) -> Self {
        Self { inner, pulse }
    }

    fn felt_write(&self, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if result.is_pending() {
            self.pulse.written(false);
        }
        result
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Felt<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = std::task::ready!(Pin::new(&mut self.inner).poll_read(task, buffer));
        if buffer.filled().len() > before {
            self.pulse.byte_read();
        }
        Poll::Ready(result)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Felt<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(task, bytes);
        self.felt_write(result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.inner).poll_flush(task);
        // Whoever writes flushes when there is no more.
        self.pulse.written(result.is_ready());
        result
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(task)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write_vectored(task, bytes);
        self.felt_write(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn pulse(head: Duration, idle: Duration) -> Pulse {
        Pulse::new(Patience {
            head,
            idle,
            busy: HOUR,
        })
    }

    #[test]
    fn a_connection_that_never_asks_is_closed_like_a_slow_head() {
        assert_eq!(pulse(Duration::ZERO, HOUR).deadline(), None);
        assert!(pulse(HOUR, Duration::ZERO).deadline().is_some());
    }

    #[test]
    fn the_time_of_a_handshake_is_not_taken_from_the_first_head() {
        let head = Duration::from_millis(200);
        let pulse = pulse(head, HOUR);
        std::thread::sleep(head);
        assert_eq!(pulse.deadline(), None);
        pulse.begin_head();
        assert!(pulse.deadline().is_some());
    }

    #[test]
    fn a_request_that_takes_too_long_ends_the_connection() {
        let pulse = Pulse::new(Patience {
            head: HOUR,
            idle: HOUR,
            busy: Duration::ZERO,
        });
        let request = pulse.request(false, Bound::Busy);
        assert_eq!(pulse.deadline(), None);
        drop(request);
        assert!(pulse.deadline().is_some());
    }

    #[test]
    fn a_call_that_bounds_itself_keeps_the_connection() {
        let pulse = Pulse::new(Patience {
            head: Duration::ZERO,
            idle: Duration::ZERO,
            busy: Duration::ZERO,
        });
        let call = pulse.request(true, Bound::Own);
        let request = pulse.request(true, Bound::Busy);
        assert!(pulse.deadline().is_some());
        drop(call);
        assert_eq!(pulse.deadline(), None);
        drop(request);
    }

    #[test]
    fn while_a_request_is_under_way_nothing_counts_as_idle() {
        let pulse = pulse(Duration::ZERO, Duration::ZERO);
        let request = pulse.request(false, Bound::Busy);
        assert!(pulse.deadline().is_some());
        drop(request);
        assert_eq!(pulse.deadline(), None);
    }

    #[test]
    fn between_requests_the_first_byte_starts_the_shorter_patience() {
        let pulse = pulse(Duration::ZERO, HOUR);
        drop(pulse.request(false, Bound::Busy));
        assert!(pulse.deadline().is_some(), "idle");
        pulse.byte_read();
        assert_eq!(pulse.deadline(), None, "a head has begun");
    }

    #[test]
    fn bytes_of_http2_begin_no_head() {
        let pulse = pulse(Duration::ZERO, HOUR);
        drop(pulse.request(true, Bound::Busy));
        pulse.byte_read();
        assert!(pulse.deadline().is_some());
    }

    #[test]
    fn bytes_of_http2_keep_nothing_alive() {
        let pulse = pulse(HOUR, Duration::ZERO);
        drop(pulse.request(true, Bound::Busy));
        pulse.byte_read();
        assert_eq!(pulse.deadline(), None);
    }

    #[test]
    fn nobody_waits_past_the_shorter_patience_without_looking() {
        let pulse = pulse(Duration::from_secs(1), HOUR);
        drop(pulse.request(false, Bound::Busy));
        assert!(pulse.deadline().unwrap() <= Instant::now() + Duration::from_secs(1));
        let _request = pulse.request(false, Bound::Busy);
        assert!(pulse.deadline().unwrap() <= Instant::now() + Duration::from_secs(1));
    }

    /// Since when it has been idle, seen in a second.
    fn idle(pulse: &Pulse) -> Option<Instant> {
        pulse.idle_since(Instant::now() + Duration::from_secs(1))
    }

    #[test]
    fn while_a_request_is_under_way_and_just_after_nobody_may_end_it() {
        let before = Instant::now();
        let pulse = pulse(HOUR, HOUR);
        assert!(idle(&pulse).is_some(), "it has never asked");
        assert_eq!(pulse.idle_since(before), None, "just made");
        let request = pulse.request(true, Bound::Own);
        let other = pulse.request(true, Bound::Busy);
        drop(request);
        assert_eq!(idle(&pulse), None);
        let before = Instant::now();
        drop(other);
        assert!(idle(&pulse).is_some());
        assert_eq!(pulse.idle_since(before), None, "just answered");
    }

    #[tokio::test]
    async fn an_answer_that_the_client_has_not_taken_is_under_way_for_as_long_as_a_head_may_be() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let patient = pulse(HOUR, HOUR);
        let (ours, mut theirs) = tokio::io::duplex(1);
        let mut ours = Felt::new(ours, patient.clone());
        let writing = tokio::time::timeout(Duration::from_millis(1), ours.write_all(b"answer"));
        writing.await.unwrap_err();
        assert_eq!(idle(&patient), None);
        let late = Instant::now() + 2 * HOUR;
        assert!(patient.idle_since(late).is_some(), "longer than a head");
        theirs.read_exact(&mut [0; 1]).await.unwrap();
        ours.flush().await.unwrap();
        assert!(idle(&patient).is_some());
    }

    #[tokio::test]
    async fn who_is_asked_to_go_goes_unless_a_request_has_come_meanwhile() {
        let pulse = pulse(HOUR, HOUR);
        let wait = || tokio::time::timeout(2 * QUIET, pulse.has_to_go());
        let request = pulse.request(false, Bound::Busy);
        pulse.ask_to_go();
        wait().await.unwrap_err();
        drop(request);
        wait().await.unwrap_err();
        pulse.ask_to_go();
        assert_eq!(idle(&pulse), None, "it is going");
        wait().await.unwrap();
    }

    #[test]
    fn bytes_of_a_body_begin_no_head() {
        let pulse = pulse(Duration::ZERO, HOUR);
        let request = pulse.request(false, Bound::Busy);
        pulse.byte_read();
        drop(request);
        assert!(pulse.deadline().is_some());
    }
}
