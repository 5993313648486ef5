//! Performs an installation or an uninstallation on the host's files.
//!
//! ```text
//! <install dir>/bin/containerd-shim-torpor-v1  the shim
//! <install dir>/bin/torpor-inside   the helper that shims run in sandboxes
//! <install dir>/bin/torpor-oci.json configuration of the shim and the agent
//! <install dir>/bin/runsc-<digest>  a build of runsc
//! <install dir>/bin/runsc-<digest>.flags  flags of this build
//! <install dir>/bin/pause-<digest>.erofs  root file system of pause containers
//! <install dir>/installed.json      the changes to undo; written before any other change
//! <install dir>/restart-pending     exists from a change of containerd's configuration until a
//!                                   restart of containerd is observed
//! <install dir>/lock                locked by a running install or uninstall
//! ```
//!
//! `<digest>` stands for the first 12 hex digits of the file's digest.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use torpor_inside::PROGRAM;
use torpor_records::config::{self, Config};
use torpor_records::{Records, locks};
use torpor_runsc::command::flags;
use torpor_runsc::kernel_tuning;
use torpor_runsc::root;
use torpor_snapshots::Store;
use tracing::{info, warn};

use super::containerd::Handler;
use super::error::Error;
use super::eviction;
use super::host::{self, HostRoot, Mode};
use super::plan::{self, Change, Current, MainEdit, Plan, Restart, Wanted};
use super::restart;
use super::runsc::{Build, digest};
use super::zram::Zram;
use crate::args::{
    ContainerdArgs, InstallArgs, NodePaths, ShareOfMemory, StatsPeriod, UninstallArgs,
};

/// Name of the shim's program, in the payload and in the directory of binaries.
const SHIM: &str = "containerd-shim-torpor-v1";
/// Name of the OCI runtime of 0.1, which ran below containerd's stock shim. The pods that it has
/// made need it until they are gone, so that only the uninstallation removes it.
const OCI: &str = "torpor-oci";
const DROP_IN: &str = "torpor.toml";
const EXECUTABLE: Mode = Mode::New(0o755);

/// The changes that an installation or an uninstallation made.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// A binary or the configuration was written or removed.
    pub(crate) binaries: bool,
    /// containerd's configuration was written.
    pub(crate) containerd: bool,
    /// A restart of containerd was observed.
    pub(crate) restarted: bool,
}

/// The record of an installation's changes, which the uninstallation undoes. Paths are those of the
/// installer's container, below the mount point of the host's root.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    /// Directories that the installation made, the outermost first.
    created: Vec<PathBuf>,
    main: Option<MainEdit>,
    /// Number of Torpor's zram device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    zram: Option<u32>,
}

/// Paths of one node's files, below the mount point of its root.
struct Node {
    root: HostRoot,
    install: PathBuf,
    bin: PathBuf,
    main: PathBuf,
    drop_in: PathBuf,
    wanted: Wanted,
}

impl Node {
    fn new(
        root: &Path,
        paths: &NodePaths,
        containerd: &ContainerdArgs,
        stats_period: StatsPeriod,
    ) -> Result<Self, Error> {
        let root = HostRoot::new(root);
        let drop_in = containerd.containerd_conf_dir.join(DROP_IN);
        Ok(Self {
            install: root.path(&paths.install_dir)?,
            bin: root.path(&paths.bin_dir())?,
            main: root.path(&containerd.containerd_config)?,
            drop_in: root.path(&drop_in)?,
            wanted: Wanted {
                main: containerd.containerd_config.clone(),
                drop_in,
                handler: Handler {
                    name: containerd.runtime_handler.clone(),
                    shim: paths.bin_dir().join(SHIM),
                },
                stats_period,
            },
            root,
        })
    }

    fn record_file(&self) -> PathBuf {
        self.install.join("installed.json")
    }

    fn pending_file(&self) -> PathBuf {
        self.install.join("restart-pending")
    }

    fn lock_file(&self) -> PathBuf {
        self.install.join("lock")
    }

    fn lock(&self) -> Result<Flock<File>, Error> {
        let path = self.lock_file();
        let file = File::create(&path).map_err(|source| Error::Write {
            path: path.clone(),
            source,
        })?;
        Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|_| Error::Busy { path })
    }

    fn record(&self) -> Result<Record, Error> {
        let path = self.record_file();
        match host::read(&path)? {
            None => Ok(Record::default()),
            Some(bytes) => {
                serde_json::from_slice(&bytes).map_err(|source| Error::Record { path, source })
            }
        }
    }

    fn write_record(&self, record: &Record) -> Result<(), Error> {
        let path = self.record_file();
        write_json(&path, record, Mode::New(0o600)).map(|_| ())
    }

    fn current(&self, record: &Record) -> Result<Current, Error> {
        Ok(Current {
            main: host::read_text(&self.main)?,
            drop_in: host::read_text(&self.drop_in)?,
            edit: record.main.clone(),
            restart_pending: self.pending_file().exists(),
        })
    }

    /// Writes containerd's files, after the mark of a pending restart. If the installer crashes
    /// between, its next run therefore restarts containerd.
    fn change_containerd(&self, plan: &Plan) -> Result<(), Error> {
        if plan.restart == Some(Restart::Changed) {
            host::replace(&self.pending_file(), Mode::New(0o600), &mut io::empty())?;
        }
        for (path, change) in [(&self.drop_in, &plan.drop_in), (&self.main, &plan.main)] {
            match change {
                Change::Keep => {}
                Change::Remove => {
                    host::remove_file(path)?;
                    info!(path = %path.display(), "removed a file of containerd's configuration");
                }
                Change::Write(text) => {
                    host::replace(path, Mode::Kept(0o644), &mut text.as_bytes())?;
                    info!(path = %path.display(), "wrote a file of containerd's configuration");
                }
            }
        }
        Ok(())
    }

    /// Restarts containerd if the plan requires it. Returns whether a restart was observed.
    fn restart(&self, plan: &Plan, containerd: &ContainerdArgs) -> Result<bool, Error> {
        let Some(why) = plan.restart else {
            info!("containerd's configuration is up to date: no restart");
            return Ok(false);
        };
        let why = match why {
            Restart::Changed => "its configuration changed",
            Restart::Pending => {
                "its configuration changed earlier and no restart has been observed since"
            }
        };
        info!(why, "restarting containerd");
        if !restart::restart(&self.root, containerd)? {
            warn!("containerd must be restarted by hand (--containerd-restart=none)");
            return Ok(false);
        }
        host::remove_file(&self.pending_file())?;
        info!("containerd has restarted");
        Ok(true)
    }
}

/// Installs Torpor. Files that are up to date are not written.
pub(super) fn install(args: &InstallArgs) -> Result<Outcome, Error> {
    let node = Node::new(
        &args.host_root,
        &args.paths,
        &args.containerd,
        args.stats_period,
    )?;
    let state = node.root.path(&args.paths.state_dir)?;
    let store = node.root.path(&args.paths.store_dir)?;
    let conf_dir = node.root.path(&args.containerd.containerd_conf_dir)?;
    let containerd_dir = node.main.parent().unwrap_or_else(|| Path::new("/"));
    if !containerd_dir.is_dir() {
        return Err(Error::NoContainerd {
            path: containerd_dir.into(),
        });
    }
    let build = Build::chosen(&node.root, &args.payload_dir, &args.runsc)?;
    let older = Build::older(&node.root, &args.runsc)?;
    let created = [&node.bin, &state, &store]
        .into_iter()
        .flat_map(|dir| host::missing(dir));
    let created: Vec<PathBuf> = created.collect();
    host::make_dir(&node.install, 0o755)?;
    let _lock = node.lock()?;

    let mut record = node.record()?;
    let plan = plan::install(&node.wanted, &node.current(&record)?)?;
    let conf_dirs = if plan.drop_in == Change::Keep {
        Vec::new()
    } else {
        host::missing(&conf_dir)
    };
    let recorded = record.created.clone();
    record.created.extend(
        created
            .into_iter()
            .chain(conf_dirs)
            .filter(|dir| !recorded.contains(dir)),
    );
    record.main.clone_from(&plan.edit);
    node.write_record(&record)?;

    host::make_dir(&node.bin, 0o755)?;
    prepare_for_agent(&state, &store)?;
    let binaries = place_binaries(&node, args, &build, &older)?;
    if matches!(plan.drop_in, Change::Write(_)) && !conf_dir.is_dir() {
        host::make_dir(&conf_dir, 0o755)?;
    }
    provide_swap(&node, &mut record, args.doze_swap)?;
    node.change_containerd(&plan)?;
    let restarted = node.restart(&plan, &args.containerd)?;
    Ok(Outcome {
        binaries,
        containerd: plan.restart == Some(Restart::Changed),
        restarted,
    })
}

/// Makes the directories that the agent uses, which is not root.
fn prepare_for_agent(state: &Path, store: &Path) -> Result<(), Error> {
    let (reports, turns) = (state.join("reports"), state.join("turns"));
    for (dir, mode) in [
        (state, 0o750),
        (&reports, 0o770),
        (&turns, 0o750),
        (store, 0o750),
    ] {
        host::make_dir(dir, mode)?;
        locks::share(dir, mode).map_err(|source| Error::Write {
            path: dir.into(),
            source,
        })?;
    }
    Records::below(state)
        .hand_over()
        .map_err(|source| Error::Write {
            path: state.into(),
            source,
        })?;
    Store::open_for_agent(store).map(drop).map_err(Error::Store)
}

/// Makes the wanted zram swap if there is none, and removes swap that is no longer wanted. After a
/// reboot the record may hold a number that no device has, or a device of another program. The
/// recorded device therefore counts as Torpor's only while it is in use as swap.
fn provide_swap(
    node: &Node,
    record: &mut Record,
    wanted: Option<ShareOfMemory>,
) -> Result<(), Error> {
    let zram = Zram::new(&node.root)?;
    let recorded = record
        .zram
        .map(|device| zram.is_on(device).map(|on| (device, on)));
    match (wanted, recorded.transpose()?) {
        (Some(_), Some((_, true))) => return Ok(()),
        (None, Some((device, true))) => {
            zram.remove(device)?;
            record.zram = None;
        }
        (None, None) => return Ok(()),
        (None, Some((_, false))) => record.zram = None,
        (Some(share), None | Some((_, false))) => {
            let device = zram.add()?;
            record.zram = Some(device);
            let made = node
                .write_record(record)
                .and_then(|()| zram.switch_on(device, share));
            if let Err(error) = made {
                remove_unused_device(node, record, &zram, device);
                return Err(error);
            }
            info!(device, "created swap in compressed memory");
        }
    }
    node.write_record(record)
}

/// Removes a device that did not become swap; the next attempt makes another device. An error here
/// is only logged: the caller returns the error that came first.
fn remove_unused_device(node: &Node, record: &mut Record, zram: &Zram, device: u32) {
    let removed = zram.remove(device).and_then(|()| {
        record.zram = None;
        node.write_record(record)
    });
    if let Err(error) = removed {
        warn!(device, %error, "cannot remove an unused zram device");
    }
}

/// Returns one more than the number of the node's processors. A restore waits for the disk at
/// times, so the processors serve one restore more than their number. With still more at once, all
/// restores together take longer (docs/history/performance.md: 50 wakes on two processors, with
/// two, three, four and six at a time).
fn default_wakes() -> u32 {
    // The machine's processors, regardless of the limits of the installer's container.
    let online = nix::unistd::sysconf(nix::unistd::SysconfVar::_NPROCESSORS_ONLN);
    let online = online.ok().flatten().unwrap_or(1);
    u32::try_from(online).unwrap_or(1).saturating_add(1)
}

/// Places runsc first and the shim, which runs it, last. Returns whether a file was written.
fn place_binaries(
    node: &Node,
    args: &InstallArgs,
    build: &Build,
    older: &[Build],
) -> Result<bool, Error> {
    let mut changed = place_pause(node)?;
    for build in older.iter().chain([build]) {
        changed |= place_build(node, build)?;
    }
    let config = Config {
        runsc: args.paths.bin_dir().join(build.file_name()),
        runsc_digest: build.config_digest(),
        state_dir: args.paths.state_dir.clone(),
        store_dir: args.paths.store_dir.clone(),
        kubelet_root: args.paths.kubelet_root.clone(),
        kubelet_port: args.kubelet_port,
        eviction_percent: eviction_percent(node, args),
        platform: args.runsc_platform.clone(),
        expedite_wakes: args.expedite_wakes,
        begin_sandboxes: args.begin_sandboxes,
        wakes_at_once: args.wakes_at_once.unwrap_or_else(default_wakes),
        revoked_runsc: args.runsc.revoked_runsc.clone(),
        debug_log_dir: args.runsc_debug_dir.clone(),
    };
    changed |= write_json(&node.bin.join(config::FILE_NAME), &config, Mode::New(0o644))?;
    for program in [PROGRAM, SHIM] {
        changed |= place(
            &args.payload_dir.join(program),
            None,
            &node.bin.join(program),
        )?;
    }
    Ok(changed)
}

/// Places a build of runsc and its flags, which the agent lists and the shims read by the build's
/// name. Returns whether a file was written.
fn place_build(node: &Node, build: &Build) -> Result<bool, Error> {
    let placed = node.bin.join(build.file_name());
    let own_flags = flags::file_of(&placed);
    let changed = write(&own_flags, build.flags()?.as_bytes(), Mode::New(0o644))?;
    Ok(place(&build.path, Some(build.digest), &placed)? || changed)
}

/// Returns the kubelet's highest eviction limit of free disk space, in percent. A failure to read
/// this limit is logged and does not stop the installation.
fn eviction_percent(node: &Node, args: &InstallArgs) -> Option<u8> {
    let in_container = |path: &Path| node.root.path(path);
    let folder = in_container(&args.paths.kubelet_root).ok()?;
    let capacity = nix::sys::statvfs::statvfs(&folder)
        .map_or(0, |stat| stat.blocks().saturating_mul(stat.fragment_size()));
    let file = in_container(&args.kubelet_config()).ok()?;
    eviction::percent(&file, capacity).unwrap_or_else(|error| {
        let error: &dyn std::error::Error = &error;
        warn!(
            error,
            "cannot read the kubelet's eviction limits: the agent's default reserve follows Kubernetes' defaults"
        );
        None
    })
}

/// Places the root file system of pause containers, if this agent has one. Returns whether it was
/// written.
fn place_pause(node: &Node) -> Result<bool, Error> {
    let Some(image) = root::image() else {
        return Ok(false);
    };
    let to = node.bin.join(root::file_name(&image));
    write(&to, &image, Mode::New(0o644))
}

/// Copies a binary, unless `to` has its content already. Returns whether the binary was copied.
/// `checked` is the digest that the binary had when it passed the checks. If the digest differs
/// now, the binary is not installed ([`Error::Changed`]).
fn place(from: &Path, checked: Option<blake3::Hash>, to: &Path) -> Result<bool, Error> {
    let payload = |source| Error::Payload {
        path: from.into(),
        source,
    };
    let wanted = match checked {
        Some(checked) => checked,
        None => digest(from).map_err(payload)?,
    };
    match digest(to) {
        Ok(found) if found == wanted => return host::set_mode(to, 0o755).map(|()| false),
        Ok(_) => {}
        Err(source) if source.kind() == ErrorKind::NotFound => {}
        Err(source) => {
            return Err(Error::Read {
                path: to.into(),
                source,
            });
        }
    }
    let mut source = File::open(from).map_err(payload)?;
    host::replace(to, EXECUTABLE, &mut source)?;
    let placed = digest(to).map_err(|source| Error::Read {
        path: to.into(),
        source,
    })?;
    if placed != wanted {
        host::remove_file(to)?;
        return Err(Error::Changed { path: from.into() });
    }
    info!(path = %to.display(), "placed");
    Ok(true)
}

/// Writes a value as JSON, unless the file has this content. Returns whether the file was written.
fn write_json(path: &Path, value: &impl Serialize, mode: Mode) -> Result<bool, Error> {
    let mut bytes = serde_json::to_vec_pretty(value).map_err(|source| Error::Write {
        path: path.into(),
        source: source.into(),
    })?;
    bytes.push(b'\n');
    write(path, &bytes, mode)
}

/// Writes a file, unless the file has this content. Returns whether the file was written.
fn write(path: &Path, mut bytes: &[u8], mode: Mode) -> Result<bool, Error> {
    if host::read(path)?.is_some_and(|found| found == bytes) {
        return Ok(false);
    }
    host::replace(path, mode, &mut bytes)?;
    Ok(true)
}

/// Undoes [`install`]. Images and ledgers stay unless `--purge` is given.
pub(super) fn uninstall(args: &UninstallArgs) -> Result<Outcome, Error> {
    let node = Node::new(
        &args.host_root,
        &args.paths,
        &args.containerd,
        StatsPeriod::Unchanged,
    )?;
    let state = node.root.path(&args.paths.state_dir)?;
    let store = node.root.path(&args.paths.store_dir)?;
    let limit = Duration::from_secs(args.wait_for_pods);
    refuse_while_pods_run(&state.join("pods"), args.force, limit)?;
    // The directory holds the lock and the mark. It is made even if it was lost: containerd's
    // configuration may still have the handler.
    let made = host::missing(&node.install);
    host::make_dir(&node.install, 0o755)?;
    let _lock = node.lock()?;

    let mut record = node.record()?;
    record.created.extend(made);
    provide_swap(&node, &mut record, None)?;
    let plan = plan::uninstall(&node.wanted, &node.current(&record)?)?;
    node.change_containerd(&plan)?;
    let restarted = node.restart(&plan, &args.containerd)?;

    let binaries = remove_binaries(&node.bin)?;
    kernel_tuning::put_all_back(&args.host_root, &state);
    host::remove_tree(&state)?;
    if args.purge {
        host::remove_tree(&store)?;
    }
    // These files go last, when no change is left to undo.
    for file in [node.pending_file(), node.record_file(), node.lock_file()] {
        host::remove_file(&file)?;
    }
    host::remove_empty_dir(&node.install)?;
    for dir in record.created.iter().rev() {
        host::remove_empty_dir(dir)?;
    }
    Ok(Outcome {
        binaries,
        containerd: plan.restart == Some(Restart::Changed),
        restarted,
    })
}

fn refuse_while_pods_run(pods: &Path, force: bool, limit: Duration) -> Result<(), Error> {
    let deadline = Instant::now() + limit;
    let mut running = running_pods(pods)?;
    if !running.is_empty() && !force {
        info!(
            pods = running.join(", "),
            "waiting until the pods are removed"
        );
    }
    while !running.is_empty() && !force && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(200));
        running = running_pods(pods)?;
    }
    if running.is_empty() {
        return Ok(());
    }
    let pods = running.join(", ");
    if !force {
        return Err(Error::PodsRunning { pods });
    }
    warn!(pods, "uninstalling although pods run (--force)");
    Ok(())
}

/// Returns the names of the pods that have a record, sorted. A pod with an unreadable record is
/// named by its sandbox id.
fn running_pods(pods: &Path) -> Result<Vec<String>, Error> {
    let read = |source| Error::Read {
        path: pods.into(),
        source,
    };
    let entries = match fs::read_dir(pods) {
        Err(source) if source.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(read)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(read)?;
        let id = entry.file_name().to_string_lossy().into_owned();
        names.push(
            pod_name(&entry.path().join("pod.json")).unwrap_or_else(|| format!("sandbox {id}")),
        );
    }
    names.sort();
    Ok(names)
}

fn pod_name(record: &Path) -> Option<String> {
    let pod: serde_json::Value = serde_json::from_slice(&fs::read(record).ok()?).ok()?;
    Some(format!(
        "{}/{}",
        pod.get("namespace")?.as_str()?,
        pod.get("name")?.as_str()?
    ))
}

/// Removes the files that installations of any version placed in the directory of binaries. Returns
/// whether there were any.
fn remove_binaries(bin: &Path) -> Result<bool, Error> {
    let read = |source| Error::Read {
        path: bin.into(),
        source,
    };
    let entries = match fs::read_dir(bin) {
        Err(source) if source.kind() == ErrorKind::NotFound => return Ok(false),
        entries => entries.map_err(read)?,
    };
    let mut found = false;
    for entry in entries {
        let entry = entry.map_err(read)?;
        if is_ours(&entry.file_name().to_string_lossy()) {
            host::remove_file(&entry.path())?;
            found = true;
        }
    }
    host::remove_empty_dir(bin)?;
    Ok(found)
}

fn is_ours(name: &str) -> bool {
    let is_build =
        |digits: &str| digits.len() == 12 && digits.bytes().all(|c| c.is_ascii_hexdigit());
    name == OCI
        || name == SHIM
        || name == PROGRAM
        || name == config::FILE_NAME
        || name
            .strip_prefix("runsc-")
            .is_some_and(|rest| is_build(rest.strip_suffix(".flags").unwrap_or(rest)))
        || root::is_file_name(name)
}

#[cfg(test)]
mod tests;
