//! Names of images in the node's containerd.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;

use crate::node::containerd_socket;

/// A name of an image that a test moves to other images; it is removed on drop.
///
/// Uses containerd's `ctr`, which is in the folder of the cluster's kubectl.
#[derive(Debug)]
pub struct Tag {
    ctr: PathBuf,
    address: PathBuf,
    pub name: String,
}

impl Tag {
    /// Adds `name` as a name of the image that is called `of`.
    pub fn new(kubectl: &Path, name: String, of: &str) -> anyhow::Result<Self> {
        let tag = Self {
            ctr: kubectl.with_file_name("ctr"),
            address: containerd_socket()?,
            name,
        };
        tag.point_to(of)?;
        Ok(tag)
    }

    /// Moves the name to the image that is called `of`.
    pub fn point_to(&self, of: &str) -> anyhow::Result<()> {
        self.images(&["tag", "--force", of, &self.name])
    }

    fn images(&self, args: &[&str]) -> anyhow::Result<()> {
        let output = Command::new(&self.ctr)
            .args(["--timeout", "20s", "--address"])
            .arg(&self.address)
            .args(["--namespace", "k8s.io", "images"])
            .args(args)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run {}", self.ctr.display()))?;
        let words = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(
            output.status.success(),
            "ctr images {}: {words}",
            args.join(" ")
        );
        Ok(())
    }
}

impl Drop for Tag {
    fn drop(&mut self) {
        // A name that stays does no harm.
        let _ = self.images(&["rm", &self.name]);
    }
}
