//! The ConfigMap `agent-sandbox-config`, mounted into the Pod as one file per key.
//!
//! Keys named like flags set those that the command line leaves out (upstream's
//! internal/config/config.go of 1.0.12).

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

/// Directory where the manifests mount the ConfigMap. Upstream's path.
pub const DIRECTORY: &str = "/etc/sandbox-config";

/// Flags that a key may set, as in upstream's list.
pub(super) const FLAGS: [&str; 21] = [
    "pprof-block-profile-rate",
    "pprof-mutex-profile-fraction",
    "kube-api-qps",
    "kube-api-burst",
    "api-connections",
    "separate-watch-connection",
    "sandbox-concurrent-workers",
    "sandbox-claim-concurrent-workers",
    "sandbox-warm-pool-concurrent-workers",
    "sandbox-template-concurrent-workers",
    "sandbox-warm-pool-max-batch-size",
    "sandbox-warm-pool-replenish-delay",
    "sandbox-warm-pool-max-refill-rate",
    "sandbox-claim-warm-candidate-grace-period",
    "sandbox-warm-pool-readiness-grace-period",
    "sandbox-warm-pool-unschedulable-recheck-interval",
    "enable-warm-pool-eviction",
    "disable-sandbox-events",
    "disable-claim-events",
    "disable-claim-observability-annotations",
    "sandbox-write-behind-window",
];
/// Keys that other code reads as files.
const FILES: [&str; 1] = ["allowed-label-domains"];
/// Longest value of a flag, in bytes.
const LONGEST: u64 = 4096;

/// Keys and values of the ConfigMap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Configured {
    /// Values by the name of the flag, trimmed.
    pub flags: BTreeMap<&'static str, String>,
    /// Keys that set nothing; most likely misspelled.
    pub unknown: Vec<String>,
}

/// Failure to read the ConfigMap.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot list {}", .0.display())]
    List(PathBuf, #[source] io::Error),
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] io::Error),
    #[error("{} is longer than any flag's value", .0.display())]
    TooLong(PathBuf),
}

/// Kind of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Flag(&'static str),
    /// Read by other code, or a comment: a leading underscore or dot.
    Other,
    Unknown,
}

fn key(name: &str) -> Key {
    if let Some(flag) = FLAGS.iter().find(|flag| **flag == name) {
        return Key::Flag(flag);
    }
    match FILES.contains(&name) || name.starts_with(['_', '.']) {
        true => Key::Other,
        false => Key::Unknown,
    }
}

/// Reads the mounted ConfigMap. Returns an empty one if the directory does not exist.
pub fn read(directory: &Path) -> Result<Configured, Error> {
    let list = |error| Error::List(directory.to_owned(), error);
    let mut configured = Configured::default();
    let entries = match directory.read_dir() {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(configured),
        Err(error) => return Err(list(error)),
    };
    for entry in entries {
        let name = entry.map_err(list)?.file_name();
        let name = name.to_string_lossy();
        match key(&name) {
            Key::Flag(flag) => {
                let value = value(directory.join(flag))?;
                configured.flags.insert(flag, value);
            }
            Key::Other => {}
            Key::Unknown => configured.unknown.push(name.into_owned()),
        }
    }
    configured.unknown.sort();
    Ok(configured)
}

fn value(path: PathBuf) -> Result<String, Error> {
    let mut text = String::new();
    let read = File::open(&path).and_then(|file| file.take(LONGEST + 1).read_to_string(&mut text));
    match read {
        Err(error) => Err(Error::Read(path, error)),
        Ok(length) if length as u64 > LONGEST => Err(Error::TooLong(path)),
        Ok(_) => Ok(text.trim().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    /// Returns a directory as the kubelet mounts a ConfigMap.
    fn mounted(data: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let version = directory.path().join("..2026_11_26");
        fs::create_dir(&version).unwrap();
        symlink("..2026_11_26", directory.path().join("..data")).unwrap();
        for (name, text) in data {
            fs::write(version.join(name), text).unwrap();
            symlink(format!("..data/{name}"), directory.path().join(name)).unwrap();
        }
        directory
    }

    #[test]
    fn keys_named_like_flags_are_values_and_misspelled_keys_are_reported() {
        let directory = mounted(&[
            ("sandbox-warm-pool-readiness-grace-period", "10m\n"),
            ("allowed-label-domains", "example.com"),
            ("_comment", "ours"),
            ("sandbox-worm-pool", "1"),
            ("leader-elect", "false"),
        ]);
        let configured = read(directory.path()).unwrap();
        let grace = ("sandbox-warm-pool-readiness-grace-period", "10m".to_owned());
        assert_eq!(configured.flags, BTreeMap::from([grace]));
        assert_eq!(configured.unknown, ["leader-elect", "sandbox-worm-pool"]);
    }

    #[test]
    fn the_config_map_is_optional_and_its_values_are_limited_in_length() {
        let directory = mounted(&[("kube-api-qps", &"1".repeat(5000))]);
        let nowhere = directory.path().join("nowhere");
        assert_eq!(read(&nowhere).unwrap(), Configured::default());
        let error = read(directory.path()).unwrap_err().to_string();
        assert!(error.contains("kube-api-qps"), "{error}");
    }
}
