//! The installer's options for runsc.

use std::path::PathBuf;
use std::str::FromStr;

use super::parse::absolute;

/// Options for the builds of runsc that start sandboxes.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct RunscArgs {
    /// Path of a runsc on the host to install instead of the shipped one, such as Google's release
    /// binary
    #[arg(long, value_parser = absolute, env = "TORPOR_RUNSC")]
    pub(crate) runsc: Option<PathBuf>,
    /// SHA-256 (64 hex digits) or SHA-512 (128) digest that this runsc must have; Google publishes
    /// the SHA-512 beside each release
    #[arg(long, requires = "runsc", env = "TORPOR_RUNSC_DIGEST")]
    pub(crate) runsc_digest: Option<ShaDigest>,
    /// Further builds of runsc on the host, to restore images that they have made:
    /// PATH=DIGEST[,...], with the SHA-256 or SHA-512 digest of the file. A path that a node does
    /// not have is skipped there
    #[arg(long, value_delimiter = ',', env = "TORPOR_OLDER_RUNSC")]
    pub(crate) older_runsc: Vec<OlderRunsc>,
    /// Builds of runsc that start no sandbox on this node, by the digests (blake3:<64 hex digits>)
    /// that SandboxNodes and SandboxSnapshots show as runscDigest. Their images are kept
    #[arg(long, value_delimiter = ',', value_parser = blake3_digest, env = "TORPOR_REVOKED_RUNSC")]
    pub(crate) revoked_runsc: Vec<String>,
}

/// A build of runsc on the host, and the digest that it must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OlderRunsc {
    pub(crate) path: PathBuf,
    pub(crate) digest: ShaDigest,
}

impl FromStr for OlderRunsc {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, digest) = text.rsplit_once('=').ok_or("not of the form PATH=DIGEST")?;
        Ok(Self {
            path: absolute(path)?,
            digest: digest.parse()?,
        })
    }
}

/// A SHA-256 or SHA-512 digest, in lower case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ShaDigest(String);

impl ShaDigest {
    /// Returns the hex digits in lower case.
    pub(crate) fn hex(&self) -> &str {
        &self.0
    }

    pub(crate) fn algorithm(&self) -> &'static aws_lc_rs::digest::Algorithm {
        match self.0.len() {
            64 => &aws_lc_rs::digest::SHA256,
            _ => &aws_lc_rs::digest::SHA512,
        }
    }
}

impl FromStr for ShaDigest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.bytes().all(|digit| digit.is_ascii_hexdigit());
        match (digits, text.len()) {
            (true, 64 | 128) => Ok(Self(text.to_ascii_lowercase())),
            _ => Err(
                "allowed are 64 hex digits (SHA-256) and 128 (SHA-512), as sha256sum and sha512sum print them"
                    .to_owned(),
            ),
        }
    }
}

fn blake3_digest(text: &str) -> Result<String, String> {
    let digits = text.strip_prefix("blake3:").filter(|digits| {
        let mut bytes = digits.bytes();
        digits.len() == 64 && bytes.all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    });
    digits.map(|_| text.to_owned()).ok_or_else(|| {
        "a digest is `blake3:` and 64 hex digits in lower case, as `kubectl get sandboxnodes -o yaml` shows runscDigest"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::{Args, Command};
    use super::*;

    fn parsed(options: &[&str]) -> Result<RunscArgs, clap::Error> {
        let words = ["torpor-agent", "install"].iter().chain(options);
        let Command::Install(install) = Args::try_parse_from(words)?.command else {
            panic!("{options:?} are no installation")
        };
        Ok(install.runsc)
    }

    #[test]
    fn digests_are_read_and_malformed_digests_are_refused() {
        let (first, second) = (
            format!("blake3:{}", "0".repeat(64)),
            format!("blake3:{}", "a1".repeat(32)),
        );
        let list = format!("--revoked-runsc={first},{second}");
        assert_eq!(
            parsed(&[&list]).expect("read").revoked_runsc,
            [first.clone(), second]
        );
        for wrong in [
            "",
            "blake3:",
            "sha256:00",
            &first[..70],
            &first.to_uppercase(),
        ] {
            let refused = parsed(&[&format!("--revoked-runsc={wrong}")]);
            refused.expect_err(wrong);
        }
        for (digits, algorithm) in [
            (64, &aws_lc_rs::digest::SHA256),
            (128, &aws_lc_rs::digest::SHA512),
        ] {
            let sum = "Ab".repeat(digits / 2);
            let read: ShaDigest = sum.parse().expect("read");
            assert_eq!(read.algorithm(), algorithm);
            assert_eq!(read.hex(), sum.to_lowercase());
        }
        for wrong in ["", "00", &"g".repeat(64)] {
            wrong.parse::<ShaDigest>().expect_err(wrong);
        }
    }

    #[test]
    fn an_older_build_needs_its_path_and_its_digest() {
        let digest = "0".repeat(64);
        let given = format!("--older-runsc=/a={digest},/b={}", "A".repeat(128));
        let older = parsed(&[&given]).expect("read").older_runsc;
        let of: Vec<_> = older
            .iter()
            .map(|one| one.path.display().to_string())
            .collect();
        assert_eq!(of, ["/a", "/b"]);
        assert_eq!(older[1].digest.hex(), "a".repeat(128));
        for wrong in ["/a".to_owned(), format!("a={digest}"), "/a=00".to_owned()] {
            parsed(&[&format!("--older-runsc={wrong}")]).expect_err("not complete");
        }
    }

    #[test]
    fn a_digest_needs_the_runsc_that_has_it() {
        let digest = format!("--runsc-digest={}", "0".repeat(64));
        parsed(&[&digest]).expect_err("no runsc");
        parsed(&["--runsc=bin/runsc"]).expect_err("not absolute");
        let both = parsed(&["--runsc=/usr/local/bin/runsc", &digest]).expect("read");
        assert!(both.runsc.is_some() && both.runsc_digest.is_some());
    }
}
