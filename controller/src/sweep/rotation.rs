//! Rotation of the encryption keys of a repository: which older keys are still needed.

use std::collections::BTreeMap;

use kube::ResourceExt;
use torpor_api::SnapshotClass;
use torpor_repository::{Repository, Rewrapped};

use crate::context::Context;

/// Rotation of the keys of one repository, from namespace to namespace.
#[derive(Debug)]
pub(super) struct Rotation {
    /// Objects that still need an older key, for each older key of the file.
    left: BTreeMap<String, u64>,
    rewrapped: u64,
    /// Each namespace so far was examined.
    is_complete: bool,
}

impl Rotation {
    pub(super) fn of(repository: &Repository) -> Self {
        let older = repository.older_keys();
        Self {
            left: older.map(|key| (key.to_owned(), 0)).collect(),
            rewrapped: 0,
            is_complete: true,
        }
    }

    /// Wraps the keys of a namespace's objects, if there is an older key.
    pub(super) async fn go_on(&mut self, repository: &Repository, namespace: &str) {
        if self.left.is_empty() {
            return;
        }
        match repository.rewrap(namespace).await {
            Ok(rewrapped) => self.add(rewrapped),
            Err(error) => {
                self.is_complete = false;
                let error: &dyn std::error::Error = &error;
                tracing::warn!(namespace, error, "cannot rotate the keys of a namespace");
            }
        }
    }

    /// Counts what a namespace still needs. Keys that are not in the file are left out: the images'
    /// own conditions report them.
    fn add(&mut self, rewrapped: Rewrapped) {
        self.rewrapped += rewrapped.objects;
        for (key, objects) in rewrapped.left {
            if let Some(left) = self.left.get_mut(&key) {
                *left += objects;
            }
        }
    }

    /// Reports the older keys in the log and in a metric.
    pub(super) fn report(&self, context: &Context, class: &SnapshotClass) {
        let class = class.name_any();
        if self.rewrapped > 0 {
            let objects = self.rewrapped;
            tracing::info!(
                class,
                objects,
                "wrapped keys with the newest encryption key"
            );
        }
        if !self.is_complete {
            return;
        }
        for (key, objects) in &self.left {
            context.metrics.set_older_key(&class, key, *objects);
            tracing::info!(
                class,
                key,
                objects,
                "objects that need an older encryption key"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_namespaces_need_is_counted_for_each_older_key_of_the_file() {
        let mut rotation = Rotation {
            left: [("old".to_owned(), 0), ("older".to_owned(), 0)].into(),
            rewrapped: 0,
            is_complete: true,
        };
        for (objects, key, left) in [(2, "old", 1), (0, "old", 2), (1, "gone", 5)] {
            let left = [(key.to_owned(), left)].into();
            rotation.add(Rewrapped { objects, left });
        }
        let expected = [("old".to_owned(), 3), ("older".to_owned(), 0)];
        assert_eq!(rotation.left, expected.into());
        assert_eq!(rotation.rewrapped, 3);
    }
}
