//! Configuration of the node: paths and flags. The installer writes it beside the shim's
//! program, because containerd gives the shim no configuration of Torpor's.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Name of the file beside the shim's program. The OCI runtime of 0.1 (`torpor-oci`) reads it, too.
pub const FILE_NAME: &str = "torpor-oci.json";

/// Beginning of the file name of a build of runsc; digits of its digest follow.
const BUILD: &str = "runsc-";
const BUILD_DIGITS: usize = 12;

fn is_build(digits: &str) -> bool {
    digits.len() == BUILD_DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Returns the part of a digest (`blake3:<hex>`) that selects a build: the digits in the name of
/// the build's file.
fn build_of(digest: &str) -> &str {
    let end = "blake3:".len() + BUILD_DIGITS;
    digest.get(..end).unwrap_or(digest)
}

/// Paths and flags that the shim, its commands and the agent share.
// Unknown fields are accepted. After an update the shim of an older pod still runs commands of its
// own version. They read the new file, and must be able to wake the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// Path of the runsc binary that this installation ships. Images name its digest.
    pub runsc: PathBuf,
    /// BLAKE3 digest of that binary, `blake3:<hex>`. The installer computes it once.
    pub runsc_digest: String,
    /// Directory of the state that lasts until the node's reboot (a tmpfs), `/run/torpor`.
    pub state_dir: PathBuf,
    /// Directory of images and ledgers, `/var/lib/torpor`.
    pub store_dir: PathBuf,
    /// The kubelet's root directory, which contains the emptyDir volumes.
    pub kubelet_root: PathBuf,
    /// Port of the kubelet's server. The kubelet's probes are recognized by it.
    #[serde(default = "default_kubelet_port")]
    pub kubelet_port: u16,
    /// Largest of the kubelet's eviction thresholds for disks, in percent of free space; none if
    /// the kubelet's configuration was not found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction_percent: Option<u8>,
    /// gVisor's platform.
    #[serde(default = "default_platform")]
    pub platform: String,
    /// True if settings of the host's kernel may be changed during a wake (see
    /// [`torpor_runsc::kernel_tuning`]).
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub expedite_wakes: bool,
    /// True if a sandbox may be started without runsc's command in a wake (see
    /// [`torpor_runsc_direct`]).
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub begin_sandboxes: bool,
    /// Most sandboxes that are restored at once (see [`torpor_runsc::wake_slots`]); 0: no limit.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub wakes_at_once: u32,
    /// Digests (`blake3:<hex>`) of revoked builds of runsc. A revoked build starts no sandbox on
    /// this node; see [`Self::admit_runsc`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub revoked_runsc: Vec<String>,
    /// Directory for runsc's debug logs; none in production.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub debug_log_dir: Option<PathBuf>,
}

fn default_platform() -> String {
    "systrap".to_owned()
}

/// Default of KubeletConfiguration's `port`.
fn default_kubelet_port() -> u16 {
    10250
}

fn yes() -> bool {
    true
}

fn is_yes(value: &bool) -> bool {
    *value
}

fn is_zero(value: &u32) -> bool {
    *value == 0
}

/// Error: the node's operator has revoked the build of runsc (`torpor-agent install
/// --revoked-runsc`).
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the build of runsc {digest} is revoked on this node, so no sandbox starts with it; its images are kept. \
     Remove the digest from --revoked-runsc (torpor-agent install) to restore them"
)]
pub struct Revoked {
    pub digest: String,
}

impl Revoked {
    /// The reason in conditions, ledgers and metrics.
    pub const REASON: &'static str = "RunscRevoked";
}

/// Error of reading the configuration.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot find the path of the running program")]
    OwnPath(#[source] std::io::Error),
    #[error("cannot read {path}: is Torpor installed on this node (DaemonSet torpor-installer)?")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{path} is not a valid configuration of Torpor")]
    Parse {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
}

impl Config {
    /// Reads the configuration beside the running binary.
    pub fn beside_own_binary() -> Result<Self, Error> {
        let exe = std::env::current_exe().map_err(Error::OwnPath)?;
        Self::read(&exe.with_file_name(FILE_NAME))
    }

    /// Reads the configuration at `path`.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bytes = std::fs::read(path).map_err(|source| Error::Read {
            path: path.into(),
            source,
        })?;
        serde_json::from_slice(&bytes).map_err(|source| Error::Parse {
            path: path.into(),
            source,
        })
    }

    /// Returns the path of the build of runsc with this digest (`blake3:<hex>`); none if it is not
    /// installed. An update leaves older builds in place for the pods and images that need them.
    pub fn runsc_build(&self, digest: &str) -> Option<PathBuf> {
        if digest == self.runsc_digest {
            return Some(self.runsc.clone());
        }
        let digits = digest.strip_prefix("blake3:")?.get(..BUILD_DIGITS)?;
        let path = self.runsc.with_file_name(format!("{BUILD}{digits}"));
        (is_build(digits) && path.is_file()).then_some(path)
    }

    /// Returns the installed builds of runsc that are not revoked, sorted: `blake3:` and the digits
    /// in the name of the build's file. None if their directory cannot be read.
    pub fn runsc_builds(&self) -> Option<Vec<String>> {
        let files = std::fs::read_dir(self.runsc.parent()?).ok()?;
        let names = files.map(|file| file.map(|file| file.file_name().into_string()));
        let names = names.collect::<Result<Vec<_>, _>>().ok()?;
        let digits = |name: &str| name.strip_prefix(BUILD).map(str::to_owned);
        let builds = names.iter().flatten().filter_map(|name| digits(name));
        let builds = builds.filter(|digits| is_build(digits));
        let builds = builds.map(|digits| format!("blake3:{digits}"));
        let mut builds: Vec<_> = builds
            .filter(|build| self.admit_runsc(build).is_ok())
            .collect();
        builds.sort_unstable();
        Some(builds)
    }

    /// Returns an error if the build is revoked. Only a start or a restore checks its build: the
    /// processes of a sandbox that runs or dozes exist already.
    ///
    /// Compares what [`Self::runsc_build`] selects a build by: the digest of an image may come from
    /// a node that was taken over.
    pub fn admit_runsc(&self, digest: &str) -> Result<(), Revoked> {
        let mut revoked = self.revoked_runsc.iter();
        match revoked.any(|revoked| build_of(revoked) == build_of(digest)) {
            true => Err(Revoked {
                digest: digest.to_owned(),
            }),
            false => Ok(()),
        }
    }

    /// Returns the directory that contains runsc's root directories: see
    /// [`torpor_runsc::command::NodeRunsc::root_of`].
    pub fn runsc_base(&self) -> PathBuf {
        self.state_dir.join("runsc")
    }

    /// Returns the directory of the pods' records, with one directory per pod.
    pub fn pods_dir(&self) -> PathBuf {
        self.state_dir.join("pods")
    }

    /// Returns the directory of the containers' records, with one directory per container.
    pub fn containers_dir(&self) -> PathBuf {
        self.state_dir.join("containers")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a configuration with this state directory.
    pub(crate) fn on(state_dir: &Path) -> Config {
        let text = r#"{"runsc":"/r","runsc_digest":"blake3:00","state_dir":"","store_dir":"/i","kubelet_root":"/k"}"#;
        let config: Config = serde_json::from_str(text).expect("understood");
        Config {
            state_dir: state_dir.to_owned(),
            ..config
        }
    }

    #[test]
    fn a_revoked_build_is_refused_and_the_refusal_names_it_and_the_remedy() {
        let config = Config {
            revoked_runsc: vec!["blake3:01".to_owned(), "blake3:02".to_owned()],
            ..on(Path::new("/s"))
        };
        assert_eq!(config.admit_runsc("blake3:00"), Ok(()));
        let refused = config.admit_runsc("blake3:02").expect_err("revoked");
        let words = refused.to_string();
        assert!(words.contains("blake3:02") && words.contains("--revoked-runsc"));
    }

    #[test]
    fn each_installed_build_is_listed_and_found_by_its_digest() {
        let dir = tempfile::tempdir().expect("a directory");
        let names = [
            "runsc-00112233aabb",
            "runsc-00112233aabb.flags",
            "runsc-0",
            "torpor-agent",
        ];
        for name in names.into_iter().chain(["runsc-ffffffffffff"]) {
            std::fs::write(dir.path().join(name), []).expect("written");
        }
        let config = Config {
            runsc: dir.path().join("runsc-ffffffffffff"),
            ..on(Path::new("/s"))
        };
        let builds = config.runsc_builds().expect("read");
        assert_eq!(builds, ["blake3:00112233aabb", "blake3:ffffffffffff"]);
        let older = config.runsc_build(&format!("{}{}", builds[0], "0".repeat(52)));
        assert_eq!(older, Some(dir.path().join(names[0])));
        assert_eq!(config.runsc_build("blake3:../../etc/pw"), None);
        assert_eq!(config.runsc_build("blake3:000000000000"), None);
        let revoked = Config {
            revoked_runsc: vec![format!("{}{}", builds[0], "0".repeat(52))],
            ..config
        };
        // A digest that an attacker has completed otherwise selects the same file.
        let crafted = format!("{}{}", builds[0], "1".repeat(52));
        revoked.admit_runsc(&crafted).expect_err("revoked");
        assert_eq!(revoked.runsc_builds(), Some(vec![builds[1].clone()]));
        let nowhere = Config {
            runsc: dir.path().join("nowhere/runsc-ffffffffffff"),
            ..revoked
        };
        assert_eq!(nowhere.runsc_builds(), None);
    }

    #[test]
    fn a_configuration_of_a_newer_version_is_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(FILE_NAME);
        let text = r#"{"runsc":"/r","runsc_digest":"blake3:00","state_dir":"/s","store_dir":"/i","kubelet_root":"/k","of_tomorrow":[1]}"#;
        std::fs::write(&path, text).expect("written");
        let config = Config::read(&path).expect("understood");
        assert_eq!((config.kubelet_port, config.wakes_at_once), (10250, 0));
        assert!(config.revoked_runsc.is_empty());
    }
}
