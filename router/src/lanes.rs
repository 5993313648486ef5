//! Lanes: threads that each serve some of the clients, with their own connections to sandboxes.
//!
//! A request and its response stay on one thread, so that no data moves between cores.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use tokio::runtime::{Builder, Handle};

use crate::upstream::{self, Dialer, Pool};

/// Thread that serves clients. Clones share it.
#[derive(Clone, Debug)]
pub struct Lane {
    pub runtime: Handle,
    pub pool: Pool,
    /// Number of client connections.
    load: Arc<AtomicUsize>,
}

impl Lane {
    /// Returns a lane on the caller's runtime.
    pub fn here(dialer: Dialer) -> Self {
        Self::on(Handle::current(), dialer)
    }

    fn on(runtime: Handle, dialer: Dialer) -> Self {
        Self {
            runtime,
            pool: upstream::pool(dialer),
            load: Arc::default(),
        }
    }

    /// Counts a connection until the result is dropped.
    pub fn occupy(&self) -> Occupied {
        self.load.fetch_add(1, Ordering::Relaxed);
        Occupied(Arc::clone(&self.load))
    }
}

/// Connection counted on a lane.
#[derive(Debug)]
pub struct Occupied(Arc<AtomicUsize>);

impl Drop for Occupied {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Starts a lane for each core that the process may use. The threads never end.
pub fn one_per_core(dialer: &Dialer) -> io::Result<Vec<Lane>> {
    let cores = thread::available_parallelism()?.get();
    (0..cores).map(|number| start(number, dialer)).collect()
}

fn start(number: usize, dialer: &Dialer) -> io::Result<Lane> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    thread::Builder::new()
        .name(format!("lane-{number}"))
        .spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    Ok(Lane::on(handle, dialer.clone()))
}

/// Returns the lane with the fewest connections.
pub fn emptiest(lanes: &[Lane]) -> Option<&Lane> {
    lanes
        .iter()
        .min_by_key(|lane| lane.load.load(Ordering::Relaxed))
}
