//! Torpor's changes of an OCI spec before runsc reads it. Pure.
//!
//! The spec stays raw JSON: fields that are unknown here pass through unchanged.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use torpor_records::{Role, SandboxVolume, VolumeDirectory};
use torpor_snapshots::Digest;

/// Annotations that containerd's CRI sets in every spec.
pub const CRI_CONTAINER_TYPE: &str = "io.kubernetes.cri.container-type";
pub const CRI_CONTAINER_NAME: &str = "io.kubernetes.cri.container-name";
pub const CRI_SANDBOX_ID: &str = "io.kubernetes.cri.sandbox-id";
pub const CRI_SANDBOX_NAMESPACE: &str = "io.kubernetes.cri.sandbox-namespace";
pub const CRI_SANDBOX_NAME: &str = "io.kubernetes.cri.sandbox-name";
pub const CRI_SANDBOX_UID: &str = "io.kubernetes.cri.sandbox-uid";
pub const CRI_IMAGE_NAME: &str = "io.kubernetes.cri.image-name";

/// Prefix of the annotations that control the privileged runsc. Only Torpor's own reach runsc.
const GVISOR_PREFIX: &str = "dev.gvisor.";
const MOUNT_HINT_PREFIX: &str = "dev.gvisor.spec.mount.";
/// The controller's annotation (`torpor_api::annotations::NET_RAW`): names of the Pod's containers
/// that add the capability NET_RAW themselves, separated by commas.
const NET_RAW_CONTAINERS: &str = "torpor.dev/net-raw";
/// The capability that runc gives by default, and gVisor only with `--net-raw`.
pub(crate) const CAP_NET_RAW: &str = "CAP_NET_RAW";
/// The bits of a file's mode (inode(7)) without those of its type.
const PERMISSIONS: u32 = 0o7777;
/// Directory in which the pause container mounts the pod's volumes.
pub const PAUSE_VOLUMES: &str = "/torpor-volumes";
/// Name of the volume that the pod's /dev/shm is to gVisor.
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
    /// Returns an annotation's value.
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

    /// Returns the id of the pod's sandbox.
    pub fn sandbox_id(&self) -> Result<&str, Error> {
        self.required(CRI_SANDBOX_ID)
    }

    /// Returns the container's name in its pod. The pause container has none.
    pub fn container_name(&self) -> Option<&str> {
        self.annotation(CRI_CONTAINER_NAME)
    }

    /// Removes NET_RAW from all sets of capabilities.
    fn withhold_net_raw(&mut self) {
        let sets = self.0.pointer_mut("/process/capabilities");
        let sets = sets.and_then(Value::as_object_mut).into_iter().flatten();
        for names in sets.filter_map(|(_, names)| names.as_array_mut()) {
            names.retain(|name| name != CAP_NET_RAW);
        }
    }

    /// Removes the request of a terminal: the process gets standard streams.
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

    /// Returns the bytes of swap that the kubelet allows the container (cgroup v2; 0 unless its
    /// swapBehavior is LimitedSwap). None where the spec has no such limit.
    pub fn swap_limit(&self) -> Option<&str> {
        let unified = self.0.pointer("/linux/resources/unified")?;
        unified.get("memory.swap.max")?.as_str()
    }

    /// Returns the path of the pod's network namespace. None for a pod on the host's network.
    pub fn network_namespace(&self) -> Option<PathBuf> {
        let namespaces = self.0.pointer("/linux/namespaces")?.as_array()?;
        namespaces
            .iter()
            .find(|namespace| namespace.get("type").and_then(Value::as_str) == Some("network"))
            .and_then(|namespace| namespace.get("path")?.as_str().map(PathBuf::from))
    }

    /// Returns the path of the container's root file system on the host.
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

    /// Returns the source of the mount at `destination`.
    fn mount_source(&self, destination: &str) -> Option<&str> {
        self.mounts()
            .find(|mount| mount.get("destination").and_then(Value::as_str) == Some(destination))
            .and_then(|mount| mount.get("source")?.as_str())
    }
}

/// Reports whether the Pod adds NET_RAW to the container of this OCI spec. The spec's list of
/// capabilities does not show it, because containerd adds NET_RAW by default.
pub(crate) fn adds_net_raw(spec: &Value) -> bool {
    let annotation = |key| spec.get("annotations")?.get(key)?.as_str();
    let containers = annotation(NET_RAW_CONTAINERS).unwrap_or_default();
    let own = annotation(CRI_CONTAINER_NAME);
    own.is_some_and(|own| containers.split(',').any(|name| name == own))
}

/// Reads owner and permissions of the directory at `source`. `size`: bytes of its file system.
pub fn volume_directory(source: &Path, size: Option<u64>) -> std::io::Result<VolumeDirectory> {
    let found = std::fs::symlink_metadata(source)?;
    Ok(VolumeDirectory {
        mode: found.mode() & PERMISSIONS,
        uid: found.uid(),
        gid: found.gid(),
        size,
    })
}

/// Returns the directory's properties as options of a tmpfs (tmpfs(5)).
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

/// Returns the path of the pod's /dev/shm on the host.
pub fn shm_source(spec: &Spec) -> Option<PathBuf> {
    spec.mount_source("/dev/shm").map(PathBuf::from)
}

/// Returns the spec for runsc: with an absolute root path, no gVisor annotation but Torpor's volume
/// hints, the sandbox's own volumes mounted as such, and NET_RAW only where the Pod adds it.
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

    // Torpor makes the cgroups. runsc would remove the container's when it deletes the container.
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

/// Returns the pause container's mount of an emptyDir. gVisor ties a shared volume to the first
/// container that mounts it, and cannot restore the volume without that container. The pause
/// container exists for the whole life of the sandbox, so it mounts every emptyDir. Otherwise an
/// init container could be the first.
fn held_by_pause(volume: &SandboxVolume) -> Option<Value> {
    if volume.name == SHM_HINT {
        // The pause container's spec has this mount already.
        return None;
    }
    Some(json!({
        "destination": format!("{PAUSE_VOLUMES}/{}", volume.name),
        "type": "bind",
        "source": volume.source,
        "options": ["rw"],
    }))
}

/// Adds gVisor's annotations for a volume that the sandbox keeps.
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

/// Changes the type of a mount of a volume that the sandbox keeps. A volume's files belong to the
/// one mount that gVisor takes for a bind mount. An image can only be restored with exactly one
/// such mount: the pause container's, for a volume that is backed by a file in its source. Every
/// other mount of that volume, and all mounts of a volume in memory, are tmpfs to gVisor, which
/// finds the volume by its source.
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

/// Refuses a mount with `subPath` of a volume that the sandbox keeps. For a `subPath` the kubelet
/// mounts a directory `POD/volume-subpaths/VOLUME/CONTAINER/N`, which is bound to the volume's
/// directory on the host. It does not have the files of a volume that the sandbox keeps.
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

/// Reports whether the mount is an emptyDir of the Pod, by the path that the kubelet gives them.
/// The files of an emptyDir are in the image. Files of another volume at the same place are not.
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

/// Returns the digest of the parts of a spec that must be the same when the container is restored:
/// the parts that gVisor checks, without those in which Pods of the same template differ (ids,
/// environment, host paths, host name, limits).
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
    // containerd's list of capabilities does not show this. False is left out, so that images from
    // before 2026-11-27 keep their digests.
    if adds_net_raw(&spec.0) {
        distilled["netRaw"] = json!(true);
    }
    Digest::of(distilled.to_string().as_bytes())
}

#[cfg(test)]
pub(crate) mod tests;
