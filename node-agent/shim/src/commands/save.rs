//! Commands of the agent for a sandbox that is or may be saved soon.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde_json::json;
use torpor_core::ids::SandboxId;
use torpor_link::traffic;
use torpor_runsc::keeper::Answer;
use torpor_runsc_direct::filestore;

use torpor_sandbox::node::Node;
use torpor_sandbox::restore;

/// Returns when the pod's links last carried traffic that is not noise.
pub(crate) fn traffic(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Answer> {
    match node.records.traffic(sandbox)? {
        Ok(watch) => Ok(Answer::ok(serde_json::to_value(traffic::last(watch)?)?)),
        Err(why) => bail!(why),
    }
}

/// Returns the bytes of the filestores, the files in which gVisor keeps the containers' writes. An
/// image of the sandbox contains these bytes.
pub(crate) fn measure(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Answer> {
    let pod = node.records.pod(sandbox)?;
    let mut dirs: Vec<PathBuf> = pod.volumes.into_iter().map(|one| one.source).collect();
    for container in node.records.containers_of(sandbox)? {
        let spec = node.records.spec(&container.id)?;
        let root = spec.pointer("/root/path").and_then(|path| path.as_str());
        dirs.extend(root.map(PathBuf::from));
    }
    let bytes = size_of(&dirs, &filestore(sandbox.as_str()))?;
    Ok(Answer::ok(json!({ "filestoreBytes": bytes })))
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

/// Ends every process of a sandbox that continues to write its image after the save was stopped.
/// The containers' keepers notice the end by themselves. The caller holds the lock.
pub(crate) fn force_end(node: &Node, sandbox: &SandboxId) -> anyhow::Result<Answer> {
    let cgroup = node.records.pod(sandbox)?.cgroup;
    restore::kill_processes(node, Path::new(&cgroup))?;
    Ok(Answer::ok(json!(null)))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use torpor_runsc::keeper::Verb;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn a_keeper_runs_these_verbs_by_the_names_that_the_agent_says() {
        let parsed = |verb: Verb| {
            let sandbox = "5".repeat(64);
            Cli::try_parse_from(["shim", verb.as_str(), &sandbox]).map(|cli| cli.command)
        };
        let measure = parsed(Verb::Measure).expect("a command");
        assert!(matches!(measure, Command::Measure { .. }));
        let end = parsed(Verb::ForceEnd).expect("a command");
        assert!(matches!(end, Command::ForceEnd { .. }));
    }

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
