use std::os::unix::fs::symlink;
use std::path::Path;

use nix::mount::MsFlags;
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};

use super::plan::{Bind, Descriptors, Plan, ServeArgs};
use super::root::containers;
use super::*;
use crate::root::keep_mounts;
use crate::tests::record as sandbox_record;

/// Returns runsc's record of a container (release-20260905.0), without the fields that this crate
/// does not read.
fn record() -> Value {
    let sandbox = sandbox_record();
    json!({
        "id": "c", "bundleDir": "/b", "status": "running", "goferPid": 8, "consoleSocket": "",
        "goferMountConfs": [{ "lower": 1, "upper": 2 }, { "lower": 1, "upper": 0 }, { "lower": 1, "upper": 0 }],
        "sandbox": sandbox["sandbox"],
        "spec": {
            "process": { "args": ["sh"], "cwd": "/", "oomScoreAdj": 1000 },
            "annotations": { "io.kubernetes.cri.container-type": "container" },
            "linux": {
                "namespaces": [{ "type": "pid" }, { "type": "network", "path": "/netns/a" }, { "type": "user" }],
                "uidMappings": [{ "containerID": 0, "hostID": 0, "size": 4294967295_u32 }],
                "gidMappings": [{ "containerID": 0, "hostID": 0, "size": 4294967295_u32 }],
            },
            // `/var/run` is a link to `/run`.
            "mounts": [
                { "destination": "/proc", "type": "proc", "source": "/b/proc" },
                { "destination": "/run/token", "type": "bind", "source": "/token", "options": ["rbind", "rprivate", "ro", "overlayfs_stale_read"] },
                { "destination": "/etc/hosts", "type": "none", "source": "/hosts" },
                { "destination": "/dev/shm", "type": "tmpfs", "source": "/shm" },
            ],
        },
    })
}

/// Returns the OCI spec of the container's bundle.
fn spec() -> Value {
    json!({
        "root": { "path": "/rootfs" },
        "mounts": [
            { "destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid"] },
            { "destination": "/var/run/token", "type": "bind", "source": "/token", "options": ["rbind", "rprivate", "ro"] },
            { "destination": "/etc/hosts", "type": "none", "source": "/hosts", "options": ["bind", "rw", "nodev"] },
            { "destination": "/dev/shm", "type": "tmpfs", "source": "/shm", "options": ["rw"] },
        ],
    })
}

/// A change of a record and a spec.
type Change = fn(&mut Value, &mut Value);

fn plan(record: &Value, spec: &Value) -> Option<Plan> {
    Plan::new(record, spec, "s")
}

fn args() -> ServeArgs {
    let plan = plan(&record(), &spec()).expect("known");
    plan.serve_args(vec!["--root=/r".to_owned()], Path::new("/b"), "c")
}

#[test]
fn the_plan_of_a_gofer_is_derived_from_runscs_record() {
    let plan = plan(&record(), &spec()).expect("known");
    assert_eq!(plan.file_systems(), 3);
    assert_eq!((plan.user, plan.oom_score), ((0, 0), Some(1000)));
    assert_eq!(plan.uid_map, "0 0 4294967295\n");
    let args = args();
    assert_eq!(args.root, Path::new("/rootfs"));
    assert!(args.read_only, "what is written goes to the file");
    assert_eq!(args.filestores, [Path::new("/rootfs")]);
    assert_eq!(args.filestore, ".gvisor.filestore.s");
    let binds: Vec<_> = args
        .binds
        .iter()
        .map(|bind| {
            (
                bind.source.to_str(),
                bind.destination.to_str(),
                bind.flags(),
                bind.propagation(),
            )
        })
        .collect();
    let (bind, rec) = (MsFlags::MS_BIND, MsFlags::MS_REC);
    let expected = [
        (
            Some("/token"),
            Some("/run/token"),
            bind | rec | MsFlags::MS_RDONLY,
            Some(MsFlags::MS_PRIVATE | rec),
        ),
        (
            Some("/hosts"),
            Some("/etc/hosts"),
            bind | MsFlags::MS_NODEV,
            None,
        ),
    ];
    assert_eq!(binds, expected);
}

/// Returns record and spec of a pause container that holds a volume on disk.
fn of_pause_container() -> (Value, Value) {
    let (mut record, mut spec) = (record(), spec());
    record["id"] = json!("s");
    record["spec"]["annotations"] = json!({
        "dev.gvisor.spec.mount.w.share": "pod", "dev.gvisor.spec.mount.w.source": "/volumes/w",
    });
    record["goferMountConfs"] = json!([{ "lower": 1, "upper": 0 }, { "lower": 0, "upper": 2 }]);
    spec["mounts"] = json!([
        { "destination": "/torpor-volumes/w", "type": "bind", "source": "/volumes/w", "options": ["rw"] },
    ]);
    record["spec"]["mounts"] = spec["mounts"].clone();
    (record, spec)
}

#[test]
fn a_volume_of_the_sandbox_is_in_a_file_and_no_gofer_serves_it() {
    let (mut record, spec) = of_pause_container();
    let args = plan(&record, &spec)
        .expect("known")
        .serve_args(Vec::new(), Path::new("/b"), "s");
    assert_eq!(args.filestores, [Path::new("/volumes/w")]);
    assert_eq!(args.mount_confs, "lisafs:none,none:self");
    assert!(args.binds.is_empty() && !args.read_only);
    // A first container may have no other gVisor annotation, and another container none at all.
    record["spec"]["annotations"]["dev.gvisor.spec.rootfs.overlay"] = json!("memory");
    assert_eq!(plan(&record, &spec), None);
    let (mut record, spec) = of_pause_container();
    record["id"] = json!("c");
    assert_eq!(plan(&record, &spec), None);
}

#[test]
fn the_last_execution_of_runsc_has_the_arguments_of_runscs_own() {
    let descriptors = Descriptors {
        log: 3,
        spec: 4,
        mounts: 5,
        rpc: 6,
        connections: vec![7, 8, 9],
        proc_sync: 10,
    };
    let words = "--root=/r --log-fd=3 gofer --apply-caps=false --setup-root=false --bundle=/b \
                 --gofer-mount-confs=lisafs:self,lisafs:none,lisafs:none --io-fds=7,8,9 --mounts-fd=5 --rpc-fd=6 --spec-fd=4 \
                 --proc-mount-sync-fd=10 c";
    assert_eq!(args().to_args(&descriptors).join(" "), words);
}

#[test]
fn a_root_is_read_only_under_a_file_or_by_its_spec() {
    let served = |upper: u64, read_only: bool| {
        let (mut record, mut spec) = (record(), spec());
        record["goferMountConfs"][0]["upper"] = json!(upper);
        spec["root"]["readonly"] = json!(read_only);
        let plan = plan(&record, &spec).expect("known");
        let args = plan.serve_args(Vec::new(), Path::new("/b"), "c");
        let confs = args
            .mount_confs
            .split(',')
            .next()
            .unwrap_or_default()
            .to_owned();
        (args.read_only, !args.filestores.is_empty(), confs)
    };
    assert_eq!(served(2, false), (true, true, "lisafs:self".to_owned()));
    assert_eq!(served(0, true), (true, false, "lisafs:none".to_owned()));
    assert_eq!(served(0, false), (false, false, "lisafs:none".to_owned()));
}

#[test]
fn a_record_with_an_unknown_setting_is_left_to_runsc() {
    let known = |of: Change| {
        let (mut record, mut spec) = (record(), spec());
        of(&mut record, &mut spec);
        plan(&record, &spec).is_some()
    };
    assert!(known(|_, _| {}));
    let unknown: [(&str, Change); 28] = [
        ("another release", |record, _| {
            record["sandbox"]["metricMetadata"]["version"] = json!("release-20260801.0")
        }),
        ("another platform", |record, _| {
            record["sandbox"]["metricMetadata"]["platform"] = json!("kvm")
        }),
        ("no files of its own", |record, _| {
            record["sandbox"]["metricMetadata"]["fsmode"] = json!("goferfs")
        }),
        ("a terminal", |record, _| {
            record["spec"]["process"]["terminal"] = json!(true)
        }),
        ("a console", |record, _| {
            record["consoleSocket"] = json!("/console")
        }),
        ("hooks", |record, _| {
            record["spec"]["hooks"] = json!({ "prestart": [{ "path": "/bin/true" }] })
        }),
        ("devices", |record, _| {
            record["spec"]["linux"]["devices"] = json!([{ "path": "/dev/fuse" }])
        }),
        ("a word to gVisor", |record, _| {
            record["spec"]["annotations"]["dev.gvisor.flag.debug"] = json!("true")
        }),
        ("shared mounts", |record, _| {
            record["spec"]["linux"]["rootfsPropagation"] = json!("rshared")
        }),
        ("users of its pod's", |record, _| {
            record["spec"]["linux"]["namespaces"] = json!([{ "type": "user", "path": "/u" }])
        }),
        ("no users", |record, _| {
            record["spec"]["linux"]["uidMappings"] = json!([])
        }),
        ("memory over its root", |record, _| {
            record["goferMountConfs"][0]["upper"] = json!(1)
        }),
        ("a root of a certain size", |record, _| {
            record["goferMountConfs"][0]["size"] = json!("1g")
        }),
        ("a file over a mount", |record, _| {
            record["goferMountConfs"][1]["upper"] = json!(2)
        }),
        ("a root that is an image", |record, _| {
            record["goferMountConfs"][0]["lower"] = json!(2)
        }),
        ("other mounts", |_, spec| {
            spec["mounts"][1]["type"] = json!("erofs")
        }),
        ("more mounts", |record, _| {
            record["goferMountConfs"] = json!([{ "lower": 1, "upper": 0 }])
        }),
        ("users of a mount's", |_, spec| {
            spec["mounts"][1]["uidMappings"] = json!([{ "containerID": 0 }])
        }),
        ("an unknown option", |_, spec| {
            spec["mounts"][1]["options"] = json!(["rbind", "rro"])
        }),
        ("a shared mount", |_, spec| {
            spec["mounts"][1]["options"] = json!(["rbind", "rshared"])
        }),
        ("both", |_, spec| {
            spec["mounts"][1]["options"] = json!(["rbind", "ro", "rw"])
        }),
        ("a source in the bundle", |_, spec| {
            spec["mounts"][1]["source"] = json!("token")
        }),
        ("another source", |record, _| {
            record["spec"]["mounts"][1]["source"] = json!("/other")
        }),
        ("a place above another", |record, _| {
            record["spec"]["mounts"][1]["destination"] = json!("/run/../token")
        }),
        ("a place nowhere", |record, _| {
            record["spec"]["mounts"][1]["destination"] = json!("token")
        }),
        ("more mounts than were", |_, spec| {
            spec["mounts"]
                .as_array_mut()
                .expect("mounts")
                .push(json!({ "type": "proc" }))
        }),
        ("more than fits into a message", |record, _| {
            record["spec"]["mounts"][1]["destination"] = json!("/x".repeat(20_000))
        }),
        ("a root in the bundle", |_, spec| {
            spec["root"]["path"] = json!("rootfs")
        }),
    ];
    for (what, change) in unknown {
        assert!(!known(change), "{what}");
    }
    assert!(known(
        |record, _| record["spec"]["linux"]["rootfsPropagation"] = json!("rslave")
    ));
}

#[test]
fn a_container_with_too_many_mounts_is_left_to_runsc() {
    let of = |count: usize| {
        let (mut record, mut spec) = (record(), spec());
        record["goferMountConfs"] = json!(vec![json!({ "lower": 1, "upper": 0 }); count + 1]);
        let mount = json!({ "destination": "/m", "type": "bind", "source": "/m" });
        spec["mounts"] = json!(vec![mount; count]);
        record["spec"]["mounts"] = spec["mounts"].clone();
        plan(&record, &spec).is_some()
    };
    assert!(of(0) && of(99) && !of(100));
}

/// Runs a test with a container's root and a directory of the host beside it, in a mount namespace
/// of the test's thread.
fn with_root(test: impl FnOnce(&Path) + Send + 'static) {
    let thread = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNS).expect("a mount namespace");
        keep_mounts().expect("its own");
        let dir = tempfile::tempdir().expect("a directory");
        for name in ["root/etc", "host", "place", "root/inside"] {
            std::fs::create_dir_all(dir.path().join(name)).expect("made");
        }
        for (name, text) in [
            ("token", "token"),
            ("host/file", "host's"),
            ("root/inside/file", "image's"),
        ] {
            std::fs::write(dir.path().join(name), text).expect("written");
        }
        test(dir.path());
        let place = dir.path().join("place");
        unmount(&place);
    });
    thread.join().expect("it passes");
}

/// Makes the container's root at `place`, with the host's token mounted at `places`.
fn serve(dir: &Path, places: &[(&str, &[&str])]) -> crate::steps::Step<()> {
    let binds = places.iter().map(|(destination, options)| {
        let mount = json!({
            "destination": destination, "type": "bind", "source": dir.join("token"), "options": options,
        });
        Bind::new(&mount, &mount).expect("known")
    });
    let args = ServeArgs {
        root: dir.join("root"),
        read_only: true,
        binds: binds.collect(),
        ..args()
    };
    containers(&args, &dir.join("place"))
}

fn unmount(place: &Path) {
    nix::mount::umount2(place, nix::mount::MntFlags::MNT_DETACH).expect("unmounted");
}

#[test]
fn no_link_of_the_container_leads_a_mount_anywhere() {
    with_root(|dir| {
        let (root, host, place) = (dir.join("root"), dir.join("host"), dir.join("place"));
        // From the host's root each link leads to an existing directory.
        for (name, to) in [
            ("absolute", host.as_path()),
            ("above", Path::new("../host")),
            ("beside", Path::new("inside")),
            ("root", Path::new("/")),
            ("process", Path::new("/proc/self/root")),
        ] {
            symlink(to, root.join(name)).expect("a link");
        }
        symlink(host.join("file"), root.join("etc/file")).expect("a link");
        for path in [
            "/absolute/file",
            "/above/file",
            "/beside/file",
            "/root/inside/file",
            "/process/file",
            "/etc/file",
        ] {
            let error = serve(dir, &[(path, &["rbind"])]).expect_err("it leads somewhere");
            assert_eq!(
                error.1.raw_os_error(),
                Some(libc::ELOOP),
                "{path}: {error:?}"
            );
            unmount(&place);
        }
        // No mount point is made where none exists.
        let error = serve(dir, &[("/inside/other", &["rbind"])]).expect_err("it is not there");
        assert_eq!(error.1.kind(), ErrorKind::NotFound, "{error:?}");
        unmount(&place);
        let read = |path: &Path| std::fs::read_to_string(path).expect("read");
        serve(dir, &[("/inside/file", &["rbind", "rprivate"])]).expect("served");
        assert_eq!(read(&place.join("inside/file")), "token");
        assert_eq!(read(&root.join("inside/file")), "image's");
        assert_eq!(read(&host.join("file")), "host's");
    });
}

#[test]
fn a_mount_over_another_is_restricted_by_its_own_options() {
    with_root(|dir| {
        let file = dir.join("place/inside/file");
        let (open, closed): (&[&str], &[&str]) = (&["rbind", "rw"], &["rbind", "ro"]);
        for (below, above) in [(open, closed), (closed, open)] {
            let places = [("/inside/file", below), ("/inside/file", above)];
            serve(dir, &places).expect("served");
            for options in [above, below] {
                let written = std::fs::write(&file, "token").is_ok();
                assert_eq!(written, options == open, "{options:?}");
                unmount(&file);
            }
            unmount(&dir.join("place"));
        }
        serve(dir, &[]).expect("served");
    });
}

#[test]
fn a_served_mount_is_writable_only_where_the_spec_allows_it() {
    with_root(|dir| {
        let (place, file) = (dir.join("place"), dir.join("place/inside/file"));
        for (options, is_written) in [(["rbind", "rw"], true), (["rbind", "ro"], false)] {
            serve(dir, &[("/inside/file", &options)]).expect("served");
            let root =
                std::fs::write(place.join("etc/new"), "").expect_err("the root is read-only");
            assert_eq!(root.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
            assert_eq!(
                std::fs::write(&file, "token").is_ok(),
                is_written,
                "{options:?}"
            );
            let flags = rustix::fs::statvfs(&file).expect("it is there").f_flag;
            assert!(
                flags.contains(rustix::fs::StatVfsMountFlags::NOSUID),
                "{flags:?}"
            );
            unmount(&place);
        }
        serve(dir, &[]).expect("served");
    });
}
