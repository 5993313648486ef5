//! A command with all it starts: one process group, which ends as one.

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

/// A process group. Dropped before its leader has been waited for, as when the client goes away, it is killed.
#[derive(Debug)]
pub struct Group {
    child: Child,
    signals: Arc<Signals>,
    children: Arc<Children>,
}

/// The way to signal a group, for those who do not own it.
#[derive(Debug)]
pub struct Signals {
    leader: Pid,
    /// The leader is waited for, or about to be: the number may belong to another group from now on.
    ended: Mutex<bool>,
}

impl Signals {
    /// Sends to all processes of the group. One that has ended is left alone.
    pub fn send(&self, signal: Signal) -> io::Result<()> {
        // The leader is not waited for while this is held, so its number is still the group's, even when it ended long ago and only what it started lives.
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
    /// Starts the command as the leader of a group of its own.
    pub fn start(command: &mut Command, children: &Arc<Children>) -> io::Result<Self> {
        Self::started(command.process_group(0), children)
    }

    /// Starts a command that makes a session of its own, and so a group.
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

    /// The ends of its pipes, once.
    pub fn pipes(&mut self) -> Option<(ChildStdout, ChildStderr)> {
        self.child.stdout.take().zip(self.child.stderr.take())
    }

    /// The end of its input, once.
    pub fn stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// The way to signal it.
    pub fn signals(&self) -> &Arc<Signals> {
        &self.signals
    }

    /// Until the leader has ended. It is not waited for by this.
    pub fn exited(&self) -> impl Future<Output = io::Result<()>> + Send + use<> {
        let leader = self.signals.leader;
        async move {
            // Heard from before it is looked at, so that no end is missed. There is no pidfd in gVisor.
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
            tracing::debug!(%error, group = ?self.signals.leader, "nothing was left to kill");
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
