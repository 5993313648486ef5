//! Table of running commands, by ids of the runtime.
//!
//! With its own ids a client cannot signal a process that no call started.

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

/// Running commands of `Start` and `Execute`.
#[derive(Debug)]
pub struct Processes {
    table: Mutex<Table>,
    slots: Arc<Semaphore>,
    /// One task for each slot in use, to wait for its end.
    running: TaskTracker,
}

#[derive(Debug, Default)]
struct Table {
    last: i32,
    processes: BTreeMap<i32, Arc<Process>>,
}

/// Running command.
#[derive(Debug)]
pub struct Process {
    pub signals: Arc<Signals>,
    /// Controls for the other calls; `None` for a command of `Execute`.
    pub controls: Option<Controls>,
}

/// Input and terminal of a command, for the other calls.
#[derive(Debug)]
pub struct Controls {
    input: tokio::sync::Mutex<Input>,
    terminal: Mutex<Option<Arc<Terminal>>>,
    /// Cancelled when the terminal is hung up.
    pub hung_up: CancellationToken,
    /// Cancelled when the command has ended and reads no more input.
    ended: CancellationToken,
}

/// Target of a command's input.
#[derive(Debug)]
pub enum Input {
    Pipe(ChildStdin),
    Terminal(Arc<Terminal>),
    Closed,
}

/// Slot for a command, out of a limited number.
#[derive(Debug)]
pub struct Slot {
    processes: Arc<Processes>,
    _permit: OwnedSemaphorePermit,
    _token: tokio_util::task::task_tracker::TaskTrackerToken,
}

/// Slot with its command. Dropping it removes the command from the table.
#[derive(Debug)]
pub struct Registered {
    slot: Slot,
    pub id: i32,
    pub process: Arc<Process>,
}

impl Processes {
    /// Returns an empty table of at most `limit` commands.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            table: Mutex::default(),
            slots: Arc::new(Semaphore::new(limit.min(Semaphore::MAX_PERMITS))),
            running: TaskTracker::new(),
        })
    }

    /// Returns a slot for a command, if one is free.
    pub fn slot(self: &Arc<Self>) -> Option<Slot> {
        Some(Slot {
            _permit: Arc::clone(&self.slots).try_acquire_owned().ok()?,
            _token: self.running.token(),
            processes: Arc::clone(self),
        })
    }

    /// Returns a command of `Start` by its id.
    pub fn get(&self, id: i32) -> Option<Arc<Process>> {
        let process = self.table().processes.get(&id).map(Arc::clone)?;
        process.controls.is_some().then_some(process)
    }

    /// Ends all commands by SIGTERM, and by SIGKILL after `grace`. No command starts any more.
    pub async fn end(&self, grace: Duration) {
        self.slots.close();
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
                tracing::debug!(%error, ?signal, "cannot signal a command");
            }
        }
    }

    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// Adds a command to the table.
    pub fn register(self, signals: &Arc<Signals>, controls: Option<Controls>) -> Registered {
        let signals = Arc::clone(signals);
        let process = Arc::new(Process { signals, controls });
        let id = {
            let mut table = self.processes.table();
            // After two billion commands the ids begin anew; low ids are free again by then.
            table.last = table.last.checked_add(1).unwrap_or(1);
            let id = table.last;
            table.processes.insert(id, Arc::clone(&process));
            id
        };
        Registered {
            slot: self,
            id,
            process,
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.slot.processes.table().processes.remove(&self.id);
        if let Some(controls) = &self.process.controls {
            controls.ended.cancel();
        }
    }
}

impl Controls {
    /// Returns the controls of a command with this input.
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

    /// Returns the terminal, if there is one.
    pub fn terminal(&self) -> Option<Arc<Terminal>> {
        let terminal = self.terminal.lock().unwrap_or_else(PoisonError::into_inner);
        terminal.as_ref().map(Arc::clone)
    }

    /// Writes all bytes, as fast as the command reads. Fails when the command ends.
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

    /// Closes the input. A terminal is hung up, as in upstream.
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
