//! Connections that have changed their protocol (WebSocket and its like): bytes in both directions, each ended by itself.

use std::sync::Arc;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{body::Exchange, metrics::Metrics};

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
            let carry = async {
                let (client, sandbox) = tokio::try_join!(client, sandbox)?;
                // The end of one direction is passed on and leaves the other open.
                let (mut client, mut sandbox) = (TokioIo::new(client), TokioIo::new(sandbox));
                let carried = tokio::io::copy_bidirectional(&mut client, &mut sandbox).await;
                anyhow::Ok(carried?.1)
            };
            tokio::select! {
                carried = carry => match carried {
                    Ok(bytes) => exchange.sent = bytes,
                    Err(error) => tracing::debug!(%error, "tunnel broke"),
                },
                () = cut.cancelled() => {}
            }
            metrics.tunnels.dec();
        });
    }
}
