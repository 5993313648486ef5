//! containerd-shim-torpor-v1: containerd's shim for pods of the RuntimeClass `torpor`, one process
//! for each pod.
//!
//! containerd starts it with `-namespace … -id … start` and the like; the process that serves a pod
//! then runs until the pod is removed. It holds the streams, terminals and exec'd processes of the
//! pod's containers, and runs their keepers as threads. Longer work on the sandbox is done by
//! commands, which are children of the shim: the same program with the name of a command as its
//! first argument.

use std::io::Write;
use std::process::ExitCode;

use containerd_shim::protos::protobuf::Message;
use containerd_shim::protos::types::introspection::RuntimeInfo;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

mod agent;
mod allocator;
mod args;
mod commands;
mod end_signal;
mod keeper;
mod log;
mod rootfs;
mod service;
mod task;

/// Name of the runtime in containerd's configuration.
const RUNTIME: &str = "io.containerd.torpor.v1";
/// Exit code of a killed process, also of one whose end cannot be observed.
const KILLED: u8 = 137;

/// Answers containerd 2's question for the runtime's name and abilities, which the library does not
/// know.
fn print_info() -> std::io::Result<()> {
    let info = RuntimeInfo {
        name: RUNTIME.to_owned(),
        ..RuntimeInfo::default()
    };
    let bytes = info.write_to_bytes().map_err(std::io::Error::other)?;
    std::io::stdout().write_all(&bytes)
}

/// Allows this process as many descriptors as the system does: it holds those of all containers and
/// exec'd processes of its pod. systemd starts containerd with a low soft limit.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // With the old limit the pod has room for fewer processes.
    let _ = setrlimit(Resource::Nofile, raised);
}

fn main() -> ExitCode {
    // containerd's arguments begin with a flag of one hyphen.
    let is_command = std::env::args_os().nth(1).is_some_and(|first| {
        let first = first.as_encoded_bytes();
        !first.starts_with(b"-") || first.starts_with(b"--")
    });
    if is_command {
        return commands::run();
    }
    if std::env::args_os().any(|argument| argument == "-info") {
        return match print_info() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{RUNTIME}: cannot print information: {error}");
                ExitCode::FAILURE
            }
        };
    }
    // Before the library starts its first thread.
    allocator::use_one_arena();
    raise_descriptor_limit();
    let config = containerd_shim::Config {
        // The messages of all parts of the shim go to containerd's log by `log::begin`.
        no_setup_logger: true,
        ..containerd_shim::Config::default()
    };
    containerd_shim::run::<service::Service>(RUNTIME, Some(config));
    ExitCode::SUCCESS
}
