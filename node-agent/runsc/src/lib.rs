//! gVisor's runsc: calls of a running sandbox, and of runsc's commands.
//!
//! One pod is one gVisor sandbox. The pause container is the sandbox's root container, every other
//! container of the pod is a sub-container of it. This crate has mechanisms and no policy.
//! From the bottom up:
//!
//! | module | subject |
//! |---|---|
//! | [`process`] | processes of the host, as `/proc` shows them |
//! | [`programs`] | reading of programs into the page cache |
//! | [`state`] | runsc's state files, one for each container |
//! | [`sigstop`] | SIGSTOP and SIGCONT for the host's processes of a sandbox that dozes |
//! | [`control`] | the sandbox's control socket: pause, resume, checkpoint, wait, signal |
//! | [`inside`], [`left`] | reading of a sandbox' files, and the processes that exec left behind |
//! | [`spec`] | changes of an OCI spec before runsc reads it, and the spec's digest |
//! | [`root`] | the pause container's root file system |
//! | [`limits`] | the Pod's limits, as programs in the sandbox see them |
//! | [`exec`] | an OCI process as gVisor's arguments |
//! | [`held_open`] | liveness of a pod's keepers and shim |
//! | [`forward`] | connections that are forwarded into a sandbox |
//! | [`command`] | runsc's commands: create, start, restore, delete |
//! | [`probe`] | capabilities of this node's runsc; the node's fingerprint |
//! | [`pause`], [`resume`], [`save`] | pausing exactly once, resuming, saving memory in an image |
//! | [`kernel_tuning`] | settings of the kernel during a wake |
//! | [`wake_slots`] | the limit on concurrent restores |

pub mod command;
pub mod control;

pub mod exec;
pub mod forward;
pub mod held_open;
pub mod inside;

pub mod kernel_tuning;
pub mod left;
pub mod limits;
pub mod pause;
pub mod probe;
pub mod process;
pub mod programs;
pub mod resume;
pub mod root;
pub mod save;
pub mod sigstop;
pub mod spec;
pub mod state;
pub mod wake_slots;

#[cfg(test)]
mod testing {
    use std::path::Path;

    use torpor_core::ids::SandboxId;
    use torpor_records::Records;
    use torpor_records::config::Config;

    /// Returns the configuration of a node whose state is in this directory.
    pub(crate) fn on(state_dir: &Path) -> Config {
        let text = r#"{"runsc":"/r","runsc_digest":"blake3:00","state_dir":"","store_dir":"/i","kubelet_root":"/k"}"#;
        let config: Config = serde_json::from_str(text).expect("understood");
        Config {
            state_dir: state_dir.to_owned(),
            ..config
        }
    }

    /// Returns records in a new directory, with one pod.
    pub(crate) fn one_pod() -> (tempfile::TempDir, Records, SandboxId) {
        let dir = tempfile::tempdir().expect("a directory");
        let records = Records::new(&on(dir.path()));
        let sandbox = SandboxId::try_from("a".repeat(64)).expect("an id");
        records.create_pod_dir(&sandbox).expect("a directory");
        (dir, records, sandbox)
    }
}
