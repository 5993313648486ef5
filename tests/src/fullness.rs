//! A full disk for the agent and one namespace's images only.

use std::path::PathBuf;

use anyhow::Context;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};

use crate::agent::Agent;

/// A small file system over a namespace's folder of images, visible only in the agent's mount
/// namespace.
///
/// It is unmounted on drop, or ends with the agent.
#[derive(Debug)]
pub struct FullDisk {
    agent: Agent,
    path: PathBuf,
}

impl FullDisk {
    /// Mounts a file system that leaves `bytes` for the images in the folder.
    pub fn over(path: PathBuf, bytes: u64) -> anyhow::Result<Self> {
        let agent = Agent::find()?;
        let target = path.clone();
        in_mounts_of(&agent, move || {
            let options = format!("size={bytes},mode=0700");
            let none = MsFlags::empty();
            mount(
                Some("full"),
                &target,
                Some("tmpfs"),
                none,
                Some(options.as_str()),
            )
        })?;
        Ok(Self { agent, path })
    }

    /// Returns the names of the files that the agent sees in the folder.
    pub fn content(&self) -> anyhow::Result<Vec<String>> {
        let root = PathBuf::from(format!("/proc/{}/root", self.agent.process.pid));
        let relative = self.path.strip_prefix("/")?;
        let entries = std::fs::read_dir(root.join(relative))?;
        Ok(entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect())
    }
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        let path = self.path.clone();
        // An agent that has ended took its mounts with it.
        let _ = in_mounts_of(&self.agent, move || umount2(&path, MntFlags::MNT_DETACH));
    }
}

/// Runs `call` on a thread of its own in the agent's mount namespace.
fn in_mounts_of(
    agent: &Agent,
    call: impl FnOnce() -> nix::Result<()> + Send + 'static,
) -> anyhow::Result<()> {
    let namespace = std::fs::File::open(format!("/proc/{}/ns/mnt", agent.process.pid))?;
    let thread = std::thread::spawn(move || -> nix::Result<()> {
        // A thread that shares its working directory with others must not change its mount
        // namespace.
        unshare(CloneFlags::CLONE_FS)?;
        setns(&namespace, CloneFlags::CLONE_NEWNS)?;
        call()
    });
    let done = thread
        .join()
        .map_err(|_| anyhow::anyhow!("the thread in the agent's mounts panicked"))?;
    done.context("cannot change the agent's mounts")
}
