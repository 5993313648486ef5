//! Check that an image can be restored on this node and into this Pod.

use std::collections::{BTreeMap, BTreeSet};

use super::{ContainerSpecDigest, Fingerprint, Manifest, Mismatch};

/// Most features that a message names. The message only counts the others: "and n more".
const NAMED_FEATURES: usize = 8;

impl Manifest {
    /// Compares the image's needs with the node's runtime and the Pod's containers. Returns the
    /// first difference.
    ///
    /// `specs`: all containers of the Pod, including the pause container, in any order.
    pub fn check(&self, node: &Fingerprint, specs: &[ContainerSpecDigest]) -> Result<(), Mismatch> {
        self.fingerprint.fits(node)?;
        let saved: BTreeMap<_, _> = self
            .containers
            .iter()
            .map(|c| (&c.name, c.spec_digest))
            .collect();
        for spec in specs {
            match saved.get(&spec.name) {
                None => {
                    return Err(Mismatch::ContainerAdded {
                        name: spec.name.clone(),
                    });
                }
                Some(digest) if *digest != spec.digest => {
                    return Err(Mismatch::Spec {
                        name: spec.name.clone(),
                    });
                }
                Some(_) => {}
            }
        }
        let given: BTreeSet<_> = specs.iter().map(|spec| &spec.name).collect();
        match self.containers.iter().find(|c| !given.contains(&c.name)) {
            Some(container) => Err(Mismatch::ContainerMissing {
                name: container.name.clone(),
            }),
            None => Ok(()),
        }
    }
}

impl Fingerprint {
    /// Returns an error if an image made on `self` cannot be restored on `node`. Kernel and
    /// `runsc_version` are not compared.
    pub fn fits(&self, node: &Fingerprint) -> Result<(), Mismatch> {
        let Fingerprint {
            runsc_digest,
            runsc_version,
            platform,
            flags,
            cpu_features_digest,
            cpu_features,
            kernel: _,
        } = self;
        if *runsc_digest != node.runsc_digest {
            return Err(Mismatch::Runsc {
                image: format!("{runsc_version} ({runsc_digest})"),
                node: format!("{} ({})", node.runsc_version, node.runsc_digest),
            });
        }
        if *platform != node.platform {
            return Err(Mismatch::Platform {
                image: platform.clone(),
                node: node.platform.clone(),
            });
        }
        if *flags != node.flags {
            return Err(Mismatch::Flags {
                image: flags.join(" "),
                node: node.flags.join(" "),
            });
        }
        if *cpu_features_digest == node.cpu_features_digest {
            return Ok(());
        }
        if cpu_features.is_empty() || node.cpu_features.is_empty() {
            let missing = format!(
                "the image's set of features (digest {cpu_features_digest}, here {})",
                node.cpu_features_digest
            );
            return Err(Mismatch::CpuFeatures { missing });
        }
        let here: BTreeSet<_> = node.cpu_features.iter().collect();
        let missing: Vec<_> = cpu_features
            .iter()
            .filter(|f| !here.contains(f))
            .cloned()
            .collect();
        match missing.is_empty() {
            true => Ok(()),
            false => Err(Mismatch::CpuFeatures {
                missing: name_some(&missing),
            }),
        }
    }
}

fn name_some(features: &[String]) -> String {
    match features.len() {
        0..=NAMED_FEATURES => features.join(", "),
        all => format!(
            "{} and {} more",
            features[..NAMED_FEATURES].join(", "),
            all - NAMED_FEATURES
        ),
    }
}
