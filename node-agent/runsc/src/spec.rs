//! What torpor-oci changes in an OCI spec before runsc sees it. Pure.
//!
//! The spec stays raw JSON: fields that this build does not know pass through untouched.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use torpor_records::{Role, SandboxVolume, VolumeDirectory};
use torpor_snapshots::Digest;

/// containerd's CRI annotations on every spec that it makes.
pub const CRI_CONTAINER_TYPE: &str = "io.kubernetes.cri.container-type";
pub const CRI_CONTAINER_NAME: &str = "io.kubernetes.cri.container-name";
pub const CRI_SANDBOX_ID: &str = "io.kubernetes.cri.sandbox-id";
pub const CRI_SANDBOX_NAMESPACE: &str = "io.kubernetes.cri.sandbox-namespace";
pub const CRI_SANDBOX_NAME: &str = "io.kubernetes.cri.sandbox-name";
pub const CRI_SANDBOX_UID: &str = "io.kubernetes.cri.sandbox-uid";
pub const CRI_IMAGE_NAME: &str = "io.kubernetes.cri.image-name";

/// gVisor's annotations steer the privileged runsc: only ours get through.
const GVISOR_PREFIX: &str = "dev.gvisor.";
const MOUNT_HINT_PREFIX: &str = "dev.gvisor.spec.mount.";
/// The controller's annotation (`torpor_api::annotations::NET_RAW`): names of the Pod's containers
/// that add the capability NET_RAW themselves, separated by commas.
const NET_RAW_CONTAINERS: &str = "torpor.dev/net-raw";
/// A capability that runc gives by default, and gVisor only with `--net-raw`.
pub(crate) const CAP_NET_RAW: &str = "CAP_NET_RAW";
/// The bits of a file's mode (inode(7)) without those of its type.
const PERMISSIONS: u32 = 0o7777;
/// Where the pause container mounts the pod's volumes.
pub const PAUSE_VOLUMES: &str = "/torpor-volumes";
/// The pod's /dev/shm is a volume to gVisor, of this name.
pub const SHM_HINT: &str = "devshm";

/// Why a spec cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error("the OCI spec has no {0}")]
    Missing(&'static str),
    #[error("the OCI spec's annotation {0} is missing: this runtime serves Kubernetes pods only")]
    NotCri(&'static str),
    #[error("container type {0:?} is neither sandbox nor container")]
    ContainerType(String),
    #[error(
        "{destination} mounts a part of emptyDir {volume:?} by subPath: its files are kept inside the sandbox, where a part cannot be \
         mounted alone. Mount the whole volume, or use a PersistentVolumeClaim"
    )]
    SubPath { volume: String, destination: String },
}

/// An OCI runtime spec.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec(pub Value);

impl Spec {
    /// An annotation's value.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.0.get("annotations")?.get(key)?.as_str()
    }

    fn required(&self, key: &'static str) -> Result<&str, Error> {
        self.annotation(key).ok_or(Error::NotCri(key))
    }

    pub fn role(&self) -> Result<Role, Error> {
        match self.required(CRI_CONTAINER_TYPE)? {
            "sandbox" => Ok(Role::Sandbox),
            "container" => Ok(Role::Container),
            other => Err(Error::ContainerType(other.to_owned())),
        }
    }

    /// Id of the pod's sandbox.
    pub fn sandbox_id(&self) -> Result<&str, Error> {
        self.required(CRI_SANDBOX_ID)
    }

    /// The container's name in its pod; the pause container has none.
    pub fn container_name(&self) -> Option<&str> {
        self.annotation(CRI_CONTAINER_NAME)
    }

    /// Takes NET_RAW out of all sets of capabilities.
    fn withhold_net_raw(&mut self) {
        let sets = self.0.pointer_mut("/process/capabilities");
        let sets = sets.and_then(Value::as_object_mut).into_iter().flatten();
        for names in sets.filter_map(|(_, names)| names.as_array_mut()) {
            names.retain(|name| name != CAP_NET_RAW);
        }
    }

    /// Afterwards the spec asks for standard streams where it asked for a terminal.
    pub fn forget_terminal(&mut self) {
        if let Some(process) = self.0.get_mut("process").and_then(Value::as_object_mut) {
            process.remove("terminal");
        }
    }

    pub fn terminal(&self) -> bool {
        self.0
            .pointer("/process/terminal")
            .and_then(Value::as_bool)
            .unwrap_or(false)
    }

    pub fn cgroups_path(&self) -> Result<&str, Error> {
        let path = self.0.pointer("/linux/cgroupsPath").and_then(Value::as_str);
        path.ok_or(Error::Missing("linux.cgroupsPath"))
    }

    /// Bytes of swap that the kubelet lets the container have (cgroup v2; 0 unless its swapBehavior is LimitedSwap). None if it says nothing of it.
    pub fn swap_limit(&self) -> Option<&str> {
        let unified = self.0.pointer("/linux/resources/unified")?;
        unified.get("memory.swap.max")?.as_str()
    }

    /// Path of the pod's network namespace; a pod on the host's network has none.
    pub fn network_namespace(&self) -> Option<PathBuf> {
        let namespaces = self.0.pointer("/linux/namespaces")?.as_array()?;
        namespaces
            .iter()
            .find(|namespace| namespace.get("type").and_then(Value::as_str) == Some("network"))
            .and_then(|namespace| namespace.get("path")?.as_str().map(PathBuf::from))
    }

    /// The container's root file system on the host.
    pub fn root(&self) -> Option<PathBuf> {
        self.0.pointer("/root/path")?.as_str().map(PathBuf::from)
    }

    fn mounts(&self) -> impl Iterator<Item = &Value> {
        self.0
            .get("mounts")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
    }

    /// Source of the mount at `destination`.
    fn mount_source(&self, destination: &str) -> Option<&str> {
        self.mounts()
            .find(|mount| mount.get("destination").and_then(Value::as_str) == Some(destination))
            .and_then(|mount| mount.get("source")?.as_str())
    }
}

/// Whether the Pod adds NET_RAW to the container of this OCI spec. Its list of capabilities cannot
/// tell: containerd adds NET_RAW by default.
pub(crate) fn adds_net_raw(spec: &Value) -> bool {
    let annotation = |key| spec.get("annotations")?.get(key)?.as_str();
    let containers = annotation(NET_RAW_CONTAINERS).unwrap_or_default();
    let own = annotation(CRI_CONTAINER_NAME);
    own.is_some_and(|own| containers.split(',').any(|name| name == own))
}

/// Reads the directory at `source`; `size`: bytes of its file system.
pub fn volume_directory(source: &Path, size: Option<u64>) -> std::io::Result<VolumeDirectory> {
    let found = std::fs::symlink_metadata(source)?;
    Ok(VolumeDirectory {
        mode: found.mode() & PERMISSIONS,
        uid: found.uid(),
        gid: found.gid(),
        size,
    })
}

/// The directory as options of a tmpfs (tmpfs(5)).
fn tmpfs_options(directory: &VolumeDirectory) -> String {
    let VolumeDirectory {
        mode,
        uid,
        gid,
        size,
    } = directory;
    let size = size.map(|bytes| format!(",size={bytes}"));
    let size = size.unwrap_or_default();
    format!("rw,mode={mode:04o},uid={uid},gid={gid}{size}")
}

/// Where the pod's /dev/shm is on the host.
pub fn shm_source(spec: &Spec) -> Option<PathBuf> {
    spec.mount_source("/dev/shm").map(PathBuf::from)
}

/// The spec that runsc gets: an absolute root path, no gVisor annotation but our volume hints, the
/// sandbox's own volumes mounted as such, and NET_RAW only where the Pod adds it.
pub fn rewrite(mut spec: Spec, bundle: &Path, volumes: &[SandboxVolume]) -> Result<Spec, Error> {
    let role = spec.role()?;
    if !adds_net_raw(&spec.0) {
        spec.withhold_net_raw();
    }
    let root = spec.0.get_mut("root").and_then(Value::as_object_mut);
    let root = root.ok_or(Error::Missing("root"))?;
    let path = root
        .get("path")
        .and_then(Value::as_str)
        .ok_or(Error::Missing("root.path"))?;
    let absolute = bundle.join(path);
    root.insert("path".to_owned(), json!(absolute));

    // Cgroups are ours: runsc would take the keeper's away when it deletes the container.
    if let Some(linux) = spec.0.get_mut("linux").and_then(Value::as_object_mut) {
        linux.remove("cgroupsPath");
    }
    if let Some(annotations) = spec.0.get_mut("annotations").and_then(Value::as_object_mut) {
        annotations.retain(|key, _| !key.starts_with(GVISOR_PREFIX));
        if role == Role::Sandbox {
            volumes.iter().for_each(|volume| hint(annotations, volume));
        }
    }
    if let Some(mounts) = spec.0.get_mut("mounts").and_then(Value::as_array_mut) {
        if role == Role::Sandbox {
            mounts.extend(volumes.iter().filter_map(held_by_pause));
        }
        for mount in mounts {
            refuse_part(mount, volumes)?;
            mount_inside(mount, role, volumes);
        }
    }
    Ok(spec)
}

/// gVisor ties a shared volume to the container that mounts it first, and cannot restore it without that container. The
/// pause container is there from the beginning to the end, so it mounts every emptyDir; an init container may come first
/// otherwise.
fn held_by_pause(volume: &SandboxVolume) -> Option<Value> {
    if volume.name == SHM_HINT {
        // The pause container has this mount of its own.
        return None;
    }
    Some(json!({
        "destination": format!("{PAUSE_VOLUMES}/{}", volume.name),
        "type": "bind",
        "source": volume.source,
        "options": ["rw"],
    }))
}

fn hint(annotations: &mut Map<String, Value>, volume: &SandboxVolume) {
    let source = volume.source.display().to_string();
    let options = match &volume.directory {
        Some(directory) => tmpfs_options(directory),
        None => "rw".to_owned(),
    };
    for (field, value) in [
        ("source", source.as_str()),
        ("type", "tmpfs"),
        ("share", "pod"),
        ("options", &options),
    ] {
        annotations.insert(
            format!("{MOUNT_HINT_PREFIX}{}.{field}", volume.name),
            json!(value),
        );
    }
}

/// A volume's files belong to the one mount that gVisor takes for a bind mount, and an image can only be restored when
/// there is exactly one such: the pause container's, for a volume that is backed by a file in its source. Every other
/// mount of it, and all mounts of a volume in memory, are tmpfs to gVisor, which finds the volume by its source.
fn mount_inside(mount: &mut Value, role: Role, volumes: &[SandboxVolume]) {
    let Some(source) = mount
        .get("source")
        .and_then(Value::as_str)
        .map(PathBuf::from)
    else {
        return;
    };
    let Some(volume) = volumes.iter().find(|volume| volume.source == source) else {
        return;
    };
    if role == Role::Sandbox && !volume.memory {
        return;
    }
    let Some(mount) = mount.as_object_mut() else {
        return;
    };
    mount.insert("type".to_owned(), json!("tmpfs"));
    if let Some(options) = mount.get_mut("options").and_then(Value::as_array_mut) {
        options.retain(|option| !option.as_str().is_some_and(makes_a_bind_mount));
    }
}

/// What the kubelet mounts for a `subPath` is a folder of its own, `POD/volume-subpaths/VOLUME/CONTAINER/N`, bound to the volume's on the host:
/// there the files of a volume that the sandbox keeps are not.
fn refuse_part(mount: &Value, volumes: &[SandboxVolume]) -> Result<(), Error> {
    let text = |field| mount.get(field).and_then(Value::as_str).unwrap_or_default();
    let source = Path::new(text("source"));
    let is_part = |volume: &&SandboxVolume| {
        // POD/volumes/kubernetes.io~empty-dir/VOLUME
        let pod = volume.source.ancestors().nth(3);
        let parts = pod.map(|pod| pod.join("volume-subpaths").join(&volume.name));
        parts.is_some_and(|parts| source.starts_with(parts))
    };
    match volumes.iter().find(is_part) {
        None => Ok(()),
        Some(volume) => Err(Error::SubPath {
            volume: volume.name.clone(),
            destination: text("destination").to_owned(),
        }),
    }
}

/// Whether the mount is an emptyDir of the Pod, by the place that the kubelet gives those: what it
/// holds is in the image, and nothing of another volume at the same place is.
fn is_empty_dir(mount: &Value) -> bool {
    let source = mount.get("source").and_then(Value::as_str);
    source.is_some_and(|source| source.contains("/volumes/kubernetes.io~empty-dir/"))
}

fn makes_a_bind_mount(option: &str) -> bool {
    matches!(
        option,
        "bind" | "rbind" | "private" | "rprivate" | "slave" | "rslave" | "shared" | "rshared"
    )
}

/// Digest over what must be the same when the container is restored: what gVisor checks, and nothing that another Pod
/// of the same template has differently (ids, environment, host paths, host name, limits).
pub fn digest(spec: &Spec) -> Digest {
    let process = |field: &str| spec.0.pointer(&format!("/process/{field}")).cloned();
    let mounts: Vec<Value> = spec
        .mounts()
        .map(|mount| {
            let options = mount.get("options").and_then(Value::as_array);
            let options = options.map(|options| {
                let kept = |option: &&Value| !option.as_str().is_some_and(makes_a_bind_mount);
                options.iter().filter(kept).cloned().collect::<Vec<Value>>()
            });
            json!([mount.get("destination"), options, is_empty_dir(mount)])
        })
        .collect();
    let mut distilled = json!({
        "args": process("args"),
        "cwd": process("cwd"),
        "user": process("user"),
        "capabilities": process("capabilities"),
        "rlimits": process("rlimits"),
        "terminal": spec.terminal(),
        "noNewPrivileges": process("noNewPrivileges"),
        "readonly": spec.0.pointer("/root/readonly"),
        "sysctl": spec.0.pointer("/linux/sysctl"),
        "mounts": mounts,
    });
    // containerd's list of capabilities does not tell. Left out otherwise: images from before
    // 2026-11-27 keep their digests.
    if adds_net_raw(&spec.0) {
        distilled["netRaw"] = json!(true);
    }
    Digest::of(distilled.to_string().as_bytes())
}

#[cfg(test)]
pub(crate) mod tests;
