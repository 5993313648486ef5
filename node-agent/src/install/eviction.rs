//! The kubelet's eviction limits for disks, read from the kubelet's configuration file. Images must
//! leave more of the disk free than these limits; otherwise the kubelet evicts other Pods.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Read};
use std::num::NonZeroU64;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::args::Bytes;

/// Maximum length of a configuration file, in bytes.
const MAX_LENGTH: u64 = 1 << 20;
/// Eviction signals of free disk space, and their default limits in percent. The defaults apply if
/// `evictionHard` is absent (Kubernetes, `pkg/kubelet/apis/config/v1beta1/defaults_linux.go`).
const SIGNALS: [(&str, u8); 2] = [("nodefs.available", 10), ("imagefs.available", 15)];

/// The reason for which the kubelet's limits are unknown.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot read the kubelet's configuration {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("the kubelet's configuration {path} has more than {MAX_LENGTH} bytes")]
    TooLong { path: PathBuf },
    #[error("{path} is not a kubelet's configuration: {why}")]
    Malformed { path: PathBuf, why: String },
}

/// The part of a KubeletConfiguration (kubelet.config.k8s.io/v1beta1) that is about eviction.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct KubeletConfiguration {
    eviction_hard: Option<BTreeMap<String, String>>,
    eviction_soft: Option<BTreeMap<String, String>>,
}

/// Returns the kubelet's highest eviction limit of free disk space, in percent; `None` if there is
/// no configuration file. `capacity` is that of the kubelet's file system, in bytes.
pub(super) fn percent(path: &Path, capacity: u64) -> Result<Option<u8>, Error> {
    let failed = |source| Error::Read {
        path: path.into(),
        source,
    };
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
        .open(path);
    let file = match file {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(failed)?,
    };
    let mut text = String::new();
    let mut limited = file.take(MAX_LENGTH + 1);
    let length = limited.read_to_string(&mut text).map_err(failed)?;
    if u64::try_from(length).is_ok_and(|length| length > MAX_LENGTH) {
        return Err(Error::TooLong { path: path.into() });
    }
    let most = highest(&text, capacity).map_err(|why| Error::Malformed {
        path: path.into(),
        why,
    })?;
    Ok(Some(most))
}

fn highest(text: &str, capacity: u64) -> Result<u8, String> {
    let configuration: KubeletConfiguration =
        serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    let mut most = 0;
    for (signal, default) in SIGNALS {
        let hard = match &configuration.eviction_hard {
            None => default,
            Some(limits) => limit(limits, signal, capacity)?,
        };
        let soft = configuration.eviction_soft.iter();
        let soft = soft.map(|limits| limit(limits, signal, capacity));
        let soft = soft.collect::<Result<Vec<_>, _>>()?;
        most = soft.into_iter().fold(most.max(hard), u8::max);
    }
    Ok(most)
}

/// Returns the limit of a signal in percent, rounded up. The file has it in percent or in bytes. A
/// signal that `limits` does not name has no limit (0).
fn limit(limits: &BTreeMap<String, String>, signal: &str, capacity: u64) -> Result<u8, String> {
    let Some(text) = limits.get(signal) else {
        return Ok(0);
    };
    let wrong = || format!("{signal} is {text:?}, neither percent nor bytes");
    if let Some(percent) = text.strip_suffix('%') {
        let percent: f64 = percent.parse().map_err(|_| wrong())?;
        let whole = (0..=100_u8).find(|whole| f64::from(*whole) >= percent);
        return whole.ok_or_else(wrong);
    }
    let bytes: Bytes = text.parse().map_err(|_| wrong())?;
    let bytes = bytes.bytes().map_or(0, NonZeroU64::get);
    if bytes > capacity / 2 {
        return Err(format!(
            "{signal} is {text:?}, more than half of the kubelet's file system: the limit must be that of another disk"
        ));
    }
    let percent = bytes.saturating_mul(100).div_ceil(capacity.max(1));
    u8::try_from(percent).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::defaults("kind: KubeletConfiguration\nport: 10250\n", 15)]
    #[case::percent(
        "evictionHard: {nodefs.available: 25%, imagefs.available: \"7.5%\"}\n",
        25
    )]
    #[case::fraction("evictionHard: {nodefs.available: 7.5%}\n", 8)]
    #[case::bytes("evictionHard: {nodefs.available: 3Gi}\n", 30)]
    #[case::off("evictionHard: {memory.available: 100Mi}\n", 0)]
    #[case::soft(
        "evictionSoft: {nodefs.available: 30%}\nevictionHard: {nodefs.available: 5%}\n",
        30
    )]
    fn the_kubelets_highest_limit_of_a_disk_is_known(#[case] text: &str, #[case] percent: u8) {
        assert_eq!(highest(text, 10 << 30), Ok(percent));
    }

    #[test]
    fn a_limit_that_cannot_be_read_is_named() {
        for text in ["much", "50Gi"] {
            let text = format!("evictionHard: {{nodefs.available: {text}}}\n");
            let error = highest(&text, 1 << 30);
            assert!(error.unwrap_err().contains("nodefs.available"));
        }
        highest("evictionHard: [", 1).unwrap_err();
    }

    #[test]
    fn a_missing_file_sets_no_limit_and_a_link_or_a_long_file_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("config.yaml");
        assert_eq!(percent(&path, 1).expect("nothing"), None);
        std::fs::write(&path, "evictionHard: {nodefs.available: 12%}\n").expect("written");
        assert_eq!(percent(&path, 1).expect("read"), Some(12));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).expect("linked");
        assert!(matches!(percent(&link, 1), Err(Error::Read { .. })));
        std::fs::write(&path, vec![b'#'; 1 << 21]).expect("written");
        assert!(matches!(percent(&path, 1), Err(Error::TooLong { .. })));
    }
}
