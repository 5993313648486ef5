//! The commands that run, by numbers of our own: a client cannot signal what it did not start.

use std::{
    collections::BTreeMap,
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rustix::process::Signal;
use tokio::{
    io::AsyncWriteExt as _,
    process::ChildStdin,
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{group::Signals, sandboxd::terminal::Terminal};

/// Commands that run, of both kinds.
#[derive(Debug)]
pub struct Processes {
    table: Mutex<Table>,
    places: Arc<Semaphore>,
    /// One task for each place taken, to wait for.
    running: TaskTracker,
}

#[derive(Debug, Default)]
struct Table {
    last: i32,
    processes: BTreeMap<i32, Arc<Process>>,
}

/// A command that runs.
#[derive(Debug)]
pub struct Process {
    pub signals: Arc<Signals>,
    /// `None` for a command whose call has no other calls.
    pub controls: Option<Controls>,
}

/// What the other calls do to a command.
#[derive(Debug)]
pub struct Controls {
    input: tokio::sync::Mutex<Input>,
    terminal: Mutex<Option<Arc<Terminal>>>,
    /// The terminal is hung up.
    pub hung_up: CancellationToken,
    /// Nothing will be read any more.
    ended: CancellationToken,
}

/// Where a command's input goes.
#[derive(Debug)]
pub enum Input {
    Pipe(ChildStdin),
    Terminal(Arc<Terminal>),
    Closed,
}

/// A place for a command.
#[derive(Debug)]
pub struct Place {
    processes: Arc<Processes>,
    _permit: OwnedSemaphorePermit,
    _token: tokio_util::task::task_tracker::TaskTrackerToken,
}

/// A place that is taken. Dropped, the command is no longer known.
#[derive(Debug)]
pub struct Registered {
    place: Place,
    pub id: i32,
    pub process: Arc<Process>,
}

impl Processes {
    /// None yet, and at most so many.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            table: Mutex::default(),
            places: Arc::new(Semaphore::new(limit.min(Semaphore::MAX_PERMITS))),
            running: TaskTracker::new(),
        })
    }

    /// A place for a command, if there is one.
    pub fn place(self: &Arc<Self>) -> Option<Place> {
        Some(Place {
            _permit: Arc::clone(&self.places).try_acquire_owned().ok()?,
            _token: self.running.token(),
            processes: Arc::clone(self),
        })
    }

    /// A command that has other calls, by its number.
    pub fn get(&self, id: i32) -> Option<Arc<Process>> {
        let process = self.table().processes.get(&id).map(Arc::clone)?;
        process.controls.is_some().then_some(process)
    }

    /// Ends all commands: they are asked to, and killed when they have not done so in time. None starts from then on.
    pub async fn end(&self, grace: Duration) {
        self.places.close();
        self.running.close();
        self.signal(Signal::TERM);
        if tokio::time::timeout(grace, self.running.wait())
            .await
            .is_err()
        {
            self.signal(Signal::KILL);
        }
    }

    fn signal(&self, signal: Signal) {
        let processes: Vec<_> = self.table().processes.values().map(Arc::clone).collect();
        for process in processes {
            if let Err(error) = process.signals.send(signal) {
                tracing::debug!(%error, ?signal, "a command ended before it was signalled");
            }
        }
    }

    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Makes a command known.
    pub fn register(self, signals: &Arc<Signals>, controls: Option<Controls>) -> Registered {
        let signals = Arc::clone(signals);
        let process = Arc::new(Process { signals, controls });
        let id = {
            let mut table = self.processes.table();
            // After two billion it begins anew; those numbers are free again.
            table.last = table.last.checked_add(1).unwrap_or(1);
            let id = table.last;
            table.processes.insert(id, Arc::clone(&process));
            id
        };
        Registered {
            place: self,
            id,
            process,
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.place.processes.table().processes.remove(&self.id);
        if let Some(controls) = &self.process.controls {
            controls.ended.cancel();
        }
    }
}

impl Controls {
    /// Of a command that reads from here.
    pub fn new(input: Input) -> Self {
        let terminal = match &input {
            Input::Terminal(terminal) => Some(Arc::clone(terminal)),
            Input::Pipe(_) | Input::Closed => None,
        };
        Self {
            input: tokio::sync::Mutex::new(input),
            terminal: Mutex::new(terminal),
            hung_up: CancellationToken::new(),
            ended: CancellationToken::new(),
        }
    }

    /// The terminal, if there is one.
    pub fn terminal(&self) -> Option<Arc<Terminal>> {
        let terminal = self.terminal.lock().unwrap_or_else(PoisonError::into_inner);
        terminal.as_ref().map(Arc::clone)
    }

    /// Writes all of it, as fast as the command reads; fails when it ends.
    pub async fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let writing = async {
            match &mut *self.input.lock().await {
                Input::Pipe(pipe) => pipe.write_all(bytes).await,
                Input::Terminal(terminal) => terminal.write_all(bytes).await,
                Input::Closed => Err(io::Error::other("file already closed")),
            }
        };
        tokio::select! {
            written = writing => written,
            () = self.ended.cancelled() => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Nothing comes after this. A terminal is hung up, as with upstream.
    pub async fn close(&self) {
        tokio::select! {
            mut input = self.input.lock() => *input = Input::Closed,
            () = self.ended.cancelled() => return,
        }
        let terminal = &mut *self.terminal.lock().unwrap_or_else(PoisonError::into_inner);
        if terminal.take().is_some() {
            self.hung_up.cancel();
        }
    }
}
