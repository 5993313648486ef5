//! The node's memory and swap: they are read at intervals, and sandboxes sleep early when
//! there is too little of them.
//!
//! `torpor_core::pressure` decides which sandboxes sleep; the planner decides whether they may.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use torpor_cgroup::meminfo::{self, Meminfo};
use torpor_core::pressure::Readings;

use crate::reconcile::driver::Driver;
use crate::report::metrics::Metrics;

pub(crate) mod state;
pub(crate) use state::NodePressure;

/// Interval between two reads of the node's figures.
const INTERVAL: Duration = Duration::from_secs(2);

/// Reads the node's figures at intervals until `stop`, and wakes the tasks whose plan may change.
pub(crate) async fn watch(
    pressure: Arc<NodePressure>,
    driver: Driver,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) {
    loop {
        // The kernel answers these reads at once.
        match readings() {
            Ok(readings) => {
                for pod in pressure.update(&readings, Timestamp::now(), &metrics) {
                    driver.wake_task(&pod);
                }
            }
            Err(error) => tracing::warn!(%error, "cannot read the state of the node's memory"),
        }
        // Both arms only wait.
        tokio::select! {
            () = tokio::time::sleep(INTERVAL) => {}
            () = stop.cancelled() => return,
        }
    }
}

fn readings() -> std::io::Result<Readings> {
    Ok(Readings {
        stalled: meminfo::stalled(),
        ..of_meminfo(&meminfo::read()?)
    })
}

fn of_meminfo(memory: &Meminfo) -> Readings {
    Readings {
        memory_total: memory.mem_total,
        // Linux has the field since 3.14.
        memory_available: memory.mem_available.unwrap_or(0),
        swap_total: memory.swap_total,
        swap_free: memory.swap_free,
        stalled: None,
    }
}
