//! A command with all it starts: one process group, which ends as one.

use std::{io, process::ExitStatus, sync::Arc};

use rustix::process::{Pid, Signal};
use tokio::process::{Child, ChildStderr, ChildStdout, Command};

use crate::orphans::Children;

/// A process group. Dropped before its leader has been waited for, as when the client goes away, it is killed.
#[derive(Debug)]
pub struct Group {
    child: Child,
    leader: Pid,
    children: Arc<Children>,
    /// Waited for: the number may belong to another group by now.
    ended: bool,
}

impl Group {
    /// Starts the command as the leader of a group of its own.
    pub fn start(command: &mut Command, children: &Arc<Children>) -> io::Result<Self> {
        let (child, leader) = children.start(command.process_group(0))?;
        let children = Arc::clone(children);
        Ok(Self {
            child,
            leader,
            children,
            ended: false,
        })
    }

    /// The ends of its pipes, once.
    pub fn pipes(&mut self) -> Option<(ChildStdout, ChildStderr)> {
        self.child.stdout.take().zip(self.child.stderr.take())
    }

    /// Waits for the leader.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        let status = self.child.wait().await?;
        self.ended = true;
        Ok(status)
    }

    /// Kills all processes of the group and waits for the leader.
    pub async fn kill(mut self) -> io::Result<()> {
        self.signal();
        self.wait().await?;
        Ok(())
    }

    /// The leader is not waited for while this may be called, so its number is still the group's, even when it ended long ago and only what it started lives.
    fn signal(&self) {
        if !self.ended
            && let Err(errno) = rustix::process::kill_process_group(self.leader, Signal::KILL)
        {
            tracing::debug!(%errno, group = ?self.leader, "nothing was left to kill");
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.signal();
        self.children.release(self.leader);
    }
}
