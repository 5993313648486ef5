//! An index of the node's sandboxes by Pod.
//!
//! The Pod of a sandbox never changes, so the index reads each record once. An observation
//! of one Pod must not read the records of all sandboxes.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use torpor_core::ids::{ImageId, PodUid, SandboxId};
use torpor_records::{PodRecord, Records, SandboxState};

/// The entries of the sandboxes whose records were read so far.
#[derive(Debug, Default)]
pub(crate) struct SandboxIndex {
    sandboxes: Mutex<HashMap<SandboxId, Entry>>,
}

#[derive(Debug)]
struct Entry {
    pod: PodUid,
    /// The sandbox runs, or has slept. From then on it is restored only from images of its
    /// own Pod: an image of another Pod is taken only by a new sandbox that was made for it.
    settled: bool,
}

impl SandboxIndex {
    /// Returns the entries of the sandboxes that exist now. Directories that are being made
    /// or removed are skipped. If the sandboxes cannot be listed, the entries stay as they were.
    fn now(&self, records: &Records) -> MutexGuard<'_, HashMap<SandboxId, Entry>> {
        let mut known = self
            .sandboxes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let Ok(there) = records.sandboxes() else {
            return known;
        };
        let there: HashSet<SandboxId> = there.into_iter().collect();
        known.retain(|sandbox, _| there.contains(sandbox));
        for sandbox in there {
            if !known.contains_key(&sandbox)
                && let Ok(record) = records.pod(&sandbox)
            {
                let entry = Entry {
                    pod: record.pod_uid,
                    settled: false,
                };
                known.insert(sandbox, entry);
            }
        }
        known
    }

    /// Returns the Pods of the node's sandboxes.
    pub(crate) fn pods(&self, records: &Records) -> BTreeSet<PodUid> {
        let known = self.now(records);
        known.values().map(|entry| entry.pod.clone()).collect()
    }

    /// Returns the newest sandbox of a Pod. After a crash the kubelet may have made
    /// another sandbox, while the record of the old one stays until it is deleted.
    pub(crate) fn sandbox_of(&self, records: &Records, pod: &PodUid) -> Option<PodRecord> {
        let mut ours: Vec<SandboxId> = self
            .now(records)
            .iter()
            .filter(|(_, entry)| entry.pod == *pod)
            .map(|(sandbox, _)| sandbox.clone())
            .collect();
        if ours.len() > 1 {
            ours.sort_by_cached_key(|sandbox| Reverse(records.made_at(sandbox)));
        }
        ours.iter().find_map(|sandbox| records.pod(sandbox).ok())
    }

    /// Returns the Pod's images from which sandboxes of this node are being restored, be
    /// they the Pod's own sandboxes or another Pod's.
    pub(crate) fn being_restored(&self, records: &Records, pod: &PodUid) -> BTreeSet<ImageId> {
        let mut images = BTreeSet::new();
        for (sandbox, entry) in self.now(records).iter_mut() {
            if entry.settled && entry.pod != *pod {
                continue;
            }
            match records.state(sandbox) {
                Ok(SandboxState::Restoring { image, .. }) if image.pod() == pod => {
                    images.insert(image);
                }
                Ok(SandboxState::Running) => entry.settled = true,
                Ok(SandboxState::Hibernated { image, .. }) => {
                    entry.settled = image.pod() == &entry.pod
                }
                Ok(SandboxState::Restoring { .. }) | Err(_) => {}
            }
        }
        images
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::PathBuf;

    use torpor_core::ids::Namespace;
    use torpor_records::Addresses;

    use super::*;
    use crate::reconcile::steps_for_tests::node_in;

    pub(crate) fn records() -> (tempfile::TempDir, Records) {
        let dir = tempfile::tempdir().expect("a directory");
        let records = node_in(dir.path()).records;
        (dir, records)
    }

    pub(crate) fn sandbox(id: char) -> SandboxId {
        SandboxId::try_from(id.to_string().repeat(64)).expect("an id")
    }

    fn pod(uid: &str) -> PodUid {
        PodUid::new(uid).expect("a uid")
    }

    /// Returns the record of a Pod without a network.
    pub(crate) fn record(id: char, uid: &str) -> PodRecord {
        PodRecord {
            sandbox: sandbox(id),
            pod_uid: pod(uid),
            namespace: Namespace::new("default").expect("a namespace"),
            name: uid.to_owned(),
            runsc: PathBuf::new(),
            runsc_digest: String::new(),
            network_namespace: None,
            addresses: Addresses::default(),
            cgroup: PathBuf::new(),
            volumes: Vec::new(),
            cold_start_on_failure: false,
        }
    }

    pub(crate) fn make(records: &Records, id: char, uid: &str) -> PodRecord {
        let record = record(id, uid);
        records.create_pod_dir(&record.sandbox).expect("made");
        records.write_pod(&record).expect("written");
        record
    }

    #[test]
    fn a_sandbox_is_known_while_its_record_exists_and_has_its_current_content() {
        let (_dir, records) = records();
        let known = SandboxIndex::default();
        assert_eq!(known.pods(&records), BTreeSet::new());
        let mut first = make(&records, 'a', "pod-1");
        let other = make(&records, 'b', "pod-2");
        let being_made = sandbox('c');
        records.create_pod_dir(&being_made).expect("made");
        let sandbox_of = |uid| known.sandbox_of(&records, &pod(uid));
        assert_eq!(sandbox_of("pod-1").as_ref(), Some(&first));
        assert_eq!(sandbox_of("pod-2").as_ref(), Some(&other));
        assert_eq!(sandbox_of("pod-3"), None);
        // A restored sandbox has the runsc build of its image.
        first.runsc = "/runsc".into();
        records.write_pod(&first).expect("written");
        assert_eq!(sandbox_of("pod-1").as_ref(), Some(&first));
        let third = make(&records, 'c', "pod-3");
        assert_eq!(sandbox_of("pod-3").as_ref(), Some(&third));
        assert_eq!(known.pods(&records).len(), 3);
        records.remove_pod(&first.sandbox).expect("removed");
        assert_eq!(sandbox_of("pod-1"), None);
        assert_eq!(known.pods(&records), [pod("pod-2"), pod("pod-3")].into());
    }

    #[test]
    fn the_newer_of_two_sandboxes_of_a_pod_is_used() {
        let (_dir, records) = records();
        let known = SandboxIndex::default();
        let old = make(&records, 'b', "pod-1");
        let file = records.pod_dir(&old.sandbox).join("pod.json");
        let hour = std::time::Duration::from_secs(3600);
        let an_hour_ago = std::time::SystemTime::now() - hour;
        let file = std::fs::File::options()
            .append(true)
            .open(file)
            .expect("opened");
        file.set_modified(an_hour_ago).expect("set");
        let new = make(&records, 'a', "pod-1");
        let found = || known.sandbox_of(&records, &pod("pod-1"));
        assert_eq!(found(), Some(new.clone()));
        records.remove_pod(&new.sandbox).expect("removed");
        assert_eq!(found(), Some(old));
    }

    #[test]
    fn an_image_counts_as_being_restored_by_its_own_pod_and_by_another_pod() {
        let (_dir, records) = records();
        let known = SandboxIndex::default();
        let image = |uid: &str| ImageId::parse(&format!("{uid}.1")).expect("an image");
        let (own, taker) = (make(&records, 'a', "pod-1"), make(&records, 'b', "pod-2"));
        let restoring = |image| SandboxState::Restoring {
            image,
            started: Vec::new(),
        };
        let set = |record: &PodRecord, state: &SandboxState| {
            records
                .write_state(&record.sandbox, state)
                .expect("written");
        };
        let of = |uid: &str| known.being_restored(&records, &pod(uid));
        assert_eq!(of("pod-1"), BTreeSet::new(), "no state yet");
        set(&taker, &restoring(image("pod-1")));
        assert_eq!(of("pod-1"), [image("pod-1")].into());
        assert_eq!(of("pod-2"), BTreeSet::new());
        set(&taker, &SandboxState::Running);
        assert_eq!(of("pod-1"), BTreeSet::new());
        for _ in 0..2 {
            let asleep = SandboxState::Hibernated {
                image: image("pod-1"),
                unstarted: None,
            };
            set(&own, &asleep);
            assert_eq!(of("pod-1"), BTreeSet::new());
            set(&own, &restoring(image("pod-1")));
            assert_eq!(of("pod-1"), [image("pod-1")].into());
        }
    }
}
