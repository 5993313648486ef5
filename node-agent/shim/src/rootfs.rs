//! The root file system of a container, in the bundle that containerd makes.

use std::path::{Path, PathBuf};

use anyhow::Context;
use containerd_shim::mount::{mount_rootfs, umount_recursive};
use containerd_shim::protos::types::mount::Mount;
use torpor_sandbox::log_line;

/// Returns where containerd has a container's root file system mounted.
fn target(bundle: &Path) -> PathBuf {
    bundle.join("rootfs")
}

/// Mounts the root file system in the container's bundle.
pub(crate) fn mount(bundle: &Path, mounts: &[Mount]) -> anyhow::Result<()> {
    if mounts.is_empty() {
        return Ok(());
    }
    let target = target(bundle);
    std::fs::create_dir_all(&target)
        .with_context(|| format!("cannot make {}", target.display()))?;
    for mount in mounts {
        let source = Some(mount.source.as_str());
        mount_rootfs(Some(&mount.type_), source, &mount.options, &target).with_context(|| {
            format!("cannot mount the container's root at {}", target.display())
        })?;
    }
    Ok(())
}

/// Unmounts the root file system. A failure is logged: containerd unmounts it, too.
pub(crate) fn unmount(bundle: &Path) {
    let target = target(bundle);
    if let Err(error) = umount_recursive(target.to_str(), 0) {
        log_line!("cannot unmount {}: {error}", target.display());
    }
}
