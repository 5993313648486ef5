use std::process::{Command, Stdio};

use super::*;

/// Records in a directory of their own, with one pod.
pub(crate) fn one_pod() -> (tempfile::TempDir, Records, SandboxId) {
    let dir = tempfile::tempdir().expect("a directory");
    let records = Records::new(&Config {
        runsc: PathBuf::new(),
        runsc_digest: String::new(),
        state_dir: dir.path().into(),
        store_dir: PathBuf::new(),
        kubelet_root: PathBuf::new(),
        kubelet_port: 10250,
        platform: String::new(),
        expedite_wakes: false,
        wakes_at_once: 0,
        debug_log_dir: None,
    });
    let sandbox = SandboxId::try_from("a".repeat(64)).expect("an id");
    records.create_pod_dir(&sandbox).expect("a directory");
    (dir, records, sandbox)
}

#[test]
fn a_pod_is_held_open_by_its_pause_keeper_as_long_as_that_has_its_shim() {
    let (_dir, records, sandbox) = one_pod();
    let mut keeper = Command::new("cat")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("cat runs");
    let container = ContainerRecord {
        id: sandbox.clone().into(),
        sandbox: sandbox.clone(),
        role: Role::Sandbox,
        name: String::new(),
        terminal: false,
        cgroup: PathBuf::new(),
        spec_digest: Digest::of(b""),
        keeper_pid: keeper.id(),
        shim_pid: None,
        completed: None,
    };
    assert!(
        records.is_held_open(&sandbox).is_err(),
        "there is no record"
    );
    records.create_container_dir(&container.id).expect("made");
    let holds = |container: &ContainerRecord| {
        records.write_container(container).expect("written");
        records.is_held_open(&sandbox).expect("known")
    };
    assert!(holds(&container), "not started yet, or by an older version");
    // It was not this test's caller who made the keeper, as the shim makes both.
    records.note_shim(&container).expect("noted");
    let noted = records.container(&container.id).expect("read");
    assert_eq!(noted.shim_pid, None);
    let own = |shim_pid| ContainerRecord {
        shim_pid,
        ..container.clone()
    };
    assert!(holds(&own(Some(std::process::id()))));
    assert!(!holds(&own(Some(1))), "another parent than at its start");
    keeper.kill().expect("killed");
    keeper.wait().expect("reaped");
    assert!(!holds(&container));
}
