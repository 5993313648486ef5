use std::path::PathBuf;

use torpor_core::ids::{ImageId, PodUid, SandboxId};

use crate::config::Config;
use crate::{PauseMark, Records, SandboxState};

/// Makes records in a temporary directory, with one pod.
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
fn the_suspend_of_a_pod_is_noted_and_forgotten() {
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
fn a_sandbox_sleeps_since_the_pause_of_its_save_however_often_it_is_ended() {
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
        // The sandbox's processes have ended.
        let unpaused = records.forget_pause(&sandbox);
        unpaused.expect("removed");
        assert_eq!(records.asleep_since(&sandbox), Some(paused));
    }
    // The sandbox woke and was paused again. The result is the same without a record of the wake.
    let again = earlier(5);
    pause(again);
    let written = records.write_hibernated(&sandbox, &image(2));
    written.expect("written");
    assert_eq!(records.asleep_since(&sandbox), Some(again));
    // Without a recorded time the sleep began now.
    records.forget_pause(&sandbox).expect("removed");
    records.write_state(&sandbox, running).expect("written");
    let written = records.write_hibernated(&sandbox, &image(3));
    written.expect("written");
    assert!(records.asleep_since(&sandbox) > Some(again));
}

#[test]
fn records_that_only_root_could_read_are_handed_over_and_the_specs_are_not() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let (dir, records, sandbox) = one_pod();
    let (pod, container) = (
        records.pod_dir(&sandbox),
        dir.path().join("containers").join("c"),
    );
    std::fs::create_dir_all(&container).expect("made");
    let elsewhere = dir.path().join("elsewhere.json");
    std::fs::write(&elsewhere, "").expect("written");
    let report = dir.path().join("reports").join("pod-a.json");
    let link = dir.path().join("reports").join("pod-b.json");
    std::os::unix::fs::symlink(&elsewhere, link).expect("linked");
    let files = [
        pod.join("pod.json"),
        pod.join("lock"),
        container.join("container.json"),
        container.join("config.json"),
        report,
        elsewhere,
    ];
    let private = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("set");
    };
    for path in &files {
        std::fs::write(path, "").expect("written");
        private(path, 0o600);
    }
    for path in [&pod, &container] {
        private(path, 0o700);
    }
    records.hand_over().expect("handed over");
    let mode = |path: &std::path::PathBuf| {
        let found = std::fs::metadata(path).expect("there");
        found.mode() & 0o777
    };
    let modes: Vec<_> = files.iter().map(mode).collect();
    assert_eq!(modes, [0o644, 0o600, 0o644, 0o600, 0o644, 0o600]);
    assert_eq!([mode(&pod), mode(&container)], [0o750, 0o750]);
}
