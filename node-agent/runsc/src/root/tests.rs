use std::path::Path;

use super::*;
use crate::spec::tests::shm;
use crate::spec::{rewrite, shm_source};
use torpor_records::SandboxVolume;

fn root() -> Root {
    Root {
        path: "/opt/torpor/bin/pause-0.erofs".into(),
        digest: Digest::of(b"an image"),
    }
}

/// Returns a pause container's spec as containerd's CRI makes it
/// (`internal/cri/server/podsandbox/sandbox_run_linux.go`), with `more` mounts.
fn pause(more: &[Value]) -> Spec {
    let mounts = [
        json!({ "destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid"] }),
        json!({ "destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"] }),
        json!({ "destination": "/dev/shm", "type": "bind", "source": "/run/s1/shm", "options": ["rbind", "ro"] }),
        json!({ "destination": "/etc/resolv.conf", "type": "bind", "source": "/var/lib/c/s1/resolv.conf", "options": ["rbind", "ro"] }),
    ];
    let mounts: Vec<&Value> = mounts.iter().chain(more).collect();
    Spec(json!({
        "root": { "path": "rootfs", "readonly": true },
        "process": { "args": ["/pause-of-the-operator"], "cwd": "/home", "user": { "uid": 65535 } },
        "annotations": { crate::spec::CRI_CONTAINER_TYPE: "sandbox" },
        "mounts": mounts,
    }))
}

fn rewritten(spec: Spec, empty_dirs: Vec<SandboxVolume>) -> Spec {
    let shm = shm_source(&spec).map(shm);
    let volumes: Vec<_> = empty_dirs.into_iter().chain(shm).collect();
    rewrite(spec, Path::new("/b"), &volumes).expect("rewritten")
}

#[test]
fn a_pause_container_needs_no_file_of_the_host() {
    let spec = root()
        .under(&rewritten(pause(&[]), Vec::new()))
        .expect("served");
    assert_eq!(spec.0["process"]["args"], json!(["/pause"]));
    assert_eq!(spec.0["process"]["user"], json!({ "uid": 65535 }));
    let source = spec.annotation("dev.gvisor.spec.rootfs.source");
    assert_eq!(source, Some("/opt/torpor/bin/pause-0.erofs"));
    let destinations: Vec<&str> = spec.0["mounts"]
        .as_array()
        .expect("mounts")
        .iter()
        .map(destination)
        .collect();
    assert_eq!(destinations, ["/proc", "/dev", "/dev/shm"]);
}

#[test]
fn a_mount_that_only_a_gofer_can_serve_keeps_the_gofer() {
    let empty_dir = |memory| SandboxVolume {
        name: "work".into(),
        source: "/pods/u/work".into(),
        memory,
        directory: None,
    };
    for memory in [false, true] {
        let spec = rewritten(pause(&[]), vec![empty_dir(memory)]);
        assert_eq!(root().under(&spec), None, "an emptyDir, {memory}");
    }
    for mount in [
        json!({ "destination": "/dev/termination-log", "type": "bind", "source": "/pods/u/log" }),
        json!({ "destination": "/proc/x", "source": "/pods/u/log", "options": ["ro", "rbind"] }),
        json!({ "destination": "/opt/x", "type": "tmpfs", "source": "tmpfs" }),
        json!({ "type": "tmpfs" }),
    ] {
        let spec = rewritten(pause(std::slice::from_ref(&mount)), Vec::new());
        assert_eq!(root().under(&spec), None, "{mount}");
    }
}

#[test]
fn the_digest_of_a_root_differs_from_another_root_and_from_no_root() {
    let spec = rewritten(pause(&[]), Vec::new());
    let under = root().under(&spec).expect("served");
    let other = Root {
        digest: Digest::of(b"another image"),
        ..root()
    };
    let moved = Root {
        path: "/elsewhere/pause-0.erofs".into(),
        ..root()
    };
    let own = root().digest(&under);
    assert_ne!(own, crate::spec::digest(&spec));
    assert_ne!(own, other.digest(&under));
    // gVisor would refuse the image because of its annotation.
    assert_ne!(own, moved.digest(&moved.under(&spec).expect("served")));
    // The operator's pause image may change: the digest does not depend on it.
    let mut newer = pause(&[]);
    newer.0["process"]["args"] = json!(["/pause", "-v"]);
    let newer = rewritten(newer, Vec::new());
    assert_eq!(own, root().digest(&root().under(&newer).expect("served")));
}

#[test]
fn a_sandbox_is_restored_with_the_root_that_it_was_saved_with() {
    let spec = rewritten(pause(&[]), Vec::new());
    let (under, digest) = root().serve(&spec, None).expect("a new one");
    assert_eq!(Some(under), root().under(&spec));
    assert!(root().serve(&spec, Some(digest)).is_some());
    // Saved by a version without a root of its own, or with an emptyDir mounted in the pause
    // container.
    let of_gofer = crate::spec::digest(&spec);
    assert_eq!(root().serve(&spec, Some(of_gofer)), None);
}

/// A saved sandbox is restored only with the root that it was saved with. If the digest changes,
/// the previous root must still be available.
#[test]
#[cfg(target_arch = "x86_64")]
fn the_root_image_keeps_the_digest_that_saved_sandboxes_need() {
    let image = image().expect("there is one");
    assert_eq!(file_name(&image), "pause-893cb5152a91.erofs");
    assert!(is_file_name(&file_name(&image)));
    for other in [
        "pause-0.erofs",
        "pause-00000000000g.erofs",
        "runsc-000000000000",
    ] {
        assert!(!is_file_name(other), "{other}");
    }
}

#[test]
fn the_root_image_is_used_where_it_is_installed() {
    let dir = tempfile::tempdir().expect("a directory");
    let config = Config {
        runsc: dir.path().join("runsc-1"),
        ..crate::testing::on(dir.path())
    };
    assert_eq!(Root::installed(&config), None);
    let Some(image) = image() else { return };
    std::fs::write(dir.path().join(file_name(&image)), &image).expect("written");
    let root = Root::installed(&config).expect("it is there");
    assert_eq!(root.digest, Digest::of(&image));
}
