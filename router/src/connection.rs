//! Timeouts of a client's connection between requests.
//!
//! hyper has one timer for an idle connection and for the head of the next request. A slow head
//! must end in seconds; an idle connection may last minutes. This module tells them apart by the
//! first byte after the last response.

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

/// Idle time before which a connection is not evicted: a request or a response may be in transit.
pub const QUIET: Duration = Duration::from_millis(100);

/// Timeouts of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// From the first to the last byte of a request's head; also from the connection to the first
    /// request.
    pub head: Duration,
    /// Between two requests.
    pub idle: Duration,
    /// For a request and its response.
    ///
    /// The proxy has this limit too, but is not polled while the client does not read.
    pub busy: Duration,
}

/// Activity of a connection. Clones share it.
#[derive(Clone, Debug)]
pub struct Activity(Arc<State>);

#[derive(Debug)]
struct State {
    timeouts: Timeouts,
    begin: Instant,
    in_flight: AtomicUsize,
    /// Requests in flight that [`Timeouts::busy`] does not limit.
    unlimited: AtomicUsize,
    /// The connection is HTTP/2: streams share it, and some of its bytes belong to no request.
    http2: AtomicBool,
    /// End of the last request; all times are in milliseconds since `begin`.
    idle_since: AtomicU64,
    head_since: AtomicU64,
    /// Begin of the newest request in flight.
    busy_since: AtomicU64,
    /// Bytes wait until the client reads.
    unwritten: AtomicBool,
    /// An eviction was requested, and its task has not run yet.
    evicting: AtomicBool,
    eviction: Notify,
}

/// Value of `head_since` while no head has begun.
const NONE: u64 = u64::MAX;

impl Activity {
    /// Returns the activity of a connection that has just been accepted.
    pub fn new(timeouts: Timeouts) -> Self {
        Self(Arc::new(State {
            timeouts,
            begin: Instant::now(),
            in_flight: AtomicUsize::new(0),
            unlimited: AtomicUsize::new(0),
            http2: AtomicBool::new(false),
            idle_since: AtomicU64::new(0),
            head_since: AtomicU64::new(0),
            busy_since: AtomicU64::new(0),
            unwritten: AtomicBool::new(false),
            evicting: AtomicBool::new(false),
            eviction: Notify::new(),
        }))
    }

    /// Starts the timeout of the first head, after the TLS handshake.
    pub fn begin_head(&self) {
        self.0.head_since.store(self.0.now(), Ordering::Relaxed);
    }

    /// Counts a request as in flight until the result is dropped.
    pub fn request(&self, http2: bool, bound: Bound) -> InFlight {
        self.0.http2.store(http2, Ordering::Relaxed);
        self.0.head_since.store(NONE, Ordering::Relaxed);
        self.0.busy_since.store(self.0.now(), Ordering::Relaxed);
        self.0.in_flight.fetch_add(1, Ordering::Relaxed);
        if bound == Bound::Client {
            self.0.unlimited.fetch_add(1, Ordering::Relaxed);
        }
        InFlight {
            activity: self.clone(),
            bound,
        }
    }

    /// Returns the time of the next check; `None`: close the connection now.
    ///
    /// Nothing wakes the caller when the state changes. The next check is therefore never later
    /// than the shortest timeout.
    pub fn deadline(&self) -> Option<Instant> {
        let state = &*self.0;
        let now = Instant::now();
        let Timeouts { head, idle, busy } = state.timeouts;
        let look_again = now + head.min(idle).min(busy);
        if state.unlimited.load(Ordering::Relaxed) > 0 {
            return Some(look_again);
        }
        let head_since = state.head_since.load(Ordering::Relaxed);
        let (since, timeout) = if state.in_flight.load(Ordering::Relaxed) > 0 {
            (state.busy_since.load(Ordering::Relaxed), busy)
        } else if head_since == NONE || state.http2.load(Ordering::Relaxed) {
            (state.idle_since.load(Ordering::Relaxed), idle)
        } else {
            (head_since, head)
        };
        let deadline = state.begin + Duration::from_millis(since) + timeout;
        (now < deadline).then(|| deadline.min(look_again))
    }

    /// Returns the time since which no request is in flight.
    ///
    /// Returns `None` while a request is in flight, for [`QUIET`] after it, and once the connection
    /// is asked to close.
    pub fn idle_since(&self, now: Instant) -> Option<Instant> {
        let state = &*self.0;
        // Acquire pairs with the release in `InFlight::drop`, which stores `idle_since` first.
        let busy = state.in_flight.load(Ordering::Acquire) > 0;
        if busy || state.evicting.load(Ordering::Relaxed) {
            return None;
        }
        let since = state.begin + Duration::from_millis(state.idle_since.load(Ordering::Relaxed));
        let idle = now.saturating_duration_since(since);
        // A client that does not read its response keeps its connection no longer than a slow head
        // does.
        let writing = state.unwritten.load(Ordering::Relaxed) && idle < state.timeouts.head;
        (idle >= QUIET && !writing).then_some(since)
    }

    /// Requests the eviction of the connection.
    pub fn request_eviction(&self) {
        self.0.evicting.store(true, Ordering::Relaxed);
        self.0.eviction.notify_one();
    }

    /// Waits until the connection must close. A request that arrived in time cancels the eviction.
    pub async fn evicted(&self) {
        loop {
            self.0.eviction.notified().await;
            self.0.evicting.store(false, Ordering::Relaxed);
            if self.idle_since(Instant::now()).is_some() {
                return;
            }
        }
    }

    fn written(&self, all: bool) {
        // Most writes leave the flag as it is; a load is cheaper than a store.
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

/// Time limit of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Limited by [`Timeouts::busy`].
    Router,
    /// Limited by the client or not at all: a gRPC stream may last. HTTP/2 pings detect a lost
    /// client.
    Client,
}

/// Request in flight.
#[derive(Debug)]
pub struct InFlight {
    activity: Activity,
    bound: Bound,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let state = &*self.activity.0;
        if self.bound == Bound::Client {
            state.unlimited.fetch_sub(1, Ordering::Relaxed);
        }
        state.idle_since.store(state.now(), Ordering::Relaxed);
        state.in_flight.fetch_sub(1, Ordering::Release);
    }
}

/// Stream that records reads, and writes that wait for the client.
#[derive(Debug)]
pub struct Monitored<S> {
    inner: S,
    activity: Activity,
}

impl<S> Monitored<S> {
    /// Records in `activity`.
    pub fn new(inner: S, activity: Activity) -> Self {
        Self { inner, activity }
    }

    fn record_write(&self, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if result.is_pending() {
            self.activity.written(false);
        }
        result
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Monitored<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = std::task::ready!(Pin::new(&mut self.inner).poll_read(task, buffer));
        if buffer.filled().len() > before {
            self.activity.byte_read();
        }
        Poll::Ready(result)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Monitored<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(task, bytes);
        self.record_write(result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.inner).poll_flush(task);
        // hyper flushes after its last write.
        self.activity.written(result.is_ready());
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
        self.record_write(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn activity(head: Duration, idle: Duration) -> Activity {
        Activity::new(Timeouts {
            head,
            idle,
            busy: HOUR,
        })
    }

    #[test]
    fn a_connection_without_a_request_is_closed_like_a_slow_head() {
        assert_eq!(activity(Duration::ZERO, HOUR).deadline(), None);
        assert!(activity(HOUR, Duration::ZERO).deadline().is_some());
    }

    #[test]
    fn the_time_of_a_handshake_is_not_taken_from_the_first_head() {
        let head = Duration::from_millis(200);
        let activity = activity(head, HOUR);
        std::thread::sleep(head);
        assert_eq!(activity.deadline(), None);
        activity.begin_head();
        assert!(activity.deadline().is_some());
    }

    #[test]
    fn a_request_that_takes_too_long_closes_the_connection() {
        let activity = Activity::new(Timeouts {
            head: HOUR,
            idle: HOUR,
            busy: Duration::ZERO,
        });
        let request = activity.request(false, Bound::Router);
        assert_eq!(activity.deadline(), None);
        drop(request);
        assert!(activity.deadline().is_some());
    }

    #[test]
    fn a_call_with_its_own_limit_keeps_the_connection() {
        let activity = Activity::new(Timeouts {
            head: Duration::ZERO,
            idle: Duration::ZERO,
            busy: Duration::ZERO,
        });
        let call = activity.request(true, Bound::Client);
        let request = activity.request(true, Bound::Router);
        assert!(activity.deadline().is_some());
        drop(call);
        assert_eq!(activity.deadline(), None);
        drop(request);
    }

    #[test]
    fn a_connection_with_a_request_in_flight_is_not_idle() {
        let activity = activity(Duration::ZERO, Duration::ZERO);
        let request = activity.request(false, Bound::Router);
        assert!(activity.deadline().is_some());
        drop(request);
        assert_eq!(activity.deadline(), None);
    }

    #[test]
    fn the_first_byte_between_requests_starts_the_timeout_of_a_head() {
        let activity = activity(Duration::ZERO, HOUR);
        drop(activity.request(false, Bound::Router));
        assert!(activity.deadline().is_some(), "idle");
        activity.byte_read();
        assert_eq!(activity.deadline(), None, "a head has begun");
    }

    #[test]
    fn bytes_of_http2_begin_no_head() {
        let activity = activity(Duration::ZERO, HOUR);
        drop(activity.request(true, Bound::Router));
        activity.byte_read();
        assert!(activity.deadline().is_some());
    }

    #[test]
    fn bytes_of_http2_keep_nothing_alive() {
        let activity = activity(HOUR, Duration::ZERO);
        drop(activity.request(true, Bound::Router));
        activity.byte_read();
        assert_eq!(activity.deadline(), None);
    }

    #[test]
    fn the_next_check_is_never_later_than_the_shortest_timeout() {
        let activity = activity(Duration::from_secs(1), HOUR);
        drop(activity.request(false, Bound::Router));
        assert!(activity.deadline().unwrap() <= Instant::now() + Duration::from_secs(1));
        let _request = activity.request(false, Bound::Router);
        assert!(activity.deadline().unwrap() <= Instant::now() + Duration::from_secs(1));
    }

    /// Returns `idle_since` as of one second from now.
    fn idle(activity: &Activity) -> Option<Instant> {
        activity.idle_since(Instant::now() + Duration::from_secs(1))
    }

    #[test]
    fn a_connection_is_not_evicted_during_a_request_nor_just_after_it() {
        let before = Instant::now();
        let activity = activity(HOUR, HOUR);
        assert!(idle(&activity).is_some(), "no request yet");
        assert_eq!(activity.idle_since(before), None, "just accepted");
        let request = activity.request(true, Bound::Client);
        let other = activity.request(true, Bound::Router);
        drop(request);
        assert_eq!(idle(&activity), None);
        let before = Instant::now();
        drop(other);
        assert!(idle(&activity).is_some());
        assert_eq!(activity.idle_since(before), None, "just answered");
    }

    #[tokio::test]
    async fn a_response_that_the_client_does_not_read_prevents_eviction_for_the_timeout_of_a_head()
    {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};

        let slow = activity(HOUR, HOUR);
        let (ours, mut theirs) = tokio::io::duplex(1);
        let mut ours = Monitored::new(ours, slow.clone());
        let writing = tokio::time::timeout(Duration::from_millis(1), ours.write_all(b"answer"));
        writing.await.unwrap_err();
        assert_eq!(idle(&slow), None);
        let late = Instant::now() + 2 * HOUR;
        assert!(slow.idle_since(late).is_some(), "longer than a head");
        theirs.read_exact(&mut [0; 1]).await.unwrap();
        ours.flush().await.unwrap();
        assert!(idle(&slow).is_some());
    }

    #[tokio::test]
    async fn an_eviction_is_cancelled_by_a_request() {
        let activity = activity(HOUR, HOUR);
        let wait = || tokio::time::timeout(2 * QUIET, activity.evicted());
        let request = activity.request(false, Bound::Router);
        activity.request_eviction();
        wait().await.unwrap_err();
        drop(request);
        wait().await.unwrap_err();
        activity.request_eviction();
        assert_eq!(idle(&activity), None, "eviction requested");
        wait().await.unwrap();
    }

    #[test]
    fn bytes_of_a_body_begin_no_head() {
        let activity = activity(Duration::ZERO, HOUR);
        let request = activity.request(false, Bound::Router);
        activity.byte_read();
        drop(request);
        assert!(activity.deadline().is_some());
    }
}
