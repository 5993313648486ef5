//! `create`: make a container's record and cgroup, its gVisor container, and all that its keeper
//! needs. A container that is part of an image to be restored gets its gVisor container in the
//! restore.

use std::fs::Permissions;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use torpor_cgroup as cgroup;
use torpor_cgroup::swap;
use torpor_core::ids::{ContainerId, Namespace, PodUid, SandboxId};
use torpor_link::loopback::{self, Loopback};
use torpor_link::net;
use torpor_link::traffic;
use torpor_link::unacknowledged;
use torpor_messages::keeper::{self, Answer};
use torpor_messages::wire;
use torpor_records::{
    ContainerRecord, PodLock, PodRecord, Role, SandboxState, SandboxVolume, WakeCause,
};
use torpor_runsc::limits::write_boot_flags;
use torpor_runsc::root::Root;
use torpor_runsc::spec::{
    CRI_SANDBOX_NAME, CRI_SANDBOX_NAMESPACE, CRI_SANDBOX_UID, SHM_HINT, Spec, digest, rewrite,
    shm_source, volume_directory,
};
use torpor_snapshots::Digest;

use super::{FAILED, delete};
use crate::keeper::Handover;
use torpor_sandbox::claim;
use torpor_sandbox::console::create_with_console;
use torpor_sandbox::generation;
use torpor_sandbox::limits;
use torpor_sandbox::node::{COMMAND_LIMIT, Node, read_oci_json};
use torpor_sandbox::restore::{self, transitions};

const ON_RESTORE_FAILURE: &str = "torpor.dev/on-restore-failure";

/// A created container, without its keeper.
struct Created {
    /// The pod's lock, held until the keeper's pid is recorded.
    _lock: PodLock,
    record: ContainerRecord,
    dir: PathBuf,
    loopback: Option<Loopback>,
    /// The master of gVisor's terminal for the container.
    console: Option<OwnedFd>,
    /// Features that this container lacks.
    warnings: Vec<anyhow::Error>,
}

/// Creates a container. Sends its keeper's descriptors with the answer over standard output.
pub(crate) fn create(node: &Node, bundle: &Path, id: &ContainerId) -> anyhow::Result<ExitCode> {
    let shim = std::io::stdout().as_fd().try_clone_to_owned()?;
    let pid = parent_id();
    let created = prepare(node, bundle, id).and_then(|created| {
        ensure!(parent_id() == pid, "the shim has ended");
        hand_over(node, created, pid, &shim)
    });
    match created {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            let refused = restore::refused(FAILED, &error);
            wire::send(&shim, &serde_json::to_vec(&refused)?, &[])?;
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Records the keeper, a thread of the shim, and sends its descriptors. The keeper's socket listens
/// from here on, so no caller has to wait for it.
fn hand_over(node: &Node, mut created: Created, pid: u32, shim: &OwnedFd) -> anyhow::Result<()> {
    let path = created.dir.join(keeper::SOCKET);
    let socket = wire::listen(&path)?;
    std::fs::set_permissions(&path, Permissions::from_mode(0o600))?;
    created.record.keeper_pid = pid;
    created.record.in_shim = true;
    node.records.write_container(&created.record)?;
    let warnings = created.warnings.iter();
    let handover = Handover {
        warnings: warnings.map(|one| format!("{one:#}")).collect(),
        loopback: created.loopback.is_some(),
        console: created.console.is_some(),
    };
    let answer = Answer::ok(serde_json::to_value(handover)?);
    let loopback = created.loopback.iter();
    let files: Vec<_> = std::iter::once(&socket)
        .chain(loopback.flat_map(|loopback| [&loopback.listener, &loopback.link]))
        .chain(&created.console)
        .map(AsFd::as_fd)
        .collect();
    Ok(wire::send(shim, &serde_json::to_vec(&answer)?, &files)?)
}

/// Creates all of a container but its keeper. `bundle`: its OCI bundle.
fn prepare(node: &Node, bundle: &Path, id: &ContainerId) -> anyhow::Result<Created> {
    let spec = Spec(read_oci_json(&bundle.join("config.json"), "spec")?);
    let sandbox = SandboxId::try_from(spec.sandbox_id()?.to_owned())?;
    let role = spec.role()?;
    if role == Role::Sandbox {
        record_pod(node, &spec, &sandbox)?;
    }
    let lock = node.records.lock(&sandbox)?;
    let pod = node.records.pod(&sandbox)?;

    let mut record = record_of(id, &spec, sandbox.clone(), role)?;
    let state = match role {
        Role::Sandbox => {
            // Work before runsc counts for the pod, too: an image is read and hashed.
            node.cgroups.place(&pod.cgroup, std::process::id())?;
            restore::begin(node, &pod, &spec)?
        }
        Role::Container => {
            delete::delete_superseded(node, &record)?;
            admit(node, &pod, &record)?;
            restore::join(node, &sandbox)?
        }
    };
    let swap_limit = spec.swap_limit().map(str::to_owned);
    let mut rewritten = rewrite(spec, bundle, &pod.volumes)?;
    if role == Role::Sandbox
        && let Some((spec, spec_digest)) = with_own_root(node, &pod, &state, &rewritten)?
    {
        (rewritten, record.spec_digest) = (spec, spec_digest);
    }
    if let SandboxState::Restoring { image, .. } = &state {
        let pause = match role {
            Role::Sandbox => None,
            Role::Container => Some(Spec(node.records.spec(&sandbox.into())?)),
        };
        let pause = pause.as_ref().unwrap_or(&rewritten);
        record.completed = restore::completed(node, &pod, pause, image, &record)?;
    }
    // The container of a claim that is started again has the variables that it would have had in
    // a cold start.
    let mut process = rewritten.0["process"].take();
    claim::add_variables(&mut process, &rewritten.0);
    rewritten.0["process"] = process;
    node.records.create_container_dir(&record.id)?;
    let dir = node.records.container_dir(&record.id);
    node.records.write_spec(&record.id, &rewritten.0)?;
    node.cgroups.create(&record.cgroup)?;
    if let Some(bytes) = swap_limit {
        swap::limit(&node.cgroups, &record.cgroup, &bytes)?;
    }
    swap::keep_in_memory(&node.cgroups, &pod.cgroup)?;

    let console = if state == SandboxState::Running {
        match role {
            Role::Sandbox => write_boot_flags(&dir, &limits::flags(node, &pod)?)
                .context("cannot write the Pod's limits")?,
            Role::Container => node.cgroups.place(&pod.cgroup, std::process::id())?,
        }
        create_in_sandbox(node, &record, &dir)?
    } else {
        None
    };
    let (loopback, warning) = match role {
        Role::Sandbox => open_loopback(node, &pod),
        Role::Container => (None, None),
    };
    let mut warnings = Vec::from_iter(warning);
    if role == Role::Container
        && let Some(root) = rewritten.root()
        && let Err(error) = generation::place(&root)
    {
        warnings.push(error.context("the container has no file /run/torpor/generation"));
    }
    if role == Role::Sandbox {
        watch_traffic(node, &pod)?;
        warnings.extend(note_unacknowledged(node, &pod)?);
    }
    Ok(Created {
        _lock: lock,
        record,
        dir,
        loopback,
        console,
        warnings,
    })
}

/// Returns the pause container's spec with Torpor's own root file system, and the spec's digest.
/// None where a gofer serves the container's files: an emptyDir is mounted in the container, the
/// root file system is not installed, or the image was saved with a gofer.
fn with_own_root(
    node: &Node,
    pod: &PodRecord,
    state: &SandboxState,
    rewritten: &Spec,
) -> anyhow::Result<Option<(Spec, Digest)>> {
    let Some(root) = Root::installed(&node.config) else {
        return Ok(None);
    };
    let saved = match state {
        SandboxState::Restoring { image, .. } => Some(restore::saved_pause(node, pod, image)?),
        SandboxState::Running | SandboxState::Hibernated { .. } => None,
    };
    Ok(root.serve(rewritten, saved))
}

/// Prepares the sandbox for a container that joins it.
///
/// A container that is new to the Pod (`kubectl debug` adds such) wakes the sandbox, as an exec
/// does. A container that the kubelet recreates is part of a hibernated sandbox' image, and is
/// restored with that image. The caller holds the lock.
fn admit(node: &Node, pod: &PodRecord, record: &ContainerRecord) -> anyhow::Result<()> {
    transitions::settle(node, &pod.sandbox)?;
    match node.records.state(&pod.sandbox)? {
        SandboxState::Running => {
            transitions::rouse(node, &pod.sandbox, WakeCause::Container)?;
        }
        SandboxState::Hibernated { image, .. } if restore::is_new(node, pod, &image, record)? => {
            transitions::wake_hibernated(node, &pod.sandbox, WakeCause::Container)?;
        }
        // The image is the Pod's own and has all containers that the Pod had. So this container is
        // new, and no mismatch.
        SandboxState::Restoring { image, .. }
            if *image.pod() == pod.pod_uid && restore::is_new(node, pod, &image, record)? =>
        {
            bail!(
                "the sandbox is being restored, and container {} is not part of it: try again when the sandbox runs",
                record.name
            );
        }
        SandboxState::Hibernated { .. } | SandboxState::Restoring { .. } => {}
    }
    Ok(())
}

/// Opens the loopback of the pod's network namespace for port-forward. On failure (an old kernel,
/// BPF locked down) the pod starts without port-forward; then returns a warning.
fn open_loopback(node: &Node, pod: &PodRecord) -> (Option<Loopback>, Option<anyhow::Error>) {
    let Some(namespace) = &pod.network_namespace else {
        return (None, None);
    };
    match loopback::open(namespace) {
        Ok(loopback) => (Some(loopback), None),
        Err(error) => {
            let warning = anyhow::Error::new(error).context("port-forward will not work");
            // If the note cannot be written, the warning is still in the log.
            let _ = node
                .records
                .note_not_forwarded(&pod.sandbox, &format!("{warning:#}"));
            (None, Some(warning))
        }
    }
}

/// Begins to watch the pod's traffic. A pod whose packets cannot be watched still starts, and never
/// falls asleep by itself: the agent reports the recorded reason.
fn watch_traffic(node: &Node, pod: &PodRecord) -> anyhow::Result<()> {
    let Some(namespace) = &pod.network_namespace else {
        return Ok(());
    };
    let watch = net::ips(&pod.addresses)
        .map_err(anyhow::Error::new)
        .and_then(|ips| Ok(traffic::begin(namespace, &ips)?))
        .map_err(|error| format!("{error:#}"));
    Ok(node.records.write_traffic(&pod.sandbox, &watch)?)
}

/// Begins to record the pod's unacknowledged data. On failure the pod still starts; then returns a
/// warning.
fn note_unacknowledged(node: &Node, pod: &PodRecord) -> anyhow::Result<Option<anyhow::Error>> {
    let Some(namespace) = &pod.network_namespace else {
        return Ok(None);
    };
    let watch = match unacknowledged::begin(namespace) {
        Ok(watch) => watch,
        Err(error) => {
            let lost = "data that is lost while the sandbox falls asleep may not be sent again";
            return Ok(Some(anyhow::Error::new(error).context(lost)));
        }
    };
    let records = &node.records;
    records.write_unacknowledged(&pod.sandbox, watch)?;
    Ok(None)
}

/// Writes the pod's record and makes its cgroup, before runsc removes the addresses from the pod's
/// interfaces.
fn record_pod(node: &Node, spec: &Spec, sandbox: &SandboxId) -> anyhow::Result<()> {
    let annotation = |key: &'static str| {
        spec.annotation(key)
            .map(str::to_owned)
            .with_context(|| format!("annotation {key} is missing: is this containerd's CRI?"))
    };
    let pod_uid = PodUid::try_from(annotation(CRI_SANDBOX_UID)?)?;
    let network_namespace = spec.network_namespace();
    let Some(namespace_path) = &network_namespace else {
        bail!(
            "hostNetwork: true is not possible with the RuntimeClass torpor: gVisor keeps the network to itself; \
             remove hostNetwork or the RuntimeClass"
        );
    };
    let pod = PodRecord {
        sandbox: sandbox.clone(),
        namespace: Namespace::try_from(annotation(CRI_SANDBOX_NAMESPACE)?)?,
        name: annotation(CRI_SANDBOX_NAME)?,
        addresses: net::read(namespace_path)?,
        cgroup: cgroup::sandbox_path(spec.cgroups_path()?, sandbox.as_str())?,
        volumes: volumes(node, spec, &pod_uid)?,
        cold_start_on_failure: spec.annotation(ON_RESTORE_FAILURE) == Some("ColdStart"),
        runsc: node.config.runsc.clone(),
        runsc_digest: node.config.runsc_digest.clone(),
        network_namespace,
        pod_uid,
    };
    node.records.create_pod_dir(sandbox)?;
    node.cgroups.create(&pod.cgroup)?;
    node.records.write_pod(&pod)?;
    Ok(())
}

/// Returns the volumes that gVisor keeps inside the sandbox: the emptyDirs and `/dev/shm`.
fn volumes(node: &Node, spec: &Spec, pod_uid: &PodUid) -> anyhow::Result<Vec<SandboxVolume>> {
    let mut volumes = empty_dirs(node, pod_uid)?;
    if let Some(source) = shm_source(spec) {
        volumes.push(volume(SHM_HINT.to_owned(), source)?);
    }
    Ok(volumes)
}

/// Returns the pod's emptyDirs, sorted by name. The kubelet makes them, with their owners and
/// sizes, before it requests the sandbox.
fn empty_dirs(node: &Node, pod_uid: &PodUid) -> anyhow::Result<Vec<SandboxVolume>> {
    let dir = node
        .config
        .kubelet_root
        .join("pods")
        .join(pod_uid.as_str())
        .join("volumes/kubernetes.io~empty-dir");
    let entries = match std::fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", dir.display())),
    };
    let mut volumes = Vec::new();
    for entry in entries {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        volumes.push(volume(name, entry.path())?);
    }
    volumes.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(volumes)
}

fn volume(name: String, source: PathBuf) -> anyhow::Result<SandboxVolume> {
    let file_system = nix::sys::statfs::statfs(&source)
        .with_context(|| format!("cannot read the file system of {}", source.display()))?;
    let memory = file_system.filesystem_type() == nix::sys::statfs::TMPFS_MAGIC;
    let bytes = || {
        let block = u64::try_from(file_system.block_size()).ok()?;
        // A tmpfs without a limit reports 0 blocks.
        file_system
            .blocks()
            .checked_mul(block)
            .filter(|bytes| *bytes > 0)
    };
    let size = memory.then(bytes).flatten();
    let directory = volume_directory(&source, size)
        .with_context(|| format!("cannot read the owner of {}", source.display()))?;
    Ok(SandboxVolume {
        name,
        source,
        memory,
        directory: Some(directory),
    })
}

fn record_of(
    id: &ContainerId,
    spec: &Spec,
    sandbox: SandboxId,
    role: Role,
) -> anyhow::Result<ContainerRecord> {
    let name = match role {
        Role::Sandbox => String::new(),
        Role::Container => spec
            .container_name()
            .context("the container has no name")?
            .to_owned(),
    };
    Ok(ContainerRecord {
        id: id.clone(),
        sandbox,
        role,
        name,
        terminal: spec.terminal(),
        cgroup: cgroup::relative_path(spec.cgroups_path()?)?,
        spec_digest: digest(spec),
        keeper_pid: 0,
        in_shim: false,
        completed: None,
    })
}

/// Creates the gVisor container in its sandbox; returns the console of a container with a terminal.
/// `dir`: the container's directory.
pub(crate) fn create_in_sandbox(
    node: &Node,
    record: &ContainerRecord,
    dir: &Path,
) -> anyhow::Result<Option<OwnedFd>> {
    let runsc = node.runsc_of(&record.sandbox);
    if record.terminal {
        return create_with_console(&runsc, record.id.as_str(), dir).map(Some);
    }
    runsc.create(record.id.as_str(), dir, None, COMMAND_LIMIT)?;
    Ok(None)
}
