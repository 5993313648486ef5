//! A task's own writes to its Pod's snapshots that the watch has not delivered yet.
//!
//! A write names the version that the task has read. The next plan is often made before the watch
//! delivers the last write. Without this memory the apiserver would refuse the writes of that plan.

use std::collections::HashMap;
use std::sync::Arc;

use kube::ResourceExt;
use torpor_api::snapshot::SandboxSnapshot;

/// The snapshots as the apiserver returned them to the last write of each, by UID.
#[derive(Debug, Clone, Default)]
pub(super) struct OwnWrites(HashMap<String, Write>);

#[derive(Debug, Clone)]
struct Write {
    /// The versions that the writes have replaced. The watch may still deliver each of them.
    older: Vec<String>,
    after: Arc<SandboxSnapshot>,
}

impl OwnWrites {
    /// Returns the snapshots that the watch has delivered (`shown`), with those replaced that this
    /// task has overwritten since.
    pub(super) fn over(
        &mut self,
        mut shown: Vec<Arc<SandboxSnapshot>>,
    ) -> Vec<Arc<SandboxSnapshot>> {
        let mut hidden = HashMap::new();
        for snapshot in &mut shown {
            let write = snapshot.uid().and_then(|uid| self.0.remove_entry(&uid));
            // A version that is not in `older` is the last write or a later one.
            let version = snapshot.resource_version();
            let write =
                write.filter(|(_, write)| version.is_some_and(|v| write.older.contains(&v)));
            if let Some((uid, write)) = write {
                *snapshot = write.after.clone();
                hidden.insert(uid, write);
            }
        }
        self.0 = hidden;
        shown
    }

    /// Records a write over `before`. `after`: the new version; none if nothing was written.
    pub(super) fn note(&mut self, before: &SandboxSnapshot, after: Option<SandboxSnapshot>) {
        let Some((uid, after)) = before.uid().zip(after) else {
            return;
        };
        let earlier = self.0.remove(&uid);
        let mut older = earlier.map(|write| write.older).unwrap_or_default();
        older.extend(before.resource_version());
        let after = Arc::new(after);
        self.0.insert(uid, Write { older, after });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn version(number: u32) -> SandboxSnapshot {
        serde_json::from_value(json!({
            "apiVersion": "torpor.dev/v1alpha1", "kind": "SandboxSnapshot",
            "metadata": { "name": "x", "uid": "snap-1", "resourceVersion": number.to_string() },
            "spec": { "sandboxName": "s" },
        }))
        .expect("a SandboxSnapshot")
    }

    /// Returns the version that counts while the watch shows this one.
    fn counts(written: &mut OwnWrites, shown: u32) -> Option<String> {
        let counts = written.over(vec![Arc::new(version(shown))]);
        counts.first().and_then(|one| one.resource_version())
    }

    #[test]
    fn an_own_write_counts_until_the_watch_shows_a_newer_version() {
        let mut written = OwnWrites::default();
        assert_eq!(counts(&mut written, 1).as_deref(), Some("1"));
        written.note(&version(1), None);
        assert_eq!(counts(&mut written, 1).as_deref(), Some("1"), "unwritten");
        written.note(&version(1), Some(version(2)));
        assert_eq!(counts(&mut written, 1).as_deref(), Some("2"));
        // A second write, before the watch shows the first.
        written.note(&version(2), Some(version(3)));
        assert_eq!(counts(&mut written, 1).as_deref(), Some("3"));
        // The watch shows the first, and not yet the second.
        assert_eq!(counts(&mut written, 2).as_deref(), Some("3"));
        assert_eq!(counts(&mut written, 2).as_deref(), Some("3"));
        // A third write, from the version that counts.
        written.note(&version(3), Some(version(5)));
        assert_eq!(counts(&mut written, 3).as_deref(), Some("5"));
        // The watch shows the third write, then the write of another client.
        let mut seen = written.clone();
        assert_eq!(counts(&mut seen, 5).as_deref(), Some("5"));
        assert!(seen.0.is_empty());
        assert_eq!(counts(&mut written, 6).as_deref(), Some("6"));
        assert!(written.0.is_empty());
    }

    #[test]
    fn a_later_write_of_another_client_counts_at_once() {
        let mut written = OwnWrites::default();
        written.note(&version(1), Some(version(2)));
        assert_eq!(counts(&mut written, 4).as_deref(), Some("4"));
        assert!(written.0.is_empty());
    }
}
