//! The pause container's root file system of Torpor's own: an EROFS image, which gVisor's kernel
//! reads by itself.
//!
//! A process beside the sandbox, the gofer, serves a container's files to gVisor. Each gofer costs
//! three starts of runsc, a network namespace and 12 MB. The pause container needs no file but its
//! program. So it has no gofer where nothing else of the host is mounted in it.
//! See docs/decisions/2026-11-25-pause-container-without-gofer.md.

use std::path::PathBuf;

use serde_json::{Value, json};
use torpor_snapshots::Digest;

use crate::spec::Spec;
use torpor_records::config::Config;

mod fields;
mod image;
mod program;

/// Name of the pause container's program in the image.
const PROGRAM: &str = "pause";
/// Directories of the image, on which gVisor mounts its own file systems. The image is read-only,
/// so there can be no other mount points.
const DIRECTORIES: [&str; 6] = ["dev", "etc", "proc", "run", "sys", "tmp"];
/// Mount points of files that containerd mounts in a pause container, and that its program does not
/// read.
const NOT_READ: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];

const ANNOTATION: &str = "dev.gvisor.spec.rootfs.";

/// Returns the image of this version of Torpor. None on processors without a program.
pub fn image() -> Option<Vec<u8>> {
    let program = program::elf()?;
    Some(image::image(PROGRAM, &program, &DIRECTORIES))
}

/// Returns the image's file name beside the builds of runsc:
/// `pause-<12 hex digits of its digest>.erofs`.
pub fn file_name(image: &[u8]) -> String {
    let digest = Digest::of(image).to_string();
    let hex = digest.trim_start_matches("blake3:");
    format!("pause-{}.erofs", &hex[..12])
}

/// Reports whether the name is one that the installer of this or of an earlier version gives to an
/// image.
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
    /// Returns the installed image of this version. None where it is not installed.
    pub fn installed(config: &Config) -> Option<Self> {
        let image = image()?;
        let root = Self {
            // A program is mapped from the image, and the files beside runsc may be executed.
            path: config.runsc.with_file_name(file_name(&image)),
            digest: Digest::of(&image),
        };
        root.path.is_file().then_some(root)
    }

    /// Returns the pause container's rewritten spec with this root, and the spec digest for images
    /// of its sandbox. `saved`: the pause container's spec digest in the image to restore, if the
    /// sandbox is restored. None where a gofer has to serve the pause container's files: the spec
    /// needs one, or the pause container had one when it was saved.
    pub fn serve(&self, rewritten: &Spec, saved: Option<Digest>) -> Option<(Spec, Digest)> {
        let under = self.under(rewritten)?;
        let digest = self.digest(&under);
        saved
            .is_none_or(|saved| saved == digest)
            .then_some((under, digest))
    }

    /// Returns the pause container's rewritten spec with this root file system. None where the spec
    /// mounts something that only a gofer can serve, such as an emptyDir.
    fn under(&self, rewritten: &Spec) -> Option<Spec> {
        let mut spec = rewritten.clone();
        if let Some(mounts) = spec.0.get_mut("mounts").and_then(Value::as_array_mut) {
            mounts.retain(|mount| !is_not_read(mount));
            if !mounts.iter().all(needs_no_gofer) {
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

    /// Returns the spec digest of a pause container with this root, in place of
    /// [`crate::spec::digest`]. A sandbox is restored only with the root that its pause container
    /// was saved with, at the same path (gVisor compares the annotation).
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

/// Reports whether gVisor can mount this without a gofer: it is no part of the host, and the image
/// has a directory for it. The image has none for the Pod's volumes.
fn needs_no_gofer(mount: &Value) -> bool {
    let destination = destination(mount);
    let options = mount.get("options").and_then(Value::as_array);
    let is_bound = mount.get("type").and_then(Value::as_str) == Some("bind")
        || (options.into_iter().flatten()).any(|option| option == "bind" || option == "rbind");
    let first = destination.split('/').nth(1).unwrap_or_default();
    !is_bound && DIRECTORIES.contains(&first)
}

#[cfg(test)]
mod tests;
