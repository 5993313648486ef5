//! A claim in a sandbox that runs already. The kubelet writes the claim's files into a volume of
//! the Pod's first container ([`torpor_claim_env`]). Processes that start later have the claim's
//! variables. The file `/run/torpor/claim` in the container says that the claim has arrived: it is
//! part of the sandbox's memory, so that a sandbox that continues from that memory has it, too.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use serde_json::{Value, json};
use torpor_claim_env::{DIRECTORY, ENV, FILES, FILES_OF, MAX_ENV, UID};
use torpor_core::ids::{ClaimUid, SandboxId};
use torpor_records::{BoundNote, ContainerRecord, Role};
use torpor_runsc::spec::Spec;

use crate::hook;
use crate::node::Node;
use crate::restore::Refusal;

/// The user's command for the arrival of a claim: a JSON array of words.
const ON_CLAIM_EXEC: &str = "torpor.dev/on-claim-exec";
/// End of the volume's path on the host: its kind and the name that the controller gives it.
const VOLUME: &str = "kubernetes.io~projected/torpor-claim";
/// Most bytes of a UID in a file.
const MAX_UID: usize = 64;
/// Time for the kubelet to write the files. It does so a few tenths of a second after the Pod's
/// annotations have changed.
const DELIVERY_LIMIT: Duration = Duration::from_secs(5);
/// Time between two looks at the files.
const DELIVERY_INTERVAL: Duration = Duration::from_millis(10);

/// Reasons of a claim that did not arrive.
const NOT_DELIVERED: &str = "ClaimNotDelivered";
const EXEC_FAILED: &str = "OnClaimExecFailed";

/// Brings a claim into the sandbox, which runs and whose lock the caller holds: waits for the
/// claim's files, runs the user's command, and marks the sandbox. Where the mark is there already,
/// the command does not run again.
pub(crate) fn bind(node: &Node, sandbox: &SandboxId, claim: &ClaimUid) -> anyhow::Result<()> {
    let (part, volume) = receiver(node, sandbox)?;
    wait_for(&volume, claim)?;
    // A mark on a volume outlives its container. The command has not run in a container that took
    // the place of the one that was noted.
    let noted = node.records.bound_note(sandbox)?;
    let is_replaced = noted.is_some_and(|note| note.claim == *claim && note.container != part.id);
    let has_mark = || hook::run_helper(node, &part, &["has-claim", claim.as_str()]).is_ok();
    if is_replaced || !has_mark() {
        let spec = Spec(node.records.spec(&sandbox.clone().into())?);
        if let Some(command) = spec.annotation(ON_CLAIM_EXEC) {
            let variables = [("TORPOR_CLAIM".to_owned(), claim.to_string())];
            hook::run(node, &part, command, &variables).map_err(|error| Refusal {
                reason: EXEC_FAILED,
                message: format!("the command of {ON_CLAIM_EXEC} failed: {error:#}"),
            })?;
        }
        // A read-only root file system has no mark. The command then runs again in a sandbox that
        // continues from this memory.
        if let Err(error) = hook::run_helper(node, &part, &["set-claim", claim.as_str()]) {
            crate::log_line!("cannot mark container {}: {error:#}", part.name);
        }
    }
    let note = BoundNote {
        claim: claim.clone(),
        container: part.id,
    };
    Ok(node.records.write_bound(sandbox, &note)?)
}

/// Returns the container that mounts the volume for a claim, and the volume's path on the host.
fn receiver(node: &Node, sandbox: &SandboxId) -> anyhow::Result<(ContainerRecord, PathBuf)> {
    let containers = node.records.containers_of(sandbox)?.into_iter();
    for container in containers.filter(|one| one.role == Role::Container) {
        if let Some(volume) = volume(&node.records.spec(&container.id)?) {
            return Ok((container, volume));
        }
    }
    Err(Refusal {
        reason: NOT_DELIVERED,
        message: format!(
            "no container of the Pod mounts {DIRECTORY}: it was created before its template allowed late binding"
        ),
    }
    .into())
}

/// Returns the path on the host of the volume for a claim, if the container with this OCI spec
/// mounts it. Another volume at its path is not taken for it.
fn volume(spec: &Value) -> Option<PathBuf> {
    let mounts = spec.get("mounts")?.as_array()?;
    let mount = mounts
        .iter()
        .find(|mount| mount["destination"] == DIRECTORY)?;
    let source = PathBuf::from(mount.get("source")?.as_str()?);
    source.ends_with(VOLUME).then_some(source)
}

/// Waits until the kubelet has written the claim's files.
fn wait_for(volume: &Path, claim: &ClaimUid) -> anyhow::Result<()> {
    let until = Instant::now() + DELIVERY_LIMIT;
    while !is_delivered(volume, claim)? {
        if Instant::now() >= until {
            return Err(Refusal {
                reason: NOT_DELIVERED,
                message: format!(
                    "the kubelet has not written claim {claim} to {DIRECTORY} within {DELIVERY_LIMIT:?}"
                ),
            }
            .into());
        }
        std::thread::sleep(DELIVERY_INTERVAL);
    }
    Ok(())
}

/// Reports whether the volume has all files of the claim. The kubelet takes them from two objects,
/// whose watches may show them one after the other.
fn is_delivered(volume: &Path, claim: &ClaimUid) -> anyhow::Result<bool> {
    let is_of_claim = |file| anyhow::Ok(read(volume, file, MAX_UID)?.trim_end() == claim.as_str());
    let brings_files = !read(volume, FILES, MAX_UID)?.is_empty();
    Ok(is_of_claim(UID)? && (!brings_files || is_of_claim(FILES_OF)?))
}

/// Reads a file of a volume. The kubelet changes all files at once: `..data` is a link to their
/// directory. A file that is not there, or too large, is empty.
fn read(volume: &Path, name: &str, limit: usize) -> anyhow::Result<String> {
    let opened = || -> rustix::io::Result<File> {
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let volume = openat2(CWD, volume, directory, Mode::empty(), ResolveFlags::empty())?;
        let inside = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let file = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        openat2(
            &volume,
            format!("..data/{name}"),
            file,
            Mode::empty(),
            inside,
        )
        .map(File::from)
    };
    let file = match opened() {
        Ok(file) => file,
        Err(rustix::io::Errno::NOENT) => return Ok(String::new()),
        Err(errno) => {
            return Err(errno)
                .with_context(|| format!("cannot open {name} in {}", volume.display()));
        }
    };
    let mut text = String::new();
    file.take(limit as u64 + 1).read_to_string(&mut text)?;
    Ok(if text.len() > limit {
        String::new()
    } else {
        text
    })
}

fn variables_in(volume: &Path) -> Vec<(String, String)> {
    read(volume, ENV, MAX_ENV).map_or_else(|_| Vec::new(), |text| torpor_claim_env::read(&text))
}

/// Adds the claim's variables to an OCI process of the container with this OCI spec. A container
/// without a claim has none.
pub fn add_variables(process: &mut Value, spec: &Value) {
    if let Some(volume) = volume(spec) {
        set_variables(process, &variables_in(&volume));
    }
}

/// Sets variables of an OCI process. A variable replaces one of the same name.
pub(crate) fn set_variables(process: &mut Value, variables: &[(String, String)]) {
    if variables.is_empty() {
        return;
    }
    if !process["env"].is_array() {
        process["env"] = json!([]);
    }
    let Some(env) = process["env"].as_array_mut() else {
        return;
    };
    let is_set = |one: &Value| {
        let name = one.as_str().and_then(|one| one.split_once('='));
        name.is_some_and(|(name, _)| variables.iter().any(|(set, _)| set == name))
    };
    env.retain(|one| !is_set(one));
    env.extend(
        variables
            .iter()
            .map(|(name, value)| json!(format!("{name}={value}"))),
    );
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A directory with the end of a volume's path.
    struct Volume(tempfile::TempDir, PathBuf);

    impl Volume {
        fn new() -> Self {
            let pod = tempfile::tempdir().expect("a directory");
            let path = pod.path().join(VOLUME);
            std::fs::create_dir_all(&path).expect("made");
            Self(pod, path)
        }

        fn path(&self) -> &Path {
            &self.1
        }
    }

    /// A volume as the kubelet writes it (pkg/volume/util/atomic_writer.go).
    fn written(uid: &str, env: &str) -> Volume {
        let volume = Volume::new();
        let data = volume.path().join("..2026_11_27_12_00_00.1");
        std::fs::create_dir(&data).expect("made");
        std::fs::write(data.join(UID), uid).expect("written");
        std::fs::write(data.join(ENV), env).expect("written");
        symlink(
            data.file_name().expect("a name"),
            volume.path().join("..data"),
        )
        .expect("linked");
        volume
    }

    fn spec(volume: &Path) -> Value {
        json!({"mounts": [
            {"destination": "/run", "source": "/elsewhere"},
            {"destination": "/run/claim", "source": volume},
        ]})
    }

    #[test]
    fn a_process_has_the_variables_of_the_claim_in_place_of_its_own() {
        let volume = written("uid-1", "export A='new x'\nexport B=2\n");
        let mut process = json!({"env": ["A=old", "C=3", "AB=4"]});
        add_variables(&mut process, &spec(volume.path()));
        assert_eq!(process["env"], json!(["C=3", "AB=4", "A=new x", "B=2"]));
        let mut process = json!({});
        add_variables(&mut process, &spec(volume.path()));
        assert_eq!(process["env"], json!(["A=new x", "B=2"]));
    }

    #[test]
    fn a_container_without_a_claim_keeps_its_variables() {
        let empty = written("", "");
        let nothing = Volume::new();
        let other = written("uid-1", "export A=1\n");
        let renamed = other.0.path().join("kubernetes.io~projected/other");
        std::fs::rename(other.path(), &renamed).expect("moved");
        for spec in [
            spec(empty.path()),
            spec(nothing.path()),
            spec(&renamed),
            json!({"mounts": []}),
        ] {
            let mut process = json!({"env": ["A=old"]});
            add_variables(&mut process, &spec);
            assert_eq!(process["env"], json!(["A=old"]));
        }
    }

    #[test]
    fn only_files_within_the_volume_are_read() {
        let volume = written("uid-1", "");
        let outside = tempfile::tempdir().expect("a directory");
        std::fs::write(outside.path().join(ENV), "export A=1\n").expect("written");
        std::fs::remove_file(volume.path().join("..data")).expect("removed");
        symlink(outside.path(), volume.path().join("..data")).expect("linked");
        assert_eq!(variables_in(volume.path()), []);
        read(volume.path(), UID, MAX_UID).expect_err("it leads out of the volume");
    }

    #[test]
    fn a_file_that_is_too_large_counts_as_empty() {
        let volume = written(&"u".repeat(MAX_UID + 1), "");
        assert_eq!(read(volume.path(), UID, MAX_UID).expect("read"), "");
        assert_eq!(
            read(volume.path(), UID, MAX_UID + 1).expect("read").len(),
            65
        );
    }

    #[test]
    fn files_of_a_secret_are_waited_for_too() {
        let claim = ClaimUid::new("uid-1").expect("a UID");
        let volume = written("uid-1", "");
        let data = volume.path().join("..data");
        assert!(is_delivered(volume.path(), &claim).expect("read"));
        std::fs::write(data.join(FILES), "written").expect("written");
        assert!(!is_delivered(volume.path(), &claim).expect("read"));
        std::fs::write(data.join(FILES_OF), "uid-2").expect("written");
        assert!(!is_delivered(volume.path(), &claim).expect("read"));
        std::fs::write(data.join(FILES_OF), "uid-1").expect("written");
        assert!(is_delivered(volume.path(), &claim).expect("read"));
    }

    #[test]
    fn the_files_are_waited_for() {
        let claim = ClaimUid::new("uid-1").expect("a UID");
        let volume = written("uid-1", "");
        wait_for(volume.path(), &claim).expect("they are there");
        let late = tempfile::tempdir().expect("a directory");
        let path = late.path().to_owned();
        let kubelet = std::thread::spawn(move || {
            let made = written("uid-1", "");
            std::fs::rename(made.path(), path.join("v")).expect("moved");
        });
        wait_for(&late.path().join("v"), &claim).expect("they come");
        kubelet.join().expect("it ended");
    }
}
