use super::*;

fn sandbox() -> Spec {
    Spec(json!({
        "root": { "path": "rootfs", "readonly": true },
        "process": { "args": ["/pause"], "cwd": "/" },
        "annotations": {
            CRI_CONTAINER_TYPE: "sandbox",
            CRI_SANDBOX_ID: "s1",
            "dev.gvisor.flag.debug": "true",
            "torpor.dev/restore-image": "u.1",
        },
        "mounts": [{ "destination": "/dev/shm", "type": "bind", "source": "/run/s1/shm" }],
        "linux": {
            "cgroupsPath": "/kubepods/pod1/s1",
            "namespaces": [{ "type": "pid" }, { "type": "network", "path": "/run/netns/cni-1" }],
        },
        "unknownToUs": { "kept": 1 },
    }))
}

fn container() -> Spec {
    Spec(json!({
        "root": { "path": "/rootfs/c" },
        "process": { "args": ["python3"], "cwd": "/", "env": ["A=1"], "terminal": true },
        "hostname": "one",
        "annotations": {
            CRI_CONTAINER_TYPE: "container", CRI_SANDBOX_ID: "s1", CRI_CONTAINER_NAME: "main",
        },
        "mounts": [
            { "destination": "/disk", "type": "bind", "source": "/pods/u/disk", "options": ["rw"] },
            { "destination": "/mem", "type": "bind", "source": "/pods/u/mem",
              "options": ["rbind", "rprivate", "rw"] },
            { "destination": "/dev/shm", "type": "bind", "source": "/run/s1/shm" },
            { "destination": "/pvc", "type": "bind", "source": "/pods/u/pvc", "options": ["rw"] },
        ],
    }))
}

fn volumes() -> Vec<SandboxVolume> {
    vec![
        SandboxVolume {
            name: "disk".into(),
            source: "/pods/u/disk".into(),
            memory: false,
            directory: Some(VolumeDirectory {
                mode: 0o2777,
                uid: 0,
                gid: 3003,
                size: None,
            }),
        },
        SandboxVolume {
            name: "mem".into(),
            source: "/pods/u/mem".into(),
            memory: true,
            directory: Some(VolumeDirectory {
                mode: 0o777,
                uid: 7,
                gid: 0,
                size: Some(8 << 20),
            }),
        },
        shm(shm_source(&sandbox()).expect("it has one")),
    ]
}

/// Returns the volume as the version of 2026-11-26 has recorded it.
pub(crate) fn shm(source: PathBuf) -> SandboxVolume {
    SandboxVolume {
        name: SHM_HINT.to_owned(),
        source,
        memory: true,
        directory: None,
    }
}

#[test]
fn a_volume_has_the_owner_the_permissions_and_the_size_of_its_directory() {
    let spec = rewrite(sandbox(), Path::new("/b"), &volumes()).expect("rewritten");
    for (name, options) in [
        ("disk", "rw,mode=2777,uid=0,gid=3003"),
        ("mem", "rw,mode=0777,uid=7,gid=0,size=8388608"),
        ("devshm", "rw"),
    ] {
        let key = format!("dev.gvisor.spec.mount.{name}.options");
        assert_eq!(spec.annotation(&key), Some(options), "{name}");
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o2775);
    std::fs::set_permissions(dir.path(), mode).expect("set");
    let read = volume_directory(dir.path(), None).expect("read");
    assert_eq!((read.mode, read.size), (0o2775, None));
}

#[test]
fn annotations_that_steer_gvisor_do_not_get_through() {
    let spec = rewrite(sandbox(), Path::new("/b"), &volumes()).expect("rewritten");
    assert_eq!(spec.annotation("dev.gvisor.flag.debug"), None);
    assert_eq!(spec.annotation("torpor.dev/restore-image"), Some("u.1"));
}

#[test]
fn empty_dirs_and_shm_are_hinted_on_the_sandbox_only() {
    let spec = rewrite(sandbox(), Path::new("/b"), &volumes()).expect("rewritten");
    for name in ["disk", "mem", "devshm"] {
        let key = format!("dev.gvisor.spec.mount.{name}.share");
        assert_eq!(spec.annotation(&key), Some("pod"), "{name}");
    }
    let spec = rewrite(container(), Path::new("/b"), &volumes()).expect("rewritten");
    assert_eq!(spec.annotation("dev.gvisor.spec.mount.disk.share"), None);
}

#[test]
fn a_part_of_an_empty_dir_is_refused_by_name() {
    let volume = |source: &str| SandboxVolume {
        name: "work".into(),
        source: source.into(),
        memory: false,
        directory: None,
    };
    let volumes = [volume("/k/pods/u/volumes/kubernetes.io~empty-dir/work")];
    let mounting = |source: &str| {
        let mut spec = container();
        spec.0["mounts"] = json!([{ "destination": "/conf", "type": "bind", "source": source }]);
        rewrite(spec, Path::new("/b"), &volumes)
    };
    let error = mounting("/k/pods/u/volume-subpaths/work/main/0").expect_err("refused");
    let words = error.to_string();
    assert!(
        words.contains("\"work\"") && words.contains("/conf"),
        "{words}"
    );
    for other in [
        "/k/pods/u/volume-subpaths/workshop/main/0",
        "/k/pods/u/volumes/kubernetes.io~empty-dir/work",
    ] {
        assert!(mounting(other).is_ok(), "{other}");
    }
}

#[test]
fn runsc_gets_no_cgroup_path() {
    let spec = rewrite(sandbox(), Path::new("/b"), &[]).expect("rewritten");
    assert_eq!(
        spec.cgroups_path(),
        Err(Error::Missing("linux.cgroupsPath"))
    );
}

#[test]
fn a_container_has_the_swap_limit_that_the_kubelet_set() {
    assert_eq!(sandbox().swap_limit(), None);
    let mut spec = container();
    spec.0["linux"] = json!({ "resources": { "unified": { "memory.swap.max": "1048576" } } });
    assert_eq!(spec.swap_limit(), Some("1048576"));
}

#[test]
fn the_pause_container_mounts_every_empty_dir_first() {
    let spec = rewrite(sandbox(), Path::new("/b"), &volumes()).expect("rewritten");
    let destinations: Vec<&str> = spec
        .mounts()
        .filter_map(|mount| mount.get("destination")?.as_str())
        .collect();
    assert_eq!(
        destinations,
        ["/dev/shm", "/torpor-volumes/disk", "/torpor-volumes/mem"]
    );
}

#[test]
fn a_volume_on_disk_is_a_bind_mount_of_the_pause_container_only() {
    let spec = rewrite(sandbox(), Path::new("/b"), &volumes()).expect("rewritten");
    let types: Vec<&str> = spec
        .mounts()
        .filter_map(|mount| mount.get("type")?.as_str())
        .collect();
    assert_eq!(types, ["tmpfs", "bind", "tmpfs"], "shm, disk, mem");
}

#[test]
fn volumes_are_tmpfs_to_the_containers_and_nothing_else_is() {
    let spec = rewrite(container(), Path::new("/b"), &volumes()).expect("rewritten");
    let types: Vec<(&str, &str)> = spec
        .mounts()
        .filter_map(|mount| {
            Some((
                mount.get("destination")?.as_str()?,
                mount.get("type")?.as_str()?,
            ))
        })
        .collect();
    let expected = [
        ("/disk", "tmpfs"),
        ("/mem", "tmpfs"),
        ("/dev/shm", "tmpfs"),
        ("/pvc", "bind"),
    ];
    assert_eq!(types, expected);
    assert_eq!(spec.0.pointer("/mounts/1/options"), Some(&json!(["rw"])));
}

#[test]
fn a_relative_root_is_taken_from_the_bundle_and_unknown_fields_survive() {
    let spec = rewrite(sandbox(), Path::new("/bundle"), &[]).expect("rewritten");
    assert_eq!(spec.0.pointer("/root/path"), Some(&json!("/bundle/rootfs")));
    assert_eq!(spec.0.pointer("/unknownToUs/kept"), Some(&json!(1)));
    assert_eq!(spec.network_namespace(), Some("/run/netns/cni-1".into()));
}

#[test]
fn the_digest_ignores_differences_between_pods_of_one_template() {
    let one = container();
    let mut other = container();
    other.0["hostname"] = json!("two");
    other.0["process"]["env"] = json!(["A=2", "B=3"]);
    other.0["mounts"][0]["source"] = json!("/pods/other/disk");
    assert_eq!(digest(&one), digest(&other));

    for (pointer, value) in [
        ("/process/args", json!(["python3", "-i"])),
        ("/process/cwd", json!("/tmp")),
        ("/process/terminal", json!(false)),
        ("/mounts/0/destination", json!("/elsewhere")),
        (
            "/mounts/0/source",
            json!("/pods/u/volumes/kubernetes.io~empty-dir/disk"),
        ),
    ] {
        let mut changed = container();
        *changed.0.pointer_mut(pointer).expect("there") = value;
        assert_ne!(digest(&one), digest(&changed), "{pointer}");
    }
}

#[test]
fn the_digest_of_a_container_is_the_same_before_and_after_the_rewrite() {
    let rewritten = rewrite(container(), Path::new("/b"), &volumes()).expect("rewritten");
    assert_eq!(digest(&container()), digest(&rewritten));
}

#[test]
fn a_spec_that_no_kubelet_made_is_refused_by_name() {
    let error = Spec(json!({ "root": { "path": "r" } }))
        .role()
        .expect_err("refused");
    assert_eq!(error, Error::NotCri(CRI_CONTAINER_TYPE));
}

#[test]
fn an_image_with_raw_sockets_is_no_image_of_a_container_without() {
    let mut adds = container();
    adds.0["annotations"][NET_RAW_CONTAINERS] = json!("main");
    let mut other = container();
    other.0["annotations"][NET_RAW_CONTAINERS] = json!("other");
    assert_ne!(digest(&adds), digest(&container()));
    assert_eq!(digest(&other), digest(&container()));
}

#[test]
fn raw_sockets_are_left_to_the_containers_whose_pod_adds_them() {
    let rewritten = |container: Spec, containers: Option<&str>| {
        let mut spec = container;
        let sets = ["bounding", "effective", "permitted"];
        let names = json!(["CAP_CHOWN", "CAP_NET_RAW", "CAP_KILL"]);
        spec.0["process"]["capabilities"] =
            sets.map(|set| (set, names.clone())).into_iter().collect();
        if let Some(containers) = containers {
            spec.0["annotations"][NET_RAW_CONTAINERS] = json!(containers);
        }
        let after = rewrite(spec, Path::new("/b"), &[]).expect("rewritten");
        sets.map(|set| after.0["process"]["capabilities"][set].clone())
    };
    let without = [(); 3].map(|()| json!(["CAP_CHOWN", "CAP_KILL"]));
    let with = [(); 3].map(|()| json!(["CAP_CHOWN", "CAP_NET_RAW", "CAP_KILL"]));
    assert_eq!(rewritten(container(), None), without);
    assert_eq!(rewritten(container(), Some("other,mainly")), without);
    assert_eq!(rewritten(container(), Some("other,main")), with);
    assert_eq!(
        rewritten(sandbox(), Some("main")),
        without,
        "the pause container"
    );
}
