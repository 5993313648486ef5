//! A full disk for one namespace's images only.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, move_mount, open_tree};

use crate::agent::Agent;

/// A small file system over a namespace's folder of images, for the shims and for the agent, whose
/// mounts are its own.
///
/// It is unmounted on drop.
#[derive(Debug)]
pub struct FullDisk {
    agent: Agent,
    path: PathBuf,
}

impl FullDisk {
    /// Makes the folder, and mounts a file system that leaves `bytes` for the images in it.
    pub fn over(path: PathBuf, bytes: u64) -> anyhow::Result<Self> {
        let agent = Agent::find()?;
        let parent = path.parent().context("the folder has no parent")?;
        let like = std::fs::metadata(parent)?;
        std::fs::create_dir(&path)?;
        let (mode, gid) = (like.mode() & 0o7777, like.gid());
        let options = format!("size={bytes},mode={mode:o},gid={gid}");
        let none = MsFlags::empty();
        mount(
            Some("full"),
            &path,
            Some("tmpfs"),
            none,
            Some(options.as_str()),
        )?;
        let disk = Self { agent, path };
        let tree = copy_of(&disk.path)?;
        let target = disk.path.clone();
        in_mounts_of(&disk.agent, move || {
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
            move_mount(&tree, "", CWD, &target, flags)?;
            Ok(())
        })?;
        Ok(disk)
    }

    /// Returns the names of the files in the folder.
    pub fn content(&self) -> anyhow::Result<Vec<String>> {
        let entries = std::fs::read_dir(&self.path)?;
        Ok(entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect())
    }
}

impl Drop for FullDisk {
    fn drop(&mut self) {
        let path = self.path.clone();
        // An agent that has ended took its mounts with it.
        let _ = in_mounts_of(&self.agent, move || {
            Ok(umount2(&path, MntFlags::MNT_DETACH)?)
        });
        let _ = umount2(&self.path, MntFlags::MNT_DETACH);
    }
}

/// Returns a copy of the mount at the path that is mounted nowhere.
fn copy_of(path: &Path) -> anyhow::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(CWD, path, flags).context("cannot copy the mount")
}

/// Runs `call` on a thread of its own in the agent's mount namespace.
fn in_mounts_of(
    agent: &Agent,
    call: impl FnOnce() -> anyhow::Result<()> + Send + 'static,
) -> anyhow::Result<()> {
    let namespace = std::fs::File::open(format!("/proc/{}/ns/mnt", agent.process.pid))?;
    let thread = std::thread::spawn(move || -> anyhow::Result<()> {
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
