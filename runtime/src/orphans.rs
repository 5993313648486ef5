//! Children of this process: those that commands are, and those that it inherits because their parents died.
//!
//! As the first process of a container, or as a subreaper, it is the parent of every process whose own parent has ended, and must wait for them or they stay as zombies.

use std::{
    collections::HashSet,
    fs, io,
    sync::{Arc, Mutex, PoisonError},
};

use rustix::process::{Pid, WaitOptions};
use tokio::{
    process::{Child, Command},
    signal::unix::{SignalKind, signal},
};

/// Who waits for which child.
#[derive(Debug, Default)]
pub struct Children {
    /// Leaders of commands, whose exit codes are wanted.
    owned: Mutex<HashSet<i32>>,
}

impl Children {
    /// Inherits orphans and waits for them from now on. Only for a process that is all the runtime's: any child that [`Children::start`] did not start counts as an orphan.
    pub fn adopt(self: &Arc<Self>) -> io::Result<()> {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let mut died = signal(SignalKind::child())?;
        let children = Arc::clone(self);
        tokio::spawn(async move {
            while died.recv().await.is_some() {
                children.reap();
            }
        });
        Ok(())
    }

    /// Starts a command. Its exit is left to the caller until [`Children::release`].
    pub fn start(&self, command: &mut Command) -> io::Result<(Child, Pid)> {
        // Under the lock, so that a child that ends at once is not taken for an orphan.
        let mut owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        let child = command.spawn()?;
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        let pid = id
            .and_then(Pid::from_raw)
            .ok_or_else(|| io::Error::other("the child has no process id"))?;
        owned.insert(pid.as_raw_nonzero().get());
        Ok((child, pid))
    }

    /// Nobody asks for this child's exit code any more.
    pub fn release(&self, pid: Pid) {
        let mut owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        owned.remove(&pid.as_raw_nonzero().get());
    }

    /// Waits for the orphans that have ended. They are looked for by name, because to wait for any child would take exit codes away from commands.
    fn reap(&self) {
        let owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let Ok(processes) = fs::read_dir("/proc") else {
            return;
        };
        let ids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        for id in ids.filter(|id: &i32| !owned.contains(id)) {
            let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
            if is_zombie_of(&stat, own)
                && let Some(pid) = Pid::from_raw(id)
            {
                // Somebody else may have waited for it meanwhile; then there is nothing to do.
                let _ended = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
            }
        }
    }
}

/// Whether a line of `/proc/<pid>/stat` is that of an ended child of `parent`. The name in it may hold anything.
fn is_zombie_of(stat: &str, parent: i32) -> bool {
    let Some((_, after_name)) = stat.rsplit_once(')') else {
        return false;
    };
    let mut fields = after_name.split_ascii_whitespace();
    fields.next() == Some("Z") && fields.next().and_then(|id| id.parse().ok()) == Some(parent)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("12 (sh) Z 7 12 12 0", true)]
    #[case("12 (a) R 1) Z 7 12", true)]
    #[case("12 (sh) S 7 12 12 0", false)]
    #[case("12 (sh) Z 8 12 12 0", false)]
    #[case("12 (a) Z 7 b) S 8 12", false)]
    #[case("", false)]
    fn an_ended_child_is_known_whatever_its_name(#[case] stat: &str, #[case] zombie: bool) {
        assert_eq!(is_zombie_of(stat, 7), zombie);
    }
}
