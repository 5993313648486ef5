//! Signals that end a benchmark before its time.

use anyhow::{Context as _, bail};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT (Ctrl-C) and SIGTERM, which no longer end the process by themselves.
///
/// A benchmark that is ended by a signal removes its namespace, its swap and its processes first.
#[derive(Debug)]
pub(crate) struct Stop {
    interrupt: Signal,
    terminate: Signal,
}

impl Stop {
    pub(crate) fn listen() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen to signals");
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    /// Returns the result of `body`; at a signal drops `body` and returns an error.
    pub(crate) async fn unless<T>(
        &mut self,
        body: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        tokio::select! {
            result = body => result,
            _ = self.interrupt.recv() => bail!("ended by SIGINT"),
            _ = self.terminate.recv() => bail!("ended by SIGTERM"),
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::{sys::signal::Signal, sys::signal::raise};

    use super::*;

    #[tokio::test]
    async fn a_signal_ends_the_body_and_not_the_process() {
        let mut stop = Stop::listen().expect("signals");
        assert_eq!(stop.unless(async { Ok(1) }).await.expect("a result"), 1);
        raise(Signal::SIGTERM).expect("raised");
        let endless = stop.unless(std::future::pending::<anyhow::Result<()>>());
        let error = endless.await.expect_err("ended").to_string();
        assert_eq!(error, "ended by SIGTERM");
    }
}
