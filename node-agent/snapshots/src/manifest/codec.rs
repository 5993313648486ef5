//! Encoding, decoding and the format's rules.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use torpor_core::{ImageId, Namespace};

use super::{
    DecodeError, FileEntry, MAGIC, MAX_BYTES, MAX_CONTAINERS, MAX_CPU_FEATURES, MAX_FILES,
    MAX_FLAGS, Manifest, ManifestDraft, SavedName, VERSION, is_file_name,
};
use crate::digest::Digest;

/// Longest Kubernetes object name, in bytes.
const MAX_OBJECT_NAME: usize = 253;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    digest: Digest,
    manifest: Manifest,
}

/// The part of a file that every version has, to read the version.
#[derive(Deserialize)]
struct AnyEnvelope {
    manifest: AnyManifest,
}

#[derive(Deserialize)]
struct AnyManifest {
    magic: String,
    version: u32,
}

impl Manifest {
    /// Makes the manifest of a finished image. [`Manifest::encode`] checks the format's rules.
    pub fn new(
        namespace: Namespace,
        image_id: ImageId,
        files: Vec<FileEntry>,
        draft: ManifestDraft,
    ) -> Self {
        let ManifestDraft {
            pod_name,
            sandbox_name,
            reason,
            created_at,
            fingerprint,
            containers,
            completed,
            parent,
        } = draft;
        Self {
            magic: MAGIC.to_owned(),
            version: VERSION,
            pod_uid: image_id.pod().clone(),
            image_id,
            namespace,
            pod_name,
            sandbox_name,
            reason,
            created_at,
            fingerprint,
            files,
            containers,
            completed,
            parent,
        }
    }

    /// Returns the bytes of `manifest.json` and the manifest's digest.
    pub fn encode(&self) -> Result<(Vec<u8>, Digest), DecodeError> {
        self.check_rules()?;
        let body = self.body();
        let digest = Digest::of(&body);
        let mut bytes = format!("{{\"digest\":\"{digest}\",\"manifest\":").into_bytes();
        bytes.extend_from_slice(&body);
        bytes.extend_from_slice(b"}\n");
        match bytes.len() {
            0..=MAX_BYTES => Ok((bytes, digest)),
            found => Err(DecodeError::TooLarge {
                found: found as u64,
            }),
        }
    }

    /// Decodes the bytes of `manifest.json`; returns the manifest and its digest. Checks all of the
    /// manifest, but not the image's other files.
    pub fn decode(bytes: &[u8]) -> Result<(Self, Digest), DecodeError> {
        if bytes.len() > MAX_BYTES {
            return Err(DecodeError::TooLarge {
                found: bytes.len() as u64,
            });
        }
        let malformed = |error: serde_json::Error| DecodeError::Malformed(error.to_string());
        let any: AnyEnvelope = serde_json::from_slice(bytes).map_err(malformed)?;
        if any.manifest.magic != MAGIC {
            let found = any.manifest.magic.chars().take(80).collect();
            return Err(DecodeError::Magic { found });
        }
        if any.manifest.version != VERSION {
            return Err(DecodeError::Version {
                found: any.manifest.version,
            });
        }
        let Envelope { digest, manifest } = serde_json::from_slice(bytes).map_err(malformed)?;
        let found = Digest::of(&manifest.body());
        if found != digest {
            return Err(DecodeError::Digest {
                expected: digest,
                found,
            });
        }
        let (again, _) = manifest.encode()?;
        match again == bytes {
            true => Ok((manifest, digest)),
            false => Err(DecodeError::Malformed(
                "it is not encoded canonically".to_owned(),
            )),
        }
    }

    /// Returns the sum of the files' sizes, in bytes.
    pub fn size(&self) -> u64 {
        self.files
            .iter()
            .fold(0, |sum, file| sum.saturating_add(file.size))
    }

    fn body(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a manifest holds only strings, numbers and lists")
    }

    fn check_rules(&self) -> Result<(), DecodeError> {
        let rule = |kept: bool, text: &str| match kept {
            true => Ok(()),
            false => Err(DecodeError::Rule(text.to_owned())),
        };
        let fingerprint = &self.fingerprint;
        rule(
            self.pod_uid == *self.image_id.pod(),
            "podUID is that of the image id",
        )?;
        rule(is_object_name(&self.pod_name), "podName is an object name")?;
        rule(
            is_object_name(&self.sandbox_name),
            "sandboxName is an object name",
        )?;
        rule(
            (1..=MAX_FILES).contains(&self.files.len()),
            "there are 1 to 16 files",
        )?;
        rule(
            self.files.iter().all(|f| is_file_name(&f.name)),
            "file names are plain",
        )?;
        rule(
            self.files.is_sorted_by(|a, b| a.name < b.name),
            "files are sorted by name",
        )?;
        rule(
            (1..=MAX_CONTAINERS).contains(&self.containers.len()),
            "there are 1 to 256 containers",
        )?;
        rule(
            self.containers[0].name == SavedName::Root,
            "the root container comes first",
        )?;
        let names: BTreeSet<_> = self.containers.iter().map(|c| &c.name).collect();
        rule(
            names.len() == self.containers.len(),
            "no container appears twice",
        )?;
        rule(
            self.completed.len() <= MAX_CONTAINERS,
            "there are at most 256 completed containers",
        )?;
        rule(
            fingerprint.flags.len() <= MAX_FLAGS,
            "there are at most 256 flags",
        )?;
        rule(
            fingerprint.cpu_features.len() <= MAX_CPU_FEATURES,
            "there are at most 4096 CPU features",
        )
    }
}

fn is_object_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    (1..=MAX_OBJECT_NAME).contains(&name.len()) && name.bytes().all(plain)
}
