//! Process groups: a command with the processes that it starts.

use std::{
    io,
    process::ExitStatus,
    sync::{Arc, Mutex, PoisonError},
};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use tokio::{
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command},
    signal::unix::{SignalKind, signal},
};

use crate::orphans::Children;

/// Process group of a command.
///
/// Dropping the group before the leader has been waited for kills it, as when a client disconnects.
#[derive(Debug)]
pub struct Group {
    child: Child,
    signals: Arc<Signals>,
    children: Arc<Children>,
}

/// Handle that signals a group without owning it.
#[derive(Debug)]
pub struct Signals {
    leader: Pid,
    /// The leader has been waited for, or is about to be: another group may get its id then.
    ended: Mutex<bool>,
}

impl Signals {
    /// Signals all processes of the group; does nothing once the leader has been waited for.
    pub fn send(&self, signal: Signal) -> io::Result<()> {
        // While the lock is held the leader is not waited for, so that its id stays that of the
        // group, even if the leader has ended and only its children live.
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if *ended {
            return Ok(());
        }
        Ok(rustix::process::kill_process_group(self.leader, signal)?)
    }

    fn end(&self) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }
}

impl Group {
    /// Starts the command as the leader of a new group.
    pub fn start(command: &mut Command, children: &Arc<Children>) -> io::Result<Self> {
        Self::started(command.process_group(0), children)
    }

    /// Starts a command that creates a session itself, and by that a group.
    pub fn start_session(command: &mut Command, children: &Arc<Children>) -> io::Result<Self> {
        Self::started(command, children)
    }

    fn started(command: &mut Command, children: &Arc<Children>) -> io::Result<Self> {
        let (child, leader) = children.start(command)?;
        let ended = Mutex::new(false);
        Ok(Self {
            child,
            signals: Arc::new(Signals { leader, ended }),
            children: Arc::clone(children),
        })
    }

    /// Returns the pipes of the outputs; `None` after the first call.
    pub fn pipes(&mut self) -> Option<(ChildStdout, ChildStderr)> {
        self.child.stdout.take().zip(self.child.stderr.take())
    }

    /// Returns the pipe of the input; `None` after the first call.
    pub fn stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// Returns the handle that signals the group.
    pub fn signals(&self) -> &Arc<Signals> {
        &self.signals
    }

    /// Completes when the leader has ended, without reaping it.
    pub fn exited(&self) -> impl Future<Output = io::Result<()>> + Send + use<> {
        let leader = self.signals.leader;
        async move {
            // The handler is installed before the first check, so that no end is missed. gVisor
            // has no pidfd.
            let mut died = signal(SignalKind::child())?;
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            while rustix::process::waitid(WaitId::Pid(leader), options)?.is_none() {
                died.recv().await;
            }
            Ok(())
        }
    }

    /// Waits for the leader.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        self.exited().await?;
        self.signals.end();
        self.child.wait().await
    }

    /// Kills all processes of the group and waits for the leader.
    pub async fn kill(mut self) -> io::Result<()> {
        self.kill_all();
        self.wait().await?;
        Ok(())
    }

    fn kill_all(&self) {
        if let Err(error) = self.signals.send(Signal::KILL) {
            tracing::debug!(%error, group = ?self.signals.leader, "cannot kill the process group");
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill_all();
        self.signals.end();
        self.children.release(self.signals.leader);
    }
}
