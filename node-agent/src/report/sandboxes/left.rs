//! The entries of SandboxNode about images whose Pods are gone. With these entries the controller
//! finds the memory of a Pod whose deletion it has missed.

use std::collections::HashMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use torpor_api::node::SandboxReport;
use torpor_core::ids::ImageId;
use torpor_snapshots::Listed;

use super::board::Board;
use crate::reconcile::node::Node;
use crate::report::bytes::signed;

/// Names in an image's manifest.
#[derive(Debug, Clone, Default)]
struct Names {
    pod: String,
    sandbox: String,
}

impl Names {
    /// Reads the manifest of an image. The names of an unreadable image are empty.
    fn read(node: &Node, image: &Listed) -> Self {
        let found = node.store.image(&image.namespace, &image.id).ok();
        found
            .map(|found| Self {
                pod: found.manifest().pod_name.clone(),
                sandbox: found.manifest().sandbox_name.clone(),
            })
            .unwrap_or_default()
    }
}

/// Images whose Pods are gone, with the names of their manifests, which are read once.
#[derive(Debug, Default)]
pub(super) struct LeftImages {
    names: HashMap<ImageId, Names>,
}

impl LeftImages {
    /// Returns one entry for each Pod that is gone and has left its memory; the Pod that went first
    /// comes first. If the node still has a record of the Pod's sandbox, `reports` has an entry of
    /// the Pod; that entry is moved from `reports` into the result.
    pub(super) fn report(
        &mut self,
        board: &Board,
        node: &Node,
        images: &[Listed],
        reports: &mut Vec<SandboxReport>,
    ) -> Vec<SandboxReport> {
        let mut left = board.left();
        left.sort_by(|(a, left_a), (b, left_b)| (left_a.since, a).cmp(&(left_b.since, b)));
        let by_id: HashMap<&ImageId, &Listed> = images.iter().map(|i| (&i.id, i)).collect();
        self.names
            .retain(|id, _| left.iter().any(|(_, left)| left.image == *id));
        let mut all = Vec::new();
        for (pod, left) in left {
            // An image that was removed meanwhile is not reported.
            let Some(image) = by_id.get(&left.image) else {
                continue;
            };
            let names = self.names.entry(left.image.clone());
            let names = names.or_insert_with(|| Names::read(node, image)).clone();
            let recorded = reports.iter().position(|r| r.pod_uid == pod.as_str());
            let recorded = recorded.map(|at| reports.remove(at)).unwrap_or_default();
            all.push(SandboxReport {
                image_bytes: Some(signed(image.size)),
                image_id: Some(left.image.to_string()),
                namespace: image.namespace.to_string(),
                pod_gone_since: Some(Time(left.since)),
                pod_name: names.pod,
                pod_uid: pod.to_string(),
                reasons: board.reasons(&pod),
                sandbox_name: names.sandbox,
                ..recorded
            });
        }
        all
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write as _;
    use std::sync::Arc;

    use jiff::Timestamp;
    use torpor_core::ids::{Namespace, PodUid};
    use torpor_snapshots::{
        Digest, Fingerprint, ManifestDraft, SaveReason, SavedContainer, SavedName,
    };

    use super::super::board::tests::left;
    use super::*;
    use crate::reconcile::sandbox_index::tests::make;
    use crate::reconcile::steps_for_tests::node_in;
    use crate::report::metrics::Metrics;
    use crate::report::sandboxes::Sandboxes;
    use crate::report::spans::Spans;

    /// Makes a committed image of a Pod of Sandbox `s` in namespace `n`.
    pub(crate) fn image_in(node: &Node, id: &str) -> ImageId {
        image_with(node, id, b"memory")
    }

    /// Makes a committed image with this content.
    pub(crate) fn image_with(node: &Node, id: &str, content: &[u8]) -> ImageId {
        let id = ImageId::parse(id).expect("an image's name");
        let namespace = Namespace::new("n").expect("a name");
        let partial = node.store.begin(&namespace, &id).expect("begun");
        let file = partial.open_file("pages.img").expect("a file");
        let mut file = std::fs::File::from(file);
        file.write_all(content).expect("written");
        let draft = ManifestDraft {
            pod_name: "s-pod".to_owned(),
            sandbox_name: "s".to_owned(),
            reason: SaveReason::Hibernate,
            created_at: Timestamp::UNIX_EPOCH,
            fingerprint: Fingerprint {
                runsc_digest: "blake3:0".to_owned(),
                runsc_version: "v".to_owned(),
                platform: "systrap".to_owned(),
                flags: Vec::new(),
                cpu_features_digest: "blake3:1".to_owned(),
                cpu_features: Vec::new(),
                kernel: "k".to_owned(),
            },
            containers: vec![SavedContainer {
                name: SavedName::Root,
                image_id: String::new(),
                spec_digest: Digest::of(b""),
            }],
            completed: Vec::new(),
            parent: None,
        };
        partial.commit(draft).expect("committed");
        id
    }

    #[test]
    fn memory_whose_pod_is_gone_is_reported_before_all_others_and_with_its_sandbox() {
        let dir = tempfile::tempdir().expect("a directory");
        let node = node_in(dir.path());
        let board = Arc::new(Board::default());
        let metrics = Arc::new(Metrics::new());
        let spans = Arc::new(Spans::new(None));
        let mut sandboxes = Sandboxes::new(metrics, board.clone(), spans);
        let record = make(&node.records, 'a', "here");
        make(&node.records, 'b', "going");
        let ids = ["new.1", "old.1", "going.2"].map(|id| image_in(&node, id));
        let images = node.store.list().expect("listed");
        let pod = |uid: &str| PodUid::new(uid).expect("a UID");
        for (id, since) in ids.iter().zip([30, 10, 20]) {
            board.note(id.pod(), left(&id.to_string(), since, true));
        }
        // The store no longer has this image.
        board.note(&pod("removed"), left("removed.1", 1, true));
        // The agent has just started, and no task has planned for the Pod of this image yet.
        let unseen = image_in(&node, "unseen.1");
        let with_unseen = node.store.list().expect("listed");
        assert!(sandboxes.is_complete(&node, &images));
        assert!(!sandboxes.is_complete(&node, &with_unseen), "{unseen}");
        let reports = sandboxes.report(&node, &images);
        let entries: Vec<_> = reports
            .iter()
            .map(|r| (&*r.pod_uid, r.image_id.as_deref()))
            .collect();
        let expected = [
            ("old", Some("old.1")),
            ("going", Some("going.2")),
            ("new", Some("new.1")),
            ("here", None),
        ];
        assert_eq!(entries, expected);
        let old = &reports[0];
        assert_eq!(
            (&*old.namespace, &*old.pod_name, &*old.sandbox_name),
            ("n", "s-pod", "s")
        );
        assert!(old.image_bytes.is_some_and(|bytes| bytes > 0), "{old:?}");
        let since = old.pod_gone_since.as_ref().map(|time| time.0.as_second());
        assert_eq!(since, Some(10));
        assert_eq!(reports[3].pod_gone_since, None);
        board.forget(&pod("old"));
        node.records.remove_pod(&record.sandbox).expect("removed");
        let reports = sandboxes.report(&node, &images);
        let pods: Vec<_> = reports.iter().map(|r| &*r.pod_uid).collect();
        assert_eq!(pods, ["going", "new"]);
    }
}
