//! Time of this process, for waits and limits. A model of the repository brings its own.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;

/// Clock that never goes back.
pub trait Timer: Debug + Send + Sync {
    /// Returns the time since a fixed moment.
    fn now(&self) -> Duration;

    fn sleep(&self, time: Duration) -> BoxFuture<'static, ()>;
}

/// Clock of the system.
#[derive(Debug)]
pub(crate) struct System(Instant);

impl System {
    pub(crate) fn new() -> Self {
        Self(Instant::now())
    }
}

impl Timer for System {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        tokio::time::sleep(time).boxed()
    }
}
