use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tempfile::TempDir;

use super::*;
use crate::args::{ContainerdRestart, RunscArgs};

/// Paths of the host's own files.
const MAIN: &str = "etc/containerd/config.toml";
const PIDFILE: &str = "run/containerd.pid";

const RUNSC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/runsc-released");
const NEW_RUNSC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/runsc-of-july");

/// A host: a directory as its root, a payload, and a containerd that a supervisor starts again.
struct Host {
    dir: TempDir,
    stop: Arc<AtomicBool>,
    starts: Arc<AtomicUsize>,
    supervisor: Option<JoinHandle<()>>,
    _socket: UnixListener,
}

impl Host {
    fn new(main: &str) -> Self {
        let dir = tempfile::tempdir().expect("directory");
        let root = dir.path().join("root");
        for made in ["etc/containerd", "run/containerd", "opt", "var/lib"] {
            fs::create_dir_all(root.join(made)).expect("directory");
        }
        fs::write(root.join(MAIN), main).expect("main file");
        fs::create_dir(dir.path().join("payload")).expect("directory");
        // The installer recognizes containerd by the process's name.
        fs::copy("/bin/sleep", dir.path().join("containerd")).expect("sleep");
        let _socket =
            UnixListener::bind(root.join("run/containerd/containerd.sock")).expect("socket");
        let host = Self {
            dir,
            stop: Arc::default(),
            starts: Arc::default(),
            supervisor: None,
            _socket,
        };
        host.ship_runsc(RUNSC);
        host.ship(SHIM, "shim 1");
        host.ship(PROGRAM, "helper 1");
        host
    }

    /// Starts containerd and keeps it running.
    fn supervised(mut self) -> Self {
        let (stop, starts) = (self.stop.clone(), self.starts.clone());
        let (program, pidfile) = (
            self.dir.path().join("containerd"),
            self.root().join(PIDFILE),
        );
        self.supervisor = Some(std::thread::spawn(move || {
            while !stop.load(Ordering::SeqCst) {
                let mut child = Command::new(&program)
                    .arg("600")
                    .spawn()
                    .expect("containerd");
                fs::write(&pidfile, format!("{}\n", child.id())).expect("pidfile");
                starts.fetch_add(1, Ordering::SeqCst);
                wait_or_stop(&mut child, &stop);
                fs::remove_file(&pidfile).expect("pidfile");
            }
        }));
        while self.starts() == 0 {
            std::thread::yield_now();
        }
        self
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn starts(&self) -> usize {
        self.starts.load(Ordering::SeqCst)
    }

    fn ship(&self, name: &str, content: &str) {
        fs::write(self.dir.path().join("payload").join(name), content).expect("payload");
    }

    /// Puts a link to the program into the payload. A copy could still be open for writing in a
    /// child process of another test, and its execution would fail (ETXTBSY).
    fn ship_runsc(&self, program: &str) {
        let place = self.dir.path().join("payload/runsc");
        let _ = fs::remove_file(&place);
        symlink(program, place).expect("payload");
    }

    fn containerd(&self) -> ContainerdArgs {
        ContainerdArgs {
            containerd_config: Path::new("/").join(MAIN),
            containerd_conf_dir: "/etc/containerd/conf.d".into(),
            containerd_restart: ContainerdRestart::Pidfile(Path::new("/").join(PIDFILE)),
            containerd_socket: "/run/containerd/containerd.sock".into(),
            containerd_restart_timeout: Duration::from_secs(20),
            runtime_handler: "torpor".into(),
        }
    }

    fn paths(&self) -> NodePaths {
        NodePaths {
            install_dir: "/opt/torpor".into(),
            state_dir: "/run/torpor".into(),
            store_dir: "/var/lib/torpor".into(),
            kubelet_root: "/var/lib/kubelet".into(),
        }
    }

    fn install_args(&self) -> InstallArgs {
        InstallArgs {
            kubelet_port: 10250,
            kubelet_config: None,
            doze_swap: None,
            expedite_wakes: true,
            begin_sandboxes: true,
            wakes_at_once: None,
            paths: self.paths(),
            containerd: self.containerd(),
            stats_period: StatsPeriod::Unchanged,
            host_root: self.root(),
            payload_dir: self.dir.path().join("payload"),
            runsc: RunscArgs::default(),
            runsc_platform: "systrap".into(),
            runsc_debug_dir: None,
        }
    }

    fn install(&self) -> Outcome {
        install(&self.install_args()).expect("installed")
    }

    fn uninstall_args(&self) -> UninstallArgs {
        UninstallArgs {
            paths: self.paths(),
            containerd: self.containerd(),
            host_root: self.root(),
            purge: true,
            force: false,
            wait_for_pods: 0,
        }
    }

    fn config(&self) -> Config {
        Config::read(&self.root().join("opt/torpor/bin/torpor-oci.json")).expect("configuration")
    }

    /// Returns every path with its mode and content, except the pidfile of the supervisor.
    fn tree(&self) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
        let mut tree = BTreeMap::new();
        let mut left = vec![self.root()];
        while let Some(dir) = left.pop() {
            for entry in fs::read_dir(dir).expect("list") {
                let path = entry.expect("entry").path();
                let metadata = path.symlink_metadata().expect("metadata");
                if path.ends_with(PIDFILE) {
                    continue;
                }
                let content = match metadata.is_file() {
                    true => fs::read(&path).expect("read"),
                    false => Vec::new(),
                };
                if metadata.is_dir() {
                    left.push(path.clone());
                }
                tree.insert(path, (metadata.permissions().mode(), content));
            }
        }
        tree
    }
}

/// Waits for the end of the process, and kills it when `stop` is set.
fn wait_or_stop(child: &mut Child, stop: &AtomicBool) {
    while child.try_wait().expect("wait").is_none() {
        if stop.load(Ordering::SeqCst) {
            child.kill().expect("kill");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(supervisor) = self.supervisor.take() {
            let ended = supervisor.join();
            assert!(
                ended.is_ok() || std::thread::panicking(),
                "the supervisor failed"
            );
        }
    }
}

const CHANGED: Outcome = Outcome {
    binaries: true,
    containerd: true,
    restarted: true,
};

#[test]
fn an_installation_places_everything_and_restarts_containerd_once() {
    let host = Host::new("version = 3\n").supervised();
    assert_eq!(host.install(), CHANGED);
    assert_eq!(host.starts(), 2);
    let config = host.config();
    let runsc = host
        .root()
        .join(config.runsc.strip_prefix("/").expect("absolute"));
    let shipped = fs::read(RUNSC).expect("runsc");
    assert_eq!(fs::read(&runsc).expect("runsc"), shipped);
    let own_flags = fs::read_to_string(flags::file_of(&runsc)).expect("flags");
    assert_eq!(own_flags, "--gofer-network-namespace=new\n");
    assert_eq!(
        config.runsc_digest,
        format!("blake3:{}", blake3::hash(&shipped).to_hex())
    );
    assert!(
        config.runsc_digest["blake3:".len()..].starts_with(
            config
                .runsc
                .to_string_lossy()
                .strip_prefix("/opt/torpor/bin/runsc-")
                .expect("its name")
        )
    );
    let root = root::image().map(|image| root::file_name(&image));
    let pause = root.map(|name| host.root().join("opt/torpor/bin").join(name));
    assert!(pause.is_none_or(|path| path.is_file()));
    let tree = host.tree();
    let mode = |path: &str| tree[&host.root().join(path)].0 & 0o7777;
    assert_eq!(mode("opt/torpor/bin/containerd-shim-torpor-v1"), 0o755);
    assert_eq!((mode("run/torpor"), mode("var/lib/torpor")), (0o750, 0o750));
    assert!(!host.root().join("opt/torpor/restart-pending").exists());
}

#[test]
fn a_second_installation_leaves_every_file_and_containerd_alone() {
    let host = Host::new("version = 2\n").supervised();
    host.install();
    let before = host.tree();
    assert_eq!(host.install(), Outcome::default());
    assert_eq!(host.tree(), before);
    assert_eq!(host.starts(), 2);
}

#[test]
fn a_device_that_cannot_become_swap_is_removed_and_forgotten() {
    // No host has so many devices.
    const DEVICE: &str = "40711";
    let host = Host::new("version = 3\n");
    let (control, block) = (
        host.root().join("sys/class/zram-control"),
        host.root().join(format!("sys/block/zram{DEVICE}")),
    );
    for dir in [&control, &block] {
        fs::create_dir_all(dir).expect("directory");
    }
    fs::write(control.join("hot_add"), format!("{DEVICE}\n")).expect("control");
    for file in [
        control.join("hot_remove"),
        block.join("disksize"),
        block.join("reset"),
    ] {
        fs::write(file, "").expect("control");
    }
    let args = InstallArgs {
        doze_swap: ShareOfMemory::percent(50),
        ..host.install_args()
    };
    // The device has no file in /dev, so the write of its header fails.
    let error = install(&args).expect_err("not swap");
    assert!(error.to_string().contains("dev/zram40711"), "{error}");
    let removed = fs::read_to_string(control.join("hot_remove")).expect("control");
    assert_eq!(removed, DEVICE);
    assert_eq!(
        fs::read_to_string(block.join("reset")).expect("control"),
        "1"
    );
    let record = fs::read_to_string(host.root().join("opt/torpor/installed.json"));
    assert!(!record.expect("a record").contains("zram"));
}

#[test]
fn new_binaries_need_no_restart_and_keep_the_old_runsc() {
    let host = Host::new("version = 3\n").supervised();
    host.install();
    let old = host.config().runsc;
    host.ship_runsc(NEW_RUNSC);
    host.ship(SHIM, "shim 2");
    assert_eq!(
        host.install(),
        Outcome {
            binaries: true,
            ..Outcome::default()
        }
    );
    assert_eq!(host.starts(), 2);
    assert_ne!(host.config().runsc, old);
    let bin = host.root().join("opt/torpor/bin");
    assert_eq!(fs::read(bin.join(SHIM)).expect("the shim"), b"shim 2");
    assert!(
        host.root()
            .join(old.strip_prefix("/").expect("absolute"))
            .exists()
    );
}

#[test]
fn an_older_build_of_the_host_is_placed_beside_the_one_that_starts_sandboxes() {
    let host = Host::new("version = 3\n").supervised();
    host.install();
    let older = host.root().join("opt/older");
    // The copy is open for writing in no process that another test could fork from this one.
    let copied = Command::new("cp").arg(NEW_RUNSC).arg(&older).status();
    assert!(copied.expect("cp runs").success());
    let content = fs::read(NEW_RUNSC).expect("read");
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &content);
    let digits = digest.as_ref().iter();
    let digest: String = digits.map(|byte| format!("{byte:02x}")).collect();
    let older_runsc = |digest: &str| vec![format!("/opt/older={digest}").parse().expect("read")];
    let mut args = host.install_args();
    args.runsc.older_runsc = older_runsc(&digest);
    assert!(install(&args).expect("installed").binaries);
    assert_eq!(install(&args).expect("again"), Outcome::default());
    let config = host.config();
    let shipped = blake3::hash(&fs::read(RUNSC).expect("read"));
    assert!(config.runsc_digest.ends_with(shipped.to_hex().as_str()));
    let placed = blake3::hash(&content).to_hex();
    let placed = host
        .root()
        .join(format!("opt/torpor/bin/runsc-{}", &placed[..12]));
    assert!(placed.is_file() && flags::file_of(&placed).is_file());
    let builds = Config {
        runsc: host
            .root()
            .join(config.runsc.strip_prefix("/").expect("absolute")),
        ..config
    }
    .runsc_builds();
    assert_eq!(builds.map(|builds| builds.len()), Some(2));
    let mut wrong = args.clone();
    wrong.runsc.older_runsc = older_runsc(&"0".repeat(64));
    let refused = install(&wrong).expect_err("another file");
    assert_eq!(refused.reason(), "RunscRefused");
    // The file need not stay once the build is placed, and other nodes may lack it.
    fs::remove_file(&older).expect("removed");
    assert_eq!(install(&args).expect("again"), Outcome::default());
    assert!(placed.is_file());
}

#[test]
fn revoked_builds_are_in_the_configuration_until_they_are_no_longer_named() {
    let host = Host::new("version = 3\n").supervised();
    let revoked = format!("blake3:{}", "7".repeat(64));
    let mut args = host.install_args();
    args.runsc.revoked_runsc = vec![revoked.clone()];
    install(&args).expect("installed");
    assert_eq!(host.config().revoked_runsc, [revoked]);
    assert!(host.install().binaries, "the configuration is written anew");
    assert!(host.config().revoked_runsc.is_empty());
    assert_eq!(host.starts(), 2, "no restart of containerd");
}

#[test]
fn a_restart_that_was_not_seen_is_made_up_for_next_time() {
    let host = Host::new("version = 3\n");
    let mut args = host.install_args();
    args.containerd.containerd_restart_timeout = Duration::from_millis(50);
    let error = install(&args).expect_err("nobody starts containerd");
    assert_eq!(error.reason(), "RestartUnknown");
    let host = host.supervised();
    let expected = Outcome {
        restarted: true,
        ..Outcome::default()
    };
    assert_eq!(host.install(), expected);
    assert_eq!(host.starts(), 2);
    assert_eq!(host.install(), Outcome::default());
}

#[test]
fn a_containerd_that_does_not_answer_after_its_restart_is_named() {
    let host = Host::new("version = 3\n").supervised();
    let mut args = host.install_args();
    args.containerd.containerd_socket = "/run/other.sock".into();
    args.containerd.containerd_restart_timeout = Duration::from_millis(300);
    let error = install(&args).expect_err("no socket");
    assert!(error.to_string().contains("run/other.sock"), "{error}");
    assert!(host.root().join("opt/torpor/restart-pending").exists());
}

#[test]
fn a_removal_leaves_the_host_as_it_was() {
    for main in [
        "version = 3\n",
        "version = 2\n# end",
        "version = 3\nimports = [\"/x/*.toml\"]\n",
    ] {
        let host = Host::new(main).supervised();
        let before = host.tree();
        host.install();
        host.ship_runsc(NEW_RUNSC);
        host.install();
        fs::create_dir_all(host.root().join("run/torpor/pods")).expect("directory");
        fs::create_dir_all(host.root().join("var/lib/torpor/images/ns/x.1")).expect("directory");
        assert_eq!(uninstall(&host.uninstall_args()).expect("removed"), CHANGED);
        assert_eq!(host.tree(), before);
        assert_eq!(host.starts(), 3);
        assert_eq!(
            uninstall(&host.uninstall_args()).expect("again"),
            Outcome::default()
        );
        assert_eq!(host.tree(), before);
    }
}

#[test]
fn a_removal_puts_back_a_setting_of_the_kernel_that_a_killed_wake_left() {
    let host = Host::new("version = 3\n").supervised();
    host.install();
    let switch = host.root().join("sys/kernel/rcu_expedited");
    fs::create_dir_all(switch.parent().expect("parent")).expect("directory");
    fs::write(&switch, "1\n").expect("setting");
    fs::write(host.root().join("run/torpor/rcu-expedited"), "torpor").expect("note");
    uninstall(&host.uninstall_args()).expect("removed");
    assert_eq!(fs::read_to_string(&switch).expect("setting"), "0");
}

#[test]
fn a_removal_without_purge_keeps_images() {
    let host = Host::new("version = 3\n").supervised();
    host.install();
    let image = host.root().join("var/lib/torpor/images/ns/x.1/pages.img");
    fs::create_dir_all(image.parent().expect("parent")).expect("directory");
    fs::write(&image, "memory").expect("image");
    uninstall(&UninstallArgs {
        purge: false,
        ..host.uninstall_args()
    })
    .expect("removed");
    assert_eq!(fs::read(&image).expect("image"), b"memory");
}

#[test]
fn a_removal_waits_for_the_pods_that_are_going() {
    let host = Host::new("version = 3\n").supervised();
    host.install();
    let pod = host.root().join("run/torpor/pods/abc");
    fs::create_dir_all(&pod).expect("directory");
    let args = UninstallArgs {
        wait_for_pods: 60,
        ..host.uninstall_args()
    };
    std::thread::scope(|scope| {
        let removed = scope.spawn(|| uninstall(&args));
        fs::remove_dir(&pod).expect("the pod is gone");
        removed.join().expect("no panic").expect("removed");
    });
}

#[test]
fn a_removal_is_refused_while_pods_run_and_names_them() {
    let host = Host::new("version = 3\n").supervised();
    host.install();
    let pods = host.root().join("run/torpor/pods");
    for (id, record) in [
        ("abc", r#"{"namespace":"prod","name":"web-0"}"#),
        ("def", "{"),
    ] {
        fs::create_dir_all(pods.join(id)).expect("directory");
        fs::write(pods.join(id).join("pod.json"), record).expect("record");
    }
    let before = host.tree();
    let error = uninstall(&host.uninstall_args()).expect_err("pods run");
    assert_eq!(error.reason(), "PodsRunning");
    assert!(
        error.to_string().contains("prod/web-0, sandbox def"),
        "{error}"
    );
    assert_eq!(host.tree(), before);
    let forced = UninstallArgs {
        force: true,
        ..host.uninstall_args()
    };
    assert_eq!(uninstall(&forced).expect("forced"), CHANGED);
}

#[test]
fn a_lost_installation_directory_does_not_leave_containerd_with_our_handler() {
    let host = Host::new("version = 3\n").supervised();
    let before = host.tree();
    host.install();
    fs::remove_dir_all(host.root().join("opt/torpor")).expect("lost");
    uninstall(&host.uninstall_args()).expect("removed");
    let after = host.tree();
    assert!(
        !after
            .keys()
            .any(|path| path.to_string_lossy().contains("torpor")),
        "{after:?}"
    );
    assert_eq!(
        after[&host.root().join(MAIN)].1,
        b"version = 3\nimports = []\n"
    );
    assert_eq!(
        after.len(),
        before.len() + 1,
        "conf.d was ours, which only the record knew"
    );
}

#[test]
fn a_linked_main_file_is_changed_where_it_lies() {
    let host = Host::new("version = 3\n").supervised();
    let (link, target) = (host.root().join(MAIN), host.root().join("etc/real.toml"));
    fs::rename(&link, &target).expect("moved");
    symlink("/etc/real.toml", &link).expect("link");
    host.install();
    assert!(
        fs::read_to_string(&target)
            .expect("main file")
            .contains("imports")
    );
    assert!(link.symlink_metadata().expect("link").is_symlink());
}

#[test]
fn a_refused_configuration_leaves_containerd_and_its_files_alone() {
    let host = Host::new("version = \n").supervised();
    let error = install(&host.install_args()).expect_err("not TOML");
    assert_eq!(error.reason(), "ContainerdConfigInvalid");
    assert_eq!(
        fs::read_to_string(host.root().join(MAIN)).expect("main file"),
        "version = \n"
    );
    assert_eq!(host.starts(), 1);
}

#[test]
fn a_host_without_containerd_is_refused() {
    let host = Host::new("");
    fs::remove_dir_all(host.root().join("etc")).expect("removed");
    let error = install(&host.install_args()).expect_err("no containerd");
    assert!(error.to_string().contains("--containerd-config"), "{error}");
}

#[test]
fn two_installers_do_not_work_at_once() {
    let host = Host::new("version = 3\n");
    let args = host.install_args();
    fs::create_dir_all(host.root().join("opt/torpor")).expect("directory");
    let node = Node::new(
        &args.host_root,
        &args.paths,
        &args.containerd,
        args.stats_period,
    )
    .expect("node");
    let lock = node.lock().expect("the first");
    assert_eq!(install(&args).expect_err("the second").reason(), "Busy");
    drop(lock);
}
