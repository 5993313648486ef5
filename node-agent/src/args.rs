//! The command line. An option that is absent takes its value from its environment variable, if it
//! has one.

use std::net::{IpAddr, SocketAddr};
use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use torpor_core::store_limit::PerNamespace;

mod parse;
mod runsc;

use parse::{absolute, at_least_one, handler, seconds};
pub(crate) use runsc::{OlderRunsc, RunscArgs, ShaDigest};

/// Torpor's agent on a node: hibernates and wakes the pods of the runtime handler it installs.
#[derive(Debug, Parser)]
#[command(
    name = "torpor-agent",
    version = concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("TORPOR_GIT_COMMIT"), ")"),
    about
)]
pub(crate) struct Args {
    /// Format of the log on standard error
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        env = "TORPOR_LOG_FORMAT"
    )]
    pub(crate) log_format: LogFormat,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve this node until SIGTERM
    Run(RunArgs),
    /// Install the runtime's binaries on the node and add its handler to containerd's configuration
    Install(InstallArgs),
    /// Undo what `install` did
    Uninstall(UninstallArgs),
    /// Seal encryption keys of repositories, given on standard input, by the newest key of the KMS
    SealKeys(SealKeysArgs),
    /// Wait for SIGTERM: the container that keeps the installer's Pod running
    Wait,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Directories of Torpor's files and of the kubelet, as paths of the host.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct NodePaths {
    /// Directory of the binaries and their configuration, on persistent storage that allows
    /// execution
    #[arg(long, default_value = "/opt/torpor", value_parser = absolute, env = "TORPOR_INSTALL_DIR")]
    pub(crate) install_dir: PathBuf,
    /// Directory of the records of running pods, on a tmpfs
    #[arg(long, default_value = "/run/torpor", value_parser = absolute, env = "TORPOR_STATE_DIR")]
    pub(crate) state_dir: PathBuf,
    /// Directory of images and ledgers, on persistent storage
    #[arg(long, default_value = "/var/lib/torpor", value_parser = absolute, env = "TORPOR_STORE_DIR")]
    pub(crate) store_dir: PathBuf,
    /// The kubelet's --root-dir
    #[arg(long, default_value = "/var/lib/kubelet", value_parser = absolute, env = "TORPOR_KUBELET_ROOT")]
    pub(crate) kubelet_root: PathBuf,
}

impl NodePaths {
    /// Returns the directory of the shim, its configuration and the builds of runsc.
    pub(crate) fn bin_dir(&self) -> PathBuf {
        self.install_dir.join("bin")
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) paths: NodePaths,
    /// Name of this node's Node object
    #[arg(long, env = "NODE_NAME")]
    pub(crate) node_name: String,
    /// Name of Torpor's runtime handler in containerd's configuration, as `install` wrote it
    #[arg(long, default_value = "torpor", value_parser = handler, env = "TORPOR_RUNTIME_HANDLER")]
    pub(crate) runtime_handler: String,
    /// Export spans of steps, wakes and restores by OTLP over gRPC, as the variables
    /// OTEL_EXPORTER_OTLP_* configure it
    #[arg(long, env = "TORPOR_ENABLE_TRACING")]
    pub(crate) enable_tracing: bool,
    /// Address of /metrics
    // The default serves IPv4 and IPv6: a Pod may have addresses of IPv6 alone.
    #[arg(long, default_value = "[::]:9644", env = "TORPOR_METRICS_BIND_ADDRESS")]
    pub(crate) metrics_bind_address: SocketAddr,
    /// Address of /healthz and /readyz
    #[arg(long, default_value = "[::]:9645", env = "TORPOR_HEALTH_BIND_ADDRESS")]
    pub(crate) health_bind_address: SocketAddr,
    /// Maximum number of sandboxes that are saved at once. Default: half of the node's processors,
    /// at least 1
    #[arg(long, value_parser = at_least_one, env = "TORPOR_SAVES_AT_ONCE")]
    pub(crate) saves_at_once: Option<usize>,
    /// Average bytes a second (200Mi, 1G) that saves of idle sandboxes may write to the images'
    /// disk, or off. Saves that a user asked for count toward the average
    #[arg(long, default_value = "off", env = "TORPOR_SAVE_BANDWIDTH")]
    pub(crate) save_bandwidth: Bytes,
    /// Percent of the images' disk that saves leave free, or off. A save that would use this
    /// reserve fails as on a full disk, before it writes anything. Default: five more than the
    /// kubelet's eviction limits, as far as the installer could read them, and at least 20
    #[arg(long, env = "TORPOR_STORE_RESERVE")]
    pub(crate) store_reserve: Option<Limit>,
    /// Seconds for which the agent keeps the memory of a sleeping sandbox whose Pod was evicted or
    /// force-deleted, until a SandboxSnapshot names the Pod. While the images' disk has less free
    /// than half of --store-reserve, the agent removes such memory earlier, the oldest first. 0:
    /// not at all
    #[arg(long, default_value = "600", value_parser = seconds, env = "TORPOR_UNCLAIMED_IMAGE_GRACE")]
    pub(crate) unclaimed_image_grace: Duration,
    /// Limit of the images of one namespace on their disk: bytes (20Gi), percent of the file system
    /// (50%), or off (0). Beyond it the agent refuses hibernation in place and Manual snapshots,
    /// but not a Suspend or an eviction
    #[arg(long, default_value = "50%", value_parser = per_namespace, env = "TORPOR_STORE_PER_NAMESPACE")]
    pub(crate) store_per_namespace: PerNamespace,
    /// Mount point of the host's cgroups, from which the agent reads what sandboxes use and whether
    /// they may swap
    #[arg(long, default_value = "/sys/fs/cgroup", value_parser = absolute, env = "TORPOR_CGROUP_ROOT")]
    pub(crate) cgroup_root: PathBuf,
    #[command(flatten)]
    pub(crate) pressure: PressureArgs,
    #[command(flatten)]
    pub(crate) swap: SwapArgs,
    #[command(flatten)]
    pub(crate) kata: KataArgs,
    #[command(flatten)]
    pub(crate) repository: RepositoryArgs,
    #[command(flatten)]
    pub(crate) images: ImageServerArgs,
}

/// Options for the server of this node's images. The agents of other nodes fetch from it the images
/// that Pods of their nodes continue from.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ImageServerArgs {
    /// Address of the server of this node's images
    #[arg(long, default_value = "[::]:9646", env = "TORPOR_IMAGES_BIND_ADDRESS")]
    pub(crate) images_bind_address: SocketAddr,
    /// IP address at which other nodes reach the server: the agent's Pod IP. Without it there is no
    /// server, and sandboxes continue on other nodes only from images in a repository
    #[arg(long, env = "TORPOR_IMAGES_ADDRESS")]
    pub(crate) images_address: Option<IpAddr>,
}

/// Options of `seal-keys`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SealKeysArgs {
    /// Unix socket of the KMS plug-in (version 2 of Kubernetes' KMS API)
    #[arg(long, value_name = "SOCKET", value_parser = absolute, env = "TORPOR_REPOSITORY_KMS")]
    pub(crate) repository_kms: PathBuf,
    /// Put a new random key with this id in front
    #[arg(long, value_name = "ID")]
    pub(crate) add: Option<String>,
}

/// Options for the upload of images to the repositories of SnapshotClasses.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct RepositoryArgs {
    /// Directory with the credentials of repositories, one file for each: the Secret
    /// torpor-repository
    #[arg(long, default_value = "/etc/torpor/repository", value_parser = absolute, env = "TORPOR_REPOSITORY_CREDENTIALS")]
    pub(crate) repository_credentials: PathBuf,
    /// File with the encryption keys of repositories, one on each line, `<id>:<32 bytes in base64>`
    /// or `<id>:kms:<key that a KMS has sealed>`: the Secret torpor-repository-keys. The first key
    /// is for new images
    #[arg(long, default_value = "/etc/torpor/repository-keys/keys", value_parser = absolute, env = "TORPOR_REPOSITORY_KEYS")]
    pub(crate) repository_keys: PathBuf,
    /// Unix socket of a KMS plug-in (version 2 of Kubernetes' KMS API) that opens sealed keys
    #[arg(long, value_name = "SOCKET", value_parser = absolute, env = "TORPOR_REPOSITORY_KMS")]
    pub(crate) repository_kms: Option<PathBuf>,
    /// Maximum number of images that are uploaded at once
    #[arg(long, default_value = "2", value_parser = at_least_one, env = "TORPOR_UPLOADS_AT_ONCE")]
    pub(crate) uploads_at_once: usize,
    /// Maximum number of images that are fetched at once
    #[arg(long, default_value = "4", value_parser = at_least_one, env = "TORPOR_FETCHES_AT_ONCE")]
    pub(crate) fetches_at_once: usize,
    /// Maximum bytes a second (50Mi, 1G) of all uploads together, or off
    #[arg(long, default_value = "off", env = "TORPOR_UPLOAD_BANDWIDTH")]
    pub(crate) upload_bandwidth: Bytes,
}

/// Limits of the swap of dozing sandboxes. An awake sandbox that would need more does not doze.
/// Such a sandbox hibernates when it has been idle for its time until hibernation.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct SwapArgs {
    /// Maximum memory (512Mi, 2Gi) of a sandbox that dozes, or off
    #[arg(long, default_value = "off", env = "TORPOR_DOZE_SWAP_PER_SANDBOX")]
    pub(crate) doze_swap_per_sandbox: Bytes,
    /// Maximum bytes (8Gi) of the node's swap in use, including the memory of sandboxes that are
    /// about to doze, or off
    #[arg(long, default_value = "off", env = "TORPOR_DOZE_SWAP_PER_NODE")]
    pub(crate) doze_swap_per_node: Bytes,
}

/// Options for Kata sandboxes. Without a Kata handler the agent ignores Kata sandboxes and does not
/// connect to containerd.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct KataArgs {
    /// Kata's runtime handlers in containerd's configuration, such as kata-qemu: their sandboxes
    /// may doze. Their runtime_type must be io.containerd.<handler>.v2
    #[arg(long, value_delimiter = ',', value_parser = handler, env = "TORPOR_KATA_HANDLERS")]
    pub(crate) kata_handlers: Vec<String>,
    /// Path of containerd's socket
    #[arg(long, default_value = "/run/containerd/containerd.sock", value_parser = absolute, env = "TORPOR_KATA_CONTAINERD_SOCKET")]
    pub(crate) kata_containerd_socket: PathBuf,
}

/// Limits of memory and swap. Beyond these limits the node is short, and the sandboxes that have
/// been idle longest sleep before their time.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct PressureArgs {
    /// Percent of the node's memory that must be available, or off. With less, idle sandboxes that
    /// may sleep do so early
    #[arg(long, default_value = "10", env = "TORPOR_MEMORY_PRESSURE_AVAILABLE")]
    pub(crate) memory_pressure_available: Limit,
    /// Percent of time for which programs of the node may wait for memory (PSI, some avg10), or off
    #[arg(long, default_value = "20", env = "TORPOR_MEMORY_PRESSURE_STALLED")]
    pub(crate) memory_pressure_stalled: Limit,
    /// Percent of the node's swap that must be free, or off. With less, dozing sandboxes hibernate
    #[arg(long, default_value = "10", env = "TORPOR_SWAP_PRESSURE_FREE")]
    pub(crate) swap_pressure_free: Limit,
    /// Seconds for which a sandbox must be idle before a shortage of memory or swap puts it to
    /// sleep
    #[arg(long, default_value = "30", value_parser = seconds, env = "TORPOR_PRESSURE_IDLE")]
    pub(crate) pressure_idle: Duration,
    /// Let a shortage of memory or swap also put sandboxes to sleep that have no annotation about
    /// sleep
    #[arg(long, env = "TORPOR_PRESSURE_ON_ALL")]
    pub(crate) pressure_on_all: bool,
}

/// A limit of 1 to 99 percent, or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit(Option<u8>);

impl Limit {
    /// Returns the percent, or None for off.
    pub(crate) fn percent(self) -> Option<u8> {
        self.0
    }
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self(None));
        }
        let percent = text
            .parse()
            .ok()
            .filter(|percent| (1..=99).contains(percent));
        percent
            .map(|percent| Self(Some(percent)))
            .ok_or_else(|| "allowed are 1 to 99, and off".to_owned())
    }
}

/// A number of bytes or of bytes a second, or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bytes(Option<NonZeroU64>);

impl Bytes {
    /// Returns the number, or None for off.
    pub(crate) fn bytes(self) -> Option<NonZeroU64> {
        self.0
    }
}

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self(None));
        }
        // Suffixes of Kubernetes' quantities.
        let end = text.find(|c: char| !c.is_ascii_digit());
        let (number, suffix) = text.split_at(end.unwrap_or(text.len()));
        let unit = match suffix {
            "" => Some(1),
            "k" => Some(1_000),
            "M" => Some(1_000_000),
            "G" => Some(1_000_000_000),
            "Ki" => Some(1 << 10),
            "Mi" => Some(1 << 20),
            "Gi" => Some(1 << 30),
            _ => None,
        };
        let bytes = unit.zip(number.parse().ok());
        bytes
            .and_then(|(unit, number): (u64, u64)| NonZeroU64::new(number.checked_mul(unit)?))
            .map(|bytes| Self(Some(bytes)))
            .ok_or_else(|| "allowed are whole numbers with or without k, M, G, Ki, Mi or Gi, such as 200Mi, and off".to_owned())
    }
}

/// Minimum of the default reserve, in percent. It is above the kubelet's own defaults, which are 10
/// percent (nodefs) and 15 percent (imagefs).
const MIN_RESERVE: u8 = 20;
/// Percent by which the default reserve exceeds the kubelet's eviction limit.
const ABOVE_EVICTION: u8 = 5;
/// Maximum of the default reserve, in percent. With a greater reserve the disk would take no images
/// at all.
const MAX_RESERVE: u8 = 95;

impl RunArgs {
    /// Returns the percent of the images' disk that saves leave free. `eviction` is the kubelet's
    /// highest eviction limit for disks in percent, or None if it is unknown.
    pub(crate) fn reserve(&self, eviction: Option<u8>) -> u8 {
        let default = || {
            let above = eviction.unwrap_or(0).saturating_add(ABOVE_EVICTION);
            above.clamp(MIN_RESERVE, MAX_RESERVE)
        };
        self.store_reserve
            .map_or_else(default, |limit| limit.percent().unwrap_or(0))
    }
}

impl InstallArgs {
    /// Returns the path of the kubelet's configuration file on the host. The default is kubeadm's.
    pub(crate) fn kubelet_config(&self) -> PathBuf {
        let given = self.kubelet_config.clone();
        given.unwrap_or_else(|| self.paths.kubelet_root.join("config.yaml"))
    }
}

fn per_namespace(text: &str) -> Result<PerNamespace, String> {
    if text == "0" {
        return Ok(PerNamespace::Unlimited);
    }
    if let Some(percent) = text.strip_suffix('%') {
        let percent = percent
            .parse()
            .ok()
            .filter(|percent| (1..=100).contains(percent));
        return percent
            .map(PerNamespace::Percent)
            .ok_or_else(|| "allowed are 1% to 100%".to_owned());
    }
    let bytes: Bytes = text
        .parse()
        .map_err(|_| "allowed are bytes (20Gi), percent (50%), 0 and off".to_owned())?;
    Ok(bytes
        .bytes()
        .map_or(PerNamespace::Unlimited, PerNamespace::Bytes))
}

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct InstallArgs {
    #[command(flatten)]
    pub(crate) paths: NodePaths,
    #[command(flatten)]
    pub(crate) containerd: ContainerdArgs,
    /// Period at which containerd 2.3 and later measures what each container uses, asleep or awake:
    /// whole seconds (10s), or unchanged. A period in containerd's main configuration file is kept
    // containerd's own default is each second, ten times as often as the kubelet requests figures.
    #[arg(long, default_value = "10s", env = "TORPOR_STATS_PERIOD")]
    pub(crate) stats_period: StatsPeriod,
    /// Mount point of the host's root directory
    #[arg(long, default_value = "/host", value_parser = absolute, env = "TORPOR_HOST_ROOT")]
    pub(crate) host_root: PathBuf,
    /// Directory that holds the shim and runsc to install
    #[arg(long, default_value = "/", value_parser = absolute, env = "TORPOR_PAYLOAD_DIR")]
    pub(crate) payload_dir: PathBuf,
    #[command(flatten)]
    pub(crate) runsc: RunscArgs,
    /// gVisor's platform
    #[arg(long, default_value = "systrap", env = "TORPOR_RUNSC_PLATFORM")]
    pub(crate) runsc_platform: String,
    /// Port of the kubelet's API (KubeletConfiguration's `port`). Torpor recognizes its probes of a
    /// sleeping pod by the process that listens on this port
    #[arg(long, default_value = "10250", env = "TORPOR_KUBELET_PORT")]
    pub(crate) kubelet_port: u16,
    /// Path of the kubelet's configuration file. Images leave more of the disk free than its
    /// eviction limits. Default: config.yaml in --kubelet-root
    #[arg(long, value_parser = absolute, env = "TORPOR_KUBELET_CONFIG")]
    pub(crate) kubelet_config: Option<PathBuf>,
    /// Expedite RCU grace periods of the whole node's kernel during a wake and, for images of
    /// 16 MiB and more, allocate shared memory in pieces of 64 KiB. This halves the time of a wake
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) expedite_wakes: bool,
    /// Start a hibernated sandbox that wakes without runsc's commands, a third faster, with the
    /// releases of gVisor for which Torpor knows how
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) begin_sandboxes: bool,
    /// Maximum number of hibernated sandboxes that are restored at once; 0: no limit. Default: one
    /// more than the node's processors
    #[arg(long, env = "TORPOR_WAKES_AT_ONCE")]
    pub(crate) wakes_at_once: Option<u32>,
    /// Swap that the installer creates for dozing sandboxes: zram:<percent>% of the node's memory,
    /// compressed in memory. Without it they use the node's own swap, if any
    #[arg(long, value_parser = doze_swap, env = "TORPOR_DOZE_SWAP")]
    pub(crate) doze_swap: Option<ShareOfMemory>,
    /// Directory on the host for runsc's debug logs; without it runsc writes none
    #[arg(long, value_parser = absolute, env = "TORPOR_RUNSC_DEBUG_DIR")]
    pub(crate) runsc_debug_dir: Option<PathBuf>,
}

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct UninstallArgs {
    #[command(flatten)]
    pub(crate) paths: NodePaths,
    #[command(flatten)]
    pub(crate) containerd: ContainerdArgs,
    /// Mount point of the host's root directory
    #[arg(long, default_value = "/host", value_parser = absolute, env = "TORPOR_HOST_ROOT")]
    pub(crate) host_root: PathBuf,
    /// Remove images and ledgers too
    #[arg(long, env = "TORPOR_PURGE")]
    pub(crate) purge: bool,
    /// Uninstall although pods of this runtime still run on the node; they can no longer be stopped
    /// cleanly
    #[arg(long, env = "TORPOR_FORCE")]
    pub(crate) force: bool,
    /// Seconds for which to wait until the node's pods of this runtime are removed: the kubelet
    /// removes the rest of a pod some seconds after the apiserver has deleted it
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 20,
        env = "TORPOR_WAIT_FOR_PODS"
    )]
    pub(crate) wait_for_pods: u64,
}

/// Options for the node's containerd. All paths are paths of the host.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ContainerdArgs {
    /// Path of containerd's main configuration file
    #[arg(long, default_value = "/etc/containerd/config.toml", value_parser = absolute, env = "TORPOR_CONTAINERD_CONFIG")]
    pub(crate) containerd_config: PathBuf,
    /// Directory for the file that `install` adds to containerd's configuration
    #[arg(long, default_value = "/etc/containerd/conf.d", value_parser = absolute, env = "TORPOR_CONTAINERD_CONF_DIR")]
    pub(crate) containerd_conf_dir: PathBuf,
    /// Way to restart containerd: systemd:<unit>, pidfile:<path> (its supervisor starts it again)
    /// or none
    #[arg(
        long,
        default_value = "systemd:containerd",
        env = "TORPOR_CONTAINERD_RESTART"
    )]
    pub(crate) containerd_restart: ContainerdRestart,
    /// Path of containerd's socket, which must answer after a restart
    #[arg(long, default_value = "/run/containerd/containerd.sock", value_parser = absolute, env = "TORPOR_CONTAINERD_SOCKET")]
    pub(crate) containerd_socket: PathBuf,
    /// Maximum seconds for a restart of containerd
    #[arg(long, default_value = "90", value_parser = seconds, env = "TORPOR_CONTAINERD_RESTART_TIMEOUT")]
    pub(crate) containerd_restart_timeout: Duration,
    /// Name of the runtime handler, as in the RuntimeClass
    #[arg(long, default_value = "torpor", value_parser = handler, env = "TORPOR_RUNTIME_HANDLER")]
    pub(crate) runtime_handler: String,
}

/// The installer's setting of containerd's `stats_collect_period`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StatsPeriod {
    /// The installer does not set the period.
    Unchanged,
    Seconds(NonZeroU32),
}

impl FromStr for StatsPeriod {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "unchanged" {
            return Ok(Self::Unchanged);
        }
        text.strip_suffix('s')
            .and_then(|seconds| seconds.parse().ok())
            .map(Self::Seconds)
            .ok_or_else(|| "allowed are whole seconds, such as 10s, and unchanged".to_owned())
    }
}

/// The way to restart containerd, so that containerd reads its configuration again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ContainerdRestart {
    /// `systemctl restart <unit>` on the host.
    Systemd(String),
    /// SIGTERM to the process that this file names. containerd's supervisor then starts containerd
    /// again and rewrites the file.
    Pidfile(PathBuf),
    /// The installer does not restart containerd; an administrator does.
    None,
}

impl FromStr for ContainerdRestart {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "none" => Ok(Self::None),
            Some(("systemd", unit)) if !unit.is_empty() && !unit.starts_with('-') => {
                Ok(Self::Systemd(unit.to_owned()))
            }
            Some(("pidfile", path)) => absolute(path).map(Self::Pidfile),
            _ => Err("allowed are systemd:<unit>, pidfile:<absolute path> and none".to_owned()),
        }
    }
}

/// A share of the node's memory, in percent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ShareOfMemory(u8);

impl ShareOfMemory {
    /// Makes a share of 1 to 200 percent; other shares are None. zram compresses its content, so
    /// the content may be larger than the node's memory, but not by much.
    pub(crate) fn percent(percent: u8) -> Option<Self> {
        (1..=200).contains(&percent).then_some(Self(percent))
    }

    /// Returns this share of `bytes`, rounded down to whole pages of any page size.
    pub(crate) fn of(self, bytes: u64) -> u64 {
        const LARGEST_PAGE: u64 = 64 << 10;
        bytes / 100 * u64::from(self.0) / LARGEST_PAGE * LARGEST_PAGE
    }
}

fn doze_swap(text: &str) -> Result<ShareOfMemory, String> {
    let percent = text
        .strip_prefix("zram:")
        .and_then(|share| share.strip_suffix('%'));
    percent
        .and_then(|percent| ShareOfMemory::percent(percent.parse().ok()?))
        .ok_or_else(|| "allowed is zram:<1 to 200>%".to_owned())
}

#[cfg(test)]
mod tests;
