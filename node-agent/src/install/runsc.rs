//! The runsc build to install: the shipped one, or a build of the host that an option names.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use torpor_runsc::command::{flags, release};
use torpor_runsc_direct::is_known_release;
use tracing::{info, warn};

use super::error::Error;
use super::host::HostRoot;
use crate::args::{OlderRunsc, RunscArgs, ShaDigest};

/// Name of the program in the payload, and beginning of its name on the node.
pub(super) const RUNSC: &str = "runsc";
/// Time limit of a command of the build. `runsc --version` takes milliseconds.
const LIMIT: Duration = Duration::from_secs(20);
/// Maximum size of a build. Google's releases have about 50 MB.
const MAX_BYTES: u64 = 1 << 30;

/// A program that has passed the checks and may be installed as runsc.
#[derive(Debug)]
pub(super) struct Build {
    pub(super) path: PathBuf,
    pub(super) digest: blake3::Hash,
}

impl Build {
    /// Checks and returns the build that `--runsc` names, or else the payload's.
    pub(super) fn chosen(
        root: &HostRoot,
        payload_dir: &Path,
        args: &RunscArgs,
    ) -> Result<Self, Error> {
        let build = match &args.runsc {
            Some(path) => Self::of_host(&root.path(path)?, args.runsc_digest.as_ref())?,
            None => Self::shipped(payload_dir.join(RUNSC))?,
        };
        let digest = build.config_digest();
        if args.revoked_runsc.contains(&digest) {
            warn!(
                digest,
                "the runsc to install is revoked: no sandbox starts with it"
            );
        }
        Ok(build)
    }

    /// Checks and returns the builds that `--older-runsc` names and that this node has.
    pub(super) fn older(root: &HostRoot, args: &RunscArgs) -> Result<Vec<Self>, Error> {
        let mut builds = Vec::new();
        for OlderRunsc { path, digest } in &args.older_runsc {
            let path = root.path(path)?;
            match path.try_exists() {
                Ok(false) => warn!(path = %path.display(), "an older runsc is not on this node"),
                Ok(true) | Err(_) => builds.push(Self::of_host(&path, Some(digest))?),
            }
        }
        Ok(builds)
    }

    fn shipped(path: PathBuf) -> Result<Self, Error> {
        match digest(&path) {
            Ok(digest) => Ok(Self { path, digest }),
            Err(source) => Err(Error::Payload { path, source }),
        }
    }

    fn of_host(path: &Path, wanted: Option<&ShaDigest>) -> Result<Self, Error> {
        let refused = |why: String| Error::Runsc {
            path: path.into(),
            why,
        };
        let unreadable = |error: io::Error| refused(error.to_string());
        let found = fs::metadata(path).map_err(unreadable)?;
        if !found.is_file() || found.permissions().mode() & 0o111 == 0 {
            return Err(refused("it is not an executable file".to_owned()));
        }
        if found.len() > MAX_BYTES {
            return Err(refused(format!("it has more than {MAX_BYTES} bytes")));
        }
        let mut file = File::open(path).map_err(unreadable)?;
        if let Some(wanted) = wanted {
            let mut sum = aws_lc_rs::digest::Context::new(wanted.algorithm());
            let mut buffer = vec![0; 1 << 20];
            loop {
                let read = file.read(&mut buffer).map_err(unreadable)?;
                if read == 0 {
                    break;
                }
                sum.update(&buffer[..read]);
            }
            let found = hex(sum.finish().as_ref());
            if found != wanted.hex() {
                return Err(refused(format!(
                    "its digest is {found}, and the installer's option has {}",
                    wanted.hex()
                )));
            }
            file.rewind().map_err(unreadable)?;
        }
        let mut sum = blake3::Hasher::new();
        let digest = sum.update_reader(file).map_err(unreadable)?.finalize();
        let version = release(path, LIMIT).map_err(|error| refused(message_with_causes(&error)))?;
        let Some(version) = version else {
            return Err(refused(
                "`--version` does not print `runsc version` and a release".to_owned(),
            ));
        };
        info!(path = %path.display(), version, "installing a runsc of the host");
        if !is_known_release(&version) {
            warn!(
                version,
                "Torpor does not know this release of gVisor: wakes use runsc's own commands and take longer"
            );
        }
        Ok(Self {
            path: path.into(),
            digest,
        })
    }

    /// Returns the flags that this build gets in addition to those of all builds, one in a line.
    pub(super) fn flags(&self) -> Result<String, Error> {
        flags::wanted_by(&self.path, LIMIT).map_err(|error| Error::Runsc {
            path: self.path.clone(),
            why: message_with_causes(&error),
        })
    }

    /// Returns the name of the build's file on the node.
    pub(super) fn file_name(&self) -> String {
        format!("{RUNSC}-{}", &self.digest.to_hex()[..12])
    }

    /// Returns the build's digest in the form of the node's configuration, images and the API.
    pub(super) fn config_digest(&self) -> String {
        format!("blake3:{}", self.digest.to_hex())
    }
}

pub(super) fn digest(path: &Path) -> io::Result<blake3::Hash> {
    Ok(blake3::Hasher::new()
        .update_reader(File::open(path)?)?
        .finalize())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn message_with_causes(error: &torpor_runsc::command::Error) -> String {
    let mut message = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        message = format!("{message}: {cause}");
        source = cause.source();
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    const RELEASED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/runsc-released");

    fn chosen(path: &str, digest: Option<&str>) -> Result<Build, Error> {
        let args = RunscArgs {
            runsc: Some(path.into()),
            runsc_digest: digest.map(|digest| digest.parse().expect("a digest")),
            ..RunscArgs::default()
        };
        Build::chosen(&HostRoot::new(Path::new("/")), Path::new("/nowhere"), &args)
    }

    fn sum(algorithm: &'static aws_lc_rs::digest::Algorithm) -> String {
        let bytes = fs::read(RELEASED).expect("read");
        hex(aws_lc_rs::digest::digest(algorithm, &bytes).as_ref())
    }

    #[test]
    fn a_released_runsc_of_the_host_takes_the_place_of_the_shipped_one() {
        let (sha256, sha512) = (
            sum(&aws_lc_rs::digest::SHA256),
            sum(&aws_lc_rs::digest::SHA512),
        );
        for digest in [None, Some(sha256.as_str()), Some(&sha512)] {
            let build = chosen(RELEASED, digest).expect("fit");
            assert_eq!(build.digest, digest_of(RELEASED));
            assert!(
                build
                    .config_digest()
                    .contains(&build.file_name()["runsc-".len()..])
            );
        }
    }

    fn digest_of(path: &str) -> blake3::Hash {
        digest(Path::new(path)).expect("read")
    }

    #[test]
    fn a_program_that_is_no_runsc_or_another_build_is_refused_with_the_reason() {
        let other = "0".repeat(64);
        for (path, digest, words) in [
            ("/nowhere/runsc", None, "No such file"),
            ("/usr", None, "not an executable file"),
            (
                concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"),
                None,
                "not an executable file",
            ),
            ("/bin/true", None, "does not print"),
            ("/bin/false", None, "ended with"),
            (RELEASED, Some(other.as_str()), "option has 000"),
        ] {
            let refused = chosen(path, digest).expect_err("refused");
            assert_eq!(refused.reason(), "RunscRefused", "{path}");
            let message = refused.to_string();
            assert!(
                message.contains(words) && message.contains(path),
                "{message}"
            );
        }
    }

    #[test]
    fn a_shipped_runsc_that_is_missing_is_named() {
        let root = HostRoot::new(Path::new("/"));
        let refused = Build::chosen(&root, Path::new("/nowhere"), &RunscArgs::default());
        assert_eq!(refused.expect_err("missing").reason(), "PayloadMissing");
    }
}
