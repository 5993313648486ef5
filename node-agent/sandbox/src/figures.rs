//! The figures that decide how large an image of a sandbox may become.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use anyhow::Context;
use torpor_core::ids::SandboxId;
use torpor_core::image_size::Figures;
use torpor_records::PodRecord;
use torpor_runsc_direct::filestore;

use crate::node::{CALL_LIMIT, Node};

/// Returns the figures of the sandbox. The sandbox itself gives its memory only if the kernel does
/// not count it. The caller holds the lock.
pub fn figures(node: &Node, record: &PodRecord) -> Figures {
    let counted = (record.cgroup.parent()).and_then(|pod| node.cgroups.held(pod));
    let of_sandbox = || memory_usage(node, &record.sandbox);
    Figures {
        by_sandbox: counted.is_none().then(of_sandbox).flatten(),
        counted,
        filestores: filestores(node, record),
    }
}

/// Returns the figures of a sandbox that is writing its image: the file cache of the image does not
/// count as memory.
pub(crate) fn figures_during_save(node: &Node, record: &PodRecord) -> Figures {
    let counted = (record.cgroup.parent()).and_then(|pod| node.cgroups.held_by_summary(pod));
    Figures {
        by_sandbox: None,
        counted,
        filestores: filestores(node, record),
    }
}

/// Requests the memory usage from the sandbox, in bytes.
fn memory_usage(node: &Node, sandbox: &SandboxId) -> Option<u64> {
    let connected = node.runsc.connect(sandbox);
    let asked = connected.and_then(|mut control| control.memory_usage(CALL_LIMIT));
    match asked {
        Ok(bytes) => Some(bytes),
        Err(error) => {
            let error = anyhow::Error::new(error);
            crate::log_line!("cannot estimate the size of the sandbox's image: {error:#}");
            None
        }
    }
}

/// Returns the bytes of the filestores, the files in which gVisor keeps the containers' writes. An
/// image of the sandbox contains these bytes. None if they cannot be measured.
fn filestores(node: &Node, record: &PodRecord) -> Option<u64> {
    match measure(node, record) {
        Ok(bytes) => Some(bytes),
        Err(error) => {
            crate::log_line!("cannot measure the containers' writes: {error:#}");
            None
        }
    }
}

fn measure(node: &Node, record: &PodRecord) -> anyhow::Result<u64> {
    let volumes = record.volumes.iter();
    let mut dirs: Vec<PathBuf> = volumes.map(|one| one.source.clone()).collect();
    for container in node.records.containers_of(&record.sandbox)? {
        let spec = node.records.spec(&container.id)?;
        let root = spec.pointer("/root/path").and_then(|path| path.as_str());
        dirs.extend(root.map(PathBuf::from));
    }
    size_of(&dirs, &filestore(record.sandbox.as_str()))
}

/// Returns the bytes of disk that the files of this name in the directories take. A directory
/// without such a file counts 0.
fn size_of(dirs: &[PathBuf], name: &str) -> anyhow::Result<u64> {
    let mut sum = 0_u64;
    for path in dirs.iter().map(|dir| dir.join(name)) {
        match std::fs::symlink_metadata(&path) {
            Ok(file) if file.is_file() => sum = sum.saturating_add(file.blocks() * 512),
            Ok(_) => {}
            Err(error) if is_not_there(&error) => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot examine {}", path.display()));
            }
        }
    }
    Ok(sum)
}

/// Reports whether the file does not exist, or its directory is no directory: a volume may be a
/// file.
fn is_not_there(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_filestores_themselves_count() {
        let dir = tempfile::tempdir().expect("a directory");
        let dirs = ["a", "b", "c", "none", "file"].map(|name| dir.path().join(name));
        for one in &dirs[..3] {
            std::fs::create_dir(one).expect("made");
        }
        std::fs::write(&dirs[4], "").expect("written");
        std::fs::write(dirs[0].join("store"), vec![1; 1 << 20]).expect("written");
        std::fs::write(dirs[0].join("other"), vec![1; 1 << 20]).expect("written");
        std::os::unix::fs::symlink(dirs[0].join("other"), dirs[1].join("store")).expect("linked");
        let bytes = size_of(&dirs, "store").expect("measured");
        assert!((1 << 20..2 << 20).contains(&bytes), "{bytes}");
    }
}
