//! Images for tests.
#![allow(dead_code)] // each test binary uses its part

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use torpor_core::{ImageId, Namespace};
use torpor_snapshots::{
    Committed, Digest, Fingerprint, ManifestDraft, Partial, SaveError, SaveReason, SavedContainer,
    SavedName, Store,
};

pub(crate) const POD: &str = "0b7e6c1a-4f0e-4a52-9c1f-2b8f5f3f9d10";
/// Names and sizes of the files of a test image.
pub(crate) const FILES: [(&str, usize); 3] = [
    ("checkpoint.img", 70_000),
    ("pages.img", 300_001),
    ("pages_meta.img", 8_192),
];

pub(crate) fn namespace() -> Namespace {
    Namespace::new("team-a").unwrap()
}

pub(crate) fn image(number: u32) -> ImageId {
    ImageId::parse(&format!("{POD}.{number}")).unwrap()
}

pub(crate) fn store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    (dir, store)
}

pub(crate) fn fingerprint() -> Fingerprint {
    Fingerprint {
        runsc_digest: "sha256:00ff".into(),
        runsc_version: "release-20260901".into(),
        platform: "systrap".into(),
        flags: vec!["--overlay2=root:self".into()],
        cpu_features_digest: "sha256:0102".into(),
        cpu_features: vec!["avx".into(), "avx2".into(), "sse4_2".into()],
        kernel: "6.1.0".into(),
    }
}

pub(crate) fn spec_of(name: &str) -> Digest {
    Digest::of(name.as_bytes())
}

pub(crate) fn container(name: &str) -> SavedContainer {
    SavedContainer {
        name: SavedName::try_from(name.to_owned()).unwrap(),
        image_id: "sha256:aa".into(),
        spec_digest: spec_of(name),
    }
}

pub(crate) fn draft() -> ManifestDraft {
    ManifestDraft {
        pod_name: "notebook".into(),
        sandbox_name: "notebook".into(),
        reason: SaveReason::Hibernate,
        created_at: "2026-11-21T06:00:00Z".parse().unwrap(),
        fingerprint: fingerprint(),
        containers: vec![container(""), container("app")],
        completed: vec![],
        parent: None,
    }
}

pub(crate) fn content(name: &str, size: usize) -> Vec<u8> {
    name.bytes().cycle().take(size).collect()
}

/// Writes one file of a partial image. Errors of the system, such as `ENOSPC`, are returned
/// unchanged.
pub(crate) fn write(partial: &Partial, name: &str, size: usize) -> std::io::Result<()> {
    let mut file = File::from(partial.open_file(name).map_err(std::io::Error::other)?);
    file.write_all(&content(name, size))
}

pub(crate) fn save(store: &Store, number: u32) -> Result<Committed, SaveError> {
    let partial = store.begin(&namespace(), &image(number))?;
    for (name, size) in FILES {
        write(&partial, name, size).unwrap();
    }
    partial.commit(draft())
}

pub(crate) fn image_dir(root: &Path, number: u32) -> PathBuf {
    root.join("images/team-a").join(image(number).to_string())
}
