//! Lanes: threads that each serve some of the clients, with connections to sandboxes of their own. What belongs to one request stays on one thread, so that nothing is
//! handed from core to core while it is carried.

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

/// A thread that serves clients. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Lane {
    pub runtime: Handle,
    pub pool: Pool,
    /// Connections of clients.
    load: Arc<AtomicUsize>,
}

impl Lane {
    /// A lane on the caller's own runtime.
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

    /// Counts a connection for as long as the result lives.
    pub fn occupy(&self) -> Occupied {
        self.load.fetch_add(1, Ordering::Relaxed);
        Occupied(Arc::clone(&self.load))
    }
}

/// A connection on a lane.
#[derive(Debug)]
pub struct Occupied(Arc<AtomicUsize>);

impl Drop for Occupied {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Starts a lane for each core that the process may use. They last as long as the process.
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

/// The lane with the fewest connections.
pub fn emptiest(lanes: &[Lane]) -> Option<&Lane> {
    lanes
        .iter()
        .min_by_key(|lane| lane.load.load(Ordering::Relaxed))
}
