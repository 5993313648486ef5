//! Liveness of a pod's shim and of its containers' keepers, by which the kubelet recognizes a
//! running pod.

use torpor_core::ids::SandboxId;
use torpor_records::{ContainerRecord, Error, Records};

use crate::process;
use torpor_messages::keeper::SOCKET;

/// Reports whether the shim and all keepers of the pod live. When one has died, the kubelet
/// recreates its container or sandbox as soon as it notices. A sandbox that was woken before that
/// would be lost.
pub fn is_held_open(records: &Records, sandbox: &SandboxId) -> Result<bool, Error> {
    let pause = records.container(&sandbox.clone().into())?;
    let containers = records.containers_of(sandbox)?;
    let mut keepers = containers.iter().filter(|one| one.completed.is_none());
    Ok(keeper_lives(records, &pause)
        && !has_lost_its_shim(&pause)
        && keepers.all(|one| keeper_lives(records, one)))
}

/// Reports whether the container's keeper runs. A process of another container may have its number,
/// and is not taken for it.
pub fn keeper_lives(records: &Records, container: &ContainerRecord) -> bool {
    let command = process::command_line(keeper(container));
    let names = |id: &str| command.split(' ').any(|word| word == id);
    match container.in_shim {
        false => names(container.id.as_str()),
        // A keeper in the shim removes its socket when it ends.
        true => {
            let socket = records.container_dir(&container.id).join(SOCKET);
            names(container.sandbox.as_str()) && socket.exists()
        }
    }
}

/// Reports whether the pod's shim has ended. A shim has the sandbox' id on its command line, and is
/// the parent of a keeper that is a process of its own.
pub fn has_lost_its_shim(container: &ContainerRecord) -> bool {
    let is_shim = |pid| process::command_line(pid).contains(container.sandbox.as_str());
    match container.in_shim {
        false => process::parent(keeper(container)).is_some_and(|parent| !is_shim(parent)),
        true => !is_shim(keeper(container)),
    }
}

fn keeper(container: &ContainerRecord) -> i32 {
    i32::try_from(container.keeper_pid).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::{Command, Stdio};

    use torpor_core::ids::ContainerId;
    use torpor_records::Role;
    use torpor_snapshots::Digest;

    use super::*;
    use crate::testing::one_pod;

    #[test]
    fn a_pod_is_held_open_while_its_pause_keeper_has_its_shim() {
        let (_dir, records, sandbox) = one_pod();
        let shim = |name: &str| {
            // The shim waits for the keeper that it starts. The keeper prints its pid and stops.
            let keeper = r#"sh -c 'echo $$; kill -STOP $$' "$KEEPER" & wait"#;
            let mut shim = Command::new("sh")
                .args(["-c", keeper, name])
                .env("KEEPER", sandbox.as_str())
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .expect("sh runs");
            let mut line = String::new();
            let answer = shim.stdout.take().expect("piped");
            std::io::BufRead::read_line(&mut std::io::BufReader::new(answer), &mut line)
                .expect("told");
            (shim, line.trim().parse().expect("a pid"))
        };
        let pause = |keeper_pid| ContainerRecord {
            id: sandbox.clone().into(),
            sandbox: sandbox.clone(),
            role: Role::Sandbox,
            name: String::new(),
            terminal: false,
            cgroup: PathBuf::new(),
            spec_digest: Digest::of(b""),
            keeper_pid,
            in_shim: false,
            completed: None,
        };
        assert!(
            is_held_open(&records, &sandbox).is_err(),
            "there is no record"
        );
        records
            .create_container_dir(&sandbox.clone().into())
            .expect("made");
        let holds = |keeper: u32| {
            records.write_container(&pause(keeper)).expect("written");
            is_held_open(&records, &sandbox).expect("known")
        };
        let (mut own, keeper) = shim(sandbox.as_str());
        let (mut other, stranger) = shim("another");
        assert!(holds(keeper));
        assert!(!holds(stranger), "its parent is not the pod's shim");
        // Another container, whose keeper is gone. It counts unless it ended before the pod's image
        // was saved.
        let id = ContainerId::try_from("c".repeat(64)).expect("an id");
        records.create_container_dir(&id).expect("made");
        for (completed, held) in [(None, false), (Some(0), true)] {
            let container = ContainerRecord {
                id: id.clone(),
                role: Role::Container,
                completed,
                ..pause(0)
            };
            records.write_container(&container).expect("written");
            assert_eq!(holds(keeper), held, "{completed:?}");
        }
        for keeper in [keeper, stranger] {
            let pid = rustix::process::Pid::from_raw(keeper.cast_signed()).expect("a process");
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("killed");
        }
        // The shims end after their keepers.
        own.wait().expect("reaped");
        other.wait().expect("reaped");
        assert!(!holds(keeper), "the keeper has ended");
    }
}
