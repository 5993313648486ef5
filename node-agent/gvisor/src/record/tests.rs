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
        eviction_percent: None,
        platform: String::new(),
        expedite_wakes: false,
        begin_sandboxes: true,
        wakes_at_once: 0,
        revoked_runsc: Vec::new(),
        debug_log_dir: None,
    });
    let sandbox = SandboxId::try_from("a".repeat(64)).expect("an id");
    records.create_pod_dir(&sandbox).expect("a directory");
    (dir, records, sandbox)
}

#[test]
fn a_pod_is_held_open_by_its_pause_keeper_as_long_as_that_has_its_shim() {
    let (_dir, records, sandbox) = one_pod();
    let shim = |name: &str| {
        // It waits for the keeper that it has started, which tells its pid when it runs, and stands still.
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
        std::io::BufRead::read_line(&mut std::io::BufReader::new(answer), &mut line).expect("told");
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
        completed: None,
    };
    assert!(
        records.is_held_open(&sandbox).is_err(),
        "there is no record"
    );
    records
        .create_container_dir(&sandbox.clone().into())
        .expect("made");
    let holds = |keeper: u32| {
        records.write_container(&pause(keeper)).expect("written");
        records.is_held_open(&sandbox).expect("known")
    };
    let (mut own, keeper) = shim(sandbox.as_str());
    let (mut other, stranger) = shim("another");
    assert!(holds(keeper));
    assert!(!holds(stranger), "its parent is not the pod's shim");
    // A container beside it, whose keeper is gone: it counts unless it had ended before the image that the pod came from.
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
    // They end when what they have started has ended and they have been told.
    own.wait().expect("reaped");
    other.wait().expect("reaped");
    assert!(!holds(keeper), "the keeper has ended");
}

#[test]
fn that_a_pod_is_being_suspended_is_noted_and_forgotten() {
    let (_dir, records, _) = one_pod();
    let pod = PodUid::new("pod-a").expect("a uid");
    for suspends in [false, true, true, false, false] {
        records.note_suspends(&pod, suspends).expect("noted");
        assert_eq!(records.suspends(&pod), suspends);
    }
    assert_eq!(records.reported().expect("listed"), []);
    records.note_suspends(&pod, true).expect("noted");
    assert_eq!(
        records.reported().expect("listed"),
        std::slice::from_ref(&pod)
    );
    records.remove_report(&pod).expect("forgotten");
    assert!(!records.suspends(&pod));
}

#[test]
fn a_sandbox_sleeps_since_it_was_paused_to_be_saved_however_long_that_took_and_how_often_it_is_ended()
 {
    let (_dir, records, sandbox) = one_pod();
    let image = |number| ImageId::parse(&format!("pod-a.{number}")).expect("an id");
    let earlier = |seconds| {
        let now = std::time::SystemTime::now();
        now - std::time::Duration::from_secs(seconds)
    };
    let pause = |time| {
        let noted = records.note_pause(&sandbox, PauseMark::Paused, Some(time));
        noted.expect("written");
    };
    let running = &SandboxState::Running;
    records.write_state(&sandbox, running).expect("written");
    assert_eq!(records.asleep_since(&sandbox), None);
    let paused = earlier(60);
    pause(paused);
    assert_eq!(records.asleep_since(&sandbox), Some(paused));
    for _ in 0..2 {
        let written = records.write_hibernated(&sandbox, &image(1));
        written.expect("written");
        assert_eq!(records.asleep_since(&sandbox), Some(paused));
        // The processes are gone.
        let unpaused = records.forget_pause(&sandbox);
        unpaused.expect("removed");
        assert_eq!(records.asleep_since(&sandbox), Some(paused));
    }
    // It woke, whether that was noted or not, and was paused again.
    let again = earlier(5);
    pause(again);
    let written = records.write_hibernated(&sandbox, &image(2));
    written.expect("written");
    assert_eq!(records.asleep_since(&sandbox), Some(again));
    // Where nobody knows since when, it is since now.
    records.forget_pause(&sandbox).expect("removed");
    records.write_state(&sandbox, running).expect("written");
    let written = records.write_hibernated(&sandbox, &image(3));
    written.expect("written");
    assert!(records.asleep_since(&sandbox) > Some(again));
}
