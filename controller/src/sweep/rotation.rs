//! Rotation of encryption keys: the keys of images and archives are wrapped with the newest key, in
//! the repositories of all SnapshotClasses, also of those that are not swept. Nothing is deleted.
//!
//! A rotation begins in the second round that finds the same newest key. In the first round some
//! nodes may not have the key yet, because kubelets read Secrets at different times.

use std::collections::BTreeMap;

use kube::ResourceExt;
use torpor_api::{SnapshotClass, snapshot::REPOSITORY_PROVISIONER};
use torpor_repository::{Keys, Rewrapped};

use super::Error;
use crate::{context::Context, repository};

/// Rotation of keys, from round to round.
#[derive(Debug, Default)]
pub(super) struct Rotation {
    /// Newest key of the round before.
    newest: Option<String>,
}

/// Older keys of one repository.
#[derive(Debug, Default, PartialEq, Eq)]
struct Needed {
    /// Objects that need a key other than the newest, by the key's id.
    objects: BTreeMap<String, u64>,
    rewrapped: u64,
}

impl Rotation {
    /// Rotates the keys of all repositories, and reports which older keys they need.
    pub(super) async fn round(&mut self, context: &Context) {
        let keys = match context.keys.read().await {
            Ok(keys) => keys,
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "cannot read the encryption keys; none are rotated");
                return;
            }
        };
        if !self.begins(&keys) {
            return;
        }
        if keys.ids().nth(1).is_none() {
            // Nothing can be wrapped anew without the older key.
            context.metrics.forget_older_keys();
            return;
        }
        let is_repository =
            |class: &SnapshotClass| class.spec.provisioner == REPOSITORY_PROVISIONER;
        let mut all = Vec::new();
        for class in context.caches.snapshot_classes.filtered(is_repository) {
            let name = class.name_any();
            match rotate(context, &class, &keys).await {
                Ok(needed) => all.push((name, needed)),
                Err(error) => {
                    let (class, error): (_, &dyn std::error::Error) = (name, &error);
                    tracing::warn!(class, error, "cannot rotate the keys of a repository");
                }
            }
        }
        context.metrics.forget_older_keys();
        for (class, needed) in all {
            if needed.rewrapped > 0 {
                let objects = needed.rewrapped;
                tracing::info!(
                    class,
                    objects,
                    "wrapped keys with the newest encryption key"
                );
            }
            for (key, objects) in needed.objects {
                context.metrics.set_older_key(&class, &key, objects);
                tracing::info!(
                    class,
                    key,
                    objects,
                    "objects that need an older encryption key"
                );
            }
        }
    }

    /// Reports whether keys are rotated in this round.
    fn begins(&mut self, keys: &Keys) -> bool {
        let newest = keys.ids().next().map(str::to_owned);
        let is_settled = newest.is_some() && newest == self.newest;
        self.newest = newest;
        is_settled
    }
}

/// Rotates the keys of the repository of one class.
async fn rotate(context: &Context, class: &SnapshotClass, keys: &Keys) -> Result<Needed, Error> {
    let repository = repository::for_sweeps(context, class, keys.clone()).await?;
    let mut needed = Needed::of(keys);
    for namespace in repository.namespaces().await? {
        if context.settings.namespaces.has(&namespace) {
            needed.add(repository.rewrap(&namespace).await?);
        }
    }
    Ok(needed)
}

impl Needed {
    /// Returns a count of 0 for each older key.
    fn of(keys: &Keys) -> Self {
        Self {
            objects: keys.ids().skip(1).map(|key| (key.to_owned(), 0)).collect(),
            rewrapped: 0,
        }
    }

    fn add(&mut self, rewrapped: Rewrapped) {
        self.rewrapped += rewrapped.objects;
        for (key, objects) in rewrapped.left {
            *self.objects.entry(key).or_default() += objects;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(ids: &[&str]) -> Keys {
        let line = |id: &&str| format!("{id}:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n");
        let lines: String = ids.iter().map(line).collect();
        Keys::parse(&lines).unwrap()
    }

    #[test]
    fn a_rotation_begins_once_two_rounds_have_found_the_same_newest_key() {
        let mut rotation = Rotation::default();
        let mut begins = |ids: &[&str]| rotation.begins(&keys(ids));
        assert!(!begins(&["old"]));
        assert!(begins(&["old"]));
        assert!(!begins(&["new", "old"]), "nodes may not have it yet");
        assert!(begins(&["new", "old"]));
        assert!(begins(&["new"]));
        assert!(!begins(&[]) && !begins(&[]), "nothing is encrypted");
    }

    #[test]
    fn what_namespaces_need_is_counted_for_each_key_but_the_newest() {
        let mut needed = Needed::of(&keys(&["new", "old", "older"]));
        for (objects, key, left) in [(2, "old", 1), (0, "old", 2), (1, "gone", 5)] {
            let left = [(key.to_owned(), left)].into();
            needed.add(Rewrapped { objects, left });
        }
        let expected = [("gone", 5), ("old", 3), ("older", 0)];
        let expected = expected.map(|(key, objects)| (key.to_owned(), objects));
        assert_eq!(needed.objects, expected.into());
        assert_eq!(needed.rewrapped, 3);
    }
}
