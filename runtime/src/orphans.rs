//! Child processes: commands, and orphans that this process adopts.
//!
//! The first process of a container and a subreaper become the parent of each process whose parent
//! has ended. Without a wait by the parent, ended processes stay as zombies.

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

/// Child processes of the runtime.
#[derive(Debug, Default)]
pub struct Children {
    /// Process ids of commands, whose exit codes their owners wait for.
    owned: Mutex<HashSet<i32>>,
}

impl Children {
    /// Makes this process a subreaper and reaps orphans in the background.
    ///
    /// All children of the process that [`Children::start`] did not start count as orphans.
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

    /// Starts a command. The caller has to wait for it until [`Children::release`].
    pub fn start(&self, command: &mut Command) -> io::Result<(Child, Pid)> {
        // The lock keeps `reap` from reaping a child that ends before it is inserted.
        let mut owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        let child = command.spawn()?;
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        let pid = id
            .and_then(Pid::from_raw)
            .ok_or_else(|| io::Error::other("the child has no process id"))?;
        owned.insert(pid.as_raw_nonzero().get());
        Ok((child, pid))
    }

    /// Leaves the wait for this child to [`Children::adopt`].
    pub fn release(&self, pid: Pid) {
        let mut owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        owned.remove(&pid.as_raw_nonzero().get());
    }

    /// Reaps the orphans that have ended.
    ///
    /// Orphans are found in /proc, because a wait for any child would also reap commands.
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
                // An error means that the process has been reaped meanwhile.
                let _ended = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG);
            }
        }
    }
}

/// Reports whether the content of `/proc/<pid>/stat` is that of a zombie child of `parent`.
///
/// The process name in it may contain any characters.
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
    fn a_zombie_child_is_recognized_whatever_its_name(#[case] stat: &str, #[case] zombie: bool) {
        assert_eq!(is_zombie_of(stat, 7), zombie);
    }
}
