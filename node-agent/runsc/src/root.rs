//! The pause container on a root file system of Torpor's own: an EROFS image, which gVisor's kernel reads by itself.
//!
//! Files of a container come to gVisor from a process beside it, the gofer: three starts of runsc, a network namespace and 12 MB for each container.
//! The pause container needs none of its files but its program, so where nothing else is mounted in it from the host there is no gofer for it.
//! See docs/decisions/2026-11-25-pause-container-without-gofer.md.

use std::path::PathBuf;

use serde_json::{Value, json};
use torpor_snapshots::Digest;

use crate::spec::Spec;
use torpor_records::config::Config;

mod image;
mod program;

const PROGRAM: &str = "pause";
/// Where gVisor mounts its own file systems: an image that cannot be written to has no others.
const DIRECTORIES: [&str; 6] = ["dev", "etc", "proc", "run", "sys", "tmp"];
/// What containerd mounts in a pause container for its program, which reads none of it.
const NOT_READ: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];

const ANNOTATION: &str = "dev.gvisor.spec.rootfs.";

/// The image that this version has; none on processors for which it has no program.
pub fn image() -> Option<Vec<u8>> {
    let program = program::elf()?;
    Some(image::image(PROGRAM, &program, &DIRECTORIES))
}

/// Its name beside the builds of runsc: `pause-<12 hex digits of its digest>.erofs`.
pub fn file_name(image: &[u8]) -> String {
    let digest = Digest::of(image).to_string();
    let hex = digest.trim_start_matches("blake3:");
    format!("pause-{}.erofs", &hex[..12])
}

/// Whether the installer has placed a file of this name, now or in an earlier version.
pub fn is_file_name(name: &str) -> bool {
    let digits = name
        .strip_prefix("pause-")
        .and_then(|name| name.strip_suffix(".erofs"));
    digits.is_some_and(|digits| digits.len() == 12 && digits.bytes().all(|c| c.is_ascii_hexdigit()))
}

/// The image on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    path: PathBuf,
    digest: Digest,
}

impl Root {
    /// None where it is not installed.
    pub fn installed(config: &Config) -> Option<Self> {
        let image = image()?;
        let root = Self {
            // A program is mapped from it: what lies here may be executed.
            path: config.runsc.with_file_name(file_name(&image)),
            digest: Digest::of(&image),
        };
        root.path.is_file().then_some(root)
    }

    /// The pause container's rewritten spec with this root, and the digest by which images of it are known. `saved`: that of the pause container in the
    /// image that is to be restored, if one is. None if it is to have its files from a gofer: it needs one, or had one when it was saved.
    pub fn serve(&self, rewritten: &Spec, saved: Option<Digest>) -> Option<(Spec, Digest)> {
        let under = self.under(rewritten)?;
        let digest = self.digest(&under);
        saved
            .is_none_or(|saved| saved == digest)
            .then_some((under, digest))
    }

    /// The pause container's rewritten spec with this as its root file system. None if something is mounted in it that only a gofer can serve,
    /// as emptyDirs are.
    fn under(&self, rewritten: &Spec) -> Option<Spec> {
        let mut spec = rewritten.clone();
        if let Some(mounts) = spec.0.get_mut("mounts").and_then(Value::as_array_mut) {
            mounts.retain(|mount| !is_not_read(mount));
            if !mounts.iter().all(is_gvisors_own) {
                return None;
            }
        }
        *spec.0.pointer_mut("/process/args")? = json!([format!("/{PROGRAM}")]);
        *spec.0.pointer_mut("/process/cwd")? = json!("/");
        let root = spec.0.get_mut("root")?.as_object_mut()?;
        root.insert("readonly".to_owned(), json!(true));
        let annotations = spec.0.get_mut("annotations")?.as_object_mut()?;
        annotations.insert(format!("{ANNOTATION}source"), json!(self.path));
        annotations.insert(format!("{ANNOTATION}type"), json!("erofs"));
        Some(spec)
    }

    /// In place of [`crate::spec::digest`]: an image of a sandbox whose pause container has this root is restored with the same one, in the same place (gVisor compares the annotation), and no image of
    /// another is with this.
    fn digest(&self, under: &Spec) -> Digest {
        let spec = crate::spec::digest(under);
        let path = self.path.display();
        Digest::of(format!("{path} {} {spec}", self.digest).as_bytes())
    }
}

fn destination(mount: &Value) -> &str {
    let destination = mount.get("destination").and_then(Value::as_str);
    destination.unwrap_or_default()
}

fn is_not_read(mount: &Value) -> bool {
    NOT_READ.contains(&destination(mount))
}

/// No part of the host, and there is a directory for it; for the Pod's volumes there is none.
fn is_gvisors_own(mount: &Value) -> bool {
    let destination = destination(mount);
    let options = mount.get("options").and_then(Value::as_array);
    let is_bound = mount.get("type").and_then(Value::as_str) == Some("bind")
        || (options.into_iter().flatten()).any(|option| option == "bind" || option == "rbind");
    let first = destination.split('/').nth(1).unwrap_or_default();
    !is_bound && DIRECTORIES.contains(&first)
}

/// Fields of a structure in a file, little endian: each value with its width in bytes; what is wider than a value is zero.
fn fields(fields: &[(u64, usize)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (value, width) in fields {
        let end = bytes.len() + width;
        bytes.extend(value.to_le_bytes().into_iter().take(*width));
        bytes.resize(end, 0);
    }
    bytes
}

#[cfg(test)]
mod tests;
